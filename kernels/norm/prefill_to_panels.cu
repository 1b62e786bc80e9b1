// Prefill activations from f32 rows to f16 panels, and to f32 rows if the next weights are f32.
//
//   prefill_rms_norm  y = x / sqrt(mean(x^2) + eps) * weight
//   prefill_convert   y = x
//   prefill_swiglu    y = f(gate) * up; f is silu, or gelu by its tanh formula with GELU
//
// in     x, gate, up f32 [rows][stride]      weight f32 [WIDTH]
// out    panels: f16(scale * y), rows_cap rows, WIDTH padded to 64 with zeros (gemm/panel_layout.cuh); 0 if not wanted
//        y f32 [rows][WIDTH]; 0 if not wanted
// grid   one block of 128 threads per row of the largest chunk; a thread holds eight neighbouring columns at a time
// define WIDTH (a multiple of 4)     arch sm_80 and up
// reference cpu::reference::{norm::rms, activation::{swiglu, geglu}}     test crates/cuda/tests/prefill_gemm.rs
#include "common/step.cuh"
#include "ffn/gate_function.cuh"
#include "gemm/panel_layout.cuh"

#define THREADS 128
#define CHUNKS ((WIDTH + 63) / 64 * 8)
#define CHUNKS_PER_THREAD ((CHUNKS + THREADS - 1) / THREADS)

struct Float8 {
    float at[8];
};

__device__ __forceinline__ Float8 load_8(const float* row, int chunk) {
    Float8 v;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int column = chunk * 8 + half * 4;
        const float4 quad = column < WIDTH ? *(const float4*)(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v.at[4 * half] = quad.x;
        v.at[4 * half + 1] = quad.y;
        v.at[4 * half + 2] = quad.z;
        v.at[4 * half + 3] = quad.w;
    }
    return v;
}

struct PanelOutput {
    char* panels;
    int rows_cap;
    float scale;
    float* y;

    __device__ __forceinline__ void store(int row, int chunk, const Float8& v) const {
        if (panels) {
            uint4 packed;
            packed.x = panel_f16x2(scale * v.at[0], scale * v.at[1]);
            packed.y = panel_f16x2(scale * v.at[2], scale * v.at[3]);
            packed.z = panel_f16x2(scale * v.at[4], scale * v.at[5]);
            packed.w = panel_f16x2(scale * v.at[6], scale * v.at[7]);
            *(uint4*)(panels + panel_chunk(rows_cap, row, chunk)) = packed;
        }
        if (y) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = chunk * 8 + half * 4;
                if (column < WIDTH) {
                    *(float4*)(y + (u64)row * WIDTH + column) =
                        make_float4(v.at[4 * half], v.at[4 * half + 1], v.at[4 * half + 2], v.at[4 * half + 3]);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_rms_norm(const float* x, int stride, const PrefillChunk* chunk, const float* weight, float eps,
                     char* panels, int rows_cap, float scale, float* y) {
    const int row = blockIdx.x;
    if (row >= chunk->rows) {
        return;
    }
    const PanelOutput out = {panels, rows_cap, scale, y};
    __shared__ float warp_sums[THREADS / 32];
    Float8 values[CHUNKS_PER_THREAD];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_THREAD; i++) {
        values[i] = load_8(x + (u64)row * stride, threadIdx.x + i * THREADS);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum = fmaf(values[i].at[j], values[i].at[j], sum);
        }
    }
    const float norm = 1.0f / sqrtf(block_sum<THREADS / 32>(sum, warp_sums) / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_THREAD; i++) {
        const int at = threadIdx.x + i * THREADS;
        if (at >= CHUNKS) {
            break;
        }
        const Float8 w = load_8(weight, at);
        Float8 v;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v.at[j] = at * 8 + j < WIDTH ? values[i].at[j] * norm * w.at[j] : 0.0f;
        }
        out.store(row, at, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_convert(const float* x, int stride, const PrefillChunk* chunk, char* panels, int rows_cap, float scale,
                    float* y) {
    const int row = blockIdx.x;
    if (row >= chunk->rows) {
        return;
    }
    const PanelOutput out = {panels, rows_cap, scale, y};
    for (int at = threadIdx.x; at < CHUNKS; at += THREADS) {
        out.store(row, at, load_8(x + (u64)row * stride, at));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_swiglu(const float* gate, const float* up, int stride, const PrefillChunk* chunk, char* panels,
                   int rows_cap, float scale, float* y) {
    const int row = blockIdx.x;
    if (row >= chunk->rows) {
        return;
    }
    const PanelOutput out = {panels, rows_cap, scale, y};
    for (int at = threadIdx.x; at < CHUNKS; at += THREADS) {
        const Float8 g = load_8(gate + (u64)row * stride, at);
        const Float8 u = load_8(up + (u64)row * stride, at);
        Float8 v;
#pragma unroll
        for (int j = 0; j < 8; j++) {
#if defined(GELU) && GELU
            v.at[j] = gate_function(g.at[j]) * u.at[j];
#else
            v.at[j] = g.at[j] / (1.0f + expf(-g.at[j])) * u.at[j];
#endif
        }
        out.store(row, at, v);
    }
}
