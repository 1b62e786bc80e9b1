//! Tasks, as `kernels/one_launch/task.cuh` has them.

use crate::launch::gemm::words::{narrow, pair};

/// Consumer warps of a block at most, as in the kernel.
pub(super) const MAX_CONSUMER_WARPS: usize = 16;
/// The words of a GEMV task that have its tiles, and from which on it counts the parts of each
/// warp.
pub(super) const GEMV_TILES_WORD: usize = 3;
pub(super) const GEMV_PARTS_WORD: usize = 4;
/// Of several rows: from which word on a task has the norm of its input.
pub(super) const NORM_WORD: usize = 20;
/// Parts of a warp in a task at most: a lane has each.
pub(super) const WARP_PARTS: usize = 32;
/// Bytes of a task.
pub(super) const TASK_BYTES: usize = 256;
/// Words of operands of a task.
pub(super) const OPERAND_WORDS: usize = 28;

/// What a task does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskKind {
    /// Tiles of packed matrices, or of gate and up.
    Gemv = 1,
    /// Rows of an f32 matrix.
    GemvF32 = 2,
    /// A value head of the gated delta rule.
    Delta = 3,
    /// Heads of queries, keys and values.
    Append = 4,
    /// A block's share of decode attention.
    Attention = 5,
    /// 256 values of the combined KV splits.
    Combine = 6,
    /// Of several rows: outputs of the delta rule, normed and gated.
    GatedNorm = 7,
}

/// Bits of [`Task::flags`].
pub(crate) mod flag {
    /// The input is an f32 row to be normed.
    pub(crate) const NORM: u32 = 1;
    /// Two matrices, gate and up.
    pub(crate) const SWIGLU: u32 = 2;
    /// The input is that of the block's task before.
    pub(crate) const KEEP_INPUT: u32 = 4;
    /// From this bit on: the warps in whose rings the task works.
    pub(crate) const WORKSPACE_SHIFT: u32 = 8;
    /// The input is made of the rows whose logits are asked for.
    pub(crate) const LOGITS_ROWS: u32 = 8;
    /// Of several rows: the input is normed in f32 too.
    pub(crate) const F32_INPUT: u32 = 16;
}

/// A part of a launch that one block does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) kind: TaskKind,
    /// The first row, head, block or group, and how many; of a packed matrix its rows.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The counter to wait for and its least value.
    pub(crate) wait: Option<(usize, usize)>,
    /// The counter to raise by 1.
    pub(crate) raise: Option<usize>,
    pub(crate) flags: u32,
    /// The number of the launch.
    pub(crate) phase: usize,
    /// Operands; [`OPERAND_WORDS`] at most.
    pub(crate) words: Vec<u64>,
    /// Bit i: word i is an offset in the exchanged rows.
    pub(crate) exchanged: u32,
    /// Of a GEMV.
    pub(crate) tiles: Vec<TaskTile>,
}

/// A tile of 16 rows of a task, or of gate and up: its sums and its rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskTile {
    /// Addresses of the factors of its rows, of each matrix.
    pub(crate) factors: [u64; 2],
    /// An address of the plan, an offset in the exchanged rows with bit 63 set, or 0. Of several
    /// rows: 1 if its rows are added to what is there.
    pub(crate) residual: u64,
    /// Where its first row goes again for later launches; 0 for nowhere. Of several rows: where it
    /// goes.
    pub(crate) copy: u64,
    /// Offset of its first row in the exchanged rows. Of several rows: values from a row of the
    /// output to the next.
    pub(crate) out: usize,
    /// The first of its sums in the task, those of the first matrix, and of both.
    pub(crate) first_sum: usize,
    pub(crate) n_first: usize,
    pub(crate) n_sums: usize,
    pub(crate) rows: usize,
}

/// A range of K of a tile of 16 rows, which one warp sums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TilePart {
    /// Address of its first unit.
    pub(crate) weights: u64,
    pub(crate) first_unit: usize,
    pub(crate) units: usize,
    /// Bytes from a unit to the next, and from a unit's first slice to its second.
    pub(crate) unit_stride: usize,
    pub(crate) second_slice: usize,
    /// Bytes of the slices of a unit; 0 for no second.
    pub(crate) slice_bytes: (usize, usize),
    pub(crate) kind: usize,
    /// Which of the task's sums.
    pub(crate) sum: usize,
}

/// What the ring of a consumer warp loads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Load {
    Part(TilePart),
    /// Nothing more before the next task that works in the ring is done.
    Workspace,
}

/// Bytes of a part in the list of the ring, and in that of the products.
pub(super) const LOAD_BYTES: usize = 32;
pub(super) const SUM_BYTES: usize = 8;
/// Bytes of a tile.
pub(super) const TILE_BYTES: usize = 48;
/// A residual is an offset in the exchanged rows.
pub(super) const RESIDUAL_EXCHANGED: u64 = 1 << 63;

fn half(n: usize) -> u64 {
    u64::from(u16::try_from(n).expect("a part has fewer than 2^16 units, and a unit bytes"))
}

impl TilePart {
    /// As the products read it.
    pub(super) fn append_sum(&self, out: &mut Vec<u8>) {
        let word = half(self.units)
            | half(self.first_unit) << 16
            | half(self.sum) << 32
            | half(self.kind) << 48;
        out.extend(word.to_le_bytes());
    }
}

impl TaskTile {
    /// As the thread of a row reads it.
    fn append(&self, out: &mut Vec<u8>) {
        let byte = |n: usize| u64::from(u8::try_from(n).expect("a tile has fewer than 256 sums"));
        let sums = half(self.first_sum) | byte(self.n_first) << 16 | byte(self.n_sums) << 24;
        let words = [
            self.factors[0],
            self.factors[1],
            self.residual,
            self.copy,
            u64::from(narrow(self.out)) | sums << 32,
            self.rows as u64,
        ];
        out.extend(words.into_iter().flat_map(u64::to_le_bytes));
    }
}

impl Load {
    /// As the ring reads it.
    pub(super) fn append(&self, out: &mut Vec<u8>) {
        let words = match self {
            Load::Part(part) => [
                part.weights,
                pair(part.unit_stride, part.second_slice),
                half(part.units)
                    | half(part.slice_bytes.0) << 16
                    | half(part.slice_bytes.1) << 32
                    | 1 << 48,
                0,
            ],
            Load::Workspace => [0, 0, 1 | 2 << 48, 0],
        };
        out.extend(words.into_iter().flat_map(u64::to_le_bytes));
    }
}

impl Task {
    /// Appends the task to `out`, and its tiles to `tiles`.
    pub(super) fn append(&self, out: &mut Vec<u8>, tiles: &mut Vec<u8>) {
        let mut words = self.words.clone();
        if self.kind == TaskKind::Gemv {
            words[GEMV_TILES_WORD] = pair(tiles.len() / TILE_BYTES, self.tiles.len());
            self.tiles.iter().for_each(|tile| tile.append(tiles));
        }
        let (wait, value) = match self.wait {
            Some((counter, value)) => (narrow(counter), narrow(value)),
            None => (u32::MAX, 0),
        };
        let header = [
            self.kind as u32,
            narrow(self.first),
            narrow(self.count),
            wait,
            value,
            self.raise.map_or(u32::MAX, narrow),
            self.flags | narrow(self.phase) << 16,
            self.exchanged,
        ];
        let end = out.len() + TASK_BYTES;
        out.extend(header.into_iter().flat_map(u32::to_le_bytes));
        out.extend(words.into_iter().flat_map(u64::to_le_bytes));
        out.resize(end, 0);
    }
}
