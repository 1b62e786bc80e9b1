// The input row of a GEMV of one row in shared memory: f16 as it is, or the RMS norm of f32 values.
//
// The norm is norm/rms_norm with NORM_WARPS warps, by WARPS warps; a warp may have the work of several of those.
// gemm/gemv.cu and one_launch/one_launch.cu include this.
// Needs: WIDTH (of a normed row), NORM_WARPS.
#pragma once
#include "common/prelude.cuh"
#include "gemm/a16_layout.cuh"
#include "norm/row_output.cuh"

#define GROUPS_PER_WARP ((ROW_GROUPS + NORM_WARPS - 1) / NORM_WARPS)

template <int WARPS_>
struct NormWeights {
    static constexpr int ROUNDS = (NORM_WARPS + WARPS_ - 1) / WARPS_;
    float value[ROUNDS][GROUPS_PER_WARP][8];
};

template <int WARPS_>
__device__ __forceinline__ void load_norm_weights(const float* weights, NormWeights<WARPS_>& norm) {
#pragma unroll
    for (int r = 0; r < norm.ROUNDS; r++)
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) {
            const int warp = threadIdx.x / 32 + r * WARPS_;
            if (warp < NORM_WARPS) load_row_group<WIDTH>(weights, warp + i * NORM_WARPS, norm.value[r][i]);
        }
}

// The normed row as consecutive f16, and in f32 unless `f32` is null. `load(group, v)` loads a group of the row as
// load_row_group does; `sync` is a barrier of the WARPS warps; another must follow.
template <int WARPS_, class Load, class Sync>
__device__ __forceinline__ void load_normed_input(const Load& load, const NormWeights<WARPS_>& norm, float eps,
                                                  float* warp_sums, u8* f16, float* f32, const Sync& sync) {
    float v[NormWeights<WARPS_>::ROUNDS][GROUPS_PER_WARP][8];
#pragma unroll
    for (int r = 0; r < norm.ROUNDS; r++) {
        const int warp = threadIdx.x / 32 + r * WARPS_;
        if (warp >= NORM_WARPS) break;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) load(warp + i * NORM_WARPS, v[r][i]);
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[r][i][j] * v[r][i][j];
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) warp_sums[warp] = sum;
    }
    sync();
    float sum = warp_sums[0];
#pragma unroll
    for (int i = 1; i < NORM_WARPS; i++) sum += warp_sums[i];
    const float scale = 1.0f / sqrtf(sum / WIDTH + eps);
#pragma unroll
    for (int r = 0; r < norm.ROUNDS; r++)
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) {
            const int warp = threadIdx.x / 32 + r * WARPS_, group = warp + i * NORM_WARPS;
            if (warp >= NORM_WARPS || group >= ROW_GROUPS) continue;
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = v[r][i][j] * scale * norm.value[r][i][j];
            const int at = group * 256 + threadIdx.x % 32 * 8;
            *(uint4*)(f16 + at * 2) =
                make_uint4(a16_f16x2(y[0], y[1]), a16_f16x2(y[2], y[3]), a16_f16x2(y[4], y[5]), a16_f16x2(y[6], y[7]));
            if (f32) {
                ((float4*)(f32 + at))[0] = make_float4(y[0], y[1], y[2], y[3]);
                ((float4*)(f32 + at))[1] = make_float4(y[4], y[5], y[6], y[7]);
            }
        }
}

// `width` values of an A16 of one row as consecutive f16, by the first N_THREADS threads.
template <int N_THREADS>
__device__ __forceinline__ void load_f16_input(const u8* x, int width, u8* f16) {
    for (int i = threadIdx.x; i < width / 8; i += N_THREADS)
        *(uint4*)(f16 + i * 16) = __ldcg((const uint4*)(x + i * 128));
}
