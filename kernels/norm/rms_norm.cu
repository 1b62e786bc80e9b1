// RMS norm of rows, with an optional residual add, in the formats that the next GEMM reads.
//
//   rms_norm      UPDATE: x += update;   y = x / sqrt(mean(x^2) + eps) * weight
//   convert_rows  y = x in those formats
//
// in   header (source_rows.cuh)     x f32 [rows][WIDTH] (written back with UPDATE)     update as x     weight f32
//      [WIDTH]
// out  y (row_output.cuh); scales f32 [rows], 1 / sqrt(..) of each row, or 0 for none
// grid rms_norm: rows x NORM_WARPS * 32, the row in registers; convert_rows (NORM_WARPS 0): (groups of 256 / 4, rows) x
//      128
// arch sm_80 and up     reference cpu::reference::norm::rms     test crates/cuda/tests/norm.rs
#include "common/prelude.cuh"
#include "norm/source_rows.cuh"
#include "norm/row_output.cuh"

#define PER_WARP ((ROW_GROUPS + NORM_WARPS - 1) / NORM_WARPS)

#if NORM_WARPS
extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32)
    rms_norm(const Header* header, float* x, const float* update, const float* __restrict__ weight, float eps,
             RowOutput out, float* scales) {
    pdl_launch();
    __shared__ float warp_sums[NORM_WARPS];
    const int row = blockIdx.x, warp = threadIdx.x / 32;
    float w[PER_WARP][8], v[PER_WARP][8];
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) load_row_group<WIDTH>(weight, warp + i * NORM_WARPS, w[i]);
    const bool is_active = row < n_source_rows(header);
    float* src = x + (size_t)(is_active ? source_row(header, row) : 0) * WIDTH;
    pdl_wait();
    if (!is_active) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) load_row_group<WIDTH>(src, warp + i * NORM_WARPS, v[i]);
#if UPDATE
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int group = warp + i * NORM_WARPS, at = group * 256 + threadIdx.x % 32 * 8;
        float u[8];
        load_row_group<WIDTH>(update + (size_t)row * WIDTH, group, u);
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] += u[j];
        if (WIDTH % 8 == 0 && at < WIDTH) {
            ((float4*)(src + at))[0] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
            ((float4*)(src + at))[1] = make_float4(v[i][4], v[i][5], v[i][6], v[i][7]);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (at + j < WIDTH) src[at + j] = v[i][j];
        }
    }
#endif
#pragma unroll
    for (int i = 0; i < PER_WARP; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[i][j] * v[i][j];
    const float scale = 1.0f / sqrtf(block_sum<NORM_WARPS>(sum, warp_sums) / WIDTH + eps);
    if (scales && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int group = warp + i * NORM_WARPS;
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = v[i][j] * scale * w[i][j];
        if (group < ROW_GROUPS) store_row_group(out, row, group, v[i]);
    }
}
#else

extern "C" __global__ void __launch_bounds__(128) convert_rows(const Header* header, const float* x, RowOutput out) {
    pdl_launch();
    const int row = blockIdx.y, group = blockIdx.x * 4 + threadIdx.x / 32;
    const bool is_active = row < n_source_rows(header) && group < ROW_GROUPS;
    const float* src = x + (size_t)(is_active ? source_row(header, row) : 0) * WIDTH;
    pdl_wait();
    if (!is_active) return;
    float v[8];
    load_row_group<WIDTH>(src, group, v);
    store_row_group(out, row, group, v);
}
#endif
