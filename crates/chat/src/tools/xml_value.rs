//! Finds the end of a parameter's value.
//!
//! A value may contain its own delimiter tags, if the model writes about them. So a tag counts only
//! if a valid rest of the call follows it.

use contract::ToolCallTags;

use super::prefix::{PrefixMatch, leading_blank_len, match_any_prefix};

/// Longer keys are not keys.
const MAX_KEY_BYTES: usize = 256;

/// What is known of a value's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueEnd {
    /// The value ends.
    Found(EndTag),
    /// No end yet: `text[..safe]` belongs to the value, and so do tags before `scanned`.
    Open { safe: usize, scanned: usize },
}

/// Where a value ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndTag {
    /// The value is the text before this byte.
    pub(super) value: usize,
    /// The call continues at this byte.
    pub(super) next: usize,
    /// Whether a closing tag was missing.
    pub(super) implied: bool,
    /// Whether the call ends here too, since only other text follows.
    pub(super) ends_call: bool,
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
    /// Whether the value is JSON, in whose strings tags are text.
    pub(super) is_json: bool,
    /// Whether the text is complete.
    pub(super) at_end: bool,
}

/// The strings of a JSON value up to some byte.
#[derive(Debug, Default)]
struct JsonStrings {
    seen: usize,
    is_open: bool,
}

/// Where a tag stands in a JSON value.
enum JsonPlace {
    /// In a string that is closed on the same line.
    InString,
    NeedsText,
    /// Elsewhere, or in a string that is never closed, so that a quote was forgotten.
    Outside,
}

impl JsonStrings {
    /// The place of the byte `at`, which is beyond those asked for before.
    fn place(&mut self, text: &str, at: usize, at_end: bool) -> JsonPlace {
        self.is_open = self.scan(&text[self.seen..at]);
        self.seen = at;
        if !self.is_open {
            return JsonPlace::Outside;
        }
        let rest = &text[at..];
        let line = rest.split('\n').next().unwrap_or(rest);
        let mut letters = line.bytes();
        while let Some(letter) = letters.next() {
            match letter {
                b'\\' => _ = letters.next(),
                b'"' => return JsonPlace::InString,
                _ => {}
            }
        }
        if line.len() < rest.len() || at_end {
            JsonPlace::Outside
        } else {
            JsonPlace::NeedsText
        }
    }

    /// Whether a string is open after `text`. A line break ends a string whose quote is missing.
    fn scan(&self, text: &str) -> bool {
        let mut is_open = self.is_open;
        let mut letters = text.bytes();
        while let Some(letter) = letters.next() {
            match letter {
                b'\\' if is_open => _ = letters.next(),
                b'"' => is_open = !is_open,
                b'\n' => is_open = false,
                _ => {}
            }
        }
        is_open
    }
}

/// Looks for the end of the value at the start of `text`.
///
/// A closing tag ends it if another tag, another call or the end of the text follows; so does a
/// line that opens a parameter that `may_follow`. A model may also quote tags: a closing tag on a
/// line of its own before other text, and a line that opens another call, end the value only if no
/// certain end follows.
pub(super) fn find_end(scan: &ValueScan<'_>, may_follow: impl Fn(&str) -> bool) -> ValueEnd {
    let (text, tags) = (scan.text, scan.tags);
    let mut candidate: Option<EndTag> = None;
    let mut quoted = QuotedCalls::default();
    let mut strings = JsonStrings::default();
    for (offset, _) in text[scan.scanned..].match_indices('<') {
        let at = scan.scanned + offset;
        if scan.is_json {
            match strings.place(text, at, scan.at_end) {
                JsonPlace::InString => continue,
                JsonPlace::NeedsText => {
                    return open_from(text, candidate.map_or(at, |tag| tag.value));
                }
                JsonPlace::Outside => {}
            }
        }
        let meaning = classify_tag(scan, at, &may_follow);
        match meaning {
            TagMeaning::NeedsText => return open_from(text, candidate.map_or(at, |tag| tag.value)),
            TagMeaning::OpensCall => match candidate {
                // A quoted closing tag would not stand before another call.
                Some(tag) if tag.ends_call => return ValueEnd::Found(tag),
                _ => {
                    quoted.open();
                    candidate.get_or_insert(EndTag {
                        value: at,
                        next: at,
                        implied: true,
                        ends_call: false,
                    });
                }
            },
            _ if quoted.take(&text[at..], tags) => {}
            TagMeaning::EndsValue { next, implied } => {
                return ValueEnd::Found(EndTag {
                    value: at,
                    next,
                    implied,
                    ends_call: false,
                });
            }
            TagMeaning::MayEndValue { next } => {
                candidate.get_or_insert(EndTag {
                    value: at,
                    next,
                    implied: true,
                    ends_call: true,
                });
            }
            TagMeaning::PartOfValue => {}
        }
    }
    match candidate {
        Some(tag) if scan.at_end => ValueEnd::Found(tag),
        Some(tag) => open_from(text, tag.value),
        None if scan.at_end => ValueEnd::Found(EndTag {
            value: text.len(),
            next: text.len(),
            implied: true,
            ends_call: false,
        }),
        // A trailing carriage return may become a line break.
        None => ValueEnd::Open {
            safe: without_last_break(text.strip_suffix('\r').unwrap_or(text)).len(),
            scanned: text.len(),
        },
    }
}

/// No end yet, and the tag at `at` is undecided.
fn open_from(text: &str, at: usize) -> ValueEnd {
    ValueEnd::Open {
        safe: without_last_break(&text[..at]).len(),
        scanned: at,
    }
}

/// Calls that the value may quote.
#[derive(Debug, Default)]
struct QuotedCalls {
    n_open: usize,
    /// Whether the innermost one has an open parameter.
    has_parameter: bool,
}

impl QuotedCalls {
    fn open(&mut self) {
        self.n_open += 1;
        self.has_parameter = false;
    }

    /// Whether the tag at the start of `text` belongs to a quoted call.
    fn take(&mut self, text: &str, tags: &ToolCallTags) -> bool {
        if self.n_open == 0 {
            return false;
        }
        if text.starts_with(&*tags.close) {
            self.n_open -= 1;
            self.has_parameter = false;
        } else if text.starts_with(&*tags.parameter_open) {
            self.has_parameter = true;
        } else if text.starts_with(&*tags.parameter_close) {
            // Without an open parameter the tag is the value's own.
            return std::mem::take(&mut self.has_parameter);
        }
        true
    }
}

/// What a tag means at its position.
enum TagMeaning {
    EndsValue {
        next: usize,
        implied: bool,
    },
    /// A closing tag on a line of its own, before other text.
    MayEndValue {
        next: usize,
    },
    /// A call starts on this line.
    OpensCall,
    NeedsText,
    PartOfValue,
}

fn classify_tag(scan: &ValueScan<'_>, at: usize, may_follow: &impl Fn(&str) -> bool) -> TagMeaning {
    let ValueScan {
        text, tags, at_end, ..
    } = *scan;
    let rest = &text[at..];
    let begins_line = || line_is_blank(scan.begins_line, &text[..at]);
    let own = scan.named_close.unwrap_or(&tags.function_close);
    let (call, function) = (&*tags.open, &*tags.function_open);
    let (end, close) = (&*tags.parameter_close, &*tags.close);
    let after_end = [
        &*tags.parameter_open,
        &*tags.function_close,
        own,
        close,
        end,
        call,
        function,
    ];
    // Closing tags, what may follow each, and whether the rest of the call reads the tag itself.
    let closing: [(&str, &[&str], bool); 4] = [
        (end, &after_end, false),
        (&*tags.function_close, &[close, call, function], true),
        (own, &[close, call, function], true),
        (close, &[call, function], true),
    ];
    for (tag, followers, is_read_again) in closing {
        let Some(after) = rest.strip_prefix(tag) else {
            continue;
        };
        let next = if is_read_again { at } else { at + tag.len() };
        let after = &after[leading_blank_len(after)..];
        return match match_any_prefix(after, followers) {
            PrefixMatch::Partial if !at_end => TagMeaning::NeedsText,
            PrefixMatch::No if begins_line() => TagMeaning::MayEndValue { next },
            PrefixMatch::No => TagMeaning::PartOfValue,
            PrefixMatch::Yes | PrefixMatch::Partial => TagMeaning::EndsValue {
                next,
                implied: is_read_again,
            },
        };
    }
    if let Some(after) = rest.strip_prefix(call) {
        if !begins_line() {
            return TagMeaning::PartOfValue;
        }
        return match match_any_prefix(&after[leading_blank_len(after)..], &[function, "{"]) {
            PrefixMatch::Yes => TagMeaning::OpensCall,
            PrefixMatch::Partial if !at_end => TagMeaning::NeedsText,
            PrefixMatch::Partial | PrefixMatch::No => TagMeaning::PartOfValue,
        };
    }
    if let Some(after) = rest.strip_prefix(&*tags.parameter_open) {
        if !begins_line() {
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
        end,
        &*tags.function_close,
        own,
        &*tags.parameter_open,
        close,
        call,
    ];
    if !at_end && match_any_prefix(rest, &words) == PrefixMatch::Partial {
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
