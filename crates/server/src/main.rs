//! The `hearth` executable; all code is in the library for tests.

use std::process::ExitCode;

use server::open::bundled::Bundled;

/// Provenance: `models/README.md`.
const EMBER: Bundled = Bundled {
    name: "ember",
    gguf: include_bytes!("../../../models/ember/ember.gguf"),
    draft: include_bytes!("../../../models/ember/ember-draft.gguf"),
};

fn main() -> ExitCode {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    allocator::return_freed_memory();
    server::commands::main(EMBER)
}

/// How glibc's allocator returns memory. By itself it keeps most of what a load has freed; the
/// allocators with pages per thread keep more, since other threads free what the engine allocates.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod allocator {
    use std::ffi::c_int;
    use std::thread;
    use std::time::Duration;

    /// Buffers from this size on, in bytes, have pages of their own, which return to the system
    /// when the buffer is freed. The state of one layer of one sequence is larger.
    ///
    /// Unless it is set, glibc raises the limit with the largest buffer freed, and the states of
    /// sequences then lie between smaller buffers that keep their memory.
    const LARGE_BUFFER: c_int = 128 << 10;
    const M_MMAP_THRESHOLD: c_int = -3;
    /// Time between two returns of free pages that lie between smaller buffers.
    const TRIM_INTERVAL: Duration = Duration::from_secs(20);

    unsafe extern "C" {
        safe fn mallopt(parameter: c_int, value: c_int) -> c_int;
        safe fn malloc_trim(pad: usize) -> c_int;
    }

    /// Sets the limit of large buffers, and returns free pages from now on.
    pub(crate) fn return_freed_memory() {
        mallopt(M_MMAP_THRESHOLD, LARGE_BUFFER);
        let trim = || {
            loop {
                thread::sleep(TRIM_INTERVAL);
                malloc_trim(0);
            }
        };
        let thread = thread::Builder::new().name("memory".to_owned());
        // Without the thread the process keeps more memory than it needs, and works.
        let _ = thread.spawn(trim);
    }
}
