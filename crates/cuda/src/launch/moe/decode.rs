//! A step's mixture of experts in three launches: routing, gate and up, down with the sum.
//!
//! A row's result has the same bits whatever shares the step.

use super::{ExpertMatrices, ExpertSum, MoeShape, Router, ring_bytes, step_bytes};
use crate::gpu_props::GpuProps;
use crate::launch::norm::{self, RowSource};
use crate::launch::{Args, CompileUnit, Launch};
use crate::memory::BumpAllocator;
use crate::pack::M16_ROWS;

/// Rows of one expert that a block multiplies together.
pub const EXPERT_ROWS: usize = 8;
/// Bytes of an entry of the list of chosen experts.
const ENTRY_BYTES: usize = 48;
/// Most warps of a norm that the router computes itself.
const NORM_WARPS: usize = 8;
/// Steps in a warp's ring of `decode_down.cu`, and its most warps.
const STAGES: usize = 2;
const MAX_WARPS: usize = 16;

/// The rows of a step and its mixture of experts.
#[derive(Debug, Clone, Copy)]
pub struct DecodeMoe {
    /// Sizes.
    pub shape: MoeShape,
    /// Bucket of rows, 1 to 64.
    pub rows: usize,
    /// The header with the true number of rows.
    pub source: RowSource,
    /// [`DecodeMoe::scratch_bytes`] at a multiple of 256.
    pub scratch: u64,
}

/// The rows that a router reads.
#[derive(Debug, Clone, Copy)]
pub enum RouteInput {
    /// f32 `[rows][width]` after the norm.
    Normed(u64),
    /// One row before its norm.
    Residual {
        /// f32 `[width]`.
        x: u64,
        /// The norm's weight, f32 `[width]`.
        weight: u64,
        /// Added to the mean square.
        eps: f32,
        /// Where the row after its norm goes, as [`crate::pack::ActivationFormat::F16`].
        normed: u64,
    },
}

/// Addresses of the parts of the scratch.
struct DecodeParts {
    work: [u64; 4],
    logits: u64,
    h: u64,
    shared_h: u64,
}

impl DecodeMoe {
    /// Bytes of the scratch, which needs no content.
    pub fn scratch_bytes(shape: MoeShape, rows: usize) -> usize {
        parts(shape, rows, 0).1
    }

    fn parts(&self) -> DecodeParts {
        parts(self.shape, self.rows, self.scratch).0
    }

    fn unit(&self, file: &'static str) -> CompileUnit {
        assert!(
            (1..=64).contains(&self.rows),
            "a bucket of {} rows",
            self.rows
        );
        self.shape.check();
        let unit = CompileUnit::new(file)
            .define("SOURCE", self.source.number())
            .define("ROWS", self.rows);
        self.shape.define(unit)
    }

    /// Most groups of up to [`EXPERT_ROWS`] rows, with those of the shared expert.
    fn max_items(&self) -> usize {
        let shared = usize::from(self.shape.has_shared());
        self.max_entries() + shared * self.rows.div_ceil(EXPERT_ROWS)
    }

    fn max_entries(&self) -> usize {
        self.shape.max_groups(self.rows, EXPERT_ROWS)
    }

    /// Whether [`DecodeMoe::route`] takes a row before its norm.
    pub fn takes_norm(&self) -> bool {
        self.rows == 1 && norm::warps(self.shape.width) <= NORM_WARPS
    }

    /// Computes the router's logits, chooses the experts of each row and lists them; in a step of
    /// one row, the launches behind it choose. `counter` is the address of a zero, which is zero
    /// again afterwards.
    ///
    /// # Panics
    /// If the input has a norm and the step does not [take it](DecodeMoe::takes_norm).
    pub fn route(&self, input: RouteInput, router: Router, counter: u64) -> Launch {
        let parts = self.parts();
        let outputs = self.shape.n_experts + usize::from(self.shape.has_shared());
        let (y, weight, eps, out, warps) = match input {
            RouteInput::Normed(y) => (y, 0, 0.0, 0, 0),
            RouteInput::Residual {
                x,
                weight,
                eps,
                normed,
            } => {
                assert!(self.takes_norm(), "a router with the norm of {self:?}");
                (x, weight, eps, normed, norm::warps(self.shape.width))
            }
        };
        Launch {
            entry: "moe_route",
            unit: self.unit("moe/route.cu").define("NORM_WARPS", warps),
            grid: [outputs.div_ceil(2) as u32, 1, 1],
            block: [256, 1, 1],
            shared: 0,
            args: Args::new()
                .ptr(self.source.header())
                .ptr(y)
                .ptr(router.weight)
                .ptr(router.shared_gate)
                .f32(router.scale)
                .ptr(parts.logits)
                .words(&parts.work)
                .ptr(counter)
                .ptr(weight)
                .f32(eps)
                .ptr(out),
            cooperative: false,
            overlap: true,
        }
    }

    /// Gate, up and the gated unit of every chosen expert and of the shared one. `x` is the address
    /// of the rows as [`crate::pack::ActivationFormat::F16`], `scale` the router's.
    ///
    /// # Panics
    /// If `shared` and the shape disagree about a shared expert.
    pub fn gate_up(
        &self,
        (x, scale): (u64, f32),
        experts: ExpertMatrices,
        shared: Option<ExpertMatrices>,
    ) -> Launch {
        let (shape, parts) = (self.shape, self.parts());
        assert_eq!(shared.is_some(), shape.has_shared());
        let of_shared = shared.unwrap_or(experts);
        let shared_ffn = shape.shared_ffn.unwrap_or(0);
        let kinds = [experts.gate, experts.up, of_shared.gate, of_shared.up].map(|m| m.kind);
        let mut words = parts.work.to_vec();
        words.push(x);
        for (matrix, rows) in [
            (experts.gate, shape.ffn),
            (experts.up, shape.ffn),
            (of_shared.gate, shared_ffn),
            (of_shared.up, shared_ffn),
        ] {
            words.extend(matrix.words(rows, shape.width));
        }
        words.extend([parts.h, parts.shared_h, parts.logits]);
        words.push(u64::from(scale.to_bits()));
        words.extend([
            experts.addresses(),
            experts.table.map_or(0, |table| table.uses),
        ]);
        let warp = kinds.map(|kind| step_bytes(kind, 2, self.rows));
        let unit = self
            .unit("moe/decode_gate_up.cu")
            .define("MAX_ENTRIES", self.max_entries());
        Launch {
            entry: "moe_gate_up",
            unit: experts
                .define(unit)
                .define("GATE_KIND", kinds[0] as u32)
                .define("UP_KIND", kinds[1] as u32)
                .define("SHARED_GATE_KIND", kinds[2] as u32)
                .define("SHARED_UP_KIND", kinds[3] as u32),
            grid: [
                (shape.ffn.max(shared_ffn) / M16_ROWS) as u32,
                self.max_items() as u32,
                1,
            ],
            block: [256, 1, 1],
            shared: (8 * warp.into_iter().max().unwrap_or(0)) as u32,
            args: Args::new().ptr(self.source.header()).words(&words),
            cooperative: false,
            overlap: true,
        }
    }

    /// The sum of each row's experts. `scale` is the router's.
    ///
    /// # Panics
    /// As [`DecodeMoe::gate_up`].
    pub fn down(
        &self,
        gpu: GpuProps,
        experts: ExpertMatrices,
        shared: Option<ExpertMatrices>,
        (out, scale): (ExpertSum, f32),
    ) -> Launch {
        let (shape, parts) = (self.shape, self.parts());
        assert_eq!(shared.is_some(), shape.has_shared());
        let of_shared = shared.unwrap_or(experts).down;
        let kinds = [experts.down.kind, of_shared.kind];
        let mut words = parts.work.to_vec();
        words.extend([parts.h, parts.shared_h]);
        words.extend(experts.down.words(shape.width, shape.ffn));
        words.extend(of_shared.words(shape.width, shape.shared_ffn.unwrap_or(0)));
        words.extend([out.address(), parts.logits, u64::from(scale.to_bits())]);
        words.push(experts.addresses());
        let products = self.rows * (shape.n_used + usize::from(shape.has_shared())) * 64;
        let stage = kinds.map(|kind| step_bytes(kind, 1, self.rows));
        let warp = STAGES * stage.into_iter().max().unwrap_or(1);
        let room = ring_bytes(gpu, products + self.max_entries() * ENTRY_BYTES);
        let warps = (room / warp).clamp(1, MAX_WARPS.min(self.max_items()));
        let unit = self
            .unit("moe/decode_down.cu")
            .define("MAX_ENTRIES", self.max_entries());
        Launch {
            entry: "moe_down",
            unit: out
                .define(experts.define(unit))
                .define("DOWN_KIND", kinds[0] as u32)
                .define("SHARED_DOWN_KIND", kinds[1] as u32)
                .define("WARPS", warps),
            grid: [(shape.width / M16_ROWS) as u32, 1, 1],
            block: [32 * warps as u32, 1, 1],
            shared: (products + warps * warp) as u32,
            args: Args::new().ptr(self.source.header()).words(&words),
            cooperative: false,
            overlap: true,
        }
    }
}

/// The parts, and their bytes.
fn parts(shape: MoeShape, rows: usize, scratch: u64) -> (DecodeParts, usize) {
    let mut arena = BumpAllocator::new(scratch);
    let mut take = |bytes: usize| arena.take(bytes);
    let pairs = rows * shape.n_used;
    let work = [
        take(4),
        take(shape.max_groups(rows, EXPERT_ROWS) * ENTRY_BYTES),
        take(8 * pairs),
        take(4 * rows),
    ];
    let logits = take(4 * rows * (shape.n_experts + 1));
    let parts = DecodeParts {
        work,
        logits,
        h: take(2 * pairs * shape.ffn),
        shared_h: take(2 * rows * shape.shared_ffn.unwrap_or(0)),
    };
    (parts, arena.used() as usize)
}
