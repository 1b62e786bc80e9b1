// Barriers, fences, flags, pipelines, asynchronous copies and cluster operations, each defined once.
//
// Names are those of the PTX ISA and of CUTLASS. A shared-memory address is a 32-bit shared-window address
// (`shared_address`). Which one orders what:
//   named barrier    threads of a block, 16 per block (id 0 is __syncthreads); `arrive` does not wait
//   mbarrier         threads and asynchronous copies of a block or cluster; a wait names the parity of its phase
//   fence.proxy      writes of threads before reads by the asynchronous proxy (copy engine, wgmma), and the reverse
//   ready flag       one block to another, in band: a word of +0.0 is "not ready", so data needs no extra flag
//   semaphore        one block to another, by acquire and release of a counter in device memory
//   cluster barrier  all threads of a cluster
// Minimum architecture: sm_80; bulk copies and clusters need sm_90, register reallocation sm_90a.
#pragma once
#include "common/prelude.cuh"

// ---- named barriers ------------------------------------------------------------------------------------------------

// `threads` is the number of threads that sync or arrive in all, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N_THREADS>
__device__ __forceinline__ void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(N_THREADS) : "memory");
}
template <int N_THREADS>
__device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(N_THREADS) : "memory");
}
// With an id known at compile time.
template <int BARRIER_ID, int N_THREADS>
__device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER_ID), "n"(N_THREADS) : "memory");
}
// Syncs, and returns whether the predicate holds for any thread.
template <int BARRIER_ID, int N_THREADS>
__device__ __forceinline__ bool named_barrier_or(bool predicate) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}\n"
                 : "=r"(any)
                 : "r"((u32)predicate), "n"(BARRIER_ID), "n"(N_THREADS)
                 : "memory");
    return any != 0;
}

// ---- fences of the asynchronous proxy ------------------------------------------------------------------------------

// Between what threads write to shared memory and what wgmma or bulk copies read there.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Between what threads write or read in device memory and what bulk copies read there.
__device__ __forceinline__ void fence_proxy_async_global() {
#if HAS_SM90
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

// 16 bytes to shared memory, past L1.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same; of the 16 bytes only `bytes` (0 to 16) are read, the others become zero.
__device__ __forceinline__ void cp_async_16_zfill(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_16_cache_hint(u32 to, const void* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// L2 cache policies: weights pass through once, activations stay.
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

// ---- mbarriers -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u32 mbarrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 mbarrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Whether the phase of this parity is complete.
__device__ __forceinline__ u32 mbarrier_test_wait(u32 mbarrier, u32 parity) {
    u32 complete;
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(complete)
        : "r"(mbarrier), "r"(parity)
        : "memory");
    return complete;
}
// Waits until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(u32 mbarrier, u32 parity) {
#if HAS_SM90
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n\t"
        "@done bra over;\n\tbra again;\n\tover:\n\t}" ::"r"(mbarrier),
        "r"(parity)
        : "memory");
#else
    while (!mbarrier_test_wait(mbarrier, parity)) {}
#endif
}
// Arrives once the thread's copies so far (cp.async) have landed; counts as one of the barrier's arrivals.
__device__ __forceinline__ void mbarrier_arrive_cp_async(u32 mbarrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}

// ---- producer/consumer pipeline ------------------------------------------------------------------------------------

// A stage of a ring of N_STAGES and the parity of its phase. A consumer starts at {0, 0}; a producer at {0, 1}, since
// the phase before the first counts as complete: all stages are empty.
template <int N_STAGES>
struct PipelineState {
    int stage;
    u32 parity;

    __device__ __forceinline__ void advance() {
        if (++stage == N_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#if HAS_SM90
// `bytes` (a multiple of 16, both ends 16-byte aligned) to this block's shared memory; completes `bytes` on `mbarrier`.
__device__ __forceinline__ void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 mbarrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(mbarrier)
                 : "memory");
}
__device__ __forceinline__ void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 mbarrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(mbarrier), "l"(policy)
        : "memory");
}

// ---- mbarriers of sm_90 --------------------------------------------------------------------------------------------

// Makes initialised barriers visible to the copy engine; a block barrier then makes them visible to the threads.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 mbarrier, u32 arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
// Arrives, and makes the phase wait for `bytes` of asynchronous copies too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 mbarrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
// The same for the first phase of a barrier that other blocks of the cluster complete (`st_async`).
__device__ __forceinline__ void mbarrier_wait_cluster(u32 mbarrier) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t"
        "@done bra over;\n\tbra again;\n\tover:\n\t}" ::"r"(mbarrier)
        : "memory");
}
// A ring of N_STAGES buffers with two mbarriers each, `full` and behind all of those `empty`.
template <int N_STAGES>
struct Pipeline {
    u32 full, empty;  // addresses of the first of each

    // By one thread, followed by fence_mbarrier_init and a block barrier.
    __device__ __forceinline__ void init(u32 producer_arrivals, u32 consumer_arrivals) const {
        for (int i = 0; i < N_STAGES; i++) {
            mbarrier_init(full + 8 * i, producer_arrivals);
            mbarrier_init(empty + 8 * i, consumer_arrivals);
        }
    }
    // Waits until the stage is empty.
    __device__ __forceinline__ void producer_acquire(int stage, u32 parity) const {
        mbarrier_wait(empty_barrier(stage), parity);
    }
    // Announces the bytes of the copies that fill the stage, which then complete them on full_barrier.
    __device__ __forceinline__ void producer_expect_tx(int stage, u32 bytes) const {
        mbarrier_arrive_expect_tx(full_barrier(stage), bytes);
    }
    // Waits until the stage is full.
    __device__ __forceinline__ void consumer_wait(int stage, u32 parity) const {
        mbarrier_wait(full_barrier(stage), parity);
    }
    __device__ __forceinline__ void consumer_release(int stage) const { mbarrier_arrive(empty_barrier(stage)); }
    __device__ __forceinline__ u32 full_barrier(int stage) const { return full + 8 * stage; }
    __device__ __forceinline__ u32 empty_barrier(int stage) const { return empty + 8 * stage; }
};

// ---- clusters ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of the same shared memory in block `rank` of the cluster.
__device__ __forceinline__ u32 mapa(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Stores to the memory of a block of the cluster; completes the bytes on an mbarrier there (both addresses from
// `mapa`).
__device__ __forceinline__ void st_async(u32 to, u32 x, u32 y, u32 mbarrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to), "r"(x),
                 "r"(y), "r"(mbarrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(u32 to, float x, u32 mbarrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(x)), "r"(mbarrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(u32 to, float4 v, u32 mbarrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(mbarrier)
        : "memory");
}

// ---- warp roles ----------------------------------------------------------------------------------------------------

// One lane of a converged warp. ptxas wraps what a single thread may issue into a loop over lanes, unless elect chose
// it.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
    return elected;
}
// Gives registers of a warpgroup back to the pool of the block, or takes more; by all warps of the warpgroup.
template <int N_REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N_REGISTERS));
}
template <int N_REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N_REGISTERS));
}
// Adds four floats to neighbouring ones in device memory, without waiting.
__device__ __forceinline__ void red_add_v4(float* at, const float4& v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}
#endif

// An optimisation barrier: the compiler forgets where the value came from, so it keeps it and does not compute it
// again.
__device__ __forceinline__ u32 opaque(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
__device__ __forceinline__ void make_opaque(u32& a, u32& b) { asm volatile("" : "+r"(a), "+r"(b)); }

// ---- ready flags in band: a block stores partial sums or activations, another polls them ---------------------------
//
// No fence, flag or counter: each 32-bit word shows by itself that it was written. Memory holds +0.0 ("not ready")
// before and after. A +0.0 to be sent is stored as -0.0, which adds nothing either.

__device__ __forceinline__ float encode_ready(float v) { return v == 0.0f ? -0.0f : v; }
__device__ __forceinline__ bool is_ready(float v) { return __float_as_uint(v) != 0; }
__device__ __forceinline__ bool is_ready(float4 v) {
    return is_ready(v.x) && is_ready(v.y) && is_ready(v.z) && is_ready(v.w);
}
__device__ __forceinline__ void flag_store(float* dst, float v) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(dst), "f"(encode_ready(v)) : "memory");
}
__device__ __forceinline__ void flag_store(float4* dst, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(encode_ready(v.x)),
                 "f"(encode_ready(v.y)), "f"(encode_ready(v.z)), "f"(encode_ready(v.w))
                 : "memory");
}
// A pair of f16; a pair of +0 is stored as -0.
__device__ __forceinline__ void flag_store_f16x2(u8* dst, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(dst), "r"(v ? v : 0x80008000u) : "memory");
}
// The word as it is now, ready or not.
__device__ __forceinline__ float flag_load(const float* src) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(src) : "memory");
    return v;
}
__device__ __forceinline__ float4 flag_load(const float4* src) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(src)
                 : "memory");
    return v;
}
// Polls until the word is ready, starting from its last flag_load, and clears it.
__device__ __forceinline__ float flag_consume(float* src, float v) {
    while (!is_ready(v)) v = flag_load(src);
    *src = 0.0f;
    return v;
}
// By a whole warp: after a loop that lanes leave one by one, the compiler takes all that follows for divergent.
__device__ __forceinline__ float4 flag_consume(float4* src, float4 v) {
    while (__any_sync(WARP_ALL, !is_ready(v))) v = flag_load(src);
    *src = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return v;
}

// ---- semaphores and the grid barrier -------------------------------------------------------------------------------

// Waits until the counter is `value`.
__device__ __forceinline__ void semaphore_wait(const int* semaphore, int value) {
    int seen;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(semaphore) : "memory");
    } while (seen != value);
}
__device__ __forceinline__ void semaphore_release(int* semaphore, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(semaphore), "r"(value) : "memory");
}

// A barrier of all blocks of a grid, which must be resident at once. Its word's top bit is the phase; it flips when the
// last block has arrived. Each block but block 0 adds 1; block 0 adds 2^31 less their number. The first phase may have
// either value, so the word needs no reset.
__device__ __forceinline__ u32 grid_barrier_phase(const u32* barrier) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(barrier) : "memory");
    return v & 0x80000000u;
}
__device__ __forceinline__ void grid_barrier_arrive(u32* barrier) {
    const u32 one = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(barrier), "r"(one) : "memory");
}
