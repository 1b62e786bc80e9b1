// How a line of units is cut among blocks. A line (`Line`: a launch of small.cu or one.cu, a stage of a chain) has `share` and `extra`:
// block b begins at b * share + min(b, extra), and every share is at least as long as the dearest unit, so that it holds the
// beginning of one. A segment of it has `first_cost`, where its units begin on the line, the `cost` of each, and `units` of each of its
// `tiles`. The cut depends on shapes and grid only, so a row's bits do not depend on the rows beside it.
#pragma once
#include "common/prelude.cuh"

// A place on a line of units.
struct Cursor {
    int segment, tile, unit;
};

template <typename Line>
__device__ __forceinline__ u32 share_begin(const Line& line, u32 block) {
    return block * line.share + min(block, line.extra);
}
// Whose share a cost lies in.
template <typename Line>
__device__ __forceinline__ u32 block_of(const Line& line, u32 cost) {
    const u32 wide = line.extra * (line.share + 1);
    return cost < wide ? cost / (line.share + 1) : line.extra + (cost - wide) / line.share;
}
// First unit of a segment that begins at or after `cost`.
template <typename Segment>
__device__ __forceinline__ int unit_at(const Segment& s, u32 cost) {
    return cost <= s.first_cost ? 0 : min(s.units * s.tiles, int((cost - s.first_cost + s.cost - 1) / s.cost));
}
// 16-row tiles of a row block of a segment's `n_out` rows.
template <typename Segment>
__device__ __forceinline__ int row_tiles(const Segment& s, int row_block) {
    return max(0, min(8, (s.n_out - row_block * 128 + 15) / 16));
}
