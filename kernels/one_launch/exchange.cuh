// Rows that blocks exchange in band: a word shows by itself whether it is there (ABSENT).
#pragma once
#include "gemm/a16_layout.cuh"
#include "one_launch/waits.cuh"

__device__ __forceinline__ uint4 exchange_load(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void exchange_store(void* to, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ bool is_there(const uint4& v) {
    return v.x != ABSENT && v.y != ABSENT && v.z != ABSENT && v.w != ABSENT;
}
// Values of a row that may not be there yet; N loads of 16 bytes, `stride` apart, are in flight at once.
template <int N>
__device__ __forceinline__ void exchange_wait(const uint4* from, i64 stride, uint4 (&v)[N]) {
    poll_until(EXCHANGE_REASON, [&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = exchange_load(from + i * stride);
#pragma unroll
        for (int i = 0; i < N; i++) all &= is_there(v[i]);
        return all;
    });
}
// The loads of functions of separate kernels: all of them in flight at once.
template <int N>
__device__ __forceinline__ void exchange_wait(const float* from, i64 stride, float (&v)[N]) {
    poll_until(EXCHANGE_REASON, [&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = __uint_as_float(load_relaxed((const u32*)from + i * stride));
#pragma unroll
        for (int i = 0; i < N; i++) all &= __float_as_uint(v[i]) != ABSENT;
        return all;
    });
}
template <int N>
__device__ __forceinline__ void exchange_wait(const float4* from, i64 stride, float4 (&v)[N]) {
    exchange_wait<N>((const uint4*)from, stride, (uint4(&)[N])v);
}
#define load_inputs exchange_wait
// Rows of f16 are exchanged without the gaps of A16: functions of separate kernels store group `group` of 256 values
// so.
__device__ __forceinline__ void exchange_store_group(void* to, int, int, int group, const float (&v)[8]) {
    asm volatile(
        "st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"((uint4*)to + group * 32 + threadIdx.x % 32),
        "r"(a16_f16x2(v[0], v[1])), "r"(a16_f16x2(v[2], v[3])), "r"(a16_f16x2(v[4], v[5])), "r"(a16_f16x2(v[6], v[7]))
        : "memory");
}
#define a16_store exchange_store_group
