//! Prompt compression: a long prompt's message contents are shortened before prefill.
//!
//! [`PromptCompressor::compress`] decides (`decision`), finds the contents in the rendered prompt
//! (`contents`), has it scored (`scorer_thread`), selects with the crate `compress`, and
//! renders the conversation again with the shortened contents. So roles, tools and control tokens
//! always are the template's. A failure of any step leaves the prompt whole.

mod contents;
mod decision;
mod scorer_thread;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chat::request::{ChatRequest, ConversationPolicy};
use chat::{CancelFlag, SpecialTokens, Tokenizer};
use compress::{
    ContentPart, ScoredToken, SegmentLimits, Selection, SelectionSettings, SessionRatios, select,
};
use contract::{ScorerConfig, ScorerInfo, TokenId};

use self::contents::{FoundContent, PromptContents};
pub use self::decision::CompressionReason;
use self::scorer_thread::{ScorerHandle, ScoringError};
use crate::open::devices::DeviceChoice;
use crate::settings::compression::CompressionSettings;
use crate::text::model_context::ModelContext;
use crate::text::prepare::{self, PreparedPrompt};

/// Selections that are remembered by their prompt.
const REMEMBERED: usize = 256;
/// The longest block of code that is kept whole, in tokens of the budget's share.
const BLOCK_SHARE: usize = 8;
/// Bytes of a token, about.
const TOKEN_BYTES: usize = 4;

/// Compresses prompts with a scorer.
pub struct PromptCompressor {
    settings: CompressionSettings,
    scorer: ScorerHandle,
    /// The scorer's file, if it is not the served model.
    scorer_path: Option<String>,
    /// The scorer's tokenizer, if its vocabulary is another one.
    tokenizer: Option<Tokenizer>,
    /// Kept texts by prompt and keep ratio, so that an equal request need not be scored again.
    selections: Mutex<HashMap<[u8; 32], Arc<Vec<KeptText>>>>,
    sessions: Mutex<SessionRatios>,
}

/// The shortened content of a message.
#[derive(Debug, Clone)]
struct KeptText {
    message: usize,
    content: String,
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

impl PromptCompressor {
    /// Opens the scorer. `tokenizer` is its own if its vocabulary is not the served model's, and
    /// `path` its file if it is not the served model.
    ///
    /// # Errors
    /// If the scorer cannot be opened.
    pub fn open(
        settings: CompressionSettings,
        config: ScorerConfig,
        choice: DeviceChoice,
        (tokenizer, path): (Option<Tokenizer>, Option<String>),
    ) -> anyhow::Result<PromptCompressor> {
        Ok(PromptCompressor {
            settings,
            scorer: ScorerHandle::open(config, choice)?,
            scorer_path: path,
            tokenizer,
            selections: Mutex::default(),
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

    /// Prompts that are scored or wait for it, and token rows done and in total of the current one.
    pub fn progress(&self) -> [usize; 3] {
        self.scorer.progress().counts()
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

    /// The prompt to prefill instead, if it is to be compressed, and what was done. Blocks during
    /// scoring.
    pub fn compress(
        &self,
        of: PromptToCompress<'_>,
        cancel: &CancelFlag,
    ) -> (Option<PreparedPrompt>, CompressionOutcome) {
        let tokens = of.prompt.ids.len();
        let mode = of.request.compression.unwrap_or(self.settings.mode);
        let check = decision::check(of.request, mode, (tokens, self.settings.threshold));
        let found = check.and_then(|()| self.shortened(of, cancel));
        match found {
            Ok((prompt, scoring)) => {
                let outcome = CompressionOutcome {
                    reason: if scoring.is_zero() {
                        CompressionReason::Cached
                    } else {
                        CompressionReason::Compressed
                    },
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
        cancel: &CancelFlag,
    ) -> Result<(PreparedPrompt, Duration), CompressionReason> {
        let PromptToCompress {
            model,
            policy,
            request,
            prompt,
        } = of;
        let keep = self.keep(request, prompt.ids.len());
        let key = key(prompt, keep);
        let known = self.lock().get(&key).map(Arc::clone);
        let (texts, scoring) = match known {
            Some(texts) => (texts, Duration::ZERO),
            None => {
                let (texts, scoring) = self.select(of, keep, cancel)?;
                let texts = Arc::new(texts);
                let mut selections = self.lock();
                if selections.len() >= REMEMBERED {
                    selections.clear();
                }
                selections.insert(key, Arc::clone(&texts));
                (texts, scoring)
            }
        };
        let mut shorter = request.clone();
        for text in &*texts {
            shorter.messages[text.message]
                .content
                .clone_from(&text.content);
        }
        let failed = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "a prompt could not be compressed; the whole prompt is used");
            CompressionReason::Failed(error.to_string())
        };
        let rendered = Instant::now();
        let shorter = prepare::chat(model, policy, &shorter, cancel);
        let shorter = shorter.map_err(|error| failed(&error))?;
        if self.settings.profile {
            tracing::info!(
                tokens = prompt.ids.len(),
                kept = shorter.ids.len(),
                scoring_ms = scoring.as_secs_f64() * 1e3,
                rendering_ms = rendered.elapsed().as_secs_f64() * 1e3,
                "prompt compressed"
            );
        }
        if shorter.ids.len() >= prompt.ids.len() {
            return Err(CompressionReason::NoGain);
        }
        Ok((shorter, scoring))
    }

    /// Scores a prompt and selects what of its contents stays.
    fn select(
        &self,
        of: PromptToCompress<'_>,
        keep: f64,
        cancel: &CancelFlag,
    ) -> Result<(Vec<KeptText>, Duration), CompressionReason> {
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
        let begin = Instant::now();
        let scores = self.scores((text, ids, &starts), &contents, cancel);
        let scores = scores.map_err(|error| failed(&error))?;
        let scoring = begin.elapsed().max(Duration::from_nanos(1));
        let token = |at: usize| ScoredToken {
            id: ids[at].0,
            start: starts[at],
            score: scores.at(starts[at]),
        };
        let tokens_in = |bytes: &std::ops::Range<usize>| {
            let first = starts.partition_point(|start| *start < bytes.start);
            first..starts.partition_point(|start| *start < bytes.end)
        };
        let tokens: Vec<Vec<ScoredToken>> = contents
            .found
            .iter()
            .map(|content| {
                let begin = content.in_prompt.start;
                let own = tokens_in(&content.in_prompt).map(token);
                own.map(|token| ScoredToken {
                    start: token.start - begin,
                    ..token
                })
                .collect()
            })
            .collect();
        let parts: Vec<ContentPart<'_>> = contents
            .found
            .iter()
            .zip(&tokens)
            .map(|(content, tokens)| ContentPart {
                text: &text[content.in_prompt.clone()],
                tokens,
            })
            .collect();
        let query: Vec<u32> = ids[tokens_in(&contents.query)]
            .iter()
            .map(|id| id.0)
            .collect();
        let total: usize = tokens.iter().map(Vec::len).sum();
        let block_bytes = (total as f64 * keep) as usize / BLOCK_SHARE * TOKEN_BYTES;
        let limits = SegmentLimits::default();
        let settings = SelectionSettings {
            keep,
            limits: SegmentLimits {
                block_bytes: block_bytes.clamp(limits.sentence_bytes, 4 * limits.block_bytes),
                ..limits
            },
            ..SelectionSettings::default()
        };
        let selection = select(&parts, &query, &settings);
        let kept = contents.found.iter().zip(&parts).enumerate();
        let kept = kept.map(|(part, (found, of_part))| {
            let message = &of.request.messages[found.message].content;
            kept_text(&selection, (part, of_part.text), found, message)
        });
        Ok((kept.collect(), scoring))
    }

    /// Scores of the prompt up to its tail.
    fn scores(
        &self,
        (text, ids, starts): (&str, &[TokenId], &[usize]),
        contents: &PromptContents,
        cancel: &CancelFlag,
    ) -> Result<ByteScores, ScoringError> {
        let text = &text[..contents.tail_end];
        let n = starts.partition_point(|start| *start < contents.tail_end);
        let (ids, starts) = match &self.tokenizer {
            None => (ids[..n].to_vec(), starts[..n].to_vec()),
            Some(own) => {
                let ids = own.encode(text, SpecialTokens::Parse);
                let ids = ids.map_err(|error| ScoringError::Text(error.to_string()))?;
                let starts = own.token_starts(text, &ids).ok_or_else(|| {
                    ScoringError::Text("the scorer's tokens are not those of the text".to_owned())
                })?;
                (ids, starts)
            }
        };
        let mut settings = self.settings.score;
        settings.tail_tokens = settings.tail_tokens.min(ids.len());
        let scores = self.scorer.score(ids, settings, cancel)?;
        Ok(ByteScores {
            starts,
            scores,
            chunk: settings.chunk,
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<[u8; 32], Arc<Vec<KeptText>>>> {
        self.selections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Scores of a text by byte.
struct ByteScores {
    /// First byte of each of the scorer's tokens.
    starts: Vec<usize>,
    /// Per chunk of these tokens.
    scores: Vec<f32>,
    chunk: usize,
}

impl ByteScores {
    /// The score of the token that byte `at` lies in; 0 behind the scored text.
    fn at(&self, at: usize) -> f32 {
        let token = self.starts.partition_point(|start| *start <= at).max(1) - 1;
        self.scores.get(token / self.chunk).copied().unwrap_or(0.0)
    }
}

/// A message's content with its middle shortened.
fn kept_text(
    selection: &Selection,
    (part, text): (usize, &str),
    found: &FoundContent,
    content: &str,
) -> KeptText {
    let kept = selection.text(part, text);
    KeptText {
        message: found.message,
        content: format!(
            "{}{kept}{}",
            &content[..found.bytes.start],
            &content[found.bytes.end..]
        ),
    }
}

/// Key of a prompt's selection.
fn key(prompt: &PreparedPrompt, keep: f64) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&keep.to_le_bytes());
    hasher.update(prompt.text.as_bytes());
    *hasher.finalize().as_bytes()
}
