// From f32 rows to what a prefill product reads: f16 panels, and f32 rows where the weights are f32.
//
//   rows_norm    y = x / sqrt(mean(x^2) + eps) * weight      rows_copy    y = x
//   rows_swiglu  y = silu(gate) * up
//
// in   x, gate, up  f32 [rows][stride]      weight f32 [WIDTH]
// out  panels       f16(scale * y), rows_cap rows, WIDTH padded to 64 with zeros; 0 where not wanted
//      y            f32 [rows][WIDTH]; 0 where not wanted
// grid one block of 128 threads per row of the largest chunk; a thread holds eight neighbouring columns at a time
// define WIDTH (a multiple of 4);  arch sm_80 and up
// ref  cpu::reference::{norm::rms, activation::swiglu};  test prefill::rows_match_reference
// hot
#include "common/step.cuh"
#include "prefill/panel.cuh"

#define THREADS 128
#define CHUNKS ((WIDTH + 63) / 64 * 8)
#define PER_THREAD ((CHUNKS + THREADS - 1) / THREADS)

struct Eight {
    float at[8];
};

__device__ __forceinline__ Eight load_eight(const float *row, int chunk) {
    Eight v;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int column = chunk * 8 + half * 4;
        const float4 four =
            column < WIDTH ? *(const float4 *)(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v.at[4 * half] = four.x;
        v.at[4 * half + 1] = four.y;
        v.at[4 * half + 2] = four.z;
        v.at[4 * half + 3] = four.w;
    }
    return v;
}

struct Target {
    char *panels;
    int rows_cap;
    float scale;
    float *y;

    __device__ __forceinline__ void store(int row, int chunk, const Eight &v) const {
        if (panels) {
            uint4 packed;
            packed.x = panel_pair(scale * v.at[0], scale * v.at[1]);
            packed.y = panel_pair(scale * v.at[2], scale * v.at[3]);
            packed.z = panel_pair(scale * v.at[4], scale * v.at[5]);
            packed.w = panel_pair(scale * v.at[6], scale * v.at[7]);
            *(uint4 *)(panels + panel_chunk(rows_cap, row, chunk)) = packed;
        }
        if (y) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = chunk * 8 + half * 4;
                if (column < WIDTH) {
                    *(float4 *)(y + (u64)row * WIDTH + column) =
                        make_float4(v.at[4 * half], v.at[4 * half + 1], v.at[4 * half + 2], v.at[4 * half + 3]);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    rows_norm(const float *x, int stride, const Chunk *chunk, const float *weight, float eps, char *panels,
              int rows_cap, float scale, float *y) {
    const int row = blockIdx.x;
    if (row >= chunk->rows) { return; }
    const Target to = {panels, rows_cap, scale, y};
    __shared__ float room[THREADS / 32];
    Eight held[PER_THREAD];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        held[i] = load_eight(x + (u64)row * stride, threadIdx.x + i * THREADS);
#pragma unroll
        for (int j = 0; j < 8; j++) { sum = fmaf(held[i].at[j], held[i].at[j], sum); }
    }
    const float norm = 1.0f / sqrtf(block_sum<THREADS / 32>(sum, room) / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int at = threadIdx.x + i * THREADS;
        if (at >= CHUNKS) { break; }
        const Eight w = load_eight(weight, at);
        Eight v;
#pragma unroll
        for (int j = 0; j < 8; j++) { v.at[j] = at * 8 + j < WIDTH ? held[i].at[j] * norm * w.at[j] : 0.0f; }
        to.store(row, at, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rows_copy(const float *x, int stride, const Chunk *chunk, char *panels, int rows_cap, float scale, float *y) {
    const int row = blockIdx.x;
    if (row >= chunk->rows) { return; }
    const Target to = {panels, rows_cap, scale, y};
    for (int at = threadIdx.x; at < CHUNKS; at += THREADS) {
        to.store(row, at, load_eight(x + (u64)row * stride, at));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rows_swiglu(const float *gate, const float *up, int stride, const Chunk *chunk, char *panels, int rows_cap,
                float scale, float *y) {
    const int row = blockIdx.x;
    if (row >= chunk->rows) { return; }
    const Target to = {panels, rows_cap, scale, y};
    for (int at = threadIdx.x; at < CHUNKS; at += THREADS) {
        const Eight g = load_eight(gate + (u64)row * stride, at);
        const Eight u = load_eight(up + (u64)row * stride, at);
        Eight v;
#pragma unroll
        for (int j = 0; j < 8; j++) { v.at[j] = g.at[j] / (1.0f + expf(-g.at[j])) * u.at[j]; }
        to.store(row, at, v);
    }
}
