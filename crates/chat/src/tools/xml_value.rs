//! Finds the end of a parameter's value.
//!
//! A value may contain its own delimiter tags, if the model writes about them. So a tag counts only
//! if a valid rest of the call follows it.

use contract::ToolCallTags;

use super::prefix::{PrefixMatch, leading_blank_len, match_any_prefix, match_prefix};

/// Longer keys are not keys.
const MAX_KEY_BYTES: usize = 256;

/// What is known of a value's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueEnd {
    /// The value is `text[..value]`; the call continues at `next`.
    Found {
        value: usize,
        next: usize,
        /// The closing tag was missing.
        implied: bool,
    },
    /// No end yet: `text[..safe]` belongs to the value, and so do tags before `scanned`.
    Open { safe: usize, scanned: usize },
}

/// The unconsumed rest of a value.
#[derive(Debug, Clone, Copy)]
pub(super) struct ValueScan<'a> {
    /// The text from its start on.
    pub(super) text: &'a str,
    /// The model's tags.
    pub(super) tags: &'a ToolCallTags,
    /// Tags before this byte belong to the value.
    pub(super) scanned: usize,
    /// Whether the line before `text` is blank.
    pub(super) begins_line: bool,
    /// Another tag that ends the call.
    pub(super) named_close: Option<&'a str>,
    /// Whether the text is complete.
    pub(super) at_end: bool,
}

/// Looks for the end of the value at the start of `text`.
///
/// `</parameter>` ends it if another tag of the call or the end of the text follows. If it is
/// missing, the value ends at `</function>` at the end of the call, or at a line that opens a
/// parameter that `may_follow`.
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
    // A trailing carriage return may become a line break.
    let safe = text.strip_suffix('\r').unwrap_or(text);
    ValueEnd::Open {
        safe: without_last_break(safe).len(),
        scanned: text.len(),
    }
}

/// What a tag means at its position.
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

/// Whether the last line of `text` is blank; `before` shows it of the text before.
pub(super) fn line_is_blank(before: bool, text: &str) -> bool {
    let is_blank = |line: &str| line.chars().all(|letter| matches!(letter, ' ' | '\t'));
    match text.rfind('\n') {
        Some(at) => is_blank(&text[at + 1..]),
        None => before && is_blank(text),
    }
}

/// `text` without one leading line break.
pub(super) fn without_first_break(text: &str) -> &str {
    text.strip_prefix("\r\n")
        .or_else(|| text.strip_prefix('\n'))
        .unwrap_or(text)
}

/// `text` without one trailing line break.
pub(super) fn without_last_break(text: &str) -> &str {
    match text.strip_suffix('\n') {
        Some(text) => text.strip_suffix('\r').unwrap_or(text),
        None => text,
    }
}
