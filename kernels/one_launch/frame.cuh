// A decode step in one persistent launch: what the launches of one row (one_launch.cu) and of several rows
// (several_rows.cu) have in common. entry.cuh has the kernel.
//
// Each block runs its own list of tasks (task.cuh), which the host makes from the launches of the same plan. Weights do
// not depend on activations: each consumer warp has a ring of them (ring.cuh), which is full while it waits, across
// tasks and layers. The last warp copies tasks to shared memory. Tasks of packed matrices divide the K ranges of their
// tiles among all consumer warps, then sums are added up behind one barrier; other tasks are the kernels of the
// separate launches. The bits are theirs: K ranges, order of sums and functions are the same.
//
// in   lists [blocks], tasks, loads, sums, tiles: what blocks and their warps do     counters [n_counters + 3][32], 0
//      exchange [2][exchange_bytes], ABSENT: of one row; the counter behind `error` has the set of the next launch
// out  what the tasks write; counters 0; status: 0, or what a wait took too long for: EXCHANGE_REASON, COUNTER_REASON
// grid one block per SM, all resident (cooperative), x (CONSUMER_WARPS + 1) * 32
// smem rings, then what tasks of packed matrices work with; dynamic. A task with a workspace works in the first rings,
//      whose loading waits for it.
// defines CONSUMER_WARPS (MAX_CONSUMER_WARPS at most), KINDS, MAX_SUMS (partial sums of a task), HIDDEN (width of
//      normed rows), WIDTH (the same), NORM_WARPS, those of ring.cuh, CLOCKS (1: print where the time goes)
// arch sm_80 and up; sm_90 loads by bulk copies
#pragma once
#undef PDL
#define KERNEL(...) __device__ __noinline__ void
#include "common/prelude.cuh"
#include "common/step.cuh"
#define CONSUMERS (CONSUMER_WARPS * 32)
#define LAUNCH_THREADS (CONSUMERS + 32)
#define CONSUMER_BARRIER 11
#include "one_launch/task.cuh"
#include "one_launch/waits.cuh"
#include "gemm/gemv_tile.cuh"
#include "one_launch/ring.cuh"
#include "one_launch/clocks.cuh"

__device__ __forceinline__ u32 parity_of(int task) { return task / TASK_SLOTS & 1; }

// Waits for the counter of the task that runs; each warp by itself.
__device__ __forceinline__ void wait_ready() {
    const int task = block_storage.waiting;
    if (task >= 0) mbarrier_wait(shared_address(block_storage.task_ready + task % TASK_SLOTS), parity_of(task));
}

struct LaunchParams {
    const BlockLists* lists;
    const Task* tasks;
    const LoadPart* loads;
    const SumPart* sums;
    const TaskTile* tiles;
    u32* counters;
    u32* status;
    u8* exchange;
    int n_counters, exchange_bytes;
};

// Dynamic shared memory: the rings are first.
#define RING_BYTES (CONSUMER_WARPS * RING_SLOTS * SLOT_BYTES)
__device__ __forceinline__ void consumer_sync() { named_barrier_sync<CONSUMER_BARRIER, CONSUMERS>(); }

// ---- the warp of tasks ---------------------------------------------------------------------------------------------

// Tasks of a block, in the order of its list: copied as far ahead as there are slots, and for each the wait for its
// counter and the raise of that of its phase: one poll and one fence a block.
struct TaskWarp {
    const LaunchParams& params;
    const u64* list;
    u64 exchanged;  // where the rows of this launch are
    u8* absent;     // those of the next, which this launch clears from `clear` on
    int clear;
    u64 next;  // the lane's word of task `copied`
    int copied;
    bool has_end;

    __device__ __forceinline__ void copy_one() {
        const int lane = threadIdx.x % 32, slot = copied % TASK_SLOTS;
        // The header has four words; the upper half of the last says which operands are offsets.
        const u32 offsets = __shfl_sync(WARP_ALL, u32(next >> 32), 3);
        has_end = u32(__shfl_sync(WARP_ALL, u32(next), 0)) == TASK_END;
        if (lane >= 4 && offsets >> (lane - 4) & 1) next += exchanged;
        ((u64*)&block_storage.tasks[slot])[lane] = next;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(block_storage.task_full + slot));
        copied++;
        if (!has_end) next = __ldg(list + copied * 32 + lane);
        // The other set, a part with each task.
        for (int n = 0; clear < params.exchange_bytes && (n < 4 || has_end); n++, clear += gridDim.x * 512)
            *(uint4*)(absent + clear) = make_uint4(ABSENT, ABSENT, ABSENT, ABSENT);
    }
    // Whether the counter is there, or the launch is given up.
    __device__ __forceinline__ static bool has_counted(const u32* at, u32 value, i64 begin) {
        if (load_relaxed(at) >= value || is_aborted()) return true;
        if (clock64() - begin <= WATCHDOG_CYCLES) return false;
        abort_launch(COUNTER_REASON);
        return true;
    }
    __device__ __forceinline__ u32* counter(int index) const { return params.counters + index * COUNTER_STRIDE; }

    __device__ __forceinline__ void run() {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int i = 0;; i++) {
            const int slot = i % TASK_SLOTS;
            if (copied == i) copy_one();
            const Task& task = block_storage.tasks[slot];
            if (task.kind == TASK_END) return;
            const auto may_copy = [&] { return !has_end && copied - i < TASK_SLOTS; };
            if (task.wait >= 0) {
                const u32* at = counter(task.wait);
                const u32 value = task.wait_value;
                const i64 begin = clock64();
                // One lane decides for all.
                while (!__shfl_sync(WARP_ALL, lane > 0 || has_counted(at, value, begin), 0))
                    if (may_copy()) copy_one();
                load_acquire(at);
                __syncwarp();
            }
            if (lane == 0) mbarrier_arrive(shared_address(block_storage.task_ready + slot));
            const u32 done = shared_address(block_storage.task_done + slot);
            while (may_copy() && !__shfl_sync(WARP_ALL, mbarrier_test_wait(done, parity_of(i)), 0)) copy_one();
            mbarrier_wait(done, parity_of(i));
            if (lane == 0 && task.raise >= 0) counter_raise(counter(task.raise));
        }
    }
};

// ---- consumer warps ------------------------------------------------------------------------------------------------

// What tasks of any kind need. Nothing of it lives across tasks: what would, over the calls of bodies, would be
// spilled.
struct TaskRunner {
    const LaunchParams& params;
    u8* memory;
    Clocks& clocks;
    int number;  // of the task that runs

    // Before a task that waits for a counter, or has a block of a separate kernel. No warp runs the task before.
    __device__ __forceinline__ void begin_body(const Task& task, TaskBlock block) const {
        if (threadIdx.x == 0) {
            block_storage.waiting = task.wait < 0 ? -1 : number;
            task_block = block;
        }
        consumer_sync();
    }
    // Behind a body that works in rings; a barrier and a refill follow.
    __device__ __forceinline__ void leave_workspace(const Task& task) const {
#if HAS_SM90
        // Bulk copies into this memory follow.
        if (workspace_warps(task)) fence_proxy_async();
#endif
    }
    // What the ring had before the body is summed, and nothing more was loaded: fills it again.
    __device__ __forceinline__ void refill(const Task& task) const {
        if (warp_index() >= workspace_warps(task)) return;
        Ring ring;
        ring.resume();
        ring.take();  // LOAD_WORKSPACE
        ring.at++;
        ring.take();
        ring.fill(memory, policy_evict_first());
        ring.leave();
    }
    __device__ __forceinline__ static int workspace_warps(const Task& task) { return task.flags >> 8 & 0xff; }
};
