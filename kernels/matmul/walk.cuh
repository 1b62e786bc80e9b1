// The pieces of one tile of 256 rows that a block multiplies one after the other, as they come in a ring in shared memory.
//
// `look()` finds where the next piece lies, `take()` waits for it and says where, `give(place)` tells that the warp is done with it. With bulk
// copies the next piece is looked for with the one at hand, and taken, its headers and first codes fetched, under the last products of that,
// so a ring holds two pieces at least. Below sm_90 `take` is for all warps together and each piece is taken when the one before is done with.
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

// Bytes of a place in shared memory before its x.
constexpr int W_BYTES = 16 * max_piece(0);

// Where a piece lies: its x, as a 16th of its address in shared memory, behind W_BYTES of weights; and what `give` wants to know of it.
struct Place {
    u32 x, barrier;

    __device__ __forceinline__ u32 weights() const { return x * 16 - W_BYTES; }
};

template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};

// Whether the warp has rows where the first row block of a tile has `tiles` tiles of 16; the second has no more. Warps of a
// warpgroup answer alike.
__device__ __forceinline__ bool has_rows(int tiles, int warp) { return (GROUPED ? warp & 4 : warp) < tiles; }

// Adds the products of `units` units to acc. `nowhere`: a place that nobody waits for, given back in front of the first: to ask each time
// whether products of another piece run costs more.
template <int KIND, typename Take, typename Look, typename Give>
__device__ __forceinline__ void walk(const u8* ring, int units, float (&acc)[MT][NT][4], const Take& take, const Look& look, const Give& give,
                                     const Place& nowhere) {
    constexpr bool TWO = unit_pieces(KIND) == 2, REACHED = GROUPED && MT == 2 && Tile<KIND>::IN_TWOS;
    Tile<KIND> tile[MT];
    Place now = {};  // of the piece at hand
    u32 input = 0;   // its x, as warpgroup products want it
    Reach<KIND> reach;
    if constexpr (REACHED) reach.find(WARPS, -W_BYTES);
    const auto weights = [&](auto which, const u8* (&w)[MT]) {
#pragma unroll
        for (int m = 0; m < MT; m++)
            w[m] = ring + (now.weights() - shared_address(ring)) + (m * WARPS + threadIdx.x / 32) * piece_bytes(KIND, decltype(which)::value);
    };
    // Codes of quarter q of tile m.
    const auto fetch_codes = [&](auto which, int m, int q) {
        constexpr int P = decltype(which)::value;
        if constexpr (REACHED) {
            tile[m].template fetch<P>(reach, now.x * 16, m * WARPS * piece_bytes(KIND, P), q);
        } else {
            const u8* w[MT];
            weights(which, w);
            tile[m].fetch(w[m], q);
        }
    };
    const auto fetch = [&](auto which) {
        constexpr int P = decltype(which)::value;
        now = take();
        if constexpr (REACHED) {
            Tile<KIND>::template head_of_two<P>(tile, reach, now.x * 16);
        } else {
            const u8* w[MT];
            weights(which, w);
            heads<P>(tile, w);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) fetch_codes(which, m, 0);
#if GROUPED
        input = wgmma_operand_low(now.x);
#endif
    };
#if GROUPED
    Place before = nowhere;  // of the piece whose products may still run
    const auto give_before = [&]() { give(before); };
#endif
    // `more`: another piece follows.
    const auto piece = [&](auto which, auto next, bool more) {
        constexpr int P = decltype(which)::value;
        if (!HAS_BULK) fetch(which);
        const Place here = now;
        const auto ahead = [&]() {
            if (HAS_BULK && more) fetch(next);
        };
#if GROUPED
        // The same in all lanes, and the compiler is to know it.
        const u32 x = __shfl_sync(WARP_ALL, input, 0);
        multiply_grouped<KIND, MT, NT, P>(tile, [&](int m, int q) { fetch_codes(which, m, q); }, x, acc, ahead, give_before, look);
        before = here;
#else
        const u8* w[MT];
        weights(which, w);
        look();
        multiply<KIND, MT, NT, P>(tile, w, ring + (here.x * 16 - shared_address(ring)), acc, ahead);
        give(here);
#endif
    };
    if (HAS_BULK) {
        look();
        fetch(Constant<0>());
    }
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
                                     const Give& give, const Place& nowhere) {
    if (!mine) {
        for (int i = 0; i < units * unit_pieces(kind); i++) {
            look();
            give(take());
        }
        return;
    }
    switch (kind) {
#define CASE(K) \
    case K: if constexpr (KINDS >> K & 1) walk<K>(ring, units, acc, take, look, give, nowhere); break;
        CASE(KIND_Q4K) CASE(KIND_Q5K) CASE(KIND_Q6K) CASE(KIND_Q8) CASE(KIND_WIDE) CASE(KIND_F16)
#undef CASE
    }
}
// The same where nobody looks ahead.
template <typename Take, typename Give>
__device__ __forceinline__ void walk(int kind, const u8* ring, int units, bool mine, float (&acc)[MT][NT][4], const Take& take, const Give& give,
                                     const Place& nowhere) {
    walk(kind, ring, units, mine, acc, take, []() {}, give, nowhere);
}
