//! Whether a long prompt is compressed.

/// When the contents of a prompt's messages are shortened before prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CompressionMode {
    /// Never.
    #[default]
    Off,
    /// If the prompt is long and nothing in the request is against it.
    Auto,
    /// Whenever there is something to shorten.
    Always,
}

impl CompressionMode {
    /// All modes.
    pub const ALL: [CompressionMode; 3] = [
        CompressionMode::Off,
        CompressionMode::Auto,
        CompressionMode::Always,
    ];

    /// The name in requests and settings.
    pub fn name(self) -> &'static str {
        match self {
            CompressionMode::Off => "off",
            CompressionMode::Auto => "auto",
            CompressionMode::Always => "always",
        }
    }
}
