//! A job that left the queue: its prompt being read, then its choices being spoken.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::{LogitsRequest, LogitsRow, SeqId, SnapshotId, TokenId};

use super::prefill::Prefill;
use super::queue::{PriorityKey, QueuedJob};
use super::sequence::{Sequence, StopConditions};
use crate::event::ChoiceStats;
use crate::job::{GenerationParams, JobId};
use crate::sample::{History, Sampler};
use crate::speculation::SurprisalEma;

/// One job on the device.
pub(crate) struct RunningJob {
    /// The job's name.
    pub(crate) id: JobId,
    /// Whose prompt is read first.
    pub(crate) key: PriorityKey,
    /// Its prompt.
    pub(crate) prompt: Arc<[TokenId]>,
    /// How it goes on.
    pub(crate) params: Arc<GenerationParams>,
    /// When its choices end.
    pub(crate) stop_conditions: StopConditions,
    /// Tokens of the prompt that a saved state held.
    pub(crate) cached: usize,
    /// The prompt being read; `None` once it is.
    pub(crate) prefill: Option<Prefill>,
    /// The state after the prompt, kept while choices wait to begin. The scheduler frees it.
    pub(crate) prompt_state: Option<PromptState>,
    /// Choices that have not begun.
    pub(crate) pending_choices: VecDeque<usize>,
    /// Choices being spoken. The scheduler closes their places on the device.
    pub(crate) sequences: Vec<Sequence>,
    /// What gave its place up to others and waits for one. The scheduler frees its states.
    pub(crate) preempted: Vec<Preempted>,
    /// Choices whose state could be saved nowhere, being read recomputing. The scheduler closes their places.
    pub(crate) recomputing: Vec<Recompute>,
}

/// A choice in the middle of its text, of which the device has lost the state: prompt and text are read recomputing.
pub(crate) struct Recompute {
    /// The choice; the place it names is the one being read into.
    pub(crate) sequence: Box<Sequence>,
    /// How far that is.
    pub(crate) prefill: Prefill,
}

impl Recompute {
    /// What has to be in the cache for the choice to go on: all but its last token.
    pub(crate) fn tokens(&self) -> &[TokenId] {
        let tokens = self.sequence.history.tokens();
        &tokens[..tokens.len() - 1]
    }
}

/// What was under way at a place that was given up. The name of the place is no longer good.
pub(crate) enum Preempted {
    /// A prompt half read, and the device's state where it stopped; without one it is read from its beginning recomputing.
    Prefill(Prefill, Option<SnapshotId>),
    /// A choice in the middle of its text, and the device's state there; without one prompt and text are read recomputing.
    Decode(Box<Sequence>, Option<SnapshotId>),
}

impl Preempted {
    /// The choice that was being said, if one was.
    pub(crate) fn choice(&self) -> Option<usize> {
        match self {
            Preempted::Prefill(..) => None,
            Preempted::Decode(sequence, _) => Some(sequence.choice),
        }
    }

    /// The state it goes on from, if one was saved.
    pub(crate) fn state(&self) -> Option<SnapshotId> {
        match self {
            Preempted::Prefill(_, state) | Preempted::Decode(_, state) => *state,
        }
    }
}

/// Where every choice begins.
#[derive(Debug)]
pub(crate) struct PromptState {
    /// The device's state after the prompt.
    pub(crate) snapshot: SnapshotId,
    /// What the target says there.
    pub(crate) row: LogitsRow,
}

/// What all sequences of one scheduler share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModelLimits<'a> {
    /// The model's own ending tokens.
    pub(crate) eos: &'a [TokenId],
    /// Length of a row.
    pub(crate) vocab: usize,
    /// The longest sequence.
    pub(crate) context: usize,
    /// Up to how many best tokens are fetched alone.
    pub(crate) top_limit: usize,
}

impl RunningJob {
    /// A job whose prompt is about to be read into `seq`.
    pub(crate) fn new(
        key: PriorityKey,
        entry: QueuedJob,
        seq: SeqId,
        model: ModelLimits<'_>,
    ) -> RunningJob {
        let params = Arc::new(entry.job.params);
        RunningJob {
            id: entry.job.id,
            key,
            prompt: entry.job.prompt,
            stop_conditions: StopConditions::new(&params, model.eos, model.context),
            prefill: Some(Prefill::new(seq, params.prompt_logprobs)),
            params,
            cached: 0,
            prompt_state: None,
            pending_choices: entry.open.into(),
            sequences: Vec::new(),
            preempted: Vec::new(),
            recomputing: Vec::new(),
        }
    }

    /// A choice of this job, in `seq`, which holds the prompt.
    pub(crate) fn sequence(&self, choice: usize, seq: SeqId, model: ModelLimits<'_>) -> Sequence {
        Sequence {
            job: self.id,
            choice,
            seq,
            history: History::new(&self.prompt, &self.params.sampling),
            sampler: self.sampler(choice, model),
            stop_conditions: self.stop_conditions.clone(),
            constraint: self.params.constraints.as_ref().map(|c| c.begin(choice)),
            speculate: self.params.speculate,
            window: self.params.window,
            surprisal: SurprisalEma::default(),
            stats: self.initial_stats(),
        }
    }

    /// What to ask at the last token of the prompt, if the next chunk of `size` reads it and something is to be
    /// said. All choices share the row: none has said anything that could tell them apart.
    pub(crate) fn first_request(
        &self,
        size: usize,
        model: ModelLimits<'_>,
    ) -> Option<LogitsRequest> {
        let prefill = self.prefill.as_ref()?;
        let generates = self.params.max_tokens > 0 && prefill.ends_next(self.prompt.len(), size);
        generates.then(|| self.sequence(0, prefill.seq, model).plan(&[]).request)
    }

    /// What chooses the tokens of a choice.
    pub(crate) fn sampler(&self, choice: usize, model: ModelLimits<'_>) -> Sampler {
        Sampler::new(
            self.params.clone(),
            choice,
            &self.stop_conditions.end_tokens,
            model.vocab,
            model.top_limit,
        )
    }

    /// The stats of a choice that has said nothing.
    pub(crate) fn initial_stats(&self) -> ChoiceStats {
        ChoiceStats {
            prompt_tokens: self.prompt.len(),
            cached_tokens: self.cached,
            ..ChoiceStats::default()
        }
    }

    /// Places on the device that it holds.
    pub(crate) fn open_seqs(&self) -> impl Iterator<Item = SeqId> {
        let prefilling = self.prefill.iter().map(|prefill| prefill.seq);
        let recomputing = self
            .recomputing
            .iter()
            .map(|recomputing| recomputing.prefill.seq);
        let decoding = self.sequences.iter().map(|sequence| sequence.seq);
        prefilling.chain(recomputing).chain(decoding)
    }

    /// A choice goes on in the middle of its text, at a place that holds it.
    pub(crate) fn resume_choice(&mut self, mut sequence: Box<Sequence>, seq: SeqId) {
        sequence.seq = seq;
        self.sequences.push(*sequence);
        self.sequences.sort_by_key(|sequence| sequence.choice);
    }

    /// Whether its prompt is being read, or will be read on.
    pub(crate) fn is_prefilling(&self) -> bool {
        let preempted = self
            .preempted
            .iter()
            .any(|preempted| preempted.choice().is_none());
        self.prefill.is_some() || preempted
    }

    /// The most tokens that a place of it must hold.
    pub(crate) fn max_len(&self) -> usize {
        self.stop_conditions.max_len(self.prompt.len())
    }

    /// Whether nothing of it is left to do.
    pub(crate) fn is_done(&self) -> bool {
        !self.is_prefilling()
            && self.pending_choices.is_empty()
            && self.sequences.is_empty()
            && self.preempted.is_empty()
            && self.recomputing.is_empty()
    }
}
