// Operands as f16 pairs (high, low), 22 bits; three of the four partial products are computed.
//
// An operand of `rows` rows of 128 values is four planes of [rows][64] f16 in the 128-byte swizzle: high parts of
// values 0 .. 63 and 64 .. 127, then low parts. It starts at a multiple of 1024 bytes.
#pragma once

// Byte offset of the high parts of values 4 lane .. 4 lane + 3 of a row; the low parts are LOW_PLANE(rows) further on.
__device__ __forceinline__ int operand_offset(int rows, int row, int lane) {
    return lane / 16 * (rows * 128) + row * 128 + ((lane % 16 / 2 ^ row & 7) << 4) + (lane & 1) * 8;
}
#define LOW_PLANE(rows) ((rows) * 256)

// Four values times `scale`: high parts in x, y, low parts in z, w.
__device__ __forceinline__ uint4 split_f16(float4 x, float scale) {
    x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
    uint4 h;
    h.x = f32x2_to_f16x2(x.x, x.y), h.y = f32x2_to_f16x2(x.z, x.w);
    h.z = f32x2_to_f16x2(x.x - f16x2_lo(h.x), x.y - f16x2_hi(h.x));
    h.w = f32x2_to_f16x2(x.z - f16x2_lo(h.y), x.w - f16x2_hi(h.y));
    return h;
}

// Stores state column `column` as row `column` of an operand of ROWS_OF rows, four values per lane, scaled so that its
// largest value is in 2^8 .. 2^9; the inverse scale goes to `unscale`.
template <int ROWS_OF>
__device__ __forceinline__ void store_state_column(u8* operand, float* unscale, int column, float4 s) {
    const int lane = threadIdx.x % 32;
    const float most = fmaxf(fmaxf(fabsf(s.x), fabsf(s.y)), fmaxf(fabsf(s.z), fabsf(s.w)));
    const u32 exponent = max(__reduce_max_sync(WARP_ALL, __float_as_uint(most)) >> 23, 16u);
    const uint4 h = split_f16(s, __uint_as_float(262 - exponent << 23));
    u8* to = operand + operand_offset(ROWS_OF, column, lane);
    *(uint2*)to = make_uint2(h.x, h.y), *(uint2*)(to + LOW_PLANE(ROWS_OF)) = make_uint2(h.z, h.w);
    if (lane == 0) unscale[column] = __uint_as_float(exponent - 8 << 23);
}

// A fragment of K-step `step`: 8 rows from `row` and 8 from `second`.
__device__ __forceinline__ void load_a_fragment(u32 (&a)[4], u32 base, int rows, int row, int second, int step) {
    const int lane = threadIdx.x % 32, own = (lane & 8 ? second : row) + lane % 8, chunk = step % 4 * 2 + lane / 16;
    ldmatrix_x4(a, base + step / 4 * (rows * 128) + own * 128 + ((chunk ^ own & 7) << 4));
}
// B fragments of K-steps 2 pair and 2 pair + 1, 8 rows from `row`.
__device__ __forceinline__ void load_b_fragments(u32 (&b)[4], u32 base, int rows, int row, int pair) {
    const int lane = threadIdx.x % 32, own = row + lane % 8, chunk = pair % 2 * 4 + lane / 8;
    ldmatrix_x4(b, base + pair / 2 * (rows * 128) + own * 128 + ((chunk ^ own & 7) << 4));
}
