// Waits of a block, and rows that blocks exchange in band: a word shows by itself whether it is there (ABSENT).
//
// Waits for other blocks are bounded: after WATCHDOG_CYCLES a thread goes on, with wrong results and the error word
// set. Waits within a block, for weights and tasks, then end by themselves, and all its warps see the same tasks.
// Needs: RING_SLOTS (units in the ring of a warp), CONSUMER_WARPS, NORM_WARPS.
#pragma once
#include "gemm/a16_layout.cuh"
#include "one_launch/task.cuh"

#define TASK_SLOTS 16
#define WATCHDOG_CYCLES (1ll << 32)
// What a wait took too long for: words of an exchanged row, a counter.
#define EXCHANGE_REASON 1u
#define COUNTER_REASON 2u

struct TaskBlock {
    int x, y;
};

// What a consumer warp keeps from task to task.
struct WarpState {
    const SumPart* parts;  // the next
    const LoadPart* at;    // struct Ring
    int slot, loaded;
    u32 parity;
};

// What the warps of a block share besides the rings and the activations.
struct BlockStorage {
    Task tasks[TASK_SLOTS];
    u64 full[CONSUMER_WARPS][RING_SLOTS];
    u64 task_full[TASK_SLOTS], task_empty[TASK_SLOTS];
    WarpState warps[CONSUMER_WARPS];
    u8* exchanged;  // the rows of this launch
    float warp_sums[NORM_WARPS];
    const u32* wait_counter;  // of the function of a separate kernel
    u32 wait_value;
    u32* error;
    int is_aborted;
};
__shared__ BlockStorage block_storage;
__shared__ TaskBlock task_block;

// The launch cannot finish as it should: every wait of the block for other blocks ends from here on.
__device__ __forceinline__ void abort_launch(u32 reason) {
    *(volatile int*)&block_storage.is_aborted = 1;
    atomicCAS(block_storage.error, 0u, reason);
}
__device__ __forceinline__ bool is_aborted() { return *(volatile int*)&block_storage.is_aborted; }

// Polls `is_there` until it is true or the launch is given up.
template <class Poll>
__device__ __forceinline__ void poll_until(u32 reason, const Poll& is_there) {
    if (is_there()) return;
    const i64 begin = clock64();
    while (!is_there()) {
        if (is_aborted()) return;
        if (clock64() - begin > WATCHDOG_CYCLES) return abort_launch(reason);
    }
}

// ---- rows exchanged between blocks ---------------------------------------------------------------------------------

__device__ __forceinline__ uint4 exchange_load(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 exchange_load(const u32* from) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
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
        for (int i = 0; i < N; i++) v[i] = __uint_as_float(exchange_load((const u32*)from + i * stride));
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
