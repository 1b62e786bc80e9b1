// Rings of weights in shared memory, one for each consumer warp: a lane of the loading warp loads unit after unit of
// the warp's parts, the warp sums them in that order. No two consumer warps wait for each other here.
//
// `full` of a slot completes when its copies have landed, `empty` when the warp has read it.
// Needs: SLOT_BYTES (a unit of any kind) and what exchange.cuh needs.
#pragma once
#include "gemm/gemv_tile.cuh"
#include "one_launch/exchange.cuh"

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void ring_wait(u32 mbarrier, u32 parity) {
    poll_until(0x80000000u, [&] { return mbarrier_test_wait(mbarrier, parity); });
}

// ---- counters ------------------------------------------------------------------------------------------------------

// Waits until the counter is at least `value`; by one thread, before a barrier of those that read what it guards.
__device__ __forceinline__ void counter_wait(const u32* counter, u32 value, u32 reason) {
    poll_until(reason, [&] { return exchange_load(counter) >= value; });
    // Once, not with every load: it empties L1.
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
// Adds 1 to the counter, after all that the thread has seen written.
__device__ __forceinline__ void counter_raise(u32* counter) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// ---- rings ---------------------------------------------------------------------------------------------------------

struct RingPosition {
    int slot;
    u32 parity;  // of the slot's phase, for a consumer

    __device__ __forceinline__ void advance() {
        if (++slot == RING_SLOTS) slot = 0, parity ^= 1;
    }
    __device__ __forceinline__ u32 full(int warp) const { return shared_address(block_storage.full[warp] + slot); }
    __device__ __forceinline__ u32 empty(int warp) const { return shared_address(block_storage.empty[warp] + slot); }
    __device__ __forceinline__ u32 offset(int warp) const { return (warp * RING_SLOTS + slot) * SLOT_BYTES; }
};

// The loading warp: lane i has the list of consumer warp i. `memory`: the rings.
__device__ __forceinline__ void load_weights(const LoadPart* list, u32 memory) {
    const int lane = threadIdx.x % 32;
    const u64 policy = policy_evict_first();
    RingPosition ring = {0, 0};
    u32 workspaces = 0;
    const auto read = [&](const LoadPart* from) {
        LoadPart part;
        ((uint4*)&part)[0] = __ldg((const uint4*)from);
        ((uint4*)&part)[1] = __ldg((const uint4*)from + 1);
        return part;
    };
    LoadPart part, next;
    part.what = LOAD_END, part.units = 0;
    if (lane < CONSUMER_WARPS) part = read(list), next = read(++list);
    bool is_active = part.what != LOAD_END;
#if HAS_SM90
    while (__any_sync(WARP_ALL, is_active)) {
        if (!is_active) continue;
        if (part.what == LOAD_WORKSPACE) {
            if (mbarrier_test_wait(shared_address(&block_storage.workspace_free), workspaces & 1))
                workspaces++, part.units = 0;
        } else if (mbarrier_test_wait(ring.empty(lane), ring.parity ^ 1)) {
            const u32 to = memory + ring.offset(lane), full = ring.full(lane);
            mbarrier_arrive_expect_tx(full, part.first_bytes + part.second_bytes);
            cp_async_bulk(to, part.weights, part.first_bytes, full, policy);
            if (part.second_bytes)
                cp_async_bulk(to + part.first_bytes, part.weights + part.second_slice, part.second_bytes, full, policy);
            part.weights += part.unit_stride, part.units--;
            ring.advance();
        } else if (is_aborted()) {
            is_active = false;
            continue;
        }
        if (part.units == 0) {
            part = next;
            is_active = part.what != LOAD_END;
            if (is_active) next = read(++list);
        }
    }
#else
    // The whole warp loads the next unit of one ring after another.
    while (__any_sync(WARP_ALL, is_active)) {
        if (is_aborted()) break;
        bool is_ready = false;
        if (is_active) {
            if (part.what == LOAD_WORKSPACE) {
                if (mbarrier_test_wait(shared_address(&block_storage.workspace_free), workspaces & 1))
                    workspaces++, part.units = 0;
            } else {
                is_ready = mbarrier_test_wait(ring.empty(lane), ring.parity ^ 1);
            }
        }
        for (u32 ready = __ballot_sync(WARP_ALL, is_ready); ready; ready &= ready - 1) {
            const int warp = __ffs(ready) - 1;
            const u32 to = memory + __shfl_sync(WARP_ALL, ring.offset(lane), warp),
                      full = __shfl_sync(WARP_ALL, ring.full(min(lane, CONSUMER_WARPS - 1)), warp),
                      second = __shfl_sync(WARP_ALL, part.second_slice, warp);
            const int first_bytes = __shfl_sync(WARP_ALL, int(part.first_bytes), warp),
                      bytes = first_bytes + __shfl_sync(WARP_ALL, int(part.second_bytes), warp);
            const u8* from = (const u8*)__shfl_sync(WARP_ALL, (u64)part.weights, warp);
            for (int at = lane * 16; at < bytes; at += 512)
                cp_async_16_cache_hint(to + at, from + (at < first_bytes ? at : second + at - first_bytes), policy);
            mbarrier_arrive_cp_async(full);
        }
        if (is_ready) {
            part.weights += part.unit_stride, part.units--;
            ring.advance();
        }
        if (is_active && part.units == 0) {
            part = next;
            is_active = part.what != LOAD_END;
            if (is_active) next = read(++list);
        }
    }
#endif
}
