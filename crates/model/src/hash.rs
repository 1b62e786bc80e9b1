//! Identity of a model's weights and shape, so that saved states of another model never match.

use contract::ModelHash;
use gguf::GgufFile;

/// Bytes sampled at the start, the middle and the end of every tensor.
const SAMPLE: usize = 4096;

/// Hashes (BLAKE3) every tensor's name, type, shape and three samples of its bytes.
///
/// Metadata other than the architecture is left out, because a changed template or name does not change
/// what a saved state means. Reading three pages a tensor keeps this at milliseconds for any file.
pub(crate) fn of(architecture: &str, file: &GgufFile) -> ModelHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(architecture.as_bytes());
    for tensor in file.tensors() {
        hasher.update(tensor.name().as_bytes());
        hasher.update(tensor.ty().to_string().as_bytes());
        for dim in tensor.dims() {
            hasher.update(&dim.to_le_bytes());
        }
        let bytes = file.data(tensor);
        let last = bytes.len().saturating_sub(SAMPLE);
        for start in [0, last / 2, last] {
            hasher.update(&bytes[start..(start + SAMPLE).min(bytes.len())]);
        }
    }
    let mut id = [0; 16];
    id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    ModelHash(id)
}
