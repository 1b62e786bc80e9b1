//! Logprobs of a prompt by token id, in vLLM's format.

use chat::Tokenizer;
use chat::openai::response::{PromptLogprob, PromptTokenLogprobs};
use chat::reply::TopLogprob;
use contract::TokenId;
use decode::Logprobs;

/// Each prompt token with its `top` likeliest rivals, `[prompt]`; the first has no row.
pub fn by_token(
    tokenizer: &Tokenizer,
    ids: &[TokenId],
    rows: &[Option<Logprobs>],
    top: usize,
) -> Vec<Option<PromptTokenLogprobs>> {
    let of_token = |(id, row): (&TokenId, &Option<Logprobs>)| {
        let row = row.as_ref()?;
        let entry = |id: TokenId, logprob: f32, rank: Option<usize>| {
            let shown = TopLogprob::new(tokenizer.bytes(id), logprob);
            let entry = PromptLogprob {
                logprob: shown.logprob,
                rank,
                decoded_token: shown.token,
            };
            (id.0, entry)
        };
        let rank = row.top.iter().position(|(other, _)| other == id);
        let mut entries = vec![entry(*id, row.logprob, rank.map(|at| at + 1))];
        let rivals = row.top.iter().take(top).enumerate();
        let rivals = rivals.filter(|(_, (other, _))| other != id);
        entries.extend(rivals.map(|(at, (other, logprob))| entry(*other, *logprob, Some(at + 1))));
        Some(PromptTokenLogprobs(entries))
    };
    ids.iter().zip(rows).map(of_token).collect()
}
