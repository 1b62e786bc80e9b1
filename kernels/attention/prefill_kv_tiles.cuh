// Loads tiles of 64 cached keys or values as f16 into shared memory.
//
// A tile is 64 consecutive positions of one page, so its rows are contiguous (kv_cache.cuh). In shared memory, 16-byte
// chunk c of a row is at (c ^ (row & 7)). Rows from `valid` on are zero, whatever the cache holds.
// Needs: HEAD_DIM, PRODUCER_THREADS (a multiple of HEAD_DIM / 8).
#pragma once
#include "attention/kv_cache.cuh"
#include "common/prelude.cuh"

#define KV_TILE 64
#ifndef KEYS_PER_FETCH  // keys per load
#define KEYS_PER_FETCH KV_TILE
#endif
// Offset of chunk `chunk` of row `row` in a tile of `rows` rows: row-major, or in panels of 64 columns (PANEL_LAYOUT).
__device__ __forceinline__ u32 tile_chunk(int row, int chunk, int rows = KV_TILE) {
#ifdef PANEL_LAYOUT
    return (chunk >> 3) * (rows * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
#else
    return row * (2 * HEAD_DIM) + ((chunk & ~7 | (chunk ^ row) & 7) << 4);
#endif
}

// `begin` starts loading a tile, `finish` completes it; a barrier must follow. The destination must be free at
// `finish`, and already at `begin` if WRITES_AT_BEGIN. All PRODUCER_THREADS take part; `thread` is this one's index.
template <int FORMAT>
struct KvTileFetcher;

template <>
struct KvTileFetcher<KV_F16> {
    static constexpr bool WRITES_AT_BEGIN = true;
    static constexpr int UNITS = KEYS_PER_FETCH * HEAD_DIM * 2 / 16;

    __device__ __forceinline__ void begin(const Plane& cache, u64 row, int valid, u32 to, int thread) {
        const u8* from = cache.values + row * (HEAD_DIM * 2);
#pragma unroll
        for (int i = 0; i < (UNITS + PRODUCER_THREADS - 1) / PRODUCER_THREADS; i++) {
            const int unit = thread + i * PRODUCER_THREADS;
            const int key = thread / (HEAD_DIM / 8) + i * (PRODUCER_THREADS / (HEAD_DIM / 8)),
                      chunk = thread % (HEAD_DIM / 8);
            if (UNITS % PRODUCER_THREADS && unit >= UNITS) {
                break;
            }
            cp_async_16_zfill(to + tile_chunk(key, chunk), from + unit * 16, key < valid ? 16 : 0);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void finish(u32, int) { cp_async_wait<0>(); }
};

// Stores 16 bytes, four f16 pairs.
__device__ __forceinline__ void store_chunk(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A unit is 16 values of Q8_0, or a block of 32 values of the other formats.
template <int FORMAT>
struct KvTileFetcher {
    static constexpr bool WRITES_AT_BEGIN = false;
    static constexpr int VALUES = FORMAT == KV_Q8_0 ? 16 : 32, PER_ROW = HEAD_DIM / VALUES,
                         UNITS = KEYS_PER_FETCH * PER_ROW;
    static constexpr int UNITS_PER_THREAD = (UNITS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
    static constexpr bool SCALES_32_BIT = kv_has_min(FORMAT);  // 32-bit scales
    uint4 raw[UNITS_PER_THREAD];                               // TQ3_0: three words
    u32 fifth[kv_has_fifth_bit(FORMAT) ? UNITS_PER_THREAD : 1];
    // 16-bit scales: those of units 2i and 2i + 1
    u32 scale[SCALES_32_BIT ? UNITS_PER_THREAD : (UNITS_PER_THREAD + 1) / 2];

    __device__ __forceinline__ void begin(const Plane& cache, u64 row, int valid, u32, int thread) {
        constexpr int ROW = kv_row_bytes(FORMAT, HEAD_DIM), SCALES = kv_scale_bytes(FORMAT, HEAD_DIM);
        const u8* from = cache.values + row * ROW;
        const u8* scales = (const u8*)cache.scales + row * SCALES;
#pragma unroll
        for (int i = 0; i < UNITS_PER_THREAD; i++) {
            const int unit = thread + i * PRODUCER_THREADS, key = unit / PER_ROW, part = unit % PER_ROW;
            if (UNITS % PRODUCER_THREADS && unit >= UNITS) {
                break;
            }
            if (FORMAT == KV_TQ3_0) {
                const u32* words = (const u32*)(from + key * ROW + part * 12);
                raw[i] = make_uint4(words[0], words[1], words[2], 0);
            } else {
                raw[i] = *(const uint4*)(from + key * ROW + part * 16);
            }
            if (kv_has_fifth_bit(FORMAT)) {
                fifth[i] = ((const u32*)(from + key * ROW + HEAD_DIM / 2))[part];
            }
            // A scale of 0 makes every code 0.
            const bool valid_unit = unit < valid * PER_ROW;
            if (SCALES_32_BIT) {
                scale[i] = valid_unit ? ((const u32*)(scales + key * SCALES))[part] : 0;
            } else {
                const int block = FORMAT == KV_TQ3_0 ? part / (PER_ROW / 2) : part * VALUES / 32;
                const u32 s = valid_unit ? ((const u16*)(scales + key * SCALES))[block] : 0;
                scale[i / 2] = i % 2 ? scale[i / 2] | s << 16 : s;
            }
        }
    }

    __device__ __forceinline__ void finish(u32 to, int thread) {
#pragma unroll
        for (int i = 0; i < UNITS_PER_THREAD; i++) {
            const int unit = thread + i * PRODUCER_THREADS;
            const int key = thread / PER_ROW + i * (PRODUCER_THREADS / PER_ROW),
                      first = thread % PER_ROW * (VALUES / 8);
            if (UNITS % PRODUCER_THREADS && unit >= UNITS) {
                break;
            }
            const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
            Scale s;
            if (SCALES_32_BIT) {
                s.d = prmt(scale[i], 0, 0x1010), s.m = prmt(scale[i], 0, 0x3232);
            } else {
                s.d = prmt(scale[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
            }
            if (FORMAT == KV_Q8_0) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 a = words[2 * half] ^ 0x80808080u, b = words[2 * half + 1] ^ 0x80808080u;
                    store_chunk(to + tile_chunk(key, first + half), bytes_to_f16x2(a, 0x4140, s.d),
                                bytes_to_f16x2(a, 0x4342, s.d), bytes_to_f16x2(b, 0x4140, s.d),
                                bytes_to_f16x2(b, 0x4342, s.d));
                }
            } else if (FORMAT == KV_TQ3_0) {
                // Eight codes in the nibbles of each word, and eight in the nibbles' high bits.
                const u32 last =
                    words[0] >> 3 & 0x11111111u | words[1] >> 2 & 0x22222222u | words[2] >> 1 & 0x44444444u;
#pragma unroll
                for (int quarter = 0; quarter < 4; quarter++) {
                    const u32 codes = quarter < 3 ? words[quarter] & 0x77777777u : last;
                    u32 pairs[4];
                    tq3_levels(codes, s.d, pairs);
                    store_chunk(to + tile_chunk(key, first + quarter), pairs[0], pairs[1], pairs[2], pairs[3]);
                }
            } else {
#pragma unroll
                for (int quarter = 0; quarter < 4; quarter++) {
                    u32 pairs[2][2];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        // Four bytes: values 8 quarter + 4 j .. of the block.
                        u32 codes = words[quarter % 2 * 2 + j] >> (quarter / 2 * 4) & 0x0f0f0f0fu;
                        if (kv_has_fifth_bit(FORMAT)) {
                            const u32 bits = fifth[i] >> (quarter % 2 * 2 + j + quarter / 2 * 8);
                            codes |= bits << 4 & 0x00100010u | bits << 8 & 0x10001000u;
                        }
                        pairs[j][0] = codes_to_f16x2<FORMAT>(prmt(codes, 0, 0x4140), s);
                        pairs[j][1] = codes_to_f16x2<FORMAT>(prmt(codes, 0, 0x4342), s);
                    }
                    store_chunk(to + tile_chunk(key, first + quarter), pairs[0][0], pairs[0][1], pairs[1][0],
                                pairs[1][1]);
                }
            }
        }
    }
};

// A unit is eight values.
template <>
struct KvTileFetcher<KV_BF16> {
    static constexpr bool WRITES_AT_BEGIN = false;
    static constexpr int UNITS = KEYS_PER_FETCH * HEAD_DIM / 8,
                         UNITS_PER_THREAD = (UNITS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
    uint4 raw[UNITS_PER_THREAD];

    __device__ __forceinline__ void begin(const Plane& cache, u64 row, int valid, u32, int thread) {
        const uint4* from = (const uint4*)(cache.values + row * (HEAD_DIM * 2));
#pragma unroll
        for (int i = 0; i < UNITS_PER_THREAD; i++) {
            const int unit = thread + i * PRODUCER_THREADS;
            if (UNITS % PRODUCER_THREADS && unit >= UNITS) {
                break;
            }
            raw[i] = unit < valid * (HEAD_DIM / 8) ? from[unit] : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void finish(u32 to, int thread) {
#pragma unroll
        for (int i = 0; i < UNITS_PER_THREAD; i++) {
            const int unit = thread + i * PRODUCER_THREADS;
            if (UNITS % PRODUCER_THREADS && unit >= UNITS) {
                break;
            }
            store_chunk(to + tile_chunk(unit / (HEAD_DIM / 8), unit % (HEAD_DIM / 8)), bf16x2_to_f16x2(raw[i].x),
                        bf16x2_to_f16x2(raw[i].y), bf16x2_to_f16x2(raw[i].z), bf16x2_to_f16x2(raw[i].w));
        }
    }
};
