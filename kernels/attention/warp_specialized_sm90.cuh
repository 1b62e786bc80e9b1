// Warp-specialized decode attention on Hopper: one softmax warpgroup computes scores and P, two PV warpgroups
// accumulate 128 of the 256 dims each. Shared by decode_tree_warp_specialized_sm90.cu and decode_fixed_splits_sm90.cu,
// which differ in how they cut the work.
//
//   S^T[64 keys][QUERY_COLUMNS] = K Q^T     P = 2^(c S - m), c = scale log2 e
//   O^T[256 dims][QUERY_COLUMNS] += V^T P^T
//
// Each key and value is dequantized once for all columns of a block. P is double-buffered in shared memory: the softmax
// warpgroup makes P of tile j + 1 while the PV warpgroups accumulate tile j.
//
// The base m follows the running maximum only when that exceeds it by RESCALE_THRESHOLD: P is at most
// 2^RESCALE_THRESHOLD, and rescaling is rare. A column's base, P and sums depend on its own scores alone and all sums
// have one order, so its bits do not depend on N8_TILES, on the number of stages, or on the other columns of the block.
//
// Shared memory: Q [4][QUERY_COLUMNS][64] f16, P [2][QUERY_COLUMNS][64] f16 (128-byte swizzle), K_STAGES tiles of keys,
// V_STAGES tiles of values, SoftmaxState.
// Needs: the defines of swapped_operands_sm90.cuh and kv_range.cuh, K_STAGES, V_STAGES. Blocks of 384 threads.
// arch sm_90a
#pragma once
#include "attention/swapped_operands_sm90.cuh"
#include "attention/kv_range.cuh"
#include "common/prelude.cuh"

// K of tile j + 2 has landed before P V of tile j starts, and V of tile j - 1 may still be in use then.
static_assert(K_STAGES >= 3 && V_STAGES >= 2, "K or V has too few stages");
#define RESCALE_THRESHOLD 8.0f
// Row sums per thread: half of its columns; the lane 16 apart has the other half.
#define THREAD_SUMS (4 * ((N8_TILES + 3) / 4))
// Registers per softmax thread and per PV thread after setmaxnreg.
#define SOFTMAX_REGISTERS 136
#define PV_REGISTERS 184
// Named barriers: softmax warpgroup; per parity: K full, P full, P empty.
#define SOFTMAX_BARRIER 1
#define K_FULL 6
#define P_FULL 2
#define P_EMPTY 4
// P V of a tile starts after this many of the DIM_BLOCKS K-steps of the next tile's scores are issued. If both started
// at once, they would share the tensor cores, which would then idle during the softmax.
#ifndef PV_START_STEP
#define PV_START_STEP 8
#endif

struct SoftmaxState {
    float base[QUERY_COLUMNS];              // subtracted from scores, in powers of two; 0 before the first visible key
    float running_max[QUERY_COLUMNS];       // the same; -INF before the first visible key
    float shift[QUERY_COLUMNS];             // how far the last change moved the base
    float rescale[2][QUERY_COLUMNS];        // factor on the accumulators before a tile, valid if any base moved
    float warp_partials[4][QUERY_COLUMNS];  // per softmax warp: row maxima, or row sums
    int rescaled[2];
};

__device__ __forceinline__ float fmax_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Ring of STAGES tiles of K or V that the PV warpgroups fill with cp.async.
template <int FORMAT, int STRIDE, int STAGES>
struct TileLoader {
    static constexpr int BYTES = tile_bytes(FORMAT, STRIDE);
    int key;  // next key to load
    u32 to;   // its stage
    u32 row;  // its cache row; looked up early because the page table lookup has a long latency

    // The stage after `stage`.
    static __device__ __forceinline__ u32 after(u32 stage, u32 smem_tiles) {
        return stage + BYTES == smem_tiles + STAGES * BYTES ? smem_tiles : stage + BYTES;
    }
};
typedef TileLoader<K_FORMAT, K_STRIDE, K_STAGES> KLoader;
typedef TileLoader<V_FORMAT, V_STRIDE, V_STAGES> VLoader;

// Column of this thread's row sum i.
__device__ __forceinline__ int thread_column(int i) {
    const int lane = threadIdx.x % 32;
    return 8 * (i / 4 * 4 + i % 4 / 2 + lane / 16 * 2) + 2 * (lane % 4) + i % 2;
}

// Moves the reference maximum (`base`) of every column whose maximum exceeds it by RESCALE_THRESHOLD, or that sees its
// first key, and rescales scores and row sums. Returns true while any column has seen no key. 128 threads.
__device__ __forceinline__ bool update_row_max_ref(float (&scores)[4 * N8_TILES], float (&sums)[THREAD_SUMS],
                                                   SoftmaxState& softmax, float* rescale) {
    const int lane = int(opaque(threadIdx.x % 32)), warp = threadIdx.x / 32, t = lane % 4;
    // A NaN score gets zero weight.
#pragma unroll
    for (int i = 0; i < 4 * N8_TILES; i++) scores[i] = fmaxf(scores[i], -INF);
    reduce_columns(
        softmax.warp_partials[warp], [&](int n, int e) { return fmaxf(scores[4 * n + e], scores[4 * n + 2 + e]); },
        [](float a, float b) { return fmaxf(a, b); });
    named_barrier_sync<128>(SOFTMAX_BARRIER);
    bool any_column_empty = false;
#pragma unroll 1
    for (int column = threadIdx.x; column < QUERY_COLUMNS; column += 128) {
        float tile_max = softmax.warp_partials[0][column];
#pragma unroll
        for (int w = 1; w < 4; w++) tile_max = fmaxf(tile_max, softmax.warp_partials[w][column]);
        const bool first = softmax.running_max[column] == -INF;
        const float by = first ? (tile_max == -INF ? 0.0f : tile_max) : tile_max > RESCALE_THRESHOLD ? tile_max : 0.0f;
        softmax.shift[column] = by;
        rescale[column] = first ? 1.0f : exp2_approx(-by);
        softmax.base[column] += by;
        if (!first || tile_max > -INF) softmax.running_max[column] = softmax.base[column];
        any_column_empty |= first && tile_max == -INF;
    }
    any_column_empty = named_barrier_or<SOFTMAX_BARRIER, 128>(any_column_empty);
#pragma unroll
    for (int n = 0; n < N8_TILES; n++) {
        const float2 by = *(const float2*)(softmax.shift + 8 * n + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // An infinite score minus an infinite base gets zero weight.
            scores[4 * n + 2 * r] = fmaxf(scores[4 * n + 2 * r] - by.x, -INF);
            scores[4 * n + 2 * r + 1] = fmaxf(scores[4 * n + 2 * r + 1] - by.y, -INF);
        }
    }
#pragma unroll
    for (int i = 0; i < THREAD_SUMS; i++)
        if (thread_column(i) < QUERY_COLUMNS) sums[i] *= rescale[thread_column(i)];
    named_barrier_sync<128>(SOFTMAX_BARRIER);
    return any_column_empty;
}

// Stores P of a warp's 16 keys (keys along the rows of the panel) and adds it to the row sums.
__device__ __forceinline__ void store_p(const float (&scores)[4 * N8_TILES], float (&sums)[THREAD_SUMS], u32 smem_p) {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 * 2 + lane / 8 % 2;
    const bool upper = lane / 16;
    float pair_sums[8];
    u32 f16_pairs[4];
#pragma unroll
    for (int n = 0; n < N8_TILES; n++) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = exp2_approx(scores[4 * n + i]);
        f16_pairs[n % 2 * 2] = f32x2_to_f16x2(w[0], w[1]);
        f16_pairs[n % 2 * 2 + 1] = f32x2_to_f16x2(w[2], w[3]);
        pair_sums[n % 4 * 2] = w[0] + w[2], pair_sums[n % 4 * 2 + 1] = w[1] + w[3];
        store_p_columns(smem_p, n, lane, chunk, f16_pairs);
        if (n % 4 == 3 || n == N8_TILES - 1) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float low = j / 2 <= n % 4 ? pair_sums[j] : 0.0f,
                            high = j / 2 + 2 <= n % 4 ? pair_sums[4 + j] : 0.0f;
                sums[n / 4 * 4 + j] += (upper ? high : low) + __shfl_xor_sync(WARP_ALL, upper ? low : high, 16);
            }
        }
    }
}

// Subtracts the base from the scores of columns 8 n .. + 8, in powers of two. `tile_max` keeps the maximum per fragment
// element, or NaN.
__device__ __forceinline__ void subtract_base(float (&scores)[4 * N8_TILES], float (&tile_max)[4], int n,
                                              const uint2& base, float scale_log2) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float base_of_column = __uint_as_float(i % 2 ? base.y : base.x);
        scores[4 * n + i] = fmaf(scores[4 * n + i], scale_log2, -base_of_column);
        tile_max[i] = fmax_nan(tile_max[i], scores[4 * n + i]);
    }
}

// Online softmax of tile number `tile`: waits for P empty of its parity, moves bases if `tile_max` requires it or a
// column has seen no key, and stores P. Returns true while any column has seen no key.
__device__ __forceinline__ bool softmax_tile(float (&scores)[4 * N8_TILES], float (&sums)[THREAD_SUMS],
                                             bool any_column_empty, const float (&tile_max)[4], SoftmaxState& softmax,
                                             int tile, u32 smem_p) {
    const int buffer = tile & 1;
    // P empty: P V of tile - 2 is done.
    if (tile >= 2) named_barrier_sync<384>(P_EMPTY + buffer);
    const bool any_rescale =
        named_barrier_or<SOFTMAX_BARRIER, 128>(
            !(fmax_nan(fmax_nan(tile_max[0], tile_max[1]), fmax_nan(tile_max[2], tile_max[3])) <= RESCALE_THRESHOLD)) ||
        any_column_empty;
    if (any_rescale) any_column_empty = update_row_max_ref(scores, sums, softmax, softmax.rescale[buffer]);
    if (threadIdx.x == 0) softmax.rescaled[buffer] = any_rescale;
    store_p(scores, sums, smem_p + buffer * PANEL_BYTES);
    // The fence also waits for this thread's outstanding copies; the PV warpgroups issue the copies instead.
    fence_proxy_async();
    return any_column_empty;
}

// Consumes the last P empty arrivals, so that no barrier is left half full.
__device__ __forceinline__ void drain_barriers(int tile) {
    if (tile >= 2) named_barrier_sync<384>(P_EMPTY + (tile & 1));
    named_barrier_sync<384>(P_EMPTY + (~tile & 1));
}

// A warp's row sum of each column, to to[column].
__device__ __forceinline__ void reduce_row_sums(float* to, const float (&sums)[THREAD_SUMS]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < THREAD_SUMS / 4; k++) {
        const float* v = sums + 4 * k;
        float w[2];
#pragma unroll
        for (int j = 0; j < 2; j++)
            w[j] = (g & 2 ? v[j + 2] : v[j]) + __shfl_xor_sync(WARP_ALL, g & 2 ? v[j] : v[j + 2], 8);
        const float x = (g & 1 ? w[1] : w[0]) + __shfl_xor_sync(WARP_ALL, g & 1 ? w[0] : w[1], 4);
        const int n = 4 * k + g / 4 * 2 + g / 2 % 2;
        if (n < N8_TILES) to[8 * n + 2 * t + g % 2] = x;
    }
}

// Row sum of a column over the softmax warps.
__device__ __forceinline__ float row_sum_of_column(const SoftmaxState& softmax, int column) {
    float sum = softmax.warp_partials[0][column];
#pragma unroll
    for (int w = 1; w < 4; w++) sum += softmax.warp_partials[w][column];
    return sum;
}

// sums[64 dims][QUERY_COLUMNS] += V^T P^T over 16 keys; `low` and `high` are the value fragments of dims 0..16, 16..32.
__device__ __forceinline__ void pv_mma_step(float (&sums)[4 * N8_TILES], const u32 (&low)[2], const u32 (&high)[2],
                                            u64 p) {
    wgmma_fence();
    wgmma_rs(sums, low[0], high[0], low[1], high[1], p, 1);
    wgmma_commit();
    wgmma_wait<1>();
}
