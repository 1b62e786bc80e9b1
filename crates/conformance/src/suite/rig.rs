//! A runner under test, behind the protocol's guard, with short ways to use it.

use contract::checked::CheckedRunner;
use contract::{
    CommitItem, DeviceError, LogitsRequest, LogitsRow, NodeIdx, Runner, SeqId, TokenId, Tree,
    VerifyItem,
};

use super::{Failure, LIMITS};
use crate::compare::{Precision, compare_rows};

/// A runner on the test rig.
pub(super) struct Rig {
    pub(super) runner: CheckedRunner<Box<dyn Runner>>,
    precision: Precision,
}

impl Rig {
    pub(super) fn new(runner: Box<dyn Runner>, precision: Precision) -> Rig {
        Rig {
            runner: CheckedRunner::new(runner),
            precision,
        }
    }

    /// Multiples of this many tokens are where a prompt may be cut.
    pub(super) fn align(&self) -> usize {
        self.runner.info().prefill_align.max(1)
    }

    /// `n` tokens that differ by `salt`.
    pub(super) fn text(&self, n: usize, salt: usize) -> Vec<TokenId> {
        let vocab = self.runner.info().vocab;
        let ids = (0..n).map(|i| (i * i + (7 + salt) * i + 31 * salt + 5) % vocab);
        ids.map(|id| TokenId(id as u32)).collect()
    }

    /// A fresh sequence of full length.
    pub(super) fn open(&mut self) -> Result<SeqId, DeviceError> {
        let context = self.runner.info().limits.context;
        self.runner.open(context)
    }

    /// A sequence that has read `tokens`, with as few cuts as the runner allows.
    pub(super) fn read(&mut self, tokens: &[TokenId]) -> Result<SeqId, DeviceError> {
        let seq = self.open()?;
        let align = self.align();
        let size = match LIMITS.prefill_chunk / align * align {
            0 => LIMITS.prefill_chunk,
            size => size,
        };
        for chunk in tokens.chunks(size) {
            self.runner.prefill(seq, chunk, &[])?;
        }
        Ok(seq)
    }

    /// Reads `tokens` in one go and gives the full row of each.
    pub(super) fn read_rows(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let requests: Vec<(usize, LogitsRequest)> = (0..tokens.len())
            .map(|i| (i, LogitsRequest::full()))
            .collect();
        self.runner.prefill(seq, tokens, &requests)
    }

    /// Speaks `tokens` one by one and gives the full row after each.
    pub(super) fn speak(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let mut rows = Vec::with_capacity(tokens.len());
        for token in tokens {
            let tree = Tree::root(*token);
            let mut row = self.verify(seq, &tree)?;
            self.commit(seq, &tree, NodeIdx::ROOT)?;
            rows.append(&mut row);
        }
        Ok(rows)
    }

    /// What a sequence says next, whatever it is told: two tokens spoken, their rows. The sequence moves on.
    pub(super) fn reveal(&mut self, seq: SeqId) -> Result<Vec<LogitsRow>, DeviceError> {
        let tokens = self.text(2, 90);
        self.speak(seq, &tokens)
    }

    /// Verifies one tree with a full row for each node; the sequence becomes pending.
    pub(super) fn verify(
        &mut self,
        seq: SeqId,
        tree: &Tree,
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let requests = vec![LogitsRequest::full(); tree.len()];
        let item = VerifyItem {
            seq,
            tree,
            requests: &requests,
        };
        self.runner
            .verify(&[item])?
            .pop()
            .ok_or(DeviceError::InvalidCall {
                call: "verify",
                detail: "no rows for the one item".to_owned(),
            })
    }

    /// Commits the path to one node.
    pub(super) fn commit(
        &mut self,
        seq: SeqId,
        tree: &Tree,
        node: NodeIdx,
    ) -> Result<(), DeviceError> {
        let path = tree.path_to(node);
        self.runner.commit(&[CommitItem { seq, path: &path }])
    }

    /// Says where two lists of rows that must be the same are not.
    pub(super) fn same(
        &self,
        what: &str,
        found: &[LogitsRow],
        expected: &[LogitsRow],
    ) -> Result<(), Failure> {
        same_rows(what, found, expected, self.precision)
    }
}

/// Says where two lists of rows are further apart than they may be.
pub(super) fn same_rows(
    what: &str,
    found: &[LogitsRow],
    expected: &[LogitsRow],
    precision: Precision,
) -> Result<(), Failure> {
    check(found.len() == expected.len(), what, || {
        format!("{} rows instead of {}", found.len(), expected.len())
    })?;
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        compare_rows(found, expected, precision).map_err(|difference| Failure::Differs {
            what: format!("{what}, row {i}"),
            detail: difference.to_string(),
        })?;
    }
    Ok(())
}

/// Says what is wrong where `holds` is not.
pub(super) fn check(
    holds: bool,
    what: &str,
    detail: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if holds {
        return Ok(());
    }
    Err(Failure::Differs {
        what: what.to_owned(),
        detail: detail(),
    })
}
