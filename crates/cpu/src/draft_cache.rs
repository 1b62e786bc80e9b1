//! A sequence's state for its draft: keys and values of the visible committed tokens, and pending
//! features.

use contract::protocol::MAX_WAITING_TOKENS;
use contract::{DraftSpec, KvFormat, KvFormats, NodeIdx};

use crate::kv_shape::KvShape;

/// Maximum pending feature rows. The products of a few rows cost hardly more than those of one, so
/// committed tokens are projected together, at the latest when a draft or a snapshot needs them.
pub(crate) const MAX_PENDING_FEATURES: usize = MAX_WAITING_TOKENS;

/// A sequence's draft state. Dropped with the sequence.
pub(crate) struct DraftCache {
    /// One per layer, bottom to top.
    pub(crate) rings: Vec<DraftRing>,
    /// Features of the pending tree's nodes, `[n_nodes, capture_layers * hidden]`.
    pub(crate) tree_features: Vec<f32>,
    /// Pending features: those of the last committed tokens that the rings do not hold yet,
    /// `[n, capture_layers * hidden]`.
    pub(crate) pending_features: Vec<f32>,
    /// `capture_layers * hidden`.
    width: usize,
}

/// Keys and values of one draft layer: position `p` is in slot `p % slots`.
pub(crate) struct DraftRing {
    pub(crate) keys: Vec<u8>,
    pub(crate) values: Vec<u8>,
    pub(crate) shape: KvShape,
    /// The layer's window, or the sequence's maximum length if that is less.
    pub(crate) slots: usize,
}

/// Bytes of one sequence of `max_len` tokens: `(rings, features)`.
pub(crate) fn cache_bytes(
    spec: &DraftSpec,
    kv: KvFormat,
    max_len: usize,
    tree_nodes: usize,
) -> (u64, u64) {
    let ring = |layer: &contract::DraftLayer| {
        let a = &layer.attention;
        let row = 2 * kv.bytes(a.n_kv_heads * a.head_dim);
        (slots(layer.window, max_len) * row) as u64
    };
    let features = 4 * (tree_nodes + 2 * MAX_PENDING_FEATURES) * spec.fc.cols;
    (spec.layers.iter().map(ring).sum(), features as u64)
}

fn slots(window: usize, max_len: usize) -> usize {
    window.min(max_len).max(1)
}

impl DraftCache {
    /// Empty state of a sequence of up to `max_len` tokens.
    pub(crate) fn new(spec: &DraftSpec, kv: KvFormat, max_len: usize) -> DraftCache {
        let formats = KvFormats { k: kv, v: kv };
        let ring = |layer: &contract::DraftLayer| {
            let shape = KvShape::new(&layer.attention, formats, false);
            let slots = slots(layer.window, max_len);
            DraftRing {
                keys: vec![0; slots * shape.k_bytes()],
                values: vec![0; slots * shape.v_bytes()],
                shape,
                slots,
            }
        };
        DraftCache {
            rings: spec.layers.iter().map(ring).collect(),
            tree_features: Vec::new(),
            pending_features: Vec::new(),
            width: spec.fc.cols,
        }
    }

    /// Number of pending feature rows.
    pub(crate) fn n_pending_features(&self) -> usize {
        self.pending_features.len() / self.width
    }

    /// Moves the features of `path` to the pending features.
    pub(crate) fn commit(&mut self, path: &[NodeIdx]) {
        for node in path {
            let row = &self.tree_features[node.index() * self.width..][..self.width];
            self.pending_features.extend_from_slice(row);
        }
    }

    /// Copies the last `n` positions before `position` of every ring to stored rows `[n, ...]` in
    /// position order, where `n` is the number that the ring holds. No features may be pending.
    pub(crate) fn save(&self, position: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        assert!(self.pending_features.is_empty(), "snapshots project first");
        let save = |ring: &DraftRing| {
            let copy = |bytes: &[u8], row: usize| -> Vec<u8> {
                let held = ring.held(position);
                let slots = held.map(|p| p % ring.slots * row);
                slots
                    .flat_map(|at| bytes[at..at + row].iter().copied())
                    .collect()
            };
            let shape = ring.shape;
            (
                copy(&ring.keys, shape.k_bytes()),
                copy(&ring.values, shape.v_bytes()),
            )
        };
        self.rings.iter().map(save).collect()
    }

    /// Restores the copy of [`DraftCache::save`], from a ring of any size.
    pub(crate) fn restore(&mut self, position: usize, saved: &[(Vec<u8>, Vec<u8>)]) {
        self.pending_features.clear();
        self.tree_features.clear();
        for (ring, (keys, values)) in self.rings.iter_mut().zip(saved) {
            let slots = ring.slots;
            let put = |bytes: &mut [u8], rows: &[u8], row: usize| {
                let n = rows.len() / row;
                for (i, from) in rows
                    .chunks_exact(row)
                    .enumerate()
                    .skip(n.saturating_sub(slots))
                {
                    let at = (position - n + i) % slots * row;
                    bytes[at..at + row].copy_from_slice(from);
                }
            };
            put(&mut ring.keys, keys, ring.shape.k_bytes());
            put(&mut ring.values, values, ring.shape.v_bytes());
        }
    }
}

impl DraftRing {
    /// The positions held if `position` tokens are committed.
    pub(crate) fn held(&self, position: usize) -> std::ops::Range<usize> {
        position.saturating_sub(self.slots)..position
    }

    /// The stored key of one head at a held position.
    pub(crate) fn key(&self, position: usize, kv_head: usize) -> &[u8] {
        let shape = self.shape;
        let bytes = shape.k.row_bytes(shape.head_dim);
        let at = (position % self.slots * shape.n_kv_heads + kv_head) * bytes;
        &self.keys[at..at + bytes]
    }

    /// The stored value of one head at a held position.
    pub(crate) fn value(&self, position: usize, kv_head: usize) -> &[u8] {
        let shape = self.shape;
        let bytes = shape.v.row_bytes(shape.head_dim);
        let at = (position % self.slots * shape.n_kv_heads + kv_head) * bytes;
        &self.values[at..at + bytes]
    }
}
