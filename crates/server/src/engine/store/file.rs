//! File format of one stored state.
//!
//! ```text
//! magic "HRTHSTOR" | version u32 | 0 u32 | tokens u64 | payload bytes u64        32 bytes
//! blake3 of the 32 bytes and of the token ids                                    32 bytes
//! token ids u32 each, zeros up to a multiple of 4,096
//! payload: a snapshot as the runner exports it, sections with checksums (contract::snapshot)
//! ```
//! Little-endian; the file has exactly this length. It holds a prompt, so only its owner may read
//! it.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use contract::snapshot::ReadAt;
use contract::{DetachedSnapshot, DeviceError, TokenId};

use crate::guarded;

const MAGIC: &[u8; 8] = b"HRTHSTOR";
/// Changes with the meaning of any byte.
const VERSION: u32 = 1;
const FIXED: usize = 32;
const HASH: usize = 32;
/// Alignment of the payload, for mapping or direct reads.
const PAGE: usize = 4096;
/// Upper bound; a larger count means corruption.
const MAX_TOKENS: u64 = 1 << 24;

/// Extension of a complete file.
pub const STATE_EXT: &str = "state";
/// Extension of a file being written.
pub const PART_EXT: &str = "part";

/// File size in bytes.
pub fn size(n_tokens: usize, payload_bytes: u64) -> u64 {
    head_size(n_tokens) as u64 + payload_bytes
}

fn head_size(n_tokens: usize) -> usize {
    (FIXED + HASH + 4 * n_tokens).next_multiple_of(PAGE)
}

/// File name of these tokens.
pub fn name(tokens: &[TokenId]) -> String {
    let hash = blake3::hash(&ids(tokens));
    format!("{}.{STATE_EXT}", &hash.to_hex()[..32])
}

/// Writes a file atomically and durably: data and name are synced when this returns.
///
/// # Errors
/// [`DeviceError::SnapshotIo`] from the disk, others from the device that gives the payload.
pub fn write(
    dir: &Path,
    tokens: &[TokenId],
    payload: &mut dyn DetachedSnapshot,
) -> Result<PathBuf, DeviceError> {
    match try_write(dir, tokens, payload) {
        // Another process may remove a part file before it is locked.
        Err(DeviceError::SnapshotIo(error)) if error.kind() == io::ErrorKind::NotFound => {
            try_write(dir, tokens, payload)
        }
        written => written,
    }
}

fn try_write(
    dir: &Path,
    tokens: &[TokenId],
    payload: &mut dyn DetachedSnapshot,
) -> Result<PathBuf, DeviceError> {
    let path = dir.join(name(tokens));
    // Mode 0600; removed on drop unless it is persisted.
    let mut part = tempfile::Builder::new()
        .prefix("")
        .suffix(&format!(".{PART_EXT}"))
        .tempfile_in(dir)?;
    part.as_file().lock()?;
    write_contents(part.as_file_mut(), tokens, payload)?;
    // The handle stays locked until the rename is done, so that no process takes it for an orphan.
    let file = part.persist(&path).map_err(|error| error.error)?;
    drop(file);
    File::open(dir)?.sync_all()?;
    Ok(path)
}

fn write_contents(
    file: &mut File,
    tokens: &[TokenId],
    payload: &mut dyn DetachedSnapshot,
) -> Result<(), DeviceError> {
    let mut head = fixed(tokens.len(), payload.bytes()).to_vec();
    let ids = ids(tokens);
    head.extend_from_slice(&head_hash(&head, &ids));
    head.extend_from_slice(&ids);
    head.resize(head_size(tokens.len()), 0);
    file.write_all(&head)?;
    payload.write(file)?;
    if file.stream_position()? != size(tokens.len(), payload.bytes()) {
        let error = damaged("the snapshot's length differs from the announced length");
        return Err(error.into());
    }
    file.sync_all()?;
    Ok(())
}

/// Tokens of a file with a valid header and length.
pub fn tokens(path: &Path) -> io::Result<Vec<TokenId>> {
    Ok(read_head(path)?.1)
}

/// Payload of a file that must hold exactly these tokens.
pub fn open(path: &Path, expected: &[TokenId]) -> io::Result<Payload> {
    let (file, tokens, length) = read_head(path)?;
    if tokens != expected {
        return Err(damaged("it holds other tokens than it did"));
    }
    Ok(Payload {
        file,
        begin: head_size(tokens.len()) as u64,
        length,
    })
}

/// Snapshot within a file; it stays readable after the file is removed.
#[derive(Debug)]
pub struct Payload {
    file: File,
    /// Where it begins in the file.
    begin: u64,
    length: u64,
}

impl ReadAt for Payload {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        if at.saturating_add(into.len() as u64) > self.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read_exact_at(&self.file, into, self.begin + at)
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, into: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut into: &mut [u8], mut at: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !into.is_empty() {
        match file.seek_read(into, at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                into = &mut into[n..];
                at += n as u64;
            }
        }
    }
    Ok(())
}

/// `(file, tokens, payload bytes)`.
fn read_head(path: &Path) -> io::Result<(File, Vec<TokenId>, u64)> {
    let mut file = guarded::open(path, false)?;
    let length = file.metadata()?.len();
    let mut start = [0; FIXED + HASH];
    file.read_exact(&mut start)?;
    let (fixed, hash) = start.split_at(FIXED);
    let word = |at: usize| u64::from_le_bytes(fixed[at..at + 8].try_into().expect("eight bytes"));
    if &fixed[..8] != MAGIC || word(8) != u64::from(VERSION) {
        return Err(damaged("it does not begin as a state of this version does"));
    }
    let (n_tokens, payload) = (word(16), word(24));
    if n_tokens > MAX_TOKENS
        || length != (head_size(n_tokens as usize) as u64).saturating_add(payload)
    {
        return Err(damaged("its length is not what its beginning says"));
    }
    let mut ids = vec![0; 4 * n_tokens as usize];
    file.read_exact(&mut ids)?;
    if head_hash(fixed, &ids) != hash {
        return Err(damaged("its tokens are damaged"));
    }
    let ids = ids.chunks_exact(4);
    let tokens = ids.map(|id| TokenId(u32::from_le_bytes([id[0], id[1], id[2], id[3]])));
    Ok((file, tokens.collect(), payload))
}

fn fixed(n_tokens: usize, payload: u64) -> [u8; FIXED] {
    let mut bytes = [0; FIXED];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&u64::from(VERSION).to_le_bytes());
    bytes[16..24].copy_from_slice(&(n_tokens as u64).to_le_bytes());
    bytes[24..].copy_from_slice(&payload.to_le_bytes());
    bytes
}

fn head_hash(fixed: &[u8], ids: &[u8]) -> [u8; HASH] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(fixed).update(ids);
    *hasher.finalize().as_bytes()
}

fn ids(tokens: &[TokenId]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|token| token.0.to_le_bytes())
        .collect()
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
