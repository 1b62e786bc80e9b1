// Tiles of 64 cached keys or values on their way to f16 in shared memory.
//
// A tile is 64 neighbouring positions of one page, so its rows are one piece of memory (attn/kv.cuh). In shared memory its
// 16-byte chunks stand at (chunk ^ (row & 7)); rows from `valid` on are zero, whatever the cache holds there.
// Before this file: DIM, LOADERS (a multiple of DIM / 8).
#pragma once
#include "attn/kv.cuh"
#include "common/prelude.cuh"

#define KEYS 64
#ifndef FETCHED // keys that are fetched at once
#define FETCHED KEYS
#endif
// Where chunk `chunk` of row `row` stands in a tile of `rows` rows: rows one after the other, or in PANELS of 64 columns.
__device__ __forceinline__ u32 tile_chunk(int row, int chunk, int rows = KEYS) {
#ifdef PANELS
    return (chunk >> 3) * (rows * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
#else
    return row * (2 * DIM) + ((chunk & ~7 | (chunk ^ row) & 7) << 4);
#endif
}

// Four signed bytes, biased by 128, to f16 pairs: 0x6400 + byte is 1024 + byte.
__device__ __forceinline__ void bytes_to_f16(u32 biased, u32 scale, u32 (&pairs)[2]) {
    const u32 low = prmt(biased, 0x64646464u, 0x4140), high = prmt(biased, 0x64646464u, 0x4342);
    pairs[0] = f16x2_mul(f16x2_add(low, 0xe480e480u), scale);  // - 1152
    pairs[1] = f16x2_mul(f16x2_add(high, 0xe480e480u), scale);
}

// `begin` starts to fetch a tile, `finish` completes it; a barrier after it makes the tile visible. The target must be
// free at `finish`, and where TOUCHES_EARLY already at `begin`. All loader threads (`thread` of LOADERS) take part.
template <int FORMAT> struct Fetch;

template <> struct Fetch<KV_F16> {
    static constexpr bool TOUCHES_EARLY = true;
    static constexpr int UNITS = FETCHED * DIM * 2 / 16;

    __device__ __forceinline__ void begin(const Plane &cache, u64 row, int valid, u32 to, int thread) {
        const u8 *from = cache.values + row * (DIM * 2);
#pragma unroll
        for (int i = 0; i < (UNITS + LOADERS - 1) / LOADERS; i++) {
            const int unit = thread + i * LOADERS;
            const int key = thread / (DIM / 8) + i * (LOADERS / (DIM / 8)), chunk = thread % (DIM / 8);
            if (UNITS % LOADERS && unit >= UNITS) { break; }
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + tile_chunk(key, chunk)),
                         "l"(from + unit * 16), "r"(key < valid ? 16 : 0)
                         : "memory");
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void finish(u32, int) { cp_async_wait<0>(); }
};

// A unit is 16 bytes: 16 values of Q8_0, 32 of Q4_0.
template <int FORMAT> struct Fetch {
    static constexpr bool TOUCHES_EARLY = false;
    static constexpr int VALUES = FORMAT == KV_Q8_0 ? 16 : 32, PER_ROW = DIM / VALUES, UNITS = FETCHED * PER_ROW;
    static constexpr int MINE = (UNITS + LOADERS - 1) / LOADERS;
    uint4 raw[MINE];
    u32 scale[(MINE + 1) / 2]; // halves: those of units 2i and 2i + 1

    __device__ __forceinline__ void begin(const Plane &cache, u64 row, int valid, u32, int thread) {
        const uint4 *from = (const uint4 *)cache.values + row * PER_ROW;
        const u16 *scales = cache.scales + row * (DIM / 32);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int unit = thread + i * LOADERS;
            if (UNITS % LOADERS && unit >= UNITS) { break; }
            // A scale of 0 makes whatever codes there are 0.
            raw[i] = from[unit];
            const u32 s = unit < valid * PER_ROW ? scales[unit * VALUES / 32] : 0;
            scale[i / 2] = i % 2 ? scale[i / 2] | s << 16 : s;
        }
    }

    __device__ __forceinline__ void finish(u32 to, int thread) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int unit = thread + i * LOADERS;
            const int key = thread / PER_ROW + i * (LOADERS / PER_ROW), first = thread % PER_ROW * (VALUES / 8);
            if (UNITS % LOADERS && unit >= UNITS) { break; }
            const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
            const u32 s = prmt(scale[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
            if (FORMAT == KV_Q8_0) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 a[2], b[2];
                    bytes_to_f16(words[2 * half] ^ 0x80808080u, s, a);
                    bytes_to_f16(words[2 * half + 1] ^ 0x80808080u, s, b);
                    store(to + tile_chunk(key, first + half), a, b);
                }
            } else {
#pragma unroll
                for (int quarter = 0; quarter < 4; quarter++) {
                    u32 pairs[2][2];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const u32 nibbles = words[quarter % 2 * 2 + j] >> (quarter / 2 * 4) & 0x0f0f0f0fu;
                        bytes_to_f16(nibbles + 0x78787878u, s, pairs[j]);
                    }
                    store(to + tile_chunk(key, first + quarter), pairs[0], pairs[1]);
                }
            }
        }
    }

    static __device__ __forceinline__ void store(u32 to, const u32 (&a)[2], const u32 (&b)[2]) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1])
                     : "memory");
    }
};
