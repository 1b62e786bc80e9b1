// matmul/small: out[row][n] (+)= sum over k of W[n][k] * x[row][k] for a few rows (1..64) and several matrices W that share x.
//
// Inputs: packed weights (layout.cuh), x in the form of a16.cuh for the same bucket of rows. Output f32 [ROWS][stride] per segment.
// Memory-bound: a block streams 256 rows x 128 values of weights a step (20 KB of Q4K; 64 values of some kinds) through a ring in shared
// memory and multiplies them, expanded to f16 in registers (tiles.cuh), by tensor cores with all rows of x at once, in f32 sums; a
// warp has two of the sixteen 16-row tiles. A ninth warp fills the ring.
//
// Grid: as many blocks as the card has multiprocessors (any number is correct). The units of all segments, in order, are one
// line; each has a cost (its bytes / 16), and block b takes the units that begin in its equal share of the line (stream-K),
// a share being no less than a unit (blocks beyond the line's end have nothing to do). The cut depends on shapes and grid only, so
// a row of the result has the same bits whatever ROWS is.
//
// A tile of 256 rows whose units lie in several blocks: each of them but the last, which goes on to other tiles, adds up some
// of the sixteen 16-row tiles, in block order, from its own sums and what the others leave in scratch. There is no fence and no counter:
// what is waited for is the data itself. A word that has not arrived is +0, so -0 is left for it, and the reader puts +0 back.
// All blocks of the grid are resident at once or have ended, so waiting ends.
//
// Shared memory: STAGES * (16 tiles of a piece + NT * its x) bytes, dynamic.
// Scratch: gridDim * 2 * 16 * NT * 512 bytes, +0 before and after.
//
// f32 matrices of the same input are done on the side (plain.cuh, PLAIN = 1).
//
// Defines: ROWS (rows of x here), NT = ceil(ROWS / 8), STAGES, KINDS (bit i: kind i occurs), SEGMENTS (most per launch), PLAIN.
// From sm_90 the ring is filled by bulk copies, weights before the dependency wait; below, by cp.async.
// Architecture floor: sm_80. Judge: cpu::reference::matmul on the dequantised weights; test crates/cuda/tests/matmul.rs.
#ifndef PLAIN
#define PLAIN 0
#endif
#define WARPS 8
#define MT 2  // 16-row tiles of a warp: w and w + 8 of the sixteen of a tile
#define THREADS (WARPS * 32)  // that multiply; 32 more fill the ring

// All warps that multiply.
__device__ __forceinline__ void sync_multipliers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

#include "common/prelude.cuh"
#include "matmul/cut.cuh"
#include "matmul/scratch.cuh"
#define PLAIN_WARPS WARPS
__device__ __forceinline__ int plain_thread() { return threadIdx.x; }
__device__ __forceinline__ void plain_sync() { sync_multipliers(); }
#include "matmul/plain.cuh"
#include "matmul/walk.cuh"

struct Segment {
    const u8* weights;
    float* out;
    int n_out;       // rows of W, columns of out
    int stride;      // floats from a row of out to the next
    int add;         // out += instead of out =
    int kind;
    int units;       // along K
    int tiles;       // of 256 rows
    int tile;        // bytes of a 16-row tile in a unit
    int first_piece; // those in its first piece
    u32 first_cost;  // where its units begin on the line
    u32 cost;        // of a unit
    int pieces;      // of a unit
    int _pad;
};
struct Work {
    Segment segments[SEGMENTS];
    const u8* x;     // of the rows of this launch
    float4* scratch;
    int n_segments;
    int x_step;        // bytes from 64 values of x to the next: NT * 1024, or more if x has rows that others multiply
    u32 share, extra;  // block b begins at b * share + min(b, extra); share is at least the cost of any unit
#if PLAIN
    Plain plain;
#endif
};

constexpr int SLOT = KINDS ? W_BYTES + NT * A16_TILE * max_chunks(0) : 16;

// Where a row block begins: its row factors, and behind them its units.
__device__ __forceinline__ const u8* row_block_of(const Segment& s, int row_block) {
    return s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile * 8);
}
// What the next piece is made of, from piece to piece.
struct Feed {
    const u8 *weights[2], *x;  // of both row blocks of the tile
    Cursor at;
    int rows[2];               // 16-row tiles of the row blocks
    int units, pieces, piece;
    int bytes[2];              // of a 16-row tile, in this piece and in the other

    __device__ __forceinline__ void begin_tile(const Work& work) {
        const Segment& s = work.segments[at.segment];
        units = s.units;
        pieces = s.pieces;
        piece = 0;
        bytes[0] = s.first_piece;
        bytes[1] = pieces == 2 ? s.tile - s.first_piece : s.first_piece;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            rows[m] = row_tiles(s, at.tile * 2 + m);
            weights[m] = row_block_of(s, at.tile * 2 + m) + rows[m] * (64 + at.unit * s.tile);
        }
        x = work.x + size_t(at.unit) * pieces * pieces * work.x_step;
    }
    __device__ __forceinline__ void advance(const Work& work) {
        weights[0] += rows[0] * bytes[0];
        weights[1] += rows[1] * bytes[0];
        x += pieces * work.x_step;
        const int other = bytes[1];
        bytes[1] = bytes[0];
        bytes[0] = other;
        if (++piece < pieces) return;
        piece = 0;
        if (++at.unit < units) return;
        at.unit = 0;
        if (++at.tile == work.segments[at.segment].tiles) {
            at.tile = 0;
            at.segment++;
        }
        if (at.segment < work.n_segments) begin_tile(work);
    }
};

// The row factors of the warp's rows lane / 4 and lane / 4 + 8 of each row block.
__device__ __forceinline__ void row_factors(const Segment& s, int tile, int warp, float (&factors)[MT][2]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int index = m * WARPS + warp, row_block = tile * 2 + index / 8;
            const float* from = (const float*)row_block_of(s, row_block) + index % 8 * 16 + threadIdx.x % 32 / 4 + i * 8;
            factors[m][i] = index % 8 < row_tiles(s, row_block) ? __ldg(from) : 0.0f;
        }
}

// One 16-row tile, `index` of a tile's sixteen.
__device__ __forceinline__ void store(const Segment& s, int tile, int index, const float (&factors)[2], const float (&before)[NT][4], const float (&acc)[NT][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = (tile * 16 + index) * 16 + lane / 4 + i / 2 * 8, row = n * 8 + lane % 4 * 2 + i % 2;
            if (row < ROWS && column < s.n_out) s.out[size_t(row) * s.stride + column] = before[n][i] + acc[n][i] * factors[i / 2];
        }
}
// What stands where that tile goes, if it is added to; else zeros.
__device__ __forceinline__ void fetch_before(const Segment& s, int tile, int index, float (&before)[NT][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = (tile * 16 + index) * 16 + lane / 4 + i / 2 * 8, row = n * 8 + lane % 4 * 2 + i % 2;
            before[n][i] = s.add && row < ROWS && column < s.n_out ? s.out[size_t(row) * s.stride + column] : 0.0f;
        }
}

// A tile that lies in several blocks, as told above.
__device__ __forceinline__ void contribute(const Work& work, const Segment& s, int tile, int warp, const float (&factors)[MT][2], float (&acc)[MT][NT][4]) {
    constexpr int PIECE = NT * 32;  // float4 of one 16-row tile
    const u32 begin = s.first_cost + u32(tile) * s.units * s.cost;
    const u32 first = block_of(work, begin), last = block_of(work, begin + u32(s.units - 1) * s.cost);
    // A block has parts of two such tiles at most, one that others began and one that it begins.
    const auto place = [&](u32 block, int index) { return work.scratch + ((size_t(block) * 2 + (block == first)) * 16 + index) * PIECE + threadIdx.x % 32; };
    const auto is_there = [&](int index) { return index % 8 < row_tiles(s, tile * 2 + index / 8); };
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const int index = m * WARPS + warp;
        if (first + (2 * warp + m) % (last - first) == blockIdx.x || !is_there(index)) continue;
        float4* to = place(blockIdx.x, index);
#pragma unroll
        for (int n = 0; n < NT; n++) leave(to + n * 32, make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const int index = m * WARPS + warp;
        if (first + (2 * warp + m) % (last - first) != blockIdx.x || !is_there(index)) continue;
        float sum[NT][4], before[NT][4];
        if (NT <= 4) fetch_before(s, tile, index, before);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
        // The parts of FETCH blocks at a time on their way.
        constexpr int FETCH = NT == 1 ? 8 : NT <= 3 ? 4 : NT == 4 ? 3 : 1;
        for (u32 b0 = first; b0 <= last; b0 += FETCH) {
            float4 part[FETCH][NT];
#pragma unroll
            for (int f = 0; f < FETCH; f++) {
                const float4* from = place(min(b0 + f, last), index);
#pragma unroll
                for (int n = 0; n < NT; n++) part[f][n] = peek(from + n * 32);
            }
#pragma unroll
            for (int f = 0; f < FETCH; f++) {
                const u32 block = b0 + f;
                if (block > last) break;
                float4* from = place(block, index);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float4 v = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
                    if (block != blockIdx.x) v = take(from + n * 32, part[f][n]);
                    sum[n][0] += v.x;
                    sum[n][1] += v.y;
                    sum[n][2] += v.z;
                    sum[n][3] += v.w;
                }
            }
        }
        if (NT > 4) fetch_before(s, tile, index, before);
        store(s, tile, index, factors[m], before, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32) matmul_small(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) u8 ring[];
    const int warp = warp_index();
    pdl_launch();

    const u32 begin = share_begin(work, blockIdx.x), end = share_begin(work, blockIdx.x + 1);
    int count = 0, units_here = 0;  // pieces and units
    Cursor at = {0, 0, 0};
    for (int i = 0; i < work.n_segments; i++) {
        const Segment& s = work.segments[i];
        const int from = unit_at(s, begin), to = unit_at(s, end);
        if (units_here == 0 && to > from) at = {i, from / s.units, from % s.units};
        count += (to - from) * s.pieces;
        units_here += to - from;
    }

    int slot = 0;
    u32 parity = 0;  // of the ring's turn
    const auto turn_ring = [&]() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    };
#if HAS_BULK
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];  // of full places, of empty ones, and of a place that nobody waits for
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, THREADS);
        }
        mbarrier_init(empty + 8 * STAGES, THREADS);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (threadIdx.x == THREADS && count) {
            const u32 ring_address = shared_address(ring);
            const u64 once = policy_evict_first(), keep = policy_evict_last();
            const auto load_weights = [&](const Feed& feed, int slot) {
                const u32 to = ring_address + slot * SLOT;
                mbarrier_expect(full + 8 * slot, (feed.rows[0] + feed.rows[1]) * feed.bytes[0] + feed.pieces * NT * A16_TILE);
                bulk_load(to, feed.weights[0], feed.rows[0] * feed.bytes[0], full + 8 * slot, once);
                if (feed.rows[1]) bulk_load(to + 8 * feed.bytes[0], feed.weights[1], feed.rows[1] * feed.bytes[0], full + 8 * slot, once);
            };
            const auto load_x = [&](const Feed& feed, int slot) {
                const u32 to = ring_address + slot * SLOT + W_BYTES;
                if (work.x_step == NT * A16_TILE) {
                    bulk_load(to, feed.x, feed.pieces * NT * A16_TILE, full + 8 * slot, keep);
                } else {
                    for (int i = 0; i < feed.pieces; i++)
                        bulk_load(to + i * NT * A16_TILE, feed.x + size_t(i) * work.x_step, NT * A16_TILE, full + 8 * slot, keep);
                }
            };
            Feed feed;
            feed.at = at;
            feed.begin_tile(work);
            Feed first = feed;
            for (int i = 0; i < STAGES && i < count; i++) {
                load_weights(feed, i);
                feed.advance(work);
            }
            pdl_wait();
            for (int i = 0; i < STAGES && i < count; i++) {
                load_x(first, i);
                first.advance(work);
            }
            for (int i = STAGES; i < count; i++) {
                mbarrier_wait(empty + 8 * slot, parity);
                load_weights(feed, slot);
                load_x(feed, slot);
                feed.advance(work);
                turn_ring();
            }
        }
        pdl_wait();
        return;
    }
#if PLAIN
    __shared__ PlainRoom plain_room;
    plain_begin(work.plain, plain_room);
#endif
    pdl_wait();
    const auto take = [&]() {
        mbarrier_wait(full + 8 * slot, parity);
        const u32 at = shared_address(ring) + slot * SLOT;
        const Place place = {(at + W_BYTES) / 16, empty + 8 * slot};
        turn_ring();
        return place;
    };
    const auto give = [&](const Place& place) { mbarrier_arrive(place.barrier); };
    const Place nowhere = {0, empty + 8 * STAGES};
#else
    if (warp == WARPS) return;
#if PLAIN
    __shared__ PlainRoom plain_room;
    plain_begin(work.plain, plain_room);
#endif
    Feed feed;
    feed.at = at;
    if (count) feed.begin_tile(work);
    int left = count;  // pieces to load
    const auto load = [&](int slot) {
        if (left > 0) {
            const u32 to = shared_address(ring) + slot * SLOT;
#pragma unroll
            for (int m = 0; m < 2; m++)
                for (int i = threadIdx.x * 16; i < feed.rows[m] * feed.bytes[0]; i += THREADS * 16)
                    cp_async_16(to + m * 8 * feed.bytes[0] + i, feed.weights[m] + i);
            for (int i = threadIdx.x * 16; i < feed.pieces * NT * A16_TILE; i += THREADS * 16)
                cp_async_16(to + W_BYTES + i, feed.x + (i / (NT * A16_TILE)) * size_t(work.x_step) + i % (NT * A16_TILE));
            feed.advance(work);
            left--;
        }
        cp_async_commit();
    };
    pdl_wait();
    for (int i = 0; i < STAGES - 1; i++) load(i);
    // The slot of the piece before this one is free once all have come here.
    const auto take = [&]() {
        cp_async_wait<STAGES - 2>();
        sync_multipliers();
        load(slot == 0 ? STAGES - 1 : slot - 1);
        const u32 at = shared_address(ring) + slot * SLOT;
        const Place place = {(at + W_BYTES) / 16, 0};
        turn_ring();
        return place;
    };
    const auto give = [](const Place&) {};
    const Place nowhere = {};
#endif

    float acc[MT][NT][4], factors[MT][2];
#if PLAIN
    plain_jobs(work.plain, plain_room, [](int) { return 1.0f; });  // while the ring fills
#endif
    for (int done = 0; done < units_here;) {
        const Segment& s = work.segments[at.segment];
        const int units = s.units, n = min(units - at.unit, units_here - done);
        const bool mine = has_rows(row_tiles(s, at.tile * 2), warp);
        row_factors(s, at.tile, warp, factors);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[m][i][e] = 0.0f;
        walk(s.kind, ring, n, mine, acc, take, give, nowhere);
        if (n < units) {
            contribute(work, s, at.tile, warp, factors, acc);
        } else {
#pragma unroll
            for (int m = 0; m < MT; m++) {
                float before[NT][4];
                fetch_before(s, at.tile, m * WARPS + warp, before);
                store(s, at.tile, m * WARPS + warp, factors[m], before, acc[m]);
            }
        }
        done += n;
        at.unit = 0;
        if (++at.tile == s.tiles) {
            at.tile = 0;
            at.segment++;
        }
    }
#if PLAIN
    plain_end(work.plain, [](int) { return 1.0f; });
#endif
}
