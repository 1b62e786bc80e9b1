//! Dequantization of packed weights on the host, as `kernels/gemm/dequant_tile.cuh` does it.

use half::f16;

use super::kind::{BLOCK_ROWS, FACTOR_BYTES, M16_ROWS, WeightKind};

/// A packed matrix of `rows` rows of `cols` values.
#[derive(Debug, Clone, Copy)]
pub struct PackedMatrix<'a> {
    /// Its weight kind.
    pub kind: WeightKind,
    /// Number of rows.
    pub rows: usize,
    /// Values per row.
    pub cols: usize,
    /// The output of [`super::pack`].
    pub bytes: &'a [u8],
}

/// One row of one tile.
struct Tile<'a> {
    bytes: &'a [u8],
    row: usize,
}

impl PackedMatrix<'_> {
    /// Value `k` of row `row`, rounded as the small-batch GEMM and the prefill panels round it.
    ///
    /// # Panics
    /// If the indices exceed the matrix, or for [`WeightKind::F32`].
    pub fn value(&self, row: usize, k: usize) -> f32 {
        let (kind, cols) = (self.kind, self.cols);
        let (block, r) = (row / BLOCK_ROWS, row % BLOCK_ROWS);
        let tiles = (self.rows - block * BLOCK_ROWS)
            .div_ceil(M16_ROWS)
            .min(BLOCK_ROWS / M16_ROWS);
        let block = &self.bytes[block * kind.bytes(BLOCK_ROWS, cols)..];
        let factor = f32::from_le_bytes(*block[4 * r..].first_chunk().expect("a row factor"));
        let (unit, within) = (k / kind.unit_values(), k % kind.unit_values());
        let [first, second] = kind.slice_bytes();
        let slice = |index: usize| {
            let bytes = if index == 0 { first } else { second };
            let at = tiles * (FACTOR_BYTES + unit * kind.tile_bytes() + index * first);
            Tile {
                bytes: &block[at + r / M16_ROWS * bytes..][..bytes],
                row: r % M16_ROWS,
            }
        };
        let index = within / (kind.unit_values() / kind.slices());
        let tile = slice(index);
        let k = within % (kind.unit_values() / kind.slices());
        factor
            * match kind {
                WeightKind::Q4K => tile.four_bits(k, index, &slice(0), 1024),
                WeightKind::Q5K => tile.five_bits(k, index, &slice(0), 1280),
                WeightKind::Q6K => tile.six_bits(k, &slice(0)),
                WeightKind::Q8 => {
                    let scale = tile.half(1024 + tile.row * 4 + k / 32 * 2);
                    rounded(tile.byte(k) * scale * 2.0_f64.powi(-22) - rounded(scale / 32768.0))
                }
                WeightKind::U8Affine => {
                    let at = 1024 + tile.row * 16 + k / 16 * 4;
                    let scale = tile.half(at) * 2.0_f64.powi(-22);
                    rounded(tile.byte(k) * scale + tile.half(at + 2))
                }
                WeightKind::F16 => tile.half(k / 16 * 512 + tile.word(k) + k % 2 * 2),
                WeightKind::F32 => panic!("F32 is plain"),
            } as f32
    }
}

impl Tile<'_> {
    /// Byte offset of the word of value `k` in a lane's 16 bytes.
    fn word(&self, k: usize) -> usize {
        let (lane, j) = (
            self.row % 8 * 4 + k % 8 / 2,
            self.row / 8 + 2 * (k % 16 / 8),
        );
        lane * 16 + j * 4
    }

    fn half(&self, at: usize) -> f64 {
        f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]).to_f64()
    }

    /// `count` bits of the u32 at `at`, from bit `bit % 32`, wrapping.
    fn bits(&self, at: usize, bit: usize, count: u32) -> u32 {
        let word = u32::from_le_bytes(*self.bytes[at..].first_chunk().expect("a word"));
        word.rotate_right(bit as u32) & ((1 << count) - 1)
    }

    /// An eight-bit code.
    fn byte(&self, k: usize) -> f64 {
        let bit = 2 + 8 * (k / 16 % 2) + 16 * (k % 2);
        f64::from(self.bits(k / 32 * 512 + self.word(k), bit, 8))
    }

    fn nibble(&self, k: usize, from: usize) -> u32 {
        let bit = from + 4 * (k / 32 % 2) + 8 * (k / 16 % 2) + 16 * (k % 2);
        self.bits(k / 64 * 512 + self.word(k), bit, 4)
    }

    /// Stored scale and minimum of the run of value `k`. The factor is in the first slice's header
    /// at `at`.
    fn header(&self, k: usize, slice: usize, first: &Tile<'_>, at: usize) -> (f64, f64) {
        let byte = |word: usize| u32::from(first.bytes[at + 4 + 4 * word + k / 32]);
        let (c, m) = match slice {
            0 => (byte(0) >> 2, byte(1) >> 2),
            _ => {
                let m = (byte(0) & 3) | (byte(1) & 3) << 2 | (byte(2) & 3) << 4;
                (byte(2) >> 2, m)
            }
        };
        (f64::from(c), f64::from(m))
    }

    fn four_bits(&self, k: usize, slice: usize, first: &Tile<'_>, at: usize) -> f64 {
        let at = at + self.row * 16;
        let (c, m) = self.header(k, slice, first, at);
        let code_scale = if (k / 32).is_multiple_of(2) {
            1.0
        } else {
            16.0
        };
        let scale = rounded(c * rounded(first.half(at) / code_scale));
        let min = rounded(m * first.half(at + 2));
        rounded(f64::from(self.nibble(k, 2)) * scale * code_scale * 2.0_f64.powi(-22) - min)
    }

    fn five_bits(&self, k: usize, slice: usize, first: &Tile<'_>, at: usize) -> f64 {
        let (b, s, h) = (k / 32 % 2, k / 16 % 2, k % 2);
        let lane = self.row % 8 * 4 + k % 8 / 2;
        let j = self.row / 8 + 2 * (k % 16 / 8);
        let bits = |word: usize, bit: usize, count| {
            let at = match word {
                4 => 1024 + lane * 8 + k / 64 * 4,
                _ => k / 64 * 512 + lane * 16 + word * 4,
            };
            self.bits(at, bit, count)
        };
        let of_all = || (0..5).fold(0, |code, i| code | bits(i, 16 * (1 - h), 1) << i);
        // The code, and the factor that its scale carries before the multiplication.
        let (code, shift) = match (s, b, j) {
            (0, ..) => (bits(j, 1 + 5 * b + 16 * h, 5), 1.0),
            (_, 0, 0) => (bits(1, 11 + 16 * h, 5), 0.5),
            (_, 0, 1) => (bits(2, 11 + 16 * h, 5), 0.25),
            (_, 0, 2) => (bits(0, 11 + 16 * h, 5), 1.0),
            (_, 0, _) => (bits(4, 1 + 16 * h, 5), 1.0),
            (_, _, 0) => (bits(4, 11 + 16 * h, 5), 2.0),
            (_, _, 1) => (bits(3, 11 + 16 * h, 5), 4.0),
            (_, _, 2) => (of_all(), 1.0),
            _ => (bits(4, 6 + 16 * h, 5), 1.0),
        };
        let at = at + self.row * 16;
        let (c, m) = self.header(k, slice, first, at);
        let code_scale = if b == 0 { 1.0 } else { 32.0 };
        let scale = rounded(shift * rounded(c * rounded(first.half(at) / code_scale))) / shift;
        let min = rounded(m * first.half(at + 2));
        rounded(f64::from(code) * scale * code_scale * 2.0_f64.powi(-23) - min)
    }

    fn six_bits(&self, k: usize, first: &Tile<'_>) -> f64 {
        let (b, s, h) = (k / 32 % 2, k / 16 % 2, k % 2);
        let (i, upper) = (self.row / 8, k % 16 / 8);
        let lane = self.row % 8 * 4 + k % 8 / 2;
        let bits = |word: usize, bit: usize, count| {
            let at = match word {
                0..4 => k / 64 * 512 + lane * 16 + word * 4,
                _ => 1024 + lane * 16 + k / 64 * 8 + (word - 4) * 4,
            };
            f64::from(self.bits(at, bit + 16 * h, count))
        };
        let j = i + 2 * upper;
        // The code, and the divisor of its scale before rounding.
        let (code, code_scale) = match (s, b, i) {
            (0, 0, _) => (bits(j, 1, 6), 1.0),
            (0, _, 0) => (bits(4 + upper, 1, 6), 1.0),
            (0, ..) => (bits(upper, 11, 6), 16.0),
            (_, 0, _) => (bits(2 + j, 11, 6), 16.0),
            _ => {
                let top = bits(4 + upper, 7 + 2 * i, 2);
                (bits(j, 7, 4) + 16.0 * top, 1.0)
            }
        };
        let c = f64::from(self.bytes[1536 + self.row * 8 + k / 16]) - 128.0;
        let scale = rounded(c * rounded(first.half(1664 + self.row * 2) / code_scale));
        let step = scale * code_scale * 2.0_f64.powi(-23);
        rounded(code * step - rounded(32.0 * step))
    }
}

/// Rounds to f16.
fn rounded(value: f64) -> f64 {
    f16::from_f64(value).to_f64()
}
