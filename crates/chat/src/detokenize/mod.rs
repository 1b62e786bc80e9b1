//! Tokens to text as they arrive, exact to the byte.

use std::sync::Arc;

use contract::{TokenId, TokenKind};

use crate::tokenizer::Tokenizer;

/// Joins token bytes and gives out text as soon as it is certain.
///
/// A token may end inside a code point: its bytes wait for the next token. Bytes that can no longer
/// become valid UTF-8 turn into U+FFFD, one for each maximal invalid stretch, as
/// [`String::from_utf8_lossy`] does on the whole text.
/// Control tokens, end tokens and fillers give no text.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// Bytes of an unfinished code point: at most three.
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

    /// The text that has become certain with these tokens.
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

    /// What is left at the end: an unfinished code point as one U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.tail)).into_owned()
    }

    /// Adds a token's text whatever its kind, for tags the reply parser needs to see.
    pub(crate) fn push_visible(&mut self, token: TokenId, text: &mut String) {
        self.tail.extend_from_slice(self.tokenizer.bytes(token));
        take_certain(&mut self.tail, text);
    }

    /// Whether bytes of an unfinished code point are waiting.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.tail.is_empty()
    }
}

/// Whether a token shows in the output: by its kind, and never if it ends a generation.
pub(crate) fn is_visible(tokenizer: &Tokenizer, token: TokenId) -> bool {
    let hidden = matches!(
        tokenizer.kind(token),
        TokenKind::Control | TokenKind::Unused | TokenKind::Unknown
    );
    !hidden && !tokenizer.eos().contains(&token)
}

/// Moves everything of `bytes` that is certain to `text`.
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
                // The prefix was just found valid, so nothing is replaced here.
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
