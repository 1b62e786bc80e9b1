// Hidden rows of the multi-token-prediction head: a block holds one row of HIDDEN values in registers.
//
// The pool has HIDDEN_ROWS rows per slot. Row 0 is the last committed position's row after the final norm (zeros at
// position 0). Rows from 1 on are the nodes of the pending tree, or the outputs of the rows that the head has drafted.
// Every kernel norms a row with the same code, so its bits do not depend on which kernel computes it.
// Needs: HIDDEN (a multiple of 8), HIDDEN_ROWS.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"

#define HIDDEN_THREADS 256
#define HIDDEN_CHUNKS (HIDDEN / 8)
#define HIDDEN_CHUNKS_PER_THREAD ((HIDDEN_CHUNKS + HIDDEN_THREADS - 1) / HIDDEN_THREADS)

// Values 8 c .. 8 c + 7 of the row for c = threadIdx.x + HIDDEN_THREADS * i; zeros past HIDDEN.
struct HiddenRow {
    float at[HIDDEN_CHUNKS_PER_THREAD][8];
};

// The row of a node of a slot's pending tree, or of a drafted row; -1 for the last committed one.
__device__ __forceinline__ size_t hidden_row_index(int slot, int node) { return (size_t)slot * HIDDEN_ROWS + 1 + node; }

// Values 8 chunk .. 8 chunk + 7 of a row; zeros past HIDDEN.
__device__ __forceinline__ void load_chunk(const float* from, int chunk, float (&v)[8]) {
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (chunk < HIDDEN_CHUNKS) a = ((const float4*)from)[2 * chunk], b = ((const float4*)from)[2 * chunk + 1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ __forceinline__ void load_hidden_row(const float* from, HiddenRow& row) {
#pragma unroll
    for (int i = 0; i < HIDDEN_CHUNKS_PER_THREAD; i++) load_chunk(from, threadIdx.x + HIDDEN_THREADS * i, row.at[i]);
}

__device__ __forceinline__ void store_hidden_row(float* to, const HiddenRow& row) {
#pragma unroll
    for (int i = 0; i < HIDDEN_CHUNKS_PER_THREAD; i++) {
        const int chunk = threadIdx.x + HIDDEN_THREADS * i;
        if (chunk >= HIDDEN_CHUNKS) continue;
        ((float4*)to)[2 * chunk] = make_float4(row.at[i][0], row.at[i][1], row.at[i][2], row.at[i][3]);
        ((float4*)to)[2 * chunk + 1] = make_float4(row.at[i][4], row.at[i][5], row.at[i][6], row.at[i][7]);
    }
}

// row = row / sqrt(mean(row^2) + eps) * weight. All threads of the block take part; it ends with a barrier.
__device__ __forceinline__ void norm_hidden_row(HiddenRow& row, const float* __restrict__ weight, float eps,
                                                float* warp_sums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HIDDEN_CHUNKS_PER_THREAD; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(row.at[i][j], row.at[i][j], sum);
    const float scale = 1.0f / sqrtf(block_sum<HIDDEN_THREADS / 32>(sum, warp_sums) / HIDDEN + eps);
#pragma unroll
    for (int i = 0; i < HIDDEN_CHUNKS_PER_THREAD; i++) {
        float w[8];
        load_chunk(weight, threadIdx.x + HIDDEN_THREADS * i, w);
#pragma unroll
        for (int j = 0; j < 8; j++) row.at[i][j] = row.at[i][j] * scale * w[j];
    }
}
