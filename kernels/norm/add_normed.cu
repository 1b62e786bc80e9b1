// The norm behind a block, and the residual: x += update / sqrt(mean(update^2) + eps) * weight.
//
// in   header (source_rows.cuh)     update f32 [rows][WIDTH]     weight f32 [WIDTH]
// out  x f32 [rows][WIDTH], in place
// grid rows x NORM_WARPS * 32, the row in registers
// smem a float per warp
// arch sm_80 and up     reference cpu::reference::norm::rms     test crates/cuda/tests/norm.rs
#include "common/prelude.cuh"
#include "norm/row_output.cuh"
#include "norm/source_rows.cuh"

#define PER_WARP ((ROW_GROUPS + NORM_WARPS - 1) / NORM_WARPS)

extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32)
    add_normed(const Header* header, float* x, const float* update, const float* __restrict__ weight, float eps) {
    pdl_launch();
    __shared__ float warp_sums[NORM_WARPS];
    const int row = blockIdx.x, warp = threadIdx.x / 32;
    float w[PER_WARP][8], v[PER_WARP][8];
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) load_row_group<WIDTH>(weight, warp + i * NORM_WARPS, w[i]);
    const bool is_active = row < n_source_rows(header);
    pdl_wait();
    if (!is_active) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        load_row_group<WIDTH>(update + (size_t)row * WIDTH, warp + i * NORM_WARPS, v[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[i][j] * v[i][j];
    }
    const float scale = 1.0f / sqrtf(block_sum<NORM_WARPS>(sum, warp_sums) / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int column = (warp + i * NORM_WARPS) * 256 + threadIdx.x % 32 * 8;
        float* to = x + (size_t)row * WIDTH + column;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (column + j < WIDTH) to[j] += v[i][j] * scale * w[i][j];
    }
}
