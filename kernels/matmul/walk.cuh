// The pieces of one tile of 256 rows that a block multiplies one after the other, as they come in a ring in shared memory.
//
// `take()` waits for the next piece and says where it lies; `give(place)` tells that the warp is done with it. With bulk copies the next
// piece is taken, and its headers and first codes are fetched, under the last products of the one at hand, so a ring holds two pieces at
// least; where products run on meanwhile, `look()` may ask a step before whether it is there. Below sm_90 `take` is for all warps together
// and each piece is taken when the one before is done with.
// sm_90a multiplies more than 16 rows by warpgroup products (units_sm90.cuh), whose last of a piece run on into the next: a place is
// given back a wait later. The bits are the same.
//
// The file that includes it defines NT (tiles of 8 rows of x), WARPS that multiply, and MT, 16-row tiles of a warp: w and w + WARPS, and KINDS.
#pragma once
#include "matmul/units.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && NT >= 3
#include "matmul/units_sm90.cuh"
#define GROUPED 1
#else
#define GROUPED 0
#endif

// The largest piece of a 16-row tile, and the most chunks of x beside one, of all KINDS from `kind` on.
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int max_piece(int kind) {
    return kind == KINDS_PACKED ? 0 : most(KINDS >> kind & 1 ? most(piece_bytes(kind, 0), piece_bytes(kind, 1)) : 0, max_piece(kind + 1));
}
constexpr int max_chunks(int kind) { return kind == KINDS_PACKED ? 1 : most(KINDS >> kind & 1 ? piece_chunks(kind) : 1, max_chunks(kind + 1)); }

// Where a piece lies in the ring: its number there, and where its weights and its x begin, in bytes.
struct Place {
    u32 slot, weights, x;
};

template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};

// Whether the warp has rows where the first row block of a tile has `tiles` tiles of 16; the second has no more. Warps of a
// warpgroup answer alike.
__device__ __forceinline__ bool has_rows(int tiles) { return int(GROUPED ? threadIdx.x / 32 & 4 : threadIdx.x / 32) < tiles; }

// Adds the products of `units` units to acc.
template <int KIND, typename Take, typename Look, typename Give>
__device__ __forceinline__ void walk(const u8* ring, int units, float (&acc)[MT][NT][4], const Take& take, const Look& look, const Give& give) {
    constexpr bool TWO = unit_pieces(KIND) == 2;
    Tile<KIND> tile[MT];
    Place now = {};  // of the piece at hand
    const auto weights = [&](auto which, const u8* (&w)[MT]) {
#pragma unroll
        for (int m = 0; m < MT; m++) w[m] = ring + now.weights + (m * WARPS + threadIdx.x / 32) * piece_bytes(KIND, decltype(which)::value);
    };
    const auto fetch = [&](auto which) {
        now = take();
        const u8* w[MT];
        weights(which, w);
        fetch_first<decltype(which)::value>(tile, w);
    };
#if GROUPED
    Place before = {};  // of the piece whose products may still run
    bool running = false;
    const auto give_before = [&]() {
        if (running) give(before);
    };
#endif
    // `more`: another piece follows.
    const auto piece = [&](auto which, auto next, bool more) {
        constexpr int P = decltype(which)::value;
        if (!HAS_BULK) fetch(which);
        const Place here = now;
        const u8* w[MT];
        weights(which, w);
        const auto ahead = [&]() {
            if (HAS_BULK && more) fetch(next);
        };
#if GROUPED
        multiply_grouped<KIND, MT, NT, P>(tile, w, ring + here.x, acc, ahead, give_before, [&]() { if (more) look(); });
        before = here;
        running = true;
#else
        multiply<KIND, MT, NT, P>(tile, w, ring + here.x, acc, ahead);
        give(here);
#endif
    };
    if (HAS_BULK) fetch(Constant<0>());
    for (int i = 0; i < units; i++) {
        piece(Constant<0>(), Constant<TWO>(), TWO || i + 1 < units);
        if constexpr (TWO) piece(Constant<1>(), Constant<0>(), i + 1 < units);
    }
#if GROUPED
    products_end(acc);
    give_before();
#endif
}

// The same, of a kind that is known when the kernel runs: one of KINDS (bits). `mine` as has_rows says.
template <typename Take, typename Look, typename Give>
__device__ __forceinline__ void walk(int kind, const u8* ring, int units, bool mine, float (&acc)[MT][NT][4], const Take& take, const Look& look,
                                     const Give& give) {
    if (!mine) {
        for (int i = 0; i < units * unit_pieces(kind); i++) give(take());
        return;
    }
    switch (kind) {
#define CASE(K) \
    case K: if constexpr (KINDS >> K & 1) walk<K>(ring, units, acc, take, look, give); break;
        CASE(KIND_Q4K) CASE(KIND_Q5K) CASE(KIND_Q6K) CASE(KIND_Q8) CASE(KIND_WIDE) CASE(KIND_F16)
#undef CASE
    }
}
// The same where nobody looks ahead.
template <typename Take, typename Give>
__device__ __forceinline__ void walk(int kind, const u8* ring, int units, bool mine, float (&acc)[MT][NT][4], const Take& take, const Give& give) {
    walk(kind, ring, units, mine, acc, take, []() {}, give);
}
