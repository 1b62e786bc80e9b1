// What a chain (chain_sm90.cu) is made of, and where a block's share of each stage lies.
//
// A stage is the products of one input; its units, in order, are a line that is cut among the blocks as in small.cu: by shapes and
// grid alone. Before the units of each tile lies a gap, since a block that goes on to another tile takes about a unit longer. Without a gap
// shares are parts of tiles: no block goes on to another. Where GATED has more tiles than there are blocks, each may have
// as many for itself, whose sums it need not ask others for; before those it has one unit at most of the tiles left over (`loose`), of which
// it leaves its part, and warps aside sum them while own tiles are multiplied. Two row blocks of 128 rows make a tile: those of a matrix one
// after the other, or (GATED) row block r of gate and of up.
#pragma once
#include "matmul/a16.cuh"
#include "matmul/cut.cuh"
#include "matmul/layout.cuh"

// What becomes of a stage's products.
#define STORE 0  // out = W x, times the row's factor
#define ADD 1    // out += W x; then what the next stage reads: the sum times the norm's weights, and its squares
#define GATED 2  // silu(gate x) * (up x) as the next stage reads it
#define STAGES 4

// Between the scale of a row that is known before a product and the true one, found after it, there may be a jump of any size: halves
// hold the row times its last scale times this, and reach from 2^-24 * 64 to 65504 * 64 of it.
#define HEADROOM 0.015625f

struct Segment {
    const u8* weights[2];  // of both row blocks of the first tile
    float* out;            // f32 [ROWS][stride]; not with GATED
    int n_out;             // rows of W
    int stride;            // floats from a row of out to the next
    int kind;
    int units;             // along K
    int tiles;
    int tile;              // bytes of a 16-row tile in a unit
    int first_piece;       // those in its first piece
    int pieces;            // of a unit
    u32 first_cost;        // where its units begin on the stage's line
    u32 cost;              // of a unit
};
struct Stage {
    const u8* x;           // a16.cuh
    const float* sums;     // squares of the row that x was made of, [ROWS][squares]; 0: x is as it should be
    u8* halves;            // ADD, GATED: what the next stage reads (a16.cuh), or 0
    float* floats;         // ADD: the same in f32 [ROWS][n_out], or 0
    const float* norm;     // ADD: weights of the norm, [n_out]
    float* squares;        // ADD: sums of squares of 16 columns each, [ROWS][whole groups of 256 columns / 16]
    uint4* spent;          // halves that no block reads any more once this stage is open, to be made absent again
    int n_spent;           // 16 bytes each
    u32 gap;               // on its line, before the units of each tile; 0: each block has units of one tile at most
    int first, end;        // of its segments
    u32 share, extra;      // block b begins at b * share + min(b, extra)
    int write;
    int width;             // of the rows of `sums`
    u32 own_tiles;         // GATED: tiles that each block has for itself; 0: cut as above
    u32 loose;             // the first tile behind those; block b has unit b of them, if there is one
};

// Which row block of its matrix is the first (m = 0) or second of a tile.
__device__ __forceinline__ int row_block(int write, int tile, int m) { return write == GATED ? tile : tile * 2 + m; }
// Where the row block begins: its row factors, and behind them its units.
__device__ __forceinline__ const u8* row_block_at(const Segment& s, int write, int tile, int m) {
    return s.weights[m] + size_t(write == GATED ? tile : 2 * tile) * (128 * 4 + size_t(s.units) * s.tile * 8);
}
// Where the units of a tile begin on the line.
__device__ __forceinline__ u32 tile_cost(const Stage& stage, const Segment& s, int tile) {
    return s.first_cost + u32(tile) * (stage.gap + s.units * s.cost) + stage.gap;
}
// The first block that has a unit of a tile that is left over from those that blocks have for themselves.
__device__ __forceinline__ u32 loose_first(const Stage& stage, const Segment& s, int tile) { return (tile - stage.loose) * s.units; }
// First unit of a segment that begins at or after `cost`.
__device__ __forceinline__ int unit_at(const Stage& stage, const Segment& s, u32 cost) {
    if (cost <= s.first_cost) return 0;
    const u32 past = cost - s.first_cost, period = stage.gap + s.units * s.cost, tile = past / period, rest = past - tile * period;
    const u32 unit = rest > stage.gap ? (rest - stage.gap + s.cost - 1) / s.cost : 0;
    return min(u32(s.units * s.tiles), tile * s.units + unit);
}
// What those who multiply want to know of a tile: its kind, units along K, and 16-row tiles of its first row block.
struct Shape {
    int kind, units, rows;

    __device__ __forceinline__ static Shape of(const Segment& s, int write, int tile) { return {s.kind, s.units, row_tiles(s, row_block(write, tile, 0))}; }
};
// A block's part of a stage, or what is left of it. Who multiplies reads it at once, from shared memory.
struct __align__(16) Share {
    Cursor at;
    int units;
    int next;     // the tile behind the first unit where that is loose, else -1
    Shape shape;  // of the tile at hand

    // Units of that tile.
    __device__ __forceinline__ int run() const { return next >= 0 ? 1 : min(shape.units - at.unit, units); }
    // Behind those `n` units: to the next tile, if there is one.
    __device__ __forceinline__ void go_on(const Segment* segments, int write, int n) {
        units -= n;
        if (units == 0) return;
        at.unit = 0;
        if (next >= 0) {
            at.tile = next;
            next = -1;
        } else if (++at.tile == segments[at.segment].tiles) {
            at.tile = 0;
            at.segment++;
        }
        shape = Shape::of(segments[at.segment], write, at.tile);
    }
};

// By a whole warp: lanes 2 i and 2 i + 1 find where the share begins and ends in the stage's segment i.
__device__ __forceinline__ Share share_of(const Segment* segments, const Stage& stage) {
    if (stage.own_tiles) {
        const Segment& s = segments[stage.first];
        const int tile = blockIdx.x * stage.own_tiles, units = stage.own_tiles * s.units, loose = stage.loose + blockIdx.x / s.units;
        if (loose < s.tiles) return {{stage.first, loose, int(blockIdx.x) % s.units}, units + 1, tile, Shape::of(s, stage.write, loose)};
        return {{stage.first, tile, 0}, units, -1, Shape::of(s, stage.write, tile)};
    }
    static_assert(2 * SEGMENTS <= 32, "two lanes for each segment of a stage");
    const int lane = threadIdx.x % 32, i = min(stage.first + lane / 2, stage.end - 1);
    const Segment& s = segments[i];
    const int from = unit_at(stage, s, share_begin(stage, blockIdx.x + lane % 2)), to = __shfl_xor_sync(WARP_ALL, from, 1);
    const int units = lane % 2 == 0 && stage.first + lane / 2 < stage.end ? to - from : 0, tile = from / s.units;
    const u32 any = __ballot_sync(WARP_ALL, units > 0);
    const int first = any ? __ffs(any) - 1 : 0;
    const auto of_first = [&](int v) { return __shfl_sync(WARP_ALL, v, first); };
    const Cursor at = {of_first(i), of_first(tile), of_first(from - tile * s.units)};
    return {at, int(__reduce_add_sync(WARP_ALL, units)), -1, Shape::of(segments[at.segment], stage.write, at.tile)};
}
