//! Packing of whole rows.

use contract::QuantType;
use half::f16;

use super::kind::{BLOCK_ROWS, FACTOR_BYTES, M16_ROWS, WeightKind};
use super::{exponent, tile};

/// Packs rows of `cols` values of `ty` to their weight kind. Writes every byte of `to`.
///
/// `from` is a matrix, or a part of one that begins at a multiple of [`WeightKind::row_step`].
///
/// # Panics
/// If `from` is not whole rows or `to` is not [`WeightKind::bytes`] long.
pub fn pack(ty: QuantType, cols: usize, from: &[u8], to: &mut [u8]) {
    let row_bytes = ty.row_bytes(cols);
    let kind = WeightKind::of(ty);
    let rows = from.len() / row_bytes;
    assert!(
        cols.is_multiple_of(ty.block_values()) && from.len() == rows * row_bytes,
        "{} bytes are not rows of {cols} values of {}",
        from.len(),
        ty.name()
    );
    assert_eq!(
        to.len(),
        kind.bytes(rows, cols),
        "wrong size for {rows} x {cols}"
    );
    if kind == WeightKind::F32 {
        return to.copy_from_slice(from);
    }
    let blocks = from.chunks(BLOCK_ROWS * row_bytes);
    for (from, to) in blocks.zip(to.chunks_mut(kind.bytes(BLOCK_ROWS, cols))) {
        pack_block(ty, cols, from, to);
    }
}

/// Packs rows of `cols` f32 values as [`WeightKind::F16`]. Values beyond its range saturate.
///
/// # Panics
/// As [`pack`].
pub fn pack_halves(cols: usize, from: &[u8], to: &mut [u8]) {
    let values = from
        .as_chunks::<4>()
        .0
        .iter()
        .map(|x| f32::from_le_bytes(*x));
    let most = f16::MAX.to_f32();
    let halves: Vec<u8> = values
        .flat_map(|x| f16::from_f32(x.clamp(-most, most)).to_le_bytes())
        .collect();
    pack(QuantType::F16, cols, &halves, to);
}

/// Packs one row block.
fn pack_block(ty: QuantType, cols: usize, from: &[u8], to: &mut [u8]) {
    let (kind, row_bytes) = (WeightKind::of(ty), ty.row_bytes(cols));
    let rows: Vec<&[u8]> = from.chunks_exact(row_bytes).collect();
    let tiles = rows.len().div_ceil(M16_ROWS);
    let exponents: Vec<i32> = rows.iter().map(|row| exponent::of_row(ty, row)).collect();
    let (factors, mut to) = to.split_at_mut(tiles * FACTOR_BYTES);
    factors.fill(0);
    for (factor, exponent) in factors.chunks_exact_mut(4).zip(&exponents) {
        factor.copy_from_slice(&exponent::power(-exponent).to_le_bytes());
    }
    // A stored block may span several units.
    let values = kind.unit_values().max(ty.block_values());
    let parts = values / kind.unit_values();
    let stored_bytes = ty.row_bytes(values);
    for unit in 0..kind.units(cols) {
        for slice in 0..kind.slices() {
            for tile in 0..tiles {
                let (now, rest) = to.split_at_mut(kind.slice_bytes()[slice]);
                to = rest;
                now.fill(0);
                let rows = rows.iter().zip(&exponents).skip(tile * M16_ROWS);
                for (index, (row, exponent)) in rows.take(M16_ROWS).enumerate() {
                    let at = (unit / parts * stored_bytes).min(row.len());
                    let stored = &row[at..row.len().min(at + stored_bytes)];
                    let row = tile::Row {
                        index,
                        exponent: *exponent,
                    };
                    match parts {
                        1 => tile::write_row(ty, slice, row, stored, now),
                        _ => tile::write_quarter(ty, unit % parts, row, stored, now),
                    }
                }
            }
        }
    }
}
