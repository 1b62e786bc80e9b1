//! Weight kinds and the activation formats they are multiplied with.

use contract::QuantType;

/// Rows of a row block, which is contiguous in a matrix.
pub const BLOCK_ROWS: usize = 128;
/// Rows of an m16 tile.
pub const M16_ROWS: usize = 16;
/// Bytes of a tile's row factors.
pub(super) const FACTOR_BYTES: usize = 4 * M16_ROWS;

/// Bytes of 8 rows and 64 f16 values.
pub const A16_TILE: usize = 1024;

/// Device layout of a weight matrix. The discriminants equal the kernels' `KIND_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightKind {
    /// Q4_K as stored, reordered.
    Q4K = 0,
    /// Q5_K as stored, reordered.
    Q5K = 1,
    /// Q6_K, reordered. Q3_K, IQ3_XXS, IQ3_S, IQ1_S and IQ1_M with widened codes.
    Q6K = 2,
    /// Q8_0, reordered. Q4_0, Q5_0, IQ4_NL, TQ1_0, TQ2_0 and MXFP4 with widened codes; IQ2_XXS also
    /// with its scales rounded to f16.
    Q8 = 3,
    /// 8-bit codes with an f16 scale and offset per 16 values: Q4_1, Q5_1, Q2_K, IQ4_XS, IQ2_XS,
    /// IQ2_S, NVFP4. All but NVFP4 have scales that are rounded to f16.
    U8Affine = 4,
    /// F16, and BF16 scaled by a power of two per row.
    F16 = 5,
    /// F32, as stored.
    F32 = 6,
}

/// The activation format of a weight kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActivationFormat {
    /// F16 in the MMA operand layout.
    F16,
    /// Plain f32 rows.
    F32,
}

impl ActivationFormat {
    /// Bytes of `rows` rows of `width` values. Buffers hold a whole row bucket.
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
        WeightKind::U8Affine,
        WeightKind::F16,
        WeightKind::F32,
    ];

    /// The kind that stores `ty`.
    pub fn of(ty: QuantType) -> WeightKind {
        match ty {
            QuantType::Q4_K => WeightKind::Q4K,
            QuantType::Q5_K => WeightKind::Q5K,
            QuantType::Q6_K
            | QuantType::Q3_K
            | QuantType::IQ3_XXS
            | QuantType::IQ3_S
            | QuantType::IQ1_S
            | QuantType::IQ1_M => WeightKind::Q6K,
            QuantType::Q8_0
            | QuantType::Q4_0
            | QuantType::Q5_0
            | QuantType::IQ4_NL
            | QuantType::TQ1_0
            | QuantType::TQ2_0
            | QuantType::MXFP4
            | QuantType::IQ2_XXS => WeightKind::Q8,
            QuantType::Q4_1
            | QuantType::Q5_1
            | QuantType::Q2_K
            | QuantType::IQ4_XS
            | QuantType::IQ2_XS
            | QuantType::IQ2_S
            | QuantType::NVFP4 => WeightKind::U8Affine,
            QuantType::F16 | QuantType::BF16 => WeightKind::F16,
            QuantType::F32 => WeightKind::F32,
        }
    }

    /// Its activation format.
    pub fn input(self) -> ActivationFormat {
        match self {
            WeightKind::F32 => ActivationFormat::F32,
            _ => ActivationFormat::F16,
        }
    }

    /// Bytes of a tile of [`M16_ROWS`] rows in the first and second slice of a unit. 0 if a unit
    /// has one slice.
    pub fn slice_bytes(self) -> [usize; 2] {
        match self {
            WeightKind::Q4K => [1280, 1024],
            WeightKind::Q5K => [1536, 1280],
            WeightKind::Q6K => [1696, 1664],
            WeightKind::Q8 => [1088, 0],
            WeightKind::U8Affine => [1280, 0],
            WeightKind::F16 => [2048, 0],
            WeightKind::F32 => [0, 0],
        }
    }

    /// Bytes of a tile of [`M16_ROWS`] rows and one unit.
    pub fn tile_bytes(self) -> usize {
        self.slice_bytes().iter().sum()
    }

    /// K-slices per unit.
    pub fn slices(self) -> usize {
        if self.slice_bytes()[1] == 0 { 1 } else { 2 }
    }

    /// Values of a row per unit.
    pub fn unit_values(self) -> usize {
        match self {
            WeightKind::Q4K | WeightKind::Q5K | WeightKind::Q6K => 256,
            _ => 64,
        }
    }

    /// Units along `cols` values.
    pub fn units(self, cols: usize) -> usize {
        cols.div_ceil(256) * (256 / self.unit_values())
    }

    /// Row granularity of separately packed parts of a matrix. Only the last part may be shorter.
    pub fn row_step(self) -> usize {
        BLOCK_ROWS
    }

    /// Bytes of `rows` rows of `cols` values. A matrix is the concatenation of its parts.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            WeightKind::F32 => 4 * rows * cols,
            _ => {
                let tile = self.units(cols) * self.tile_bytes() + FACTOR_BYTES;
                rows.div_ceil(M16_ROWS) * tile
            }
        }
    }
}
