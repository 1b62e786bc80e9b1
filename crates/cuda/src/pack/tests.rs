//! Packed weights dequantize to the stored values.

use contract::QuantType;
use contract::quant::{dequantize_row, quantize_row};

use super::dequantize::PackedMatrix;
use super::{WeightKind, pack, table_rows, table_type};

fn row_of(seed: usize, cols: usize) -> Vec<f32> {
    (0..cols)
        .map(|k| ((seed * 31 + k * 17 + k * k % 113) % 251) as f32 / 100.0 - 1.2)
        .collect()
}

/// Row scales from 1e-6 to 1e6.
fn scale_of(row: usize) -> f32 {
    10.0_f32.powi((row % 13).cast_signed() as i32 - 6)
}

#[test]
fn packed_weights_dequantize_as_stored() {
    for ty in QuantType::ALL {
        let widths = [256_usize, 768, 96, 416];
        for cols in widths
            .into_iter()
            .filter(|cols| cols.is_multiple_of(ty.block_values()))
        {
            let rows = 150;
            let mut stored = vec![0; rows * ty.row_bytes(cols)];
            let mut wanted = vec![0.0; rows * cols];
            // f16 lacks this range, for block scales and for row values.
            let narrow = ty != QuantType::BF16 && ty != QuantType::F32;
            for (row, bytes) in stored.chunks_exact_mut(ty.row_bytes(cols)).enumerate() {
                let scale = if narrow {
                    scale_of(row % 9)
                } else {
                    scale_of(row)
                };
                let values: Vec<f32> = row_of(row, cols).iter().map(|v| v * scale).collect();
                quantize_row(ty, &values, bytes);
                dequantize_row(ty, bytes, &mut wanted[row * cols..][..cols]);
            }
            let kind = WeightKind::of(ty);
            let mut bytes = vec![0xff; kind.bytes(rows, cols)];
            pack(ty, cols, &stored, &mut bytes);
            if kind == WeightKind::F32 {
                assert_eq!(bytes, stored);
                continue;
            }
            let packed = |rows, cols| PackedMatrix {
                kind,
                rows,
                cols,
                bytes: &bytes,
            };
            let most = if kind == WeightKind::F16 {
                0.0
            } else {
                1.0 / 500.0
            };
            for row in 0..rows {
                let wanted = &wanted[row * cols..][..cols];
                let top = wanted.iter().fold(0.0_f32, |top, v| top.max(v.abs()));
                for (k, wanted) in wanted.iter().enumerate() {
                    let got = packed(rows, cols).value(row, k);
                    assert!(
                        (got - wanted).abs() <= most * top,
                        "{} {rows} x {cols}, row {row}, {k}: {got} for {wanted}, {top} at most",
                        ty.name()
                    );
                }
            }
            // Padding of the last tile and unit dequantizes to zero.
            for row in rows..160 {
                assert_eq!(packed(160, cols).value(row, 5), 0.0);
            }
            for k in cols..cols.next_multiple_of(256) {
                let same = packed(rows, cols.next_multiple_of(256));
                assert_eq!(same.value(3, k), 0.0, "{} {k}", ty.name());
            }
        }
    }
}

/// Random blocks test the position of every code, scale and minimum.
#[test]
fn random_blocks_dequantize_as_stored() {
    let mut state = 9_u64;
    let mut random = move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 40) as u8
    };
    for ty in QuantType::ALL {
        let kind = WeightKind::of(ty);
        if matches!(ty, QuantType::F32 | QuantType::F16 | QuantType::BF16) {
            continue;
        }
        let (rows, cols) = (40, 512);
        let mut stored: Vec<u8> = (0..rows * ty.row_bytes(cols)).map(|_| random()).collect();
        // Scales of one binade, so that no block dominates a row.
        for block in stored.chunks_exact_mut(ty.block_bytes()) {
            // A scale of IQ1_M has its top nibble in byte 55; the 4-bit floats have scales of
            // their own form.
            let halves: &[usize] = match ty {
                QuantType::IQ1_M => {
                    block[55] = 0x10 | block[55] & 0x8f;
                    &[]
                }
                QuantType::MXFP4 => {
                    block[0] = 0x70 | block[0] & 1;
                    &[]
                }
                QuantType::NVFP4 => {
                    block[..4]
                        .iter_mut()
                        .for_each(|scale| *scale = 0x30 | *scale & 15);
                    &[]
                }
                QuantType::TQ1_0 => &[52],
                QuantType::TQ2_0 => &[64],
                QuantType::Q6_K => &[208],
                QuantType::Q3_K => &[108],
                QuantType::Q2_K => &[80, 82],
                QuantType::Q4_K | QuantType::Q5_K | QuantType::Q4_1 | QuantType::Q5_1 => &[0, 2],
                _ => &[0],
            };
            for at in halves {
                block[at + 1] = 0x18 | block[at + 1] & 0x83;
            }
        }
        let mut bytes = vec![0xff; kind.bytes(rows, cols)];
        pack(ty, cols, &stored, &mut bytes);
        let packed = PackedMatrix {
            kind,
            rows,
            cols,
            bytes: &bytes,
        };
        let mut wanted = vec![0.0; cols];
        for (row, stored) in stored.chunks_exact(ty.row_bytes(cols)).enumerate() {
            dequantize_row(ty, stored, &mut wanted);
            let top = wanted.iter().fold(0.0_f32, |top, v| top.max(v.abs()));
            for (k, wanted) in wanted.iter().enumerate() {
                let got = packed.value(row, k);
                assert!(
                    (got - wanted).abs() <= top / 500.0,
                    "{} row {row}, {k}: {got} for {wanted}, {top} at most",
                    ty.name()
                );
            }
        }
    }
}

#[test]
fn embedding_rows_keep_their_values_in_the_format_of_the_kernel() {
    let mut converted = 0;
    for ty in QuantType::ALL {
        let (rows, cols) = (5, 512);
        let mut from = vec![0; rows * ty.row_bytes(cols)];
        for (row, bytes) in from.chunks_exact_mut(ty.row_bytes(cols)).enumerate() {
            quantize_row(ty, &row_of(row, cols), bytes);
        }
        let stored = table_type(ty);
        let mut to = vec![0xff; rows * stored.row_bytes(cols)];
        table_rows(ty, cols, &from, &mut to);
        let (mut wanted, mut got) = (vec![0.0; rows * cols], vec![0.0; rows * cols]);
        dequantize_row(ty, &from, &mut wanted);
        dequantize_row(stored, &to, &mut got);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&wanted), "{}", ty.name());
        converted += usize::from(stored != ty);
    }
    assert_eq!(converted, 11);
}

#[test]
fn pieces_of_row_blocks_make_the_whole() {
    let (ty, cols, rows) = (QuantType::Q5_K, 512, 300);
    let row_bytes = ty.row_bytes(cols);
    let stored: Vec<u8> = (0..rows * row_bytes)
        .map(|i| (i * 7 + i / 13) as u8)
        .collect();
    let kind = WeightKind::of(ty);
    let mut whole = vec![0; kind.bytes(rows, cols)];
    pack(ty, cols, &stored, &mut whole);
    let mut joined = Vec::new();
    for part in stored.chunks(kind.row_step() * row_bytes) {
        let mut to = vec![0; kind.bytes(part.len() / row_bytes, cols)];
        pack(ty, cols, part, &mut to);
        joined.extend(to);
    }
    assert_eq!(whole, joined);
}

#[test]
fn packed_rows_have_stored_size_plus_row_factor() {
    for ty in [
        QuantType::Q4_K,
        QuantType::Q5_K,
        QuantType::Q6_K,
        QuantType::Q8_0,
        QuantType::F16,
        QuantType::BF16,
    ] {
        assert_eq!(
            WeightKind::of(ty).bytes(5120, 6144),
            5120 * (ty.row_bytes(6144) + 4),
            "{}",
            ty.name()
        );
    }
}
