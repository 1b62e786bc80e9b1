// Parameters of the fused layer (fused_layer_sm90.cu), and each block's work range of a phase.
//
// A phase is the GEMMs of one input. Its iteration space is distributed over the blocks by shapes and grid only
// (stream_k.cuh). It has `tile_switch_cost` before the units of each tile, because a block that switches tiles takes
// about one unit longer. If it is 0, each block has units of one tile only.
// If EPILOGUE_SWIGLU has more tiles than there are blocks, each block may own `data_parallel_tiles` whole tiles, which
// need no reduction. Before those it has at most one unit of the stream-K tiles and publishes its partial tile. The
// auxiliary warps reduce the partial tiles while data-parallel tiles are multiplied.
// A tile is two row blocks of 128 rows: consecutive ones of a matrix, or (EPILOGUE_SWIGLU) the same row block of gate
// and of up.
#pragma once
#include "gemm/a16_layout.cuh"
#include "gemm/stream_k.cuh"
#include "gemm/weight_layout.cuh"

// Epilogues.
#define EPILOGUE_STORE 0  // out = W x, times the row's correction
// out += W x; then input of the next phase: the sum times the norm's weights, and its squares
#define EPILOGUE_ADD_NORM 1
#define EPILOGUE_SWIGLU 2  // silu(gate x) * (up x), input of the next phase
#define MAX_PHASES 4

// The scale known before a GEMM and the true scale found after it may differ by any factor. f16 activations hold the
// row times its last scale times this, so they cover 2^-24 * 64 to 65504 * 64 of it.
#define HEADROOM 0.015625f

struct Matrix {
    const u8* weights[2];  // both row blocks of the first tile
    float* out;            // f32 [ROWS][stride]; not with EPILOGUE_SWIGLU
    int n_out;             // rows of W
    int stride;            // floats from a row of out to the next
    int kind;
    int units;  // along K
    int tiles;
    int tile_bytes;         // of an m16 tile in a unit
    int first_slice_bytes;  // of an m16 tile in the first slice of a unit
    int slices;             // per unit
    u32 first_cost;         // where its units begin in the iteration space
    u32 cost;               // of a unit
};
#ifdef EXCHANGE
// An end of the exchange of partial sums with the other shard of a tensor split (EPILOGUE_ADD_NORM). Every fragment of
// 16 columns and 8 rows has a place of its own, which shows by itself that it was written (ready flags). A place is
// free again when the other shard comes to it: all sums of a phase are read before the next such phase begins. A shard
// that finds no fragment in `watchdog_spins` loads ends the launch with a trap.
struct FragmentExchange {
    float4* received;  // in this device's memory, written by the other: [columns / 16][N8_TILES][32], +0 between phases
    float4* sent;      // the same in the other device's memory
    int rank;
    u32 watchdog_spins;
};
#endif
struct Phase {
    const u8* x;               // a16_layout.cuh
    const float* in_squares;   // [ROWS][groups]: squares of the row that x was made of; 0: x needs no correction
    u8* out_f16;               // EPILOGUE_ADD_NORM, EPILOGUE_SWIGLU: input of the next phase (a16_layout.cuh), or 0
    float* out_f32;            // EPILOGUE_ADD_NORM: the same in f32 [ROWS][n_out], or 0
    const float* norm_weight;  // EPILOGUE_ADD_NORM: weight of the norm, [n_out]
    float* out_squares;        // EPILOGUE_ADD_NORM: sums of squares of 16 columns, [ROWS][n_out padded to 256, / 16]
    uint4* consumed;           // activations that no block reads once this phase is open, to be cleared
    int n_consumed;            // in 16 bytes
    u32 tile_switch_cost;      // before the units of each tile; 0: each block has units of one tile at most
    int first, end;            // matrices of the phase
    u32 cost_per_block, big_blocks;  // block b begins at b * cost_per_block + min(b, big_blocks)
    int epilogue_kind;
    int norm_width;           // columns of the rows of in_squares
    u32 data_parallel_tiles;  // EPILOGUE_SWIGLU: whole tiles per block; 0: none
    u32 stream_k_begin;       // first tile after the data-parallel ones; block b has unit b of them, if there is one
#ifdef EXCHANGE
    const FragmentExchange* exchange;  // EPILOGUE_ADD_NORM
#endif
};

// Row block of the matrix that is the first (m = 0) or second of a tile.
__device__ __forceinline__ int row_block(int epilogue_kind, int tile, int m) {
    return epilogue_kind == EPILOGUE_SWIGLU ? tile : tile * 2 + m;
}
// Start of a row block: its row factors, then its units.
__device__ __forceinline__ const u8* row_block_at(const Matrix& s, int epilogue_kind, int tile, int m) {
    return s.weights[m] +
           size_t(epilogue_kind == EPILOGUE_SWIGLU ? tile : 2 * tile) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8);
}
// Where the units of a tile begin in the iteration space.
__device__ __forceinline__ u32 tile_cost(const Phase& phase, const Matrix& s, int tile) {
    return s.first_cost + u32(tile) * (phase.tile_switch_cost + s.units * s.cost) + phase.tile_switch_cost;
}
// The first block that has a unit of a stream-K tile.
__device__ __forceinline__ u32 stream_k_first_block(const Phase& phase, const Matrix& s, int tile) {
    return (tile - phase.stream_k_begin) * s.units;
}
// First unit of a matrix that begins at or after `cost`.
__device__ __forceinline__ int unit_at_cost(const Phase& phase, const Matrix& s, u32 cost) {
    if (cost <= s.first_cost) return 0;
    const u32 past = cost - s.first_cost, period = phase.tile_switch_cost + s.units * s.cost, tile = past / period,
              rest = past - tile * period;
    const u32 unit = rest > phase.tile_switch_cost ? (rest - phase.tile_switch_cost + s.cost - 1) / s.cost : 0;
    return min(u32(s.units * s.tiles), tile * s.units + unit);
}
// What math warps need of a tile: kind, units along K, and m16 tiles of its first row block.
struct TileShape {
    int kind, units, rows;

    __device__ __forceinline__ static TileShape of(const Matrix& s, int epilogue_kind, int tile) {
        return {s.kind, s.units, row_tiles(s, row_block(epilogue_kind, tile, 0))};
    }
};
// A block's part of a phase, or what is left of it; in shared memory for the math warps.
struct __align__(16) WorkRange {
    WorkPosition begin;
    int units;
    int next;         // data-parallel tile after the stream-K unit, -1 if the first unit is no remainder
    TileShape shape;  // of the current tile

    // Units of the current tile.
    __device__ __forceinline__ int run_length() const { return next >= 0 ? 1 : min(shape.units - begin.unit, units); }
    // Past those `n` units, to the next tile if there is one.
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

// By a whole warp: lanes 2 i and 2 i + 1 find begin and end of the range in the phase's matrix i.
__device__ __forceinline__ WorkRange work_range_of(const Matrix* matrices, const Phase& phase) {
    if (phase.data_parallel_tiles) {
        const Matrix& s = matrices[phase.first];
        const int tile = blockIdx.x * phase.data_parallel_tiles, units = phase.data_parallel_tiles * s.units,
                  stream_k_begin = phase.stream_k_begin + blockIdx.x / s.units;
        if (stream_k_begin < s.tiles)
            return {{phase.first, stream_k_begin, int(blockIdx.x) % s.units},
                    units + 1,
                    tile,
                    TileShape::of(s, phase.epilogue_kind, stream_k_begin)};
        return {{phase.first, tile, 0}, units, -1, TileShape::of(s, phase.epilogue_kind, tile)};
    }
    static_assert(2 * MAX_MATRICES <= 32, "two lanes for each matrix of a phase");
    const int lane = threadIdx.x % 32, i = min(phase.first + lane / 2, phase.end - 1);
    const Matrix& s = matrices[i];
    const int from = unit_at_cost(phase, s, range_begin(phase, blockIdx.x + lane % 2)),
              to = __shfl_xor_sync(WARP_ALL, from, 1);
    const int units = lane % 2 == 0 && phase.first + lane / 2 < phase.end ? to - from : 0, tile = from / s.units;
    const u32 any = __ballot_sync(WARP_ALL, units > 0);
    const int first = any ? __ffs(any) - 1 : 0;
    const auto of_first = [&](int v) { return __shfl_sync(WARP_ALL, v, first); };
    const WorkPosition begin = {of_first(i), of_first(tile), of_first(from - tile * s.units)};
    return {begin, int(__reduce_add_sync(WARP_ALL, units)), -1,
            TileShape::of(matrices[begin.matrix], phase.epilogue_kind, begin.tile)};
}
