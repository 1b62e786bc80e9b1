//! Where a parameter's value ends.
//!
//! A value may itself hold the tags that delimit it, when the model writes about them. So a tag counts
//! only where what follows it makes sense as the rest of the call.

use contract::ToolCallTags;

use super::prefix::{PrefixMatch, leading_blank_len, match_any_prefix, match_prefix};

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
    /// No end yet: `text[..safe]` is certainly value, and tags before `scanned` are part of it.
    Open { safe: usize, scanned: usize },
}

/// A value, or what is left of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ValueScan<'a> {
    /// The text from there on.
    pub(super) text: &'a str,
    /// The model's tags.
    pub(super) tags: &'a ToolCallTags,
    /// Tags before this byte are part of the value.
    pub(super) scanned: usize,
    /// Whether only blanks stand before `text` on its line.
    pub(super) begins_line: bool,
    /// A tag that ends the call besides `</function>`.
    pub(super) named_close: Option<&'a str>,
    /// No more text will come.
    pub(super) at_end: bool,
}

/// Looks for the end of the value that `text` begins with.
///
/// `</parameter>` ends it if the next thing is another tag of the call, or the end of the text; a
/// missing one is implied by `</function>` at the end of the call, and by a line that opens a parameter
/// which `may_follow`.
pub(super) fn find_end(scan: &ValueScan<'_>, may_follow: impl Fn(&str) -> bool) -> ValueEnd {
    let ValueScan {
        text,
        scanned,
        at_end,
        ..
    } = *scan;
    for (offset, _) in text[scanned..].match_indices('<') {
        let at = scanned + offset;
        match classify_tag(scan, at, &may_follow) {
            TagMeaning::EndsValue { next, implied } => {
                return ValueEnd::Found {
                    value: at,
                    next,
                    implied,
                };
            }
            TagMeaning::NeedsText => {
                return ValueEnd::Open {
                    safe: without_last_break(&text[..at]).len(),
                    scanned: at,
                };
            }
            TagMeaning::PartOfValue => {}
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
        scanned: text.len(),
    }
}

/// What the tag at one scan is.
enum TagMeaning {
    EndsValue { next: usize, implied: bool },
    NeedsText,
    PartOfValue,
}

fn classify_tag(scan: &ValueScan<'_>, at: usize, may_follow: &impl Fn(&str) -> bool) -> TagMeaning {
    let ValueScan {
        text,
        tags,
        named_close,
        at_end,
        ..
    } = *scan;
    let rest = &text[at..];
    let own = named_close.unwrap_or(&tags.function_close);
    if let Some(after) = rest.strip_prefix(&*tags.parameter_close) {
        let next = at + tags.parameter_close.len();
        let after = &after[leading_blank_len(after)..];
        let words = [
            &*tags.parameter_open,
            &*tags.function_close,
            own,
            &*tags.close,
            &*tags.parameter_close,
        ];
        return match match_any_prefix(after, &words) {
            PrefixMatch::Yes => TagMeaning::EndsValue {
                next,
                implied: false,
            },
            PrefixMatch::Partial if at_end => TagMeaning::EndsValue {
                next,
                implied: false,
            },
            PrefixMatch::Partial => TagMeaning::NeedsText,
            PrefixMatch::No => TagMeaning::PartOfValue,
        };
    }
    for closing in [&*tags.function_close, own] {
        if let Some(after) = rest.strip_prefix(closing) {
            let after = &after[leading_blank_len(after)..];
            return match match_any_prefix(after, &[&tags.close, &tags.open]) {
                PrefixMatch::Yes => TagMeaning::EndsValue {
                    next: at,
                    implied: true,
                },
                PrefixMatch::Partial if at_end => TagMeaning::EndsValue {
                    next: at,
                    implied: true,
                },
                PrefixMatch::Partial => TagMeaning::NeedsText,
                PrefixMatch::No => TagMeaning::PartOfValue,
            };
        }
    }
    if let Some(after) = rest.strip_prefix(&*tags.parameter_open) {
        if !line_is_blank(scan.begins_line, &text[..at]) {
            return TagMeaning::PartOfValue;
        }
        return match after.find(['>', '\n']) {
            Some(close) if after[close..].starts_with('>') && may_follow(&after[..close]) => {
                TagMeaning::EndsValue {
                    next: at,
                    implied: true,
                }
            }
            None if !at_end && after.len() <= MAX_KEY_BYTES => TagMeaning::NeedsText,
            _ => TagMeaning::PartOfValue,
        };
    }
    let words = [
        &*tags.parameter_close,
        &*tags.function_close,
        own,
        &*tags.parameter_open,
    ];
    if !at_end
        && words
            .iter()
            .any(|tag| match_prefix(rest, tag) == PrefixMatch::Partial)
    {
        return TagMeaning::NeedsText;
    }
    TagMeaning::PartOfValue
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
