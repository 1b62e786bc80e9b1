// Values of a table's rows, decoded from the blocks of a GGUF file as the host's codec does, bit for bit.
//
// Products and sums are rounded one by one. Rows begin at multiples of two bytes, of four with TYPE_F32.
// reference contract::quant::dequantize_row     test crates/cuda/tests/rows.rs
#pragma once
#include "common/prelude.cuh"

// GGUF ids.
#define TYPE_F32 0
#define TYPE_F16 1
#define TYPE_Q4_0 2
#define TYPE_Q4_1 3
#define TYPE_Q5_0 6
#define TYPE_Q5_1 7
#define TYPE_Q8_0 8
#define TYPE_Q2_K 10
#define TYPE_Q3_K 11
#define TYPE_Q4_K 12
#define TYPE_Q5_K 13
#define TYPE_Q6_K 14
#define TYPE_IQ4_NL 20
#define TYPE_IQ4_XS 23
#define TYPE_BF16 30

__device__ __forceinline__ float half_at(const u8* b) { return f16_to_f32(*(const u16*)b); }

__device__ __forceinline__ float scale_and_offset(float q, float d, float m) { return __fadd_rn(__fmul_rn(q, d), m); }

// Levels of the nonlinear 4-bit formats.
__device__ const i8 levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Six-bit scale and minimum `j` of the eight that are packed in twelve bytes (Q4_K, Q5_K).
__device__ __forceinline__ void scale_and_min(const u8* p, int j, float& scale, float& min) {
    if (j < 4) {
        scale = p[j] & 63;
        min = p[j + 4] & 63;
    } else {
        scale = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4;
        min = (p[j + 4] >> 4) | (p[j] >> 6) << 4;
    }
}

// Value `i` of a row.
template <int type>
__device__ __forceinline__ float decode_value(const u8* row, int i) {
    if constexpr (type == TYPE_F32) {
        return ((const float*)row)[i];
    } else if constexpr (type == TYPE_F16) {
        return f16_to_f32(((const u16*)row)[i]);
    } else if constexpr (type == TYPE_BF16) {
        return bf16_to_f32(((const u16*)row)[i]);
    } else if constexpr (type == TYPE_Q8_0) {
        const u8* b = row + i / 32 * 34;
        return __fmul_rn((float)(i8)b[2 + i % 32], half_at(b));
    } else if constexpr (type == TYPE_Q4_0) {
        const u8* b = row + i / 32 * 18;
        return __fmul_rn((float)(b[2 + i % 16] >> (i % 32 / 16 * 4) & 15) - 8.0f, half_at(b));
    } else if constexpr (type == TYPE_Q4_1) {
        const u8* b = row + i / 32 * 20;
        return scale_and_offset((float)(b[4 + i % 16] >> (i % 32 / 16 * 4) & 15), half_at(b), half_at(b + 2));
    } else if constexpr (type == TYPE_Q5_0) {
        const u8* b = row + i / 32 * 22;
        const int high = b[2 + i % 32 / 8] >> (i % 8) & 1;
        return __fmul_rn((float)((b[6 + i % 16] >> (i % 32 / 16 * 4) & 15) | high << 4) - 16.0f, half_at(b));
    } else if constexpr (type == TYPE_Q5_1) {
        const u8* b = row + i / 32 * 24;
        const int high = b[4 + i % 32 / 8] >> (i % 8) & 1;
        return scale_and_offset((float)((b[8 + i % 16] >> (i % 32 / 16 * 4) & 15) | high << 4), half_at(b),
                                half_at(b + 2));
    } else if constexpr (type == TYPE_IQ4_NL) {
        const u8* b = row + i / 32 * 18;
        return __fmul_rn(half_at(b), (float)levels[b[2 + i % 16] >> (i % 32 / 16 * 4) & 15]);
    } else if constexpr (type == TYPE_IQ4_XS) {
        const u8* b = row + i / 256 * 136;
        const int s = i % 256 / 32;
        const int code = (b[4 + s / 2] >> (s % 2 * 4) & 15) | (*(const u16*)(b + 2) >> (2 * s) & 3) << 4;
        const float d = __fmul_rn(half_at(b), (float)(code - 32));
        return __fmul_rn(d, (float)levels[b[8 + 16 * s + i % 16] >> (i % 32 / 16 * 4) & 15]);
    } else if constexpr (type == TYPE_Q4_K || type == TYPE_Q5_K) {
        constexpr bool is_q5 = type == TYPE_Q5_K;
        const u8* b = row + i / 256 * (is_q5 ? 176 : 144);
        const int j = i % 256 / 32, l = i % 32;
        float scale, min;
        scale_and_min(b + 4, j, scale, min);
        int q = b[(is_q5 ? 48 : 16) + j / 2 * 32 + l] >> (j % 2 * 4) & 15;
        if (is_q5) q |= (b[16 + l] >> j & 1) << 4;
        return __fsub_rn(__fmul_rn(__fmul_rn(half_at(b), scale), (float)q), __fmul_rn(half_at(b + 2), min));
    } else if constexpr (type == TYPE_Q6_K) {
        const u8* b = row + i / 256 * 210;
        const int half = i % 256 / 128, q = i % 128 / 32, l = i % 32;
        const int low = b[64 * half + l + 32 * (q % 2)] >> (q / 2 * 4) & 15;
        const int code = low | (b[128 + 32 * half + l] >> (2 * q) & 3) << 4;
        const float scale = (float)(i8)b[192 + 8 * half + 2 * q + l / 16];
        return __fmul_rn(__fmul_rn(half_at(b + 208), scale), (float)code - 32.0f);
    } else if constexpr (type == TYPE_Q2_K) {
        const u8* b = row + i / 256 * 84;
        const int s = i % 256 / 16;
        const int q = b[16 + i % 256 / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        const float d = __fmul_rn(half_at(b + 80), (float)(b[s] & 15)),
                    m = __fmul_rn(half_at(b + 82), (float)(b[s] >> 4));
        return __fsub_rn(__fmul_rn(d, (float)q), m);
    } else if constexpr (type == TYPE_Q3_K) {
        const u8* b = row + i / 256 * 110;
        const int s = i % 256 / 16;
        const int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4;
        const int scale = (low | (b[104 + s % 4] >> (s / 4 * 2) & 3) << 4) - 32;
        const int two = b[32 + i % 256 / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        const int q = two - (b[i % 32] >> (i % 256 / 32) & 1 ? 0 : 4);
        return __fmul_rn(__fmul_rn(half_at(b + 108), (float)scale), (float)q);
    }
}
