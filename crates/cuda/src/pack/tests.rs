//! The layouts of `kernels/matmul/layout.cuh`, read back value by value.

use contract::QuantType;
use contract::quant::{dequantize_row, quantize_row};
use half::{bf16, f16};

use super::{BLOCK_ROWS, Kind, codes, pack};

/// Value `(row, k)` of a packed matrix of `rows` rows of `cols` values, by the formulas of the layout.
fn value(kind: Kind, packed: &[u8], rows: usize, cols: usize, row: usize, k: usize) -> f32 {
    let (unit, k) = (k / kind.unit_values(), k % kind.unit_values());
    let block = row / BLOCK_ROWS;
    let tiles = (rows - block * BLOCK_ROWS).div_ceil(16).min(8);
    let first = block * 8 * kind.units(cols) + unit * tiles + row % BLOCK_ROWS / 16;
    let tile = &packed[first * kind.tile_bytes()..][..kind.tile_bytes()];
    let (r, kk) = (row % 16, k % 32);
    let (lane, j) = (r % 8 * 4 + kk % 16 / 4, r / 8 + 2 * (kk / 16));
    let u16_at = |at: usize| u16::from_le_bytes([tile[at], tile[at + 1]]);
    let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
    let half_at = |at: usize| f16::from_bits(u16_at(at)).to_f32();
    let nibble = || tile[k / 64 * 512 + lane * 16 + j * 4 + kk % 4] >> (k / 32 % 2 * 4) & 15;
    let byte = || f32::from(tile[k / 32 * 512 + lane * 16 + j * 4 + kk % 4].cast_signed());
    match kind {
        Kind::Q4K => {
            let (scale, min) = codes::header(&tile[2048 + r * 16..][..16], k / 32);
            scale * f32::from(nibble()) - min
        }
        Kind::Q5K => {
            let (scale, min) = codes::header(&tile[2560 + r * 16..][..16], k / 32);
            let bits = u32_at(2048 + lane * 16 + k / 64 * 4);
            let fifth = bits >> (8 * (kk % 4) + k / 32 % 2 * 4 + j) & 1;
            scale * f32::from(nibble() | (fifth as u8) << 4) - min
        }
        Kind::Q6K => {
            let bits = u32_at(2048 + k / 128 * 512 + lane * 16 + k / 32 % 4 * 4);
            let pair = bits >> (8 * (kk % 4) + 2 * j) & 3 ^ 2;
            let scale = f32::from(tile[3072 + r * 16 + k / 16].cast_signed());
            let code = i16::from(nibble() | (pair as u8) << 4) - 32;
            half_at(3328 + r * 2) * scale * f32::from(code)
        }
        Kind::Q8 => half_at(4096 + r * 16 + k / 32 * 2) * byte(),
        Kind::Wide => {
            let scale = f32::from_bits(u32_at(4096 + r * 64 + k / 16 * 4));
            let offset = f32::from_bits(u32_at(5120 + r * 64 + k / 16 * 4));
            scale * byte() + offset
        }
        Kind::F16 | Kind::Bf16 => {
            let lane = r % 8 * 4 + k % 8 / 2;
            let at = k / 16 * 512 + lane * 16 + (r / 8 + 2 * (k % 16 / 8)) * 4 + k % 2 * 2;
            match kind {
                Kind::F16 => half_at(at),
                _ => bf16::from_bits(u16_at(at)).to_f32(),
            }
        }
        Kind::F32 => unreachable!("F32 is plain"),
    }
}

fn row_of(seed: usize, cols: usize) -> Vec<f32> {
    (0..cols)
        .map(|k| ((seed * 31 + k * 17 + k * k % 113) % 251) as f32 / 100.0 - 1.2)
        .collect()
}

#[test]
fn every_format_reads_back_as_it_was_stored() {
    for ty in QuantType::ALL {
        let widths: &[usize] = if ty.block_values() == 256 {
            &[256, 768]
        } else {
            &[256, 96, 416]
        };
        for &cols in widths {
            let rows = 150;
            let mut stored = vec![0; rows * ty.row_bytes(cols)];
            let mut wanted = vec![0.0; rows * cols];
            for (row, bytes) in stored.chunks_exact_mut(ty.row_bytes(cols)).enumerate() {
                quantize_row(ty, &row_of(row, cols), bytes);
                dequantize_row(ty, bytes, &mut wanted[row * cols..][..cols]);
            }
            let kind = Kind::of(ty);
            let mut packed = vec![0xff; kind.bytes(rows, cols)];
            pack(ty, cols, &stored, &mut packed);
            if kind == Kind::F32 {
                assert_eq!(packed, stored);
                continue;
            }
            for row in 0..rows {
                for k in 0..cols {
                    let wanted = wanted[row * cols + k];
                    let got = value(kind, &packed, rows, cols, row, k);
                    assert!(
                        (got - wanted).abs() <= 1e-6 * wanted.abs().max(1.0),
                        "{} {rows} x {cols}, row {row}, {k}: {got} for {wanted}",
                        ty.name()
                    );
                }
            }
            // What pads the last tile and the last unit is worth nothing.
            for row in rows..160 {
                assert_eq!(value(kind, &packed, rows, cols, row, 5), 0.0);
            }
            for k in cols..cols.next_multiple_of(256) {
                assert_eq!(value(kind, &packed, rows, cols, 3, k), 0.0);
            }
        }
    }
}

#[test]
fn pieces_of_row_blocks_make_the_whole() {
    let (ty, cols, rows) = (QuantType::Q5_K, 512, 300);
    let row_bytes = ty.row_bytes(cols);
    let stored: Vec<u8> = (0..rows * row_bytes)
        .map(|i| (i * 7 + i / 13) as u8)
        .collect();
    let kind = Kind::of(ty);
    let mut whole = vec![0; kind.bytes(rows, cols)];
    pack(ty, cols, &stored, &mut whole);
    let mut joined = Vec::new();
    for piece in stored.chunks(kind.row_step() * row_bytes) {
        let mut to = vec![0; kind.bytes(piece.len() / row_bytes, cols)];
        pack(ty, cols, piece, &mut to);
        joined.extend(to);
    }
    assert_eq!(whole, joined);
}

#[test]
fn packed_k_quants_are_as_long_as_stored_ones() {
    for ty in [
        QuantType::Q4_K,
        QuantType::Q5_K,
        QuantType::Q6_K,
        QuantType::Q8_0,
        QuantType::F16,
        QuantType::BF16,
    ] {
        assert_eq!(
            Kind::of(ty).bytes(5120, 6144),
            5120 * ty.row_bytes(6144),
            "{}",
            ty.name()
        );
    }
}
