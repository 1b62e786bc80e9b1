//! Logprobs in the format of text completions: columns, with a text offset per token.

use std::sync::Arc;

use chat::Tokenizer;
use chat::openai::response::{CompletionLogprobs, TopLogprobsByText};
use chat::reply::TopLogprob;
use contract::TokenId;
use decode::Logprobs;

use crate::text::logprobs::SentToken;

/// Logprob columns of one choice.
pub struct LogprobColumns {
    tokenizer: Arc<Tokenizer>,
    /// Alternatives per token.
    top: usize,
    /// Rows not yet taken.
    rows: CompletionLogprobs,
    /// Characters so far.
    characters: usize,
}

impl LogprobColumns {
    /// Empty columns at the start of the text, with `top` alternatives per token.
    pub fn new(tokenizer: Arc<Tokenizer>, top: usize) -> LogprobColumns {
        LogprobColumns {
            tokenizer,
            top,
            rows: CompletionLogprobs::default(),
            characters: 0,
        }
    }

    /// Adds the prompt tokens; the first has no logprob.
    pub fn prompt(&mut self, ids: &[TokenId], rows: &[Option<Logprobs>]) {
        for (id, row) in ids.iter().zip(rows) {
            let bytes = self.tokenizer.bytes(*id).to_vec();
            self.row(*id, &bytes, row.as_ref());
        }
    }

    /// Adds generated tokens.
    pub fn shown(&mut self, shown: &[SentToken]) {
        for token in shown {
            self.row(token.id, &token.bytes, Some(&token.logprobs));
        }
    }

    fn row(&mut self, id: TokenId, bytes: &[u8], row: Option<&Logprobs>) {
        // The token itself is always listed, so that there is an entry even without alternatives.
        let top = row.map(|row| {
            let mut shown: Vec<(String, f32)> = Vec::new();
            let own = std::iter::once((id, row.logprob));
            for (other, logprob) in row.top.iter().copied().take(self.top).chain(own) {
                let rival = TopLogprob::new(self.tokenizer.bytes(other), logprob);
                // Tokens of one text share a key; the likeliest keeps it.
                if shown.iter().all(|(text, _)| *text != rival.token) {
                    shown.push((rival.token, rival.logprob));
                }
            }
            TopLogprobsByText(shown)
        });
        let own = row.map(|row| TopLogprob::new(bytes, row.logprob).logprob);
        self.rows
            .tokens
            .push(String::from_utf8_lossy(bytes).into_owned());
        self.rows.token_logprobs.push(own);
        self.rows.top_logprobs.push(top);
        self.rows.text_offset.push(self.characters);
        self.characters += bytes.iter().filter(|b| begins_character(**b)).count();
    }

    /// The rows added since the last call.
    pub fn take(&mut self) -> CompletionLogprobs {
        std::mem::take(&mut self.rows)
    }
}

/// Whether a byte of UTF-8 text is the first of its character.
fn begins_character(byte: u8) -> bool {
    byte & 0b1100_0000 != 0b1000_0000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_leading_bytes_begin_a_character() {
        let text = "aé€😀";
        let begun = text.bytes().filter(|b| begins_character(*b)).count();
        assert_eq!(begun, text.chars().count());
    }
}
