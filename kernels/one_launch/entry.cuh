// The kernel of frame.cuh. Needs: struct Consumer, which does the tasks.
#pragma once
#include "one_launch/frame.cuh"

__device__ __forceinline__ void consume_all(const LaunchParams& params, u8* memory, Clocks& clocks) {
    Consumer consumer = {{params, memory, clocks, 0}};
    const int warp = warp_index();
    const BlockLists& lists = params.lists[blockIdx.x];
    if (threadIdx.x % 32 == 0)
        block_storage.warps[warp] = {params.sums + lists.sums[warp], params.loads + lists.loads[warp], 0, 0, 0};
    __syncwarp();
    {
        Ring ring;
        ring.resume();
        ring.take();
        ring.fill(memory, policy_evict_first());
        ring.leave();
        __syncwarp();
    }
#pragma unroll 1
    for (;; consumer.number++) {
        const int slot = consumer.number % TASK_SLOTS;
        mbarrier_wait(shared_address(block_storage.task_full + slot), parity_of(consumer.number));
        const Task& task = block_storage.tasks[slot];
        if (task.kind == TASK_END) return;
        clocks.begin();
        if (task.kind == TASK_GEMV)
            consumer.gemv(task);
        else if (task.kind == TASK_GEMV_F32)
            consumer.gemv_f32(task);
        else
            consumer.body(task);
        __syncwarp();
        clocks.end(task, consumer.number);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(block_storage.task_done + slot));
    }
}

extern "C" __global__ void __launch_bounds__(LAUNCH_THREADS, 1)
    one_launch(const __grid_constant__ LaunchParams params) {
    extern __shared__ __align__(1024) u8 memory[];
    // Behind the counters: blocks that left, the error, the set of this launch.
    u32 *left = params.counters + params.n_counters * COUNTER_STRIDE, *error = left + COUNTER_STRIDE,
        *set = error + COUNTER_STRIDE;
    if (threadIdx.x < CONSUMER_WARPS)
        for (int i = 0; i < RING_SLOTS; i++) mbarrier_init(shared_address(block_storage.full[threadIdx.x] + i), 1);
    if (threadIdx.x >= 32 && threadIdx.x < 32 + TASK_SLOTS) {
        mbarrier_init(shared_address(block_storage.task_full + threadIdx.x - 32), 1);
        mbarrier_init(shared_address(block_storage.task_ready + threadIdx.x - 32), 1);
        mbarrier_init(shared_address(block_storage.task_done + threadIdx.x - 32), CONSUMER_WARPS);
    }
    if (threadIdx.x == 0) {
        block_storage.error = error;
        block_storage.is_aborted = 0;
    }
#if HAS_SM90
    fence_mbarrier_init();
#endif
    const u32 this_set = *(volatile u32*)set & 1;
    if (threadIdx.x == 0) block_storage.exchanged = params.exchange + size_t(this_set) * params.exchange_bytes;
    __syncthreads();
    const int warp = warp_index();
    Clocks clocks;
    if (warp == CONSUMER_WARPS) {
        const u64* list = (const u64*)(params.tasks + params.lists[blockIdx.x].tasks);
        const int lane = threadIdx.x % 32;
        TaskWarp tasks = {params,
                          list,
                          (u64)block_storage.exchanged,
                          params.exchange + size_t(this_set ^ 1) * params.exchange_bytes,
                          int(blockIdx.x * 32 + lane) * 16,
                          __ldg(list + lane),
                          0,
                          false};
        tasks.run();
    } else
        consume_all(params, memory, clocks);
    // The last block to leave gives the status and clears the counters: no block waits any more.
    __syncthreads();
    __shared__ int is_last;
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(left, 1u) == gridDim.x - 1;
        __threadfence();
        if (is_last) {
            *params.status = atomicAdd(error, 0u);
            *set = this_set ^ 1;
            print_clocks();
        }
    }
    __syncthreads();
    if (is_last)
        for (int i = threadIdx.x; i < params.n_counters + 2; i += LAUNCH_THREADS)
            params.counters[i * COUNTER_STRIDE] = 0;
}
