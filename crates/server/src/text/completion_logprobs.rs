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
    /// Rows not yet taken.
    rows: CompletionLogprobs,
    /// Characters so far.
    characters: usize,
}

impl LogprobColumns {
    /// Empty columns at the start of the text.
    pub fn new(tokenizer: Arc<Tokenizer>) -> LogprobColumns {
        LogprobColumns {
            tokenizer,
            rows: CompletionLogprobs::default(),
            characters: 0,
        }
    }

    /// Adds the prompt tokens; the first has no logprob.
    pub fn prompt(&mut self, ids: &[TokenId], rows: &[Option<Logprobs>]) {
        for (id, row) in ids.iter().zip(rows) {
            let bytes = self.tokenizer.bytes(*id).to_vec();
            self.row(&bytes, row.as_ref());
        }
    }

    /// Adds generated tokens.
    pub fn shown(&mut self, shown: &[SentToken]) {
        for token in shown {
            self.row(&token.bytes, Some(&token.logprobs));
        }
    }

    fn row(&mut self, bytes: &[u8], row: Option<&Logprobs>) {
        let chance = |id: &TokenId, logprob: f32| {
            let chance = TopLogprob::new(self.tokenizer.bytes(*id), logprob);
            (chance.token, chance.logprob)
        };
        let top = row.map(|row| {
            let rivals = row.top.iter().map(|(id, logprob)| chance(id, *logprob));
            TopLogprobsByText(rivals.collect())
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
