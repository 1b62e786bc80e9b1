//! Weight kinds and the activation formats they are multiplied with.

use contract::QuantType;

/// Rows of a row block, the piece in which a matrix lies contiguously.
pub const BLOCK_ROWS: usize = 128;
/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Bytes of the row factors of a tile.
pub(super) const FACTOR_BYTES: usize = 4 * TILE_ROWS;

/// Bytes of 8 rows and 64 values of halves.
pub const A16_TILE: usize = 1024;

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
            ActivationFormat::F16 => groups * 4 * A16_TILE,
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
