// Sums that one block leaves in global memory and another takes, without fence, flag or counter: each word tells by itself that it
// is there. Memory is +0 before and after; +0 is left as -0, which adds nothing either.
#pragma once
#include "common/prelude.cuh"

__device__ __forceinline__ float never_plus_zero(float v) { return v == 0.0f ? -0.0f : v; }
__device__ __forceinline__ bool has_arrived(float v) { return __float_as_uint(v) != 0; }
__device__ __forceinline__ bool has_arrived(float4 v) { return has_arrived(v.x) && has_arrived(v.y) && has_arrived(v.z) && has_arrived(v.w); }

__device__ __forceinline__ void leave(float* to, float v) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(never_plus_zero(v)) : "memory");
}
__device__ __forceinline__ void leave(float4* to, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(never_plus_zero(v.x)), "f"(never_plus_zero(v.y)),
                 "f"(never_plus_zero(v.z)), "f"(never_plus_zero(v.w))
                 : "memory");
}
// What is there now.
__device__ __forceinline__ float peek(const float* from) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ float4 peek(const float4* from) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}
// What was left, waited for from the last `peek` on.
__device__ __forceinline__ float take(float* from, float v) {
    while (!has_arrived(v)) v = peek(from);
    *from = 0.0f;
    return v;
}
// By a whole warp: behind a loop that lanes leave one by one the compiler takes all that follows for divergent.
__device__ __forceinline__ float4 take(float4* from, float4 v) {
    while (__any_sync(WARP_ALL, !has_arrived(v))) v = peek(from);
    *from = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return v;
}
