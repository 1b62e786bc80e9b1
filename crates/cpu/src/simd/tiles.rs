//! Distribution of output tiles to threads.
//!
//! A tile is sixteen adjacent columns of an output `[n, rows]`. Tiles of one output interleave in
//! memory, so they cannot be disjoint slices.

use std::marker::PhantomData;

use crate::matmul::layout::TILE_ROWS;
use crate::thread_pool::ThreadPool;

/// One output of a region: `[n, rows]`.
pub struct Output<'a> {
    /// Columns of the output, which are the rows of the weight.
    pub rows: usize,
    /// The values, `[n, rows]`.
    pub values: &'a mut [f32],
}

/// The part of an output that one work item writes: up to sixteen columns of all rows.
pub struct TileOut<'a> {
    /// First column of the tile in row 0.
    start: *mut f32,
    /// Distance between rows, in values.
    stride: usize,
    n: usize,
    width: usize,
    /// Keeps the output borrowed while its tiles exist.
    output: PhantomData<&'a mut [f32]>,
}

impl TileOut<'_> {
    /// Rows of the output.
    pub fn rows(&self) -> usize {
        self.n
    }

    /// Number of columns: 16 except in the last tile.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Start of the tile's part of row `item`; [`TileOut::width`] values may be written there.
    pub(super) fn row(&mut self, item: usize) -> *mut f32 {
        assert!(item < self.n, "row {item} of {}", self.n);
        // SAFETY: `start` points into an output of `n` rows of `stride` values, and `item < n`.
        unsafe { self.start.add(item * self.stride) }
    }

    /// Writes the tile's part of row `item`; values beyond the width are dropped.
    pub fn store(&mut self, item: usize, values: &[f32; TILE_ROWS]) {
        let row = self.row(item);
        // SAFETY: `row` has `width <= 16` values that belong to this tile alone, and `values` is
        // elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), row, self.width) }
    }
}

/// An output that several threads write, each its own tiles.
struct SharedOutput {
    start: *mut f32,
    rows: usize,
    n: usize,
}

// SAFETY: the pointer is only used through tiles, and no two tiles overlap.
unsafe impl Sync for SharedOutput {}

/// Calls `work(output, tile, part)` once per tile of each output. An item is `per_item` tiles of
/// one output on one thread.
pub fn for_each_tile(
    pool: &ThreadPool,
    outputs: &mut [Output<'_>],
    per_item: usize,
    work: impl Fn(usize, usize, &mut TileOut<'_>) + Sync,
) {
    let mut items = Vec::new();
    let mut shared = Vec::with_capacity(outputs.len());
    for (index, output) in outputs.iter_mut().enumerate() {
        assert!(output.rows > 0 && output.values.len().is_multiple_of(output.rows));
        let tiles = output.rows.div_ceil(TILE_ROWS);
        items.extend((0..tiles).step_by(per_item).map(|first| {
            let last = tiles.min(first + per_item);
            (index, first..last)
        }));
        shared.push(SharedOutput {
            start: output.values.as_mut_ptr(),
            rows: output.rows,
            n: output.values.len() / output.rows,
        });
    }
    let shared = &shared[..];
    pool.for_each(items.len(), |item| {
        let (index, tiles) = items[item].clone();
        let output = &shared[index];
        for tile in tiles {
            let first = tile * TILE_ROWS;
            let mut part = TileOut {
                // SAFETY: `first < rows`. An output without rows of activations is never written,
                // since `n` is 0.
                start: unsafe { output.start.add(first.min(output.n * output.rows)) },
                stride: output.rows,
                n: output.n,
                width: TILE_ROWS.min(output.rows - first),
                output: PhantomData,
            };
            work(index, tile, &mut part);
        }
    });
}
