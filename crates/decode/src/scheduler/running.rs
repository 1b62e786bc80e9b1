//! A running job: its prompt in prefill, then its choices in decode.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::{LogitsRequest, LogitsRow, SeqId, SnapshotId, TokenId};

use crate::event::ChoiceStats;
use crate::job::{GenerationParams, JobId};
use crate::sample::{History, Sampler};
use crate::speculation::SurprisalEma;

use super::prefill::Prefill;
use super::queue::{PriorityKey, QueuedJob};
use super::sequence::{Sequence, StopConditions};

/// A job on the device. The scheduler closes its sequences and frees its snapshots.
pub(super) struct RunningJob {
    pub(super) id: JobId,
    /// Its place in the priority order.
    pub(super) key: PriorityKey,
    pub(super) prompt: Arc<[TokenId]>,
    pub(super) params: Arc<GenerationParams>,
    pub(super) stop_conditions: StopConditions,
    /// Prompt tokens taken from a cached prefix.
    pub(super) cached: usize,
    /// The prefill of the prompt; `None` once it is complete.
    pub(super) prefill: Option<Prefill>,
    /// The state after the prompt, kept while choices wait to start.
    pub(super) prompt_state: Option<PromptState>,
    /// Choices that have not started.
    pub(super) pending_choices: VecDeque<usize>,
    /// Choices that decode.
    pub(super) sequences: Vec<Sequence>,
    /// Preempted work.
    pub(super) preempted: Vec<Preempted>,
    /// Whether the preempted work is a prompt that gave up its sequence for a short one.
    pub(super) has_yielded: bool,
    /// How often that happened.
    pub(super) yields: u32,
    /// Choices whose prompt and output are recomputed.
    pub(super) recomputing: Vec<Recompute>,
}

/// A choice whose device state was lost to preemption: its prompt and output are prefilled again.
pub(super) struct Recompute {
    /// The choice. Its `seq` is stale.
    pub(super) sequence: Box<Sequence>,
    /// The prefill of its tokens.
    pub(super) prefill: Prefill,
}

impl Recompute {
    /// The tokens that the KV cache needs before the choice decodes: all but the last.
    pub(super) fn tokens(&self) -> &[TokenId] {
        let tokens = self.sequence.history.tokens();
        &tokens[..tokens.len() - 1]
    }
}

/// Preempted work. Its `seq` is stale.
pub(super) enum Preempted {
    /// A prompt partly prefilled, with its saved state. Without a state it is prefilled again.
    Prefill(Prefill, Option<SnapshotId>),
    /// A decoding choice, with its saved state. Without a state it is recomputed.
    Decode(Box<Sequence>, Option<SnapshotId>),
}

impl Preempted {
    /// The choice that was decoding, if one was.
    pub(super) fn choice(&self) -> Option<usize> {
        match self {
            Preempted::Prefill(..) => None,
            Preempted::Decode(sequence, _) => Some(sequence.choice),
        }
    }

    /// The saved state, if there is one.
    pub(super) fn state(&self) -> Option<SnapshotId> {
        match self {
            Preempted::Prefill(_, state) | Preempted::Decode(_, state) => *state,
        }
    }
}

/// The state from which every choice starts.
#[derive(Debug)]
pub(super) struct PromptState {
    /// The device state after the prompt.
    pub(super) snapshot: SnapshotId,
    /// The logits after the prompt.
    pub(super) row: LogitsRow,
}

/// Limits that all sequences of one scheduler share.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelLimits<'a> {
    /// The model's own end tokens.
    pub(super) eos: &'a [TokenId],
    /// Length of a logits row.
    pub(super) vocab: usize,
    /// Maximum number of tokens of a sequence.
    pub(super) context: usize,
    /// Largest k for which only the top k logits are fetched.
    pub(super) max_fetched_top_k: usize,
}

impl RunningJob {
    /// A job whose prompt is about to be prefilled into `seq`.
    pub(super) fn new(
        key: PriorityKey,
        queued: QueuedJob,
        seq: SeqId,
        model: ModelLimits<'_>,
    ) -> RunningJob {
        let params = Arc::new(queued.job.params);
        RunningJob {
            id: queued.job.id,
            key,
            prompt: queued.job.prompt,
            stop_conditions: StopConditions::new(&params, model.eos, model.context),
            prefill: Some(Prefill::new(seq, params.prompt_logprobs)),
            params,
            cached: 0,
            prompt_state: None,
            pending_choices: queued.open.into(),
            sequences: Vec::new(),
            preempted: Vec::new(),
            has_yielded: false,
            yields: 0,
            recomputing: Vec::new(),
        }
    }

    /// A choice of this job in `seq`, which holds the prompt.
    pub(super) fn sequence(&self, choice: usize, seq: SeqId, model: ModelLimits<'_>) -> Sequence {
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

    /// The logits request for the last prompt token, if the next chunk of `size` includes it and a
    /// token is sampled there.
    ///
    /// All choices share the row, since none has generated anything yet.
    pub(super) fn first_request(
        &self,
        size: usize,
        model: ModelLimits<'_>,
    ) -> Option<LogitsRequest> {
        let prefill = self.prefill.as_ref()?;
        let generates =
            self.params.max_tokens > 0 && prefill.is_last_chunk(self.prompt.len(), size);
        generates.then(|| {
            let sequence = &mut self.sequence(0, prefill.seq, model);
            LogitsRequest {
                mass: None,
                ..sequence.node_request(&[]).request
            }
        })
    }

    /// The sampler of a choice.
    fn sampler(&self, choice: usize, model: ModelLimits<'_>) -> Sampler {
        Sampler::new(
            self.params.clone(),
            choice,
            &self.stop_conditions.end_tokens,
            model.vocab,
            model.max_fetched_top_k,
        )
    }

    /// The stats of a choice that has generated nothing.
    pub(super) fn initial_stats(&self) -> ChoiceStats {
        ChoiceStats {
            prompt_tokens: self.prompt.len(),
            cached_tokens: self.cached,
            ..ChoiceStats::default()
        }
    }

    /// The sequences it has open on the device.
    pub(super) fn open_seqs(&self) -> impl Iterator<Item = SeqId> {
        let prefill = self.prefill.iter().map(|prefill| prefill.seq);
        let recomputing = self.recomputing.iter();
        let recomputing = recomputing.map(|recompute| recompute.prefill.seq);
        let decoding = self.sequences.iter().map(|sequence| sequence.seq);
        prefill.chain(recomputing).chain(decoding)
    }

    /// The choices that have not ended.
    pub(super) fn open_choices(&self) -> Vec<usize> {
        let decoding = self.sequences.iter().map(|sequence| sequence.choice);
        let preempted = self.preempted.iter().filter_map(Preempted::choice);
        let recomputing = self.recomputing.iter();
        let recomputing = recomputing.map(|recompute| recompute.sequence.choice);
        let started = decoding.chain(preempted).chain(recomputing);
        started
            .chain(self.pending_choices.iter().copied())
            .collect()
    }

    /// Resumes a choice in `seq`, which holds its tokens.
    pub(super) fn resume_choice(&mut self, mut sequence: Box<Sequence>, seq: SeqId) {
        sequence.seq = seq;
        self.sequences.push(*sequence);
        self.sequences.sort_by_key(|sequence| sequence.choice);
    }

    /// Whether its prompt is not prefilled yet, preempted or not.
    pub(super) fn is_prefilling(&self) -> bool {
        let mut preempted = self.preempted.iter();
        self.prefill.is_some() || preempted.any(|preempted| preempted.choice().is_none())
    }

    /// Tokens left of the prompt or of the choice that is recomputed next, if there is one.
    pub(super) fn tokens_to_prefill(&self) -> Option<usize> {
        match (&self.prefill, self.recomputing.last()) {
            (Some(prefill), _) => Some(self.prompt.len() - prefill.done),
            (None, Some(recompute)) => Some(recompute.tokens().len() - recompute.prefill.done),
            (None, None) => None,
        }
    }

    /// Maximum number of tokens that one of its sequences holds.
    pub(super) fn max_len(&self) -> usize {
        self.stop_conditions.max_len(self.prompt.len())
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self) -> bool {
        !self.is_prefilling()
            && self.pending_choices.is_empty()
            && self.sequences.is_empty()
            && self.preempted.is_empty()
            && self.recomputing.is_empty()
    }
}
