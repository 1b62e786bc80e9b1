// Paged KV cache: page lookup and storage formats.
//
// A page holds PAGE_SIZE positions. Codes and scales are two planes of one shape:
//   values  [page][kv head][PAGE_SIZE][kv_row_bytes]        scales  [page][kv head][PAGE_SIZE][kv_scale_bytes]
// F32, F16 and BF16 are plain. The other formats are stored Hadamard-rotated (hadamard.cuh) if KV_ROTATED is 1, TQ3_0
// always, with the codes and scales of the formats of the same name (contract::quant); d and m are f16. Blocks of 32:
//   Q8_0   value = d * q          32 signed bytes
//   Q4_0   value = d * (q - 8)    byte j: value j in the low nibble, value j + 16 in the high one
//   Q4_1   value = d * q + m      the same; scales are pairs d, m
//   Q5_0   value = d * (q - 16)   nibbles as Q4_0; one word of fifth bits per block follows the nibbles of the row
//   Q5_1   value = d * q + m      the same; value 16 h + 4 t + r has bit 4 (2 h + r % 2) + t + 16 (r / 2) of the word
//   TQ3_0  value = norm * level   three words: the low bits of nibble n of word w are the code of value 8 w + n,
//                                 its high bit is bit w of the code of value 24 + n; two norms per row, one per half
// Rows are multiples of 16 bytes. cuda::launch::attention::rows converts between these bytes and the formats' own.
// Reference cpu::reference::kv; test attention::extreme_rows_are_stored_as_the_codec_stores_them.
#pragma once
#include "attention/hadamard.cuh"
#include "common/prelude.cuh"

#define PAGE_SIZE 256
#ifndef KV_ROTATED
#define KV_ROTATED 1
#endif
#define KV_F32 0
#define KV_F16 1
#define KV_BF16 2
#define KV_Q8_0 3
#define KV_Q4_0 4
#define KV_Q4_1 5
#define KV_Q5_0 6
#define KV_Q5_1 7
#define KV_TQ3_0 8

__device__ __host__ constexpr bool kv_quantized(int format) { return format >= KV_Q8_0; }
// Whether rows are stored Hadamard-rotated.
__device__ __host__ constexpr bool kv_rotated(int format) {
    return format == KV_TQ3_0 || (KV_ROTATED && kv_quantized(format));
}
// Whether blocks have a minimum besides their scale.
__device__ __host__ constexpr bool kv_has_min(int format) { return format == KV_Q4_1 || format == KV_Q5_1; }
__device__ __host__ constexpr bool kv_has_fifth_bit(int format) { return format == KV_Q5_0 || format == KV_Q5_1; }
// Bytes of the codes of one row.
__device__ __host__ constexpr int kv_row_bytes(int format, int dim) {
    return format == KV_F32           ? 4 * dim
           : format <= KV_BF16        ? 2 * dim
           : format == KV_Q8_0        ? dim
           : format == KV_TQ3_0       ? dim * 3 / 8
           : kv_has_fifth_bit(format) ? (dim / 2 + dim / 8 + 15) / 16 * 16
                                      : dim / 2;
}
// Bytes of the scales of one row.
__device__ __host__ constexpr int kv_scale_bytes(int format, int dim) {
    return !kv_quantized(format) ? 0 : format == KV_TQ3_0 ? 4 : kv_has_min(format) ? dim / 8 : dim / 16;
}

// Keys or values of one layer.
struct Plane {
    u8* values;
    u16* scales;
};

// Page table of the sequences.
struct PageTable {
    const int* table;  // [slots][max_pages]: physical pages
    int max_pages;
    int ring_pages;  // 0, or the number of pages of a ring buffer
};

// Row index of (position, head) in a plane.
__device__ __forceinline__ size_t kv_row(const PageTable& pages, int slot, int position, int kv_heads, int head) {
    int page = position / PAGE_SIZE;
    if (pages.ring_pages) page %= pages.ring_pages;
    page = pages.table[slot * pages.max_pages + page];
    return ((size_t)page * kv_heads + head) * PAGE_SIZE + position % PAGE_SIZE;
}

// ---- levels of TQ3_0 ----

__device__ __forceinline__ float tq3_level(int code) {
    const int m = code < 4 ? 3 - code : code - 4;
    const float level = m & 2 ? (m & 1 ? 0.190685f : 0.117832f) : (m & 1 ? 0.065717f : 0.021460f);
    return code < 4 ? -level : level;
}
__device__ __forceinline__ int tq3_code(float y) {
    return (y >= -0.154259f) + (y >= -0.091775f) + (y >= -0.043589f) + (y >= 0.0f) + (y >= 0.043589f) +
           (y >= 0.091775f) + (y >= 0.154259f);
}

// ---- quantizing and storing one row, by a warp ----

// The value of largest magnitude among the lanes; the lowest lane wins ties; 0 if there is none.
__device__ __forceinline__ float warp_signed_absmax(float x) {
    const u32 magnitude_bits = x != x ? 0 : __float_as_uint(x) & 0x7fffffffu;
    const u32 most = __reduce_max_sync(WARP_ALL, magnitude_bits);
    const u32 lane_of_most = __ballot_sync(WARP_ALL, magnitude_bits == most);
    const float peak = __shfl_sync(WARP_ALL, x, __ffs(lane_of_most) - 1);
    return most ? peak : 0.0f;
}
// The least value among the lanes; the lowest lane wins ties; 3.4e38 if none is a number.
__device__ __forceinline__ float warp_min(float x) {
    const float own = x < 3.402823466e38f ? x : 3.402823466e38f;
    float smallest = own;
#pragma unroll
    for (int gap = 16; gap; gap >>= 1) smallest = fminf(smallest, __shfl_xor_sync(WARP_ALL, smallest, gap));
    return __shfl_sync(WARP_ALL, own, __ffs(__ballot_sync(WARP_ALL, own == smallest)) - 1);
}

// v truncated to an integer in 0 .. top.
__device__ __forceinline__ int clamp_code(float v, int top) { return max(0, min(top, __float2int_rz(v))); }

// Blocks of 32 values as codes with a scale: lane i holds values 32 b + i in x[b].
template <int format, int dim_blocks>
__device__ __forceinline__ void store_blocks(u8* to, u16* scales, const float (&x)[dim_blocks]) {
    const int lane = threadIdx.x % 32;
    constexpr int top = kv_has_fifth_bit(format) ? 31 : 15;
    // Lane b divides for block b.
    float block_extreme = 0.0f, block_max = 0.0f;
#pragma unroll
    for (int b = 0; b < dim_blocks; b++) {
        const float own = kv_has_min(format) ? warp_min(x[b]) : warp_signed_absmax(x[b]);
        const float high = kv_has_min(format) ? -warp_min(-x[b]) : 0.0f;
        if (lane == b) block_extreme = own, block_max = high;
    }
    const float d = format == KV_Q8_0    ? __fdiv_rn(fabsf(block_extreme), 127.0f)
                    : kv_has_min(format) ? __fdiv_rn(__fsub_rn(block_max, block_extreme), (float)top)
                                         : __fdiv_rn(block_extreme, -0.5f * (float)(top + 1));
    const float inverse = d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d);
    if (lane < dim_blocks) {
        if (kv_has_min(format))
            ((u32*)scales)[lane] = u32(f32_to_f16(d)) | u32(f32_to_f16(block_extreme)) << 16;
        else
            scales[lane] = f32_to_f16(d);
    }
    u32 fifth = 0;
#pragma unroll
    for (int b = 0; b < dim_blocks; b++) {
        const float factor = __shfl_sync(WARP_ALL, inverse, b);
        if (format == KV_Q8_0) {
            to[32 * b + lane] = (u8)max(-128, min(127, __float2int_rz(roundf(__fmul_rn(x[b], factor)))));
            continue;
        }
        const float shift = kv_has_min(format) ? 0.5f : kv_has_fifth_bit(format) ? 16.5f : 8.5f;
        const float from = kv_has_min(format) ? __fsub_rn(x[b], __shfl_sync(WARP_ALL, block_extreme, b)) : x[b];
        const int code = clamp_code(__fadd_rn(__fmul_rn(from, factor), shift), top);
        const int high = __shfl_down_sync(WARP_ALL, code, 16);
        if (lane < 16) to[16 * b + lane] = (u8)(code & 15 | (high & 15) << 4);
        if (kv_has_fifth_bit(format)) {
            // This value owns bit `lane` of the word.
            const int value = 16 * (lane >> 3 & 1) + 4 * (lane & 3) + (lane >> 2 & 1) + 2 * (lane >> 4);
            const u32 word = __ballot_sync(WARP_ALL, __shfl_sync(WARP_ALL, code, value) & 16);
            if (lane == b) fifth = word;
        }
    }
    // The last 16 bytes of the row are padded with zeros.
    if (kv_has_fifth_bit(format) && lane < (kv_row_bytes(format, 32 * dim_blocks) - 16 * dim_blocks) / 4)
        ((u32*)(to + 16 * dim_blocks))[lane] = fifth;
}

// Groups of 128 values as level codes and the norm of the group.
template <int dim_blocks>
__device__ __forceinline__ void store_tq3(u8* to, u16* scales, const float (&x)[dim_blocks]) {
    static_assert(dim_blocks % 4 == 0, "TQ3_0 needs a head_dim that is a multiple of 128");
    const int lane = threadIdx.x % 32;
    float y[dim_blocks], length[dim_blocks / 4];
#pragma unroll
    for (int group = 0; group < dim_blocks / 4; group++) {
        float sum = 0.0f;
#pragma unroll
        for (int b = 4 * group; b < 4 * group + 4; b++) sum = fmaf(x[b], x[b], sum);
        length[group] = sqrtf(warp_sum(sum));
        const float inverse = length[group] > 1e-10f ? __fdiv_rn(1.0f, length[group]) : 0.0f;
#pragma unroll
        for (int b = 4 * group; b < 4 * group + 4; b++) y[b] = __fmul_rn(x[b], inverse);
    }
    hadamard_head<false>(y);
    // Lane p makes bit p of each word.
    const int nibble = lane / 4, bit = lane % 4;
#pragma unroll
    for (int group = 0; group < dim_blocks / 4; group++) {
        float level_norm = 0.0f;
#pragma unroll
        for (int b = 4 * group; b < 4 * group + 4; b++) {
            const int code = tq3_code(y[b]);
            const float level = tq3_level(code);
            level_norm = fmaf(level, level, level_norm);
#pragma unroll
            for (int w = 0; w < 3; w++) {
                const int from = __shfl_sync(WARP_ALL, code, bit < 3 ? 8 * w + nibble : 24 + nibble);
                const u32 word = __ballot_sync(WARP_ALL, from >> (bit < 3 ? bit : w) & 1);
                if (lane == 0) ((u32*)to)[3 * b + w] = word;
            }
        }
        const u16 norm = f32_to_f16(__fdiv_rn(length[group], sqrtf(warp_sum(level_norm))));
        if (lane == 0) {
            scales[group] = norm;
            if (dim_blocks == 4) scales[1] = norm;
        }
    }
}

// A warp stores row `row`: lane i holds values 32 b + i in x[b], not rotated.
template <int format, int dim_blocks>
__device__ __forceinline__ void kv_store(const Plane& plane, size_t row, const float (&x)[dim_blocks]) {
    const int lane = threadIdx.x % 32;
    u8* to = plane.values + row * kv_row_bytes(format, 32 * dim_blocks);
    u16* scales = plane.scales + row * (kv_scale_bytes(format, 32 * dim_blocks) / 2);
    if constexpr (format == KV_F32) {
#pragma unroll
        for (int b = 0; b < dim_blocks; b++) ((float*)to)[32 * b + lane] = x[b];
    } else if constexpr (format == KV_F16 || format == KV_BF16) {
#pragma unroll
        for (int b = 0; b < dim_blocks; b++)
            ((u16*)to)[32 * b + lane] = format == KV_F16 ? f32_to_f16(x[b]) : f32_to_bf16(x[b]);
    } else if constexpr (format == KV_TQ3_0) {
        store_tq3(to, scales, x);
    } else {
        float y[dim_blocks];
#pragma unroll
        for (int b = 0; b < dim_blocks; b++) y[b] = x[b];
        if (kv_rotated(format)) hadamard_head<false>(y);
        store_blocks<format>(to, scales, y);
    }
}

// Value i of row `row`; still rotated if it is stored so.
template <int format, int dim>
__device__ __forceinline__ float kv_load(const Plane& plane, size_t row, int i) {
    const u8* from = plane.values + row * kv_row_bytes(format, dim);
    if (format == KV_F32) return ((const float*)from)[i];
    if (format == KV_F16) return f16_to_f32(((const u16*)from)[i]);
    if (format == KV_BF16) return bf16_to_f32(((const u16*)from)[i]);
    const u16* scales = plane.scales + row * (kv_scale_bytes(format, dim) / 2);
    if (format == KV_TQ3_0) {
        const u32* words = (const u32*)(from + i / 32 * 12);
        const int at = 4 * (i % 8), w = i % 32 / 8;
        const u32 code =
            w < 3 ? words[w] >> at : words[0] >> (at + 3) & 1 | words[1] >> (at + 2) & 2 | words[2] >> (at + 1) & 4;
        return f16_to_f32(scales[i / (dim / 2)]) * tq3_level(code & 7);
    }
    const float d = f16_to_f32(scales[kv_has_min(format) ? i / 32 * 2 : i / 32]);
    if (format == KV_Q8_0) return d * (float)(i8)from[i];
    int code = from[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15;
    if (kv_has_fifth_bit(format)) {
        const int bit = 4 * (i % 32 / 16 * 2 + i % 2) + i / 4 % 4 + i / 2 % 2 * 16;
        code |= (((const u32*)(from + dim / 2))[i / 32] >> bit & 1) << 4;
    }
    if (kv_has_min(format)) return (float)code * d + f16_to_f32(scales[i / 32 * 2 + 1]);
    return d * ((float)code - (kv_has_fifth_bit(format) ? 16.0f : 8.0f));
}

// ---- codes to f16 pairs ----
//
// A code becomes an integer by a bit pattern (0x6400 | n is 1024 + n) and one exact subtraction; the multiplication
// rounds once.

struct Scale {
    u32 d, m;  // f16 pairs; m only in formats with minima
};

// bf16 to f16; values out of range become +-65504.
__device__ __forceinline__ u32 bf16x2_to_f16x2(u32 pair) {
    u32 out;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(bf16x2_hi(pair)), "f"(bf16x2_lo(pair)));
    return out;
}

// Two bytes of 128 + code.
__device__ __forceinline__ u32 bytes_to_f16x2(u32 bytes, u32 selector, u32 d) {
    return f16x2_mul(f16x2_add(prmt(bytes, 0x64646464u, selector), 0xe480e480u), d);
}
// Two codes of four or five bits, in the low bits of both halves.
template <int format>
__device__ __forceinline__ u32 codes_to_f16x2(u32 codes, const Scale& scale) {
    const u32 n = f16x2_add(codes | 0x64006400u, kv_has_min(format)         ? 0xe400e400u
                                                 : kv_has_fifth_bit(format) ? 0xe410e410u
                                                                            : 0xe408e408u);
    return kv_has_min(format) ? f16x2_fma(n, scale.d, scale.m) : f16x2_mul(n, scale.d);
}
// Pair i of four: nibbles as stored in two bytes (both halves, bits 0 .. 3); their fifth bits are 4 i below bits 0 and
// 16 of `fifth`.
template <int format>
__device__ __forceinline__ u32 nibbles_to_f16x2(u32 nibbles, u32 fifth, int i, const Scale& scale) {
    u32 codes = nibbles & 0x000f000fu;
    if (kv_has_fifth_bit(format)) codes |= (i == 0 ? fifth << 4 : fifth >> (4 * i - 4)) & 0x00100010u;
    return codes_to_f16x2<format>(codes, scale);
}

// The eight levels in f16: low and high bytes, codes 0 .. 3 and 4 .. 7.
#define TQ3_LOW_0 0x7e358b1au
#define TQ3_LOW_1 0x1a8b357eu
#define TQ3_HIGH_0 0xa5acafb2u
#define TQ3_HIGH_1 0x322f2c25u

// Eight codes in nibbles, bit 3 clear, to pairs (0, 1), (2, 3), ..
__device__ __forceinline__ void tq3_levels(u32 codes, u32 norm, u32 (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 at = i ? codes >> 16 : codes;
        const u32 low = prmt(TQ3_LOW_0, TQ3_LOW_1, at), high = prmt(TQ3_HIGH_0, TQ3_HIGH_1, at);
        out[2 * i] = f16x2_mul(prmt(low, high, 0x5140), norm);
        out[2 * i + 1] = f16x2_mul(prmt(low, high, 0x7362), norm);
    }
}
// The same from three bytes: six codes in the low bits of their nibbles; the high bit of nibble k of byte w is bit w of
// code 6 + k.
__device__ __forceinline__ void tq3_to_f16(u32 three, u32 norm, u32 (&out)[4]) {
    tq3_levels(three & 0x00777777u | three << 21 & 0x11000000u | three << 14 & 0x22000000u | three << 7 & 0x44000000u,
               norm, out);
}
