//! Real models of other people: token ids, perplexity, and answers over HTTP.
//!
//! `harness/weights/fetch.py` fetches the files. Where they are missing, these tests print SKIPPED
//! and pass.

mod answers;
mod perplexity;
mod token_ids;

use std::path::PathBuf;

/// SmolLM2 135M Instruct, architecture llama.
const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// Gemma 3 270M, a base model without a chat template.
const GEMMA3: &str = "gemma-3-270m-q4_k_m.gguf";

/// The file of a model in the cache of `harness/weights/fetch.py`, if it is there.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
#[expect(
    clippy::disallowed_methods,
    reason = "the cache is where the script puts it"
)]
fn weights(file: &str) -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")))?;
    let path = cache.join("hearth-tests").join(file);
    if !path.exists() {
        let path = path.display();
        eprintln!("SKIPPED: {path} is missing; run python3 harness/weights/fetch.py");
        return None;
    }
    Some(path)
}
