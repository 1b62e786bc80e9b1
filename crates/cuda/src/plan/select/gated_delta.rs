//! The gated delta rule of decode steps and of prefill chunks.

use std::ops::RangeInclusive;

use super::Selected;
use crate::gpu_props::GpuProps;
use crate::launch::gated_delta::{
    ChunkScanKernel, GatedDeltaKernel, Shape, TreeStep, wy_tree_sm90_fits,
};
use crate::numerics::Numerics;

/// Nodes of a tree for which the wgmma kernel pays: fewer do not fill its tiles, more do not fit
/// its shared memory.
const WY_SM90_NODES: RangeInclusive<usize> = 9..=32;

/// The kernel of the WY form over the trees of a step, without the output norm.
pub fn wy_tree(gpu: GpuProps, shape: Shape, step: TreeStep) -> GatedDeltaKernel {
    let one = step.trees == 1 && WY_SM90_NODES.contains(&step.rows);
    if gpu.has_wgmma && one && wy_tree_sm90_fits(gpu, shape) {
        GatedDeltaKernel::WyTreeSm90
    } else {
        GatedDeltaKernel::WyTree
    }
}

/// The kernel of a decode step.
pub fn gated_delta_decode(
    gpu: GpuProps,
    shape: Shape,
    numerics: Numerics,
    step: TreeStep,
) -> Selected<GatedDeltaKernel> {
    if step.rows == 1 {
        let reason = "one row: convolution, recurrence and output norm in one launch";
        return Selected::new(GatedDeltaKernel::RowFused, reason);
    }
    if numerics == Numerics::BatchInvariant {
        let reason = "batch-invariant numerics: node by node, the bits of single steps";
        return Selected::new(GatedDeltaKernel::RecurrentTree, reason);
    }
    let kernel = wy_tree(gpu, shape, step);
    if kernel == GatedDeltaKernel::WyTree {
        let reason = if gpu.has_wgmma {
            "several trees, or outside 9 to 32 nodes: mma reads each state once for all nodes"
        } else {
            "no wgmma: mma reads each state once for all nodes"
        };
        return Selected::new(kernel, reason);
    }
    // The norm writes pairs of heads, so the last of an odd number would be written by half.
    if shape.n_v_heads.is_multiple_of(2) {
        let reason = "one tree of 9 to 32 nodes: wgmma, the output norm in the same launch";
        Selected::new(GatedDeltaKernel::WyTreeNormSm90, reason)
    } else {
        Selected::new(kernel, "one tree of 9 to 32 nodes: wgmma")
    }
}

/// The kernel that scans the chunks of a prefill.
pub fn gated_delta_scan(gpu: GpuProps) -> Selected<ChunkScanKernel> {
    if gpu.has_wgmma {
        Selected::new(ChunkScanKernel::Sm90, "wgmma")
    } else {
        Selected::new(ChunkScanKernel::Mma, "no wgmma: warp-level mma")
    }
}

#[cfg(test)]
mod tests {
    use contract::HeadMap;

    use super::*;

    const SHAPE: Shape = Shape {
        n_k_heads: 2,
        n_v_heads: 6,
        head_map: HeadMap::Tiled,
    };
    const LARGE: GpuProps = GpuProps {
        sm_count: 132,
        shared_bytes: 227 << 10,
        has_wgmma: true,
        launches_overlap: true,
    };

    #[test]
    fn wgmma_kernel_takes_single_trees_of_9_to_32_nodes() {
        let of = |gpu, rows, trees| wy_tree(gpu, SHAPE, TreeStep { rows, trees });
        let (mma, wgmma) = (GatedDeltaKernel::WyTree, GatedDeltaKernel::WyTreeSm90);
        assert_eq!([16, 32].map(|rows| of(LARGE, rows, 1)), [wgmma; 2]);
        assert_eq!([8, 40].map(|rows| of(LARGE, rows, 1)), [mma; 2]);
        assert_eq!(of(LARGE, 24, 2), mma);
        let without_wgmma = GpuProps {
            has_wgmma: false,
            ..LARGE
        };
        let small = GpuProps {
            shared_bytes: 99 << 10,
            ..LARGE
        };
        assert_eq!([without_wgmma, small].map(|gpu| of(gpu, 24, 1)), [mma; 2]);
    }
}
