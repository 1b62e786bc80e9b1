// Included by every kernel: integer types, conversions, mma.sync, ldmatrix, reductions of fixed order, and programmatic
// dependent launch; common/sync.cuh adds barriers and asynchronous copies.
//
// No other headers: NVRTC has no include path. Nothing here keeps state. PTX instructions have their PTX ISA names.
// Fragments of mma.m16n8k* with g = lane / 4 and t = lane % 4:
//   A (16 x k): a0 row g, a1 row g + 8, a2 and a3 the same rows in the upper half of k;  B (k x 8): column g;
//   C (16 x 8): c0, c1 row g, columns 2t, 2t + 1;  c2, c3 row g + 8.
// Minimum architecture: sm_80; programmatic dependent launch needs sm_90.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;  // also the bits of an f16 or bf16
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define INF __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)
#define WARP_ALL 0xffffffffu

#if defined(NO_SM90)
#define HAS_SM90 0
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_SM90 1
#else
#define HAS_SM90 0
#endif

// The entry of a kernel that one_launch/one_launch.cu includes as a function: KERNEL(threads, blocks) name(..).
#ifndef KERNEL
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#endif

// Loads N values of a row, `stride` apart, behind the dependency wait. one_launch/one_launch.cu has another for rows
// that its blocks exchange.
template <int N, class T>
__device__ __forceinline__ void load_inputs(const T* from, long long stride, T (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = from[i * stride];
}

// ---- programmatic dependent launch (sm_90 and up, with -DPDL) ------------------------------------------------------

// The dependency wait. Before it, nothing that an earlier kernel wrote may be read.
// Nothing that an earlier kernel reads may be written before it.
__device__ __forceinline__ void pdl_wait() {
#if HAS_SM90 && defined(PDL)
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its prologue; results need not be written yet. The kernels of a step call it
// first, so that the next GEMM loads its weights meanwhile. Then the kernel two before may still run while this one
// starts: before its dependency wait a kernel reads only what no kernel of its plan writes (weights, the header,
// committed states, keys and values). Some thread must wait, or later kernels would not wait for earlier ones.
// A kernel that calls this after its own wait lets the next one also read what was written before it
// (gated_delta/gated_norm).
__device__ __forceinline__ void pdl_launch() {
#if HAS_SM90 && defined(PDL)
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- conversions ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float f16_to_f32(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ u16 f32_to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// Low half = lo.
__device__ __forceinline__ u32 f32x2_to_f16x2(float lo, float hi) {
    u32 h;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
    return h;
}
__device__ __forceinline__ u32 f32x2_to_bf16x2(float lo, float hi) {
    u32 h;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
    return h;
}
__device__ __forceinline__ float bf16_to_f32(u16 h) { return __uint_as_float(u32(h) << 16); }
__device__ __forceinline__ u16 f32_to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ float f16x2_lo(u32 h) { return f16_to_f32(u16(h & 0xffffu)); }
__device__ __forceinline__ float f16x2_hi(u32 h) { return f16_to_f32(u16(h >> 16)); }
__device__ __forceinline__ float bf16x2_lo(u32 h) { return __uint_as_float(h << 16); }
__device__ __forceinline__ float bf16x2_hi(u32 h) { return __uint_as_float(h & 0xffff0000u); }
__device__ __forceinline__ u32 f16x2_add(u32 a, u32 b) {
    u32 c;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 f16x2_mul(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 f16x2_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// prmt in its default mode: each selector nibble names a byte of (b:a).
// Its top bit replicates that byte's sign instead.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// ---- tensor cores: c += a * b --------------------------------------------------------------------------------------

// m16n8k16, f16 into f32. Two values of k per register: a0, a1 k = 2t.., a2, a3 k = 8 + 2t..; b0, b1 alike.
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// m16n8k8, tf32 into f32. One value of k per register: a0, a1 k = t, a2, a3 k = t + 4; b0, b1 alike.
__device__ __forceinline__ void mma_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- shared memory -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}

// Index of the warp in its block. From a shuffle, so that the compiler knows it to be warp-uniform: after a branch by
// threadIdx.x / 32 it takes the warp for divergent and reconverges before each shuffle, vote and MMA.
__device__ __forceinline__ int warp_index() { return __shfl_sync(WARP_ALL, int(threadIdx.x / 32), 0); }

// ---- reductions, always in the same order --------------------------------------------------------------------------

// Every lane gets the result: lanes 16, 8, 4, 2, 1 apart, in this order.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(WARP_ALL, v, offset);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(WARP_ALL, v, offset));
    return v;
}
// Over a block of COUNT warps; all threads take part and get the result. `warp_results` is COUNT floats of shared
// memory, free again on return (it ends with a barrier).
template <int COUNT>
__device__ __forceinline__ float block_sum(float v, float* warp_results) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) warp_results[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = warp_results[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) sum += warp_results[i];
    __syncthreads();
    return sum;
}
template <int COUNT>
__device__ __forceinline__ float block_max(float v, float* warp_results) {
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) warp_results[threadIdx.x / 32] = v;
    __syncthreads();
    float max = warp_results[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) max = fmaxf(max, warp_results[i]);
    __syncthreads();
    return max;
}

// ---- elementwise functions -----------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

#include "common/sync.cuh"
