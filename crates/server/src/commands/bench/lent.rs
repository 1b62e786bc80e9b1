//! A runner lent to one scheduler after another, with every call timed; on demand with acceptance made up.
//!
//! Random weights draft nothing that comes true. To measure a whole step at real shapes all the same, the device
//! does all its work and only the numbers that come back are changed: the draft's log-probabilities become those
//! of a draft of a given quality, so that trees have the shapes of real ones, and the rows of a verify say what
//! makes the walk keep as many nodes as wanted in the mean. Sampling, walk and commit then run as ever.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::rc::Rc;
use std::time::{Duration, Instant};

use contract::{
    Ask, Candidates, CommitItem, DeviceError, DraftItem, NodeIdx, Place, Room, Row, Runner,
    RunnerInfo, SeqId, SnapshotId, SnapshotInfo, TokenId, Tree, VerifyItem,
};

/// Time inside the runner's calls.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Calls {
    pub(super) draft: Duration,
    pub(super) verify: Duration,
    pub(super) commit: Duration,
}

impl Calls {
    /// All of it.
    pub(super) fn total(&self) -> Duration {
        self.draft + self.verify + self.commit
    }
}

/// Acceptance that is made up.
#[derive(Debug)]
struct MadeUp {
    /// Tokens a step and sequence in the mean.
    accept: f64,
    /// What rounding has left over.
    carry: f64,
}

struct Shared {
    runner: Box<dyn Runner>,
    calls: Calls,
    made_up: Option<MadeUp>,
}

/// A handle on the runner; it is dropped with the last one.
#[derive(Clone)]
pub(super) struct Lent {
    info: Rc<RunnerInfo>,
    shared: Rc<RefCell<Shared>>,
}

impl Lent {
    /// Takes an opened runner.
    pub(super) fn new(runner: Box<dyn Runner>) -> Lent {
        Lent {
            info: Rc::new(runner.info().clone()),
            shared: Rc::new(RefCell::new(Shared {
                runner,
                calls: Calls::default(),
                made_up: None,
            })),
        }
    }

    /// From now on trees keep so many tokens a step in the mean, the one that the target adds included.
    pub(super) fn make_up(&self, accept: f64) {
        self.shared.borrow_mut().made_up = Some(MadeUp { accept, carry: 0.0 });
    }

    /// What calls have taken since this was asked last.
    pub(super) fn take_calls(&self) -> Calls {
        std::mem::take(&mut self.shared.borrow_mut().calls)
    }
}

impl MadeUp {
    /// Gives drafted positions the log-probabilities of a draft that is right with one chance, by falling rank.
    fn draft(&self, candidates: &mut Candidates) {
        let right = 1.0 - 1.0 / (self.accept + 1.0);
        for row in candidates.log_probs.chunks_mut(candidates.k.max(1)) {
            let mut left = 1.0 - right;
            for (rank, log_prob) in row.iter_mut().enumerate() {
                let chance = match rank {
                    0 => right,
                    _ => {
                        left /= 2.0;
                        left
                    }
                };
                *log_prob = chance.ln() as f32;
            }
        }
    }

    /// Tokens of the next step: whole numbers whose mean is what is wanted.
    fn next(&mut self) -> usize {
        self.carry += self.accept;
        let tokens = self.carry.floor().max(1.0);
        self.carry -= tokens;
        tokens as usize
    }

    /// Makes the walk through `tree` keep a path, and end there.
    fn verify(&mut self, tree: &Tree, rows: &mut [Row]) {
        let drafted = self.next() - 1;
        let depth = drafted.min(tree.nodes().map(|node| tree.depth(node)).max().unwrap_or(0));
        // The first node of that depth stands below the likeliest ones.
        let end = tree.nodes().find(|&node| tree.depth(node) == depth);
        let path = tree.path_to(end.unwrap_or(NodeIdx::ROOT));
        for pair in path.nodes().windows(2) {
            say(&mut rows[pair[0].index()], tree.token(pair[1]));
        }
        let last = path.nodes().last().copied().unwrap_or(NodeIdx::ROOT);
        let row = &mut rows[last.index()];
        let mut token = row.ids.first().copied().unwrap_or_default();
        while tree.child_with(last, token).is_some() {
            token = TokenId(token.0 ^ 1);
            if tree.child_with(last, token).is_some() {
                token = TokenId((token.0 | 1) + 1);
            }
        }
        say(row, token);
    }
}

/// Puts a token in the place of a row's best.
fn say(row: &mut Row, token: TokenId) {
    let place = row.ids.iter().position(|id| *id == token);
    if let Some(best) = row.ids.first().copied() {
        if let Some(place) = place {
            row.ids[place] = best;
        }
        row.ids[0] = token;
    }
}

impl Runner for Lent {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn room(&self) -> Room {
        self.shared.borrow().runner.room()
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.shared.borrow_mut().runner.open(max_len)
    }

    fn close(&mut self, seq: SeqId) {
        self.shared.borrow_mut().runner.close(seq);
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        asks: &[(usize, Ask)],
    ) -> Result<Vec<Row>, DeviceError> {
        self.shared.borrow_mut().runner.prefill(seq, tokens, asks)
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<Candidates>, DeviceError> {
        let Shared {
            runner,
            calls,
            made_up,
        } = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        let mut drafted = runner.draft(items, depth, k)?;
        calls.draft += start.elapsed();
        if let Some(made_up) = made_up {
            drafted.iter_mut().for_each(|c| made_up.draft(c));
        }
        Ok(drafted)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<Row>>, DeviceError> {
        let Shared {
            runner,
            calls,
            made_up,
        } = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        let mut rows = runner.verify(items)?;
        calls.verify += start.elapsed();
        if let Some(made_up) = made_up {
            for (item, rows) in items.iter().zip(&mut rows) {
                made_up.verify(item.tree, rows);
            }
        }
        Ok(rows)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        let Shared { runner, calls, .. } = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        runner.commit(items)?;
        calls.commit += start.elapsed();
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.shared.borrow_mut().runner.discard(seq)
    }

    fn snapshot(&mut self, seq: SeqId, place: Place) -> Result<SnapshotInfo, DeviceError> {
        self.shared.borrow_mut().runner.snapshot(seq, place)
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        self.shared.borrow_mut().runner.restore(seq, snapshot)
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.shared.borrow_mut().runner.free_snapshot(snapshot);
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        self.shared.borrow_mut().runner.export(snapshot, sink)
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        self.shared.borrow_mut().runner.import(source)
    }

    fn score(
        &mut self,
        tokens: &[TokenId],
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Vec<f32>, DeviceError> {
        self.shared.borrow_mut().runner.score(tokens, progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: u32) -> Row {
        Row {
            ids: vec![TokenId(id)],
            logits: vec![1.0],
            raw: vec![1.0],
            lse: 1.5,
            raw_lse: 1.5,
        }
    }

    #[test]
    fn a_made_up_walk_keeps_what_is_wanted_in_the_mean_and_never_more_than_the_tree() {
        let tokens: Vec<TokenId> = (10..20).map(TokenId).collect();
        let mut tree = Tree::chain(&tokens).unwrap();
        for token in 0..4 {
            tree.push(NodeIdx::ROOT, TokenId(token)).unwrap();
        }
        for (accept, expected) in [(1.0, 1.0), (4.25, 4.25), (30.0, 10.0)] {
            let mut made_up = MadeUp { accept, carry: 0.0 };
            let mut sum = 0;
            for _ in 0..100 {
                let mut rows: Vec<Row> = (0..tree.len()).map(|_| row(0)).collect();
                made_up.verify(&tree, &mut rows);
                let mut at = NodeIdx::ROOT;
                sum += 1;
                while let Some(child) = tree.child_with(at, rows[at.index()].ids[0]) {
                    (at, sum) = (child, sum + 1);
                }
            }
            assert!(
                (f64::from(sum) / 100.0 - expected).abs() < 0.02,
                "{accept}: {sum}"
            );
        }
    }

    #[test]
    fn made_up_candidates_fall_with_their_rank() {
        let made_up = MadeUp {
            accept: 8.3,
            carry: 0.0,
        };
        let mut candidates = Candidates {
            ids: (0..8).map(TokenId).collect(),
            log_probs: vec![0.0; 8],
            lse: vec![0.0; 2],
            k: 4,
        };
        made_up.draft(&mut candidates);
        for row in candidates.log_probs.chunks(4) {
            assert!(row.is_sorted_by(|a, b| a > b), "{row:?}");
            let mass: f32 = row.iter().map(|p| p.exp()).sum();
            assert!(row[0].exp() > 0.85 && mass < 1.0, "{row:?}");
        }
    }
}
