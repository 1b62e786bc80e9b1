//! Repacks a file's rows to the tiles of [`super::layout`].

use contract::QuantType;
use contract::quant::{IQ4_LEVELS, SignedRun, SixBits, dequantize_row, signed_run, six_bits};
use half::f16;

use super::layout::{BLOCK, Format, Packed, TILE_ROWS};
use crate::thread_pool::ThreadPool;

/// Repacks `bytes`, `rows` whole rows of `cols` values of type `ty`. The tiles are split over
/// `pool`.
pub fn pack(ty: QuantType, rows: usize, cols: usize, bytes: &[u8], pool: &ThreadPool) -> Packed {
    pack_all(ty, (rows, cols), &[bytes], pool)
}

/// [`pack`] of several matrices of one shape.
pub fn pack_all(
    ty: QuantType,
    (rows, cols): (usize, usize),
    matrices: &[&[u8]],
    pool: &ThreadPool,
) -> Packed {
    let format = Format::of(ty);
    // Only float formats accept any width; padding columns are zero.
    let mut packed = Packed::zeroed(format, matrices.len(), rows, cols.next_multiple_of(4));
    let row_bytes = ty.row_bytes(cols);
    let per_matrix = packed.n_tiles();
    let tiles = packed.tiles_mut().enumerate();
    pool.for_each_item(tiles, |(index, tile)| {
        let of_matrix = matrices[index / per_matrix].chunks_exact(row_bytes);
        let first = index % per_matrix * TILE_ROWS;
        for (row, bytes) in of_matrix.skip(first).take(TILE_ROWS).enumerate() {
            pack_row(ty, bytes, cols, row, tile);
        }
    });
    packed
}

fn pack_row(ty: QuantType, bytes: &[u8], cols: usize, row: usize, tile: &mut [u8]) {
    let (_, group_bytes) = Format::of(ty).group();
    let block_bytes = ty.block_bytes();
    let blocks = bytes.chunks_exact(block_bytes).enumerate();
    match ty {
        QuantType::Q4_K | QuantType::Q5_K => {
            for ((_, block), group) in blocks.zip(tile.chunks_exact_mut(group_bytes)) {
                pack_q45_k(ty, block, row, group);
            }
        }
        QuantType::Q6_K | QuantType::Q3_K | QuantType::IQ3_S => {
            for ((_, block), group) in blocks.zip(tile.chunks_exact_mut(group_bytes)) {
                let six = six_bits(ty, block).unwrap_or_else(|| read_q6_k(block));
                pack_q6(&six, row, group);
            }
        }
        QuantType::Q4_0 => {
            for (i, block) in blocks {
                let group = &mut tile[i / 2 * group_bytes..][..group_bytes];
                put(group, 32 * (i % 2) + 2 * row, &block[..2]);
                put_nibbles(
                    &mut group[64 + 256 * (i % 2)..],
                    row,
                    &nibbles(&block[2..18]),
                );
            }
        }
        QuantType::Q5_0 => {
            for (i, block) in blocks {
                let group = &mut tile[i / 2 * group_bytes..][..group_bytes];
                let values = five_bits(&block[2..6], &block[6..22]);
                put(group, 32 * (i % 2) + 2 * row, &block[..2]);
                put_nibbles(&mut group[64 + 256 * (i % 2)..], row, &values);
                put_fifth_bits(&mut group[576 + 64 * (i % 2)..], row, &values);
            }
        }
        QuantType::Q8_0 | QuantType::IQ4_NL => {
            for (i, block) in blocks {
                let group = &mut tile[i / 2 * group_bytes..][..group_bytes];
                put(group, 32 * (i % 2) + 2 * row, &block[..2]);
                put_bytes(&mut group[64 + 512 * (i % 2)..], row, &signed_32(ty, block));
            }
        }
        QuantType::Q4_1 | QuantType::Q5_1 => {
            for ((_, block), group) in blocks.zip(tile.chunks_exact_mut(group_bytes)) {
                put(group, 2 * row, &block[..2]);
                put(group, 32 + 2 * row, &block[2..4]);
                let values = match ty {
                    QuantType::Q4_1 => nibbles(&block[4..20]),
                    _ => five_bits(&block[4..8], &block[8..24]),
                };
                put_nibbles(&mut group[64..], row, &values);
                if ty == QuantType::Q5_1 {
                    put_fifth_bits(&mut group[320..], row, &values);
                }
            }
        }
        QuantType::TQ1_0 | QuantType::TQ2_0 => {
            for (i, run) in runs(ty, bytes).enumerate() {
                let group = &mut tile[i / 2 * group_bytes..][..group_bytes];
                let d = f16::from_f32(run.unit).to_le_bytes();
                put(group, 32 * (i % 2) + 2 * row, &d);
                let values = run.codes.map(|code| (code + 8).cast_unsigned());
                put_nibbles(&mut group[64 + 256 * (i % 2)..], row, &values);
            }
        }
        QuantType::IQ4_XS
        | QuantType::IQ2_XXS
        | QuantType::IQ3_XXS
        | QuantType::IQ1_S
        | QuantType::MXFP4 => {
            for (run, group) in runs(ty, bytes).zip(tile.chunks_exact_mut(group_bytes)) {
                put(group, 4 * row, &run.scales()[0].to_le_bytes());
                put_bytes(&mut group[64..], row, &plus_128(&run));
            }
        }
        QuantType::IQ2_XS | QuantType::IQ2_S | QuantType::IQ1_M | QuantType::NVFP4 => {
            for (run, group) in runs(ty, bytes).zip(tile.chunks_exact_mut(group_bytes)) {
                let [low, high] = run.scales();
                put(group, 4 * row, &low.to_le_bytes());
                put(group, 64 + 4 * row, &high.to_le_bytes());
                put_bytes(&mut group[128..], row, &plus_128(&run));
            }
        }
        QuantType::F32 => put_words::<4>(bytes, row, tile),
        QuantType::F16 | QuantType::BF16 => put_words::<2>(bytes, row, tile),
        QuantType::Q2_K => {
            let mut values = vec![0.0; cols];
            dequantize_row(ty, bytes, &mut values);
            let halves: Vec<u8> = values
                .iter()
                .flat_map(|&v| f16::from_f32(v).to_le_bytes())
                .collect();
            put_words::<2>(&halves, row, tile);
        }
    }
}

/// The runs of a row of a format that has them.
fn runs(ty: QuantType, bytes: &[u8]) -> impl Iterator<Item = SignedRun> {
    let blocks = bytes.chunks_exact(ty.block_bytes());
    blocks.flat_map(move |block| {
        (0..ty.block_values() / BLOCK).filter_map(move |run| signed_run(ty, block, run))
    })
}

/// A run's codes plus 128.
fn plus_128(run: &SignedRun) -> [u8; BLOCK] {
    run.codes.map(|code| code.cast_unsigned() ^ 0x80)
}

fn put(group: &mut [u8], at: usize, bytes: &[u8]) {
    group[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Values of `N` bytes: column `c` of row `r` is at `N * (16 c + r)`.
fn put_words<const N: usize>(bytes: &[u8], row: usize, tile: &mut [u8]) {
    for (col, word) in bytes.chunks_exact(N).enumerate() {
        put(tile, N * (TILE_ROWS * col + row), word);
    }
}

/// Four nibble lines of one block.
fn put_nibbles(lines: &mut [u8], row: usize, values: &[u8; BLOCK]) {
    for i in 0..16 {
        let byte = values[i] & 15 | values[i + 16] << 4;
        lines[64 * (i / 4) + 4 * row + i % 4] = byte;
    }
}

/// The line of fifth bits of one block.
fn put_fifth_bits(line: &mut [u8], row: usize, values: &[u8; BLOCK]) {
    for (i, &value) in values.iter().enumerate() {
        line[4 * row + i % 4] |= (value >> 4 & 1) << (i / 4);
    }
}

/// Eight byte lines of one block.
fn put_bytes(lines: &mut [u8], row: usize, values: &[u8; BLOCK]) {
    for (i, &value) in values.iter().enumerate() {
        lines[64 * (i / 4) + 4 * row + i % 4] = value;
    }
}

/// The file's order of 32 nibbles: low ones first.
fn nibbles(bytes: &[u8]) -> [u8; BLOCK] {
    std::array::from_fn(|i| bytes[i % 16] >> (4 * (i / 16)) & 15)
}

fn five_bits(fifth: &[u8], low: &[u8]) -> [u8; BLOCK] {
    let low = nibbles(low);
    std::array::from_fn(|i| low[i] | (fifth[i / 8] >> (i % 8) & 1) << 4)
}

/// A block's signed values plus 128.
fn signed_32(ty: QuantType, block: &[u8]) -> [u8; BLOCK] {
    match ty {
        QuantType::IQ4_NL => nibbles(&block[2..18]).map(level),
        _ => std::array::from_fn(|i| block[2 + i] ^ 0x80),
    }
}

/// A level of the non-uniform table, plus 128.
fn level(code: u8) -> u8 {
    IQ4_LEVELS[usize::from(code)].cast_unsigned() ^ 0x80
}

fn pack_q45_k(ty: QuantType, block: &[u8], row: usize, group: &mut [u8]) {
    put(group, 2 * row, &block[0..2]);
    put(group, 32 + 2 * row, &block[2..4]);
    for (j, &byte) in block[4..16].iter().enumerate() {
        group[64 + 16 * j + row] = byte;
    }
    let (fifth, quads) = match ty {
        QuantType::Q5_K => (Some(&block[16..48]), &block[48..176]),
        _ => (None, &block[16..144]),
    };
    for sub in 0..8 {
        let codes = &quads[32 * (sub / 2)..][..BLOCK];
        let fifth_bit = |i: usize| fifth.map_or(0, |fifth| fifth[i] >> sub & 1);
        let code = |i: usize| codes[i] >> (4 * (sub % 2)) & 15 | fifth_bit(i) << 4;
        let values = std::array::from_fn(code);
        put_nibbles(&mut group[256 + 256 * sub..], row, &values);
        if fifth.is_some() {
            put_fifth_bits(&mut group[2304 + 64 * sub..], row, &values);
        }
    }
}

fn read_q6_k(block: &[u8]) -> SixBits {
    SixBits {
        d: f16::from_le_bytes([block[208], block[209]]).to_f32(),
        scales: std::array::from_fn(|i| block[192 + i].cast_signed()),
        codes: std::array::from_fn(|i| {
            let (half, quarter, l) = (i / 128, i / 32 % 4, i % 32);
            let low = block[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter / 2)) & 15;
            let high = block[128 + 32 * half + l] >> (2 * quarter) & 3;
            low | high << 4
        }),
    }
}

fn pack_q6(six: &SixBits, row: usize, group: &mut [u8]) {
    put(group, 2 * row, &f16::from_f32(six.d).to_le_bytes());
    for (i, &scale) in six.scales.iter().enumerate() {
        group[64 + 16 * i + row] = scale.cast_unsigned();
    }
    for (sub, codes) in six.codes.chunks_exact(BLOCK).enumerate() {
        let codes: &[u8; BLOCK] = codes.try_into().expect("chunks_exact gives 32 codes");
        put_nibbles(&mut group[320 + 256 * sub..], row, codes);
        for (i, &code) in codes.iter().enumerate() {
            let line = 320 + 2048 + 128 * sub + 64 * (i / 16);
            group[line + 4 * row + i % 4] |= (code >> 4) << (2 * (i / 4 % 4));
        }
    }
}
