// Attention with swapped operands (S^T) on Hopper: K and V are the register operand of wgmma, so quantized codes go
// from the stored bytes straight into A fragments, once for all queries of a block.
//
//   S^T[128 keys][QUERY_COLUMNS] = K Q^T      O^T[256 dims][QUERY_COLUMNS] += V^T P^T      QUERY_COLUMNS = 8 N8_TILES
//
// Two warpgroups: each computes the scores of 64 of the 128 keys, then accumulates 128 of the 256 dims over all keys. P
// is exchanged through shared memory. A column's bits depend neither on N8_TILES nor on the column index.
//
// Shared memory, 1024-byte aligned:
//   Q [4][QUERY_COLUMNS][64] f16   P [2][QUERY_COLUMNS][64] f16   both in the 128-byte swizzle
//   STAGES stages of 128 keys or values, each two tiles of 64 (kv_tiles.cuh)   SoftmaxStorage
// Needs: HEAD_DIM (256), N8_TILES, STAGES, K_FORMAT, V_FORMAT. Arch sm_90a.
#pragma once
#include "attention/kv_tiles.cuh"
#include "common/prelude.cuh"
#include "common/wgmma_sm90.cuh"

#if HEAD_DIM != 256
#error "attention/swapped_operands_sm90.cuh needs HEAD_DIM 256"
#endif
#define QUERY_COLUMNS (8 * N8_TILES)
#define BLOCK_KV 128
#define K_STRIDE key_stride(K_FORMAT)
#define V_STRIDE value_stride(V_FORMAT)
#define PANEL_BYTES (QUERY_COLUMNS * 128)
#define K_TILE_BYTES tile_bytes(K_FORMAT, K_STRIDE)
#define V_TILE_BYTES tile_bytes(V_FORMAT, V_STRIDE)
#define STAGE_BYTES (2 * (K_TILE_BYTES > V_TILE_BYTES ? K_TILE_BYTES : V_TILE_BYTES))
// wgmma groups in flight while the codes of the next group are dequantized.
#ifndef WGMMA_IN_FLIGHT
#define WGMMA_IN_FLIGHT 1
#endif
// ROLLED: if a block has only one or two tiles, its code runs about once and instruction fetch dominates, so loops stay
// rolled.
#ifndef ROLLED
#define ROLLED 0
#endif
#define QK_UNROLL (ROLLED ? 1 : DIM_BLOCKS)

struct SoftmaxStorage {
    float warp_partials[8][QUERY_COLUMNS];  // per warp: row maxima, then row sums of P
    float running_max[QUERY_COLUMNS];       // in powers of two
    float base[QUERY_COLUMNS];              // subtracted from the scores of this KV block
    float rescale[QUERY_COLUMNS];           // factor on earlier accumulators
    float row_sum[QUERY_COLUMNS];
};

#define ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC_12(d, i) ACC_4(d, i), ACC_8(d, i + 4)
#define ACC_16(d, i) ACC_8(d, i), ACC_8(d, i + 8)
#define ACC_24(d, i) ACC_16(d, i), ACC_8(d, i + 16)
#define ACC_36(d, i) ACC_32(d, i), ACC_4(d, i + 32)
#define ACC_48(d, i) ACC_32(d, i), ACC_16(d, i + 32)
#define ACC_72(d, i) ACC_64(d, i), ACC_8(d, i + 64)
#define OPERANDS_4 "%0, %1, %2, %3"
#define OPERANDS_8 OPERANDS_4 ", %4, %5, %6, %7"
#define OPERANDS_12 OPERANDS_8 ", %8, %9, %10, %11"
#define OPERANDS_16 OPERANDS_12 ", %12, %13, %14, %15"
#define OPERANDS_24 OPERANDS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define OPERANDS_36 OPERANDS_32 ", %32, %33, %34, %35"
#define OPERANDS_48 \
    OPERANDS_32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define OPERANDS_72 OPERANDS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_RS(N, SUMS, PLACES, A, B, C, D, W, P)                                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N            \
                 "k16.f32.f16.f16 {" PLACES "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #W ", p, 1, 1, 0;\n}\n" \
                 : SUMS(d, 0)                                                                                    \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add))

// d[64][QUERY_COLUMNS] (+)= a b: a in registers, b in shared memory, K-major.
__device__ __forceinline__ void wgmma_rs(float (&d)[4 * N8_TILES], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
#if N8_TILES == 1
    WGMMA_RS(8, ACC_4, OPERANDS_4, 4, 5, 6, 7, 8, 9);
#elif N8_TILES == 2
    WGMMA_RS(16, ACC_8, OPERANDS_8, 8, 9, 10, 11, 12, 13);
#elif N8_TILES == 3
    WGMMA_RS(24, ACC_12, OPERANDS_12, 12, 13, 14, 15, 16, 17);
#elif N8_TILES == 4
    WGMMA_RS(32, ACC_16, OPERANDS_16, 16, 17, 18, 19, 20, 21);
#elif N8_TILES == 6
    WGMMA_RS(48, ACC_24, OPERANDS_24, 24, 25, 26, 27, 28, 29);
#elif N8_TILES == 8
    WGMMA_RS(64, ACC_32, OPERANDS_32, 32, 33, 34, 35, 36, 37);
#elif N8_TILES == 9
    WGMMA_RS(72, ACC_36, OPERANDS_36, 36, 37, 38, 39, 40, 41);
#elif N8_TILES == 12
    WGMMA_RS(96, ACC_48, OPERANDS_48, 48, 49, 50, 51, 52, 53);
#elif N8_TILES == 16
    WGMMA_RS(128, ACC_64, OPERANDS_64, 64, 65, 66, 67, 68, 69);
#elif N8_TILES == 18
    WGMMA_RS(144, ACC_72, OPERANDS_72, 72, 73, 74, 75, 76, 77);
#else
#error "N8_TILES must be 1, 2, 3, 4, 6, 8, 9, 12, 16 or 18"
#endif
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Byte offset of 16-byte chunk `chunk` of row `column` in panels of 64 values.
__device__ __forceinline__ u32 swizzled_offset(int column, int chunk) {
    return chunk / 8 * PANEL_BYTES + column * 128 + ((chunk ^ column) & 7) * 16;
}

// Stores lane t's four pairs of dim block b of a query in the order of key_fragment.
__device__ __forceinline__ void store_query_words(u32 smem_q, int column, int b, int t, const uint4& pairs) {
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem_q + swizzled_offset(column, 4 * b + i) + 4 * t), "r"(words[i])
                     : "memory");
}

// scores[64 keys][QUERY_COLUMNS] of one tile; `key` is this thread's first key. Calls `callback` after CALL_AFTER of
// the DIM_BLOCKS K-steps are issued.
template <int CALL_AFTER, class Callback>
__device__ __forceinline__ void qk_mma_tile(float (&scores)[4 * N8_TILES], u32 tile, int key, u32 smem_q,
                                            const Callback& callback) {
#pragma unroll QK_UNROLL
    for (int b = 0; b < DIM_BLOCKS; b++) {
        if (b == CALL_AFTER) callback();
        u32 low[4], high[4];
        key_fragment<K_FORMAT, K_STRIDE>(tile, key, b, low);
        key_fragment<K_FORMAT, K_STRIDE>(tile, key + 8, b, high);
        const u64 q = wgmma_desc(smem_q + b / 2 * PANEL_BYTES) + b % 2 * 4;
        wgmma_fence();
        wgmma_rs(scores, low[0], high[0], low[1], high[1], q, b > 0);
        wgmma_rs(scores, low[2], high[2], low[3], high[3], q + 2, 1);
        wgmma_commit();
        wgmma_wait<WGMMA_IN_FLIGHT>();
    }
    if (CALL_AFTER == DIM_BLOCKS) callback();
    wgmma_wait<0>();
}

// The same with two warpgroups, one tile each.
__device__ __forceinline__ void qk_mma(float (&scores)[4 * N8_TILES], u32 tile, u32 smem_q) {
    qk_mma_tile<DIM_BLOCKS>(scores, tile, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, smem_q, [] {});
}

// sums[2][64 dims][QUERY_COLUMNS] += V^T P^T over the 128 values of a stage; this warp has the dims of `block`.
__device__ __forceinline__ void pv_mma(float (&sums)[2][4 * N8_TILES], u32 slot, int block, u32 smem_p) {
#pragma unroll
    for (int step = 0; step < BLOCK_KV / 16; step++) {
        u32 v[4][2];
        value_fragments<V_FORMAT, V_STRIDE>(slot + step / 4 * V_TILE_BYTES, step % 4, block, v);
        const u64 p = wgmma_desc(smem_p + step / 4 * PANEL_BYTES) + step % 4 * 2;
        wgmma_fence();
        wgmma_rs(sums[0], v[0][0], v[1][0], v[0][1], v[1][1], p, 1);
        wgmma_rs(sums[1], v[2][0], v[3][0], v[2][1], v[3][1], p, 1);
        wgmma_commit();
        wgmma_wait<WGMMA_IN_FLIGHT>();
    }
    wgmma_wait<0>();
}

// Reduces each column over its eight lanes into to[column]; value_of(n, e) is this thread's value of column 8 n + 2 t +
// e. The order is the same for all columns.
template <class Value, class Combine>
__device__ __forceinline__ void reduce_columns(float* to, const Value& value_of, const Combine& combine) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < (N8_TILES + 3) / 4; k++) {
        // Eight columns over eight lanes: exchange half of them, then a quarter, then an eighth.
        float v[4], w[2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int n = 4 * k + j / 2;
            const float low = n < N8_TILES ? value_of(n < N8_TILES ? n : 0, j % 2) : 0.0f;
            const float high = n + 2 < N8_TILES ? value_of(n + 2 < N8_TILES ? n + 2 : 0, j % 2) : 0.0f;
            v[j] = combine(g & 4 ? high : low, __shfl_xor_sync(WARP_ALL, g & 4 ? low : high, 16));
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
            w[j] = combine(g & 2 ? v[j + 2] : v[j], __shfl_xor_sync(WARP_ALL, g & 2 ? v[j] : v[j + 2], 8));
        const float x = combine(g & 1 ? w[1] : w[0], __shfl_xor_sync(WARP_ALL, g & 1 ? w[0] : w[1], 4));
        const int n = 4 * k + g / 2;
        if (N8_TILES % 4 == 0 || n < N8_TILES) to[8 * n + 2 * t + g % 2] = x;
    }
}

// Stores P of 16 keys as f16 pairs. Columns 8 n .. + 8 are in halves[n % 2 * 2] and the next; stmatrix runs for two n8
// tiles if n is odd, and for one if n is even and the last.
__device__ __forceinline__ void store_p_columns(u32 smem_p, int n, int lane, int chunk, const u32 (&f16_pairs)[4]) {
    if (n % 2) {
        const u32 at = smem_p + swizzled_offset(8 * (n - 1 + lane / 16) + lane % 8, chunk);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(f16_pairs[0]), "r"(f16_pairs[1]), "r"(f16_pairs[2]), "r"(f16_pairs[3])
                     : "memory");
    } else if (n == N8_TILES - 1) {
        const u32 at = smem_p + swizzled_offset(8 * n + lane % 8, chunk);
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(f16_pairs[0]),
                     "r"(f16_pairs[1])
                     : "memory");
    }
}
// Rescales the accumulators of columns 8 n .. + 8.
__device__ __forceinline__ void rescale_columns(float (&sums)[4 * N8_TILES], int n, float2 by) {
    sums[4 * n] *= by.x, sums[4 * n + 1] *= by.y, sums[4 * n + 2] *= by.x, sums[4 * n + 3] *= by.y;
}

// Online softmax of a KV block: scores become P in shared memory, and earlier accumulators are rescaled. All 256
// threads. Calls `release_keys` when no thread reads K any more. V may still be in flight on return: a barrier must
// precede pv_mma.
template <class ReleaseKeys>
__device__ __forceinline__ void online_softmax(float (&scores)[4 * N8_TILES], float (&sums)[2][4 * N8_TILES],
                                               SoftmaxStorage& softmax, u32 smem_p, float scale_log2,
                                               const ReleaseKeys& release_keys) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    reduce_columns(
        softmax.warp_partials[warp], [&](int n, int e) { return fmaxf(scores[4 * n + e], scores[4 * n + 2 + e]); },
        [](float a, float b) { return fmaxf(a, b); });
    __syncthreads();
    release_keys();
    bool any_rescale = false;
    if (threadIdx.x < QUERY_COLUMNS) {
        float max_of_warps = softmax.warp_partials[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < 8; w++) max_of_warps = fmaxf(max_of_warps, softmax.warp_partials[w][threadIdx.x]);
        const float old_max = softmax.running_max[threadIdx.x], new_max = fmaxf(old_max, max_of_warps * scale_log2);
        const float base = new_max == -INF ? 0.0f : new_max, rescale = exp2_approx(old_max - base);
        softmax.running_max[threadIdx.x] = new_max;
        softmax.base[threadIdx.x] = base;
        softmax.rescale[threadIdx.x] = rescale;
        any_rescale = rescale != 1.0f;
    }
    if (__syncthreads_or(any_rescale)) {
#pragma unroll
        for (int n = 0; n < N8_TILES; n++) {
            const float2 by = *(const float2*)(softmax.rescale + 8 * n + 2 * t);
#pragma unroll
            for (int m = 0; m < 2; m++) rescale_columns(sums[m], n, by);
        }
    }
    // P of a warp's 16 keys; keys run along the rows of its warpgroup's panel.
    const int chunk = warp * 2 + lane / 8 % 2;
    u32 f16_pairs[4];
#pragma unroll
    for (int n = 0; n < N8_TILES; n++) {
        const float2 base = *(const float2*)(softmax.base + 8 * n + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float* s = scores + 4 * n + 2 * r;
            // A NaN score gets zero weight.
            s[0] = fmaxf(exp2_approx(fmaf(s[0], scale_log2, -base.x)), 0.0f);
            s[1] = fmaxf(exp2_approx(fmaf(s[1], scale_log2, -base.y)), 0.0f);
            f16_pairs[n % 2 * 2 + r] = f32x2_to_f16x2(s[0], s[1]);
        }
        store_p_columns(smem_p, n, lane, chunk, f16_pairs);
    }
    fence_proxy_async();
    reduce_columns(
        softmax.warp_partials[warp], [&](int n, int e) { return scores[4 * n + e] + scores[4 * n + 2 + e]; },
        [](float a, float b) { return a + b; });
}

// Adds the row sums of the KV block; a barrier must stand between online_softmax and this.
__device__ __forceinline__ void accumulate_row_sums(SoftmaxStorage& softmax) {
    if (threadIdx.x < QUERY_COLUMNS) {
        float sum = softmax.row_sum[threadIdx.x] * softmax.rescale[threadIdx.x];
#pragma unroll
        for (int w = 0; w < 8; w++) sum += softmax.warp_partials[w][threadIdx.x];
        softmax.row_sum[threadIdx.x] = sum;
    }
}

// Stores a column's four dims of a 32-dim block that lane g has.
template <int format>
__device__ __forceinline__ void store_four_dims(float* block, int g, const float (&v)[4]) {
    if (format == KV_Q8_0) {
        ((float4*)block)[g] = make_float4(v[0], v[1], v[2], v[3]);
    } else if (format <= KV_BF16 || format == KV_TQ3_0) {
#pragma unroll
        for (int i = 0; i < 4; i++) block[8 * i + g] = v[i];
    } else {
        ((float2*)block)[g] = make_float2(v[0], v[1]);
        ((float2*)block)[8 + g] = make_float2(v[2], v[3]);
    }
}
