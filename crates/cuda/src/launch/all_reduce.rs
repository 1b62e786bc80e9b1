//! The all-reduce of a tensor split.

use super::norm::{Residual, RowSource};
use super::{Args, CompileUnit, Launch};

/// Devices that the kernel has pointers for.
const MAX_DEVICES: usize = 8;
/// Blocks of a launch, all of which are resident at once on any GPU.
const MAX_BLOCKS: usize = 256;
/// Values that a block adds at once.
const BLOCK_VALUES: usize = 1024;
/// Bytes of `struct Exchange` before its epochs.
const POINTER_BYTES: usize = 256;
/// Bytes of `struct Exchange`.
const TABLE_BYTES: usize = POINTER_BYTES + 4 * MAX_BLOCKS;
/// Bytes of a device's flags.
const FLAG_BYTES: usize = 4 * MAX_DEVICES * MAX_BLOCKS;

/// The shards of a tensor split, and the rows that they exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeShape {
    /// Devices, 2 to 8.
    pub devices: usize,
    /// Values of a row, a multiple of 4.
    pub width: usize,
    /// Rows of the longest pass.
    pub rows: usize,
}

impl ExchangeShape {
    /// Bytes that must be zero before the first launch: pointers, epochs and flags.
    pub const ZEROED_BYTES: usize = TABLE_BYTES + FLAG_BYTES;

    /// Values of the rows of one sender.
    fn capacity(self) -> usize {
        self.rows * self.width
    }

    /// Bytes of a device's exchange.
    pub fn bytes(self) -> usize {
        Self::ZEROED_BYTES + 2 * (self.devices - 1) * 4 * self.capacity()
    }

    /// The pointers of shard `rank`, whose device and whose peers have their exchanges at these
    /// addresses, in device order. They go to the beginning of its exchange.
    pub fn table(self, rank: usize, exchanges: &[u64]) -> Vec<u8> {
        let pad = |offset: usize| {
            let at = exchanges.iter().map(move |at| at + offset as u64);
            at.chain(std::iter::repeat(0)).take(MAX_DEVICES)
        };
        let flags = pad(TABLE_BYTES);
        let rows = pad(Self::ZEROED_BYTES);
        let words = std::iter::once(rank as u64).chain(flags).chain(rows);
        words.flat_map(u64::to_le_bytes).collect()
    }
}

/// `x += sum of the partial sums of all devices`, `x` f32 `[rows][width]` and `update` this
/// device's partial sums of the same shape. `exchange` is the address of its exchange.
///
/// # Panics
/// If the shape is not one that the kernel has.
pub fn add(
    shape: ExchangeShape,
    rows: usize,
    source: RowSource,
    to: Residual,
    exchange: u64,
) -> Launch {
    assert!(
        (2..=MAX_DEVICES).contains(&shape.devices) && shape.width.is_multiple_of(4),
        "{shape:?} cannot be exchanged"
    );
    assert!(rows <= shape.rows, "{rows} rows of at most {}", shape.rows);
    let blocks = (rows * shape.width)
        .div_ceil(BLOCK_VALUES)
        .clamp(1, MAX_BLOCKS);
    Launch {
        entry: "all_reduce_add",
        unit: CompileUnit::new("all_reduce/add.cu")
            .define("SOURCE", source.number())
            .define("WIDTH", shape.width)
            .define("N_DEVICES", shape.devices)
            .define("CAPACITY", shape.capacity()),
        grid: [blocks as u32, 1, 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(source.header())
            .ptr(to.rows)
            .ptr(to.update)
            .ptr(exchange),
        cooperative: false,
        overlap: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_the_layout_of_the_kernel() {
        let shape = ExchangeShape {
            devices: 2,
            width: 256,
            rows: 64,
        };
        let table = shape.table(1, &[1 << 20, 1 << 30]);
        assert_eq!(table.len(), 8 + 16 * MAX_DEVICES);
        assert!(table.len() <= POINTER_BYTES);
        let word = |i: usize| u64::from_le_bytes(table[8 * i..][..8].try_into().unwrap());
        let flags = (1 << 20) + TABLE_BYTES as u64;
        assert_eq!([word(0), word(1), word(3)], [1, flags, 0]);
        let rows = (1 << 30) + ExchangeShape::ZEROED_BYTES as u64;
        assert_eq!(word(2 + MAX_DEVICES), rows);
        assert!(ExchangeShape::ZEROED_BYTES.is_multiple_of(256));
        assert_eq!(
            shape.bytes() - ExchangeShape::ZEROED_BYTES,
            2 * 4 * 64 * 256
        );
    }

    #[test]
    fn few_rows_take_few_blocks_and_many_rows_all() {
        let blocks = |rows| {
            let shape = ExchangeShape {
                devices: 2,
                width: 5120,
                rows: 2048,
            };
            let to = Residual { rows: 0, update: 0 };
            add(shape, rows, RowSource::Step(0), to, 0).grid[0]
        };
        assert_eq!([1, 24, 2048].map(blocks), [5, 120, 256]);
    }
}
