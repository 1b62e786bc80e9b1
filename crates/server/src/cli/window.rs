//! Flags of the attention window.

use clap::Args;
use clap::builder::FalseyValueParser;
use contract::AttentionWindow;

/// The attention window of decode steps.
#[derive(Debug, Clone, Args)]
pub struct WindowArgs {
    /// Sliding window of attention in decode steps, in tokens, at least 64; 0 for none. Older
    /// tokens are masked, the system prompt too. Requests with tools are exempt.
    #[arg(
        long,
        alias = "fa-window",
        env = "HEARTH_ATTENTION_WINDOW",
        value_name = "TOKENS",
        default_value_t = 0,
        value_parser = tokens
    )]
    pub attention_window: usize,
    /// Attention sinks: tokens at the start of the context that the window never masks.
    #[arg(
        long,
        alias = "fa-window-sinks",
        env = "HEARTH_ATTENTION_WINDOW_SINKS",
        value_name = "TOKENS",
        default_value_t = 0
    )]
    pub attention_window_sinks: usize,
    /// Apply the window to requests with tools too.
    #[arg(
        long,
        alias = "fa-window-force",
        env = "HEARTH_ATTENTION_WINDOW_FORCE",
        value_parser = FalseyValueParser::new()
    )]
    pub attention_window_force: bool,
}

/// Parses the tokens of a window: 0 for none, or at least [`AttentionWindow::MIN_TOKENS`].
pub fn tokens(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Ok(0),
        Ok(tokens) if tokens >= AttentionWindow::MIN_TOKENS => Ok(tokens),
        Ok(_) => Err(format!(
            "use at least {} tokens, or 0 for no window",
            AttentionWindow::MIN_TOKENS
        )),
        Err(_) => Err("use a whole number of tokens".to_owned()),
    }
}
