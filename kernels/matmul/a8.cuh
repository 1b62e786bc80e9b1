// Activations as the small-batch matmuls read them, and the device functions that write them.
//
// Every form holds `n_tiles` = ceil(bucket / 8) tiles of 8 rows and K rounded up to whole groups of 256, as 8 x 16-byte
// matrices, so that a block copies one contiguous piece per step and ldmatrix gives the B operand of a product.
// Values past K are zero and are written by the producer. Rows the step does not have may hold anything.
//
// A8: group G of 256 values, tile j, at byte (G * n_tiles + j) * 2336:
//   q     [2048]  i8: x = d * q. Value k (of the group), row r: byte  k/16 * 128 + r%8 * 16 + k%16
//   sums  [256]   f16: sum of the 16 codes of run b = k/16 (a whole number, |sum| <= 2032, exact), row r: byte
//                 2048 + ((r%8)*4 + b%8/2) * 8 + b/8 * 4 + b%2 * 2
//   d     [32]    f32 per row: byte 2304 + (r%8) * 4.  d = max|x| / 127 over the group, q = round_half_even(x * 127 / max|x|).
//   A group that holds an infinity or NaN has d = NaN, so its row's outputs are NaN.
//
// A16 (f16 or bf16): chunk C of 64 values, tile j, at byte (C * n_tiles + j) * 1024. Value k of the chunk, row r: byte
//   k/8 * 128 + r%8 * 16 + k%8 * 2
//
// f32 is plain [rows][K].
// Judge: crates/cuda/src/pack/activations.rs (the same formulas on the host); test crates/cuda/tests/matmul.rs.
#pragma once
#include "common/prelude.cuh"

#define A8_TILE 2336
#define A16_TILE 1024

// One warp writes group `group` of row `row`: lane i holds values 8 i .. 8 i + 7 of the group (zeros past K).
__device__ __forceinline__ void a8_store(void* a8, int n_tiles, int row, int group, const float (&v)[8]) {
    const int lane = threadIdx.x % 32;
    float top = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        top = fmaxf(top, fabsf(v[i]));
        odd = fmaf(v[i], 0.0f, odd);  // NaN as soon as one value is not finite
    }
    top = warp_max(top);
    const bool finite = __all_sync(WARP_ALL, odd == 0.0f);
    const float factor = top > 0.0f && finite ? 127.0f / top : 0.0f;
    u32 q[2];
    int sum = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        q[h] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int code = max(-127, min(127, __float2int_rn(finite ? v[4 * h + i] * factor : 0.0f)));
            sum += code;
            q[h] |= u32(code & 255) << (8 * i);
        }
    }
    sum += __shfl_xor_sync(WARP_ALL, sum, 1);
    char* tile = (char*)a8 + (size_t(group) * n_tiles + row / 8) * A8_TILE;
    const int g = row % 8;
    *(uint2*)(tile + lane / 2 * 128 + g * 16 + lane % 2 * 8) = make_uint2(q[0], q[1]);
    if (lane % 2 == 0) {
        const int b = lane / 2;
        *(u16*)(tile + 2048 + (g * 4 + b % 8 / 2) * 8 + b / 8 * 4 + b % 2 * 2) = f32_to_f16(float(sum));
    }
    if (lane == 0) *(float*)(tile + 2304 + g * 4) = finite ? top * (1.0f / 127.0f) : NAN_F;
}

// As a8_store, into the 16-bit form; `pairs[i]` are values 8 lane + 2 i and 8 lane + 2 i + 1 already converted.
__device__ __forceinline__ void a16_store_pairs(void* a16, int n_tiles, int row, int group, const u32 (&pairs)[4]) {
    const int lane = threadIdx.x % 32;
    char* tile = (char*)a16 + (size_t(group * 4 + lane / 8) * n_tiles + row / 8) * A16_TILE;
    *(uint4*)(tile + lane % 8 * 128 + row % 8 * 16) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
// Values beyond the range of f16 saturate.
__device__ __forceinline__ void a16_store_f16(void* a16, int n_tiles, int row, int group, const float (&v)[8]) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float lo = v[2 * i], hi = v[2 * i + 1];
        // NaN stays: neither comparison holds.
        pairs[i] = f32x2_to_f16x2(lo > 65504.0f ? 65504.0f : lo < -65504.0f ? -65504.0f : lo,
                                  hi > 65504.0f ? 65504.0f : hi < -65504.0f ? -65504.0f : hi);
    }
    a16_store_pairs(a16, n_tiles, row, group, pairs);
}
__device__ __forceinline__ void a16_store_bf16(void* a16, int n_tiles, int row, int group, const float (&v)[8]) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = f32x2_to_bf16x2(v[2 * i], v[2 * i + 1]);
    a16_store_pairs(a16, n_tiles, row, group, pairs);
}
