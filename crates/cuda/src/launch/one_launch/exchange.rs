//! Rows that blocks exchange: where each launch's results are while the persistent launch runs.
//!
//! Every result has words of its own, which show whether they are there; so they are not where the
//! plan has them, and no launch writes over another's.

use std::collections::BTreeMap;

use super::operation::Operation;

/// Bytes that a result is aligned to.
const ALIGNMENT: usize = 128;

/// An address in the plan, or an offset in the exchanged rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Plan(u64),
    Exchanged(u64),
}

impl At {
    pub(super) fn word(self) -> u64 {
        match self {
            At::Plan(word) | At::Exchanged(word) => word,
        }
    }

    /// Bit `index` if this is an offset.
    pub(super) fn bit(self, index: usize) -> u32 {
        u32::from(matches!(self, At::Exchanged(_))) << index
    }
}

#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// The latest result at each address of the plan: bytes and offset.
    latest: BTreeMap<u64, (usize, u64)>,
    bytes: usize,
    /// The last launch that writes each address of the plan.
    last: BTreeMap<u64, usize>,
}

impl Exchange {
    pub(super) fn new(operations: &[Operation]) -> Exchange {
        let mut last = BTreeMap::new();
        for (phase, operation) in operations.iter().enumerate() {
            last.extend(operation.results().into_iter().map(|(at, _)| (at, phase)));
        }
        Exchange {
            last,
            ..Exchange::default()
        }
    }

    /// Bytes of all results.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where what the plan has at `address` is now.
    pub(super) fn read(&self, address: u64) -> At {
        match self.latest.range(..=address).next_back() {
            Some((begin, (bytes, offset))) if address - begin < *bytes as u64 => {
                At::Exchanged(offset + (address - begin))
            }
            _ => At::Plan(address),
        }
    }

    /// Where the results of an operation go, in their order. Neighbours stay neighbours. Reads from
    /// here on are of these.
    pub(super) fn write(&mut self, operation: &Operation) -> Vec<At> {
        let results = operation.results();
        let mut sorted = results.clone();
        sorted.sort_unstable();
        let mut end = None;
        for (address, bytes) in sorted {
            if end != Some(address) {
                self.bytes = self.bytes.next_multiple_of(ALIGNMENT);
            }
            let offset = self.bytes as u64;
            self.latest.insert(address, (bytes, offset));
            self.bytes += bytes;
            end = Some(address + bytes as u64);
        }
        self.bytes = self.bytes.next_multiple_of(ALIGNMENT);
        results.iter().map(|(at, _)| self.read(*at)).collect()
    }

    /// The address of the plan, if later launches than those here may read the result of `phase`
    /// there; else 0.
    pub(super) fn copy(&self, phase: usize, address: u64) -> u64 {
        if self.last.get(&address) == Some(&phase) {
            address
        } else {
            0
        }
    }
}
