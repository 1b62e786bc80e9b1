// Tiles of 64 keys or values in shared memory, and their mma.m16n8k16 fragments.
//
// A tile holds the stored bytes of 64 rows, STRIDE bytes apart to avoid bank conflicts, followed by their scales.
// Dequantization to f16 happens in registers: code times scale, rounded once.
//
// Keys are the B operand of Q K^T (k = head dims). The order of dims is free as long as Q has the same:
//   F16, BF16, Q8_0   lane t of a quad holds dims 32 b + 8 t .. + 8 of block b, four per K-step
//   Q4, Q5            lane t holds bytes 4 t .. + 4: dims 32 b + 4 t + {0, 2, 1, 3}, then 16 more in the next K-step
//   TQ3_0             lane t holds nibbles 2 t and 2 t + 1 of every word: dims 32 b + 8 i + 2 t + {0, 1} in pair i
// Values are the B operand of P V (k = keys, in order; n = 32 dims in four n8 tiles):
//   F16, BF16, TQ3_0 tile i, column n: dim 8 i + n      Q8_0: 4 n + i      Q4, Q5: 2 n + i % 2 + 16 (i / 2)
#pragma once
#include "common/prelude.cuh"
#include "attention/kv_cache.cuh"

#define DIM_BLOCKS (HEAD_DIM / 32)

// An odd multiple of 16 bytes.
__device__ __host__ constexpr int value_stride(int format) { return (kv_row_bytes(format, HEAD_DIM) / 16 | 1) * 16; }
__device__ __host__ constexpr int key_stride(int format) {
    return format <= KV_BF16   ? kv_row_bytes(format, HEAD_DIM) + 64
           : format == KV_Q8_0 ? kv_row_bytes(format, HEAD_DIM) + 32
                               : value_stride(format);
}
__device__ __host__ constexpr int tile_bytes(int format, int stride) {
    return 64 * (stride + kv_scale_bytes(format, HEAD_DIM));
}

// cp.async of SIZE bytes (4, 8 or 16): the first `bytes` are read, the rest become zero.
template <int SIZE>
__device__ __forceinline__ void cp_async_part(u32 to, const void* from, int bytes) {
    if (SIZE == 16)
        cp_async_16_zfill(to, from, bytes);
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(SIZE), "r"(bytes)
                     : "memory");
}

// Starts cp.async of 64 stored rows from cache row `first`. Rows outside low .. high become zero, whatever is stored
// there. THREADS threads (128 or 256) take part; `thread` is this one's index.
template <int format, int stride, int THREADS = 256>
__device__ __forceinline__ void tile_load(u32 to, const Plane& plane, size_t first, int low, int high, int thread) {
    constexpr int row_bytes = kv_row_bytes(format, HEAD_DIM), words_per_row = row_bytes / 16;
    const u8* from = plane.values + first * row_bytes + thread * 16;
    if (low <= 0 && high >= 64) {
#pragma unroll
        for (int i = 0; i < (64 * words_per_row + THREADS - 1) / THREADS; i++) {
            const int at = i * THREADS + thread;
            if (64 * words_per_row % THREADS == 0 || at < 64 * words_per_row)
                cp_async_16(to + at / words_per_row * stride + at % words_per_row * 16, from + i * THREADS * 16);
        }
    } else {
#pragma unroll 1
        for (int at = thread; at < 64 * words_per_row; at += THREADS, from += THREADS * 16) {
            const int row = at / words_per_row;
            cp_async_part<16>(to + row * stride + at % words_per_row * 16, from, row >= low && row < high ? 16 : 0);
        }
    }
    if constexpr (kv_quantized(format)) {
        constexpr int bytes = kv_scale_bytes(format, HEAD_DIM), piece_bytes = bytes < 16 ? bytes : 16,
                      pieces = bytes / piece_bytes;
        static_assert(64 * pieces <= THREADS, "a thread copies one piece of the scales");
        const int row = thread / pieces;
        if (row < 64)
            cp_async_part<piece_bytes>(to + 64 * stride + thread * piece_bytes,
                                       (const u8*)plane.scales + first * bytes + thread * piece_bytes,
                                       row >= low && row < high ? piece_bytes : 0);
    }
}
template <int format, int stride>
__device__ __forceinline__ void tile_load(u32 to, const Plane& plane, size_t first, int low, int high) {
    tile_load<format, stride, 256>(to, plane, first, low, high, threadIdx.x);
}

#define NO_ROW 0xffffffffu
// The same for the 64 cache rows in `rows`; NO_ROW becomes zeros. 256 threads.
template <int format, int stride>
__device__ __forceinline__ void tile_gather(u32 to, const Plane& plane, const u32* rows, int thread) {
    constexpr int row_bytes = kv_row_bytes(format, HEAD_DIM), words_per_row = row_bytes / 16;
#pragma unroll 2
    for (int at = thread; at < 64 * words_per_row; at += 256) {
        const u32 row = rows[at / words_per_row];
        const bool valid = row != NO_ROW;
        cp_async_part<16>(to + at / words_per_row * stride + at % words_per_row * 16,
                          plane.values + (size_t)(valid ? row : 0) * row_bytes + at % words_per_row * 16,
                          valid ? 16 : 0);
    }
    if constexpr (kv_quantized(format)) {
        constexpr int bytes = kv_scale_bytes(format, HEAD_DIM), piece_bytes = bytes < 16 ? bytes : 16,
                      pieces = bytes / piece_bytes;
        if (thread < 64 * pieces) {
            const u32 row = rows[thread / pieces];
            const bool valid = row != NO_ROW;
            cp_async_part<piece_bytes>(
                to + 64 * stride + thread * piece_bytes,
                (const u8*)plane.scales + (size_t)(valid ? row : 0) * bytes + thread % pieces * piece_bytes,
                valid ? piece_bytes : 0);
        }
    }
}

__device__ __forceinline__ u32 lds32(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 lds64(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ uint4 lds128(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ u16 lds16(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

// B fragments of both K-steps of dim block b for one key: {b0, b1} of the first, {b0, b1} of the second.
template <int format, int stride>
__device__ __forceinline__ void key_fragment(u32 tile, int key, int b, u32 (&out)[4]) {
    const int t = threadIdx.x % 4;
    const u32 row = tile + key * stride, scales = tile + 64 * stride + key * kv_scale_bytes(format, HEAD_DIM);
    if constexpr (format == KV_F16 || format == KV_BF16) {
        const uint4 v = lds128(row + (32 * b + 8 * t) * 2);
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
        if (format == KV_BF16) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[i] = bf16x2_to_f16x2(out[i]);
        }
    } else if constexpr (format == KV_Q8_0) {
        const u32 half = lds16(scales + 2 * b), d = half | half << 16;
        uint2 v = lds64(row + 32 * b + 8 * t);
        v.x ^= 0x80808080u, v.y ^= 0x80808080u;
        out[0] = bytes_to_f16x2(v.x, 0x4140, d);
        out[1] = bytes_to_f16x2(v.x, 0x4342, d);
        out[2] = bytes_to_f16x2(v.y, 0x4140, d);
        out[3] = bytes_to_f16x2(v.y, 0x4342, d);
    } else if constexpr (format == KV_TQ3_0) {
        const u32 half = lds16(scales + (b < DIM_BLOCKS / 2 ? 0 : 2)), d = half | half << 16;
        const u32 two = prmt(lds32(row + 12 * b), lds32(row + 12 * b + 4), t | (4 + t) << 4);
        tq3_to_f16(prmt(two, lds32(row + 12 * b + 8), 0x0010 | (4 + t) << 8), d, out);
    } else {
        Scale scale;
        if (kv_has_min(format)) {
            const u32 pair = lds32(scales + 4 * b);
            scale.d = prmt(pair, 0, 0x1010), scale.m = prmt(pair, 0, 0x3232);
        } else {
            const u32 half = lds16(scales + 2 * b);
            scale.d = half | half << 16;
        }
        const u32 v = lds32(row + 16 * b + 4 * t),
                  fifth = kv_has_fifth_bit(format) ? lds32(row + HEAD_DIM / 2 + 4 * b) >> t : 0;
        out[0] = nibbles_to_f16x2<format>(v, fifth, 0, scale);
        out[1] = nibbles_to_f16x2<format>(v >> 8, fifth, 1, scale);
        out[2] = nibbles_to_f16x2<format>(v >> 4, fifth, 2, scale);
        out[3] = nibbles_to_f16x2<format>(v >> 12, fifth, 3, scale);
    }
}

// Q in the dim order of key_fragment: four words of dim block b for lane t, from f16 [HEAD_DIM].
template <int format>
__device__ __forceinline__ uint4 query_words(const u16* query, int b, int t) {
    if (format <= KV_Q8_0) return *(const uint4*)(query + 32 * b + 8 * t);
    if (format == KV_TQ3_0) {
        const u32* pairs = (const u32*)(query + 32 * b) + t;
        return make_uint4(pairs[0], pairs[4], pairs[8], pairs[12]);
    }
    const uint2 low = *(const uint2*)(query + 32 * b + 4 * t), high = *(const uint2*)(query + 32 * b + 16 + 4 * t);
    return make_uint4(prmt(low.x, low.y, 0x5410), prmt(low.x, low.y, 0x7632), prmt(high.x, high.y, 0x5410),
                      prmt(high.x, high.y, 0x7632));
}

// B fragments of keys 16 step .. + 16 and the 32 dims of `block`: four n8 tiles.
template <int format, int stride>
__device__ __forceinline__ void value_fragments(u32 tile, int step, int block, u32 (&out)[4][2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (format == KV_F16 || format == KV_BF16) {
        const u32 at = tile + (16 * step + lane % 16) * stride + (32 * block + lane / 16 * 8) * 2;
        u32 r[4];
        ldmatrix_x4_trans(r, at);
        out[0][0] = r[0], out[0][1] = r[1], out[1][0] = r[2], out[1][1] = r[3];
        ldmatrix_x4_trans(r, at + 32);
        out[2][0] = r[0], out[2][1] = r[1], out[3][0] = r[2], out[3][1] = r[3];
        if (format == KV_BF16) {
#pragma unroll
            for (int i = 0; i < 8; i++) out[i / 2][i % 2] = bf16x2_to_f16x2(out[i / 2][i % 2]);
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            constexpr int scale_bytes = kv_scale_bytes(format, HEAD_DIM);
            const int key = 16 * step + 8 * half + 2 * t;
            const u32 row = tile + key * stride, scales = tile + 64 * stride + key * scale_bytes;
            Scale scale;
            if constexpr (kv_has_min(format)) {
                const u32 a = lds32(scales + 4 * block), b = lds32(scales + scale_bytes + 4 * block);
                scale.d = prmt(a, b, 0x5410), scale.m = prmt(a, b, 0x7632);
            } else {
                const u32 at = scales + (format == KV_TQ3_0 ? (block < DIM_BLOCKS / 2 ? 0 : 2) : 2 * block);
                scale.d = u32(lds16(at)) | u32(lds16(at + scale_bytes)) << 16;
            }
            if constexpr (format == KV_Q8_0) {
                const u32 at = row + 32 * block + 4 * g;
                const u32 a = lds32(at) ^ 0x80808080u, b = lds32(at + stride) ^ 0x80808080u;
                const u32 low = prmt(a, b, 0x5140), high = prmt(a, b, 0x7362);
                out[0][half] = bytes_to_f16x2(low, 0x4140, scale.d);
                out[1][half] = bytes_to_f16x2(low, 0x4342, scale.d);
                out[2][half] = bytes_to_f16x2(high, 0x4140, scale.d);
                out[3][half] = bytes_to_f16x2(high, 0x4342, scale.d);
            } else if constexpr (format == KV_TQ3_0) {
                // Nibble g of a word of two neighboring keys, the first key's in the low half.
                u32 words_per_row[3], pairs[4];
#pragma unroll
                for (int w = 0; w < 3; w++) {
                    const u32 at = row + 12 * block + 4 * w, a = lds32(at), b = lds32(at + stride);
                    words_per_row[w] = __funnelshift_r(a, a, 4 * g) & 0x0fu | __funnelshift_r(b, b, 4 * g + 28) & 0xf0u;
                }
                tq3_to_f16(words_per_row[0] | words_per_row[1] << 8 | words_per_row[2] << 16, scale.d, pairs);
#pragma unroll
                for (int i = 0; i < 4; i++) out[i][half] = pairs[i];
            } else {
                const u32 at = row + 16 * block + g / 2 * 4;
                const u32 v = prmt(lds32(at), lds32(at + stride), g % 2 ? 0x7632 : 0x5410);
                u32 fifth = 0;
                if (kv_has_fifth_bit(format)) {
                    const u32 word = row + HEAD_DIM / 2 + 4 * block, shift = g % 2 * 16 + g / 2;
                    fifth = prmt(lds32(word) >> shift, lds32(word + stride) >> shift, 0x5410);
                }
                out[0][half] = nibbles_to_f16x2<format>(v, fifth, 0, scale);
                out[1][half] = nibbles_to_f16x2<format>(v >> 8, fifth, 1, scale);
                out[2][half] = nibbles_to_f16x2<format>(v >> 4, fifth, 2, scale);
                out[3][half] = nibbles_to_f16x2<format>(v >> 12, fifth, 3, scale);
            }
        }
    }
}

// Stores one row of four accumulator tiles (columns 2 t and 2 t + 1 of each) as 32 dims.
template <int format>
__device__ __forceinline__ void store_dims(float* to, const float (&o)[4][4], int row) {
    const int t = threadIdx.x % 4, c = 2 * row;
    if (format <= KV_BF16 || format == KV_TQ3_0) {
#pragma unroll
        for (int i = 0; i < 4; i++) *(float2*)(to + 8 * i + 2 * t) = make_float2(o[i][c], o[i][c + 1]);
    } else if (format == KV_Q8_0) {
        ((float4*)to)[2 * t] = make_float4(o[0][c], o[1][c], o[2][c], o[3][c]);
        ((float4*)to)[2 * t + 1] = make_float4(o[0][c + 1], o[1][c + 1], o[2][c + 1], o[3][c + 1]);
    } else {
        ((float4*)to)[t] = make_float4(o[0][c], o[1][c], o[0][c + 1], o[1][c + 1]);
        ((float4*)to)[4 + t] = make_float4(o[2][c], o[3][c], o[2][c + 1], o[3][c + 1]);
    }
}
