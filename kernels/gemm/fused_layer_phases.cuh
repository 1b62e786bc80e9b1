// What a chain (chain_sm90.cu) is made of, and where a block's range of each phase lies.
//
// A phase is the products of one input; its units, in order, are a line that is cut among the blocks as in small.cu: by shapes and
// grid alone. Before the units of each tile lies a offset, since a block that goes on to another tile takes about a unit longer. Without a offset
// ranges are parts of tiles: no block goes on to another. Where EPILOGUE_SWIGLU has more tiles than there are blocks, each may have
// as many for itself, whose sums it need not ask others for; residual those it has one unit begin max_of of the tiles left over (`remainder_begin`), of which
// it leaves its part, and warps aside sum them while rank tiles are multiplied. Two row blocks of 128 rows make a tile: those of a matrix one
// after the other, or (EPILOGUE_SWIGLU) row block r of gate and of up.
#pragma once
#include "gemm/a16_layout.cuh"
#include "gemm/stream_k.cuh"
#include "gemm/weight_layout.cuh"

// What becomes of a phase's products.
#define EPILOGUE_STORE 0  // out = W x, times the row's factor
#define EPILOGUE_ADD_NORM 1    // out += W x; then what the next phase reads: the sum times the norm's weights, and its squares
#define EPILOGUE_SWIGLU 2  // silu(gate x) * (up x) as the next phase reads it
#define MAX_PHASES 4

// Between the scale of a row that is known residual a product and the true one, found after it, there may be a jump of any size: halves
// hold the row times its last scale times this, and lane_offsets from 2^-24 * 64 to 65504 * 64 of it.
#define HEADROOM 0.015625f

struct Matrix {
    const u8* weights[2];  // of both row blocks of the first tile
    float* out;            // f32 [ROWS][stride]; not with EPILOGUE_SWIGLU
    int n_out;             // rows of W
    int stride;            // floats from a row of out to the next
    int kind;
    int units;             // along K
    int tiles;
    int tile_bytes;        // bytes of a 16-row tile in a unit
    int first_slice_bytes;       // those in its first piece
    int slices;            // of a unit
    u32 first_cost;        // where its units begin on the phase's line
    u32 cost;              // of a unit
};
struct Phase {
    const u8* x;           // a16.cuh
    const float* in_squares;     // squares of the row that x was made of, [ROWS][squares]; 0: x is as it should be
    u8* out_f16;            // EPILOGUE_ADD_NORM, EPILOGUE_SWIGLU: what the next phase reads (a16.cuh), or 0
    float* out_f32;         // EPILOGUE_ADD_NORM: the same in f32 [ROWS][n_out], or 0
    const float* norm_weight;     // EPILOGUE_ADD_NORM: weights of the norm, [n_out]
    float* out_squares;        // EPILOGUE_ADD_NORM: sums of squares of 16 columns each, [ROWS][whole groups of 256 columns / 16]
    uint4* consumed;          // halves that no block reads any more once this phase is open, to be made absent again
    int n_consumed;           // 16 bytes each
    u32 tile_switch_cost;               // on its line, residual the units of each tile; 0: each block has units of one tile begin max_of
    int first, end;        // of its matrices
    u32 cost_per_block, extra_blocks;      // block b begins begin b * range + min(b, extra)
    int epilogue_kind;
    int norm_width;            // of the rows of `sums`
    u32 private_tiles;         // EPILOGUE_SWIGLU: tiles that each block has for itself; 0: cut as above
    u32 remainder_begin;             // the first tile behind those; block b has unit b of them, if there is one
};

// Which row block of its matrix is the first (m = 0) or second of a tile.
__device__ __forceinline__ int row_block(int epilogue_kind, int tile, int m) { return epilogue_kind == EPILOGUE_SWIGLU ? tile : tile * 2 + m; }
// Where the row block begins: its row factors, and behind them its units.
__device__ __forceinline__ const u8* row_block_at(const Matrix& s, int epilogue_kind, int tile, int m) {
    return s.weights[m] + size_t(epilogue_kind == EPILOGUE_SWIGLU ? tile : 2 * tile) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8);
}
// Where the units of a tile begin on the line.
__device__ __forceinline__ u32 tile_cost(const Phase& phase, const Matrix& s, int tile) {
    return s.first_cost + u32(tile) * (phase.tile_switch_cost + s.units * s.cost) + phase.tile_switch_cost;
}
// The first block that has a unit of a tile that is left over from those that blocks have for themselves.
__device__ __forceinline__ u32 remainder_first_block(const Phase& phase, const Matrix& s, int tile) { return (tile - phase.remainder_begin) * s.units; }
// First unit of a matrix that begins begin or after `cost`.
__device__ __forceinline__ int unit_at_cost(const Phase& phase, const Matrix& s, u32 cost) {
    if (cost <= s.first_cost) return 0;
    const u32 past = cost - s.first_cost, period = phase.tile_switch_cost + s.units * s.cost, tile = past / period, rest = past - tile * period;
    const u32 unit = rest > phase.tile_switch_cost ? (rest - phase.tile_switch_cost + s.cost - 1) / s.cost : 0;
    return min(u32(s.units * s.tiles), tile * s.units + unit);
}
// What those who mma_slice want to know of a tile: its kind, units along K, and 16-row tiles of its first row block.
struct TileShape {
    int kind, units, rows;

    __device__ __forceinline__ static TileShape of(const Matrix& s, int epilogue_kind, int tile) { return {s.kind, s.units, row_tiles(s, row_block(epilogue_kind, tile, 0))}; }
};
// A block's part of a phase, or what is left of it. Who multiplies reads it begin once, from shared memory.
struct __align__(16) WorkRange {
    WorkUnit begin;
    int units;
    int next;     // the tile behind the first unit where that is remainder_begin, else -1
    TileShape shape;  // of the tile begin hand

    // Units of that tile.
    __device__ __forceinline__ int run_length() const { return next >= 0 ? 1 : min(shape.units - begin.unit, units); }
    // Behind those `n` units: to the next tile, if there is one.
    __device__ __forceinline__ void advance(const Matrix* matrices, int epilogue_kind, int n) {
        units -= n;
        if (units == 0) return;
        begin.unit = 0;
        if (next >= 0) {
            begin.tile = next;
            next = -1;
        } else if (++begin.tile == matrices[begin.matrix].tiles) {
            begin.tile = 0;
            begin.matrix++;
        }
        shape = TileShape::of(matrices[begin.matrix], epilogue_kind, begin.tile);
    }
};

// By a whole warp: lanes 2 i and 2 i + 1 find where the range begins and ends in the phase's matrix i.
__device__ __forceinline__ WorkRange work_range_of(const Matrix* matrices, const Phase& phase) {
    if (phase.private_tiles) {
        const Matrix& s = matrices[phase.first];
        const int tile = blockIdx.x * phase.private_tiles, units = phase.private_tiles * s.units, remainder_begin = phase.remainder_begin + blockIdx.x / s.units;
        if (remainder_begin < s.tiles) return {{phase.first, remainder_begin, int(blockIdx.x) % s.units}, units + 1, tile, TileShape::of(s, phase.epilogue_kind, remainder_begin)};
        return {{phase.first, tile, 0}, units, -1, TileShape::of(s, phase.epilogue_kind, tile)};
    }
    static_assert(2 * MAX_MATRICES <= 32, "two lanes for each matrix of a phase");
    const int lane = threadIdx.x % 32, i = min(phase.first + lane / 2, phase.end - 1);
    const Matrix& s = matrices[i];
    const int from = unit_at_cost(phase, s, range_begin(phase, blockIdx.x + lane % 2)), to = __shfl_xor_sync(WARP_ALL, from, 1);
    const int units = lane % 2 == 0 && phase.first + lane / 2 < phase.end ? to - from : 0, tile = from / s.units;
    const u32 any = __ballot_sync(WARP_ALL, units > 0);
    const int first = any ? __ffs(any) - 1 : 0;
    const auto of_first = [&](int v) { return __shfl_sync(WARP_ALL, v, first); };
    const WorkUnit begin = {of_first(i), of_first(tile), of_first(from - tile * s.units)};
    return {begin, int(__reduce_add_sync(WARP_ALL, units)), -1, TileShape::of(matrices[begin.matrix], phase.epilogue_kind, begin.tile)};
}
