//! The all-reduce of a tensor split.

use std::time::Duration;

use super::gemm::fused_layer::MAX_ROWS;
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
/// Where `struct FragmentExchange` of each sum of a fused layer stand, and their bytes.
const FRAGMENT_TABLES: usize = 8 + 16 * MAX_DEVICES;
const FRAGMENT_TABLE_BYTES: usize = 24;
/// Loads by which a thread polls for a fragment in a millisecond.
const SPINS_PER_MS: u64 = 1_678;
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
    /// Bytes that must be zero before the first launch: pointers, epochs, flags and the places of
    /// fragments.
    pub fn zeroed_bytes(self) -> usize {
        TABLE_BYTES + FLAG_BYTES + 2 * self.fragment_bytes()
    }

    /// Bytes of the places of a fused layer's sum: those of 16 columns and 8 rows, 16 bytes a lane.
    fn fragment_bytes(self) -> usize {
        self.width.div_ceil(16) * MAX_ROWS.div_ceil(8) * 32 * 16
    }

    /// The two `FragmentExchange` of a fused layer, in an exchange at `at`.
    pub fn fragments(self, at: u64) -> [u64; 2] {
        [0, 1].map(|sum| at + (FRAGMENT_TABLES + sum * FRAGMENT_TABLE_BYTES) as u64)
    }

    /// Values of the rows of one sender.
    fn capacity(self) -> usize {
        self.rows * self.width
    }

    /// Bytes of a device's exchange.
    pub fn bytes(self) -> usize {
        self.zeroed_bytes() + 2 * (self.devices - 1) * 4 * self.capacity()
    }

    /// The pointers of shard `rank`, whose device and whose peers have their exchanges at these
    /// addresses, in device order, and how long it waits for a peer at most. They go to the
    /// beginning of its exchange.
    pub fn table(self, rank: usize, exchanges: &[u64], watchdog: Duration) -> Vec<u8> {
        let ms = u64::try_from(watchdog.as_millis()).unwrap_or(u64::MAX);
        let with_rank = |limit: u64| rank as u64 | (limit.clamp(1, u64::from(u32::MAX)) << 32);
        let pad = |offset: usize| {
            let at = exchanges.iter().map(move |at| at + offset as u64);
            at.chain(std::iter::repeat(0)).take(MAX_DEVICES)
        };
        let flags = pad(TABLE_BYTES);
        let rows = pad(self.zeroed_bytes());
        // Two shards exchange fragments.
        let other = usize::from(rank == 0);
        let fragments = [0, 1].into_iter().flat_map(|sum| {
            let offset = (TABLE_BYTES + FLAG_BYTES + sum * self.fragment_bytes()) as u64;
            let [own, of_other] = [rank, other].map(|shard| exchanges[shard] + offset);
            [own, of_other, with_rank(ms.saturating_mul(SPINS_PER_MS))]
        });
        let words = std::iter::once(with_rank(ms)).chain(flags).chain(rows);
        let words = words.chain(fragments);
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

/// The sum of the partial sums of all devices in place of this device's at `partial`, f32
/// `[rows][width]`: as [`add`], for a norm in between.
///
/// # Panics
/// As [`add`].
pub fn sum(
    shape: ExchangeShape,
    rows: usize,
    source: RowSource,
    partial: u64,
    exchange: u64,
) -> Launch {
    let in_place = Residual {
        rows: partial,
        update: partial,
    };
    let launch = add(shape, rows, source, in_place, exchange);
    Launch {
        unit: launch.unit.define("STORE", 1),
        ..launch
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
        let table = shape.table(1, &[1 << 20, 1 << 30], Duration::from_millis(5));
        assert_eq!(table.len(), FRAGMENT_TABLES + 2 * FRAGMENT_TABLE_BYTES);
        assert!(table.len() <= POINTER_BYTES);
        let word = |i: usize| u64::from_le_bytes(table[8 * i..][..8].try_into().unwrap());
        let flags = (1 << 20) + TABLE_BYTES as u64;
        assert_eq!([word(0), word(1), word(3)], [1 | 5 << 32, flags, 0]);
        let rows = (1 << 30) + shape.zeroed_bytes() as u64;
        assert_eq!(word(2 + MAX_DEVICES), rows);
        // The first sum: received here, sent there.
        let fragments = (TABLE_BYTES + FLAG_BYTES) as u64;
        let at = FRAGMENT_TABLES / 8;
        let spins = 5 * SPINS_PER_MS;
        let ends = [
            (1 << 30) + fragments,
            (1 << 20) + fragments,
            1 | spins << 32,
        ];
        assert_eq!([0, 1, 2].map(|i| word(at + i)), ends);
        assert_eq!(word(at + 3) - word(at), 16 * 8 * 32 * 16);
        assert_eq!(shape.fragments(0)[0], FRAGMENT_TABLES as u64);
        assert!(shape.zeroed_bytes().is_multiple_of(256));
        assert_eq!(shape.bytes() - shape.zeroed_bytes(), 2 * 4 * 64 * 256);
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
