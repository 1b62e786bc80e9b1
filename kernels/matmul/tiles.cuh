// A tile of 16 rows of packed weights (layout.cuh), expanded in registers to the A fragments of mma.m16n8k16: two f16 a register,
// each rounded once.
//
// A code is masked out of its word where it is worth code * 2^-n as an f16, exactly; one fused multiply-add with a scale times
// 2^n and an offset then gives the weight. Scales of K-quants are themselves such products: 0x5c00 + 4 c is 256 + c.
//
// Use: head<P>(at) and fetch(at, 0) load what piece P of a tile has besides codes, and its first 64 codes; begin<P>() once those
// are wanted. For each 64 values q: ready(q), step<B>(s, a) for s = 0 and b = 0, 1, then turn(), and s = 1; then codes are free
// for fetch(at, q + 1), or for head and fetch of the next piece. `at` is the tile's piece in shared or global memory.
// F16 has no runs: b is values 32 on.
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
// What lane u of a quad has.
__device__ __forceinline__ u32 of_quad(u32 v, int u) { return __shfl_sync(WARP_ALL, v, u, 4); }

template <int KIND>
struct Tile {
    // Q4K and Q5K. Lane u of a quad works out the scales of quarter u of the unit, and all get them.
    static constexpr bool FIVE = KIND == KIND_Q5K;
    uint4 header[2];             // of rows g and g + 8
    u32 scale[4][2], min[4][2];  // [quarter][row], pairs (b = 0, b = 1)
    uint4 codes;
    u32 more;  // Q5K: the fifth word
    int first, quarter;  // known when compiled

    template <int P>
    __device__ __forceinline__ void head(const u8* at) {
        const int g = threadIdx.x % 32 / 4;
        if (P == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) header[i] = load16(at + (FIVE ? 1280 : 1024) + (g + 8 * i) * 16);
        }
    }
    __device__ __forceinline__ void fetch(const u8* at, int q) {
        const int lane = threadIdx.x % 32;
        codes = load16(at + q * 512 + lane * 16);
        if (FIVE) more = *(const u32*)(at + 1024 + lane * 8 + q * 4);
    }
    template <int P>
    __device__ __forceinline__ void begin() {
        first = 2 * P;
        if (P) return;
        const bool later = threadIdx.x & 2;
        const u32 pick = threadIdx.x & 1 ? 0x4342u : 0x4140u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Bytes are 4 c and 4 m of four runs; 0x5c00 + byte is 256 + c.
            const uint4 h = header[i];
            const u32 later_mins = (h.y << 2 & 0x0c0c0c0cu) | (h.z << 4 & 0x30303030u) | (h.w << 6 & 0xc0c0c0c0u);
            const u32 c = prmt((later ? h.w : h.y) & 0xfcfcfcfcu, 0x5cu, pick), m = prmt(later ? later_mins : h.z & 0xfcfcfcfcu, 0x5cu, pick);
            const u32 d = f16x2_mul(twice(h.x, 0), FIVE ? 0x28003c00u : 0x2c003c00u);  // 1, 1/32 or 1/16
            const u32 own_scale = f16x2_fma(c, d, f16x2_mul(d, 0xdc00dc00u));
            const u32 own_min = f16x2_fma(m, twice(h.x, 1), f16x2_mul(twice(h.x, 1), 0xdc00dc00u));
#pragma unroll
            for (int u = 0; u < 4; u++) {
                scale[u][i] = of_quad(own_scale, u);
                min[u][i] = of_quad(own_min, u);
            }
        }
    }
    __device__ __forceinline__ void ready(int q) { quarter = first + q; }
    __device__ __forceinline__ void turn() {
        if (FIVE)
            codes = make_uint4(turned(codes.x, 10), turned(codes.y, 9), turned(codes.z, 8), turned(codes.w, 7));
        else
            turn_words(codes);
    }
    template <int B>
    __device__ __forceinline__ void step(int s, u32 (&a)[4]) const {
        if (FIVE && s) return step_of_five<B>(a);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 code = word(codes, j) & (FIVE ? B ? 0x07c007c0u : 0x003e003eu : B ? 0x03c003c0u : 0x003c003cu);
            a[j] = f16x2_fms(code, twice(scale[quarter][j % 2], B), twice(min[quarter][j % 2], B));
        }
    }
    // Q5K, s = 1: what is left of four words, all of the fifth, and one code from the last bits of all. Two codes of each run do
    // not lie where its others do, and have scales of their own.
    template <int B>
    __device__ __forceinline__ void step_of_five(u32 (&a)[4]) const {
        const u32 moved[2] = {f16x2_mul(scale[quarter][0], 0x40003800u), f16x2_mul(scale[quarter][1], 0x44003400u)};  // 1/2, 2; 1/4, 4
        const u32 last = turned(more, 6);
        const u32 of_all = (codes.x & 0x00400040u) | (codes.y & 0x00800080u) | (codes.z & 0x01000100u) | (codes.w & 0x02000200u) | (last & 0x04000400u);
        const u32 code[4] = {B ? last & 0x03e003e0u : codes.y & 0x007c007cu, B ? codes.w & 0x01f001f0u : codes.z & 0x00f800f8u,
                             B ? of_all : codes.x & 0x003e003eu, more & (B ? 0x07c007c0u : 0x003e003eu)};
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = f16x2_fms(code[j], twice(j < 2 ? moved[j] : scale[quarter][j % 2], B), twice(min[quarter][j % 2], B));
    }
};

template <>
struct Tile<KIND_Q6K> {
    // Lane 2 q + s of a quad works out the scales of quarter q and step s of the piece, and all get them.
    u32 factor[2];     // d of rows g and g + 8
    uint2 stored[2];   // c + 128 of the piece's eight runs of 16
    uint4 codes;
    uint2 tops;
    u32 by[2];         // d for b = 0 and 1
    u32 scales[4][2];  // [2 q + s][row], pairs (b = 0, b = 1)
    u32 scale[2][2], offset[2][2];  // [row][s]

    template <int P>
    __device__ __forceinline__ void head(const u8* at) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            stored[i] = *(const uint2*)(at + 1536 + (g + 8 * i) * 8);
            if (P == 0) factor[i] = *(const u16*)(at + 1664 + (g + 8 * i) * 2);
        }
    }
    __device__ __forceinline__ void fetch(const u8* at, int q) {
        const int lane = threadIdx.x % 32;
        codes = load16(at + q * 512 + lane * 16);
        tops = *(const uint2*)(at + 1024 + lane * 16 + q * 8);
    }
    template <int P>
    __device__ __forceinline__ void begin() {
        const u32 pick = threadIdx.x & 1 ? 0x4341u : 0x4240u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (P == 0) by[i] = f16x2_mul(twice(factor[i], 0), 0x2c003c00u);  // 1, 1/16
            // 0x6400 + byte is 1024 + byte; minus 1152 it is c, exactly.
            const u32 c = f16x2_add(prmt(threadIdx.x & 2 ? stored[i].y : stored[i].x, 0x64u, pick), 0xe480e480u);
            const u32 own = f16x2_mul(c, by[i]);
#pragma unroll
            for (int u = 0; u < 4; u++) scales[u][i] = of_quad(own, u);
        }
    }
    __device__ __forceinline__ void ready(int q) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int s = 0; s < 2; s++) {
                scale[i][s] = scales[2 * q + s][i];
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
    __device__ __forceinline__ void head(const u8*) {}
    __device__ __forceinline__ void fetch(const u8* at, int) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            codes[i] = load16(at + i * 512 + lane * 16);
            scale[i] = *(const u32*)(at + 1024 + (lane / 4 + 8 * i) * 4);
        }
    }
    template <int P>
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void ready(int) {
#pragma unroll
        for (int i = 0; i < 2; i++) offset[i] = f16x2_mul(scale[i], 0x02000200u);  // 128 * 2^-22
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
    __device__ __forceinline__ void head(const u8*) {}
    __device__ __forceinline__ void fetch(const u8* at, int) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            codes[i] = load16(at + i * 512 + lane * 16);
            scales[i] = load16(at + 1024 + (lane / 4 + 8 * i) * 16);
        }
    }
    template <int P>
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void ready(int) {}
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
    __device__ __forceinline__ void head(const u8*) {}
    __device__ __forceinline__ void fetch(const u8* at, int) { values = at + threadIdx.x % 32 * 16; }
    template <int P>
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void ready(int) {}
    __device__ __forceinline__ void turn() {}
    template <int B>
    __device__ __forceinline__ void step(int s, u32 (&a)[4]) const {
        const uint4 v = load16(values + (2 * B + s) * 512);
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
};
