// Tree attention by three warpgroups: the first scores keys and makes weights, two others sum values, 128 of the 256 dims
// each. What tree_trio_sm90.cu and tree_spans_sm90.cu, which cut the work into items each in its own way, do with a tile.
//
//   S^T[64 keys][COLUMNS] = K Q^T      W = 2^(c S - m)      O^T[256 dims][COLUMNS] += V^T W^T      c = scale log2 e
//
// A key is expanded once for all columns of a block, a value too. Weights go through two buffers in shared memory: those
// of tile j + 1 are made while values of tile j are summed, and nobody else waits for anybody.
//
// Scores are held against a base m that follows the greatest score only when that is SLACK above it: weights are at
// most 2^SLACK, and sums are seldom rescaled. A column's base, weights and sums depend on its own scores alone, and all
// sums are made in one order, so its bits do not depend on NT, on the rings or on who shares the block.
//
// Shared memory: queries [4][COLUMNS][64] f16 and weights [2][COLUMNS][64] f16 (128-byte swizzle), K_RING tiles of keys,
// V_RING of values, Marks.
// Before this file: what attn/across_sm90.cuh and attn/span.cuh want, K_RING, V_RING. Blocks of 384, arch sm_90a.
#pragma once
#include "attn/across_sm90.cuh"
#include "attn/span.cuh"
#include "common/prelude.cuh"

// Keys two tiles ahead are there before values of a tile are summed, and values of the tile before are still read then.
static_assert(K_RING >= 3 && V_RING >= 2, "rings are too short");
#define SLACK 8.0f
// Sums of weights of a thread: half of its columns, the lane 16 apart has the other half.
#define OWN_SUMS (4 * ((NT + 3) / 4))
// Registers of a thread that scores and of one that sums: what launch bounds give to all, shared out anew.
#define SCORE_REGISTERS "136"
#define SUM_REGISTERS "184"
// Barriers of the block: of the warpgroup that scores, and for tiles of either parity: keys are there, weights are there,
// weights are done with.
#define SCORING 1
#define KEYS 6
#define FULL 2
#define EMPTY 4
// Sums of a tile begin when so many eighths of the next tile's scores are on their way: at once the products of both
// would share the tensor cores, which then had nothing to do while weights are made.
#ifndef RELEASE
#define RELEASE 8
#endif

struct Marks {
    float base[COLUMNS];       // what scores are held against, in powers of two; 0 before any key was seen
    float running[COLUMNS];    // the same; -INF before any key was seen
    float shift[COLUMNS];      // how far the last move went
    float shrink[2][COLUMNS];  // what sums before a tile are multiplied with, if it moved any base
    float parts[4][COLUMNS];   // of each scoring warp: greatest scores, or sums of weights
    int moved[2];
};

template <int THREADS>
__device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void tell(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
// Whether any thread of the scoring warpgroup says so.
__device__ __forceinline__ bool any_scoring(bool mine) {
    u32 any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
        : "=r"(any)
        : "r"((u32)mine), "n"(SCORING)
        : "memory");
    return any != 0;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// `x`, but what follows from it is computed where it stands: kept in registers from tile to tile it would push out
// sums, and local memory is far away beside so much shared memory.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Tiles of keys or of values that the warpgroups that sum fetch, into SLOTS slots one after the other.
template <int FORMAT, int STRIDE, int SLOTS>
struct Fetch {
    static constexpr int BYTES = tile_bytes(FORMAT, STRIDE);
    int key;  // next to be fetched
    u32 to;   // and its slot
    u32 row;  // where it is: looked up early, since the lookup takes a while

    // The slot behind `slot`.
    static __device__ __forceinline__ u32 after(u32 slot, u32 ring) {
        return slot + BYTES == ring + SLOTS * BYTES ? ring : slot + BYTES;
    }
};
typedef Fetch<K_FORMAT, K_STRIDE, K_RING> FetchKeys;
typedef Fetch<V_FORMAT, V_STRIDE, V_RING> FetchValues;

// The column of a thread's sum `i`.
__device__ __forceinline__ int own_column(int i) {
    const int lane = threadIdx.x % 32;
    return 8 * (i / 4 * 4 + i % 4 / 2 + lane / 16 * 2) + 2 * (lane % 4) + i % 2;
}

// Scores against their bases become scores against moved bases where a column's greatest is SLACK above its own, or its
// first; sums of weights follow. True while a column has seen no key. 128 threads.
__device__ __forceinline__ bool move_bases(float (&scores)[4 * NT], float (&sums)[OWN_SUMS], Marks& marks, float* shrink) {
    const int lane = anew(threadIdx.x % 32), warp = threadIdx.x / 32, t = lane % 4;
    // A score that is NaN has no weight.
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) scores[i] = fmaxf(scores[i], -INF);
    join_columns(
        marks.parts[warp], [&](int n, int e) { return fmaxf(scores[4 * n + e], scores[4 * n + 2 + e]); },
        [](float a, float b) { return fmaxf(a, b); });
    meet<128>(SCORING);
    bool unseen = false;
#pragma unroll 1
    for (int column = threadIdx.x; column < COLUMNS; column += 128) {
        float most = marks.parts[0][column];
#pragma unroll
        for (int w = 1; w < 4; w++) most = fmaxf(most, marks.parts[w][column]);
        const bool first = marks.running[column] == -INF;
        const float by = first ? (most == -INF ? 0.0f : most) : most > SLACK ? most : 0.0f;
        marks.shift[column] = by;
        shrink[column] = first ? 1.0f : exp2_approx(-by);
        marks.base[column] += by;
        if (!first || most > -INF) marks.running[column] = marks.base[column];
        unseen |= first && most == -INF;
    }
    unseen = any_scoring(unseen);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 by = *(const float2*)(marks.shift + 8 * n + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // Infinite scores over an infinite base have no weight.
            scores[4 * n + 2 * r] = fmaxf(scores[4 * n + 2 * r] - by.x, -INF);
            scores[4 * n + 2 * r + 1] = fmaxf(scores[4 * n + 2 * r + 1] - by.y, -INF);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_SUMS; i++)
        if (own_column(i) < COLUMNS) sums[i] *= shrink[own_column(i)];
    meet<128>(SCORING);
    return unseen;
}

// Weights of a warp's 16 keys, keys along the rows of the panel at `weights`; adds them to `sums`.
__device__ __forceinline__ void store_weights(const float (&scores)[4 * NT], float (&sums)[OWN_SUMS], u32 weights) {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 * 2 + lane / 8 % 2;
    const bool upper = lane / 16;
    float added[8];
    u32 halves[4];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = exp2_approx(scores[4 * n + i]);
        halves[n % 2 * 2] = f32x2_to_f16x2(w[0], w[1]);
        halves[n % 2 * 2 + 1] = f32x2_to_f16x2(w[2], w[3]);
        added[n % 4 * 2] = w[0] + w[2], added[n % 4 * 2 + 1] = w[1] + w[3];
        store_halves(weights, n, lane, chunk, halves);
        if (n % 4 == 3 || n == NT - 1) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float low = j / 2 <= n % 4 ? added[j] : 0.0f, high = j / 2 + 2 <= n % 4 ? added[4 + j] : 0.0f;
                sums[n / 4 * 4 + j] += (upper ? high : low) + __shfl_xor_sync(WARP_ALL, upper ? low : high, 16);
            }
        }
    }
}

// Scores of columns 8 n .. + 8 against their bases, as powers of two; `most` keeps the greatest score of each place in a
// fragment, or NaN.
__device__ __forceinline__ void hold_scores(float (&scores)[4 * NT], float (&most)[4], int n, const uint2& base, float scale_log2) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float own = __uint_as_float(i % 2 ? base.y : base.x);
        scores[4 * n + i] = fmaf(scores[4 * n + i], scale_log2, -own);
        most[i] = max_or_nan(most[i], scores[4 * n + i]);
    }
}

// Scores of tile number `tile`, held against bases, become its weights in the buffer of its parity as soon as that is done
// with; bases move where `most` says so, or while a column has seen no key: true as long as one has not.
__device__ __forceinline__ bool store_tile(float (&scores)[4 * NT], float (&sums)[OWN_SUMS], bool unseen, const float (&most)[4],
                                           Marks& marks, int tile, u32 weights) {
    const int buffer = tile & 1;
    // Values of the tile before the last are done with, and so are their weights.
    if (tile >= 2) meet<384>(EMPTY + buffer);
    const bool moves = any_scoring(!(max_or_nan(max_or_nan(most[0], most[1]), max_or_nan(most[2], most[3])) <= SLACK)) || unseen;
    if (moves) unseen = move_bases(scores, sums, marks, marks.shrink[buffer]);
    if (threadIdx.x == 0) marks.moved[buffer] = moves;
    store_weights(scores, sums, weights + buffer * PANEL_BYTES);
    // This waits for all that the thread has on its way: others do the copying.
    publish();
    return unseen;
}

// Behind the last of `tile` tiles: nobody leaves a barrier half full.
__device__ __forceinline__ void leave(int tile) {
    if (tile >= 2) meet<384>(EMPTY + (tile & 1));
    meet<384>(EMPTY + (~tile & 1));
}

// A warp's sums of each column, to to[column].
__device__ __forceinline__ void join_sums(float* to, const float (&sums)[OWN_SUMS]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < OWN_SUMS / 4; k++) {
        const float* v = sums + 4 * k;
        float w[2];
#pragma unroll
        for (int j = 0; j < 2; j++) w[j] = (g & 2 ? v[j + 2] : v[j]) + __shfl_xor_sync(WARP_ALL, g & 2 ? v[j] : v[j + 2], 8);
        const float x = (g & 1 ? w[1] : w[0]) + __shfl_xor_sync(WARP_ALL, g & 1 ? w[0] : w[1], 4);
        const int n = 4 * k + g / 4 * 2 + g / 2 % 2;
        if (n < NT) to[8 * n + 2 * t + g % 2] = x;
    }
}

// A column's sum of weights, from those of the scoring warps.
__device__ __forceinline__ float sum_of_parts(const Marks& marks, int column) {
    float sum = marks.parts[0][column];
#pragma unroll
    for (int w = 1; w < 4; w++) sum += marks.parts[w][column];
    return sum;
}

// sums[64 dims][COLUMNS] += values weights over 16 keys: value_fragments of 16 dims of this warp and of the next 16, and the
// weights of `p`.
__device__ __forceinline__ void add_product(float (&sums)[4 * NT], const u32 (&low)[2], const u32 (&high)[2], u64 p) {
    wgmma_fence();
    product(sums, low[0], high[0], low[1], high[1], p, 1);
    wgmma_commit();
    wgmma_wait<1>();
}
