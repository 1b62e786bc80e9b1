//! Products of a step's rows with matrices that share their input.

use super::PlanContext;
use super::activations::inputs;
use crate::launch::Launch;
use crate::launch::gemm::small_batch::{self, GemmEpilogue, GemmMatrix, GemmScratch};
use crate::launch::norm::ActivationBuffers;
use crate::weights::WeightMatrix;

/// One matrix and where its product goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmOperation {
    pub(super) matrix: WeightMatrix,
    /// f32 `[rows][matrix.rows]`.
    pub(super) out: u64,
    pub(super) write: GemmEpilogue,
}

/// Multiplies `rows` rows of `input` by every matrix, six at a time.
///
/// # Panics
/// If the matrices differ in their inputs.
pub(super) fn launches(
    context: &PlanContext<'_>,
    rows: usize,
    input: &ActivationBuffers,
    products: &[GemmOperation],
) -> Vec<Launch> {
    let gpu = context.gpu;
    let Some(first) = products.first() else {
        return Vec::new();
    };
    let cols = first.matrix.cols;
    assert!(
        products.iter().all(|p| p.matrix.cols == cols),
        "matrices of one launch share their input"
    );
    let scratch = GemmScratch(context.addresses.partials);
    let matrices: Vec<GemmMatrix> = products
        .iter()
        .map(|product| gemm_matrix(&product.matrix, product.out, product.write))
        .collect();
    matrices
        .chunks(small_batch::MAX_MATRICES)
        .flat_map(|matrices| {
            small_batch::launches(gpu, rows, cols, matrices, inputs(input), scratch)
        })
        .collect()
}

/// A matrix as launches take it, its product f32 `[..][matrix.rows]` at `out`.
pub(super) fn gemm_matrix(matrix: &WeightMatrix, out: u64, write: GemmEpilogue) -> GemmMatrix {
    GemmMatrix {
        kind: matrix.kind,
        rows: matrix.rows,
        weight: matrix.at,
        out,
        stride: matrix.rows,
        write,
    }
}
