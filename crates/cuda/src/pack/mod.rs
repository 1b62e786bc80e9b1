//! Weights as the matmul kernels read them: the same values as in the file, in another order.
//!
//! [`Kind::of`] says which kernel kind serves a stored format, [`pack`] rewrites whole rows, and
//! [`activations`] is the host twin of the activation forms. Every layout is described once, in
//! `kernels/matmul/layout.cuh` and `kernels/matmul/a8.cuh`.

use contract::QuantType;

pub mod activations;
mod codes;
mod tile;

/// Rows of a row block, the piece in which a matrix lies contiguously.
pub const BLOCK_ROWS: usize = 128;
/// Rows of a tile.
pub const TILE_ROWS: usize = 16;

/// How a matrix lies on the card. The discriminants are the kernels' `KIND_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Q4_K as stored, reordered.
    Q4K = 0,
    /// Q5_K as stored, reordered.
    Q5K = 1,
    /// Q6_K, reordered; Q3_K with its codes widened.
    Q6K = 2,
    /// Q8_0, reordered; Q4_0, Q5_0 and IQ4_NL with their codes widened.
    Q8 = 3,
    /// Signed bytes with an f32 scale and offset for 16: Q4_1, Q5_1, Q2_K, IQ4_XS.
    Wide = 4,
    /// F16, reordered.
    F16 = 5,
    /// BF16, reordered.
    Bf16 = 6,
    /// F32, as stored.
    F32 = 7,
}

/// The form of activations a kind is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Input {
    /// Signed bytes, a scale for 256.
    A8,
    /// Halves.
    F16,
    /// bfloat16.
    Bf16,
    /// Plain f32 rows.
    F32,
}

impl Input {
    /// Bytes of `rows` rows of `width` values; the buffer of a bucket holds the bucket's rows.
    pub fn bytes(self, rows: usize, width: usize) -> usize {
        let groups = width.div_ceil(256) * rows.div_ceil(8);
        match self {
            Input::A8 => groups * activations::A8_TILE,
            Input::F16 | Input::Bf16 => groups * 4 * activations::A16_TILE,
            Input::F32 => 4 * rows * width,
        }
    }
}

impl Kind {
    /// Every kind, by discriminant.
    pub const ALL: [Kind; 8] = [
        Kind::Q4K,
        Kind::Q5K,
        Kind::Q6K,
        Kind::Q8,
        Kind::Wide,
        Kind::F16,
        Kind::Bf16,
        Kind::F32,
    ];

    /// The kind that holds the values of `ty` exactly.
    pub fn of(ty: QuantType) -> Kind {
        match ty {
            QuantType::Q4_K => Kind::Q4K,
            QuantType::Q5_K => Kind::Q5K,
            QuantType::Q6_K | QuantType::Q3_K => Kind::Q6K,
            QuantType::Q8_0 | QuantType::Q4_0 | QuantType::Q5_0 | QuantType::IQ4_NL => Kind::Q8,
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q2_K | QuantType::IQ4_XS => Kind::Wide,
            QuantType::F16 => Kind::F16,
            QuantType::BF16 => Kind::Bf16,
            QuantType::F32 => Kind::F32,
        }
    }

    /// What it is multiplied with.
    pub fn input(self) -> Input {
        match self {
            Kind::F16 => Input::F16,
            Kind::Bf16 => Input::Bf16,
            Kind::F32 => Input::F32,
            _ => Input::A8,
        }
    }

    /// Bytes of a tile of [`TILE_ROWS`] rows and one unit.
    pub fn tile_bytes(self) -> usize {
        match self {
            Kind::Q4K => 2304,
            Kind::Q5K => 2816,
            Kind::Q6K => 3360,
            Kind::Q8 => 4352,
            Kind::Wide => 6144,
            Kind::F16 | Kind::Bf16 => 2048,
            Kind::F32 => 0,
        }
    }

    /// Values of a row in a unit.
    pub fn unit_values(self) -> usize {
        match self {
            Kind::F16 | Kind::Bf16 => 64,
            _ => 256,
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
            Kind::F32 => 4 * rows * cols,
            _ => rows.div_ceil(TILE_ROWS) * self.units(cols) * self.tile_bytes(),
        }
    }
}

/// Writes whole rows of `cols` values of `ty` as its kind lies on the card; every byte of `to` is written.
///
/// `from` is a matrix or a piece of one that begins at a multiple of [`Kind::row_step`].
///
/// # Panics
/// If `from` is not whole rows or `to` not [`Kind::bytes`] of them.
pub fn pack(ty: QuantType, cols: usize, from: &[u8], to: &mut [u8]) {
    let row_bytes = ty.row_bytes(cols);
    let kind = Kind::of(ty);
    let rows = from.len() / row_bytes;
    assert!(
        cols.is_multiple_of(ty.block_values()) && from.len() == rows * row_bytes,
        "{} bytes are not rows of {cols} values of {}",
        from.len(),
        ty.name()
    );
    assert_eq!(to.len(), kind.bytes(rows, cols), "room for {rows} x {cols}");
    if kind == Kind::F32 {
        return to.copy_from_slice(from);
    }
    let units = kind.units(cols);
    let tile = kind.tile_bytes();
    let unit_bytes = ty.row_bytes(kind.unit_values());
    let blocks = from.chunks(BLOCK_ROWS * row_bytes);
    for (from, to) in blocks.zip(to.chunks_mut(8 * units * tile)) {
        let tiles = to.len() / (units * tile);
        for (index, to) in to.chunks_exact_mut(tile).enumerate() {
            let (unit, first) = (index / tiles, index % tiles * TILE_ROWS);
            to.fill(0);
            for (r, row) in from
                .chunks_exact(row_bytes)
                .skip(first)
                .take(16)
                .enumerate()
            {
                let at = (unit * unit_bytes).min(row.len());
                let piece = &row[at..row.len().min(at + unit_bytes)];
                tile::put(ty, r, piece, to);
            }
        }
    }
}

#[cfg(test)]
mod tests;
