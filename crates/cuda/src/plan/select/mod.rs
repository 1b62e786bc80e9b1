//! Which kernel runs each operation: pure functions of the GPU, the numerics, the model's shape,
//! the rows, the trees and the depth. `launch/` launches what is selected here. `hearth kernels
//! explain` prints the result, and `tests/selection.rs` freezes it.

mod attention;
mod depth;
mod gated_delta;
mod gemm;

pub use attention::{
    StepSize, block_sparse_attention, decode_attention, has_fixed_splits, prefill_attention,
    uses_f16_queries,
};
pub(crate) use depth::Depth;
#[cfg(test)]
pub(crate) use depth::SHALLOW_TOKENS;
pub use gated_delta::{gated_delta_decode, gated_delta_scan, wy_tree};
pub use gemm::prefill_gemm;
pub(crate) use gemm::{
    DecodeGemm, GemmFits, PrefillPath, decode_gemm, prefill_path, uses_one_launch,
};

/// What was selected, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selected<K> {
    /// The kernel, with what it is compiled for.
    pub kernel: K,
    /// Why this one runs.
    pub reason: &'static str,
}

impl<K> Selected<K> {
    fn new(kernel: K, reason: &'static str) -> Selected<K> {
        Selected { kernel, reason }
    }
}
