//! Flags about how far back attention looks.

use clap::Args;
use clap::builder::FalseyValueParser;
use contract::AttentionWindow;

/// How far back attention looks while a reply is written.
#[derive(Debug, Clone, Args)]
pub struct WindowArgs {
    /// Tokens before a new one that attention sees while a reply is written, at least 64; 0 for all. It hides what is
    /// older, the system prompt too; requests with tools see everything all the same.
    #[arg(
        long,
        env = "HEARTH_FA_WINDOW",
        value_name = "TOKENS",
        default_value_t = 0,
        value_parser = tokens
    )]
    pub fa_window: usize,
    /// Tokens at the beginning of the context that are seen whatever the window.
    #[arg(
        long,
        env = "HEARTH_FA_WINDOW_SINKS",
        value_name = "TOKENS",
        default_value_t = 0
    )]
    pub fa_window_sinks: usize,
    /// Hold requests with tools to the window too.
    #[arg(long, env = "HEARTH_FA_WINDOW_FORCE", value_parser = FalseyValueParser::new())]
    pub fa_window_force: bool,
}

/// Tokens of a window from the command line: 0 for all, or at least [`AttentionWindow::MIN_TOKENS`].
pub fn tokens(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Ok(0),
        Ok(tokens) if tokens >= AttentionWindow::MIN_TOKENS => Ok(tokens),
        Ok(_) => Err(format!(
            "a window has at least {} tokens, or 0 for everything",
            AttentionWindow::MIN_TOKENS
        )),
        Err(_) => Err("not a number of tokens".to_owned()),
    }
}
