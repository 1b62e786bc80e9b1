//! The bundled model, used if no file is named.
//!
//! Only `main.rs` embeds its bytes, so that test programs stay small.

/// A model embedded in the executable.
#[derive(Clone, Copy)]
pub struct Bundled {
    /// Model id.
    pub name: &'static str,
    /// GGUF file.
    pub gguf: &'static [u8],
    /// GGUF file of its draft model.
    pub draft: &'static [u8],
}

/// Logged whenever the bundled model is used.
pub const BUNDLED_NOTE: &str = "no model was named, so this is the bundled one: a toy of 18 million weights for \
    trying things out, whose answers are not to be relied on; name a GGUF file, or a model \
    to pull such as unsloth/Qwen3.5-4B-GGUF:Q4_K_M, for real answers";
