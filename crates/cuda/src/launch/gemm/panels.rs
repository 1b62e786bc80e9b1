//! Activations and results of prefill GEMMs as f16 panels (`kernels/gemm/panel_layout.cuh`).
//!
//! [`crate::launch::norm::panels`] makes panels from f32 rows. [`super::prefill`] dequantizes the
//! weights into panels too, in a scratch that all GEMMs share. The panels are f16 rather than bf16:
//! the rate is the same, the rounding error an eighth, and values out of range saturate. Matrices
//! kept as F32 are multiplied in f32. The number of rows, their sequence and its committed tokens
//! are read from a `Chunk` in device memory.
//!
//! Every result of a row has the same bits however a prompt is cut into chunks.

/// Rows of a tile: panels hold a multiple of this many.
pub(super) const TILE: usize = 128;
/// Columns of a panel.
pub(super) const PANEL: usize = 64;

/// Rows as f16 panels on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panels {
    /// Device address, 1024-byte aligned.
    pub at: u64,
    /// Rows it has room for, a multiple of 128.
    pub rows: usize,
}

impl Panels {
    /// Panels for chunks of up to `rows` rows.
    pub fn new(at: u64, rows: usize) -> Panels {
        Panels {
            at,
            rows: rows.next_multiple_of(TILE),
        }
    }

    /// Bytes of panels for chunks of up to `rows` rows of `width` values.
    pub fn bytes(rows: usize, width: usize) -> usize {
        rows.next_multiple_of(TILE) * width.next_multiple_of(PANEL) * 2
    }
}

/// The rows of a prefill chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRows {
    /// Device address of the `Chunk` header.
    pub header: u64,
    /// Maximum rows: buffers have room for as many, and the grid covers them.
    pub rows: usize,
}

/// Where rows go, form by form; 0 where a form is not wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillActivations {
    /// Address of panels, for products with packed weights.
    pub panels: u64,
    /// Address of f32 rows, for products with F32 weights.
    pub f32: u64,
}

/// A length as the kernels take it.
pub(in crate::launch) fn int(n: usize) -> i32 {
    i32::try_from(n).expect("lengths of a prefill are far below 2^31")
}

/// A count of blocks or threads.
pub(in crate::launch) fn count(n: usize) -> u32 {
    u32::try_from(n).expect("a grid is far below 2^32 blocks")
}
