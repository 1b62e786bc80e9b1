// End of a draft's sublayer: its output through the dynamic convolution and a norm of its own, each if it has one, into
// the residual stream; then the norm before the next sublayer, in the formats that its first GEMM reads.
//
//   a = TAPS ? sum over tap of (base[1, tap, c] + dynamic[t, 1, tap, c / GROUP]) * update[t - tap, c] : update
//   a = POST_NORM ? rms(a) * post_norm : a;   x += a;   y = rms(x) * next_norm
//   rms(x) = x / sqrt(mean(x^2) + eps)
//
// in   header Step     x f32 [rows][WIDTH] (written back)     update as x     base f32 [2][TAPS][WIDTH]
//      dynamic f32 [rows][2][TAPS][WIDTH / GROUP]     norms f32 [WIDTH]
// out  y (norm/row_output.cuh), with NEXT_NORM
// grid rows x NORM_WARPS * 32, the row in registers
// smem 4 bytes per warp
// arch sm_80 and up     references cpu::reference::{draft::convolve_row, norm::rms}
// test crates/cuda/tests/drafts.rs
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "norm/row_output.cuh"
#if TAPS
#include "draft/block_conv.cuh"
#else
struct BlockConv {
    const float *base, *dynamic;
};
#endif

#define PER_WARP ((ROW_GROUPS + NORM_WARPS - 1) / NORM_WARPS)

// The scale of a row's norm; all threads take part.
__device__ __forceinline__ float norm_scale(const float (&v)[PER_WARP][8], float eps, float* warp_sums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[i][j] * v[i][j];
    return 1.0f / sqrtf(block_sum<NORM_WARPS>(sum, warp_sums) / WIDTH + eps);
}

extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32)
    draft_finish_sublayer(const Step* step, float* x, const float* update, BlockConv conv,
                          const float* __restrict__ post_norm, const float* __restrict__ next_norm, float eps,
                          RowOutput out) {
    pdl_launch();
    __shared__ float warp_sums[NORM_WARPS];
    const int row = blockIdx.x, warp = threadIdx.x / 32;
    const bool is_active = row < step->rows;
    const int first = is_active ? step->tree[step->tree_of[row]].first : 0;
    float v[PER_WARP][8], old[PER_WARP][8], w[PER_WARP][8];
    float* stream = x + (size_t)row * WIDTH;
    // Weights come from far memory: they are loaded before the wait.
#if TAPS
    ConvBase base[PER_WARP];
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int column = (warp + i * NORM_WARPS) * 256 + threadIdx.x % 32 * 8;
        if (column < WIDTH) load_base<1>(conv, column, base[i]);
    }
#endif
#if NEXT_NORM
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) load_row_group<WIDTH>(next_norm, warp + i * NORM_WARPS, w[i]);
#endif
    pdl_wait();
    if (!is_active) return;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int group = warp + i * NORM_WARPS;
        load_row_group<WIDTH>(stream, group, old[i]);
#if TAPS
        const int column = group * 256 + threadIdx.x % 32 * 8;
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = 0.0f;
        if (column < WIDTH) convolve_8<1>(conv, base[i], update, row, first, column, v[i]);
#else
        load_row_group<WIDTH>(update + (size_t)row * WIDTH, group, v[i]);
#endif
    }
#if POST_NORM
    const float post_scale = norm_scale(v, eps, warp_sums);
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        float post[8];
        load_row_group<WIDTH>(post_norm, warp + i * NORM_WARPS, post);
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = v[i][j] * post_scale * post[j];
    }
#endif
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int column = (warp + i * NORM_WARPS) * 256 + threadIdx.x % 32 * 8;
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] += old[i][j];
        if (column < WIDTH) {
            ((float4*)(stream + column))[0] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
            ((float4*)(stream + column))[1] = make_float4(v[i][4], v[i][5], v[i][6], v[i][7]);
        }
    }
#if NEXT_NORM
    const float scale = norm_scale(v, eps, warp_sums);
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int group = warp + i * NORM_WARPS;
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = v[i][j] * scale * w[i][j];
        if (group < ROW_GROUPS) store_row_group(out, row, group, v[i]);
    }
#endif
}
