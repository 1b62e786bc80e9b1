//! Suggestions for unknown flags: only flags that the help shows.

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};
use strsim::levenshtein;

/// The largest edit distance of a suggestion.
const NEAR: usize = 3;

/// The error with a suggestion that the help of `command` shows, or with none.
pub(super) fn only_shown(mut error: clap::Error, command: &Command) -> clap::Error {
    let typed = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(typed)) => typed.clone(),
        _ => return error,
    };
    if error.get(ContextKind::SuggestedArg).is_none() {
        return error;
    }
    error.remove(ContextKind::SuggestedArg);
    let typed = typed.trim_start_matches('-');
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let nearest = shown
        .filter_map(Arg::get_long)
        .min_by_key(|long| levenshtein(typed, long))
        .filter(|long| long.starts_with(typed) || levenshtein(typed, long) <= NEAR);
    if let Some(long) = nearest {
        let suggested = ContextValue::String(format!("--{long}"));
        error.insert(ContextKind::SuggestedArg, suggested);
    }
    error
}
