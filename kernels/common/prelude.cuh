// What every kernel shares: words for the types NVRTC does not know, conversions, tensor-core products, asynchronous
// copies, cache hints, reductions of fixed order, and the two halves of a programmatic dependent launch.
//
// Header-free: NVRTC finds no header without an include path. Nothing here keeps state. Names of the PTX instructions are
// those of the PTX ISA; fragment layouts are its figures for mma.m16n8k*: with g = lane / 4 and t = lane % 4,
//   A (16 x k): a0 row g, a1 row g + 8, a2 and a3 the same rows in the upper half of k;  B (k x 8): column g;
//   C (16 x 8): c0, c1 row g, columns 2t, 2t + 1;  c2, c3 row g + 8.
// Architecture floor: sm_80 for the products and cp.async; bulk copies, mbarriers and dependent launch need sm_90.
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

#if defined(NO_BULK)
#define HAS_BULK 0
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_BULK 1
#else
#define HAS_BULK 0
#endif

// ---- dependent launch (sm_90 and later, when compiled with -DPDL) ------------------------------------------------

// Until this returns nothing that an earlier kernel wrote may be read, and nothing it reads may be written.
__device__ __forceinline__ void pdl_wait() {
#if HAS_BULK && defined(PDL)
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its prologue, results need not be written yet. The kernels of a step call it
// first of all, so that the next product fetches its weights meanwhile. Then the kernel two before may still run while
// this one starts: before its wait a kernel reads only what no kernel of its plan writes (weights, the header, committed
// states, keys and values), and some thread of it must wait, or what comes behind would not wait for what was before.
// A kernel that calls this behind its own wait lets the next one also read what was written before it (delta/gated_norm).
__device__ __forceinline__ void pdl_launch() {
#if HAS_BULK && defined(PDL)
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
// prmt in its default mode: each selector nibble names a byte of (b:a); its top bit spreads that byte's sign instead.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// ---- tensor cores: c += a * b --------------------------------------------------------------------------------------

// m16n8k32, signed bytes into i32. Four bytes of k per register: a0, a1 k = 4t.., a2, a3 k = 16 + 4t..; b0, b1 alike.
__device__ __forceinline__ void mma_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// m16n8k16, signed bytes: a0 row g, a1 row g + 8, b0; k = 4t..
__device__ __forceinline__ void mma_s8_k16(int (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
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

// ---- shared memory and copies --------------------------------------------------------------------------------------

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

// 16 bytes to shared memory, asynchronously, past L1.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Cache policy words for the hinted forms: weights pass through L2 once, activations stay.
__device__ __forceinline__ u64 policy_evict_first() {
    u64 p;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
__device__ __forceinline__ u64 policy_evict_last() {
    u64 p;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}
__device__ __forceinline__ void cp_async_16_cache_hint(u32 to, const void* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}

// Read-only data that no other block wants: 16 bytes, not kept in L1. Never for what an earlier kernel wrote.
__device__ __forceinline__ uint4 load_once(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

#if HAS_BULK
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine; then a block barrier makes them visible to the threads.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// For so many.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n\t"
        "@done bra over;\n\tbra again;\n\tover:\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Fetches `bytes` (a multiple of 16) into L2 without waiting.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* from, u32 bytes, u64 policy) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes), "l"(policy) : "memory");
}
// `bytes` (a multiple of 16, both ends 16-byte aligned) to this block's shared memory; counted down on `barrier`.
__device__ __forceinline__ void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
#endif

// The warp's number in its block. From a shuffle, so that the compiler knows it to be the same in all lanes: behind a branch by
// threadIdx.x / 32 it takes a warp for divergent, and brings its lanes together again before each shuffle, vote and product.
__device__ __forceinline__ int warp_index() { return __shfl_sync(WARP_ALL, int(threadIdx.x / 32), 0); }

// ---- reductions, always in the same order -----------------------------------------------------------------------------

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
// Over a block of COUNT warps, all threads taking part and getting the result; `warp_results` is COUNT floats of shared memory,
// free again when the call returns (it ends with a barrier).
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

// ---- small functions ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }
