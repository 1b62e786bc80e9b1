//! Boundaries between reasoning and content.

use crate::stop::partial_match_len;

/// How a reply starts if the prompt did not open reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplyStart {
    /// Reasoning, after this many bytes of blanks and tag.
    Thinking {
        /// Bytes to drop.
        tag: usize,
    },
    /// Content.
    Content,
    /// The text is too short to decide.
    Undecided,
}

/// Classifies the start of a reply; blanks before the tag are ignored.
pub(crate) fn classify_start(text: &str, open: &str) -> ReplyStart {
    let blank = text.len() - text.trim_start().len();
    let rest = &text[blank..];
    if rest.starts_with(open) {
        ReplyStart::Thinking {
            tag: blank + open.len(),
        }
    } else if open.starts_with(rest) {
        ReplyStart::Undecided
    } else {
        ReplyStart::Content
    }
}

/// Length of the newline dropped after the opening tag; `None` if more text is needed.
pub(crate) fn leading_newline_len(text: &str) -> Option<usize> {
    match text {
        "" | "\r" => None,
        text if text.starts_with("\r\n") => Some(2),
        text if text.starts_with('\n') => Some(1),
        _ => Some(0),
    }
}

/// Length of the blank lines dropped after reasoning; `None` if the text is all blank. The
/// indentation of the first line with text stays.
pub(crate) fn leading_blank_lines_len(text: &str) -> Option<usize> {
    let blank = text.len() - text.trim_start().len();
    if blank == text.len() {
        return None;
    }
    Some(text[..blank].rfind('\n').map_or(0, |at| at + 1))
}

/// Length of `text` without trailing newlines.
pub(crate) fn len_without_trailing_newlines(text: &str) -> usize {
    text.trim_end_matches(['\n', '\r']).len()
}

/// Length of the suffix of `text` that may become the closing tag.
pub(crate) fn partial_close_len(text: &str, close: &str) -> usize {
    partial_match_len(text, &[close])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_tag_after_blanks_starts_reasoning() {
        assert_eq!(
            classify_start("\n <think>x", "<think>"),
            ReplyStart::Thinking { tag: 9 }
        );
        for short in ["", " \n", "<", "\n<thin"] {
            assert_eq!(
                classify_start(short, "<think>"),
                ReplyStart::Undecided,
                "{short:?}"
            );
        }
        for reply in ["x", "<b>", "<thinking>", " </think>"] {
            assert_eq!(
                classify_start(reply, "<think>"),
                ReplyStart::Content,
                "{reply:?}"
            );
        }
    }

    #[test]
    fn newline_before_and_blank_lines_after_reasoning_are_dropped() {
        assert_eq!(leading_newline_len("\n\nx"), Some(1));
        assert_eq!(leading_newline_len("x"), Some(0));
        assert_eq!(leading_newline_len("\r"), None);
        assert_eq!(leading_blank_lines_len("\n \n  x"), Some(3));
        assert_eq!(leading_blank_lines_len(" x"), Some(0));
        assert_eq!(leading_blank_lines_len(" \n "), None);
    }
}
