//! Memory layout of repacked weights.
//!
//! A matrix is a list of tiles of [`TILE_ROWS`] rows (the last one padded with rows of zeros), a
//! tile a list of groups of columns, a group as [`Format`] defines it. Inside a group, four
//! consecutive columns of the sixteen rows make one line of 64 bytes: byte `4 * row + t` is column
//! `4 * i + t` of line `i`.
//!
//! ```text
//! nibble line i    low nibbles: line i of the block's first 16 columns; high: of its last 16
//! Q4K  256 cols  2304 B  d f16[16] | dmin f16[16] | scales u8[12][16] | nibble lines [8 blocks][4]
//! Q5K  256 cols  2816 B  as Q4K, then fifth bits [8 blocks][64]: bit i of a byte is of line i of 8
//! Q6K  256 cols  3392 B  d f16[16] | 32 unused | scales i8[16][16] | nibble lines [8][4]
//!                        | top bit pairs [8][2 halves][64]: bits 2i, 2i + 1 of a byte: line i
//! Q4    64 cols   576 B  d f16[2][16] | nibble lines [2][4]
//! Q4M   32 cols   320 B  d f16[16] | min f16[16] | nibble lines [4], value = d * u + min
//! Q5    64 cols   704 B  as Q4, then fifth bits [2][64], as in Q5K
//! Q5M   32 cols   384 B  as Q4M, then fifth bits [64]
//! S8    64 cols  1088 B  d f16[2][16] | lines [2][8] of value + 128
//! S8W   32 cols   576 B  d f32[16] | lines [8] of value + 128
//! S8H   32 cols   640 B  d f32[2 halves][16] | lines [8] of value + 128
//! F32    4 cols   256 B  [4][16]    F16, BF16  4 cols  128 B  [4][16]
//! ```
//!
//! The twelve scale bytes of Q4K and Q5K keep the file's own packing of six-bit pairs.

use contract::QuantType;

/// Rows of a tile: the 32-bit lanes of a 512-bit vector.
pub const TILE_ROWS: usize = 16;

/// Columns of a block, which share one activation scale.
pub const BLOCK: usize = 32;

/// The format of weights in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Nibbles, six-bit scales and minima.
    Q4K,
    /// Five bits, six-bit scales and minima.
    Q5K,
    /// Six bits less 32, a scale for every 16.
    Q6K,
    /// Nibbles less 8.
    Q4,
    /// Nibbles, f16 scale and minimum.
    Q4M,
    /// Five bits less 16.
    Q5,
    /// Five bits, f16 scale and minimum.
    Q5M,
    /// Signed bytes, f16 scale.
    S8,
    /// Signed bytes, f32 scale.
    S8W,
    /// Signed bytes, f32 scale for every 16.
    S8H,
    /// Unquantised.
    F32,
    /// Unquantised halves.
    F16,
    /// Unquantised upper halves.
    BF16,
}

impl Format {
    /// The memory format of a file's type. All are exact except Q2_K, whose values are rounded to
    /// f16.
    pub fn of(ty: QuantType) -> Format {
        match ty {
            QuantType::Q4_K => Format::Q4K,
            QuantType::Q5_K => Format::Q5K,
            QuantType::Q6_K | QuantType::Q3_K | QuantType::IQ3_S => Format::Q6K,
            QuantType::Q4_0 | QuantType::TQ1_0 | QuantType::TQ2_0 => Format::Q4,
            QuantType::Q4_1 => Format::Q4M,
            QuantType::Q5_0 => Format::Q5,
            QuantType::Q5_1 => Format::Q5M,
            QuantType::Q8_0 | QuantType::IQ4_NL => Format::S8,
            QuantType::IQ4_XS
            | QuantType::IQ2_XXS
            | QuantType::IQ3_XXS
            | QuantType::IQ1_S
            | QuantType::MXFP4 => Format::S8W,
            QuantType::IQ2_XS | QuantType::IQ2_S | QuantType::IQ1_M | QuantType::NVFP4 => {
                Format::S8H
            }
            QuantType::F32 => Format::F32,
            QuantType::F16 | QuantType::Q2_K => Format::F16,
            QuantType::BF16 => Format::BF16,
        }
    }

    /// `(columns, bytes)` of a group.
    pub const fn group(self) -> (usize, usize) {
        match self {
            Format::Q4K => (256, 2304),
            Format::Q5K => (256, 2816),
            Format::Q6K => (256, 3392),
            Format::Q4 => (64, 576),
            Format::Q4M => (32, 320),
            Format::Q5 => (64, 704),
            Format::Q5M => (32, 384),
            Format::S8 => (64, 1088),
            Format::S8W => (32, 576),
            Format::S8H => (32, 640),
            Format::F32 => (4, 256),
            Format::F16 | Format::BF16 => (4, 128),
        }
    }

    /// Whether the activations stay f32.
    pub const fn is_float(self) -> bool {
        matches!(self, Format::F32 | Format::F16 | Format::BF16)
    }

    /// Bytes of a tile of `cols` columns.
    pub const fn tile_bytes(self, cols: usize) -> usize {
        let (group_cols, group_bytes) = self.group();
        cols.div_ceil(group_cols) * group_bytes
    }
}

/// Repacked matrices of one shape, each in tiles of its own.
pub struct Packed {
    /// Their form.
    pub format: Format,
    /// Outputs of a matrix.
    pub rows: usize,
    /// Inputs of a matrix.
    pub cols: usize,
    tiles: Lines,
}

impl Packed {
    /// `matrices` matrices of zero bytes, to be written tile by tile.
    pub fn zeroed(format: Format, matrices: usize, rows: usize, cols: usize) -> Packed {
        let bytes = matrices * rows.div_ceil(TILE_ROWS) * format.tile_bytes(cols);
        Packed {
            format,
            rows,
            cols,
            tiles: Lines::zeroed(bytes),
        }
    }

    /// Number of tiles of a matrix.
    pub fn n_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// The bytes of tile `tile` of all matrices' tiles, starting on a 64-byte boundary.
    pub fn tile(&self, tile: usize) -> &[u8] {
        let bytes = self.format.tile_bytes(self.cols);
        &self.tiles.bytes()[tile * bytes..][..bytes]
    }

    /// All tiles for writing.
    pub fn tiles_mut(&mut self) -> std::slice::ChunksExactMut<'_, u8> {
        let bytes = self.format.tile_bytes(self.cols);
        self.tiles.bytes_mut().chunks_exact_mut(bytes)
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.tiles.len
    }
}

/// Bytes that start on a cache line.
struct Lines {
    /// Owns the memory. It never grows, so `start` stays valid.
    storage: Vec<u8>,
    start: usize,
    len: usize,
}

impl Lines {
    fn zeroed(len: usize) -> Lines {
        let mut storage = vec![0; len + 64];
        prefer_huge_pages(&mut storage);
        let start = storage.as_ptr().align_offset(64).min(64);
        Lines {
            storage,
            start,
            len,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.storage[self.start..][..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..][..self.len]
    }
}

/// Asks for huge pages under memory that nothing has touched yet.
///
/// A product with one row streams through the weights. The processor's prefetching ends at the
/// border of a page, and small pages of a large matrix do not fit the translation cache.
#[cfg(target_os = "linux")]
fn prefer_huge_pages(storage: &mut [u8]) {
    /// Bytes of a huge page on x86-64, and on Arm with pages of 4 KiB.
    const HUGE: usize = 2 << 20;
    let before = storage.as_ptr().align_offset(HUGE);
    let Some(bytes) = storage.len().checked_sub(before) else {
        return;
    };
    let whole = bytes / HUGE * HUGE;
    if whole > 0 {
        // SAFETY: `whole` bytes from the aligned address lie inside `storage`, and the advice does
        // not change what they hold. A system without huge pages refuses it, which costs nothing.
        unsafe {
            let start = storage.as_mut_ptr().add(before);
            libc::madvise(start.cast(), whole, libc::MADV_HUGEPAGE);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn prefer_huge_pages(_: &mut [u8]) {}
