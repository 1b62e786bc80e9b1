// Epilogue of prefill attention: one head of 16 rows, divided by the row sums, gated, stored as f16 panels or f32 rows.
//
// Needs: HEAD_DIM, HEADS, GATED; PANELS_OUT and F32_OUT (0 or 1).
#pragma once
#include "gemm/panel_layout.cuh"

#define HEAD_STRIDE (GATED ? 2 * HEAD_DIM : HEAD_DIM)

struct HeadOutput {
    const float* q;  // f32 [rows][q_stride], each gate after its head
    int q_stride, rows;
    char* panels;
    int rows_cap;
    float* y;  // f32 [rows][HEADS * HEAD_DIM]
};

// A warp stores 16 rows from `first` of head `head`; a lane has rows lane / 4 + 8 * half. `at(chunk, half, c)` is its
// value at column 8 * chunk + 2 * (lane % 4) + c; `row_sum` is its part of the sum of a row.
template <class Accessor>
__device__ __forceinline__ void store_head_rows(const HeadOutput& to, int first, int head, const float (&row_sum)[2],
                                                const Accessor& at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = row_sum[half];
        sum += __shfl_xor_sync(WARP_ALL, sum, 1);
        sum += __shfl_xor_sync(WARP_ALL, sum, 2);
        // No visible key: 0. A NaN sum stays NaN.
        const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = first + lane / 4 + 8 * half;
        const bool valid = row < to.rows;
        // A warp may have no row at all.
        const float* gates =
            to.q + (u64)(valid ? row : to.rows - 1) * to.q_stride + head * HEAD_STRIDE + HEAD_DIM + lane % 4 * 2;
        char* panel = to.panels + panel_chunk(to.rows_cap, row, head * (HEAD_DIM / 8) + lane % 4);
#pragma unroll
        for (int chunk = 0; chunk < HEAD_DIM / 8; chunk += 4) {
            u32 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float a = at(chunk + j, half, 0) * factor, b = at(chunk + j, half, 1) * factor;
                if (GATED) {
                    const float2 gate = __ldg((const float2*)(gates + (chunk + j) * 8));
                    a = __fdividef(a, 1.0f + __expf(-gate.x));
                    b = __fdividef(b, 1.0f + __expf(-gate.y));
                }
#if F32_OUT
                const int column = head * HEAD_DIM + (chunk + j) * 8 + lane % 4 * 2;
                if (valid) {
                    *(float2*)(to.y + (u64)row * (HEADS * HEAD_DIM) + column) = make_float2(a, b);
                }
#endif
                pairs[j] = panel_f16x2(a, b);
            }
#if PANELS_OUT
            quad_transpose(pairs);
            if (valid) {
                *(uint4*)panel = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
#endif
            // The other half of the 128-byte line, or the line of the next panel.
            panel = (char*)((u64)panel ^ 64) + (chunk % 8 ? (u64)to.rows_cap * 128 : 0);
        }
    }
}
