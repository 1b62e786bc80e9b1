// Dequantises an m16 tile of packed weights (weight_layout.cuh) in registers to the A fragments of mma.m16n8k16: two
// f16 per register, each rounded once.
//
// A masked code is an f16 of value code * 2^-n, exactly; one fused multiply-add with scale * 2^n and an offset gives
// the weight. Scales of K-quants are such products themselves: 0x5c00 + 4 c is 256 + c.
//
// Use: load_header<SLICE>(at) and load_codes(at, 0) load the scales of slice SLICE of a tile and its first 64 codes;
// decode_scales<SLICE>() once those are needed. For each chunk q of 64 values: select_chunk(q); dequant<B>(s, a) for s
// = 0 and B = 0, 1; rotate_codes(); the same for s = 1. Then codes are free for load_codes(at, q + 1), or for the next
// slice. `at` is the tile's slice in shared or global memory.
// A warp with two tiles uses load_headers<SLICE>(tile, w) and decode_scales_all<SLICE>(tile) instead, which share the
// decoding of scales.
// F16 has no runs: B = 1 is values 32 on.
#pragma once
#include "gemm/weight_layout.cuh"

__device__ __forceinline__ uint4 load_16b(const u8* p) { return *(const uint4*)p; }
// Shared-memory loads and stores by address.
__device__ __forceinline__ uint4 ld_shared_v4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ void st_shared_v4(u32 at, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint2 ld_shared_v2(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 ld_shared_u32(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 ld_shared_u16(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ u32 rotate_right(u32 v, int bits) { return bits ? __funnelshift_r(v, v, bits) : v; }
__device__ __forceinline__ void rotate_words_8(uint4& v) {
    v = make_uint4(rotate_right(v.x, 8), rotate_right(v.y, 8), rotate_right(v.z, 8), rotate_right(v.w, 8));
}
// Half `i` of v in both halves: an operand modifier of the instruction that reads it.
__device__ __forceinline__ u32 broadcast_half(u32 v, int i) {
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
// The value of lane u of the quad.
__device__ __forceinline__ u32 quad_shfl(u32 v, int u) { return __shfl_sync(WARP_ALL, v, u, 4); }

// Exchange of scales within a warp that has two tiles of K-quants: 16 bytes per half of a slice or unit and row. Lane u
// of a quad decodes them for row g + 8 * (u % 2) of tile u / 2, and all lanes of the quad read those of its four rows.
// The 16-byte slots are rotated by u, so eight lanes never write to the same banks. Math warps come first.
#define SCALE_WARPS 8
__shared__ uint4 scale_smem[SCALE_WARPS][64];
__device__ __forceinline__ uint4* scale_slot(int u, int half) {
    return scale_smem[threadIdx.x / 32] + u * 16 + half * 8 + (threadIdx.x % 32 / 4 + 2 * u) % 8;
}
__device__ __forceinline__ void store_scales(const u32 (&by_half)[2][4]) {
    __syncwarp();
#pragma unroll
    for (int p = 0; p < 2; p++)
        *scale_slot(threadIdx.x % 4, p) = make_uint4(by_half[p][0], by_half[p][1], by_half[p][2], by_half[p][3]);
    __syncwarp();
}

// Byte offsets of what a lane loads of a slice, for a warp with two tiles of K-quants: its own, and one `tile_distance`
// tiles later; `base` is added to all. Kept in registers: the compiler would recompute them for each slice.
template <int KIND>
struct LaneOffsets {
    u32 codes[2], extra_codes[2], head[2], d_f16;  // those that the kind has

    __device__ __forceinline__ void init(int tile_distance, int base) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4 + 8 * (lane & 1),
                  tile = warp + (lane & 2 ? tile_distance : 0);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            codes[p] = opaque(base + warp * slice_tile_bytes(KIND, p) + lane * 16);
            if (KIND == KIND_Q5K) extra_codes[p] = opaque(base + warp * slice_tile_bytes(KIND, p) + 1024 + lane * 8);
            if (KIND == KIND_Q6K) head[p] = opaque(base + tile * slice_tile_bytes(KIND, p) + 1536 + row * 8);
        }
        if (KIND != KIND_Q6K)
            head[0] = opaque(base + tile * slice_tile_bytes(KIND, 0) + (KIND == KIND_Q5K ? 1280 : 1024) + row * 16);
        if (KIND == KIND_Q6K) d_f16 = opaque(base + tile * slice_tile_bytes(KIND, 0) + 1664 + row * 2);
    }
};

template <int KIND>
struct TileDequantizer {
    // Q4K and Q5K. With a single tile, lane u of a quad decodes the scales of chunk u of the unit for all lanes.
    static constexpr bool IS_Q5 = KIND == KIND_Q5K, IS_PAIRED = true;
    uint4 header[2];             // of rows g and g + 8
    u32 scale[4][2], min[4][2];  // [chunk][row], pairs (b = 0, b = 1)
    uint4 codes;
    u32 extra_codes;   // Q5K: the fifth word
    int first, chunk;  // compile-time constants after unrolling

    template <int SLICE>
    __device__ __forceinline__ void load_header(const u8* at) {
        const int g = threadIdx.x % 32 / 4;
        if (SLICE == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) header[i] = load_16b(at + (IS_Q5 ? 1280 : 1024) + (g + 8 * i) * 16);
        }
    }
    __device__ __forceinline__ void load_codes(const u8* at, int q) {
        const int lane = threadIdx.x % 32;
        codes = load_16b(at + q * 512 + lane * 16);
        if (IS_Q5) extra_codes = *(const u32*)(at + 1024 + lane * 8 + q * 4);
    }
    // For the tile `tile_offset` bytes after the warp's own.
    template <int SLICE>
    __device__ __forceinline__ void load_codes(const LaneOffsets<KIND>& lane_offsets, u32 slice_address,
                                               u32 tile_offset, int q) {
        codes = ld_shared_v4(slice_address + lane_offsets.codes[SLICE] + tile_offset + q * 512);
        if (IS_Q5) extra_codes = ld_shared_u32(slice_address + lane_offsets.extra_codes[SLICE] + tile_offset + q * 4);
    }
    template <int SLICE>
    __device__ __forceinline__ void decode_scales() {
        first = 2 * SLICE;
        if (SLICE) return;
        const bool is_upper = threadIdx.x & 2;
        const u32 selector = threadIdx.x & 1 ? 0x4342u : 0x4140u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Bytes are 4 c and 4 m of four runs; 0x5c00 + byte is 256 + c.
            const uint4 h = header[i];
            const u32 upper_mins = (h.y << 2 & 0x0c0c0c0cu) | (h.z << 4 & 0x30303030u) | (h.w << 6 & 0xc0c0c0c0u);
            const u32 c = prmt((is_upper ? h.w : h.y) & 0xfcfcfcfcu, 0x5cu, selector),
                      m = prmt(is_upper ? upper_mins : h.z & 0xfcfcfcfcu, 0x5cu, selector);
            const u32 d = f16x2_mul(broadcast_half(h.x, 0), IS_Q5 ? 0x28003c00u : 0x2c003c00u);  // 1, 1/32 or 1/16
            const u32 lane_scale = f16x2_fma(c, d, f16x2_mul(d, 0xdc00dc00u));
            const u32 lane_min = f16x2_fma(m, broadcast_half(h.x, 1), f16x2_mul(broadcast_half(h.x, 1), 0xdc00dc00u));
#pragma unroll
            for (int u = 0; u < 4; u++) {
                scale[u][i] = quad_shfl(lane_scale, u);
                min[u][i] = quad_shfl(lane_min, u);
            }
        }
    }
    template <int SLICE>
    static __device__ __forceinline__ void load_header_pair(TileDequantizer (&tile)[2], const u8* const (&w)[2]) {
        const int lane = threadIdx.x % 32;
        if (SLICE == 0)
            tile[0].header[0] =
                load_16b((lane & 2 ? w[1] : w[0]) + (IS_Q5 ? 1280 : 1024) + (lane / 4 + 8 * (lane & 1)) * 16);
        else
            read_scales_pair<SLICE>(tile);
    }
    template <int SLICE>
    static __device__ __forceinline__ void load_header_pair(TileDequantizer (&tile)[2],
                                                            const LaneOffsets<KIND>& lane_offsets, u32 slice_address) {
        if (SLICE == 0)
            tile[0].header[0] = ld_shared_v4(slice_address + lane_offsets.head[0]);
        else
            read_scales_pair<SLICE>(tile);
    }
    template <int SLICE>
    static __device__ __forceinline__ void decode_scales_pair(TileDequantizer (&tile)[2]) {
        tile[0].first = tile[1].first = 2 * SLICE;
        if (SLICE) return;
        const uint4 h = tile[0].header[0];
        const u32 upper_mins = (h.y << 2 & 0x0c0c0c0cu) | (h.z << 4 & 0x30303030u) | (h.w << 6 & 0xc0c0c0c0u);
        const u32 c[2] = {h.y & 0xfcfcfcfcu, h.w & 0xfcfcfcfcu}, m[2] = {h.z & 0xfcfcfcfcu, upper_mins};
        const u32 d = f16x2_mul(broadcast_half(h.x, 0), IS_Q5 ? 0x28003c00u : 0x2c003c00u),
                  d_offset = f16x2_mul(d, 0xdc00dc00u);
        const u32 min_offset = f16x2_mul(broadcast_half(h.x, 1), 0xdc00dc00u);
        u32 lane_value[2][4];  // of both slices: scale and minimum of two chunks
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const u32 selector = q % 2 ? 0x4342u : 0x4140u;
            lane_value[q / 2][q % 2 * 2] = f16x2_fma(prmt(c[q / 2], 0x5cu, selector), d, d_offset);
            lane_value[q / 2][q % 2 * 2 + 1] =
                f16x2_fma(prmt(m[q / 2], 0x5cu, selector), broadcast_half(h.x, 1), min_offset);
        }
        store_scales(lane_value);
        read_scales_pair<0>(tile);
    }
    template <int SLICE>
    static __device__ __forceinline__ void read_scales_pair(TileDequantizer (&tile)[2]) {
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const uint4 v = *scale_slot(u, SLICE);
            TileDequantizer& to = tile[u / 2];
            to.scale[2 * SLICE][u % 2] = v.x, to.min[2 * SLICE][u % 2] = v.y;
            to.scale[2 * SLICE + 1][u % 2] = v.z, to.min[2 * SLICE + 1][u % 2] = v.w;
        }
    }
    __device__ __forceinline__ void select_chunk(int q) { chunk = first + q; }
    __device__ __forceinline__ void rotate_codes() {
        if (IS_Q5)
            codes = make_uint4(rotate_right(codes.x, 10), rotate_right(codes.y, 9), rotate_right(codes.z, 8),
                               rotate_right(codes.w, 7));
        else
            rotate_words_8(codes);
    }
    template <int B>
    __device__ __forceinline__ void dequant(int s, u32 (&a)[4]) const {
        if (IS_Q5 && s) return dequant_q5<B>(a);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 code = word(codes, j) & (IS_Q5 ? B ? 0x07c007c0u : 0x003e003eu : B ? 0x03c003c0u : 0x003c003cu);
            a[j] = f16x2_fms(code, broadcast_half(scale[chunk][j % 2], B), broadcast_half(min[chunk][j % 2], B));
        }
    }
    // Q5K, s = 1: the remaining bits of four words, all of the fifth, and one code from the last bits of all. Two codes
    // of each run lie at other bits than its others and have their own scales.
    template <int B>
    __device__ __forceinline__ void dequant_q5(u32 (&a)[4]) const {
        // 1/2, 2; 1/4, 4
        const u32 shifted_scale[2] = {f16x2_mul(scale[chunk][0], 0x40003800u), f16x2_mul(scale[chunk][1], 0x44003400u)};
        const u32 last = rotate_right(extra_codes, 6);
        const u32 gathered = (codes.x & 0x00400040u) | (codes.y & 0x00800080u) | (codes.z & 0x01000100u) |
                             (codes.w & 0x02000200u) | (last & 0x04000400u);
        const u32 code[4] = {B ? last & 0x03e003e0u : codes.y & 0x007c007cu,
                             B ? codes.w & 0x01f001f0u : codes.z & 0x00f800f8u, B ? gathered : codes.x & 0x003e003eu,
                             extra_codes & (B ? 0x07c007c0u : 0x003e003eu)};
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = f16x2_fms(code[j], broadcast_half(j < 2 ? shifted_scale[j] : scale[chunk][j % 2], B),
                             broadcast_half(min[chunk][j % 2], B));
    }
};

template <>
struct TileDequantizer<KIND_Q6K> {
    static constexpr bool IS_PAIRED = true;
    u32 d_f16[2];         // d of rows g and g + 8
    uint2 raw_scales[2];  // c + 128 of the slice's eight runs of 16
    uint4 codes;
    uint2 extra_codes;              // words 4 and 5
    u32 scaled_d[2];                // d for b = 0 and 1
    u32 scale[4][2], offset[4][2];  // [2 q + s][row], pairs (b = 0, b = 1)
    int chunk;                      // a compile-time constant after unrolling

    // Factor of d for b = 0 and 1 in row g + 8 i: 1 for codes at bit 1, 1/16 at bit 5.
    static __device__ __forceinline__ u32 bit_scale(int s, int i) {
        return s ? 0x3c002c00u : i ? 0x2c003c00u : 0x3c003c00u;
    }
    // 32 codes: 32 * 2^-23 or 32 * 2^-19 of a scale.
    static __device__ __forceinline__ u32 offset_of(u32 scale, int s, int i) {
        return f16x2_mul(scale, s ? 0x00400400u : i ? 0x04000040u : 0x00400040u);
    }
    // Pair `selector` of four stored bytes: 0x6400 + byte is 1024 + byte; minus 1152 it is c, exactly.
    static __device__ __forceinline__ u32 signed_scales(u32 bytes, u32 selector) {
        return f16x2_add(prmt(bytes, 0x64u, selector), 0xe480e480u);
    }

    template <int SLICE>
    __device__ __forceinline__ void load_header(const u8* at) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            raw_scales[i] = *(const uint2*)(at + 1536 + (g + 8 * i) * 8);
            if (SLICE == 0) d_f16[i] = *(const u16*)(at + 1664 + (g + 8 * i) * 2);
        }
    }
    __device__ __forceinline__ void load_codes(const u8* at, int q) {
        const int lane = threadIdx.x % 32;
        codes = load_16b(at + q * 512 + lane * 16);
        extra_codes = *(const uint2*)(at + 1024 + lane * 16 + q * 8);
    }
    template <int SLICE>
    __device__ __forceinline__ void load_codes(const LaneOffsets<KIND_Q6K>& lane_offsets, u32 slice_address,
                                               u32 tile_offset, int q) {
        codes = ld_shared_v4(slice_address + lane_offsets.codes[SLICE] + tile_offset + q * 512);
        extra_codes = ld_shared_v2(slice_address + lane_offsets.codes[SLICE] + tile_offset + 1024 + q * 8);
    }
    // Lane 2 q + s of a quad decodes the scales of chunk q and step s of the slice for all lanes.
    template <int SLICE>
    __device__ __forceinline__ void decode_scales() {
        const u32 selector = threadIdx.x & 1 ? 0x4341u : 0x4240u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (SLICE == 0) scaled_d[i] = f16x2_mul(broadcast_half(d_f16[i], 0), bit_scale(threadIdx.x & 1, i));
            const u32 lane_value =
                f16x2_mul(signed_scales(threadIdx.x & 2 ? raw_scales[i].y : raw_scales[i].x, selector), scaled_d[i]);
#pragma unroll
            for (int u = 0; u < 4; u++) {
                scale[u][i] = quad_shfl(lane_value, u);
                offset[u][i] = offset_of(scale[u][i], u % 2, i);
            }
        }
    }
    // `d_f16`, `raw_scales` and `scaled_d` of the first tile are those of the lane's row; `scaled_d` for both s.
    template <int SLICE>
    static __device__ __forceinline__ void load_header_pair(TileDequantizer (&tile)[2], const u8* const (&w)[2]) {
        const int lane = threadIdx.x % 32, r = lane / 4 + 8 * (lane & 1);
        const u8* at = lane & 2 ? w[1] : w[0];
        tile[0].raw_scales[0] = *(const uint2*)(at + 1536 + r * 8);
        if (SLICE == 0) tile[0].d_f16[0] = *(const u16*)(at + 1664 + r * 2);
    }
    template <int SLICE>
    static __device__ __forceinline__ void load_header_pair(TileDequantizer (&tile)[2],
                                                            const LaneOffsets<KIND_Q6K>& lane_offsets,
                                                            u32 slice_address) {
        tile[0].raw_scales[0] = ld_shared_v2(slice_address + lane_offsets.head[SLICE]);
        if (SLICE == 0) tile[0].d_f16[0] = ld_shared_u16(slice_address + lane_offsets.d_f16);
    }
    template <int SLICE>
    static __device__ __forceinline__ void decode_scales_pair(TileDequantizer (&tile)[2]) {
        const int i = threadIdx.x & 1;
        u32 lane_value[2][4];  // of both chunks: scale and offset for s = 0 and 1
#pragma unroll
        for (int s = 0; s < 2; s++) {
            if (SLICE == 0) tile[0].scaled_d[s] = f16x2_mul(broadcast_half(tile[0].d_f16[0], 0), bit_scale(s, i));
#pragma unroll
            for (int q = 0; q < 2; q++) {
                lane_value[q][2 * s] = f16x2_mul(
                    signed_scales(q ? tile[0].raw_scales[0].y : tile[0].raw_scales[0].x, s ? 0x4341u : 0x4240u),
                    tile[0].scaled_d[s]);
                lane_value[q][2 * s + 1] = offset_of(lane_value[q][2 * s], s, i);
            }
        }
        store_scales(lane_value);
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const uint4 v = *scale_slot(u, q);
                TileDequantizer& to = tile[u / 2];
                to.scale[2 * q][u % 2] = v.x, to.offset[2 * q][u % 2] = v.y;
                to.scale[2 * q + 1][u % 2] = v.z, to.offset[2 * q + 1][u % 2] = v.w;
            }
    }
    __device__ __forceinline__ void select_chunk(int q) { chunk = q; }
    // Words 0 and 1 were rotated before, for half of s = 0.
    __device__ __forceinline__ void rotate_codes() {
        codes.z = rotate_right(codes.z, 6), codes.w = rotate_right(codes.w, 6);
        extra_codes = make_uint2(rotate_right(extra_codes.x, 6), rotate_right(extra_codes.y, 6));
    }
    template <int B>
    __device__ __forceinline__ void dequant(int s, u32 (&a)[4]) {
        u32 code[4];
        if (s == 0 && B == 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) code[j] = word(codes, j) & 0x007e007eu;
        } else if (s == 0) {
            codes.x = rotate_right(codes.x, 6), codes.y = rotate_right(codes.y, 6);
            code[0] = extra_codes.x & 0x007e007eu, code[2] = extra_codes.y & 0x007e007eu;
            code[1] = codes.x & 0x07e007e0u, code[3] = codes.y & 0x07e007e0u;
        } else if (B == 0) {
            code[0] = codes.z & 0x07e007e0u, code[1] = codes.w & 0x07e007e0u;
            code[2] = extra_codes.x & 0x07e007e0u, code[3] = extra_codes.y & 0x07e007e0u;
        } else {
            // Four bits of words 0 to 3, and above them two of words 4 and 5; the multiplication runs on other units
            // than LOP3.
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 top = (j < 2 ? extra_codes.x : extra_codes.y) & (j % 2 ? 0x00180018u : 0x00060006u);
                code[j] = top * (j % 2 ? 4u : 16u) + (word(codes, j) & 0x001e001eu);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = f16x2_fms(code[j], broadcast_half(scale[2 * chunk + s][j % 2], B),
                             broadcast_half(offset[2 * chunk + s][j % 2], B));
    }
};

template <>
struct TileDequantizer<KIND_Q8> {
    static constexpr bool IS_PAIRED = false;
    uint4 codes[2];
    u32 scale[2], offset[2];  // pairs (b = 0, b = 1)

    template <int SLICE>
    __device__ __forceinline__ void load_header(const u8*) {}
    __device__ __forceinline__ void load_codes(const u8* at, int) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            codes[i] = load_16b(at + i * 512 + lane * 16);
            scale[i] = *(const u32*)(at + 1024 + (lane / 4 + 8 * i) * 4);
        }
    }
    template <int SLICE>
    __device__ __forceinline__ void decode_scales() {}
    __device__ __forceinline__ void select_chunk(int) {
#pragma unroll
        for (int i = 0; i < 2; i++) offset[i] = f16x2_mul(scale[i], 0x02000200u);  // 128 * 2^-22
    }
    __device__ __forceinline__ void rotate_codes() {
        rotate_words_8(codes[0]);
        rotate_words_8(codes[1]);
    }
    template <int B>
    __device__ __forceinline__ void dequant(int, u32 (&a)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = f16x2_fms(word(codes[B], j) & 0x03fc03fcu, broadcast_half(scale[j % 2], B),
                             broadcast_half(offset[j % 2], B));
    }
};

template <>
struct TileDequantizer<KIND_U8_AFFINE> {
    static constexpr bool IS_PAIRED = false;
    uint4 codes[2];
    uint4 scales[2];  // of rows g and g + 8: scale and offset of four runs of 16

    template <int SLICE>
    __device__ __forceinline__ void load_header(const u8*) {}
    __device__ __forceinline__ void load_codes(const u8* at, int) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            codes[i] = load_16b(at + i * 512 + lane * 16);
            scales[i] = load_16b(at + 1024 + (lane / 4 + 8 * i) * 16);
        }
    }
    template <int SLICE>
    __device__ __forceinline__ void decode_scales() {}
    __device__ __forceinline__ void select_chunk(int) {}
    __device__ __forceinline__ void rotate_codes() {
        rotate_words_8(codes[0]);
        rotate_words_8(codes[1]);
    }
    template <int B>
    __device__ __forceinline__ void dequant(int s, u32 (&a)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 pair = word(scales[j % 2], 2 * B + s);
            a[j] = f16x2_fma(word(codes[B], j) & 0x03fc03fcu, broadcast_half(pair, 0), broadcast_half(pair, 1));
        }
    }
};

template <>
struct TileDequantizer<KIND_F16> {
    static constexpr bool IS_PAIRED = false;
    const u8* values;

    template <int SLICE>
    __device__ __forceinline__ void load_header(const u8*) {}
    __device__ __forceinline__ void load_codes(const u8* at, int) { values = at + threadIdx.x % 32 * 16; }
    template <int SLICE>
    __device__ __forceinline__ void decode_scales() {}
    __device__ __forceinline__ void select_chunk(int) {}
    __device__ __forceinline__ void rotate_codes() {}
    template <int B>
    __device__ __forceinline__ void dequant(int s, u32 (&a)[4]) const {
        const uint4 v = load_16b(values + (2 * B + s) * 512);
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
};

// Loads and decodes the scales of slice SLICE of M tiles.
template <int SLICE, int KIND, int M>
__device__ __forceinline__ void load_headers(TileDequantizer<KIND> (&tile)[M], const u8* const (&w)[M]) {
    if constexpr (M == 2 && TileDequantizer<KIND>::IS_PAIRED) {
        TileDequantizer<KIND>::template load_header_pair<SLICE>(tile, w);
    } else {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].template load_header<SLICE>(w[m]);
    }
}
template <int SLICE, int KIND, int M>
__device__ __forceinline__ void decode_scales_all(TileDequantizer<KIND> (&tile)[M]) {
    if constexpr (M == 2 && TileDequantizer<KIND>::IS_PAIRED) {
        TileDequantizer<KIND>::template decode_scales_pair<SLICE>(tile);
    } else {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].template decode_scales<SLICE>();
    }
}
