//! Prompt compression: a long prompt's message contents are shortened before prefill.
//!
//! [`PromptCompressor::compress`] decides (`decision`), finds the contents in the rendered prompt
//! (`contents`), has it scored (`scorer_thread`), selects with the crate `compress`, and
//! renders the conversation again with the shortened contents. So roles, tools and control tokens
//! always are the template's. A failure of any step leaves the prompt whole.
//!
//! In a continued conversation, `aged` compresses earlier messages one by one instead.

mod aged;
mod contents;
mod decision;
mod kept_texts;
mod progress;
mod raw_prompt;
mod scored_text;
mod scorer_thread;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chat::request::{ChatRequest, ConversationPolicy};
use chat::{CancelFlag, SpecialTokens, Tokenizer};
use compress::SessionRatios;
use contract::{ScorerConfig, ScorerInfo};

pub use self::decision::CompressionReason;
use self::decision::{CompressionPlan, PromptSize};
pub use self::kept_texts::TextStore;
use self::kept_texts::{KeptText, KeptTexts, TextKey};
pub use self::progress::{ScoringCounts, ScoringProgress};
pub use self::raw_prompt::RawPrompt;
use self::scored_text::{MarkedRanges, TokenizedText};
use self::scorer_thread::{ScorerHandle, ScoringClient, ScoringError};
use crate::open::devices::DeviceChoice;
use crate::settings::compression::CompressionSettings;
use crate::text::model_context::ModelContext;
use crate::text::prepare::{self, PreparedPrompt};

/// Changes with the segments that equal scores select.
const SELECTOR_VERSION: &str = "hearth selector 1";

/// Compresses prompts with a scorer.
pub struct PromptCompressor {
    settings: CompressionSettings,
    scorer: ScorerHandle,
    /// The scorer's file, if it is not the served model.
    scorer_path: Option<String>,
    /// The scorer's tokenizer, if its vocabulary is another one.
    tokenizer: Option<Tokenizer>,
    /// Hash of all that a kept text depends on besides its raw text and the keep ratio.
    identity: TextKey,
    kept: KeptTexts,
    /// Held while aged messages are scored, so that equal ones are scored once.
    aging: Mutex<()>,
    sessions: Mutex<SessionRatios>,
}

/// What a scorer is opened with besides its model.
#[derive(Default)]
pub struct ScorerTexts {
    /// The scorer's tokenizer, if its vocabulary is not the served model's.
    pub tokenizer: Option<Tokenizer>,
    /// The scorer's file, if it is not the served model.
    pub path: Option<String>,
    /// Hash of the served model, whose tokens the selection counts.
    pub served: [u8; 16],
    /// Where kept texts outlive the process, if anywhere.
    pub store: Option<Box<dyn TextStore>>,
}

/// What compression did with a prompt.
#[derive(Debug, Clone)]
pub struct CompressionOutcome {
    /// Why the prompt was or was not compressed.
    pub reason: CompressionReason,
    /// Tokens of the prompt as sent.
    pub tokens_before: usize,
    /// Tokens of the prompt as prefilled.
    pub tokens_after: usize,
    /// Time of scoring.
    pub scoring: Duration,
}

impl CompressionOutcome {
    /// A prompt that stays whole.
    pub fn whole(reason: CompressionReason, tokens: usize) -> CompressionOutcome {
        CompressionOutcome {
            reason,
            tokens_before: tokens,
            tokens_after: tokens,
            scoring: Duration::ZERO,
        }
    }

    /// Whether the prompt was shortened.
    pub fn is_compressed(&self) -> bool {
        self.tokens_after < self.tokens_before
    }

    /// Whether the next turn's prompt begins as this one does.
    pub fn keeps_prefix(&self) -> bool {
        use CompressionReason::{Aged, AgedCached};
        !self.is_compressed() || matches!(self.reason, Aged | AgedCached)
    }
}

/// A prompt's request and text side.
#[derive(Clone, Copy)]
pub struct PromptToCompress<'a> {
    /// The model's text side, and its context in tokens.
    pub model: (&'a ModelContext, usize),
    /// Server policy for conversations.
    pub policy: &'a ConversationPolicy,
    /// The request.
    pub request: &'a ChatRequest,
    /// Its prompt.
    pub prompt: &'a PreparedPrompt,
}

/// A request with shortened contents.
struct ShorterRequest {
    request: ChatRequest,
    /// Time of scoring; zero if nothing was scored now.
    scoring: Duration,
}

impl PromptCompressor {
    /// Opens the scorer.
    ///
    /// # Errors
    /// If the scorer cannot be opened.
    pub fn open(
        settings: CompressionSettings,
        config: ScorerConfig,
        choice: DeviceChoice,
        texts: ScorerTexts,
    ) -> anyhow::Result<PromptCompressor> {
        let mut identity = blake3::Hasher::new();
        identity.update(SELECTOR_VERSION.as_bytes());
        identity.update(&texts.served);
        identity.update(&config.model.hash.0);
        let scorer = ScorerHandle::open(config, choice)?;
        identity.update(&scorer.info().exit_layer.to_le_bytes());
        identity.update(format!("{:?}", settings.score).as_bytes());
        Ok(PromptCompressor {
            settings,
            scorer,
            scorer_path: texts.path,
            tokenizer: texts.tokenizer,
            identity: *identity.finalize().as_bytes(),
            kept: KeptTexts::new(texts.store),
            aging: Mutex::default(),
            sessions: Mutex::default(),
        })
    }

    /// The settings.
    pub fn settings(&self) -> &CompressionSettings {
        &self.settings
    }

    /// Properties of the scorer.
    pub fn scorer(&self) -> &ScorerInfo {
        self.scorer.info()
    }

    /// The scorer's file, if it is not the served model.
    pub fn scorer_path(&self) -> Option<&str> {
        self.scorer_path.as_deref()
    }

    /// The requests whose texts are scored or wait for it, in order of arrival.
    pub fn active(&self) -> Vec<ScoringCounts> {
        self.scorer.active()
    }

    /// Moves a session's keep ratio after a reply with this share of accepted drafts.
    pub fn observe(&self, session: &str, acceptance: f64) {
        if self.settings.keep_by_session {
            let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
            sessions.observe(session, acceptance);
        }
    }

    fn keep(&self, request: &ChatRequest, tokens: usize) -> f64 {
        match &request.cache.session {
            Some(session) if self.settings.keep_by_session => {
                let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
                sessions.ratio(session)
            }
            _ => self.settings.keep.of(tokens),
        }
    }

    /// Whether [`compress`](PromptCompressor::compress) would have texts scored, unless it knows
    /// their scores.
    pub fn will_score(&self, of: PromptToCompress<'_>) -> bool {
        self.plan(of).is_ok()
    }

    fn plan(&self, of: PromptToCompress<'_>) -> Result<CompressionPlan, CompressionReason> {
        let mode = of.request.compression.unwrap_or(self.settings.mode);
        let size = PromptSize {
            tokens: of.prompt.ids.len(),
            threshold: self.settings.threshold,
            context: of.model.1,
        };
        decision::plan(of.request, mode, size, self.settings.ages)
    }

    /// The prompt to prefill instead, if it is to be compressed, and what was done. Blocks during
    /// scoring.
    pub fn compress(
        &self,
        of: PromptToCompress<'_>,
        cancel: &CancelFlag,
        progress: &Arc<ScoringProgress>,
    ) -> (Option<PreparedPrompt>, CompressionOutcome) {
        let tokens = of.prompt.ids.len();
        let client = ScoringClient { cancel, progress };
        let plan = self.plan(of);
        let found = plan.and_then(|plan| Ok((plan, self.shortened(of, plan, client)?)));
        match found {
            Ok((plan, (prompt, scoring))) => {
                let reason = match (plan, scoring.is_zero()) {
                    (CompressionPlan::Whole, false) => CompressionReason::Compressed,
                    (CompressionPlan::Whole, true) => CompressionReason::Cached,
                    (CompressionPlan::Aged, false) => CompressionReason::Aged,
                    (CompressionPlan::Aged, true) => CompressionReason::AgedCached,
                };
                let outcome = CompressionOutcome {
                    reason,
                    tokens_before: tokens,
                    tokens_after: prompt.ids.len(),
                    scoring,
                };
                (Some(prompt), outcome)
            }
            Err(reason) => (None, CompressionOutcome::whole(reason, tokens)),
        }
    }

    /// The compressed prompt and the time of scoring.
    fn shortened(
        &self,
        of: PromptToCompress<'_>,
        plan: CompressionPlan,
        client: ScoringClient<'_>,
    ) -> Result<(PreparedPrompt, Duration), CompressionReason> {
        let ShorterRequest { request, scoring } = match plan {
            CompressionPlan::Whole => self.compress_whole(of, client)?,
            CompressionPlan::Aged => self.compress_aged(of.model.0, of.request, client)?,
        };
        let before = of.prompt.ids.len();
        let rendered = Instant::now();
        let shorter = prepare::chat(of.model, of.policy, &request, client.cancel);
        let shorter = shorter.map_err(|error| {
            tracing::warn!(%error, "a prompt could not be compressed; the whole prompt is used");
            CompressionReason::Failed(error.to_string())
        })?;
        if self.settings.profile {
            tracing::info!(
                tokens = before,
                kept = shorter.ids.len(),
                scoring_ms = scoring.as_secs_f64() * 1e3,
                rendering_ms = rendered.elapsed().as_secs_f64() * 1e3,
                "prompt compressed"
            );
        }
        if shorter.ids.len() >= before {
            return Err(CompressionReason::NoGain);
        }
        Ok((shorter, scoring))
    }

    /// Compresses the contents of all messages, scored by the prompt's last tokens.
    fn compress_whole(
        &self,
        of: PromptToCompress<'_>,
        client: ScoringClient<'_>,
    ) -> Result<ShorterRequest, CompressionReason> {
        let keep = self.keep(of.request, of.prompt.ids.len());
        let key = self.key("prompt", &of.prompt.text, keep);
        let (texts, scoring) = match self.kept.get(&key) {
            Some(texts) => (texts, Duration::ZERO),
            None => {
                let begin = Instant::now();
                let texts = self.select(of, keep, client)?;
                let scoring = begin.elapsed().max(Duration::from_nanos(1));
                (self.kept.insert(key, texts), scoring)
            }
        };
        let mut request = of.request.clone();
        for text in &*texts {
            // A stored text of damaged origin must not panic.
            if let Some(message) = request.messages.get_mut(text.message) {
                message.content.clone_from(&text.content);
            }
        }
        Ok(ShorterRequest { request, scoring })
    }

    /// Scores a prompt and selects what of its contents stays.
    fn select(
        &self,
        of: PromptToCompress<'_>,
        keep: f64,
        client: ScoringClient<'_>,
    ) -> Result<Vec<KeptText>, CompressionReason> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "a prompt could not be scored; the whole prompt is used");
            CompressionReason::Failed(error.to_string())
        };
        let (text, ids) = (&*of.prompt.text, &*of.prompt.ids);
        let starts = of.model.0.tokenizer.token_starts(text, ids);
        let starts = starts.ok_or_else(|| failed(&"the tokens are not those of the text"))?;
        let contents = contents::find(text, &starts, &of.request.messages);
        if contents.found.is_empty() {
            return Err(CompressionReason::NothingToCut);
        }
        let marked = MarkedRanges {
            parts: contents
                .found
                .iter()
                .map(|content| content.in_prompt.clone())
                .collect(),
            query: contents.query.clone(),
            tail_end: contents.tail_end,
        };
        let tokenized = TokenizedText {
            text,
            ids,
            starts: &starts,
            special: SpecialTokens::Parse,
        };
        let selection = self.selection(tokenized, &marked, keep, client);
        let selection = selection.map_err(|error| failed(&error))?;
        let kept = contents.found.iter().enumerate().map(|(part, found)| {
            let content = &of.request.messages[found.message].content;
            let kept = selection.text(part, &text[found.in_prompt.clone()]);
            let (before, behind) = (&content[..found.bytes.start], &content[found.bytes.end..]);
            KeptText {
                message: found.message,
                content: format!("{before}{kept}{behind}"),
            }
        });
        Ok(kept.collect())
    }

    /// Key of a text's kept text.
    fn key(&self, of: &str, text: &str, keep: f64) -> TextKey {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.identity);
        hasher.update(of.as_bytes());
        hasher.update(&keep.to_le_bytes());
        hasher.update(text.as_bytes());
        *hasher.finalize().as_bytes()
    }

    fn lock_aging(&self) -> MutexGuard<'_, ()> {
        self.aging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use chat::openai::request::chat_request;
    use chat::request::{CompressionMode, LateSystem};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_scorer_that_fails_leaves_the_prompt_whole() {
        let loaded = crate::open::tiny();
        let scorer = ScorerConfig {
            model: loaded.spec,
            weights: loaded.weights,
            exit_layer: None,
            // Less than the prompt, so that every call fails.
            max_tokens: 64,
        };
        let settings = CompressionSettings {
            mode: CompressionMode::Always,
            ..CompressionSettings::default()
        };
        let choice = DeviceChoice::default().on_the_cpu();
        let texts = ScorerTexts::default();
        let compressor = PromptCompressor::open(settings, scorer, choice, texts).unwrap();
        let text = "The mill stands by the river. ".repeat(60);
        let body = json!({"messages": [{"role": "user", "content": format!("{text}\n\nWhere?")}]});
        let request = chat_request(body.to_string().as_bytes()).unwrap();
        let policy = ConversationPolicy {
            late_system: LateSystem::User,
            thinking_default: Some(false),
            now_unix: 0,
        };
        let model = (&crate::commands::tiny_model(), 8192);
        let cancel = CancelFlag::default();
        let prompt = prepare::chat(model, &policy, &request, &cancel).unwrap();
        let of = PromptToCompress {
            model,
            policy: &policy,
            request: &request,
            prompt: &prompt,
        };
        let (shorter, outcome) = compressor.compress(of, &cancel, &Arc::default());
        assert!(shorter.is_none());
        let CompressionReason::Failed(why) = &outcome.reason else {
            panic!("{outcome:?}");
        };
        assert!(why.contains("64 that the scorer"), "{why}");
        assert_eq!(outcome.tokens_after, prompt.ids.len());
    }
}
