// f32 matrices beside the packed ones of a launch: out[row][n] (+)= sum over k of W[n][k] * x[row][k], all in f32.
//
// For the few matrices that a file stores as f32 (gate projections, 48 x 5120). A job is 8 rows of W and a K-slice, in
// chunks of 512 values whose weights are in shared memory; the first chunk is loaded before the dependency wait. Warp w
// takes rows w, w + F32_WARPS, .. of x, a lane four values of every 128.
// Order of sums: a lane's products by k; lanes 16, 8, 4, 2, 1 apart; K-slices in order. With several K-slices a block
// has one job at most; the block of a row group's first slice reduces all of them (ready flags, common/sync.cuh) after
// its packed work. Partial sums are [row_groups][k_slices][ROWS][8]. K-slices depend on shapes and GPU only:
// batch-invariant. cols is a multiple of 4.
//
// The including file defines F32_WARPS, f32_thread() (0 .. F32_WARPS * 32) and f32_sync() (a barrier of those threads).
#pragma once
#include "common/sync.cuh"
#include "gemm/f32_params.cuh"

#define F32_CHUNK 512
#define F32_ROWS_PER_WARP (ROWS > F32_WARPS ? 2 : 1)  // rows of x per warp at a time
#ifndef F32_PREFETCH
#define F32_PREFETCH 1  // times 128 values of x loaded together
#endif

struct F32Smem {
    float4 weights[8][F32_CHUNK / 4];
};

// Starts loading 8 rows of W from value k0 on; zeros past K.
__device__ __forceinline__ void f32_load(const F32Params& params, F32Smem& smem, int row_group, int k0) {
    const F32Matrix& s = f32_matrix(params, row_group);
    for (int i = f32_thread(); i < 8 * F32_CHUNK / 4; i += F32_WARPS * 32) {
        const int n = i / (F32_CHUNK / 4), quad = i % (F32_CHUNK / 4), k = k0 + quad * 4;
        const int row = min((row_group - s.first_row_group) * 8 + n, s.n_out - 1);
        if (k < params.cols)
            cp_async_16(shared_address(&smem.weights[n][quad]), s.weights + size_t(row) * params.cols + k);
        else
            smem.weights[n][quad] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    cp_async_commit();
}

// Before the dependency wait: the first chunk of the block's first job.
__device__ __forceinline__ void f32_prologue(const F32Params& params, F32Smem& smem) {
    const int job = blockIdx.x;
    if (job < params.row_groups * params.k_slices)
        f32_load(params, smem, job / params.k_slices, job % params.k_slices * params.k_slice);
}

// Sums v[0..8] over the lanes: lane i gets the sum of v[i / 4].
__device__ __forceinline__ float reduce_8_to_lanes(const float (&v)[8]) {
    const int lane = threadIdx.x % 32;
    float a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool high = lane & 16;
        a[i] = (high ? v[i + 4] : v[i]) + __shfl_xor_sync(WARP_ALL, high ? v[i] : v[i + 4], 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool high = lane & 8;
        b[i] = (high ? a[i + 2] : a[i]) + __shfl_xor_sync(WARP_ALL, high ? a[i] : a[i + 2], 8);
    }
    const bool high = lane & 4;
    float c = (high ? b[1] : b[0]) + __shfl_xor_sync(WARP_ALL, high ? b[0] : b[1], 4);
    c += __shfl_xor_sync(WARP_ALL, c, 2);
    c += __shfl_xor_sync(WARP_ALL, c, 1);
    return c;
}

__device__ __forceinline__ void f32_store(const F32Matrix& s, int row, int n, float v) {
    if (n >= s.n_out) return;
    float* to = s.out + size_t(row) * s.stride + n;
    *to = s.add ? *to + v : v;
}

// After the dependency wait, by all math threads: all jobs of the block. `factor(row)` multiplies a row's results.
template <typename Factor>
__device__ __forceinline__ void f32_mainloop(const F32Params& params, F32Smem& smem, const Factor& factor) {
    const int warp = f32_thread() / 32, lane = threadIdx.x % 32, cols = params.cols;
    const int jobs = params.row_groups * params.k_slices;
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int row_group = job / params.k_slices, k_slice = job % params.k_slices;
        const int k_begin = k_slice * params.k_slice, k_end = min(cols, k_begin + params.k_slice);
        const F32Matrix& s = f32_matrix(params, row_group);
        for (int first_row = warp; first_row < (ROWS + F32_WARPS - 1) / F32_WARPS * F32_WARPS;
             first_row += F32_WARPS * F32_ROWS_PER_WARP) {
            float sum[F32_ROWS_PER_WARP][8];
#pragma unroll
            for (int r = 0; r < F32_ROWS_PER_WARP; r++)
#pragma unroll
                for (int n = 0; n < 8; n++) sum[r][n] = 0.0f;
            for (int k0 = k_begin; k0 < k_end; k0 += F32_CHUNK) {
                // f32_prologue has loaded the first chunk; a K-slice of one chunk stays for all rows.
                if (k0 != k_begin || (first_row != warp ? k_end - k_begin > F32_CHUNK : job != int(blockIdx.x))) {
                    f32_sync();
                    f32_load(params, smem, row_group, k0);
                }
                cp_async_wait<0>();
                f32_sync();
#pragma unroll
                for (int from = 0; from < F32_CHUNK / 128; from += F32_PREFETCH) {
                    float4 x[F32_PREFETCH][F32_ROWS_PER_WARP];
#pragma unroll
                    for (int step = 0; step < F32_PREFETCH; step++)
#pragma unroll
                        for (int r = 0; r < F32_ROWS_PER_WARP; r++) {
                            const int k = k0 + (from + step) * 128 + lane * 4,
                                      row = min(first_row + r * F32_WARPS, ROWS - 1);
                            x[step][r] = k < cols ? __ldcg((const float4*)(params.x + size_t(row) * cols + k))
                                                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                        }
#pragma unroll
                    for (int step = 0; step < F32_PREFETCH; step++)
#pragma unroll
                        for (int n = 0; n < 8; n++) {
                            const float4 w = smem.weights[n][(from + step) * 32 + lane];
#pragma unroll
                            for (int r = 0; r < F32_ROWS_PER_WARP; r++) {
                                sum[r][n] = fmaf(w.x, x[step][r].x, sum[r][n]);
                                sum[r][n] = fmaf(w.y, x[step][r].y, sum[r][n]);
                                sum[r][n] = fmaf(w.z, x[step][r].z, sum[r][n]);
                                sum[r][n] = fmaf(w.w, x[step][r].w, sum[r][n]);
                            }
                        }
                }
            }
#pragma unroll
            for (int r = 0; r < F32_ROWS_PER_WARP; r++) {
                const int row = first_row + r * F32_WARPS;
                const float v = reduce_8_to_lanes(sum[r]);
                if (lane % 4 == 0 && row < ROWS) {
                    if (params.k_slices == 1)
                        f32_store(s, row, (row_group - s.first_row_group) * 8 + lane / 4, v * factor(row));
                    else
                        flag_store(params.partials +
                                       ((size_t(row_group) * params.k_slices + k_slice) * ROWS + row) * 8 + lane / 4,
                                   v);
                }
            }
        }
    }
}

// At the end of the block, by all math threads: with several K-slices, the block of the group's first slice reduces
// them.
template <typename Factor>
__device__ __forceinline__ void f32_epilogue(const F32Params& params, const Factor& factor) {
    if (params.k_slices == 1 || int(blockIdx.x) >= params.row_groups * params.k_slices || blockIdx.x % params.k_slices)
        return;
    const int row_group = blockIdx.x / params.k_slices;
    const F32Matrix& s = f32_matrix(params, row_group);
    constexpr int FETCH = 12;
    for (int i = f32_thread(); i < ROWS * 8; i += F32_WARPS * 32) {
        float* from = params.partials + size_t(row_group) * params.k_slices * ROWS * 8 + i;
        float v = 0.0f;
        for (int first_slice = 0; first_slice < params.k_slices; first_slice += FETCH) {
            float component[FETCH];
#pragma unroll
            for (int f = 0; f < FETCH; f++)
                component[f] = flag_load(from + size_t(min(first_slice + f, params.k_slices - 1)) * ROWS * 8);
#pragma unroll
            for (int f = 0; f < FETCH; f++) {
                if (first_slice + f >= params.k_slices) break;
                v += flag_consume(from + size_t(first_slice + f) * ROWS * 8, component[f]);
            }
        }
        f32_store(s, i / 8, (row_group - s.first_row_group) * 8 + i % 8, v * factor(i / 8));
    }
}
