//! Settings of prompt compression.

use chat::request::CompressionMode;
use compress::KeepRatio;
use contract::ScoreSettings;

/// Prompt compression: when, how much, and how prompts are scored.
#[derive(Debug, Clone, PartialEq)]
pub struct CompressionSettings {
    /// When a request does not say.
    pub mode: CompressionMode,
    /// The shortest prompt that `auto` compresses, in tokens.
    pub threshold: usize,
    /// Share of the tokens of message contents to keep.
    pub keep: KeepRatio,
    /// Lets the share of each session follow how well its drafts are accepted.
    pub keep_by_session: bool,
    /// Compresses earlier messages of continued conversations one by one, and leaves first turns
    /// whole.
    pub ages: bool,
    /// How prompts are scored.
    pub score: ScoreSettings,
    /// Logs the time of each stage.
    pub profile: bool,
}

impl Default for CompressionSettings {
    fn default() -> CompressionSettings {
        CompressionSettings {
            mode: CompressionMode::Off,
            threshold: 32_000,
            keep: KeepRatio::Flat(0.05),
            keep_by_session: false,
            ages: false,
            score: ScoreSettings::default(),
            profile: false,
        }
    }
}
