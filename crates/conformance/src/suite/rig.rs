//! A runner under test behind [`CheckedRunner`], with helper methods.

use contract::checked::CheckedRunner;
use contract::{
    CommitItem, DeviceError, LogitsRequest, LogitsRow, NodeIdx, Runner, SeqId, TokenId, Tree,
    VerifyItem,
};

use super::{Failure, LIMITS};
use crate::compare::{Precision, compare_rows};

/// A runner under test.
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

    /// Prompts may be split at multiples of this many tokens.
    pub(super) fn align(&self) -> usize {
        self.runner.info().prefill_align.max(1)
    }

    /// `n` tokens; another `salt` gives other tokens.
    pub(super) fn text(&self, n: usize, salt: usize) -> Vec<TokenId> {
        let vocab = self.runner.info().vocab;
        let ids = (0..n).map(|i| (i * i + (7 + salt) * i + 31 * salt + 5) % vocab);
        ids.map(|id| TokenId(id as u32)).collect()
    }

    /// A new sequence of full length.
    pub(super) fn open(&mut self) -> Result<SeqId, DeviceError> {
        let context = self.runner.info().limits.context;
        self.runner.open(context)
    }

    /// A sequence after prefill of `tokens` in as few chunks as possible.
    pub(super) fn prefill(&mut self, tokens: &[TokenId]) -> Result<SeqId, DeviceError> {
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

    /// Prefills `tokens` in one call and returns the full row of each.
    pub(super) fn prefill_rows(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let requests: Vec<(usize, LogitsRequest)> = (0..tokens.len())
            .map(|i| (i, LogitsRequest::full()))
            .collect();
        self.runner.prefill(seq, tokens, &requests)
    }

    /// Decodes `tokens` one by one and returns the full row after each.
    pub(super) fn decode(
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

    /// Rows of two more decoded tokens, which depend on the whole state. Advances the sequence.
    pub(super) fn probe(&mut self, seq: SeqId) -> Result<Vec<LogitsRow>, DeviceError> {
        let tokens = self.text(2, 90);
        self.decode(seq, &tokens)
    }

    /// Verifies one tree with a full row per node; the tree becomes pending.
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
                detail: "no rows for the item".to_owned(),
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

    /// Compares two lists of rows with the rig's precision.
    pub(super) fn same(
        &self,
        what: &str,
        found: &[LogitsRow],
        expected: &[LogitsRow],
    ) -> Result<(), Failure> {
        same_rows(what, found, expected, self.precision)
    }
}

/// Compares two lists of rows with the given precision.
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

/// Fails with `detail` unless `holds`.
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
