//! One weight matrix, ready to be multiplied with rows of activations.

use std::sync::Arc;

use contract::quant::dequantize_row;
use contract::{QuantType, WeightError, WeightRef};

use crate::dispatch::Dispatch;
use crate::pool::Pool;

/// Rows of the weight that one parallel item computes on the reference path.
const REFERENCE_ROWS: usize = 16;

/// A matrix `[rows, cols]`. It owns its bytes; the file's may be dropped after loading.
pub struct Linear {
    name: Arc<str>,
    rows: usize,
    cols: usize,
    store: Store,
}

enum Store {
    /// The file's bytes, dequantised row by row at every use.
    Reference { ty: QuantType, bytes: Box<[u8]> },
}

impl Linear {
    /// Takes the bytes of `weight` as they are in the file.
    ///
    /// Fails when their length is not that of the reference.
    pub fn load(
        weight: &WeightRef,
        bytes: &[u8],
        _dispatch: &Dispatch,
    ) -> Result<Linear, WeightError> {
        if bytes.len() != weight.bytes() {
            return Err(WeightError::Mismatch {
                name: Arc::clone(&weight.name),
                detail: format!("{} bytes, {} expected", bytes.len(), weight.bytes()),
            });
        }
        let store = Store::Reference {
            ty: weight.ty,
            bytes: bytes.into(),
        };
        Ok(Linear {
            name: Arc::clone(&weight.name),
            rows: weight.rows,
            cols: weight.cols,
            store,
        })
    }

    /// The name of the weight in its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes held.
    pub fn owned_bytes(&self) -> usize {
        match &self.store {
            Store::Reference { bytes, .. } => bytes.len(),
        }
    }

    /// `out[n, rows] = x[n, cols] · weight^T`. A row of `out` has the same bits whatever `n` is.
    pub fn apply(&self, pool: &Pool, x: &[f32], n: usize, out: &mut [f32]) {
        assert_eq!((x.len(), out.len()), (n * self.cols, n * self.rows));
        match &self.store {
            Store::Reference { ty, bytes } => self.apply_reference(*ty, bytes, pool, x, out),
        }
    }

    fn apply_reference(
        &self,
        ty: QuantType,
        bytes: &[u8],
        pool: &Pool,
        x: &[f32],
        out: &mut [f32],
    ) {
        let n = x.len() / self.cols;
        let row_bytes = ty.row_bytes(self.cols);
        // Weight rows outermost, so that each is dequantised once: `[rows, n]`, turned over at the end.
        let mut by_row = vec![0.0; out.len()];
        let blocks = by_row
            .chunks_mut(n * REFERENCE_ROWS)
            .zip(bytes.chunks(row_bytes * REFERENCE_ROWS));
        pool.for_each_item(blocks, |(sums, bytes)| {
            let mut row = vec![0.0; self.cols];
            for (sums, bytes) in sums.chunks_exact_mut(n).zip(bytes.chunks_exact(row_bytes)) {
                dequantize_row(ty, bytes, &mut row);
                for (sum, x) in sums.iter_mut().zip(x.chunks_exact(self.cols)) {
                    *sum = dot(&row, x);
                }
            }
        });
        for (row, sums) in by_row.chunks_exact(n).enumerate() {
            for (item, &sum) in sums.iter().enumerate() {
                out[item * self.rows + row] = sum;
            }
        }
    }
}

/// `sum a * b`, each `[n]`: sixteen partial sums over indices of equal remainder, then those in order.
///
/// The order is fixed, and closer to the exact sum than one running total.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0; LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail = a_lanes.remainder().iter().zip(b_lanes.remainder());
    let tail: f32 = tail.map(|(a, b)| a * b).sum();
    for (a, b) in a_lanes.zip(b_lanes) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + tail
}

/// Several matrices on the same rows of activations, `x` `[n, cols]`; each part's output is `[n, rows]`.
///
/// Gives the bits of one [`Linear::apply`] each; faster, since the activations are prepared once and the
/// matrices share one parallel region.
pub fn apply_all(pool: &Pool, x: &[f32], n: usize, parts: &mut [(&Linear, &mut [f32])]) {
    for (linear, out) in parts {
        linear.apply(pool, x, n, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_of_a_wrong_length_is_refused_by_name() {
        let weight = WeightRef {
            name: "blk.0.ffn_up.weight".into(),
            ty: QuantType::Q8_0,
            rows: 2,
            cols: 32,
        };
        let error = Linear::load(&weight, &[0; 67], &Dispatch::reference())
            .err()
            .unwrap();
        assert_eq!(
            error.to_string(),
            "tensor blk.0.ffn_up.weight: 67 bytes, 68 expected"
        );
    }
}
