//! Random values and random blocks with plausible scales, from a seed.
//!
//! Blocks of the quantized types are random bytes with fixed scale fields. Large files are written
//! about as fast as the disk allows, and every value is finite.

use contract::{QuantType, quant};

/// Random blocks are generated once into a pool of this size and reused at random offsets.
const POOL_BYTES: usize = 8 << 20;

/// SplitMix64 (Steele, Lea and Flood 2014), a small seedable 64-bit generator of sufficient quality
/// for weights. `rand` does not guarantee equal streams between versions.
pub(super) struct WeightRng(u64);

impl WeightRng {
    pub(super) fn new(seed: u64) -> WeightRng {
        WeightRng(seed)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[low, high)`.
    pub(super) fn between(&mut self, low: f32, high: f32) -> f32 {
        let unit = (self.bits() >> 40) as f32 / (1_u32 << 24) as f32;
        low + unit * (high - low)
    }

    /// Approximately standard normal: the sum of twelve uniforms less six, so tails end at six.
    pub(super) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.between(0.0, 1.0)).sum::<f32>() - 6.0
    }
}

/// Rows of one type with a standard deviation of about `1 / sqrt(cols)`.
pub(super) struct BlockPool {
    blocks: Vec<u8>,
    block_bytes: usize,
}

impl BlockPool {
    /// Generates a pool for matrices of `cols` columns.
    pub(super) fn new(ty: QuantType, cols: u64, random: &mut WeightRng) -> BlockPool {
        let std = 1.0 / (cols as f32).sqrt();
        let block_bytes = ty.block_bytes();
        let count = POOL_BYTES / block_bytes;
        let mut blocks = vec![0; count * block_bytes];
        if matches!(ty, QuantType::F32 | QuantType::F16 | QuantType::BF16) {
            let values: Vec<f32> = (0..count).map(|_| random.normal() * std).collect();
            quant::quantize_row(ty, &values, &mut blocks);
        } else {
            for word in blocks.chunks_mut(8) {
                let bits = random.bits().to_le_bytes();
                word.copy_from_slice(&bits[..word.len()]);
            }
            for block in blocks.chunks_exact_mut(block_bytes) {
                set_scales(ty, std, block);
            }
        }
        BlockPool {
            blocks,
            block_bytes,
        }
    }

    /// Fills `out`, whole blocks, with runs from the pool.
    pub(super) fn fill(&self, out: &mut [u8], random: &mut WeightRng) {
        let count = self.blocks.len() / self.block_bytes;
        let mut rest = out;
        while !rest.is_empty() {
            // A start in the first half leaves long runs; the seed still changes every row.
            let start = (random.bits() as usize % (count / 2).max(1)) * self.block_bytes;
            let take = rest.len().min(self.blocks.len() - start);
            let (now, later) = rest.split_at_mut(take);
            now.copy_from_slice(&self.blocks[start..start + take]);
            rest = later;
        }
    }
}

/// Overwrites the scale fields of a random block so that its values have standard deviation `std`.
///
/// The factors follow from uniform quants: of `q` levels the deviation is about `0.29 q`; six-bit
/// scales average 36 in root mean square, signed eight-bit ones are kept within ±63.
fn set_scales(ty: QuantType, std: f32, block: &mut [u8]) {
    let mut half = |at: usize, value: f32| {
        quant::quantize_row(QuantType::F16, &[value], &mut block[at..at + 2]);
    };
    match ty {
        QuantType::Q4_0 => half(0, std / 4.6),
        QuantType::Q4_1 => {
            half(0, std / 4.6);
            half(2, -std / 4.6 * 7.5);
        }
        QuantType::Q5_0 => half(0, std / 9.2),
        QuantType::Q5_1 => {
            half(0, std / 9.2);
            half(2, -std / 9.2 * 15.5);
        }
        QuantType::Q8_0 => half(0, std / 74.0),
        QuantType::IQ4_NL => half(0, std / 71.0),
        QuantType::Q2_K => {
            half(80, std / (8.8 * 1.1));
            half(82, std / (8.8 * 1.1) * 1.5);
        }
        QuantType::Q3_K => half(108, std / (18.5 * 2.3)),
        QuantType::Q4_K | QuantType::Q5_K => {
            let top = if ty == QuantType::Q4_K { 15.0 } else { 31.0 };
            let d = std / (36.0 * top * 0.29);
            half(0, d);
            half(2, d * top / 2.0);
        }
        QuantType::Q6_K => {
            half(208, std / (36.0 * 18.5));
            for scale in &mut block[192..208] {
                *scale = ((*scale % 127) as i8).wrapping_sub(63) as u8;
            }
        }
        QuantType::IQ4_XS => half(0, std / (18.5 * 71.0)),
        QuantType::IQ2_XXS | QuantType::IQ2_XS | QuantType::IQ2_S => half(0, std / 55.0),
        QuantType::IQ3_XXS => half(0, std / 130.0),
        QuantType::IQ3_S => half(0, std / 150.0),
        QuantType::IQ1_S => half(0, std / 7.6),
        QuantType::IQ1_M => {
            half(0, std / 7.6);
            let d = [block[0], block[1]];
            for i in 0..4 {
                let nibble = d[i / 2] >> (4 * (i % 2)) & 15;
                block[49 + 2 * i] = block[49 + 2 * i] & 15 | nibble << 4;
            }
        }
        QuantType::TQ1_0 => half(52, std / 0.82),
        QuantType::TQ2_0 => half(64, std / 1.22),
        // The levels' root mean square is 5.85.
        QuantType::MXFP4 => block[0] = (128.0 + (std / 5.85).log2()).round() as u8,
        QuantType::NVFP4 => {
            let mut alike = [0; 36];
            quant::quantize_row(ty, &[std / 5.85 * 12.0; 64], &mut alike);
            block[..4].copy_from_slice(&alike[..4]);
        }
        QuantType::F32 | QuantType::F16 | QuantType::BF16 => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_requested_standard_deviation() {
        for ty in QuantType::ALL {
            let mut random = WeightRng::new(7);
            let pool = BlockPool::new(ty, 1024, &mut random);
            let mut bytes = vec![0; ty.row_bytes(1 << 16)];
            pool.fill(&mut bytes, &mut random);
            let mut values = vec![0.0; 1 << 16];
            quant::dequantize_row(ty, &bytes, &mut values);
            let mean_square =
                values.iter().map(|v| f64::from(v * v)).sum::<f64>() / values.len() as f64;
            let ratio = mean_square.sqrt() * 32.0;
            assert!((0.4..2.5).contains(&ratio), "{}: {ratio}", ty.name());
        }
    }

    #[test]
    fn equal_seeds_give_equal_bytes() {
        let draw = |seed| {
            let mut random = WeightRng::new(seed);
            let mut bytes = vec![0; QuantType::Q4_K.row_bytes(4096)];
            BlockPool::new(QuantType::Q4_K, 4096, &mut random).fill(&mut bytes, &mut random);
            bytes
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
