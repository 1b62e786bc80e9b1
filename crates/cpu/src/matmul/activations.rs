//! Activations rounded to signed bytes.

use std::ops::Range;

use super::layout::BLOCK;

/// Rows of activations in blocks of 32 bytes with a scale, `x ≈ scale * q`, and the sums that
/// kernels need.
///
/// `q = round_half_even(x * (127 / max|x|))` over the block, `scale = max|x| / 127`. A block with
/// an infinity or a NaN has a NaN scale, so its row's outputs are NaN, as in f32.
#[derive(Default)]
pub struct Activations {
    /// Rows.
    pub n: usize,
    /// Columns, a multiple of 32.
    pub cols: usize,
    /// `[n, cols]`.
    pub values: Vec<i8>,
    /// `[n, cols / 32]`.
    pub scales: Vec<f32>,
    /// Sums of a block's values, `[n, cols / 32]`; whole numbers.
    pub sums: Vec<f32>,
    /// `-8` times the sum of a block, `[n, cols / 32]`: the start value of products with nibbles
    /// less 8.
    pub minus_8: Vec<i32>,
    /// `-128` times the sum of a block, `[n, cols / 32]`.
    pub minus_128: Vec<i32>,
    /// `-32` times the sum of each half block, `[n, cols / 16]`.
    pub minus_32: Vec<i32>,
}

/// One row of [`Activations`] for writing.
pub struct RowMut<'a> {
    /// `[cols]`.
    pub values: &'a mut [i8],
    /// `[cols / 32]`, as the following fields.
    pub scales: &'a mut [f32],
    /// See [`Activations::sums`].
    pub sums: &'a mut [f32],
    /// See [`Activations::minus_8`].
    pub minus_8: &'a mut [i32],
    /// See [`Activations::minus_128`].
    pub minus_128: &'a mut [i32],
    /// `[cols / 16]`.
    pub minus_32: &'a mut [i32],
}

/// Some adjacent rows of [`Activations`] for reading; the fields are as there.
#[derive(Debug, Clone, Copy)]
pub struct ActivationRows<'a> {
    /// Rows.
    pub n: usize,
    /// Columns.
    pub cols: usize,
    /// `[n, cols]`.
    pub values: &'a [i8],
    /// `[n, cols / 32]`, as the following fields.
    pub scales: &'a [f32],
    /// See [`Activations::sums`].
    pub sums: &'a [f32],
    /// See [`Activations::minus_8`].
    pub minus_8: &'a [i32],
    /// See [`Activations::minus_128`].
    pub minus_128: &'a [i32],
    /// `[n, cols / 16]`.
    pub minus_32: &'a [i32],
}

impl ActivationRows<'_> {
    /// Asserts that every array has the length of its shape, because kernels rely on it.
    pub fn check(&self) {
        let blocks = self.n * self.cols / BLOCK;
        assert_eq!(self.values.len(), self.n * self.cols);
        assert!(self.scales.len() == blocks && self.sums.len() == blocks);
        assert!(self.minus_8.len() == blocks && self.minus_128.len() == blocks);
        assert_eq!(self.minus_32.len(), 2 * blocks);
    }
}

impl Activations {
    /// The rows `rows`.
    pub fn rows(&self, rows: Range<usize>) -> ActivationRows<'_> {
        let blocks = self.cols / BLOCK;
        let of_blocks = rows.start * blocks..rows.end * blocks;
        ActivationRows {
            n: rows.len(),
            cols: self.cols,
            values: &self.values[rows.start * self.cols..rows.end * self.cols],
            scales: &self.scales[of_blocks.clone()],
            sums: &self.sums[of_blocks.clone()],
            minus_8: &self.minus_8[of_blocks.clone()],
            minus_128: &self.minus_128[of_blocks],
            minus_32: &self.minus_32[2 * rows.start * blocks..2 * rows.end * blocks],
        }
    }

    /// Resizes to `n` rows of `cols`. The content is unspecified until the rows are written.
    pub fn resize(&mut self, n: usize, cols: usize) {
        assert_eq!(cols % BLOCK, 0);
        let blocks = n * cols / BLOCK;
        (self.n, self.cols) = (n, cols);
        self.values.resize(n * cols, 0);
        self.scales.resize(blocks, 0.0);
        self.sums.resize(blocks, 0.0);
        self.minus_8.resize(blocks, 0);
        self.minus_128.resize(blocks, 0);
        self.minus_32.resize(2 * blocks, 0);
    }

    /// The rows for writing.
    pub fn rows_mut(&mut self) -> impl ExactSizeIterator<Item = RowMut<'_>> + Send {
        let blocks = self.cols / BLOCK;
        self.values
            .chunks_exact_mut(self.cols)
            .zip(self.scales.chunks_exact_mut(blocks))
            .zip(self.sums.chunks_exact_mut(blocks))
            .zip(self.minus_8.chunks_exact_mut(blocks))
            .zip(self.minus_128.chunks_exact_mut(blocks))
            .zip(self.minus_32.chunks_exact_mut(2 * blocks))
            .map(
                |(((((values, scales), sums), minus_8), minus_128), minus_32)| RowMut {
                    values,
                    scales,
                    sums,
                    minus_8,
                    minus_128,
                    minus_32,
                },
            )
    }
}

impl RowMut<'_> {
    /// Stores the two half sums of block `block`.
    #[inline(always)]
    pub fn set_sums(&mut self, block: usize, low: i32, high: i32) {
        self.sums[block] = (low + high) as f32;
        self.minus_8[block] = -8 * (low + high);
        self.minus_128[block] = -128 * (low + high);
        self.minus_32[2 * block] = -32 * low;
        self.minus_32[2 * block + 1] = -32 * high;
    }

    /// Marks a block that cannot be rounded.
    pub fn set_poisoned(&mut self, block: usize) {
        self.values[block * BLOCK..][..BLOCK].fill(0);
        self.scales[block] = f32::NAN;
        self.set_sums(block, 0, 0);
    }
}

/// Rounds one row, `x` `[cols]`. The scalar version of the vector kernels' `quantize`.
pub fn quantize(x: &[f32], row: &mut RowMut<'_>) {
    for (block, x) in x.chunks_exact(BLOCK).enumerate() {
        let max_bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max();
        let max = f32::from_bits(max_bits.unwrap_or(0));
        if !max.is_finite() {
            row.set_poisoned(block);
            continue;
        }
        row.scales[block] = max / 127.0;
        let factor = factor(max);
        let values = &mut row.values[block * BLOCK..][..BLOCK];
        for (q, &x) in values.iter_mut().zip(x) {
            *q = (x * factor).round_ties_even() as i8;
        }
        let half = |values: &[i8]| values.iter().map(|&q| i32::from(q)).sum();
        let (low, high) = (half(&values[..BLOCK / 2]), half(&values[BLOCK / 2..]));
        row.set_sums(block, low, high);
    }
}

/// The factor of a block with largest magnitude `max`; 0 if the quotient would overflow.
#[inline(always)]
pub fn factor(max: f32) -> f32 {
    let factor = 127.0 / max;
    if factor.is_finite() { factor } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(x: &[f32]) -> Activations {
        let mut activations = Activations::default();
        activations.resize(1, x.len());
        quantize(x, &mut activations.rows_mut().next().unwrap());
        activations
    }

    #[test]
    fn quantized_values_are_within_half_a_step() {
        let x: Vec<f32> = (0..64).map(|i| ((i * 37) as f32).sin() * 3.0).collect();
        let a = quantized(&x);
        for (i, &x) in x.iter().enumerate() {
            let scale = a.scales[i / BLOCK];
            assert!((x - scale * f32::from(a.values[i])).abs() <= 0.5001 * scale);
        }
        let sum: i32 = a.values[..32].iter().map(|&q| i32::from(q)).sum();
        assert_eq!((a.sums[0], a.minus_128[0]), (sum as f32, -128 * sum));
        assert_eq!(a.minus_32[0] + a.minus_32[1], -32 * sum);
    }

    #[test]
    fn nan_affects_its_block_only_and_tiny_values_stay_finite() {
        let mut x = [0.0; 96];
        x[40] = f32::from_bits(1);
        x[70] = f32::NAN;
        let a = quantized(&x);
        assert!(a.scales[0] == 0.0 && a.scales[1].is_finite() && a.scales[2].is_nan());
        assert!(a.values.iter().all(|&q| q == 0));
    }
}
