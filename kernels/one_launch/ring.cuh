// Rings of weights in shared memory, one for each consumer warp, which loads them itself: whenever it has multiplied
// a unit, it loads the unit RING_SLOTS further on in its list, of whatever task or layer. No two warps wait for each
// other here, and none only loads.
//
// sm_90 loads by bulk copies, one lane for the warp; `full` of a slot completes when they have landed. Others load by
// cp.async, all lanes, one group a unit: waiting for all groups but the last RING_SLOTS - 1 is waiting for the unit.
// Needs: RING_SLOTS, SLOT_BYTES (a unit of any kind) and the defines of waits.cuh.
#pragma once
#include "gemm/gemv_tile.cuh"
#include "one_launch/waits.cuh"

// ---- rings ---------------------------------------------------------------------------------------------------------

// The ring of a consumer warp while it has a task.
struct Ring {
    int warp;
    int slot;            // of the next unit
    u32 parity;          // of the slot's phase
    const LoadPart* at;  // the part that is asked for
    int loaded;          // its units that have been asked for
    uint4 window[2];     // lane i has part i of 32
    int index;           // of the part in the window
    const u8* weights;   // of the part: its next unit, and the other fields of LoadPart
    u32 unit_stride, second_slice, units, first_bytes, second_bytes, what;

    // Continues where the warp's task before has left it.
    __device__ __forceinline__ void resume() {
        warp = warp_index();
        const WarpState& state = block_storage.warps[warp];
        slot = state.slot, parity = state.parity, at = state.at, loaded = state.loaded;
        read_window();
    }
    __device__ __forceinline__ void leave() const {
        WarpState& state = block_storage.warps[warp];
        if (threadIdx.x % 32 == 0) state.slot = slot, state.parity = parity, state.at = at, state.loaded = loaded;
    }
    __device__ __forceinline__ void read_window() {
        const uint4* from = (const uint4*)(at + threadIdx.x % 32);
        window[0] = __ldg(from), window[1] = __ldg(from + 1);
        index = -1;
    }
    // The next part becomes that which is asked for.
    __device__ __forceinline__ void take() {
        if (++index == 32) read_window(), index = 0;
        weights = (const u8*)(__shfl_sync(WARP_ALL, window[0].x, index) | u64(__shfl_sync(WARP_ALL, window[0].y, index))
                                                                              << 32);
        unit_stride = __shfl_sync(WARP_ALL, window[0].z, index);
        second_slice = __shfl_sync(WARP_ALL, window[0].w, index);
        const u32 low = __shfl_sync(WARP_ALL, window[1].x, index), high = __shfl_sync(WARP_ALL, window[1].y, index);
        units = low & 0xffff, first_bytes = low >> 16, second_bytes = high & 0xffff, what = high >> 16;
        weights += size_t(loaded) * unit_stride;
    }
    __device__ __forceinline__ const u8* unit(const u8* memory) const {
        return memory + (warp * RING_SLOTS + slot) * SLOT_BYTES;
    }

    // Waits for the next unit.
    __device__ __forceinline__ void wait() const {
#if HAS_SM90
        mbarrier_wait(shared_address(block_storage.full[warp] + slot), parity);
#else
        cp_async_wait<RING_SLOTS - 1>();
        __syncwarp();
#endif
    }
#if !HAS_SM90
    // Two copies a round; addresses are the thread's own and counted along: of a base and an index NVRTC 13.0.88 makes
    // addresses from registers that it never sets (crates/GUIDES.md, debugging).
    __device__ __forceinline__ static void copy(u32 to, const u8* from, int bytes, u64 policy) {
        const int begin = threadIdx.x % 32 * 16;
        to += begin, from += begin;
        int left = bytes - begin;
#pragma unroll 1
        for (; left > 512; left -= 1024, to += 1024, from += 1024) {
            cp_async_16_cache_hint(to, from, policy);
            cp_async_16_cache_hint(to + 512, from + 512, policy);
        }
        if (left > 0) cp_async_16_cache_hint(to, from, policy);
    }
#endif
    // Asks for the next unit of the list, if the list goes on, into slot `to`, which no lane reads any more.
    __device__ __forceinline__ void load(const u8* memory, int to, u64 policy) {
        if (what == LOAD_UNITS) {
            const u32 into = shared_address(memory + (warp * RING_SLOTS + to) * SLOT_BYTES);
#if HAS_SM90
            if (threadIdx.x % 32 == 0) {
                const u32 full = shared_address(block_storage.full[warp] + to);
                mbarrier_arrive_expect_tx(full, first_bytes + second_bytes);
                cp_async_bulk(into, weights, first_bytes, full, policy);
                if (second_bytes) cp_async_bulk(into + first_bytes, weights + second_slice, second_bytes, full, policy);
            }
            __syncwarp();
#else
            copy(into, weights, first_bytes, policy);
            if (second_bytes) copy(into + first_bytes, weights + second_slice, second_bytes, policy);
#endif
            weights += unit_stride;
            if (++loaded == units) at++, loaded = 0, take();
        }
#if !HAS_SM90
        cp_async_commit();
#endif
    }
    // The slot of the next unit is read: the unit RING_SLOTS further on goes there.
    __device__ __forceinline__ void advance(const u8* memory, u64 policy) {
        __syncwarp();
        load(memory, slot, policy);
        if (++slot == RING_SLOTS) slot = 0, parity ^= 1;
    }
    // Fills the ring, of which nothing is loaded.
    __device__ __forceinline__ void fill(const u8* memory, u64 policy) {
#pragma unroll 1
        for (int i = 0; i < RING_SLOTS; i++)
            load(memory, slot + i < RING_SLOTS ? slot + i : slot + i - RING_SLOTS, policy);
    }
};
