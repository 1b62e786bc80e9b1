//! Aged messages of a continued conversation, compressed one by one (FlowKV).
//!
//! Each long message before the hot tail is scored alone, by its own last tokens. What stays of it
//! is a function of its content and of the settings. So every later turn begins with the same
//! bytes, and the prefix cache knows them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chat::conversation::{Message, Role};
use chat::request::{ChatRequest, CompressionMode};
use chat::{CancelFlag, SpecialTokens};

use super::contents;
use super::kept_texts::KeptText;
use super::scored_text::{MarkedRanges, TokenizedText};
use super::scorer_thread::ScoringClient;
use super::{CompressionReason, PromptCompressor, ScoringError, ShorterRequest};
use crate::text::model_context::ModelContext;

/// Messages at the end of a conversation that stay whole.
const HOT: usize = 2;
/// Conversations whose aged messages have fewer tokens in total stay whole.
const MIN_TOKENS: usize = 512;

/// The messages that may be compressed: all before the hot tail, without system messages.
///
/// The results of one reply's tool calls are hot together, and so is that reply.
fn aged(messages: &[Message]) -> impl Iterator<Item = usize> {
    let mut hot = messages.len().saturating_sub(HOT);
    while hot > 0 && messages[hot].role == Role::Tool {
        hot -= 1;
    }
    (0..hot).filter(|at| messages[*at].role != Role::System)
}

impl PromptCompressor {
    /// The request with its aged messages compressed; as it is if that is off or not possible.
    pub fn with_aged_compressed(&self, model: &ModelContext, request: ChatRequest) -> ChatRequest {
        let mode = request.compression.unwrap_or(self.settings.mode);
        if !self.settings.ages || mode == CompressionMode::Off {
            return request;
        }
        let client = ScoringClient {
            cancel: &CancelFlag::default(),
            progress: &Arc::default(),
        };
        match self.compress_aged(model, &request, client) {
            Ok(aged) => aged.request,
            Err(reason) => {
                tracing::debug!(%reason, "aged messages stay whole");
                request
            }
        }
    }

    /// Compresses the aged messages of a conversation.
    ///
    /// Messages below the threshold stay whole; `always` has no threshold.
    pub(super) fn compress_aged(
        &self,
        model: &ModelContext,
        request: &ChatRequest,
        client: ScoringClient<'_>,
    ) -> Result<ShorterRequest, CompressionReason> {
        let always = request.compression.unwrap_or(self.settings.mode) == CompressionMode::Always;
        let least = if always { 0 } else { self.settings.threshold };
        let mut shorter = request.clone();
        let (mut tokens, mut scoring, mut is_any) = (0, Duration::ZERO, false);
        // Prefix warm-up may be scoring the same messages.
        let _one_at_a_time = self.lock_aging();
        for at in aged(&request.messages) {
            let text = &request.messages[at].content;
            let ids = model.tokenizer.encode(text, SpecialTokens::AsText);
            let ids = ids.map_err(|error| CompressionReason::Failed(error.to_string()))?;
            tokens += ids.len();
            let Some(starts) = model.tokenizer.token_starts(text, &ids) else {
                continue;
            };
            if ids.len() < least || !contents::is_long(text) {
                continue;
            }
            let of = TokenizedText {
                text,
                ids: &ids,
                starts: &starts,
                special: SpecialTokens::AsText,
            };
            let kept = self.kept_of_message(of, &mut scoring, client);
            let kept = kept.map_err(|error| {
                tracing::warn!(%error, "an aged message could not be scored; all stay whole");
                CompressionReason::Failed(error.to_string())
            })?;
            if let Some(kept) = kept {
                shorter.messages[at].content = kept;
                is_any = true;
            }
        }
        if tokens < MIN_TOKENS {
            return Err(CompressionReason::FewAged { tokens });
        }
        if !is_any {
            return Err(CompressionReason::NothingToCut);
        }
        Ok(ShorterRequest {
            request: shorter,
            scoring,
        })
    }

    /// What stays of a message; `None` if it is too short. Adds the time of scoring.
    fn kept_of_message(
        &self,
        of: TokenizedText<'_>,
        scoring: &mut Duration,
        client: ScoringClient<'_>,
    ) -> Result<Option<String>, ScoringError> {
        let tail_end = of.text.trim_end().len();
        let body_end = contents::query_body(&of.text[..tail_end], 0, of.starts);
        if body_end == 0 {
            return Ok(None);
        }
        // The ratio of a session moves, and with it each byte of the message would.
        let keep = self.settings.keep.of(of.ids.len());
        let key = self.key("message", of.text, keep);
        if let Some(known) = self.kept.get(&key) {
            return Ok(known.first().map(|text| text.content.clone()));
        }
        let begin = Instant::now();
        let marked = MarkedRanges {
            parts: std::iter::once(0..body_end).collect(),
            query: body_end..tail_end,
            tail_end,
        };
        let selection = self.selection(of, &marked, keep, client)?;
        *scoring += begin.elapsed().max(Duration::from_nanos(1));
        let body = selection.text(0, &of.text[..body_end]);
        let content = format!("{body}{}", &of.text[body_end..]);
        let kept = KeptText {
            message: 0,
            content: content.clone(),
        };
        self.kept.insert(key, vec![kept]);
        Ok(Some(content))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn indices(roles: &[Role]) -> Vec<usize> {
        let messages: Vec<Message> = roles.iter().map(|role| Message::new(*role, "a")).collect();
        aged(&messages).collect()
    }

    #[test]
    fn system_prompt_and_hot_tail_stay_whole() {
        use Role::{Assistant, System, Tool, User};
        assert_eq!(indices(&[]), [0; 0]);
        assert_eq!(indices(&[User, Assistant]), [0; 0]);
        assert_eq!(indices(&[User, Assistant, User]), [0]);
        assert_eq!(indices(&[System, User, Assistant, User]), [1]);
        let long = [System, User, Assistant, Tool, Assistant, User];
        assert_eq!(indices(&long), [1, 2, 3]);
        // Results of the running turn are hot, however many they are.
        let running = [System, User, Assistant, Tool, Tool, Tool];
        assert_eq!(indices(&running), [1]);
        assert_eq!(indices(&[Tool, Tool, Tool]), [0; 0]);
    }
}
