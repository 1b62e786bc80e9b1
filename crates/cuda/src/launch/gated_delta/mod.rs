//! The gated delta rule, its convolution, and its output norm.
//!
//! [`verify`] makes the launches of one layer for a step of trees, [`mod@prefill`] those for a
//! prefill chunk. [`commit`] makes the one launch that advances all layers of a group past accepted
//! paths.

use contract::{GatedDeltaSpec, HeadMap};

use super::{Args, CompileUnit, Launch};
use crate::gpu_props::GpuProps;

pub mod decode;
pub mod dfs_schedule;
pub mod gated_norm;
pub mod prefill;
pub mod recurrent;
mod wy_tree_sm90;

pub use decode::{GatedDeltaKernel, commit, verify, verify_scratch_bytes};
pub use gated_norm::{GatedDeltaRows, GatedNormOutput};
pub use prefill::{ChunkScanKernel, prefill, prefill_scratch_bytes};
pub(in crate::launch) use recurrent::recurrent_storage_bytes;
pub use wy_tree_sm90::wy_tree_sm90_fits;

/// Width of a key and of a value head.
pub const DIM: usize = 128;
/// Taps of the convolution.
pub const TAPS: usize = 4;

/// The heads of a layer. Layers of equal shape form a group, whose memory lies together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Key (and query) heads.
    pub n_k_heads: usize,
    /// Value heads.
    pub n_v_heads: usize,
    /// Which key head a value head uses.
    pub head_map: HeadMap,
}

impl Shape {
    /// The shape of a layer that `check` let through: heads 128 wide, 4 taps.
    pub fn of(spec: &GatedDeltaSpec) -> Shape {
        assert!(
            spec.k_dim == DIM && spec.v_dim == DIM && spec.conv_taps == TAPS,
            "delta heads of {} x {} and {} taps: the plan should have been refused",
            spec.k_dim,
            spec.v_dim,
            spec.conv_taps
        );
        Shape {
            n_k_heads: spec.n_k_heads,
            n_v_heads: spec.n_v_heads,
            head_map: spec.head_map,
        }
    }

    /// Channels of the convolution: q, then k, then v.
    pub fn channels(self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Values of all key heads.
    pub fn keys(self) -> usize {
        self.n_k_heads * DIM
    }

    /// Values of all value heads.
    pub fn values(self) -> usize {
        self.n_v_heads * DIM
    }

    /// Bytes of one slot's state in one layer: f32 `[n_v_heads][128 v][128 k]`.
    pub fn state_bytes(self) -> usize {
        4 * self.values() * DIM
    }

    /// Bytes of one slot's window in one layer: f32 `[3][channels]`, oldest first.
    pub fn window_bytes(self) -> usize {
        4 * (TAPS - 1) * self.channels()
    }

    /// Bytes of one slot's factors in one layer, for trees of up to `nodes` nodes. Need not be
    /// zeroed.
    pub fn factor_bytes(self, nodes: usize) -> usize {
        4 * nodes * self.node_floats()
    }

    fn node_floats(self) -> usize {
        let gates = self.n_v_heads.next_multiple_of(32);
        self.keys() + self.values() + gates + self.channels()
    }

    /// `file` with the defines that every delta kernel has.
    fn unit(self, file: &'static str) -> CompileUnit {
        assert!(
            self.n_k_heads > 0 && self.n_v_heads.is_multiple_of(self.n_k_heads),
            "{} value heads cannot share {} key heads",
            self.n_v_heads,
            self.n_k_heads
        );
        let grouped = u8::from(self.head_map == HeadMap::Grouped);
        CompileUnit::new(file)
            .define("K_HEADS", self.n_k_heads)
            .define("V_HEADS", self.n_v_heads)
            .define("GROUPED", grouped)
    }
}

/// f32 rows in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StridedRows {
    /// Address of row 0; a multiple of 16.
    pub at: u64,
    /// Floats from a row to the next; a multiple of 4 where rows are wider than 64.
    pub stride: usize,
}

/// Memory that has a piece for every slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    /// Address of slot 0's piece, 256-byte aligned.
    pub at: u64,
    /// Bytes from a slot to the next, a multiple of 256.
    pub stride: u64,
}

/// One layer's memory and vectors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layer {
    /// [`Shape::state_bytes`] a slot.
    pub state: Slots,
    /// [`Shape::window_bytes`] a slot.
    pub window: Slots,
    /// [`Shape::factor_bytes`] a slot.
    pub factors: Slots,
    /// f32 `[channels][4]`, the last tap being the current row's.
    pub conv: u64,
    /// f32 `[n_v_heads]`, negative.
    pub a: u64,
    /// f32 `[n_v_heads]`.
    pub dt: u64,
    /// f32 `[128]`.
    pub norm: u64,
    /// Epsilon of the output norm.
    pub eps: f32,
}

/// What the projections of a layer gave, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedDeltaInputs {
    /// `[rows][channels]`.
    pub qkv: StridedRows,
    /// `[rows][n_v_heads * 128]`.
    pub z: StridedRows,
    /// `[rows][n_v_heads]`, before the softplus.
    pub alpha: StridedRows,
    /// `[rows][n_v_heads]`, before the sigmoid.
    pub beta: StridedRows,
}

/// The rows of a step and the trees that share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeStep {
    /// Rows, padding included.
    pub rows: usize,
    /// Trees.
    pub trees: usize,
}

/// One layer of a decode step.
#[derive(Debug, Clone, Copy)]
pub struct TreeLaunch<'a> {
    /// The hardware.
    pub gpu: GpuProps,
    /// Heads of the layer.
    pub shape: Shape,
    /// Rows and trees.
    pub size: TreeStep,
    /// Address of the `Step`.
    pub step: u64,
    /// States and vectors.
    pub layer: &'a Layer,
    /// Projections.
    pub inputs: &'a GatedDeltaInputs,
}

/// One layer of a prefill chunk.
#[derive(Debug, Clone, Copy)]
pub struct ChunkLaunch<'a> {
    /// Heads of the layer.
    pub shape: Shape,
    /// Maximum rows of the chunk.
    pub rows: usize,
    /// Address of the `Chunk`.
    pub chunk: u64,
    /// States and vectors.
    pub layer: &'a Layer,
    /// Projections.
    pub inputs: &'a GatedDeltaInputs,
}

/// All layers of one shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Layers of the group.
    pub layers: usize,
    /// Layer 0's memory.
    pub state: Slots,
    /// Layer 0's memory.
    pub window: Slots,
    /// Layer 0's memory.
    pub factors: Slots,
    /// Bytes from a layer to the next within `state`, `window` and `factors`.
    pub layer_strides: [u64; 3],
}

fn dim(n: usize) -> u32 {
    u32::try_from(n).expect("grids are bounded by heads, layers and rows")
}

fn row_args(args: Args, rows: StridedRows) -> Args {
    args.ptr(rows.at).u32(dim(rows.stride))
}

fn slot_args(args: Args, slots: Slots) -> Args {
    args.ptr(slots.at).u64(slots.stride)
}

/// What convolution and gates are made from, in the order in which every kernel that makes them for
/// several rows takes it.
fn conv_args(header: u64, layer: &Layer, inputs: &GatedDeltaInputs) -> Args {
    let args = row_args(Args::new().ptr(header), inputs.qkv);
    let args = row_args(row_args(args, inputs.alpha), inputs.beta);
    let args = slot_args(args, layer.window);
    args.ptr(layer.conv).ptr(layer.a).ptr(layer.dt)
}

/// A launch of `block` threads a block, one `extern "C"` entry per unit.
fn launch(
    entry: &'static str,
    unit: CompileUnit,
    grid: [usize; 3],
    block: u32,
    args: Args,
) -> Launch {
    Launch {
        entry,
        unit,
        grid: grid.map(dim),
        block: [block, 1, 1],
        shared: 0,
        args,
        cooperative: false,
        overlap: true,
    }
}
