//! Separates control strings in a client's text from those a template writes.
//!
//! Before rendering, each special string in the data is replaced by a private-use character that
//! the request does not use. After rendering, the characters turn back into the strings, and their
//! ranges are recorded. The characters survive trimming, joining and JSON, so the template's output
//! stays the same.
//!
//! A control string may also come into being where the data meets the template's text or other
//! data. So parts of control strings are masked too: where the data ends with the start of one, and
//! where it begins with the end of one.

use std::collections::HashSet;
use std::ops::Range;

use contract::{TokenKind, Vocab};
use serde_json::{Map, Value};

use super::{MaskScope, RenderedPrompt, TemplateInput};
use crate::conversation::Role;
use crate::error::ChatError;

/// The special strings of a vocabulary.
#[derive(Debug)]
pub(super) struct SpecialStringTable {
    control: Vec<String>,
    user_defined: Vec<String>,
}

impl SpecialStringTable {
    pub(super) fn new(vocab: &Vocab) -> SpecialStringTable {
        let of_kind = |wanted: TokenKind| {
            let mut words: Vec<String> = vocab
                .tokens
                .iter()
                .zip(&vocab.kinds)
                .filter(|(token, kind)| **kind == wanted && !token.is_empty())
                .map(|(token, _)| token.clone())
                .collect();
            // Longer strings first, as the tokenizer matches them.
            words.sort_by_key(|word| std::cmp::Reverse(word.len()));
            words
        };
        SpecialStringTable {
            control: of_kind(TokenKind::Control),
            // Those of SentencePiece are pieces of ordinary text and match in client text too.
            user_defined: if vocab.pieces.is_some() {
                Vec::new()
            } else {
                of_kind(TokenKind::UserDefined)
            },
        }
    }
}

impl SpecialStringTable {
    /// The longest start of a control string, short of all of it, with which `text` ends.
    fn start_of_word(&self, text: &str) -> Option<&str> {
        let part = |word: &'_ String, length: usize| {
            word.get(..length)
                .filter(|part| text.ends_with(part))
                .is_some()
        };
        self.longest_part(part, |word, length| word.get(..length))
    }

    /// The longest end of a control string, short of all of it, with which `text` begins.
    fn end_of_word(&self, text: &str) -> Option<&str> {
        let part = |word: &'_ String, length: usize| {
            let from = word.len() - length;
            word.get(from..)
                .filter(|part| text.starts_with(part))
                .is_some()
        };
        self.longest_part(part, |word, length| word.get(word.len() - length..))
    }

    fn is_whole(&self, text: &str) -> bool {
        let mut words = self.control.iter().chain(&self.user_defined);
        words.any(|word| word == text)
    }

    /// Where control strings lie in `text`, as the start of each with the furthest end up to it.
    fn places_in(&self, text: &str) -> Vec<(usize, usize)> {
        let words = self.control.iter();
        let places = words.flat_map(|word| {
            let found = text.match_indices(&**word);
            found.map(|(at, word)| (at, at + word.len()))
        });
        let mut places: Vec<(usize, usize)> = places.collect();
        places.sort_unstable();
        let mut furthest = 0;
        for (_, end) in &mut places {
            furthest = furthest.max(*end);
            *end = furthest;
        }
        places
    }

    /// The control strings that occur in `text`.
    fn present_in(&self, text: &str) -> Vec<&str> {
        let words = self.control.iter().map(String::as_str);
        words.filter(|word| text.contains(word)).collect()
    }

    fn longest_part<'t>(
        &'t self,
        matches: impl Fn(&String, usize) -> bool,
        part: impl Fn(&'t str, usize) -> Option<&'t str>,
    ) -> Option<&'t str> {
        let mut longest = None;
        for word in &self.control {
            let known = longest.map_or(0, str::len);
            let length = (known + 1..word.len())
                .rev()
                .find(|length| matches(word, *length));
            longest = length.and_then(|length| part(word, length)).or(longest);
        }
        longest
    }
}

/// Keys of messages and tools by which templates look up.
const KNOWN_KEYS: [&str; 14] = [
    "role",
    "content",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "function",
    "arguments",
    "name",
    "id",
    "type",
    "description",
    "parameters",
    "properties",
    "required",
];

/// The placeholder characters of one request.
pub(super) struct SpecialStringMask<'a> {
    words: &'a SpecialStringTable,
    /// Private-use characters in the request or the template.
    taken: HashSet<char>,
    /// The string of each placeholder.
    assigned: Vec<(char, &'a str)>,
    next: u32,
}

/// Plane 15 is private use; its last two code points are no characters.
const PRIVATE: Range<u32> = 0xf_0000..0xf_fffe;

impl<'a> SpecialStringMask<'a> {
    /// Rejects a request that uses nearly all private-use characters, since no placeholders would
    /// be left.
    pub(super) fn new(
        words: &'a SpecialStringTable,
        input: &TemplateInput,
        template: &str,
    ) -> Result<SpecialStringMask<'a>, ChatError> {
        let mut taken = HashSet::new();
        let mut note = |text: &str| {
            taken.extend(
                text.chars()
                    .filter(|letter| PRIVATE.contains(&u32::from(*letter))),
            );
        };
        note(template);
        for (_, message) in &input.messages {
            for_each_string(message, &mut note);
        }
        for value in input.tools.iter().chain(input.variables.values()) {
            for_each_string(value, &mut note);
        }
        let of_parts: usize = words.control.iter().map(|word| 3 * word.len()).sum();
        let needed = words.control.len() + words.user_defined.len() + of_parts + 1;
        if taken.len() + needed > PRIVATE.len() {
            return Err(ChatError::field(
                "messages",
                "the text uses nearly every private-use character of plane 15; leave some unused",
            ));
        }
        Ok(SpecialStringMask {
            words,
            taken,
            assigned: Vec::new(),
            next: PRIVATE.start,
        })
    }

    /// Whether the content of a message other than the assistant's holds a user-defined string.
    pub(super) fn has_user_defined(&self, input: &TemplateInput) -> bool {
        input
            .messages
            .iter()
            .filter(|(role, _)| *role != Role::Assistant)
            .filter_map(|(_, message)| message.get("content")?.as_str())
            .any(|content| {
                self.words
                    .user_defined
                    .iter()
                    .any(|word| content.contains(word))
            })
    }

    /// A placeholder that marks the end of a message.
    pub(super) fn end_placeholder(&mut self) -> char {
        self.next_unused()
    }

    /// The value with control strings masked, in keys too.
    pub(super) fn mask_value(&mut self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.mask_text(text, false)),
            Value::Array(items) => {
                Value::Array(items.iter().map(|item| self.mask_value(item)).collect())
            }
            Value::Object(map) => {
                let mut masked = Map::new();
                for (key, item) in map {
                    let item = self.mask_value(item);
                    masked.insert(self.mask_text(key, false), item);
                }
                Value::Object(masked)
            }
            other => other.clone(),
        }
    }

    /// A message with control strings masked, and with `all` also user-defined ones in its content.
    pub(super) fn mask_message(&mut self, message: &Value, all: bool) -> Value {
        let mut masked = self.mask_value(message);
        if all
            && let Value::Object(map) = &mut masked
            && let Some(Value::String(content)) = map.get_mut("content")
        {
            *content = self.mask_text(content, true);
        }
        masked
    }

    fn mask_text(&mut self, text: &str, user_defined: bool) -> String {
        let words = if user_defined {
            &self.words.user_defined
        } else {
            &self.words.control
        };
        let mut masked = text.to_owned();
        for word in words {
            if masked.contains(word) {
                let letter = self.placeholder_for(word);
                masked = masked.replace(word, letter.encode_utf8(&mut [0; 4]));
            }
        }
        if !user_defined {
            self.mask_parts(&mut masked);
        }
        masked
    }

    /// Masks parts of control strings where `text` can meet the template's text: at its ends, with
    /// blanks trimmed or not, and beside user-defined strings, at which templates split.
    fn mask_parts(&mut self, text: &mut String) {
        let words = self.words;
        let mut cuts: Vec<Range<usize>> = Vec::new();
        for word in &words.user_defined {
            cuts.extend(text.match_indices(word).map(|(at, _)| at..at + word.len()));
        }
        let starts = cuts.iter().map(|cut| cut.end).chain([0]);
        let ends = cuts.iter().map(|cut| cut.start).chain([text.len()]);
        let mut found: Vec<(Range<usize>, &'a str)> = Vec::new();
        for start in starts {
            let rest = &text[start..];
            for head in [rest, rest.trim_start()] {
                let at = text.len() - head.len();
                let part = words.end_of_word(head);
                found.extend(part.map(|part| (at..at + part.len(), part)));
            }
        }
        for end in ends {
            let rest = &text[..end];
            for tail in [rest, rest.trim_end()] {
                let part = words.start_of_word(tail);
                found.extend(part.map(|part| (tail.len() - part.len()..tail.len(), part)));
            }
        }
        // From the end, so that earlier places stay where they are.
        found.sort_by_key(|(place, _)| std::cmp::Reverse(place.end));
        let mut masked_from = text.len();
        for (place, part) in found {
            if place.end <= masked_from {
                let letter = self.placeholder_for(part);
                text.replace_range(place.clone(), letter.encode_utf8(&mut [0; 4]));
                masked_from = place.start;
            }
        }
    }

    /// The control strings of `prompt`, if a value of the request lies within one.
    pub(super) fn around_values(
        &self,
        input: &TemplateInput,
        prompt: &str,
    ) -> Option<Vec<&'a str>> {
        let words = self.words.present_in(prompt);
        let mut found = false;
        let mut note = |text: &str| {
            found |= !text.is_empty()
                && words
                    .iter()
                    .any(|word| text.len() < word.len() && word.contains(text));
        };
        for (_, message) in &input.messages {
            for_each_string(message, &mut note);
        }
        for tool in &input.tools {
            for_each_string(tool, &mut note);
        }
        found.then_some(words)
    }

    /// The value with what `scope` masks within control strings.
    pub(super) fn mask_within(&mut self, value: Value, scope: MaskScope<'_, 'a>) -> Value {
        match scope.within {
            Some(words) => self.mask_inner(&value, words),
            None => value,
        }
    }

    /// The value with strings masked that lie within one of `words`. A template that writes the
    /// rest of the word around such a value would complete it.
    fn mask_inner(&mut self, value: &Value, words: &[&'a str]) -> Value {
        match value {
            Value::String(text) => Value::String(self.mask_if_inner(text, words)),
            Value::Array(items) => {
                let items = items.iter().map(|item| self.mask_inner(item, words));
                Value::Array(items.collect())
            }
            Value::Object(map) => {
                let mut out = Map::new();
                for (key, item) in map {
                    // Templates look up these; a role is one of the server's own words.
                    let own = KNOWN_KEYS.contains(&&**key);
                    let key = if own {
                        key.clone()
                    } else {
                        self.mask_if_inner(key, words)
                    };
                    let item = if key == "role" || key == "type" {
                        item.clone()
                    } else {
                        self.mask_inner(item, words)
                    };
                    out.insert(key, item);
                }
                Value::Object(out)
            }
            other => other.clone(),
        }
    }

    fn mask_if_inner(&mut self, text: &str, words: &[&'a str]) -> String {
        let inner = words.iter().find_map(|word| {
            let at = word.find(text).filter(|_| !text.is_empty())?;
            word.get(at..at + text.len())
        });
        match inner {
            Some(part) => self.placeholder_for(part).to_string(),
            None => text.to_owned(),
        }
    }

    fn placeholder_for(&mut self, word: &'a str) -> char {
        if let Some((letter, _)) = self.assigned.iter().find(|(_, known)| *known == word) {
            return *letter;
        }
        let letter = self.next_unused();
        self.assigned.push((letter, word));
        letter
    }

    /// An unused private-use character.
    fn next_unused(&mut self) -> char {
        loop {
            let letter = char::from_u32(self.next).expect("the plane was checked to have room");
            self.next += 1;
            if !self.taken.contains(&letter) {
                return letter;
            }
        }
    }

    /// The text with the strings restored, and their ranges.
    pub(super) fn unmask(&self, text: &str) -> RenderedPrompt {
        if self.assigned.is_empty() {
            return RenderedPrompt {
                text: text.to_owned(),
                literals: Vec::new(),
            };
        }
        let mut rendered = RenderedPrompt::default();
        let mut parts: Vec<Range<usize>> = Vec::new();
        for letter in text.chars() {
            match self.assigned.iter().find(|(known, _)| *known == letter) {
                Some((_, word)) => {
                    let start = rendered.text.len();
                    rendered.text.push_str(word);
                    let place = start..rendered.text.len();
                    if !self.words.is_whole(word) {
                        parts.push(place.clone());
                    }
                    rendered.literals.push(place);
                }
                None => rendered.text.push(letter),
            }
        }
        if !parts.is_empty() {
            // A part matters only if a control string came into being around it.
            let around = self.words.places_in(&rendered.text);
            let completed = |part: &Range<usize>| {
                let begun = around.partition_point(|(start, _)| *start < part.end);
                begun > 0 && part.start < around[begun - 1].1
            };
            parts.retain(|part| !completed(part));
            let is_part = |place: &Range<usize>| {
                let found = parts.binary_search_by_key(&place.start, |part| part.start);
                found.is_ok()
            };
            rendered.literals.retain(|place| !is_part(place));
        }
        rendered
    }
}

fn for_each_string(value: &Value, note: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => note(text),
        Value::Array(items) => items.iter().for_each(|item| for_each_string(item, note)),
        Value::Object(map) => {
            for (key, item) in map {
                note(key);
                for_each_string(item, note);
            }
        }
        _ => {}
    }
}
