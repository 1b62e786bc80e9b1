//! One weight matrix in memory, and its products with rows of activations.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use contract::quant::dequantize_row;
use contract::{QuantType, WeightError, WeightRef};

use crate::importance;
use crate::matmul::activations::Activations;
use crate::matmul::layout::Packed;
use crate::matmul::pack::pack_all;
use crate::simd;
use crate::simd::dispatch::Dispatch;
use crate::simd::tiles::{Output, for_each_tile};
use crate::thread_pool::ThreadPool;

/// Rows of the weight that one parallel item computes on the reference path.
const REFERENCE_ROWS: usize = 16;

/// Target number of parallel items per thread in a region, so that threads end together.
const ITEMS_PER_THREAD: usize = 16;

/// Rows of activations that one parallel item rounds; a region does not pay off for fewer.
const ROUNDED_ROWS: usize = 8;

/// Float weights are multiplied four columns at a time.
const FLOAT_COLS: usize = 4;

thread_local! {
    /// Rounded activations of the current call; reused to avoid allocations.
    static ROUNDED: RefCell<Activations> = RefCell::default();
}

/// A matrix `[rows, cols]`, or several of one shape, as those of experts. It owns its bytes; the
/// file's bytes may be dropped after loading.
///
/// The fast paths repack weights. The size is that of the file, except for these types: Q6_K one
/// percent more, TQ1_0 and TQ2_0 4.5 bits per value, Q3_K and IQ3_S 6.6, IQ4_NL 8.5, IQ4_XS,
/// IQ2_XXS, IQ3_XXS, IQ1_S and MXFP4 9, IQ2_XS, IQ2_S, IQ1_M and NVFP4 10, Q2_K 16.
pub struct Linear {
    name: Arc<str>,
    rows: usize,
    cols: usize,
    store: WeightStorage,
}

enum WeightStorage {
    /// The file's bytes; each use dequantizes them row by row.
    Reference { ty: QuantType, bytes: Box<[u8]> },
    /// Tiles for the fast kernels.
    Packed { packed: Packed, dispatch: Dispatch },
}

impl Linear {
    /// Loads `weight` from its bytes in the file.
    ///
    /// Fails if their length does not match the shape.
    pub fn load(
        weight: &WeightRef,
        bytes: &[u8],
        dispatch: &Dispatch,
    ) -> Result<Linear, WeightError> {
        Linear::load_on(&ThreadPool::new(1), weight, bytes, dispatch)
    }

    /// [`Linear::load`] with the repacking split over `pool`.
    pub fn load_on(
        pool: &ThreadPool,
        weight: &WeightRef,
        bytes: &[u8],
        dispatch: &Dispatch,
    ) -> Result<Linear, WeightError> {
        if bytes.len() != weight.bytes() || weight.values() == 0 {
            return Err(WeightError::Mismatch {
                name: Arc::clone(&weight.name),
                detail: format!("{} bytes, {} expected", bytes.len(), weight.bytes()),
            });
        }
        Ok(Linear::of_matrices(pool, weight, &[bytes], dispatch))
    }

    /// Several matrices of the shape and type of `each`, from the bytes of each in the file.
    pub(crate) fn of_matrices(
        pool: &ThreadPool,
        each: &WeightRef,
        matrices: &[&[u8]],
        dispatch: &Dispatch,
    ) -> Linear {
        let (ty, rows, cols) = (each.ty, each.rows, each.cols);
        let store = if dispatch.is_reference() {
            WeightStorage::Reference {
                ty,
                bytes: matrices.concat().into(),
            }
        } else {
            WeightStorage::Packed {
                packed: pack_all(ty, (rows, cols), matrices, pool),
                dispatch: *dispatch,
            }
        };
        Linear {
            name: Arc::clone(&each.name),
            rows,
            cols,
            store,
        }
    }

    /// The name of the weight in its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of outputs of a matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs of a matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes in memory.
    pub fn owned_bytes(&self) -> usize {
        match &self.store {
            WeightStorage::Reference { bytes, .. } => bytes.len(),
            WeightStorage::Packed { packed, .. } => packed.bytes(),
        }
    }

    /// `out[n, rows] = x[n, cols] · weight^T`. The bits of a row of `out` do not depend on `n`.
    pub fn apply(&self, pool: &ThreadPool, x: &[f32], n: usize, out: &mut [f32]) {
        apply_all(pool, x, n, &mut [(self, out)]);
    }

    fn apply_reference(
        &self,
        ty: QuantType,
        bytes: &[u8],
        pool: &ThreadPool,
        x: &[f32],
        out: &mut [f32],
    ) {
        let n = x.len() / self.cols;
        let row_bytes = ty.row_bytes(self.cols);
        // Weight rows are outermost, so that each is dequantized once: `[rows, n]`, transposed at
        // the end.
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

/// Several matrices times the same rows of activations, `x` `[n, cols]`; each part's output is `[n,
/// rows]`.
///
/// Gives the bits of separate [`Linear::apply`] calls. It is faster: activations are rounded once
/// and the matrices share one parallel region.
pub fn apply_all(pool: &ThreadPool, x: &[f32], n: usize, parts: &mut [(&Linear, &mut [f32])]) {
    let products = parts.iter_mut().map(|(linear, out)| Product {
        linear,
        matrix: 0,
        rows: 0..n,
        out,
    });
    apply_each(pool, x, n, products.collect());
}

/// One matrix times some adjacent rows of activations.
pub(crate) struct Product<'a> {
    pub(crate) linear: &'a Linear,
    /// Index among the matrices of `linear`.
    pub(crate) matrix: usize,
    /// The rows of activations.
    pub(crate) rows: Range<usize>,
    /// `[rows.len(), linear.rows()]`.
    pub(crate) out: &'a mut [f32],
}

/// [`apply_all`] where each matrix has its own rows of `x` `[n, cols]`.
pub(crate) fn apply_each(pool: &ThreadPool, x: &[f32], n: usize, products: Vec<Product<'_>>) {
    if n == 0 {
        return;
    }
    let cols = x.len() / n;
    for Product { linear, rows, .. } in &products {
        importance::add(&linear.name, &x[rows.start * cols..rows.end * cols], cols);
    }
    let mut kernels = Vec::with_capacity(products.len());
    let mut outputs = Vec::with_capacity(products.len());
    for product in products {
        let Product {
            linear,
            matrix,
            rows,
            out,
        } = product;
        let lengths = (n * linear.cols, rows.len() * linear.rows);
        assert_eq!((x.len(), out.len()), lengths, "{}", linear.name);
        match &linear.store {
            WeightStorage::Reference { ty, bytes } => {
                let size = linear.rows * ty.row_bytes(cols);
                let bytes = &bytes[matrix * size..][..size];
                let x = &x[rows.start * cols..rows.end * cols];
                linear.apply_reference(*ty, bytes, pool, x, out)
            }
            WeightStorage::Packed { packed, dispatch } => {
                kernels.push((packed, *dispatch, matrix * packed.n_tiles(), rows));
                outputs.push(Output {
                    rows: linear.rows,
                    values: out,
                });
            }
        }
    }
    let Some(&(_, dispatch, ..)) = kernels.first() else {
        return;
    };
    let integers = kernels.iter().any(|(packed, ..)| !packed.format.is_float());
    let floats = kernels.iter().any(|(packed, ..)| packed.format.is_float());
    let padded = if floats {
        pad_rows(x, cols)
    } else {
        Cow::Borrowed(x)
    };
    ROUNDED.with_borrow_mut(|acts| {
        if integers {
            round(pool, dispatch, x, n, acts);
        }
        let acts = &*acts;
        let tiles: usize = kernels.iter().map(|(packed, ..)| packed.n_tiles()).sum();
        let per_item = (tiles / (pool.threads() * ITEMS_PER_THREAD)).clamp(1, 64);
        for_each_tile(pool, &mut outputs, per_item, |index, tile, out| {
            let (packed, dispatch, first_tile, rows) = &kernels[index];
            let tile = first_tile + tile;
            if packed.format.is_float() {
                let x = &padded[rows.start * packed.cols..rows.end * packed.cols];
                simd::float_tile(*dispatch, packed, tile, x, out);
            } else {
                simd::tile(*dispatch, packed, tile, acts.rows(rows.clone()), out);
            }
        });
    });
}

/// Rounds the rows of `x`, `[n, cols]`.
fn round(pool: &ThreadPool, dispatch: Dispatch, x: &[f32], n: usize, acts: &mut Activations) {
    let cols = x.len() / n;
    acts.resize(n, cols);
    let mut rows: Vec<_> = acts.rows_mut().zip(x.chunks_exact(cols)).collect();
    if n < 2 * ROUNDED_ROWS {
        for (row, x) in &mut rows {
            simd::quantize(dispatch, x, row);
        }
        return;
    }
    pool.for_each_item(rows.chunks_mut(ROUNDED_ROWS), |rows| {
        for (row, x) in rows {
            simd::quantize(dispatch, x, row);
        }
    });
}

/// Rows padded with zeros to the width that float kernels require.
fn pad_rows(x: &[f32], cols: usize) -> Cow<'_, [f32]> {
    if cols.is_multiple_of(FLOAT_COLS) {
        return Cow::Borrowed(x);
    }
    let mut padded = Vec::new();
    for row in x.chunks_exact(cols) {
        padded.extend_from_slice(row);
        padded.resize(padded.len().next_multiple_of(FLOAT_COLS), 0.0);
    }
    Cow::Owned(padded)
}

/// `sum a * b`, each `[n]`: sixteen partial sums over indices of equal remainder, summed in order.
///
/// The order is fixed, and more accurate than one running total.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squared_inputs_are_summed_only_while_collecting() {
        let weight = WeightRef {
            name: "blk.0.ffn_up.weight".into(),
            ty: QuantType::F32,
            rows: 2,
            cols: 4,
        };
        let linear = Linear::load(&weight, &[0; 32], &Dispatch::detect()).unwrap();
        let pool = ThreadPool::new(1);
        let x = [1.0, 2.0, 0.0, -3.0, 1.0, 0.0, 0.5, 1.0];
        let mut out = [0.0; 4];
        let mut apply = || linear.apply(&pool, &x, 2, &mut out);
        apply();
        let ((), sums) = importance::collect(|| {
            apply();
            apply();
        });
        let own = &sums["blk.0.ffn_up.weight"];
        assert_eq!(own.rows, 4);
        assert_eq!(own.squares, [4.0, 8.0, 0.5, 20.0]);
        assert_eq!(sums.len(), 1);
        assert!(importance::collect(|| ()).1.is_empty());
    }

    #[test]
    fn weights_of_wrong_length_are_refused_by_name() {
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
