// Hadamard rotation of quantized keys and values and of the queries, and its inverse for outputs.
//
//   rotate:  y = after * (H (before * x)) / sqrt(n)        inverse:  x = before * (H (after * y)) / sqrt(n)
//
// over groups of n = min(128, head_dim) values; H is the Hadamard matrix in natural order, `before` and `after` are
// fixed signs. Additions have the order of the reference (rising strides), so the bits are equal.
// Reference contract::quant::hadamard; test attention::prefill_chunk_appends_keys_and_values_at_their_pages.
#pragma once
#include "common/prelude.cuh"

// Bit i % 32 of word i / 32 is set if value i of a group changes its sign.
__device__ __forceinline__ u32 hadamard_signs(bool after_rotation, int word) {
    return after_rotation ? (word == 0   ? 0x16acee90u
                             : word == 1 ? 0x3f628fdcu
                             : word == 2 ? 0xb7a5357au
                                         : 0xbea56562u)
                          : (word == 0   ? 0xe46a0359u
                             : word == 1 ? 0x42f85949u
                             : word == 2 ? 0xa4c63bbbu
                                         : 0x49f250a9u);
}
// x with its sign flipped if bit `bit` of `signs` is set.
__device__ __forceinline__ float flip_sign(float x, u32 signs, int bit) {
    return __uint_as_float(__float_as_uint(x) ^ (signs >> bit & 1) << 31);
}
__device__ __host__ constexpr int hadamard_group(int dim) { return dim < 128 ? dim : 128; }
__device__ __forceinline__ constexpr float hadamard_scale(int dim) {
    return dim < 128 ? 0.125f : 1.0f / 11.31370849898476f;
}

// One head per warp: lane i holds values 32 b + i in x[b].
template <bool inverse, int dim_blocks>
__device__ __forceinline__ void hadamard_head(float (&x)[dim_blocks]) {
    constexpr int words_per_group = hadamard_group(32 * dim_blocks) / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < dim_blocks; b++) x[b] = flip_sign(x[b], hadamard_signs(inverse, b % words_per_group), lane);
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
        for (int b = 0; b < dim_blocks; b++) {
            const float other = __shfl_xor_sync(WARP_ALL, x[b], stride);
            x[b] = lane & stride ? other - x[b] : x[b] + other;
        }
    }
#pragma unroll
    for (int stride = 1; stride < words_per_group; stride *= 2) {
#pragma unroll
        for (int b = 0; b < dim_blocks; b++) {
            if (b & stride) continue;
            const float u = x[b], w = x[b + stride];
            x[b] = u + w, x[b + stride] = u - w;
        }
    }
#pragma unroll
    for (int b = 0; b < dim_blocks; b++)
        x[b] = flip_sign(__fmul_rn(x[b], hadamard_scale(32 * dim_blocks)),
                         hadamard_signs(!inverse, b % words_per_group), lane);
}

// Heads in a block of 256 threads, one value per thread; every thread takes part. `scratch`: 512 floats of shared
// memory.
template <int dim>
__device__ __forceinline__ float hadamard_inverse_values(float x, float* scratch) {
    const int lane = threadIdx.x % 32, word = threadIdx.x % hadamard_group(dim) / 32;
    x = flip_sign(x, hadamard_signs(true, word), lane);
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
        const float other = __shfl_xor_sync(WARP_ALL, x, stride);
        x = lane & stride ? other - x : x + other;
    }
#pragma unroll
    for (int stride = 32; stride < hadamard_group(dim); stride *= 2) {
        float* exchange = scratch + (stride == 32 ? 0 : 256);
        exchange[threadIdx.x] = x;
        __syncthreads();
        const float other = exchange[threadIdx.x ^ stride];
        x = threadIdx.x & stride ? other - x : x + other;
    }
    return flip_sign(__fmul_rn(x, hadamard_scale(dim)), hadamard_signs(false, word), lane);
}

// Heads in accumulator layout: a lane has columns 8 j + 2 (lane % 4) + c of two rows in x[4 j + 2 row + c].
template <int dim>
__device__ __forceinline__ void hadamard_inverse_rows(float (&x)[dim / 2]) {
    constexpr int words_per_group = hadamard_group(dim) / 32;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < dim / 8; j++) {
        const u32 signs = hadamard_signs(true, j / 4 % words_per_group) >> (2 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) x[4 * j + i] = flip_sign(x[4 * j + i], signs, j % 4 * 8 + i % 2);
    }
#pragma unroll
    for (int i = 0; i < dim / 2; i += 2) {
        const float u = x[i], w = x[i + 1];
        x[i] = u + w, x[i + 1] = u - w;
    }
#pragma unroll
    for (int lane_distance = 1; lane_distance < 4; lane_distance *= 2) {
#pragma unroll
        for (int i = 0; i < dim / 2; i++) {
            const float other = __shfl_xor_sync(WARP_ALL, x[i], lane_distance);
            x[i] = t & lane_distance ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int stride = 8; stride < hadamard_group(dim); stride *= 2) {
#pragma unroll
        for (int j = 0; j < dim / 8; j++) {
            if (8 * j & stride) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float u = x[4 * j + i], w = x[4 * j + stride / 2 + i];
                x[4 * j + i] = u + w, x[4 * j + stride / 2 + i] = u - w;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < dim / 8; j++) {
        const u32 signs = hadamard_signs(false, j / 4 % words_per_group) >> (2 * t);
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[4 * j + i] = flip_sign(x[4 * j + i] * hadamard_scale(dim), signs, j % 4 * 8 + i % 2);
    }
}
