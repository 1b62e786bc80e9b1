//! The stored keys and values of one key head, and the operations on them by format.

use std::ops::Range;

use contract::quant::hadamard;
use contract::{AttentionSpec, AttentionWindow, KvFormat, NodeIdx, OutputGate};

use crate::kernels::Kernels;
use crate::kv_shape::KvShape;
use crate::reference::kv::{self, Codec};
use crate::state::KvCache;

/// The stored rows of one key head.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub(super) cache: &'a KvCache,
    pub(super) kv_head: usize,
    /// Committed positions, which are stored in order.
    pub(super) committed: usize,
    /// Nodes after the committed positions. Node `i` is stored in slot `committed + i`.
    pub(super) path: &'a [NodeIdx],
    /// The committed positions that are visible to the last node of the path.
    pub(super) window: AttentionWindow,
    /// The layer's own window.
    pub(super) layer_window: Option<usize>,
}

/// The first position that a row at `position` sees through a layer's window.
pub(super) fn first_visible(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// Positions that a row does not see.
#[derive(Debug, Clone)]
pub(super) struct HiddenKeys {
    /// Those before this one lie outside the layer's window.
    before: usize,
    /// Those that the window of the decode step masks.
    masked: Range<usize>,
}

impl HiddenKeys {
    /// Those of a row at `position`.
    pub(super) fn of(
        position: usize,
        window: AttentionWindow,
        layer_window: Option<usize>,
    ) -> HiddenKeys {
        HiddenKeys {
            before: first_visible(layer_window, position),
            masked: window.masked(position),
        }
    }

    pub(super) fn contains(&self, at: usize) -> bool {
        at < self.before || self.masked.contains(&at)
    }

    /// Whether one of the two windows alone hides all of a range.
    pub(super) fn covers(&self, range: Range<usize>) -> bool {
        range.end <= self.before
            || (self.masked.start <= range.start && range.end <= self.masked.end)
    }
}

impl<'a> Keys<'a> {
    /// Number of keys.
    pub(super) fn n(&self) -> usize {
        self.committed + self.path.len()
    }

    /// Positions that are hidden from the last key's position.
    pub(super) fn hidden(&self) -> HiddenKeys {
        let position = self.n().saturating_sub(1);
        HiddenKeys::of(position, self.window, self.layer_window)
    }

    /// Where the key of position `at` is stored.
    pub(super) fn slot(&self, at: usize) -> usize {
        match at.checked_sub(self.committed) {
            None => at,
            Some(depth) => self.committed + self.path[depth].index(),
        }
    }

    pub(super) fn key(&self, slot: usize) -> &'a [u8] {
        let KvShape {
            k,
            n_kv_heads,
            head_dim,
            ..
        } = self.cache.shape;
        let bytes = k.row_bytes(head_dim);
        &self.cache.keys[(slot * n_kv_heads + self.kv_head) * bytes..][..bytes]
    }

    pub(super) fn value(&self, slot: usize) -> &'a [u8] {
        let KvShape {
            v,
            n_kv_heads,
            head_dim,
            ..
        } = self.cache.shape;
        let bytes = v.row_bytes(head_dim);
        &self.cache.values[(slot * n_kv_heads + self.kv_head) * bytes..][..bytes]
    }
}

/// Width of a query head in the projection, gate included.
pub(super) fn q_stride(spec: &AttentionSpec) -> usize {
    match spec.gate {
        OutputGate::None => spec.head_dim,
        OutputGate::SigmoidPerHead => 2 * spec.head_dim,
    }
}

/// Undoes the Hadamard rotation in weighted sums of values `[n, head_dim]`, if values are rotated.
pub(super) fn rotate_inverse(shape: KvShape, heads: &mut [f32]) {
    if shape.v.is_rotated() {
        let heads = heads.chunks_exact_mut(shape.head_dim);
        heads.for_each(hadamard::rotate_inverse);
    }
}

/// The decoder of a stored row; a row that is stored rotated stays rotated.
pub(in crate::blocks) fn decode_of(kernels: &Kernels, codec: Codec) -> fn(&[u8], &mut [f32]) {
    match codec.format() {
        KvFormat::F32 => kv::decode_f32,
        KvFormat::F16 => kernels.decode_f16,
        KvFormat::Q8_0 => kernels.decode_q8_0,
        KvFormat::Q4_0 => kernels.decode_q4_0,
        KvFormat::Bf16 => |bytes, row| kv::decode(KvFormat::Bf16, bytes, row),
        KvFormat::Q5_1 => |bytes, row| kv::decode(KvFormat::Q5_1, bytes, row),
        KvFormat::Q5_0 => |bytes, row| kv::decode(KvFormat::Q5_0, bytes, row),
        KvFormat::Q4_1 => |bytes, row| kv::decode(KvFormat::Q4_1, bytes, row),
        KvFormat::Tq3_0 => |bytes, row| kv::decode(KvFormat::Tq3_0, bytes, row),
    }
}

/// The dot product of a query with a stored key.
pub(super) fn dot_of(kernels: &Kernels, codec: Codec) -> fn(&[f32], &[u8]) -> f32 {
    match codec.format() {
        KvFormat::F32 => kv::dot_f32,
        KvFormat::F16 => kernels.dot_f16,
        KvFormat::Q8_0 => kernels.dot_q8_0,
        KvFormat::Q4_0 => kernels.dot_q4_0,
        KvFormat::Bf16 => |query, key| kv::dot(KvFormat::Bf16, query, key),
        KvFormat::Q5_1 => |query, key| kv::dot(KvFormat::Q5_1, query, key),
        KvFormat::Q5_0 => |query, key| kv::dot(KvFormat::Q5_0, query, key),
        KvFormat::Q4_1 => |query, key| kv::dot(KvFormat::Q4_1, query, key),
        KvFormat::Tq3_0 => |query, key| kv::dot(KvFormat::Tq3_0, query, key),
    }
}
