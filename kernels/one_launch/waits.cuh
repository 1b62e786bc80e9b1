// Waits of a block for other blocks and within it, and what its warps share.
//
// Waits for other blocks are bounded: after WATCHDOG_CYCLES a thread goes on, with wrong results and the error word
// set. Waits within a block, for weights and tasks, then end by themselves, and all its warps see the same tasks.
// Needs: RING_SLOTS (units in the ring of a warp), CONSUMER_WARPS, NORM_WARPS.
#pragma once
#include "common/prelude.cuh"
#include "one_launch/task.cuh"

#define TASK_SLOTS 16
#define WATCHDOG_CYCLES (1ll << 32)
// What a wait took too long for: words of an exchanged row, a counter.
#define EXCHANGE_REASON 1u
#define COUNTER_REASON 2u

struct TaskBlock {
    int x, y, z;
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
    // A task is copied, what it waits for is there, all consumer warps are done with it.
    u64 task_full[TASK_SLOTS], task_ready[TASK_SLOTS], task_done[TASK_SLOTS];
    WarpState warps[CONSUMER_WARPS];
    u8* exchanged;  // the rows of this launch
    float warp_sums[NORM_WARPS];
    int waiting;  // the task that waits for its counter, -1 if the one that runs does not
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

__device__ __forceinline__ u32 load_relaxed(const u32* from) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
// All that was written before the value was is visible to who sees this load done. It empties L1.
__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
// Adds 1 to the counter, after all that the thread has seen written.
__device__ __forceinline__ void counter_raise(u32* counter) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
