//! Telling thinking from the reply.

use crate::stop::held_back;

/// Opens thinking.
pub const OPEN: &str = "<think>";
/// Closes thinking.
pub const CLOSE: &str = "</think>";

/// What a reply whose prompt left no thinking open begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beginning {
    /// Thinking, behind so many bytes of blanks and tag.
    Thinking {
        /// Length of what is dropped.
        tag: usize,
    },
    /// The reply itself.
    Reply,
    /// The text is too short to say.
    TooShort,
}

/// Judges the beginning of a reply; blanks before the tag do not count.
pub(crate) fn beginning(text: &str) -> Beginning {
    let blank = text.len() - text.trim_start().len();
    let rest = &text[blank..];
    if rest.starts_with(OPEN) {
        Beginning::Thinking {
            tag: blank + OPEN.len(),
        }
    } else if OPEN.starts_with(rest) {
        Beginning::TooShort
    } else {
        Beginning::Reply
    }
}

/// Length of the one line break that is dropped at the beginning of thinking, or `None` if more text is
/// needed to say.
pub(crate) fn first_break(text: &str) -> Option<usize> {
    match text {
        "" | "\r" => None,
        text if text.starts_with("\r\n") => Some(2),
        text if text.starts_with('\n') => Some(1),
        _ => Some(0),
    }
}

/// Length of the blank lines that are dropped behind thinking, or `None` while there is nothing else.
/// The indentation of the first line with text stays.
pub(crate) fn blank_lines(text: &str) -> Option<usize> {
    let blank = text.len() - text.trim_start().len();
    if blank == text.len() {
        return None;
    }
    Some(text[..blank].rfind('\n').map_or(0, |at| at + 1))
}

/// Length of `text` without the line breaks at its end.
pub(crate) fn without_last_breaks(text: &str) -> usize {
    text.trim_end_matches(['\n', '\r']).len()
}

/// Length of the end of `text` that may become the closing tag.
pub(crate) fn possible_close(text: &str) -> usize {
    held_back(text, &[CLOSE])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_may_begin_with_thinking_behind_blanks() {
        assert_eq!(beginning("\n <think>x"), Beginning::Thinking { tag: 9 });
        for short in ["", " \n", "<", "\n<thin"] {
            assert_eq!(beginning(short), Beginning::TooShort, "{short:?}");
        }
        for reply in ["x", "<b>", "<thinking>", " </think>"] {
            assert_eq!(beginning(reply), Beginning::Reply, "{reply:?}");
        }
    }

    #[test]
    fn one_break_goes_in_front_and_blank_lines_behind() {
        assert_eq!(first_break("\n\nx"), Some(1));
        assert_eq!(first_break("x"), Some(0));
        assert_eq!(first_break("\r"), None);
        assert_eq!(blank_lines("\n \n  x"), Some(3));
        assert_eq!(blank_lines(" x"), Some(0));
        assert_eq!(blank_lines(" \n "), None);
    }
}
