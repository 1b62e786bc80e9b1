//! The experts of a prompt's chunk: choice, grouping, products by expert, and the sum.
//!
//! The router's logits and the shared expert are products like others of a chunk. Every result of
//! a row has the same bits however a prompt is cut into chunks.

use super::{ExpertMatrices, ExpertMatrix, ExpertSum, MoeShape, Router, ring_bytes};
use crate::gpu_props::GpuProps;
use crate::launch::gemm::panels::{ChunkRows, Panels, int};
use crate::launch::{Args, CompileUnit, Launch};
use crate::memory::BumpAllocator;
use crate::pack::{A16_TILE, BLOCK_ROWS};

/// Rows of one expert that a block multiplies together.
const TILE_ROWS: usize = 64;
/// Most stages of the ring of `prefill_experts.cu`.
const MAX_STAGES: usize = 4;
/// Its shared memory beside the ring: scales, and the rows of a tile.
const OTHER_SHARED: usize = (8 << 10) + 256;

/// A chunk and its mixture of experts.
#[derive(Debug, Clone, Copy)]
pub struct PrefillMoe {
    /// Sizes.
    pub shape: MoeShape,
    /// The rows.
    pub chunk: ChunkRows,
    /// [`PrefillMoe::scratch_bytes`] at a multiple of 256.
    pub scratch: u64,
}

/// Addresses of the parts of the scratch.
struct PrefillParts {
    work: [u64; 3],
    choices: u64,
    shared_factor: u64,
    h: u64,
    products: u64,
}

impl PrefillMoe {
    /// Bytes of the scratch for chunks of up to `rows` rows. It needs no content.
    pub fn scratch_bytes(shape: MoeShape, rows: usize) -> usize {
        parts(shape, rows, 0).1
    }

    fn parts(&self) -> PrefillParts {
        parts(self.shape, self.chunk.rows, self.scratch).0
    }

    /// Chooses the experts of each row from its logits, f32 `[rows][n_experts]`, and groups the
    /// rows by expert. `y` is f32 `[rows][width]`.
    pub fn choose(&self, logits: u64, y: u64, router: Router) -> [Launch; 2] {
        self.shape.check();
        let parts = self.parts();
        let unit = self.shape.define(CompileUnit::new("moe/prefill_choose.cu"));
        let launch = |entry, grid, threads, args| Launch {
            entry,
            unit: unit.clone(),
            grid: [grid, 1, 1],
            block: [threads, 1, 1],
            shared: 0,
            args,
            cooperative: false,
            overlap: false,
        };
        let choose = Args::new()
            .ptr(self.chunk.header)
            .ptr(logits)
            .ptr(y)
            .ptr(router.shared_gate)
            .f32(router.scale)
            .ptr(parts.choices)
            .ptr(parts.shared_factor);
        let group = Args::new()
            .ptr(self.chunk.header)
            .ptr(parts.choices)
            .words(&parts.work);
        let blocks = self.chunk.rows.div_ceil(8) as u32;
        [
            launch("moe_choose", blocks, 256, choose),
            launch("moe_group", 1, 1024, group),
        ]
    }

    /// Gate, up and the gated unit, then down, of every expert's rows. `x` is the address of
    /// panels.
    pub fn experts(&self, gpu: GpuProps, x: u64, experts: ExpertMatrices) -> [Launch; 2] {
        let (shape, parts) = (self.shape, self.parts());
        let ExpertMatrices { gate, up, down, .. } = experts;
        let gate_up = Products {
            entry: "moe_prefill_gate_up",
            x,
            matrices: [gate, up],
            rows: shape.ffn,
            cols: shape.width,
            width: shape.ffn,
            columns: BLOCK_ROWS,
            out: parts.h,
        };
        let down = Products {
            entry: "moe_prefill_down",
            x: parts.h,
            matrices: [down, down],
            rows: shape.width,
            cols: shape.ffn,
            width: shape.width,
            columns: 2 * BLOCK_ROWS,
            out: parts.products,
        };
        [gate_up, down].map(|products| self.products(gpu, products, (experts, parts.work)))
    }

    fn products(
        &self,
        gpu: GpuProps,
        products: Products,
        (experts, work): (ExpertMatrices, [u64; 3]),
    ) -> Launch {
        let [first, second] = products.matrices;
        let tiles = if first.kind == second.kind { 2 } else { 1 };
        let stage = products.matrices.map(|matrix| {
            let kind = matrix.kind;
            tiles * 8 * kind.slice_bytes()[0] + kind.slices() * TILE_ROWS / 8 * A16_TILE
        });
        let stage = stage.into_iter().max().unwrap_or(1);
        let stages = (ring_bytes(gpu, OTHER_SHARED) / stage).clamp(2, MAX_STAGES);
        let mut words = work.to_vec();
        words.push(products.x);
        words.extend(first.words(products.rows, products.cols));
        words.extend(second.words(products.rows, products.cols));
        let rows_cap = Panels::new(0, self.chunk.rows).rows as u64;
        words.extend([rows_cap | (products.width as u64) << 32, products.out]);
        words.push(experts.addresses());
        let max_tiles = self.shape.max_groups(self.chunk.rows, TILE_ROWS);
        Launch {
            entry: products.entry,
            unit: experts
                .define(CompileUnit::new("moe/prefill_experts.cu"))
                .define("DOWN", u8::from(products.entry == "moe_prefill_down"))
                .define("USED", self.shape.n_used)
                .define("FIRST_KIND", first.kind as u32)
                .define("SECOND_KIND", second.kind as u32)
                .define("STAGES", stages),
            grid: [
                products.width.div_ceil(products.columns) as u32,
                max_tiles as u32,
                1,
            ],
            block: [256, 1, 1],
            shared: int(stages * stage).cast_unsigned(),
            args: Args::new().words(&words),
            cooperative: false,
            overlap: false,
        }
    }

    /// The sum of each row's experts; `shared` is the output of the shared expert, f32
    /// `[rows][width]`, or 0 without one.
    pub fn combine(&self, shared: u64, out: ExpertSum) -> Launch {
        let parts = self.parts();
        assert_eq!(shared != 0, self.shape.has_shared());
        Launch {
            entry: "moe_prefill_combine",
            unit: out.define(
                self.shape
                    .define(CompileUnit::new("moe/prefill_combine.cu")),
            ),
            grid: [self.chunk.rows as u32, 1, 1],
            block: [256, 1, 1],
            shared: 0,
            args: Args::new()
                .ptr(self.chunk.header)
                .ptr(parts.choices)
                .ptr(parts.products)
                .ptr(shared)
                .ptr(parts.shared_factor)
                .ptr(out.address()),
            cooperative: false,
            overlap: false,
        }
    }
}

/// Products of grouped rows with two row blocks of weights at a time.
struct Products {
    entry: &'static str,
    x: u64,
    matrices: [ExpertMatrix; 2],
    /// Rows and columns of an expert's matrix.
    rows: usize,
    cols: usize,
    /// Values of a row of the output.
    width: usize,
    /// Values of it that a block computes.
    columns: usize,
    out: u64,
}

/// The parts, and their bytes.
fn parts(shape: MoeShape, rows: usize, scratch: u64) -> (PrefillParts, usize) {
    let mut arena = BumpAllocator::new(scratch);
    let mut take = |bytes: usize| arena.take(bytes);
    let pairs = rows * shape.n_used;
    let work = [
        take(4),
        take(16 * shape.max_groups(rows, TILE_ROWS)),
        take(4 * pairs),
    ];
    let parts = PrefillParts {
        work,
        choices: take(8 * pairs),
        shared_factor: take(4 * rows),
        h: take(2 * pairs * shape.ffn),
        products: take(4 * pairs * shape.width),
    };
    (parts, arena.used() as usize)
}
