// matmul/small: out[row][n] (+)= sum over k of W[n][k] * x[row][k] for a few rows (1..64) and several matrices W that share x.
//
// Inputs: packed weights (layout.cuh), x in the form of a8.cuh for the same bucket of rows. Output f32 [ROWS][stride] per segment.
// Memory-bound: a block streams 128 * BLOCKS rows x 256 values of weights a step (18 KB of Q4K a row block) through a ring in shared memory
// and multiplies them by tensor cores with all rows of x at once; a warp has 16 rows of each of MT row blocks.
//
// Grid: as many blocks as the card has multiprocessors (any number is correct). The units of all segments, in order, are one
// line; each has a cost (its bytes / 16), and block b takes the units that begin in its equal share of the line (stream-K),
// a share being no less than a unit (blocks beyond the line's end have nothing to do). A tile of
// 128 * BLOCKS rows whose units lie in several blocks is summed from their partial tiles in scratch, in block order, by the warp
// that arrives last. The cut depends on shapes and grid only, so a row of the result has the same bits whatever ROWS is.
// Shared memory: STAGES * (8 * BLOCKS * tile + NT * unit of x) bytes, dynamic, and asked for in such an amount that no two blocks
// share a multiprocessor: with room for two, an early start would put two there and none elsewhere.
// Scratch: gridDim * 2 * 8 * BLOCKS * NT * 512 bytes. Counters: WARPS u32 per tile of every segment, zero before and after.
//
// f32 matrices of the same input are done on the side (plain.cuh, PLAIN = 1).
//
// Defines: ROWS (rows of x here), NT = ceil(ROWS / 8), WARPS (8, 16), MT (row blocks of a warp: 1, 2), STAGES, KINDS (bit i: kind i occurs), SEGMENTS (most per launch),
// RESIDENT (blocks per multiprocessor that registers must allow), PLAIN.
// From sm_90 the ring is filled by bulk copies, weights before the dependency wait; below, by cp.async.
// Architecture floor: sm_80. Judge: cpu::reference::matmul on the dequantised weights; test crates/cuda/tests/matmul.rs.
#ifndef PLAIN
#define PLAIN 0
#endif
#ifndef WARPS
#define WARPS 8
#endif
#define THREADS (WARPS * 32)
#define BLOCKS (MT * WARPS / 8)  // row blocks of a tile; warp w has 16-row tiles w, w + WARPS, .. of its 8 * BLOCKS

#include "matmul/plain.cuh"
#include "matmul/units.cuh"

#if defined(WARPGROUPS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "matmul/units_sm90.cuh"
#define GROUPED 1
#else
#define GROUPED 0
#endif

struct Segment {
    const u8* weights;
    const u8* x;
    float* out;
    int n_out;       // rows of W, columns of out
    int stride;      // floats from a row of out to the next
    int add;         // out += instead of out =
    int kind;
    int units;       // along K
    int tiles;       // of 128 * BLOCKS rows
    int tile;        // bytes of a 16-row tile
    int x_bytes;     // of all NT tiles for one unit
    u32 first_cost;  // where its units begin on the line
    u32 cost;        // of a unit
    int first_tile;  // of all segments, for the counters
    int x_step;      // bytes from a unit of x to the next: x_bytes, or more if x has rows that others multiply
};
struct Work {
    Segment segments[SEGMENTS];
    float4* scratch;
    u32* counters;
    int n_segments;
    u32 share, extra;  // block b begins at b * share + min(b, extra); share is at least the cost of any unit
    u32 prefetch;      // units beyond the ring that are fetched into L2 before the dependency wait
#if PLAIN
    Plain plain;
#endif
};

constexpr int max_tile(int kind) { return kind > KIND_BF16 ? 0 : (KINDS >> kind & 1) && tile_bytes(kind) > max_tile(kind + 1) ? tile_bytes(kind) : max_tile(kind + 1); }
constexpr int X_BYTES = NT * ((KINDS & 31) ? A8_TILE : A16_TILE);
constexpr int W_BYTES = BLOCKS * 8 * max_tile(0);
constexpr int SLOT = KINDS ? W_BYTES + X_BYTES : 16;

// A place on the line of units, walked unit by unit.
struct Cursor {
    int segment, tile, unit;
};

__device__ __forceinline__ u32 share_begin(const Work& work, u32 block) { return block * work.share + min(block, work.extra); }
__device__ __forceinline__ u32 block_of(const Work& work, u32 cost) {
    const u32 wide = work.extra * (work.share + 1);
    return cost < wide ? cost / (work.share + 1) : work.extra + (cost - wide) / work.share;
}
// First unit of a segment that begins at or after `cost`.
__device__ __forceinline__ int unit_at(const Segment& s, u32 cost) {
    return cost <= s.first_cost ? 0 : min(s.units * s.tiles, int((cost - s.first_cost + s.cost - 1) / s.cost));
}
__device__ __forceinline__ int row_tiles(const Segment& s, int row_block) { return max(0, min(8, (s.n_out - row_block * 128 + 15) / 16)); }
__device__ __forceinline__ void advance(const Work& work, Cursor& c) {
    if (++c.unit < work.segments[c.segment].units) return;
    c.unit = 0;
    if (++c.tile < work.segments[c.segment].tiles) return;
    c.tile = 0;
    c.segment++;
}

// Where the weights of row block m of a tile's unit begin and how many bytes they have.
__device__ __forceinline__ const u8* weights_of(const Segment& s, const Cursor& c, int m, int& bytes) {
    const int row_block = c.tile * BLOCKS + m, tiles = row_tiles(s, row_block);
    bytes = tiles * s.tile;
    return s.weights + (size_t(row_block) * 8 * s.units + size_t(c.unit) * tiles) * s.tile;
}

__device__ __forceinline__ void store(const Segment& s, int tile, int warp, const float (&acc)[MT][NT][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = tile * BLOCKS * 128 + (m * WARPS + warp) * 16 + lane / 4 + i / 2 * 8;
                const int row = n * 8 + lane % 4 * 2 + i % 2;
                if (row < ROWS && column < s.n_out) {
                    float* to = s.out + size_t(row) * s.stride + column;
                    *to = s.add ? *to + acc[m][n][i] : acc[m][n][i];
                }
            }
        }
    }
}

// Leaves the warp's partial tile; the last of the tile's blocks to arrive sums them in block order and stores.
__device__ __forceinline__ void contribute(const Work& work, const Segment& s, int tile, bool begun_before, int warp, float (&acc)[MT][NT][4]) {
    const int lane = threadIdx.x % 32;
    constexpr int PIECE = MT * NT * 32;  // float4 of one warp
    float4* mine = work.scratch + (size_t(blockIdx.x) * 2 + (begun_before ? 0 : 1)) * WARPS * PIECE + warp * PIECE + lane;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) __stcg(mine + (m * NT + n) * 32, make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
    __threadfence();
    __syncwarp();
    const u32 begin = s.first_cost + u32(tile) * s.units * s.cost;
    const u32 first = block_of(work, begin), last = block_of(work, begin + u32(s.units - 1) * s.cost);
    u32* counter = work.counters + (s.first_tile + tile) * WARPS + warp;
    u32 before = 0;
    if (lane == 0) before = atomicAdd(counter, 1);
    before = __shfl_sync(WARP_ALL, before, 0);
    if (before != last - first) return;
    __threadfence();
    if (lane == 0) *counter = 0;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
    // In block order, the pieces of FETCH blocks at a time on their way.
    constexpr int FETCH = MT * NT > 4 ? 2 : 4;
    for (u32 b0 = first; b0 <= last; b0 += FETCH) {
        float4 piece[FETCH][MT * NT];
#pragma unroll
        for (int f = 0; f < FETCH; f++) {
            const u32 b = min(b0 + f, last);
            const float4* from = work.scratch + (size_t(b) * 2 + (b == first ? 1 : 0)) * WARPS * PIECE + warp * PIECE + lane;
#pragma unroll
            for (int i = 0; i < MT * NT; i++) piece[f][i] = __ldcg(from + i * 32);
        }
#pragma unroll
        for (int f = 0; f < FETCH; f++) {
            if (b0 + f > last) break;
#pragma unroll
            for (int i = 0; i < MT * NT; i++) {
                float(&to)[4] = acc[i / NT][i % NT];
                to[0] += piece[f][i].x;
                to[1] += piece[f][i].y;
                to[2] += piece[f][i].z;
                to[3] += piece[f][i].w;
            }
        }
    }
    store(s, tile, warp, acc);
}

template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) matmul_small(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) u8 ring[];
    const int warp = threadIdx.x / 32;
    pdl_launch();

    const u32 begin = share_begin(work, blockIdx.x), end = share_begin(work, blockIdx.x + 1);
    int count = 0;
    Cursor at = {0, 0, 0};
#if PLAIN
    __shared__ PlainRoom plain_room;
    plain_begin(work.plain, plain_room);
#endif
    for (int i = 0; i < work.n_segments; i++) {
        const Segment& s = work.segments[i];
        const int from = unit_at(s, begin), to = unit_at(s, end);
        if (count == 0 && to > from) at = {i, from / s.units, from % s.units};
        count += to - from;
    }

#if HAS_BULK
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const u32 ring_address = shared_address(ring);
    const u64 once = policy_evict_first(), keep = policy_evict_last();
    const auto load_weights = [&](const Cursor& c, int slot) {
        const Segment& s = work.segments[c.segment];
        int bytes[BLOCKS], sum = s.x_bytes;
        const u8* from[BLOCKS];
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) {
            from[m] = weights_of(s, c, m, bytes[m]);
            sum += bytes[m];
        }
        mbarrier_expect(full + 8 * slot, sum);
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
            if (bytes[m]) bulk_load(ring_address + slot * SLOT + m * 8 * s.tile, from[m], bytes[m], full + 8 * slot, once);
    };
    const auto load_x = [&](const Cursor& c, int slot) {
        const Segment& s = work.segments[c.segment];
        bulk_load(ring_address + slot * SLOT + W_BYTES, s.x + size_t(c.unit) * s.x_step, s.x_bytes, full + 8 * slot, keep);
    };
    Cursor ahead = at;  // the next unit to load
    for (int i = 0; i < STAGES && i < count; i++) {
        if (threadIdx.x == 0) load_weights(ahead, i);
        advance(work, ahead);
    }
    // While the dependency is waited for, memory need not idle: the units after the ring's go to L2.
    if (threadIdx.x == 0) {
        Cursor next = ahead;
        for (int i = STAGES; i < STAGES + int(work.prefetch) && i < count; i++) {
            const Segment& s = work.segments[next.segment];
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                int bytes;
                const u8* from = weights_of(s, next, m, bytes);
                if (bytes) bulk_prefetch(from, bytes, once);
            }
            advance(work, next);
        }
    }
    pdl_wait();
    if (threadIdx.x == 0) {
        Cursor c = at;
        for (int i = 0; i < STAGES && i < count; i++) {
            load_x(c, i);
            advance(work, c);
        }
    }
    __syncwarp();
#else
    Cursor ahead = at;  // the next unit to load
    const auto load = [&](const Cursor& c, int slot) {
        const Segment& s = work.segments[c.segment];
        const u32 to = shared_address(ring) + slot * SLOT;
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) {
            int bytes;
            const u8* from = weights_of(s, c, m, bytes);
            for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16) cp_async_16(to + m * 8 * s.tile + i, from + i);
        }
        const u8* x = s.x + size_t(c.unit) * s.x_step;
        for (int i = threadIdx.x * 16; i < s.x_bytes; i += THREADS * 16) cp_async_16(to + W_BYTES + i, x + i);
    };
    pdl_wait();
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < count) {
            load(ahead, i);
            advance(work, ahead);
        }
        cp_async_commit();
    }
#endif
#if PLAIN
    plain_jobs(work.plain, plain_room);  // while the ring fills
#endif

    float acc[MT][NT][4];
    int slot = 0;
    u32 parity = 0;  // of the ring's turn
    for (int done = 0; done < count;) {
        const Segment& s = work.segments[at.segment];
        const int units = s.units, n = min(units - at.unit, count - done);
        const bool mine = (GROUPED ? warp % 8 & 4 : warp % 8) < row_tiles(s, at.tile * BLOCKS + warp / 8);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[m][i][e] = 0.0f;
        const auto walk = [&](auto kind) {
            constexpr int KIND = decltype(kind)::value;
            const u8* base = ring + warp * tile_bytes(KIND);
            for (int i = 0; i < n; i++) {
#if HAS_BULK
                // The slot of the unit before this one is free once every warp is through with it; the warps
                // take turns to fill it anew.
                const int index = done + i;
                if (index > 0 && index - 1 + STAGES < count) {
                    if (threadIdx.x == index % WARPS * 32) {
                        const int old = slot == 0 ? STAGES - 1 : slot - 1;
                        mbarrier_wait(empty + 8 * old, slot == 0 ? parity ^ 1 : parity);
                        load_weights(ahead, old);
                        load_x(ahead, old);
                    }
                    advance(work, ahead);
                }
                __syncwarp();
                mbarrier_wait(full + 8 * slot, parity);
#else
                cp_async_wait<STAGES - 2>();
                __syncthreads();
                if (done + i - 1 + STAGES < count) {
                    load(ahead, slot == 0 ? STAGES - 1 : slot - 1);
                    advance(work, ahead);
                }
                cp_async_commit();
#endif
                if (mine) {
                    const u8* w[MT];
#pragma unroll
                    for (int m = 0; m < MT; m++) w[m] = base + slot * SLOT + m * WARPS * tile_bytes(KIND);
                    const u8* x = ring + slot * SLOT + W_BYTES;
#if GROUPED
                    if constexpr (KIND == KIND_Q4K || KIND == KIND_Q5K)
                        unit_k45_sm90<KIND, MT, NT>(w, x, acc);
                    else if constexpr (KIND == KIND_Q6K)
                        unit_q6k_sm90<MT, NT>(w, x, acc);
                    else
#endif
                        unit<KIND, MT, NT>(w, x, acc);
                }
#if HAS_BULK
                __syncwarp();
                if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * slot);
#endif
                if (++slot == STAGES) {
                    slot = 0;
                    parity ^= 1;
                }
            }
        };
        switch (s.kind) {
#define CASE(K) \
    case K: if constexpr (KINDS >> K & 1) walk(Constant<K>()); break;
            CASE(KIND_Q4K) CASE(KIND_Q5K) CASE(KIND_Q6K) CASE(KIND_Q8) CASE(KIND_WIDE) CASE(KIND_F16) CASE(KIND_BF16)
#undef CASE
        }
        if (mine) {
            if (n == units)
                store(s, at.tile, warp, acc);
            else
                contribute(work, s, at.tile, at.unit != 0, warp, acc);
        }
        done += n;
        at.unit = 0;
        if (++at.tile == s.tiles) {
            at.tile = 0;
            at.segment++;
        }
    }
#if PLAIN
    plain_end(work.plain, plain_room);
#endif
}
