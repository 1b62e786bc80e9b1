// The paged cache of keys and values: where a row is, and how its values are stored.
//
// A page holds PAGE positions. Values and scales are two planes of one shape:
//   values  [page][kv head][PAGE][dim in the format]        scales  [page][kv head][PAGE][dim / 32] f16
// The bytes of a block of 32 are those of the formats of the same name (contract::quant):
//   F32, F16   plain, no scales
//   Q8_0       32 signed bytes;  value = d * q,  d = f16(max|x| / 127), codes by the scale before it is rounded
//   Q4_0       byte j: value j low, value j + 16 high;  value = d * (q - 8),  d = f16(peak / -8)
// Judge: cpu::reference::kv (bits equal); test attention::hostile_rows_are_stored_as_the_codec_stores_them.
#pragma once
#include "common/prelude.cuh"

#define PAGE 256
#define KV_F32 0
#define KV_F16 1
#define KV_Q8_0 2
#define KV_Q4_0 3

// Bytes of the values of one row.
__device__ __host__ constexpr int kv_row_bytes(int format, int dim) {
    return format == KV_F32 ? 4 * dim : format == KV_F16 ? 2 * dim : format == KV_Q8_0 ? dim : dim / 2;
}
__device__ __host__ constexpr bool kv_scaled(int format) { return format >= KV_Q8_0; }

// One layer's keys or values.
struct Plane {
    u8* values;
    u16* scales;
};

// Where a sequence's positions are.
struct Pages {
    const int* table;  // [slots][max_pages]: physical pages
    int max_pages;
    int ring;          // 0, or the pages after which positions begin again on the first
};

// Index of (position, head) in a plane, in rows.
__device__ __forceinline__ size_t kv_row(const Pages& pages, int slot, int position, int kv_heads, int head) {
    int page = position / PAGE;
    if (pages.ring) page %= pages.ring;
    page = pages.table[slot * pages.max_pages + page];
    return ((size_t)page * kv_heads + head) * PAGE + position % PAGE;
}

// The value of largest magnitude among the lanes, the lowest lane's at equal magnitudes, 0 if there is none.
__device__ __forceinline__ float warp_peak(float x) {
    const u32 size = x != x ? 0 : __float_as_uint(x) & 0x7fffffffu;
    const u32 most = __reduce_max_sync(WARP_ALL, size);
    const u32 who = __ballot_sync(WARP_ALL, size == most);
    const float peak = __shfl_sync(WARP_ALL, x, __ffs(who) - 1);
    return most ? peak : 0.0f;
}

// A warp stores row `row`: lane i holds values 32 b + i in x[b].
template <int format, int blocks>
__device__ __forceinline__ void kv_store(const Plane& plane, size_t row, const float (&x)[blocks]) {
    const int lane = threadIdx.x % 32;
    u8* to = plane.values + row * kv_row_bytes(format, 32 * blocks);
    if constexpr (format == KV_F32) {
#pragma unroll
        for (int b = 0; b < blocks; b++) ((float*)to)[32 * b + lane] = x[b];
    } else if constexpr (format == KV_F16) {
#pragma unroll
        for (int b = 0; b < blocks; b++) ((u16*)to)[32 * b + lane] = f32_to_f16(x[b]);
    } else {
        // Lane b divides for block b.
        float peak = 0.0f;
#pragma unroll
        for (int b = 0; b < blocks; b++) {
            const float own = warp_peak(x[b]);
            if (lane == b) peak = own;
        }
        const float d = format == KV_Q8_0 ? __fdiv_rn(fabsf(peak), 127.0f) : __fdiv_rn(peak, -8.0f);
        const float inverse = d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d);
        if (lane < blocks) plane.scales[row * blocks + lane] = f32_to_f16(d);
#pragma unroll
        for (int b = 0; b < blocks; b++) {
            const float scaled = __fmul_rn(x[b], __shfl_sync(WARP_ALL, inverse, b));
            if (format == KV_Q8_0) {
                to[32 * b + lane] = (u8)max(-128, min(127, __float2int_rz(roundf(scaled))));
            } else {
                const int low = max(0, min(15, __float2int_rz(__fadd_rn(scaled, 8.5f))));
                const int high = __shfl_down_sync(WARP_ALL, low, 16);
                if (lane < 16) to[16 * b + lane] = (u8)(low | high << 4);
            }
        }
    }
}

// Value `i` of row `row`.
template <int format, int dim>
__device__ __forceinline__ float kv_load(const Plane& plane, size_t row, int i) {
    const u8* from = plane.values + row * kv_row_bytes(format, dim);
    if (format == KV_F32) return ((const float*)from)[i];
    if (format == KV_F16) return f16_to_f32(((const u16*)from)[i]);
    const float d = f16_to_f32(plane.scales[row * (dim / 32) + i / 32]);
    if (format == KV_Q8_0) return d * (float)(i8)from[i];
    return d * ((float)(from[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15) - 8.0f);
}
