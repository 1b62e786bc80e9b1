// A tile of 16 rows of packed weights (layout.cuh), expanded in registers to the A fragments of mma.m16n8k16: two f16 a register,
// each rounded once.
//
// A code is masked out of its word where it is worth code * 2^-n as an f16, exactly; one fused multiply-add with a scale times
// 2^n and an offset then gives the weight. Scales of K-quants are themselves such products: 0x5c00 + 4 c is 256 + c.
//
// Use: head<P>(at) and fetch(at, 0) load what piece P of a tile has besides codes, and its first 64 codes; begin<P>() once those
// are wanted. For each 64 values q: ready(q), step<B>(s, a) for s = 0 and b = 0, 1, then turn(), and s = 1; then codes are free
// for fetch(at, q + 1), or for head and fetch of the next piece. `at` is the tile's piece in shared or global memory.
// A warp with two tiles at hand takes heads<P>(tile, w) and begin_all<P>(tile) instead, which share the scales' work out better.
// F16 has no runs: b is values 32 on.
#pragma once
#include "matmul/layout.cuh"

__device__ __forceinline__ uint4 load16(const u8* p) { return *(const uint4*)p; }
// From shared memory, by its address there.
__device__ __forceinline__ uint4 shared16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void put_shared16(u32 at, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint2 shared8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 shared4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 shared2(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}
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

// Where the lanes of a warp with two tiles of K-quants at hand tell each other scales: 16 bytes for each half of a piece or unit and
// row. Lane u of a quad works them out for row g + 8 * (u % 2) of tile u / 2, and all lanes of the quad want those of its four rows.
// Which 16 bytes are whose is turned with u, so that eight lanes never write to the same banks. Warps that multiply come first.
#define SCALE_WARPS 8
__shared__ uint4 scale_room[SCALE_WARPS][64];
__device__ __forceinline__ uint4* scale_place(int u, int half) { return scale_room[threadIdx.x / 32] + u * 16 + half * 8 + (threadIdx.x % 32 / 4 + 2 * u) % 8; }
__device__ __forceinline__ void leave_scales(const u32 (&halves)[2][4]) {
    __syncwarp();
#pragma unroll
    for (int p = 0; p < 2; p++) *scale_place(threadIdx.x % 4, p) = make_uint4(halves[p][0], halves[p][1], halves[p][2], halves[p][3]);
    __syncwarp();
}

// Where a warp with two tiles of K-quants at hand, its own and one `apart` tiles behind it, finds what a lane loads of piece P: bytes
// from where it is said to be, `before` its beginning or behind it. Kept in registers: the compiler would make them anew for each piece, from the thread's number.
template <int KIND>
struct Reach {
    u32 codes[2], more[2], head[2], factor;  // what the kind has of these

    __device__ __forceinline__ void find(int apart, int before) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4 + 8 * (lane & 1), tile = warp + (lane & 2 ? apart : 0);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            codes[p] = kept(before + warp * piece_bytes(KIND, p) + lane * 16);
            if (KIND == KIND_Q5K) more[p] = kept(before + warp * piece_bytes(KIND, p) + 1024 + lane * 8);
            if (KIND == KIND_Q6K) head[p] = kept(before + tile * piece_bytes(KIND, p) + 1536 + row * 8);
        }
        if (KIND != KIND_Q6K) head[0] = kept(before + tile * piece_bytes(KIND, 0) + (KIND == KIND_Q5K ? 1280 : 1024) + row * 16);
        if (KIND == KIND_Q6K) factor = kept(before + tile * piece_bytes(KIND, 0) + 1664 + row * 2);
    }
    static __device__ __forceinline__ u32 kept(u32 v) {
        asm volatile("" : "+r"(v));
        return v;
    }
};

template <int KIND>
struct Tile {
    // Q4K and Q5K. Of a tile alone, lane u of a quad works out the scales of quarter u of the unit, and all get them.
    static constexpr bool FIVE = KIND == KIND_Q5K, IN_TWOS = true;
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
    // Of the tile that lies `behind` bytes behind the warp's own.
    template <int P>
    __device__ __forceinline__ void fetch(const Reach<KIND>& reach, u32 piece, u32 behind, int q) {
        codes = shared16(piece + reach.codes[P] + behind + q * 512);
        if (FIVE) more = shared4(piece + reach.more[P] + behind + q * 4);
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
    template <int P>
    static __device__ __forceinline__ void head_of_two(Tile (&tile)[2], const u8* const (&w)[2]) {
        const int lane = threadIdx.x % 32;
        if (P == 0)
            tile[0].header[0] = load16((lane & 2 ? w[1] : w[0]) + (FIVE ? 1280 : 1024) + (lane / 4 + 8 * (lane & 1)) * 16);
        else
            take_of_two<P>(tile);
    }
    template <int P>
    static __device__ __forceinline__ void head_of_two(Tile (&tile)[2], const Reach<KIND>& reach, u32 piece) {
        if (P == 0)
            tile[0].header[0] = shared16(piece + reach.head[0]);
        else
            take_of_two<P>(tile);
    }
    template <int P>
    static __device__ __forceinline__ void begin_of_two(Tile (&tile)[2]) {
        tile[0].first = tile[1].first = 2 * P;
        if (P) return;
        const uint4 h = tile[0].header[0];
        const u32 later_mins = (h.y << 2 & 0x0c0c0c0cu) | (h.z << 4 & 0x30303030u) | (h.w << 6 & 0xc0c0c0c0u);
        const u32 c[2] = {h.y & 0xfcfcfcfcu, h.w & 0xfcfcfcfcu}, m[2] = {h.z & 0xfcfcfcfcu, later_mins};
        const u32 d = f16x2_mul(twice(h.x, 0), FIVE ? 0x28003c00u : 0x2c003c00u), d_less = f16x2_mul(d, 0xdc00dc00u);
        const u32 min_less = f16x2_mul(twice(h.x, 1), 0xdc00dc00u);
        u32 own[2][4];  // of both pieces: scale and minimum of two quarters
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const u32 pick = q % 2 ? 0x4342u : 0x4140u;
            own[q / 2][q % 2 * 2] = f16x2_fma(prmt(c[q / 2], 0x5cu, pick), d, d_less);
            own[q / 2][q % 2 * 2 + 1] = f16x2_fma(prmt(m[q / 2], 0x5cu, pick), twice(h.x, 1), min_less);
        }
        leave_scales(own);
        take_of_two<0>(tile);
    }
    template <int P>
    static __device__ __forceinline__ void take_of_two(Tile (&tile)[2]) {
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const uint4 v = *scale_place(u, P);
            Tile& to = tile[u / 2];
            to.scale[2 * P][u % 2] = v.x, to.min[2 * P][u % 2] = v.y;
            to.scale[2 * P + 1][u % 2] = v.z, to.min[2 * P + 1][u % 2] = v.w;
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
    static constexpr bool IN_TWOS = true;
    u32 factor[2];    // d of rows g and g + 8
    uint2 stored[2];  // c + 128 of the piece's eight runs of 16
    uint4 codes;
    uint2 more;                     // words 4 and 5
    u32 by[2];                      // d for b = 0 and 1
    u32 scale[4][2], offset[4][2];  // [2 q + s][row], pairs (b = 0, b = 1)
    int quarter;                    // known when compiled

    // What d is multiplied by for b = 0 and 1 in row g + 8 i: 1 for codes that lie at bit 1, 1/16 at bit 5.
    static __device__ __forceinline__ u32 worth(int s, int i) { return s ? 0x3c002c00u : i ? 0x2c003c00u : 0x3c003c00u; }
    // 32 codes: 32 * 2^-23 or 32 * 2^-19 of a scale.
    static __device__ __forceinline__ u32 offset_of(u32 scale, int s, int i) { return f16x2_mul(scale, s ? 0x00400400u : i ? 0x04000040u : 0x00400040u); }
    // Pair `pick` of four stored bytes: 0x6400 + byte is 1024 + byte; minus 1152 it is c, exactly.
    static __device__ __forceinline__ u32 run_scales(u32 bytes, u32 pick) { return f16x2_add(prmt(bytes, 0x64u, pick), 0xe480e480u); }

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
        more = *(const uint2*)(at + 1024 + lane * 16 + q * 8);
    }
    template <int P>
    __device__ __forceinline__ void fetch(const Reach<KIND_Q6K>& reach, u32 piece, u32 behind, int q) {
        codes = shared16(piece + reach.codes[P] + behind + q * 512);
        more = shared8(piece + reach.codes[P] + behind + 1024 + q * 8);
    }
    // Lane 2 q + s of a quad works out the scales of quarter q and step s of the piece, and all get them.
    template <int P>
    __device__ __forceinline__ void begin() {
        const u32 pick = threadIdx.x & 1 ? 0x4341u : 0x4240u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (P == 0) by[i] = f16x2_mul(twice(factor[i], 0), worth(threadIdx.x & 1, i));
            const u32 own = f16x2_mul(run_scales(threadIdx.x & 2 ? stored[i].y : stored[i].x, pick), by[i]);
#pragma unroll
            for (int u = 0; u < 4; u++) {
                scale[u][i] = of_quad(own, u);
                offset[u][i] = offset_of(scale[u][i], u % 2, i);
            }
        }
    }
    // `factor`, `stored` and `by` of the first tile are those of the lane's row; `by` for both s.
    template <int P>
    static __device__ __forceinline__ void head_of_two(Tile (&tile)[2], const u8* const (&w)[2]) {
        const int lane = threadIdx.x % 32, r = lane / 4 + 8 * (lane & 1);
        const u8* at = lane & 2 ? w[1] : w[0];
        tile[0].stored[0] = *(const uint2*)(at + 1536 + r * 8);
        if (P == 0) tile[0].factor[0] = *(const u16*)(at + 1664 + r * 2);
    }
    template <int P>
    static __device__ __forceinline__ void head_of_two(Tile (&tile)[2], const Reach<KIND_Q6K>& reach, u32 piece) {
        tile[0].stored[0] = shared8(piece + reach.head[P]);
        if (P == 0) tile[0].factor[0] = shared2(piece + reach.factor);
    }
    template <int P>
    static __device__ __forceinline__ void begin_of_two(Tile (&tile)[2]) {
        const int i = threadIdx.x & 1;
        u32 own[2][4];  // of both quarters: scale and offset for s = 0 and 1
#pragma unroll
        for (int s = 0; s < 2; s++) {
            if (P == 0) tile[0].by[s] = f16x2_mul(twice(tile[0].factor[0], 0), worth(s, i));
#pragma unroll
            for (int q = 0; q < 2; q++) {
                own[q][2 * s] = f16x2_mul(run_scales(q ? tile[0].stored[0].y : tile[0].stored[0].x, s ? 0x4341u : 0x4240u), tile[0].by[s]);
                own[q][2 * s + 1] = offset_of(own[q][2 * s], s, i);
            }
        }
        leave_scales(own);
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const uint4 v = *scale_place(u, q);
                Tile& to = tile[u / 2];
                to.scale[2 * q][u % 2] = v.x, to.offset[2 * q][u % 2] = v.y;
                to.scale[2 * q + 1][u % 2] = v.z, to.offset[2 * q + 1][u % 2] = v.w;
            }
    }
    __device__ __forceinline__ void ready(int q) { quarter = q; }
    // Words 0 and 1 are turned before: half of s = 0 wants them so.
    __device__ __forceinline__ void turn() {
        codes.z = turned(codes.z, 6), codes.w = turned(codes.w, 6);
        more = make_uint2(turned(more.x, 6), turned(more.y, 6));
    }
    template <int B>
    __device__ __forceinline__ void step(int s, u32 (&a)[4]) {
        u32 code[4];
        if (s == 0 && B == 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) code[j] = word(codes, j) & 0x007e007eu;
        } else if (s == 0) {
            codes.x = turned(codes.x, 6), codes.y = turned(codes.y, 6);
            code[0] = more.x & 0x007e007eu, code[2] = more.y & 0x007e007eu;
            code[1] = codes.x & 0x07e007e0u, code[3] = codes.y & 0x07e007e0u;
        } else if (B == 0) {
            code[0] = codes.z & 0x07e007e0u, code[1] = codes.w & 0x07e007e0u;
            code[2] = more.x & 0x07e007e0u, code[3] = more.y & 0x07e007e0u;
        } else {
            // Four bits of words 0 to 3, and above them two of words 4 and 5; the product is for other units than LOP3's.
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 top = (j < 2 ? more.x : more.y) & (j % 2 ? 0x00180018u : 0x00060006u);
                code[j] = top * (j % 2 ? 4u : 16u) + (word(codes, j) & 0x001e001eu);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = f16x2_fms(code[j], twice(scale[2 * quarter + s][j % 2], B), twice(offset[2 * quarter + s][j % 2], B));
    }
};

template <>
struct Tile<KIND_Q8> {
    static constexpr bool IN_TWOS = false;
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
    static constexpr bool IN_TWOS = false;
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
    static constexpr bool IN_TWOS = false;
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

// What comes besides the codes of piece P of M tiles: its loads, and what is made of them.
template <int P, int KIND, int M>
__device__ __forceinline__ void heads(Tile<KIND> (&tile)[M], const u8* const (&w)[M]) {
    if constexpr (M == 2 && Tile<KIND>::IN_TWOS) {
        Tile<KIND>::template head_of_two<P>(tile, w);
    } else {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].template head<P>(w[m]);
    }
}
template <int P, int KIND, int M>
__device__ __forceinline__ void begin_all(Tile<KIND> (&tile)[M]) {
    if constexpr (M == 2 && Tile<KIND>::IN_TWOS) {
        Tile<KIND>::template begin_of_two<P>(tile);
    } else {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].template begin<P>();
    }
}
