//! The calling protocol of [`Runner`](crate::Runner), checked against a device's open sequences.
//!
//! Every device and [`CheckedRunner`](crate::checked::CheckedRunner) call these checks first, so an
//! invalid call gives the same error everywhere. A check changes nothing.
//!
//! The module also splits long prompts into chunks and assigns computed rows to their requests.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::{
    Capacity, CommitItem, DeviceError, DraftItem, LogitsRequest, LogitsRow, LogitsSelection,
    MtpDraftItem, MtpRow, RunnerInfo, SeqId, TokenId, Tree, VerifyItem,
};

/// The most committed tokens of a sequence that may wait for the next draft of a source, which then
/// stores their keys and values. When so many wait, the device stores them itself. It may also do
/// so with each commit.
pub const MAX_WAITING_TOKENS: usize = 256;

/// State of an open sequence that the protocol needs.
pub trait SequenceState {
    /// Maximum number of committed tokens.
    fn max_len(&self) -> usize;
    /// Committed tokens.
    fn position(&self) -> usize;
    /// The pending tree: verified, but not committed or discarded.
    fn pending(&self) -> Option<&Tree>;
    /// Depths of the rows that [`Runner::draft_mtp`](crate::Runner::draft_mtp) has drafted and
    /// nothing has dropped; the root row has 0. Empty without a multi-token-prediction head.
    fn mtp_depths(&self) -> &[usize] {
        &[]
    }
}

/// Records one drafted row behind `depths`; a root row drops the others.
pub fn push_mtp_row(depths: &mut Vec<usize>, parent: Option<MtpRow>) {
    match parent {
        Some(row) => depths.push(depths[row.index()] + 1),
        None => {
            depths.clear();
            depths.push(0);
        }
    }
}

/// Checks calls against a runner's properties and its open sequences.
#[derive(Debug)]
pub struct CallValidator<'a, S> {
    /// Properties of the runner.
    pub info: &'a RunnerInfo,
    /// Open sequences.
    pub sequences: &'a BTreeMap<SeqId, S>,
}

/// The error of an invalid call.
pub fn invalid_call(call: &'static str, detail: String) -> DeviceError {
    DeviceError::InvalidCall { call, detail }
}

impl<'a, S: SequenceState> CallValidator<'a, S> {
    /// Free capacity if sequences hold `held` pages, snapshots alone hold `kept` other pages of the
    /// pool, and all snapshots hold `snapshot_bytes`.
    pub fn capacity(&self, (held, kept): (usize, usize), snapshot_bytes: u64) -> Capacity {
        let (limits, pool) = (self.info.limits, self.info.pool);
        Capacity {
            sequences: limits.sequences - self.sequences.len(),
            tokens: pool.pages.saturating_sub(held) * pool.page_size,
            evictable_tokens: kept * pool.page_size,
            snapshot_bytes,
        }
    }

    /// Checks that one more sequence of up to `max_len` tokens may be opened.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if `max_len` exceeds the context or all slots are taken.
    pub fn open(&self, max_len: usize) -> Result<(), DeviceError> {
        let limits = self.info.limits;
        if max_len > limits.context {
            return Err(DeviceError::OutOfMemory {
                what: "context tokens",
                wanted: max_len as u64,
                free: limits.context as u64,
            });
        }
        if self.sequences.len() >= limits.sequences {
            return Err(DeviceError::OutOfMemory {
                what: "sequences",
                wanted: 1,
                free: 0,
            });
        }
        Ok(())
    }

    /// An open sequence.
    ///
    /// # Errors
    /// [`DeviceError::UnknownSequence`]
    pub fn sequence(&self, seq: SeqId) -> Result<&'a S, DeviceError> {
        self.sequences
            .get(&seq)
            .ok_or(DeviceError::UnknownSequence(seq))
    }

    /// An open sequence without a pending tree.
    ///
    /// # Errors
    /// [`DeviceError::InvalidCall`] if a tree is pending.
    pub fn require_idle(&self, call: &'static str, seq: SeqId) -> Result<&'a S, DeviceError> {
        let sequence = self.sequence(seq)?;
        match sequence.pending() {
            Some(_) => Err(invalid_call(call, format!("{seq} has a tree pending"))),
            None => Ok(sequence),
        }
    }

    /// Checks a prefill of `tokens` and returns its sequence.
    ///
    /// # Errors
    /// [`DeviceError::InvalidCall`] if a token exceeds the vocabulary, the sequence would exceed
    /// its length, or request indices do not ascend within the tokens.
    pub fn prefill(
        &self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<&'a S, DeviceError> {
        const CALL: &str = "prefill";
        self.tokens(CALL, tokens)?;
        let in_order = requests.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if !in_order
            || requests
                .last()
                .is_some_and(|request| request.0 >= tokens.len())
        {
            let detail = "requests are not ascending positions of the tokens".to_owned();
            return Err(invalid_call(CALL, detail));
        }
        requests
            .iter()
            .try_for_each(|(_, request)| check_request(CALL, request))?;
        let sequence = self.require_idle(CALL, seq)?;
        fits(CALL, seq, sequence, tokens.len())?;
        Ok(sequence)
    }

    /// # Errors
    /// [`DeviceError::InvalidCall`] without a draft model, beyond its depth, or for a sequence that
    /// is not idle.
    pub fn draft(&self, items: &[DraftItem], depth: usize, k: usize) -> Result<(), DeviceError> {
        const CALL: &str = "draft";
        let Some(most) = self.info.draft_depth else {
            return Err(invalid_call(CALL, "there is no draft".to_owned()));
        };
        if depth == 0 || depth > most || k == 0 {
            let detail = format!("depth {depth} of {most}, {k} candidates");
            return Err(invalid_call(CALL, detail));
        }
        once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            self.tokens(CALL, &[item.root])?;
            self.require_idle(CALL, item.seq)?;
        }
        Ok(())
    }

    /// # Errors
    /// [`DeviceError::InvalidCall`] without a multi-token-prediction head, beyond its limits, for a
    /// parent that was not drafted before the call, or for a sequence that is not idle.
    pub fn draft_mtp(&self, items: &[MtpDraftItem], k: usize) -> Result<(), DeviceError> {
        const CALL: &str = "draft_mtp";
        let Some(limits) = self.info.mtp else {
            let detail = "there is no multi-token-prediction head".to_owned();
            return Err(invalid_call(CALL, detail));
        };
        if k == 0 || k > self.info.vocab {
            let detail = format!("{k} candidates of {} tokens", self.info.vocab);
            return Err(invalid_call(CALL, detail));
        }
        let roots = items.iter().filter(|item| item.parent.is_none());
        once(CALL, roots.map(|item| item.seq))?;
        for item in items {
            self.tokens(CALL, &[item.token])?;
            let drafted = self.require_idle(CALL, item.seq)?.mtp_depths();
            let of_sequence = items.iter().filter(|other| other.seq == item.seq);
            let (mut rows, mut roots) = (0, 0);
            for other in of_sequence {
                rows += 1;
                roots += usize::from(other.parent.is_none());
            }
            let seq = item.seq;
            if roots > 0 && rows > 1 {
                let detail = format!("a root row of {seq} and others in one call");
                return Err(invalid_call(CALL, detail));
            }
            let Some(parent) = item.parent else { continue };
            let depth = match drafted.get(parent.index()) {
                Some(depth) => depth + 1,
                None => {
                    let (row, n) = (parent.0, drafted.len());
                    let detail = format!("{seq} has no row {row} to follow, only {n}");
                    return Err(invalid_call(CALL, detail));
                }
            };
            if depth >= limits.max_depth || drafted.len() + rows > limits.max_rows {
                let detail = format!(
                    "{seq} would have {} rows of {} and a path of {} of {}",
                    drafted.len() + rows,
                    limits.max_rows,
                    depth + 1,
                    limits.max_depth
                );
                return Err(invalid_call(CALL, detail));
            }
        }
        Ok(())
    }

    /// # Errors
    /// [`DeviceError::InvalidCall`] if a tree has too many nodes, the wrong number of requests or a
    /// token beyond the vocabulary, or if its sequence is full or not idle.
    pub fn verify(&self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        const CALL: &str = "verify";
        let limit = self.info.limits.tree_nodes;
        once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            let (nodes, requests) = (item.tree.len(), item.requests.len());
            if nodes > limit || requests != nodes {
                let detail = format!("{nodes} nodes of {limit}, {requests} requests");
                return Err(invalid_call(CALL, detail));
            }
            self.tokens(CALL, item.tree.tokens())?;
            item.requests
                .iter()
                .try_for_each(|request| check_request(CALL, request))?;
            let sequence = self.require_idle(CALL, item.seq)?;
            if sequence.position() >= sequence.max_len() {
                return Err(invalid_call(CALL, format!("{} is full", item.seq)));
            }
        }
        Ok(())
    }

    /// # Errors
    /// [`DeviceError::InvalidCall`] without a pending tree, for a path of another tree, or beyond
    /// the sequence's length.
    pub fn commit(&self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        const CALL: &str = "commit";
        once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let tree = pending(CALL, item.seq, sequence)?;
            tree.path(item.path.nodes())
                .map_err(|error| invalid_call(CALL, error.to_string()))?;
            fits(CALL, item.seq, sequence, item.path.len())?;
        }
        Ok(())
    }

    /// # Errors
    /// [`DeviceError::InvalidCall`] without a pending tree.
    pub fn discard(&self, seq: SeqId) -> Result<(), DeviceError> {
        pending("discard", seq, self.sequence(seq)?).map(|_| ())
    }

    /// Checks a restore to `position` and returns its sequence.
    ///
    /// # Errors
    /// [`DeviceError::InvalidCall`] if a tree is pending or `position` exceeds the sequence's
    /// length.
    pub fn restore(&self, seq: SeqId, position: usize) -> Result<&'a S, DeviceError> {
        const CALL: &str = "restore";
        let sequence = self.require_idle(CALL, seq)?;
        if position > sequence.max_len() {
            return Err(invalid_call(CALL, beyond(seq, sequence.max_len())));
        }
        Ok(sequence)
    }

    /// # Errors
    /// [`DeviceError::InvalidCall`] if a token exceeds the vocabulary.
    pub fn tokens(&self, call: &'static str, tokens: &[TokenId]) -> Result<(), DeviceError> {
        let vocab = self.info.vocab;
        match tokens.iter().find(|token| token.index() >= vocab) {
            Some(token) => Err(invalid_call(
                call,
                format!("token {token} is beyond the {vocab} of the vocabulary"),
            )),
            None => Ok(()),
        }
    }
}

fn beyond(seq: SeqId, max_len: usize) -> String {
    format!("{seq} would exceed the {max_len} tokens it was opened for")
}

fn fits<S: SequenceState>(
    call: &'static str,
    seq: SeqId,
    sequence: &S,
    more: usize,
) -> Result<(), DeviceError> {
    if more <= sequence.max_len() - sequence.position() {
        Ok(())
    } else {
        Err(invalid_call(call, beyond(seq, sequence.max_len())))
    }
}

fn pending<'a, S: SequenceState>(
    call: &'static str,
    seq: SeqId,
    sequence: &'a S,
) -> Result<&'a Tree, DeviceError> {
    let tree = sequence.pending();
    tree.ok_or_else(|| invalid_call(call, format!("{seq} has nothing pending")))
}

fn check_request(call: &'static str, request: &LogitsRequest) -> Result<(), DeviceError> {
    match request.selection {
        LogitsSelection::TopK(0) => Err(invalid_call(call, "a request for the top 0".to_owned())),
        _ => Ok(()),
    }
}

fn once(call: &'static str, seqs: impl Iterator<Item = SeqId>) -> Result<(), DeviceError> {
    let mut seen = Vec::new();
    for seq in seqs {
        if seen.contains(&seq) {
            return Err(invalid_call(
                call,
                format!("{seq} occurs twice in one call"),
            ));
        }
        seen.push(seq);
    }
    Ok(())
}

/// How a device splits a prompt for chunked prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillChunks {
    /// Maximum number of tokens of a chunk.
    pub max_tokens: usize,
    /// All chunks but the last end at absolute multiples of `align` tokens, so that splitting
    /// changes no bit. Ignored if `max_tokens` is smaller than `align`.
    pub align: usize,
}

impl PrefillChunks {
    /// Splits `n` tokens after `position` committed ones into chunks, as ranges of the tokens.
    pub fn split(self, position: usize, n: usize) -> Vec<Range<usize>> {
        let whole = self.max_tokens / self.align * self.align;
        let mut passes = Vec::new();
        let mut begin = 0;
        while begin < n {
            let room = match whole {
                0 => self.max_tokens,
                whole => whole - (position + begin) % self.align,
            };
            let end = n.min(begin + room);
            passes.push(begin..end);
            begin = end;
        }
        passes
    }
}

/// The requests that select a row within `chunk`, with indices relative to its start.
pub fn requests_within<'a>(
    requests: &'a [(usize, LogitsRequest)],
    chunk: &Range<usize>,
) -> Vec<(usize, &'a LogitsRequest)> {
    let within = requests.iter().filter(|(at, _)| chunk.contains(at));
    let rows = within.filter(|(_, request)| request.selection != LogitsSelection::None);
    rows.map(|(at, request)| (at - chunk.start, request))
        .collect()
}

/// One row per request: the next row of `computed`, or an empty row if the request selects nothing.
///
/// # Panics
/// If `computed` has too few rows.
pub fn scatter_rows<'a>(
    requests: impl Iterator<Item = &'a LogitsRequest>,
    computed: &mut impl Iterator<Item = LogitsRow>,
) -> Vec<LogitsRow> {
    let mut answer = |request: &LogitsRequest| match request.selection {
        LogitsSelection::None => LogitsRow::default(),
        _ => computed.next().expect("every requested row was computed"),
    };
    requests.map(&mut answer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_end_at_aligned_positions_and_cover_everything() {
        let chunks = PrefillChunks {
            max_tokens: 128,
            align: 64,
        };
        assert_eq!(chunks.split(0, 0), []);
        assert_eq!(chunks.split(0, 300), [0..128, 128..256, 256..300]);
        assert_eq!(chunks.split(70, 300), [0..122, 122..250, 250..300]);
        assert_eq!(chunks.split(127, 66), [0..65, 65..66]);
        let short = |max_tokens| PrefillChunks {
            max_tokens,
            align: 64,
        };
        assert_eq!(short(100).split(0, 100), [0..64, 64..100]);
        assert_eq!(short(30).split(63, 70), [0..30, 30..60, 60..70]);
    }

    #[test]
    fn rows_are_placed_at_their_requests() {
        let requests: Vec<(usize, LogitsRequest)> = vec![
            (0, LogitsRequest::full()),
            (5, LogitsRequest::NONE),
            (6, LogitsRequest::top_k(2)),
            (9, LogitsRequest::top_k(1)),
        ];
        let within = requests_within(&requests, &(4..9));
        let places: Vec<usize> = within.iter().map(|(at, _)| *at).collect();
        assert_eq!(places, [2]);
        let row = |lse| LogitsRow {
            lse,
            ..LogitsRow::default()
        };
        let mut computed = [row(1.0), row(2.0), row(3.0)].into_iter();
        let rows = scatter_rows(requests.iter().map(|(_, request)| request), &mut computed);
        let sums: Vec<f32> = rows.iter().map(|row| row.lse).collect();
        assert_eq!(sums, [1.0, 0.0, 2.0, 3.0]);
    }
}
