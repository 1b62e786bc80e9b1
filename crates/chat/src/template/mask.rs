//! Separates control strings in a client's text from those a template writes.
//!
//! Before rendering, each special string in the data is replaced by a private-use character that
//! the request does not use. After rendering, the characters turn back into the strings, and their
//! ranges are recorded. The characters survive trimming, joining and JSON, so the template's output
//! stays the same.

use std::collections::HashSet;
use std::ops::Range;

use contract::{TokenKind, Vocab};
use serde_json::{Map, Value};

use super::{RenderedPrompt, TemplateInput};
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
            user_defined: of_kind(TokenKind::UserDefined),
        }
    }
}

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
        let needed = words.control.len() + words.user_defined.len() + 1;
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
        masked
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
        for letter in text.chars() {
            match self.assigned.iter().find(|(known, _)| *known == letter) {
                Some((_, word)) => {
                    let start = rendered.text.len();
                    rendered.text.push_str(word);
                    rendered.literals.push(start..rendered.text.len());
                }
                None => rendered.text.push(letter),
            }
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
