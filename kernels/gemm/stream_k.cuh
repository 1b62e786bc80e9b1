// How a schedule of units is cut among blocks. A schedule (`Schedule`: a launch of small.cu or one.cu, a stage of a chain) has `cost_per_block` and `extra_blocks`:
// block b begins at b * cost_per_block + min(b, extra_blocks), and every cost_per_block is at least as long as the dearest unit, so that it holds the
// beginning of one. A matrix of it has `first_cost`, where its units begin on the schedule, the `cost` of each, and `units` of each of its
// `tiles`. The cut depends on shapes and grid only, so a row's bits do not depend on the rows beside it.
#pragma once
#include "common/prelude.cuh"

// A place on a schedule of units.
struct WorkUnit {
    int matrix, tile, unit;
};

template <typename Schedule>
__device__ __forceinline__ u32 range_begin(const Schedule& schedule, u32 block) {
    return block * schedule.cost_per_block + min(block, schedule.extra_blocks);
}
// Whose cost_per_block a cost lies in.
template <typename Schedule>
__device__ __forceinline__ u32 block_at_cost(const Schedule& schedule, u32 cost) {
    const u32 wide = schedule.extra_blocks * (schedule.cost_per_block + 1);
    return cost < wide ? cost / (schedule.cost_per_block + 1) : schedule.extra_blocks + (cost - wide) / schedule.cost_per_block;
}
// First unit of a matrix that begins at or after `cost`.
template <typename Matrix>
__device__ __forceinline__ int unit_at_cost(const Matrix& s, u32 cost) {
    return cost <= s.first_cost ? 0 : min(s.units * s.tiles, int((cost - s.first_cost + s.cost - 1) / s.cost));
}
// 16-row tiles of a row block of a matrix's `n_out` rows.
template <typename Matrix>
__device__ __forceinline__ int row_tiles(const Matrix& s, int row_block) {
    return max(0, min(8, (s.n_out - row_block * 128 + 15) / 16));
}
