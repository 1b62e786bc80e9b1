//! A wrapper that asserts the calling protocol of [`Runner`] around any runner.
//!
//! It keeps its own books of what is open, where, and what is pending, and answers a broken call with
//! [`DeviceError::Misuse`] before the device sees it. Every test and every debug build runs behind it.

use std::collections::HashMap;
use std::io::{Read, Write};

use crate::{
    Ask, Candidates, CommitItem, DeviceError, DraftItem, Place, Room, Row, Runner, RunnerInfo,
    SeqId, SnapshotId, SnapshotInfo, TokenId, Tree, VerifyItem, Want,
};

/// A runner whose callers are checked.
pub struct Checked<R> {
    inner: R,
    sequences: HashMap<SeqId, Slot>,
    snapshots: HashMap<SnapshotId, usize>,
}

struct Slot {
    position: usize,
    max_len: usize,
    pending: Option<Tree>,
}

impl<R: Runner> Checked<R> {
    /// Wraps a runner that has nothing open yet.
    pub fn new(inner: R) -> Checked<R> {
        Checked {
            inner,
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
        }
    }

    /// The runner inside, for tests that look into it.
    pub fn inner_mut(&mut self) -> &mut R {
        &mut self.inner
    }

    /// Committed tokens of an open sequence.
    pub fn position(&self, seq: SeqId) -> Option<usize> {
        self.sequences.get(&seq).map(|slot| slot.position)
    }

    fn settled(&mut self, call: &'static str, seq: SeqId) -> Result<&mut Slot, DeviceError> {
        let slot = self
            .sequences
            .get_mut(&seq)
            .ok_or(DeviceError::UnknownSequence(seq))?;
        match slot.pending {
            Some(_) => Err(misuse(call, format!("{seq} has a tree pending"))),
            None => Ok(slot),
        }
    }

    fn check_tokens(&self, call: &'static str, tokens: &[TokenId]) -> Result<(), DeviceError> {
        let vocab = self.inner.info().vocab;
        match tokens.iter().find(|token| token.index() >= vocab) {
            Some(token) => Err(misuse(
                call,
                format!("token {token} is beyond the {vocab} of the vocabulary"),
            )),
            None => Ok(()),
        }
    }
}

fn misuse(call: &'static str, detail: String) -> DeviceError {
    DeviceError::Misuse { call, detail }
}

fn check_ask(call: &'static str, ask: &Ask) -> Result<(), DeviceError> {
    match ask.want {
        Want::Top(0) => Err(misuse(call, "an ask for the top 0".to_owned())),
        _ => Ok(()),
    }
}

fn check_once(call: &'static str, seqs: impl Iterator<Item = SeqId>) -> Result<(), DeviceError> {
    let mut seen = Vec::new();
    for seq in seqs {
        if seen.contains(&seq) {
            return Err(misuse(call, format!("{seq} stands in one call twice")));
        }
        seen.push(seq);
    }
    Ok(())
}

impl<R: Runner> Runner for Checked<R> {
    fn info(&self) -> &RunnerInfo {
        self.inner.info()
    }

    fn room(&self) -> Room {
        self.inner.room()
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        let seq = self.inner.open(max_len)?;
        let slot = Slot {
            position: 0,
            max_len,
            pending: None,
        };
        if self.sequences.insert(seq, slot).is_some() {
            return Err(misuse("open", format!("the runner gave {seq} out twice")));
        }
        Ok(seq)
    }

    fn close(&mut self, seq: SeqId) {
        self.sequences.remove(&seq);
        self.inner.close(seq);
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        asks: &[(usize, Ask)],
    ) -> Result<Vec<Row>, DeviceError> {
        const CALL: &str = "prefill";
        self.check_tokens(CALL, tokens)?;
        let chunk = self.inner.info().limits.prefill_chunk;
        if tokens.is_empty() || tokens.len() > chunk {
            return Err(misuse(
                CALL,
                format!("{} tokens, 1 to {chunk} allowed", tokens.len()),
            ));
        }
        for pair in asks.windows(2) {
            if pair[0].0 >= pair[1].0 {
                return Err(misuse(CALL, "asks do not rise".to_owned()));
            }
        }
        for (at, ask) in asks {
            check_ask(CALL, ask)?;
            if *at >= tokens.len() {
                return Err(misuse(
                    CALL,
                    format!("an ask at {at} of {} tokens", tokens.len()),
                ));
            }
        }
        let slot = self.settled(CALL, seq)?;
        if slot.position + tokens.len() > slot.max_len {
            return Err(misuse(
                CALL,
                format!(
                    "{seq} would pass the {} tokens it was opened for",
                    slot.max_len
                ),
            ));
        }
        let rows = self.inner.prefill(seq, tokens, asks)?;
        if rows.len() != asks.len() {
            return Err(misuse(
                CALL,
                format!("{} rows for {} asks", rows.len(), asks.len()),
            ));
        }
        if let Some(slot) = self.sequences.get_mut(&seq) {
            slot.position += tokens.len();
        }
        Ok(rows)
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<Candidates>, DeviceError> {
        const CALL: &str = "draft";
        let Some(limit) = self.inner.info().draft_depth else {
            return Err(misuse(CALL, "there is no draft".to_owned()));
        };
        if depth == 0 || depth > limit || k == 0 {
            return Err(misuse(
                CALL,
                format!("depth {depth} of {limit}, {k} candidates"),
            ));
        }
        check_once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            self.check_tokens(CALL, &[item.root])?;
            self.settled(CALL, item.seq)?;
        }
        self.inner.draft(items, depth, k)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<Row>>, DeviceError> {
        const CALL: &str = "verify";
        let limit = self.inner.info().limits.tree_nodes;
        check_once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            let nodes = item.tree.len();
            if nodes > limit || item.asks.len() != nodes {
                let asks = item.asks.len();
                return Err(misuse(
                    CALL,
                    format!("{nodes} nodes of {limit}, {asks} asks"),
                ));
            }
            self.check_tokens(CALL, item.tree.tokens())?;
            item.asks.iter().try_for_each(|ask| check_ask(CALL, ask))?;
            let slot = self.settled(CALL, item.seq)?;
            if slot.position >= slot.max_len {
                return Err(misuse(CALL, format!("{} is full", item.seq)));
            }
        }
        let rows = self.inner.verify(items)?;
        for item in items {
            if let Some(slot) = self.sequences.get_mut(&item.seq) {
                slot.pending = Some(item.tree.clone());
            }
        }
        Ok(rows)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        const CALL: &str = "commit";
        check_once(CALL, items.iter().map(|item| item.seq))?;
        for item in items {
            let slot = self
                .sequences
                .get(&item.seq)
                .ok_or(DeviceError::UnknownSequence(item.seq))?;
            let Some(tree) = &slot.pending else {
                return Err(misuse(CALL, format!("{} has nothing pending", item.seq)));
            };
            tree.path(item.path.nodes())
                .map_err(|error| misuse(CALL, error.to_string()))?;
            if slot.position + item.path.len() > slot.max_len {
                return Err(misuse(
                    CALL,
                    format!(
                        "{} would pass the {} tokens it was opened for",
                        item.seq, slot.max_len
                    ),
                ));
            }
        }
        self.inner.commit(items)?;
        for item in items {
            if let Some(slot) = self.sequences.get_mut(&item.seq) {
                slot.pending = None;
                slot.position += item.path.len();
            }
        }
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        let slot = self
            .sequences
            .get_mut(&seq)
            .ok_or(DeviceError::UnknownSequence(seq))?;
        if slot.pending.take().is_none() {
            return Err(misuse("discard", format!("{seq} has nothing pending")));
        }
        self.inner.discard(seq)
    }

    fn snapshot(&mut self, seq: SeqId, place: Place) -> Result<SnapshotInfo, DeviceError> {
        let position = self.settled("snapshot", seq)?.position;
        let info = self.inner.snapshot(seq, place)?;
        if info.position != position {
            let found = info.position;
            return Err(misuse(
                "snapshot",
                format!("position {found}, {position} expected"),
            ));
        }
        self.snapshots.insert(info.id, position);
        Ok(info)
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        let position = *self
            .snapshots
            .get(&snapshot)
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        let slot = self.settled("restore", seq)?;
        if position > slot.max_len {
            let max_len = slot.max_len;
            return Err(misuse(
                "restore",
                format!("position {position} in {max_len} tokens"),
            ));
        }
        self.inner.restore(seq, snapshot)?;
        if let Some(slot) = self.sequences.get_mut(&seq) {
            slot.position = position;
        }
        Ok(())
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshots.remove(&snapshot);
        self.inner.free_snapshot(snapshot);
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        if !self.snapshots.contains_key(&snapshot) {
            return Err(DeviceError::UnknownSnapshot(snapshot));
        }
        self.inner.export(snapshot, sink)
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        let info = self.inner.import(source)?;
        self.snapshots.insert(info.id, info.position);
        Ok(info)
    }

    fn score(
        &mut self,
        tokens: &[TokenId],
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Vec<f32>, DeviceError> {
        if !self.inner.info().scorer {
            return Err(misuse("score", "there is no scorer".to_owned()));
        }
        self.check_tokens("score", tokens)?;
        self.inner.score(tokens, progress)
    }
}

impl Runner for Box<dyn Runner> {
    fn info(&self) -> &RunnerInfo {
        (**self).info()
    }
    fn room(&self) -> Room {
        (**self).room()
    }
    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        (**self).open(max_len)
    }
    fn close(&mut self, seq: SeqId) {
        (**self).close(seq);
    }
    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        asks: &[(usize, Ask)],
    ) -> Result<Vec<Row>, DeviceError> {
        (**self).prefill(seq, tokens, asks)
    }
    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<Candidates>, DeviceError> {
        (**self).draft(items, depth, k)
    }
    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<Row>>, DeviceError> {
        (**self).verify(items)
    }
    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        (**self).commit(items)
    }
    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        (**self).discard(seq)
    }
    fn snapshot(&mut self, seq: SeqId, place: Place) -> Result<SnapshotInfo, DeviceError> {
        (**self).snapshot(seq, place)
    }
    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        (**self).restore(seq, snapshot)
    }
    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        (**self).free_snapshot(snapshot);
    }
    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        (**self).export(snapshot, sink)
    }
    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        (**self).import(source)
    }
    fn score(
        &mut self,
        tokens: &[TokenId],
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Vec<f32>, DeviceError> {
        (**self).score(tokens, progress)
    }
}
