//! Weights as the matmul kernels read them: the same values as in the file, in another order.
//!
//! [`WeightKind::of`] says which kernel kind serves a stored format, [`pack`] rewrites whole rows, and
//! [`activations`] is the host twin of the activation forms. Every layout is described once, in
//! `kernels/gemm/weight_layout.cuh` and `kernels/gemm/a16_layout.cuh`.

use contract::QuantType;

pub mod activations;
mod codes;
pub mod dequantize;
mod exponent;
mod tile;

/// Rows of a row block, the piece in which a matrix lies contiguously.
pub const BLOCK_ROWS: usize = 128;
/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Bytes of the row factors of a tile.
const FACTOR_BYTES: usize = 4 * TILE_ROWS;

/// How a matrix lies on the card. The discriminants are the kernels' `KIND_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightKind {
    /// Q4_K as stored, reordered.
    Q4K = 0,
    /// Q5_K as stored, reordered.
    Q5K = 1,
    /// Q6_K, reordered; Q3_K with its codes widened.
    Q6K = 2,
    /// Q8_0, reordered; Q4_0, Q5_0 and IQ4_NL with their codes widened.
    Q8 = 3,
    /// Bytes with an f16 scale and offset for 16: Q4_1, Q5_1, Q2_K, IQ4_XS.
    Wide = 4,
    /// Halves: F16, and BF16 times a power of two for each row.
    F16 = 5,
    /// F32, as stored.
    F32 = 6,
}

/// The form of activations a kind is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActivationFormat {
    /// Halves, blocked for the matrix units.
    F16,
    /// Plain f32 rows.
    F32,
}

impl ActivationFormat {
    /// Bytes of `rows` rows of `width` values; the buffer of a bucket holds the bucket's rows.
    pub fn bytes(self, rows: usize, width: usize) -> usize {
        let groups = width.div_ceil(256) * rows.div_ceil(8);
        match self {
            ActivationFormat::F16 => groups * 4 * activations::A16_TILE,
            ActivationFormat::F32 => 4 * rows * width,
        }
    }
}

impl WeightKind {
    /// Every kind, by discriminant.
    pub const ALL: [WeightKind; 7] = [
        WeightKind::Q4K,
        WeightKind::Q5K,
        WeightKind::Q6K,
        WeightKind::Q8,
        WeightKind::Wide,
        WeightKind::F16,
        WeightKind::F32,
    ];

    /// The kind that holds the values of `ty`.
    pub fn of(ty: QuantType) -> WeightKind {
        match ty {
            QuantType::Q4_K => WeightKind::Q4K,
            QuantType::Q5_K => WeightKind::Q5K,
            QuantType::Q6_K | QuantType::Q3_K => WeightKind::Q6K,
            QuantType::Q8_0 | QuantType::Q4_0 | QuantType::Q5_0 | QuantType::IQ4_NL => {
                WeightKind::Q8
            }
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q2_K | QuantType::IQ4_XS => {
                WeightKind::Wide
            }
            QuantType::F16 | QuantType::BF16 => WeightKind::F16,
            QuantType::F32 => WeightKind::F32,
        }
    }

    /// What it is multiplied with.
    pub fn input(self) -> ActivationFormat {
        match self {
            WeightKind::F32 => ActivationFormat::F32,
            _ => ActivationFormat::F16,
        }
    }

    /// Bytes of a tile of [`TILE_ROWS`] rows in each piece of a unit; 0 where a unit has but one.
    pub fn piece_bytes(self) -> [usize; 2] {
        match self {
            WeightKind::Q4K => [1280, 1024],
            WeightKind::Q5K => [1536, 1280],
            WeightKind::Q6K => [1696, 1664],
            WeightKind::Q8 => [1088, 0],
            WeightKind::Wide => [1280, 0],
            WeightKind::F16 => [2048, 0],
            WeightKind::F32 => [0, 0],
        }
    }

    /// Bytes of a tile of [`TILE_ROWS`] rows and one unit.
    pub fn tile_bytes(self) -> usize {
        self.piece_bytes().iter().sum()
    }

    /// Pieces of a unit.
    pub fn pieces(self) -> usize {
        if self.piece_bytes()[1] == 0 { 1 } else { 2 }
    }

    /// Values of a row in a unit.
    pub fn unit_values(self) -> usize {
        match self {
            WeightKind::Q4K | WeightKind::Q5K | WeightKind::Q6K => 256,
            _ => 64,
        }
    }

    /// Units along rows of `cols` values.
    pub fn units(self, cols: usize) -> usize {
        cols.div_ceil(256) * (256 / self.unit_values())
    }

    /// Rows of a piece of a matrix that may be packed by itself are a multiple of this, except in the last.
    pub fn row_step(self) -> usize {
        BLOCK_ROWS
    }

    /// Bytes of `rows` rows of `cols` values. A matrix is the concatenation of its pieces.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            WeightKind::F32 => 4 * rows * cols,
            _ => {
                let tile = self.units(cols) * self.tile_bytes() + FACTOR_BYTES;
                rows.div_ceil(TILE_ROWS) * tile
            }
        }
    }
}

/// Writes whole rows of `cols` values of `ty` as its kind lies on the card; every byte of `to` is written.
///
/// `from` is a matrix or a piece of one that begins at a multiple of [`WeightKind::row_step`].
///
/// # Panics
/// If `from` is not whole rows or `to` not [`WeightKind::bytes`] of them.
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
    assert_eq!(to.len(), kind.bytes(rows, cols), "room for {rows} x {cols}");
    if kind == WeightKind::F32 {
        return to.copy_from_slice(from);
    }
    let blocks = from.chunks(BLOCK_ROWS * row_bytes);
    for (from, to) in blocks.zip(to.chunks_mut(kind.bytes(BLOCK_ROWS, cols))) {
        pack_block(ty, cols, from, to);
    }
}

/// Writes the rows of one row block.
fn pack_block(ty: QuantType, cols: usize, from: &[u8], to: &mut [u8]) {
    let (kind, row_bytes) = (WeightKind::of(ty), ty.row_bytes(cols));
    let rows: Vec<&[u8]> = from.chunks_exact(row_bytes).collect();
    let tiles = rows.len().div_ceil(TILE_ROWS);
    let exponents: Vec<i32> = rows.iter().map(|row| exponent::of_row(ty, row)).collect();
    let (factors, mut to) = to.split_at_mut(tiles * FACTOR_BYTES);
    factors.fill(0);
    for (factor, exponent) in factors.chunks_exact_mut(4).zip(&exponents) {
        factor.copy_from_slice(&exponent::power(-exponent).to_le_bytes());
    }
    // Some units are a part of a stored block.
    let values = kind.unit_values().max(ty.block_values());
    let parts = values / kind.unit_values();
    let stored_bytes = ty.row_bytes(values);
    for unit in 0..kind.units(cols) {
        for piece in 0..kind.pieces() {
            for tile in 0..tiles {
                let (now, rest) = to.split_at_mut(kind.piece_bytes()[piece]);
                to = rest;
                now.fill(0);
                let rows = rows.iter().zip(&exponents).skip(tile * TILE_ROWS);
                for (index, (row, exponent)) in rows.take(TILE_ROWS).enumerate() {
                    let at = (unit / parts * stored_bytes).min(row.len());
                    let stored = &row[at..row.len().min(at + stored_bytes)];
                    let row = tile::Row {
                        index,
                        exponent: *exponent,
                    };
                    match parts {
                        1 => tile::write_row(ty, piece, row, stored, now),
                        _ => tile::write_quarter(ty, unit % parts, row, stored, now),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
