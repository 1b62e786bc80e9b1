// The sum of the experts of a chunk's rows into the residual stream.
//
//   x[row] += shared_factor[row] * shared[row]  +  sum over choices, best first, of weight * products[row * USED + i]
//
// in   chunk     choices [rows][USED]     products f32 [rows * USED][WIDTH]     shared f32 [rows][WIDTH],
//      shared_factor f32 [rows] if SHARED
// out  x f32 [rows][WIDTH], added to; with STORE replaced, as the partial sums of a shard
// grid rows x 256
// defines WIDTH (a multiple of 4), EXPERTS, USED, SHARED (0 or 1), STORE
// arch sm_80 and up     reference cpu::reference     test crates/cuda/tests/moe.rs
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "moe/choose.cuh"

__device__ __forceinline__ void add(float4& sum, float weight, const float4& v) {
    sum = make_float4(fmaf(weight, v.x, sum.x), fmaf(weight, v.y, sum.y), fmaf(weight, v.z, sum.z),
                      fmaf(weight, v.w, sum.w));
}

extern "C" __global__ void __launch_bounds__(256)
    moe_prefill_combine(const PrefillChunk* chunk, const Choice* choices, const float* products, const float* shared,
                        const float* shared_factor, float* x) {
    const int row = blockIdx.x;
    if (row >= chunk->rows) return;
    float weight[USED];
#pragma unroll
    for (int i = 0; i < USED; i++) weight[i] = choices[size_t(row) * USED + i].weight;
    for (int quad = threadIdx.x; quad < WIDTH / 4; quad += 256) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if SHARED
        const float factor = shared_factor[row];
        const float4 v = ((const float4*)(shared + size_t(row) * WIDTH))[quad];
        sum = make_float4(factor * v.x, factor * v.y, factor * v.z, factor * v.w);
#endif
#pragma unroll
        for (int i = 0; i < USED; i++)
            add(sum, weight[i], ((const float4*)(products + (size_t(row) * USED + i) * WIDTH))[quad]);
        float4* to = (float4*)(x + size_t(row) * WIDTH) + quad;
#ifdef STORE
        *to = sum;
#else
        const float4 old = *to;
        *to = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
#endif
    }
}
