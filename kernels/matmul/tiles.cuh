// A tile of 16 rows of packed weights (layout.cuh), expanded in registers to the A fragments of mma.m16n8k16: two f16 a register,
// each rounded once.
//
// A code is masked out of its word where it is worth code * 2^-n as an f16, exactly; one fused multiply-add with a scale times
// 2^n and an offset then gives the weight. Scales of K-quants are themselves such products: 0x5c00 + 4 c is 256 + c.
//
// Use: piece<P>(at) at the start of piece P, quarter(at, q) for each of its 64 values, step<B>(s, a) for s = 0 and b = 0, 1, then
// turn(), and s = 1. `at` is the tile's piece in shared or global memory. F16 has no runs: b is values 32 on.
#pragma once
#include "matmul/layout.cuh"

__device__ __forceinline__ uint4 load16(const u8* p) { return *(const uint4*)p; }
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ u32 turned(u32 v, int bits) { return bits ? __funnelshift_r(v, v, bits) : v; }
__device__ __forceinline__ void turn_words(uint4& v) { v = make_uint4(turned(v.x, 8), turned(v.y, 8), turned(v.z, 8), turned(v.w, 8)); }
// Half `i` of v, twice: an operand modifier of the instruction that reads it.
__device__ __forceinline__ u32 twice(u32 v, int i) {
    u32 d;
    if (i == 0)
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(v));
    else
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(v));
    return d;
}
// a * b - c, one rounding.
__device__ __forceinline__ u32 f16x2_fms(u32 a, u32 b, u32 c) {
    u32 d;
    asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// Quarters of bytes 2 q and 2 q + 1 of v as f16.
__device__ __forceinline__ u32 quarters_of_bytes(u32 v, int q) { return f16x2_add(prmt(v, 0x5cu, 0x4140u + 0x0202u * u32(q)), 0xdc00dc00u); }

template <int KIND>
struct Tile {
    // Q4K and Q5K.
    static constexpr bool FIVE = KIND == KIND_Q5K;
    // Of rows g and g + 8; bytes are 4 c and 4 m of four runs.
    u32 halves[2];                      // d, dmin
    u32 scales[2], mins[2];             // of this piece
    u32 later_scales[2], later_mins[2]; // of the second
    uint4 codes;
    u32 fifth;
    u32 scale[2], min[2];       // pairs (b = 0, b = 1)

    template <int P>
    __device__ __forceinline__ void piece(const u8* at) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (P == 0) {
                const uint4 h = load16(at + (FIVE ? 1280 : 1024) + (g + 8 * i) * 16);
                halves[i] = h.x;
                scales[i] = h.y & 0xfcfcfcfcu;
                mins[i] = h.z & 0xfcfcfcfcu;
                later_scales[i] = h.w & 0xfcfcfcfcu;
                later_mins[i] = (h.y << 2 & 0x0c0c0c0cu) | (h.z << 4 & 0x30303030u) | (h.w << 6 & 0xc0c0c0c0u);
            } else {
                scales[i] = later_scales[i];
                mins[i] = later_mins[i];
            }
        }
    }
    __device__ __forceinline__ void quarter(const u8* at, int q) {
        const int lane = threadIdx.x % 32;
        codes = load16(at + q * 512 + lane * 16);
        if (FIVE) fifth = *(const u32*)(at + 1024 + lane * 8 + q * 4);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 d = f16x2_mul(twice(halves[i], 0), 0x2c003c00u);  // 1, 1/16
            scale[i] = f16x2_mul(quarters_of_bytes(scales[i], q), d);
            min[i] = f16x2_mul(quarters_of_bytes(mins[i], q), twice(halves[i], 1));
        }
    }
    __device__ __forceinline__ void turn() {
        turn_words(codes);
        if (FIVE) fifth = turned(fifth, 8);
    }
    template <int B>
    __device__ __forceinline__ void step(int, u32 (&a)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 code = word(codes, j) & (B ? 0x03c003c0u : 0x003c003cu);
            if (FIVE) code |= turned(fifth, j) & (B ? 0x04000400u : 0x00400040u);
            a[j] = f16x2_fms(code, twice(scale[j % 2], B), twice(min[j % 2], B));
        }
    }
};

template <>
struct Tile<KIND_Q6K> {
    u32 by[2];         // d for b = 0 and 1 of rows g and g + 8
    uint2 scales[2];   // c + 128 of the piece's eight runs of 16
    uint4 codes;
    uint2 tops;
    u32 scale[2][2], offset[2][2];  // [row][s], pairs (b = 0, b = 1)

    template <int P>
    __device__ __forceinline__ void piece(const u8* at) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scales[i] = *(const uint2*)(at + 1536 + (g + 8 * i) * 8);
            if (P == 0) {
                const u32 d = *(const u16*)(at + 1664 + (g + 8 * i) * 2);
                by[i] = f16x2_mul(d | d << 16, 0x2c003c00u);  // 1, 1/16
            }
        }
    }
    __device__ __forceinline__ void quarter(const u8* at, int q) {
        const int lane = threadIdx.x % 32;
        codes = load16(at + q * 512 + lane * 16);
        tops = *(const uint2*)(at + 1024 + lane * 16 + q * 8);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int s = 0; s < 2; s++) {
                // 0x6400 + byte is 1024 + byte; minus 1152 it is c, exactly.
                const u32 c = f16x2_add(prmt(q ? scales[i].y : scales[i].x, 0x64u, 0x4240u + 0x0101u * u32(s)), 0xe480e480u);
                scale[i][s] = f16x2_mul(c, by[i]);
                offset[i][s] = f16x2_mul(scale[i][s], 0x04000040u);  // 32 * 2^-23, 32 * 2^-19
            }
    }
    __device__ __forceinline__ void turn() { turn_words(codes); }
    template <int B>
    __device__ __forceinline__ void step(int s, u32 (&a)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 top = turned(s ? tops.y : tops.x, j % 2 * 8 + j / 2 * 2);
            const u32 code = (word(codes, j) & (B ? 0x01e001e0u : 0x001e001eu)) | (top & (B ? 0x06000600u : 0x00600060u));
            a[j] = f16x2_fms(code, twice(scale[j % 2][s], B), twice(offset[j % 2][s], B));
        }
    }
};

template <>
struct Tile<KIND_Q8> {
    uint4 codes[2];
    u32 scale[2], offset[2];  // pairs (b = 0, b = 1)

    template <int P>
    __device__ __forceinline__ void piece(const u8*) {}
    __device__ __forceinline__ void quarter(const u8* at, int) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            codes[i] = load16(at + i * 512 + lane * 16);
            scale[i] = *(const u32*)(at + 1024 + (lane / 4 + 8 * i) * 4);
            offset[i] = f16x2_mul(scale[i], 0x02000200u);  // 128 * 2^-22
        }
    }
    __device__ __forceinline__ void turn() {
        turn_words(codes[0]);
        turn_words(codes[1]);
    }
    template <int B>
    __device__ __forceinline__ void step(int, u32 (&a)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = f16x2_fms(word(codes[B], j) & 0x03fc03fcu, twice(scale[j % 2], B), twice(offset[j % 2], B));
    }
};

template <>
struct Tile<KIND_WIDE> {
    uint4 codes[2];
    uint4 scales[2];  // of rows g and g + 8: scale and offset of four runs of 16

    template <int P>
    __device__ __forceinline__ void piece(const u8*) {}
    __device__ __forceinline__ void quarter(const u8* at, int) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            codes[i] = load16(at + i * 512 + lane * 16);
            scales[i] = load16(at + 1024 + (lane / 4 + 8 * i) * 16);
        }
    }
    __device__ __forceinline__ void turn() {
        turn_words(codes[0]);
        turn_words(codes[1]);
    }
    template <int B>
    __device__ __forceinline__ void step(int s, u32 (&a)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 pair = word(scales[j % 2], 2 * B + s);
            a[j] = f16x2_fma(word(codes[B], j) & 0x03fc03fcu, twice(pair, 0), twice(pair, 1));
        }
    }
};

template <>
struct Tile<KIND_F16> {
    const u8* values;

    template <int P>
    __device__ __forceinline__ void piece(const u8*) {}
    __device__ __forceinline__ void quarter(const u8* at, int) { values = at + threadIdx.x % 32 * 16; }
    __device__ __forceinline__ void turn() {}
    template <int B>
    __device__ __forceinline__ void step(int s, u32 (&a)[4]) const {
        const uint4 v = load16(values + (2 * B + s) * 512);
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
};
