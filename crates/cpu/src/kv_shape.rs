//! Row format of a KV cache.

use contract::{AttentionSpec, KvFormats};

use crate::reference::kv::Codec;

/// Row format of the KV cache of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvShape {
    /// Storage of keys and values.
    pub(crate) k: Codec,
    pub(crate) v: Codec,
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl KvShape {
    /// The row format of a layer; `rotate` selects the Hadamard rotation of quantized rows.
    pub(crate) fn new(spec: &AttentionSpec, kv: KvFormats, rotate: bool) -> KvShape {
        KvShape {
            k: Codec::new(kv.k, rotate),
            v: Codec::new(kv.v, rotate),
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
        }
    }

    /// Bytes of the keys of one position, all heads.
    pub(crate) fn k_bytes(&self) -> usize {
        self.n_kv_heads * self.k.row_bytes(self.head_dim)
    }

    /// Bytes of the values of one position, all heads.
    pub(crate) fn v_bytes(&self) -> usize {
        self.n_kv_heads * self.v.row_bytes(self.head_dim)
    }
}
