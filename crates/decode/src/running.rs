//! A job that left the queue: its prompt being read, then its choices being spoken.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::{LogitsRequest, LogitsRow, SeqId, SnapshotId, TokenId};

use crate::doubt::Doubt;
use crate::prefill::Prefill;
use crate::queue::{Entry, Turn};
use crate::sample::{History, Sampler};
use crate::sequence::{Bounds, Sequence};
use crate::{ChoiceStats, JobId, Settings};

/// One job on the device.
pub(crate) struct Running {
    /// The job's name.
    pub(crate) id: JobId,
    /// Whose prompt is read first.
    pub(crate) turn: Turn,
    /// Its prompt.
    pub(crate) prompt: Arc<[TokenId]>,
    /// How it goes on.
    pub(crate) settings: Arc<Settings>,
    /// When its choices end.
    pub(crate) bounds: Bounds,
    /// Tokens of the prompt that a saved state held.
    pub(crate) cached: usize,
    /// The prompt being read; `None` once it is.
    pub(crate) prefill: Option<Prefill>,
    /// The state after the prompt, kept while choices wait to begin. The scheduler frees it.
    pub(crate) prompt_end: Option<PromptEnd>,
    /// Choices that have not begun.
    pub(crate) unbegun: VecDeque<usize>,
    /// Choices being spoken. The scheduler closes their places on the device.
    pub(crate) sequences: Vec<Sequence>,
    /// What gave its place up to others and waits for one. The scheduler frees its states.
    pub(crate) parked: Vec<Parked>,
    /// Choices whose state could be saved nowhere, being read again. The scheduler closes their places.
    pub(crate) retold: Vec<Retold>,
}

/// A choice in the middle of its text, of which the device has lost the state: prompt and text are read again.
pub(crate) struct Retold {
    /// The choice; the place it names is the one being read into.
    pub(crate) sequence: Box<Sequence>,
    /// How far that is.
    pub(crate) prefill: Prefill,
}

impl Retold {
    /// What has to be in the cache for the choice to go on: all but its last token.
    pub(crate) fn tokens(&self) -> &[TokenId] {
        let tokens = self.sequence.history.tokens();
        &tokens[..tokens.len() - 1]
    }
}

/// What was under way at a place that was given up. The name of the place is no longer good.
pub(crate) enum Parked {
    /// A prompt half read, and the device's state where it stopped; without one it is read from its beginning again.
    Reading(Prefill, Option<SnapshotId>),
    /// A choice in the middle of its text, and the device's state there; without one prompt and text are read again.
    Speaking(Box<Sequence>, Option<SnapshotId>),
}

impl Parked {
    /// The choice that was being said, if one was.
    pub(crate) fn choice(&self) -> Option<usize> {
        match self {
            Parked::Reading(..) => None,
            Parked::Speaking(sequence, _) => Some(sequence.choice),
        }
    }

    /// The state it goes on from, if one was saved.
    pub(crate) fn state(&self) -> Option<SnapshotId> {
        match self {
            Parked::Reading(_, state) | Parked::Speaking(_, state) => *state,
        }
    }
}

/// Where every choice begins.
#[derive(Debug)]
pub(crate) struct PromptEnd {
    /// The device's state after the prompt.
    pub(crate) snapshot: SnapshotId,
    /// What the target says there.
    pub(crate) row: LogitsRow,
}

/// What all sequences of one scheduler share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model<'a> {
    /// The model's own ending tokens.
    pub(crate) eos: &'a [TokenId],
    /// Length of a row.
    pub(crate) vocab: usize,
    /// The longest sequence.
    pub(crate) context: usize,
    /// Up to how many best tokens are fetched alone.
    pub(crate) top_limit: usize,
}

impl Running {
    /// A job whose prompt is about to be read into `seq`.
    pub(crate) fn new(turn: Turn, entry: Entry, seq: SeqId, model: Model<'_>) -> Running {
        let settings = Arc::new(entry.job.settings);
        Running {
            id: entry.job.id,
            turn,
            prompt: entry.job.prompt,
            bounds: Bounds::new(&settings, model.eos, model.context),
            prefill: Some(Prefill::new(seq, settings.prompt_logprobs)),
            settings,
            cached: 0,
            prompt_end: None,
            unbegun: entry.open.into(),
            sequences: Vec::new(),
            parked: Vec::new(),
            retold: Vec::new(),
        }
    }

    /// A choice of this job, in `seq`, which holds the prompt.
    pub(crate) fn sequence(&self, choice: usize, seq: SeqId, model: Model<'_>) -> Sequence {
        Sequence {
            job: self.id,
            choice,
            seq,
            history: History::new(&self.prompt, &self.settings.sampling),
            sampler: self.sampler(choice, model),
            bounds: self.bounds.clone(),
            constraint: self.settings.constraints.as_ref().map(|c| c.begin(choice)),
            speculate: self.settings.speculate,
            window: self.settings.window,
            doubt: Doubt::default(),
            stats: self.blank_stats(),
        }
    }

    /// What to ask at the last token of the prompt, if the next chunk of `size` reads it and something is to be
    /// said. All choices share the row: none has said anything that could tell them apart.
    pub(crate) fn first_ask(&self, size: usize, model: Model<'_>) -> Option<LogitsRequest> {
        let prefill = self.prefill.as_ref()?;
        let speaks = self.settings.max_tokens > 0 && prefill.ends_next(self.prompt.len(), size);
        speaks.then(|| self.sequence(0, prefill.seq, model).plan(&[]).ask)
    }

    /// What chooses the tokens of a choice.
    pub(crate) fn sampler(&self, choice: usize, model: Model<'_>) -> Sampler {
        Sampler::new(
            self.settings.clone(),
            choice,
            &self.bounds.ends,
            model.vocab,
            model.top_limit,
        )
    }

    /// The stats of a choice that has said nothing.
    pub(crate) fn blank_stats(&self) -> ChoiceStats {
        ChoiceStats {
            prompt_tokens: self.prompt.len(),
            cached_tokens: self.cached,
            ..ChoiceStats::default()
        }
    }

    /// Places on the device that it holds.
    pub(crate) fn places(&self) -> impl Iterator<Item = SeqId> {
        let reading = self.prefill.iter().map(|prefill| prefill.seq);
        let again = self.retold.iter().map(|retold| retold.prefill.seq);
        let speaking = self.sequences.iter().map(|sequence| sequence.seq);
        reading.chain(again).chain(speaking)
    }

    /// A choice goes on in the middle of its text, at a place that holds it.
    pub(crate) fn go_on(&mut self, mut sequence: Box<Sequence>, seq: SeqId) {
        sequence.seq = seq;
        self.sequences.push(*sequence);
        self.sequences.sort_by_key(|sequence| sequence.choice);
    }

    /// Whether its prompt is being read, or will be read on.
    pub(crate) fn is_reading(&self) -> bool {
        let parked = self.parked.iter().any(|parked| parked.choice().is_none());
        self.prefill.is_some() || parked
    }

    /// The most tokens that a place of it must hold.
    pub(crate) fn max_len(&self) -> usize {
        self.bounds.max_len(self.prompt.len())
    }

    /// Whether nothing of it is left to do.
    pub(crate) fn is_done(&self) -> bool {
        !self.is_reading()
            && self.unbegun.is_empty()
            && self.sequences.is_empty()
            && self.parked.is_empty()
            && self.retold.is_empty()
    }
}
