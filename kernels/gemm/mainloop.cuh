// Mainloop: multiplies the K-slices of one tile of 256 rows, as they arrive in a pipeline of shared-memory stages.
//
// `peek_next()` reads the descriptor of the next slice, `consumer_wait()` waits for it and returns its slot,
// `consumer_release(slot)` frees it. With bulk copies the next slice is peeked, waited for, and its headers and first
// codes loaded under the last MMAs of the current one, so a ring has two stages at least. Below sm_90 `consumer_wait`
// is collective for all math warps, and a slice is waited for after the one before was released.
// sm_90a multiplies more than 16 rows with wgmma (wgmma_slice_sm90.cuh): the last MMAs of a slice overlap the next, and
// its slot is released one wait later. The bits are the same.
//
// The including file defines N8_TILES (n8 tiles of x), WARPS (math warps), M16_TILES (m16 tiles of a warp: w and w +
// WARPS) and KINDS.
#pragma once
#include "gemm/mma_slice.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(NO_WGMMA) && N8_TILES >= 3
#include "gemm/wgmma_slice_sm90.cuh"
#define USE_WGMMA 1
#else
#define USE_WGMMA 0
#endif

// Maximum over KINDS from `kind` on: bytes of an m16 tile in a slice, and chunks of x in a slice.
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int max_slice_tile_bytes(int kind) {
    return kind == KINDS_PACKED
               ? 0
               : max_of(KINDS >> kind & 1 ? max_of(slice_tile_bytes(kind, 0), slice_tile_bytes(kind, 1)) : 0,
                        max_slice_tile_bytes(kind + 1));
}
constexpr int max_slice_chunks(int kind) {
    return kind == KINDS_PACKED ? 1 : max_of(KINDS >> kind & 1 ? slice_chunks(kind) : 1, max_slice_chunks(kind + 1));
}

// Bytes of weights in a stage; x follows.
constexpr int WEIGHT_STAGE_BYTES = 16 * max_slice_tile_bytes(0);

// A slice in shared memory: the address of its x / 16, which follows WEIGHT_STAGE_BYTES of weights; and the barrier for
// consumer_release.
struct PipelineSlot {
    u32 x, barrier;

    __device__ __forceinline__ u32 weights() const { return x * 16 - WEIGHT_STAGE_BYTES; }
};

template <int VALUE>
struct IntConstant {
    static constexpr int value = VALUE;
};

// Whether the warp has rows if the first row block of a tile has `tiles` m16 tiles; the second has no more. The same
// for all warps of a warpgroup.
__device__ __forceinline__ bool warp_has_rows(int tiles, int warp) { return (USE_WGMMA ? warp & 4 : warp) < tiles; }

// Adds the products of `units` work units to acc. `null_slot`: a slot of no consequence, released before the first:
// cheaper than to test whether an earlier slice is in flight.
template <int KIND, typename Wait, typename PeekNext, typename Release>
__device__ __forceinline__ void gemm_mainloop(const u8* ring, int units, float (&acc)[M16_TILES][N8_TILES][4],
                                              const Wait& consumer_wait, const PeekNext& peek_next,
                                              const Release& consumer_release, const PipelineSlot& null_slot) {
    constexpr bool TWO_SLICES = unit_slices(KIND) == 2,
                   USE_LANE_OFFSETS = USE_WGMMA && M16_TILES == 2 && TileDequantizer<KIND>::IS_PAIRED;
    TileDequantizer<KIND> tile[M16_TILES];
    PipelineSlot slot = {};  // current slice
    u32 x_desc = 0;          // its x as a wgmma descriptor
    LaneOffsets<KIND> lane_offsets;
    if constexpr (USE_LANE_OFFSETS) lane_offsets.init(WARPS, -WEIGHT_STAGE_BYTES);
    const auto weights = [&](auto slice, const u8*(&w)[M16_TILES]) {
#pragma unroll
        for (int m = 0; m < M16_TILES; m++)
            w[m] = ring + (slot.weights() - shared_address(ring)) +
                   (m * WARPS + threadIdx.x / 32) * slice_tile_bytes(KIND, decltype(slice)::value);
    };
    // Loads the codes of chunk q of tile m.
    const auto load_codes = [&](auto slice, int m, int q) {
        constexpr int SLICE = decltype(slice)::value;
        if constexpr (USE_LANE_OFFSETS) {
            tile[m].template load_codes<SLICE>(lane_offsets, slot.x * 16, m * WARPS * slice_tile_bytes(KIND, SLICE), q);
        } else {
            const u8* w[M16_TILES];
            weights(slice, w);
            tile[m].load_codes(w[m], q);
        }
    };
    const auto load_slice = [&](auto slice) {
        constexpr int SLICE = decltype(slice)::value;
        slot = consumer_wait();
        if constexpr (USE_LANE_OFFSETS) {
            TileDequantizer<KIND>::template load_header_pair<SLICE>(tile, lane_offsets, slot.x * 16);
        } else {
            const u8* w[M16_TILES];
            weights(slice, w);
            load_headers<SLICE>(tile, w);
        }
#pragma unroll
        for (int m = 0; m < M16_TILES; m++) load_codes(slice, m, 0);
#if USE_WGMMA
        x_desc = wgmma_desc_low(slot.x);
#endif
    };
#if USE_WGMMA
    PipelineSlot previous = null_slot;  // slice whose MMAs may still run
    const auto release_previous = [&]() { consumer_release(previous); };
#endif
    // `more`: another slice follows.
    const auto run_slice = [&](auto slice, auto next, bool more) {
        constexpr int SLICE = decltype(slice)::value;
        if (!HAS_SM90) load_slice(slice);
        const PipelineSlot current = slot;
        const auto prefetch_next = [&]() {
            if (HAS_SM90 && more) load_slice(next);
        };
#if USE_WGMMA
        // Warp-uniform, and known as such to the compiler.
        const u32 x = __shfl_sync(WARP_ALL, x_desc, 0);
        wgmma_slice<KIND, M16_TILES, N8_TILES, SLICE>(
            tile, [&](int m, int q) { load_codes(slice, m, q); }, x, acc, prefetch_next, release_previous, peek_next);
        previous = current;
#else
        const u8* w[M16_TILES];
        weights(slice, w);
        peek_next();
        mma_slice<KIND, M16_TILES, N8_TILES, SLICE>(tile, w, ring + (current.x * 16 - shared_address(ring)), acc,
                                                    prefetch_next);
        consumer_release(current);
#endif
    };
    if (HAS_SM90) {
        peek_next();
        load_slice(IntConstant<0>());
    }
    for (int i = 0; i < units; i++) {
        run_slice(IntConstant<0>(), IntConstant<TWO_SLICES>(), TWO_SLICES || i + 1 < units);
        if constexpr (TWO_SLICES) run_slice(IntConstant<1>(), IntConstant<0>(), i + 1 < units);
    }
#if USE_WGMMA
    wgmma_drain(acc);
    release_previous();
#endif
}

// The same for a kind known at run time, one of KINDS. `has_work`: see warp_has_rows.
template <typename Wait, typename PeekNext, typename Release>
__device__ __forceinline__ void gemm_mainloop(int kind, const u8* ring, int units, bool has_work,
                                              float (&acc)[M16_TILES][N8_TILES][4], const Wait& consumer_wait,
                                              const PeekNext& peek_next, const Release& consumer_release,
                                              const PipelineSlot& null_slot) {
    if (!has_work) {
        for (int i = 0; i < units * unit_slices(kind); i++) {
            peek_next();
            consumer_release(consumer_wait());
        }
        return;
    }
    switch (kind) {
#define KIND_CASE(K)                                                                                   \
    case K:                                                                                            \
        if constexpr (KINDS >> K & 1)                                                                  \
            gemm_mainloop<K>(ring, units, acc, consumer_wait, peek_next, consumer_release, null_slot); \
        break;
        KIND_CASE(KIND_Q4K)
        KIND_CASE(KIND_Q5K) KIND_CASE(KIND_Q6K) KIND_CASE(KIND_Q8) KIND_CASE(KIND_U8_AFFINE) KIND_CASE(KIND_F16)
#undef KIND_CASE
    }
}
// The same without peek.
template <typename Wait, typename Release>
__device__ __forceinline__ void gemm_mainloop(int kind, const u8* ring, int units, bool has_work,
                                              float (&acc)[M16_TILES][N8_TILES][4], const Wait& consumer_wait,
                                              const Release& consumer_release, const PipelineSlot& null_slot) {
    gemm_mainloop(kind, ring, units, has_work, acc, consumer_wait, []() {}, consumer_release, null_slot);
}
