//! Where a parameter's value ends.
//!
//! A value may itself hold the tags that delimit it, when the model writes about them. So a tag counts
//! only where what follows it makes sense as the rest of the call.

use super::call::{Starts, blank_len, starts, starts_any};

/// Keys longer than this are not keys.
const MAX_KEY_BYTES: usize = 256;

/// What is known about the end of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueEnd {
    /// The value is `text[..value]`; the call goes on at `next`.
    Found {
        value: usize,
        next: usize,
        /// The closing tag was missing.
        implied: bool,
    },
    /// No end yet: `text[..safe]` is certainly value, and tags before `judged` are part of it.
    Open { safe: usize, judged: usize },
}

/// A value, or what is left of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    /// The text from there on.
    pub(super) text: &'a str,
    /// Tags before this byte are part of the value.
    pub(super) judged: usize,
    /// Whether only blanks stand before `text` on its line.
    pub(super) begins_line: bool,
    /// A tag that ends the call besides `</function>`.
    pub(super) own_closing: Option<&'a str>,
    /// No more text will come.
    pub(super) at_end: bool,
}

/// Looks for the end of the value that `text` begins with.
///
/// `</parameter>` ends it if the next thing is another tag of the call, or the end of the text; a
/// missing one is implied by `</function>` at the end of the call, and by a line that opens a parameter
/// which `may_follow`.
pub(super) fn find_end(place: &Place<'_>, may_follow: impl Fn(&str) -> bool) -> ValueEnd {
    let Place {
        text,
        judged,
        at_end,
        ..
    } = *place;
    for (offset, _) in text[judged..].match_indices('<') {
        let at = judged + offset;
        match judge(place, at, &may_follow) {
            Verdict::End { next, implied } => {
                return ValueEnd::Found {
                    value: at,
                    next,
                    implied,
                };
            }
            Verdict::Wait => {
                return ValueEnd::Open {
                    safe: without_last_break(&text[..at]).len(),
                    judged: at,
                };
            }
            Verdict::Value => {}
        }
    }
    if at_end {
        return ValueEnd::Found {
            value: text.len(),
            next: text.len(),
            implied: true,
        };
    }
    // A lone carriage return may become a line break.
    let safe = text.strip_suffix('\r').unwrap_or(text);
    ValueEnd::Open {
        safe: without_last_break(safe).len(),
        judged: text.len(),
    }
}

/// What the tag at one place is.
enum Verdict {
    End { next: usize, implied: bool },
    Wait,
    Value,
}

fn judge(place: &Place<'_>, at: usize, may_follow: &impl Fn(&str) -> bool) -> Verdict {
    let Place {
        text,
        own_closing,
        at_end,
        ..
    } = *place;
    let rest = &text[at..];
    let own = own_closing.unwrap_or("</function>");
    if let Some(after) = rest.strip_prefix("</parameter>") {
        let next = at + "</parameter>".len();
        let after = &after[blank_len(after)..];
        let tags = [
            "<parameter=",
            "</function>",
            own,
            "</tool_call>",
            "</parameter>",
        ];
        return match starts_any(after, &tags) {
            Starts::Yes => Verdict::End {
                next,
                implied: false,
            },
            Starts::Perhaps if at_end => Verdict::End {
                next,
                implied: false,
            },
            Starts::Perhaps => Verdict::Wait,
            Starts::No => Verdict::Value,
        };
    }
    for closing in ["</function>", own] {
        if let Some(after) = rest.strip_prefix(closing) {
            let after = &after[blank_len(after)..];
            return match starts_any(after, &["</tool_call>", "<tool_call>"]) {
                Starts::Yes => Verdict::End {
                    next: at,
                    implied: true,
                },
                Starts::Perhaps if at_end => Verdict::End {
                    next: at,
                    implied: true,
                },
                Starts::Perhaps => Verdict::Wait,
                Starts::No => Verdict::Value,
            };
        }
    }
    if let Some(after) = rest.strip_prefix("<parameter=") {
        if !line_is_blank(place.begins_line, &text[..at]) {
            return Verdict::Value;
        }
        return match after.find(['>', '\n']) {
            Some(close) if after[close..].starts_with('>') && may_follow(&after[..close]) => {
                Verdict::End {
                    next: at,
                    implied: true,
                }
            }
            None if !at_end && after.len() <= MAX_KEY_BYTES => Verdict::Wait,
            _ => Verdict::Value,
        };
    }
    let tags = ["</parameter>", "</function>", own, "<parameter="];
    if !at_end && tags.iter().any(|tag| starts(rest, tag) == Starts::Perhaps) {
        return Verdict::Wait;
    }
    Verdict::Value
}

/// Whether only blanks stand on the line that `text` ends in; `before` says so of what came before it.
pub(super) fn line_is_blank(before: bool, text: &str) -> bool {
    let is_blank = |line: &str| line.chars().all(|letter| matches!(letter, ' ' | '\t'));
    match text.rfind('\n') {
        Some(at) => is_blank(&text[at + 1..]),
        None => before && is_blank(text),
    }
}

/// `text` without one line break at its beginning.
pub(super) fn without_first_break(text: &str) -> &str {
    text.strip_prefix("\r\n")
        .or_else(|| text.strip_prefix('\n'))
        .unwrap_or(text)
}

/// `text` without one line break at its end.
pub(super) fn without_last_break(text: &str) -> &str {
    match text.strip_suffix('\n') {
        Some(text) => text.strip_suffix('\r').unwrap_or(text),
        None => text,
    }
}
