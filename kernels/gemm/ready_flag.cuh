// Sums that one block leaves in global memory and another takes, without fence, flag or counter: each word tells by itself that it
// is there. Memory is +0 before and after; +0 is left as -0, which adds nothing either.
#pragma once
#include "common/prelude.cuh"

__device__ __forceinline__ float encode_ready(float v) { return v == 0.0f ? -0.0f : v; }
__device__ __forceinline__ bool is_ready(float v) { return __float_as_uint(v) != 0; }
__device__ __forceinline__ bool is_ready(float4 v) { return is_ready(v.x) && is_ready(v.y) && is_ready(v.z) && is_ready(v.w); }

__device__ __forceinline__ void flag_store(float* dst, float v) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(dst), "f"(encode_ready(v)) : "memory");
}
__device__ __forceinline__ void flag_store(float4* dst, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(encode_ready(v.x)), "f"(encode_ready(v.y)),
                 "f"(encode_ready(v.z)), "f"(encode_ready(v.w))
                 : "memory");
}
// What is there now.
__device__ __forceinline__ float flag_load(const float* src) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(src) : "memory");
    return v;
}
__device__ __forceinline__ float4 flag_load(const float4* src) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(src) : "memory");
    return v;
}
// What was left, waited for src the last `flag_load` on.
__device__ __forceinline__ float flag_consume(float* src, float v) {
    while (!is_ready(v)) v = flag_load(src);
    *src = 0.0f;
    return v;
}
// By a whole warp: behind a loop that lanes flag_store one by one the compiler takes all that follows for divergent.
__device__ __forceinline__ float4 flag_consume(float4* src, float4 v) {
    while (__any_sync(WARP_ALL, !is_ready(v))) v = flag_load(src);
    *src = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return v;
}
