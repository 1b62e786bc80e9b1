//! Products of a step's rows with matrices that share their input.

use super::Site;
use super::activations::inputs;
use crate::launch::Launch;
use crate::launch::gemm::small_batch::{self, Scratch, Segment, Write};
use crate::launch::norm::Out;
use crate::weights::WeightMatrix;

/// One matrix and where its product goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) matrix: WeightMatrix,
    /// f32 `[rows][matrix.rows]`.
    pub(super) out: u64,
    pub(super) write: Write,
}

/// Multiplies `rows` rows of `input` by every matrix, six at a time.
///
/// # Panics
/// If the matrices differ in their inputs.
pub(super) fn launches(
    site: &Site<'_>,
    rows: usize,
    input: &Out,
    products: &[Product],
) -> Vec<Launch> {
    let gpu = site.gpu;
    let Some(first) = products.first() else {
        return Vec::new();
    };
    let cols = first.matrix.cols;
    assert!(
        products.iter().all(|p| p.matrix.cols == cols),
        "matrices of one launch share their input"
    );
    let scratch = Scratch(site.addresses.partials);
    let segments: Vec<Segment> = products
        .iter()
        .map(|product| segment(&product.matrix, product.out, product.write))
        .collect();
    segments
        .chunks(small_batch::MAX_SEGMENTS)
        .flat_map(|segments| {
            small_batch::launches(gpu, rows, cols, segments, inputs(input), scratch)
        })
        .collect()
}

/// A matrix as launches take it, its product f32 `[..][matrix.rows]` at `out`.
pub(super) fn segment(matrix: &WeightMatrix, out: u64, write: Write) -> Segment {
    Segment {
        kind: matrix.kind,
        rows: matrix.rows,
        weight: matrix.at,
        out,
        stride: matrix.rows,
        write,
    }
}
