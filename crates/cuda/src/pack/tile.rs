//! One row's part of one tile, for each kind.

use contract::QuantType;

use super::Kind;
use super::codes;

/// Writes row `r` (0..16) of a tile from the stored bytes of one unit of the row, fewer at the end of a row.
/// The tile was zero before.
pub(super) fn put(ty: QuantType, r: usize, stored: &[u8], tile: &mut [u8]) {
    match ty {
        QuantType::Q4_K if !stored.is_empty() => {
            put_nibbles(r, &stored[16..144], tile);
            tile[2048 + r * 16..][..16].copy_from_slice(&stored[..16]);
        }
        QuantType::Q5_K if !stored.is_empty() => {
            put_nibbles(r, &stored[48..176], tile);
            put_fifth_bits(r, &stored[16..48], tile);
            tile[2560 + r * 16..][..16].copy_from_slice(&stored[..16]);
        }
        QuantType::Q6_K if !stored.is_empty() => put_six_bits(r, stored, tile),
        _ => put_rare(ty, r, stored, tile),
    }
}

/// Where four values from `k % 32 == 4 * quad` on lie: `(lane, word of the lane's 16 bytes)`.
fn place(r: usize, quad: usize) -> (usize, usize) {
    (r % 8 * 4 + quad % 4, r / 8 + 2 * (quad / 4))
}

fn word(bytes: &[u8], index: usize) -> u32 {
    let b = &bytes[4 * index..4 * index + 4];
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

fn or_word(bytes: &mut [u8], at: usize, bits: u32) {
    for (byte, more) in bytes[at..at + 4].iter_mut().zip(bits.to_le_bytes()) {
        *byte |= more;
    }
}

/// 128 bytes whose low nibbles are run `2 p` of 32 values and whose high ones are run `2 p + 1`.
fn put_nibbles(r: usize, nibbles: &[u8], tile: &mut [u8]) {
    for (p, pair) in nibbles.chunks_exact(32).enumerate() {
        for (quad, bytes) in pair.chunks_exact(4).enumerate() {
            let (lane, j) = place(r, quad);
            tile[p * 512 + lane * 16 + j * 4..][..4].copy_from_slice(bytes);
        }
    }
}

/// Bit `s` of byte `l` belongs to value `l` of run `s`.
fn put_fifth_bits(r: usize, bits: &[u8], tile: &mut [u8]) {
    for quad in 0..8 {
        let (lane, j) = place(r, quad);
        let four = word(bits, quad);
        for run in 0..8 {
            let spread = (four >> run & 0x0101_0101) << (run % 2 * 4 + j);
            or_word(tile, 2048 + lane * 16 + run / 2 * 4, spread);
        }
    }
}

fn put_six_bits(r: usize, stored: &[u8], tile: &mut [u8]) {
    for run in 0..8 {
        let (half, q) = (run / 4, run % 4);
        let low = &stored[64 * half + 32 * (q % 2)..][..32];
        let top = &stored[128 + 32 * half..][..32];
        for quad in 0..8 {
            let nibbles = word(low, quad) >> (4 * (q / 2)) & 0x0f0f_0f0f;
            let pairs = word(top, quad) >> (2 * q) & 0x0303_0303;
            put_six(r, run, quad, nibbles, pairs, tile);
        }
    }
    tile[3072 + r * 16..][..16].copy_from_slice(&stored[192..208]);
    tile[3328 + r * 2..][..2].copy_from_slice(&stored[208..210]);
}

/// Four codes 0..64 of run `run`, as their low nibbles and their top pairs, a byte each.
fn put_six(r: usize, run: usize, quad: usize, nibbles: u32, pairs: u32, tile: &mut [u8]) {
    let (lane, j) = place(r, quad);
    let at = run / 2 * 512 + lane * 16 + j * 4;
    or_word(tile, at, nibbles << (run % 2 * 4));
    let at = 2048 + run / 4 * 512 + lane * 16 + run % 4 * 4;
    or_word(tile, at, (pairs ^ 0x0202_0202) << (2 * j));
}

/// 32 signed bytes of run `run`.
fn put_bytes(r: usize, run: usize, values: &[i8; 32], tile: &mut [u8]) {
    for (quad, four) in values.chunks_exact(4).enumerate() {
        let (lane, j) = place(r, quad);
        let at = run * 512 + lane * 16 + j * 4;
        for (byte, value) in tile[at..at + 4].iter_mut().zip(four) {
            *byte = value.cast_unsigned();
        }
    }
}

/// Formats whose blocks are decoded before they are laid down, and ends of rows.
fn put_rare(ty: QuantType, r: usize, stored: &[u8], tile: &mut [u8]) {
    let blocks = stored.chunks_exact(ty.block_bytes());
    match Kind::of(ty) {
        Kind::F16 | Kind::Bf16 => {
            for (pair, bytes) in stored.chunks_exact(4).enumerate() {
                let k = 2 * pair;
                let lane = r % 8 * 4 + k % 8 / 2;
                let j = r / 8 + 2 * (k % 16 / 8);
                tile[k / 16 * 512 + lane * 16 + j * 4..][..4].copy_from_slice(bytes);
            }
        }
        Kind::Q8 => {
            for (run, block) in blocks.enumerate() {
                put_bytes(r, run, &codes::signed_32(ty, block), tile);
                tile[4096 + r * 16 + run * 2..][..2].copy_from_slice(&block[..2]);
            }
        }
        Kind::Wide => {
            for (index, block) in blocks.enumerate() {
                for (i, run) in codes::affine(ty, block).iter().enumerate() {
                    let runs = ty.block_values() / 32;
                    let at = index * runs + i;
                    put_bytes(r, at, &run.values, tile);
                    for half in 0..2 {
                        let to = 4096 + r * 64 + (2 * at + half) * 4;
                        tile[to..to + 4].copy_from_slice(&run.scale[half].to_le_bytes());
                        tile[to + 1024..to + 1028].copy_from_slice(&run.offset[half].to_le_bytes());
                    }
                }
            }
        }
        Kind::Q6K => {
            for block in blocks {
                let three = codes::three_bits(block);
                for run in 0..8 {
                    for quad in 0..8 {
                        let four = word(&three.values, run * 8 + quad);
                        put_six(
                            r,
                            run,
                            quad,
                            four & 0x0f0f_0f0f,
                            four >> 4 & 0x0303_0303,
                            tile,
                        );
                    }
                }
                tile[3072 + r * 16..][..16].copy_from_slice(&three.scales);
                tile[3328 + r * 2..][..2].copy_from_slice(&three.d);
            }
        }
        Kind::Q4K | Kind::Q5K | Kind::F32 => {}
    }
}
