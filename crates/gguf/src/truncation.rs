//! Files that are shortened while they are mapped.
//!
//! Reading a lost page of a map raises `SIGBUS`, which ends a process without a word. A process
//! that calls [`watch_truncation`] ends with a message and [`TRUNCATED_EXIT`] instead, or reads
//! zeros and finds the file in [`truncated_file`].

#![allow(
    unsafe_code,
    reason = "only a signal handler learns of a lost page, and only a map replaces it"
)]

use std::mem;
use std::path::Path;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Exit status after a mapped file was shortened: `EX_IOERR` of `sysexits.h`.
pub const TRUNCATED_EXIT: u8 = 74;

/// What reading a lost page of a mapped file does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnTruncation {
    /// Writes a message to standard error and ends the process with [`TRUNCATED_EXIT`].
    EndProcess,
    /// Yields zeros, here and in the rest of the map. The reader asks [`truncated_file`] before it
    /// uses what it has read.
    ReadZeros,
}

/// The most maps at a time that are watched; further ones behave as without a watch.
const MAX_MAPS: usize = 512;
/// Start of a slot that is being filled. No map begins here.
const CLAIMED: usize = 1;

/// The address range of one map. A start of 0 means that the slot is free.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    /// The file's name. Never freed, because the handler may be reading it.
    file: AtomicPtr<String>,
}

static SLOTS: [Slot; MAX_MAPS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        file: AtomicPtr::new(null_mut()),
    }
}; MAX_MAPS];
/// Whether lost pages are read as zeros.
static READS_ZEROS: AtomicBool = AtomicBool::new(false);
/// Bytes of a page.
static PAGE: AtomicUsize = AtomicUsize::new(4096);
/// The name of the first file that was found shortened.
static TRUNCATED: AtomicPtr<String> = AtomicPtr::new(null_mut());

/// From now on, handles the loss of pages of mapped files. Other causes of `SIGBUS` end the process
/// as before.
pub fn watch_truncation(what: OnTruncation) {
    READS_ZEROS.store(what == OnTruncation::ReadZeros, Ordering::SeqCst);
    // SAFETY: asks for a constant of the system.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    if let Ok(page) = usize::try_from(page) {
        PAGE.store(page, Ordering::SeqCst);
    }
    // SAFETY: a `sigaction` of zeros is a valid one without a mask. The handler has the type that
    // SA_SIGINFO requires, and calls only functions that a signal handler may call.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            on_sigbus;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const action, null_mut());
    }
}

/// The file that was found shortened with [`OnTruncation::ReadZeros`], if one was.
pub fn truncated_file() -> Option<&'static str> {
    let file = TRUNCATED.load(Ordering::SeqCst);
    // SAFETY: names are never freed.
    unsafe { file.as_ref() }.map(String::as_str)
}

/// A watched map; dropping it ends the watch, and comes before the map's own end.
#[derive(Debug)]
pub(crate) struct WatchedMap {
    /// The slot; `None` if all were taken.
    slot: Option<usize>,
}

impl WatchedMap {
    /// Watches the bytes of a map of the file at `path`.
    pub(crate) fn new(path: &Path, map: &[u8]) -> WatchedMap {
        let start = map.as_ptr().addr();
        let claim = |slot: &Slot| {
            let free = &slot.start;
            let claimed = free.compare_exchange(0, CLAIMED, Ordering::SeqCst, Ordering::SeqCst);
            claimed.is_ok()
        };
        let slot = SLOTS.iter().position(claim);
        if let Some(at) = slot {
            let slot = &SLOTS[at];
            let name = Box::leak(Box::new(path.display().to_string()));
            slot.file.store(name, Ordering::SeqCst);
            slot.end.store(start + map.len(), Ordering::SeqCst);
            slot.start.store(start, Ordering::SeqCst);
        }
        WatchedMap { slot }
    }
}

impl Drop for WatchedMap {
    fn drop(&mut self) {
        if let Some(at) = self.slot {
            SLOTS[at].start.store(0, Ordering::SeqCst);
        }
    }
}

/// The slot whose map holds an address.
fn slot_of(address: usize) -> Option<&'static Slot> {
    SLOTS.iter().find(|slot| {
        let start = slot.start.load(Ordering::SeqCst);
        start > CLAIMED && (start..slot.end.load(Ordering::SeqCst)).contains(&address)
    })
}

/// Allocates nothing and takes no lock: it runs in the middle of any instruction that reads.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system passes a valid description.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    let slot = if code == libc::BUS_ADRERR {
        slot_of(address)
    } else {
        None
    };
    let Some(slot) = slot else {
        // SAFETY: a signal handler may call `signal`. The instruction runs again and ends the
        // process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    };
    let file = slot.file.load(Ordering::SeqCst);
    if READS_ZEROS.load(Ordering::SeqCst) && replace_by_zeros(address, slot) {
        TRUNCATED.store(file, Ordering::SeqCst);
        return;
    }
    // SAFETY: names are never freed; a signal handler may call `write` and `_exit`.
    unsafe {
        let name = file.as_ref().map_or("a model file", String::as_str);
        for text in [
            "error: ",
            name,
            ": the file was shortened while it was read\n",
        ] {
            libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        }
        libc::_exit(i32::from(TRUNCATED_EXIT))
    }
}

/// Maps zeros from the page of `address` to the end of the map; `false` if the system refuses.
fn replace_by_zeros(address: usize, slot: &Slot) -> bool {
    let page = PAGE.load(Ordering::SeqCst);
    let from = address & !(page - 1);
    let end = slot.end.load(Ordering::SeqCst).next_multiple_of(page);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range lies in a map of ours that is being read, so it is in use and only its
    // content changes. Its owner unmaps the new pages with the rest.
    let mapped = unsafe {
        let at = without_provenance_mut(from);
        libc::mmap(at, end - from, libc::PROT_READ, flags, -1, 0)
    };
    mapped != libc::MAP_FAILED
}
