//! The model that is run when no file is named.
//!
//! Its bytes are put into the executable by `main.rs` alone, so that test programs stay small.

/// A model in memory, as the executable carries it.
#[derive(Clone, Copy)]
pub struct Bundled {
    /// The id it is served under.
    pub name: &'static str,
    /// A whole GGUF file.
    pub gguf: &'static [u8],
    /// A whole GGUF file of its draft.
    pub draft: &'static [u8],
}

/// Told whenever the bundled model stands in for a real one.
pub const BUNDLED_NOTE: &str = "no model was named, so this is the bundled one: a toy of 18 million weights for \
    trying things out, whose answers are not to be relied on; name a GGUF file of Qwen3.5, Qwen3.6 or Qwen3 for \
    real answers, or write one of real size with `hearth synth qwen3.5-0.8b:q4_k_m model.gguf`";
