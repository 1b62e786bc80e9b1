//! Prefix matches in text that is still growing.

/// Whether a text starts with a word, as far as the text goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PrefixMatch {
    Yes,
    /// The text is a proper prefix of the word.
    Partial,
    No,
}

pub(super) fn match_prefix(text: &str, word: &str) -> PrefixMatch {
    if text.starts_with(word) {
        PrefixMatch::Yes
    } else if word.starts_with(text) {
        PrefixMatch::Partial
    } else {
        PrefixMatch::No
    }
}

/// The best match over several words.
pub(super) fn match_any_prefix(text: &str, words: &[&str]) -> PrefixMatch {
    let mut best = PrefixMatch::No;
    for word in words {
        match match_prefix(text, word) {
            PrefixMatch::Yes => return PrefixMatch::Yes,
            PrefixMatch::Partial => best = PrefixMatch::Partial,
            PrefixMatch::No => {}
        }
    }
    best
}

/// Bytes of blanks at the start of `text`.
pub(super) fn leading_blank_len(text: &str) -> usize {
    text.len() - text.trim_start().len()
}
