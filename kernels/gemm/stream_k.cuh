// Stream-K partition of the iteration space (the units of all tiles of all matrices, in order) among blocks.
//
// A `Schedule` is a launch of decode_gemm_small_batch or gemv, or a phase of fused_layer_sm90. It has `cost_per_block`
// and `big_blocks`: block b begins at b * cost_per_block + min(b, big_blocks). Every range is at least as long as the
// costliest unit, so it holds the beginning of one. A matrix has `first_cost` (where its units begin), the `cost` of
// each, and `units` per each of its `tiles`. The partition depends on shapes and grid only: batch-invariant.
#pragma once
#include "common/prelude.cuh"

// A position in the iteration space.
struct WorkPosition {
    int matrix, tile, unit;
};

template <typename Schedule>
__device__ __forceinline__ u32 range_begin(const Schedule& schedule, u32 block) {
    return block * schedule.cost_per_block + min(block, schedule.big_blocks);
}
// The block whose range contains a cost.
template <typename Schedule>
__device__ __forceinline__ u32 block_at_cost(const Schedule& schedule, u32 cost) {
    const u32 wide = schedule.big_blocks * (schedule.cost_per_block + 1);
    return cost < wide ? cost / (schedule.cost_per_block + 1)
                       : schedule.big_blocks + (cost - wide) / schedule.cost_per_block;
}
// First unit of a matrix that begins at or after `cost`.
template <typename Matrix>
__device__ __forceinline__ int unit_at_cost(const Matrix& s, u32 cost) {
    return cost <= s.first_cost ? 0 : min(s.units * s.tiles, int((cost - s.first_cost + s.cost - 1) / s.cost));
}
// m16 tiles of a row block of a matrix's `n_out` rows.
template <typename Matrix>
__device__ __forceinline__ int row_tiles(const Matrix& s, int row_block) {
    return max(0, min(8, (s.n_out - row_block * 128 + 15) / 16));
}
