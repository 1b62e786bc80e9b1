//! Prompts of text completions, which have no messages: what stands before their end is shortened.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chat::openai::request::{CompletionPrompt, CompletionRequest};
use chat::request::CompressionMode;
use chat::{CancelFlag, SpecialTokens, Tokenizer};
use contract::{TokenId, TokenKind};

use super::contents;
use super::kept_texts::KeptText;
use super::scored_text::{MarkedRanges, TokenizedText};
use super::scorer_thread::ScoringClient;
use super::{CompressionOutcome, CompressionReason, PromptCompressor};

/// A prompt of a text completion.
#[derive(Clone, Copy)]
pub struct RawPrompt<'a> {
    /// The served model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The request.
    pub request: &'a CompletionRequest,
    /// One of its prompts.
    pub prompt: &'a CompletionPrompt,
    /// The prompt's tokens.
    pub ids: &'a [TokenId],
}

impl RawPrompt<'_> {
    /// The text to compress; fails with the reason why the prompt stays whole.
    fn text(&self, mode: CompressionMode, threshold: usize) -> Result<&str, CompressionReason> {
        if mode == CompressionMode::Off {
            return Err(CompressionReason::Off);
        }
        let options = &self.request.tokens;
        let has_logprobs = options.prompt_logprobs.is_some();
        let is_cut = options.truncation.is_some();
        if has_logprobs || is_cut || self.request.echo || self.request.gap.is_some() {
            return Err(CompressionReason::ExactPrompt);
        }
        let CompletionPrompt::Text(text) = self.prompt else {
            return Err(CompressionReason::TokenIds);
        };
        let tokens = self.ids.len();
        if mode == CompressionMode::Auto && tokens < threshold {
            return Err(CompressionReason::Short { tokens, threshold });
        }
        // A begin token that the tokenizer puts in front is not of the text.
        let is_own = |at: usize, id: TokenId| {
            at > 0 || text.as_bytes().starts_with(self.tokenizer.bytes(id))
        };
        let mut ids = self.ids.iter().copied().enumerate();
        if ids.any(|(at, id)| self.tokenizer.kind(id) == TokenKind::Control && is_own(at, id)) {
            return Err(CompressionReason::ControlTokens);
        }
        Ok(text)
    }
}

impl PromptCompressor {
    /// The tokens to prefill instead, if the prompt is to be compressed, and what was done. Blocks
    /// during scoring.
    ///
    /// The end of the prompt stays whole, since the completion continues it.
    pub fn compress_raw(
        &self,
        of: RawPrompt<'_>,
        cancel: &CancelFlag,
    ) -> (Option<Vec<TokenId>>, CompressionOutcome) {
        let client = ScoringClient {
            cancel,
            progress: &Arc::default(),
        };
        let tokens = of.ids.len();
        match self.shortened_raw(of, client) {
            Ok((ids, scoring)) => {
                let outcome = CompressionOutcome {
                    reason: if scoring.is_zero() {
                        CompressionReason::Cached
                    } else {
                        CompressionReason::Compressed
                    },
                    tokens_before: tokens,
                    tokens_after: ids.len(),
                    scoring,
                };
                (Some(ids), outcome)
            }
            Err(reason) => (None, CompressionOutcome::whole(reason, tokens)),
        }
    }

    fn shortened_raw(
        &self,
        of: RawPrompt<'_>,
        client: ScoringClient<'_>,
    ) -> Result<(Vec<TokenId>, Duration), CompressionReason> {
        let mode = of.request.compression.unwrap_or(self.settings.mode);
        let text = of.text(mode, self.settings.threshold)?;
        let failed = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "a prompt could not be scored; the whole prompt is used");
            CompressionReason::Failed(error.to_string())
        };
        let starts = of.tokenizer.token_starts(text, of.ids);
        let starts = starts.ok_or_else(|| failed(&"the tokens are not those of the text"))?;
        let tail_end = text.trim_end().len();
        let body_end = contents::tail_start(&text[..tail_end], &starts, contents::QUERY_TOKENS);
        if !contents::is_long(&text[..body_end]) {
            return Err(CompressionReason::NothingToCut);
        }
        let query = contents::tail_start(&text[..tail_end], &starts, contents::QUESTION_TOKENS);
        if mode == CompressionMode::Auto && text[query..].contains("```") {
            return Err(CompressionReason::Code);
        }
        let keep = self.settings.keep.of(of.ids.len());
        let key = self.key("completion", text, keep);
        let known = self.kept.get(&key);
        let known = known.and_then(|texts| texts.first().map(|text| text.content.clone()));
        let (body, scoring) = match known {
            Some(body) => (body, Duration::ZERO),
            None => {
                let begin = Instant::now();
                let tokenized = TokenizedText {
                    text,
                    ids: of.ids,
                    starts: &starts,
                    special: SpecialTokens::Parse,
                };
                let marked = MarkedRanges {
                    parts: std::iter::once(0..body_end).collect(),
                    query: query.max(body_end)..tail_end,
                    tail_end,
                };
                let selection = self.selection(tokenized, &marked, keep, client);
                let selection = selection.map_err(|error| failed(&error))?;
                let body = selection.text(0, &text[..body_end]);
                let kept = KeptText {
                    message: 0,
                    content: body.clone(),
                };
                self.kept.insert(key, vec![kept]);
                (body, begin.elapsed().max(Duration::from_nanos(1)))
            }
        };
        let shorter = format!("{body}{}", &text[body_end..]);
        let ids = of
            .tokenizer
            .encode_prompt_up_to(&shorter, usize::MAX.into());
        let ids = ids.map_err(|error| failed(&error))?;
        if ids.len() >= of.ids.len() {
            return Err(CompressionReason::NoGain);
        }
        Ok((ids, scoring))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn reason(fields: Value, mode: CompressionMode) -> Option<CompressionReason> {
        let loaded = crate::open::tiny();
        let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
        let mut body = json!({"prompt": "one two"});
        let fields = fields.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(fields);
        let request = CompletionRequest::from_json(body.to_string().as_bytes()).unwrap();
        let prompt = &request.prompts[0];
        let limit = chat::EncodeLimit::from(usize::MAX);
        let ids = request.token_ids(prompt, &tokenizer, limit).unwrap();
        let of = RawPrompt {
            tokenizer: &tokenizer,
            request: &request,
            prompt,
            ids: &ids,
        };
        of.text(mode, 100).map(str::to_owned).err()
    }

    #[test]
    fn raw_prompts_that_must_stay_as_sent_are_named_by_their_reason() {
        use CompressionMode::{Always, Auto, Off};
        assert_eq!(reason(json!({}), Always), None);
        assert_eq!(reason(json!({}), Off), Some(CompressionReason::Off));
        let short = reason(json!({}), Auto);
        assert!(matches!(
            short,
            Some(CompressionReason::Short { threshold: 100, .. })
        ));
        for exact in [json!({"echo": true}), json!({"prompt_logprobs": 1})] {
            let found = reason(exact, Always);
            assert_eq!(found, Some(CompressionReason::ExactPrompt));
        }
        let ids = reason(json!({"prompt": [1, 2]}), Always);
        assert_eq!(ids, Some(CompressionReason::TokenIds));
        let turns = json!({"prompt": "<|im_start|>user\na<|im_end|>\n"});
        let found = reason(turns, Always);
        assert_eq!(found, Some(CompressionReason::ControlTokens));
    }
}
