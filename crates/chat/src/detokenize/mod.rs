//! Incremental detokenization, byte-exact.

use std::sync::Arc;

use contract::{TokenId, TokenKind};

use crate::tokenizer::Tokenizer;

/// Joins token bytes and emits text as soon as it is valid UTF-8.
///
/// A token may end inside a code point; its bytes wait for the next token. Each maximal invalid
/// sequence becomes one U+FFFD, as [`String::from_utf8_lossy`] does on the whole text. Control, end
/// and unused tokens emit no text.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// Bytes of an incomplete code point: at most three.
    tail: Vec<u8>,
}

impl Detokenizer {
    /// A detokenizer at the start of a text.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Detokenizer {
        Detokenizer {
            tokenizer,
            tail: Vec::new(),
        }
    }

    /// Text completed by these tokens.
    pub fn push(&mut self, tokens: &[TokenId]) -> String {
        let mut text = String::new();
        for token in tokens {
            if is_visible(&self.tokenizer, *token) {
                self.tail.extend_from_slice(self.tokenizer.bytes(*token));
                take_certain(&mut self.tail, &mut text);
            }
        }
        text
    }

    /// The rest at the end: an incomplete code point becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.tail)).into_owned()
    }

    /// Adds the text of a token of any kind, for tags that the reply parser must see.
    pub(crate) fn push_visible(&mut self, token: TokenId, text: &mut String) {
        self.tail.extend_from_slice(self.tokenizer.bytes(token));
        take_certain(&mut self.tail, text);
    }

    /// Whether an incomplete code point is pending.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.tail.is_empty()
    }
}

/// Whether a token's text is emitted: by its kind, and never for end tokens.
pub(crate) fn is_visible(tokenizer: &Tokenizer, token: TokenId) -> bool {
    let hidden = matches!(
        tokenizer.kind(token),
        TokenKind::Control | TokenKind::Unused | TokenKind::Unknown
    );
    !hidden && !tokenizer.eos().contains(&token)
}

/// Moves complete code points from `bytes` to `text`.
fn take_certain(bytes: &mut Vec<u8>, text: &mut String) {
    let mut done = 0;
    loop {
        match std::str::from_utf8(&bytes[done..]) {
            Ok(valid) => {
                text.push_str(valid);
                done = bytes.len();
                break;
            }
            Err(err) => {
                let valid_end = done + err.valid_up_to();
                // `valid_up_to` guarantees that nothing is replaced here.
                text.push_str(&String::from_utf8_lossy(&bytes[done..valid_end]));
                done = valid_end;
                match err.error_len() {
                    Some(bad_bytes) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        done += bad_bytes;
                    }
                    None => break,
                }
            }
        }
    }
    bytes.drain(..done);
}

#[cfg(test)]
mod tests;
