//! The hash that identifies a model, which snapshots must match.

use contract::ModelHash;
use gguf::GgufFile;

/// Changed whenever the hashed data changes, so that older snapshots never match.
const DOMAIN: &str = "hearth model identity 1";
/// Bytes of each end of a tensor that are hashed.
const SAMPLE: usize = 4096;

/// The first 16 bytes of a BLAKE3 hash over every file's head (metadata and tensor directory), and
/// over the first and last 4096 bytes of every tensor.
///
/// Hashing every byte of a large file would take seconds at each start. Training and quantising
/// change every block of a tensor, so different models differ in the hashed bytes.
pub(crate) fn model_hash(file: &GgufFile) -> ModelHash {
    let mut hasher = blake3::Hasher::new_derive_key(DOMAIN);
    for part in 0..file.n_parts() {
        let head = file.head(part);
        hasher.update(&(head.len() as u64).to_le_bytes());
        hasher.update(head);
    }
    for tensor in file.tensors() {
        let data = file.data(tensor);
        let (front, back) = data.split_at(data.len().min(SAMPLE));
        hasher.update(front);
        hasher.update(&back[back.len().saturating_sub(SAMPLE)..]);
    }
    first_16(&hasher)
}

/// The same hash for tensors outside a GGUF file: over a common text, and each tensor's name, shape
/// and both ends.
pub(crate) fn bytes_hash<'a>(
    text: &[u8],
    tensors: impl Iterator<Item = (String, &'a [u8], &'a [u8])>,
) -> ModelHash {
    let mut hasher = blake3::Hasher::new_derive_key(DOMAIN);
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text);
    for (about, front, back) in tensors {
        hasher.update(about.as_bytes());
        hasher.update(front);
        hasher.update(back);
    }
    first_16(&hasher)
}

/// The hash of a file that is read in one of several ways.
pub(crate) fn combined(hash: ModelHash, reading: &[u8]) -> ModelHash {
    let mut hasher = blake3::Hasher::new_derive_key(DOMAIN);
    hasher.update(&hash.0);
    hasher.update(reading);
    first_16(&hasher)
}

fn first_16(hasher: &blake3::Hasher) -> ModelHash {
    let mut hash = [0; 16];
    hash.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    ModelHash(hash)
}
