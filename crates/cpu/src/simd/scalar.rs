//! The products in scalar code, bit-identical to the vector kernels.

use half::{bf16, f16};

use super::tiles::TileOut;
use crate::matmul::activations::ActivationRows;
use crate::matmul::layout::{BLOCK, Format, Packed, TILE_ROWS};

/// One block of one weight row: `value = scale(half) * code - min`, with the offset of the codes
/// subtracted.
#[derive(Debug, Clone, Copy)]
pub struct WeightBlock {
    /// Signed codes.
    pub codes: [i32; BLOCK],
    /// Scale of each half.
    pub scales: [f32; 2],
    /// Whether the halves have separate scales, and are summed separately.
    pub two_scales: bool,
    /// The minimum, which is subtracted; `None` if the format has none.
    pub min: Option<f32>,
}

/// Block `block` of row `row` of an integer-format tile.
pub fn weight_block(format: Format, tile: &[u8], row: usize, block: usize) -> WeightBlock {
    let (group_cols, group_bytes) = format.group();
    let in_group = group_cols / BLOCK;
    let group = &tile[block / in_group * group_bytes..][..group_bytes];
    let j = block % in_group;
    let one = |scale: f32, codes| WeightBlock {
        codes,
        scales: [scale; 2],
        two_scales: false,
        min: None,
    };
    match format {
        Format::Q4K | Format::Q5K => {
            let packed: [u8; 12] = std::array::from_fn(|i| group[64 + 16 * i + row]);
            let (scale, min) = contract::quant::scale_and_min(&packed, j);
            let mut codes = nibbles(&group[256 + 256 * j..], row);
            if format == Format::Q5K {
                add_fifth_bits(&mut codes, &group[2304 + 64 * j..], row);
            }
            WeightBlock {
                min: Some(half_at(group, 32 + 2 * row) * f32::from(min)),
                ..one(half_at(group, 2 * row) * f32::from(scale), codes)
            }
        }
        Format::Q6K => {
            let d = half_at(group, 2 * row);
            let scale = |half: usize| {
                let scale = group[64 + 32 * j + 16 * half + row].cast_signed();
                d * f32::from(scale)
            };
            let mut codes = nibbles(&group[320 + 256 * j..], row);
            for (i, code) in codes.iter_mut().enumerate() {
                let bits = group[2368 + 128 * j + 64 * (i / 16) + 4 * row + i % 4];
                *code += i32::from(bits >> (2 * (i / 4 % 4)) & 3) * 16 - 32;
            }
            WeightBlock {
                codes,
                scales: [scale(0), scale(1)],
                two_scales: true,
                min: None,
            }
        }
        Format::Q4 => {
            let codes = nibbles(&group[64 + 256 * j..], row);
            one(half_at(group, 32 * j + 2 * row), codes.map(|c| c - 8))
        }
        Format::Q5 => {
            let mut codes = nibbles(&group[64 + 256 * j..], row);
            add_fifth_bits(&mut codes, &group[576 + 64 * j..], row);
            one(half_at(group, 32 * j + 2 * row), codes.map(|c| c - 16))
        }
        Format::Q4M | Format::Q5M => {
            let mut codes = nibbles(&group[64..], row);
            if format == Format::Q5M {
                add_fifth_bits(&mut codes, &group[320..], row);
            }
            WeightBlock {
                min: Some(-half_at(group, 32 + 2 * row)),
                ..one(half_at(group, 2 * row), codes)
            }
        }
        Format::S8 => {
            let codes = bytes(&group[64 + 512 * j..], row);
            one(half_at(group, 32 * j + 2 * row), codes.map(|c| c - 128))
        }
        Format::S8W => {
            let scale = word_at(group, 4 * row);
            one(scale, bytes(&group[64..], row).map(|c| c - 128))
        }
        Format::S8H => WeightBlock {
            codes: bytes(&group[128..], row).map(|c| c - 128),
            scales: [word_at(group, 4 * row), word_at(group, 64 + 4 * row)],
            two_scales: true,
            min: None,
        },
        Format::F32 | Format::F16 | Format::BF16 => unreachable!("a float format has no codes"),
    }
}

/// Adds one block to a running sum: `a` is the activations' scale, `q` their values.
pub fn accumulate(sum: f32, weight: &WeightBlock, a: f32, q: &[i8]) -> f32 {
    // 32 products of bytes stay far below 2³¹. Wrapping operations let builds with overflow checks
    // use vectors too.
    let add = |sum: i32, value: i32| sum.wrapping_add(value);
    let dot = |range: std::ops::Range<usize>| -> i32 {
        let pairs = weight.codes[range.clone()].iter().zip(&q[range]);
        pairs
            .map(|(&w, &q)| w.wrapping_mul(i32::from(q)))
            .fold(0, add)
    };
    let m = if weight.two_scales {
        let low = dot(0..BLOCK / 2) as f32 * weight.scales[0];
        (dot(BLOCK / 2..BLOCK) as f32).mul_add(weight.scales[1], low)
    } else {
        let m = dot(0..BLOCK) as f32 * weight.scales[0];
        match weight.min {
            Some(min) => {
                let q_sum = q.iter().map(|&q| i32::from(q)).fold(0, add);
                (-min).mul_add(q_sum as f32, m)
            }
            None => m,
        }
    };
    m.mul_add(a, sum)
}

/// All rows of `acts` against tile `tile` of `packed`, of an integer format.
pub fn tile(packed: &Packed, tile: usize, acts: ActivationRows<'_>, out: &mut TileOut<'_>) {
    let bytes = packed.tile(tile);
    let blocks = acts.cols / BLOCK;
    let mut sums = vec![[0.0; TILE_ROWS]; acts.n];
    for row in 0..out.width() {
        for block in 0..blocks {
            let weight = weight_block(packed.format, bytes, row, block);
            for (item, sums) in sums.iter_mut().enumerate() {
                let at = item * blocks + block;
                let q = &acts.values[at * BLOCK..][..BLOCK];
                sums[row] = accumulate(sums[row], &weight, acts.scales[at], q);
            }
        }
    }
    for (item, sums) in sums.iter().enumerate() {
        out.store(item, sums);
    }
}

/// Rows `x` `[n, cols]` of f32 against tile `tile` of `packed`, of a float format; `cols` a
/// multiple of 4.
pub fn float_tile(packed: &Packed, tile: usize, x: &[f32], out: &mut TileOut<'_>) {
    let bytes = packed.tile(tile);
    for (item, x) in x.chunks_exact(packed.cols).enumerate() {
        let mut outs = [0.0; TILE_ROWS];
        for (row, out) in outs.iter_mut().enumerate() {
            let mut sums = [0.0; 4];
            for (col, &x) in x.iter().enumerate() {
                let at = TILE_ROWS * col + row;
                let w = match packed.format {
                    Format::F32 => word_at(bytes, 4 * at),
                    Format::F16 => half_at(bytes, 2 * at),
                    _ => bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
                };
                sums[col % 4] = w.mul_add(x, sums[col % 4]);
            }
            *out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
        out.store(item, &outs);
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn word_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn nibbles(lines: &[u8], row: usize) -> [i32; BLOCK] {
    std::array::from_fn(|i| {
        let byte = lines[64 * (i / 4 % 4) + 4 * row + i % 4];
        i32::from(byte >> (4 * (i / 16)) & 15)
    })
}

fn add_fifth_bits(codes: &mut [i32; BLOCK], line: &[u8], row: usize) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code += i32::from(line[4 * row + i % 4] >> (i / 4) & 1) << 4;
    }
}

fn bytes(lines: &[u8], row: usize) -> [i32; BLOCK] {
    std::array::from_fn(|i| i32::from(lines[64 * (i / 4) + 4 * row + i % 4]))
}
