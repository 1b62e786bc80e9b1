//! The calling protocol of [`Runner`](crate::Runner), checked against a device's books.
//!
//! Every device asks here before it works, and so does [`Checked`](crate::checked::Checked): a broken call means
//! the same everywhere and is answered in the same words. A call that passes has changed nothing yet.
//!
//! Here too is what follows from the protocol alone: how a long prompt is cut into passes, and which row answers
//! which ask.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::{
    Ask, CommitItem, DeviceError, DraftItem, Room, Row, RunnerInfo, SeqId, TokenId, Tree,
    VerifyItem, Want,
};

/// What the protocol needs to know of an open sequence.
pub trait Timeline {
    /// Committed tokens it may grow to.
    fn max_len(&self) -> usize;
    /// Committed tokens.
    fn position(&self) -> usize;
    /// The tree verified last, until it is committed or discarded.
    fn pending(&self) -> Option<&Tree>;
}

/// A runner's books: what it was opened with, and what is open.
#[derive(Debug)]
pub struct Protocol<'a, S> {
    /// What was opened.
    pub info: &'a RunnerInfo,
    /// What is open.
    pub sequences: &'a BTreeMap<SeqId, S>,
}

/// A broken call of `call`.
pub fn misuse(call: &'static str, detail: String) -> DeviceError {
    DeviceError::Misuse { call, detail }
}

impl<'a, S: Timeline> Protocol<'a, S> {
    /// What is free where sequences hold `held` pages, snapshots alone hold `kept` others of the pool, and all
    /// snapshots together hold `snapshot_bytes`.
    pub fn room(&self, (held, kept): (usize, usize), snapshot_bytes: u64) -> Room {
        let (limits, pool) = (self.info.limits, self.info.pool);
        Room {
            sequences: limits.sequences - self.sequences.len(),
            tokens: pool.pages.saturating_sub(held) * pool.page,
            kept: kept * pool.page,
            snapshot_bytes,
        }
    }

    /// Whether one more sequence that may grow to `max_len` tokens may be opened.
    ///
    /// # Errors
    /// [`DeviceError::NoRoom`] if it is too long or all slots are taken.
    pub fn open(&self, max_len: usize) -> Result<(), DeviceError> {
        let limits = self.info.limits;
        if max_len > limits.context {
            return Err(DeviceError::NoRoom {
                what: "context tokens",
                wanted: max_len as u64,
                free: limits.context as u64,
            });
        }
        if self.sequences.len() >= limits.sequences {
            return Err(DeviceError::NoRoom {
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

    /// An open sequence that has nothing pending.
    ///
    /// # Errors
    /// Misuse of `call` where it has.
    pub fn settled(&self, call: &'static str, seq: SeqId) -> Result<&'a S, DeviceError> {
        let sequence = self.sequence(seq)?;
        match sequence.pending() {
            Some(_) => Err(misuse(call, format!("{seq} has a tree pending"))),
            None => Ok(sequence),
        }
    }

    /// The sequence that shall read `tokens` and answer `asks`.
    ///
    /// # Errors
    /// Misuse where a token is beyond the vocabulary or the sequence's length, or asks do not rise within the
    /// tokens.
    pub fn prefill(
        &self,
        seq: SeqId,
        tokens: &[TokenId],
        asks: &[(usize, Ask)],
    ) -> Result<&'a S, DeviceError> {
        const CALL: &str = "prefill";
        self.tokens(CALL, tokens)?;
        let in_order = asks.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if !in_order || asks.last().is_some_and(|ask| ask.0 >= tokens.len()) {
            let detail = "asks do not rise within the tokens".to_owned();
            return Err(misuse(CALL, detail));
        }
        asks.iter().try_for_each(|(_, asked)| ask(CALL, asked))?;
        let sequence = self.settled(CALL, seq)?;
        fits(CALL, seq, sequence, tokens.len())?;
        Ok(sequence)
    }

    /// # Errors
    /// Misuse where there is no draft, it reaches less far, or a sequence is not ready for it.
    pub fn draft(&self, items: &[DraftItem], depth: usize, k: usize) -> Result<(), DeviceError> {
        const CALL: &str = "draft";
        let Some(most) = self.info.draft_depth else {
            return Err(misuse(CALL, "there is no draft".to_owned()));
        };
        if depth == 0 || depth > most || k == 0 {
            let detail = format!("depth {depth} of {most}, {k} candidates");
            return Err(misuse(CALL, detail));
        }
        once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            self.tokens(CALL, &[item.root])?;
            self.settled(CALL, item.seq)?;
        }
        Ok(())
    }

    /// # Errors
    /// Misuse where a tree is too wide, has not an ask for each node, holds a token beyond the vocabulary, or its
    /// sequence is full or not ready.
    pub fn verify(&self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        const CALL: &str = "verify";
        let limit = self.info.limits.tree_nodes;
        once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            let (nodes, asks) = (item.tree.len(), item.asks.len());
            if nodes > limit || asks != nodes {
                let detail = format!("{nodes} nodes of {limit}, {asks} asks");
                return Err(misuse(CALL, detail));
            }
            self.tokens(CALL, item.tree.tokens())?;
            item.asks.iter().try_for_each(|asked| ask(CALL, asked))?;
            let sequence = self.settled(CALL, item.seq)?;
            if sequence.position() >= sequence.max_len() {
                return Err(misuse(CALL, format!("{} is full", item.seq)));
            }
        }
        Ok(())
    }

    /// # Errors
    /// Misuse where a sequence has nothing pending, the path is none of its tree, or it would grow too long.
    pub fn commit(&self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        const CALL: &str = "commit";
        once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let tree = pending(CALL, item.seq, sequence)?;
            tree.path(item.path.nodes())
                .map_err(|error| misuse(CALL, error.to_string()))?;
            fits(CALL, item.seq, sequence, item.path.len())?;
        }
        Ok(())
    }

    /// # Errors
    /// Misuse where the sequence has nothing pending.
    pub fn discard(&self, seq: SeqId) -> Result<(), DeviceError> {
        pending("discard", seq, self.sequence(seq)?).map(|_| ())
    }

    /// The sequence that shall be put to `position`.
    ///
    /// # Errors
    /// Misuse where it has something pending or was opened for less.
    pub fn restore(&self, seq: SeqId, position: usize) -> Result<&'a S, DeviceError> {
        const CALL: &str = "restore";
        let sequence = self.settled(CALL, seq)?;
        if position > sequence.max_len() {
            return Err(misuse(CALL, beyond(seq, sequence.max_len())));
        }
        Ok(sequence)
    }

    /// # Errors
    /// Misuse of `call` where a token is beyond the vocabulary.
    pub fn tokens(&self, call: &'static str, tokens: &[TokenId]) -> Result<(), DeviceError> {
        let vocab = self.info.vocab;
        match tokens.iter().find(|token| token.index() >= vocab) {
            Some(token) => Err(misuse(
                call,
                format!("token {token} is beyond the {vocab} of the vocabulary"),
            )),
            None => Ok(()),
        }
    }
}

fn beyond(seq: SeqId, max_len: usize) -> String {
    format!("{seq} would pass the {max_len} tokens it was opened for")
}

fn fits<S: Timeline>(
    call: &'static str,
    seq: SeqId,
    sequence: &S,
    more: usize,
) -> Result<(), DeviceError> {
    match more <= sequence.max_len() - sequence.position() {
        true => Ok(()),
        false => Err(misuse(call, beyond(seq, sequence.max_len()))),
    }
}

fn pending<'a, S: Timeline>(
    call: &'static str,
    seq: SeqId,
    sequence: &'a S,
) -> Result<&'a Tree, DeviceError> {
    let tree = sequence.pending();
    tree.ok_or_else(|| misuse(call, format!("{seq} has nothing pending")))
}

fn ask(call: &'static str, ask: &Ask) -> Result<(), DeviceError> {
    match ask.want {
        Want::Top(0) => Err(misuse(call, "an ask for the top 0".to_owned())),
        _ => Ok(()),
    }
}

fn once(call: &'static str, seqs: impl Iterator<Item = SeqId>) -> Result<(), DeviceError> {
    let mut seen = Vec::new();
    for seq in seqs {
        if seen.contains(&seq) {
            return Err(misuse(call, format!("{seq} stands in one call twice")));
        }
        seen.push(seq);
    }
    Ok(())
}

/// How a device cuts a prompt that is longer than a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Tokens of the longest pass.
    pub longest: usize,
    /// Passes but the last end at absolute multiples of this many tokens, so that cutting changes no bit, unless
    /// the longest pass is shorter than that.
    pub align: usize,
}

impl Cut {
    /// The passes over `n` tokens that follow `position` committed ones, as ranges of the tokens.
    pub fn passes(self, position: usize, n: usize) -> Vec<Range<usize>> {
        let whole = self.longest / self.align * self.align;
        let mut passes = Vec::new();
        let mut begin = 0;
        while begin < n {
            let room = match whole {
                0 => self.longest,
                whole => whole - (position + begin) % self.align,
            };
            let end = n.min(begin + room);
            passes.push(begin..end);
            begin = end;
        }
        passes
    }
}

/// The asks for a row within `pass`, their places counted from its begin.
pub fn asked_within<'a>(asks: &'a [(usize, Ask)], pass: &Range<usize>) -> Vec<(usize, &'a Ask)> {
    let within = asks.iter().filter(|(at, _)| pass.contains(at));
    let rows = within.filter(|(_, ask)| ask.want != Want::Nothing);
    rows.map(|(at, ask)| (at - pass.start, ask)).collect()
}

/// A row for each ask: the next of `computed` where something was asked, an empty one elsewhere.
///
/// # Panics
/// If fewer rows were computed than asked for.
pub fn answers<'a>(
    asks: impl Iterator<Item = &'a Ask>,
    computed: &mut impl Iterator<Item = Row>,
) -> Vec<Row> {
    let mut answer = |ask: &Ask| match ask.want {
        Want::Nothing => Row::default(),
        _ => computed.next().expect("every row asked for was computed"),
    };
    asks.map(&mut answer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_end_at_aligned_places_and_cover_everything() {
        let cut = Cut {
            longest: 128,
            align: 64,
        };
        assert_eq!(cut.passes(0, 0), []);
        assert_eq!(cut.passes(0, 300), [0..128, 128..256, 256..300]);
        assert_eq!(cut.passes(70, 300), [0..122, 122..250, 250..300]);
        assert_eq!(cut.passes(127, 66), [0..65, 65..66]);
        let short = |longest| Cut { longest, align: 64 };
        assert_eq!(short(100).passes(0, 100), [0..64, 64..100]);
        assert_eq!(short(30).passes(63, 70), [0..30, 30..60, 60..70]);
    }

    #[test]
    fn rows_go_to_their_asks() {
        let asks: Vec<(usize, Ask)> = vec![
            (0, Ask::full()),
            (5, Ask::NOTHING),
            (6, Ask::top(2)),
            (9, Ask::top(1)),
        ];
        let within = asked_within(&asks, &(4..9));
        let places: Vec<usize> = within.iter().map(|(at, _)| *at).collect();
        assert_eq!(places, [2]);
        let row = |lse| Row {
            lse,
            ..Row::default()
        };
        let mut computed = [row(1.0), row(2.0), row(3.0)].into_iter();
        let rows = answers(asks.iter().map(|(_, ask)| ask), &mut computed);
        let sums: Vec<f32> = rows.iter().map(|row| row.lse).collect();
        assert_eq!(sums, [1.0, 0.0, 2.0, 3.0]);
    }
}
