//! Alignment of token logprobs with the text that is sent.
//!
//! Text is sent later than its tokens, and some never is: tags, stop strings, trimmed line ends.
//! Tokens are held here until their text is sent, so that the bytes of the tokens listed with a
//! part join to exactly its text.

use std::collections::VecDeque;
use std::sync::Arc;

use chat::Tokenizer;
use chat::reply::{TokenLogprob, TopLogprob};
use contract::TokenId;
use decode::{Logprobs, OutputToken};

/// Tokens whose text was not sent yet.
pub struct PendingTokens {
    tokenizer: Arc<Tokenizer>,
    waiting: VecDeque<HeldToken>,
}

struct HeldToken {
    id: TokenId,
    bytes: Vec<u8>,
    logprobs: Logprobs,
}

/// A token with the part of its bytes that was sent.
#[derive(Debug, Clone, PartialEq)]
pub struct SentToken {
    /// The token.
    pub id: TokenId,
    /// Its bytes within the sent text.
    pub bytes: Vec<u8>,
    /// Its logprob and the top alternatives.
    pub logprobs: Logprobs,
}

impl PendingTokens {
    /// No tokens.
    pub fn new(tokenizer: Arc<Tokenizer>) -> PendingTokens {
        PendingTokens {
            tokenizer,
            waiting: VecDeque::new(),
        }
    }

    /// Adds a generated token; ignores one without logprobs.
    pub fn push(&mut self, token: OutputToken) {
        if let Some(logprobs) = token.logprobs {
            self.waiting.push_back(HeldToken {
                id: token.id,
                bytes: self.tokenizer.bytes(token.id).to_vec(),
                logprobs,
            });
        }
    }

    /// Removes and returns the tokens of `text`, which is being sent.
    ///
    /// Tokens before its first byte are dropped: their text was a tag or was trimmed. A U+FFFD in
    /// the text stands for the invalid bytes, which are listed as they are.
    pub fn take_tokens_of(&mut self, text: &str) -> Vec<SentToken> {
        if self.waiting.is_empty() || text.is_empty() {
            return Vec::new();
        }
        let all: Vec<u8> = self.waiting.iter().flat_map(|w| w.bytes.clone()).collect();
        let Some((begin, end)) = find_text(&all, text) else {
            return Vec::new();
        };
        let mut sent = Vec::new();
        let mut at = 0;
        while let Some(waiting) = self.waiting.front_mut() {
            let (first, last) = (at, at + waiting.bytes.len());
            if first >= end {
                break;
            }
            at = last;
            let visible = begin.max(first)..end.min(last);
            if visible.is_empty() {
                self.waiting.pop_front();
                continue;
            }
            sent.push(SentToken {
                id: waiting.id,
                bytes: waiting.bytes[visible.start - first..visible.end - first].to_vec(),
                logprobs: waiting.logprobs.clone(),
            });
            if last > end {
                // The rest of this token may be sent with later text.
                waiting.bytes.drain(..end - first);
                break;
            }
            self.waiting.pop_front();
        }
        sent
    }

    /// Tokens in OpenAI's format.
    pub fn listed(&self, sent: &[SentToken]) -> Vec<TokenLogprob> {
        let one = |token: &SentToken| {
            let rivals = token.logprobs.top.iter();
            TokenLogprob {
                token: TopLogprob::new(&token.bytes, token.logprobs.logprob),
                top_logprobs: rivals
                    .map(|(id, logprob)| TopLogprob::new(self.tokenizer.bytes(*id), *logprob))
                    .collect(),
            }
        };
        sent.iter().map(one).collect()
    }
}

/// First range of `bytes` that decodes to `text`; each U+FFFD matches one to three invalid bytes,
/// as in lossy decoding.
fn find_text(bytes: &[u8], text: &str) -> Option<(usize, usize)> {
    let exact = text.as_bytes();
    if let Some(begin) = bytes.windows(exact.len()).position(|w| w == exact) {
        return Some((begin, begin + exact.len()));
    }
    (0..bytes.len()).find_map(|begin| lossy_end(&bytes[begin..], text).map(|n| (begin, begin + n)))
}

/// Number of leading `bytes` that lossily decode to `text`, if they do.
fn lossy_end(bytes: &[u8], text: &str) -> Option<usize> {
    let mut text = text;
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        let valid = chunk.valid();
        if text.len() <= valid.len() {
            return valid.starts_with(text).then_some(used + text.len());
        }
        text = text.strip_prefix(valid)?;
        used += valid.len();
        if !chunk.invalid().is_empty() {
            text = text.strip_prefix(char::REPLACEMENT_CHARACTER)?;
            used += chunk.invalid().len();
            if text.is_empty() {
                return Some(used);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_found_behind_trimmed_bytes() {
        assert_eq!(find_text(b"<tag>\nhello", "hello"), Some((6, 11)));
        assert_eq!(find_text(b"abc", "abc"), Some((0, 3)));
        assert_eq!(find_text(b"abc", "abd"), None);
    }

    #[test]
    fn replacement_character_matches_invalid_bytes() {
        assert_eq!(find_text(b"a\xffb", "a\u{fffd}b"), Some((0, 3)));
        assert_eq!(find_text(b"a\xe2\x82", "a\u{fffd}"), Some((0, 3)));
        assert_eq!(find_text(b"\xff\xffz", "\u{fffd}\u{fffd}"), Some((0, 2)));
    }
}
