//! Newtypes for everything that crosses a crate boundary as a number.

use std::fmt;

/// A token of the target's vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TokenId(pub u32);

/// A sequence on a device. [`Runner::open`](crate::Runner::open) creates it; a runner never reuses
/// an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// A saved committed state. A runner never reuses an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId(pub u64);

/// A node of a draft [`Tree`](crate::Tree). Node 0 is the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NodeIdx(pub u16);

/// A row that [`Runner::draft_mtp`](crate::Runner::draft_mtp) computed for a sequence, counted
/// from its root row, 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MtpRow(pub u16);

impl TokenId {
    /// The id as an index into vocabulary-sized tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeIdx {
    /// The root of every tree.
    pub const ROOT: NodeIdx = NodeIdx(0);

    /// The node as an index into node-sized tables.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl MtpRow {
    /// The row as an index into the sequence's drafted rows.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "snapshot {}", self.0)
    }
}

impl fmt::Display for NodeIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}
