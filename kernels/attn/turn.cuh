// The rotation of keys and values that are stored coarsely, and of queries to match; and the way back for outputs.
//
//   turn:      y = after * (H (before * x)) / sqrt(n)        turn_back:  x = before * (H (after * y)) / sqrt(n)
//
// over groups of n = min(128, head) values; H is the Hadamard matrix in natural order, `before` and `after` are fixed
// signs. Sums are made in the order of the reference (strides rising), so results are the same bits.
// Reference contract::quant::turn; test attention::chunks_are_written_where_they_belong.
#pragma once
#include "common/prelude.cuh"

// Bit i % 32 of word i / 32: value i of a group changes its sign.
__device__ __forceinline__ u32 turn_signs(bool after, int word) {
    return after ? (word == 0 ? 0x16acee90u : word == 1 ? 0x3f628fdcu : word == 2 ? 0xb7a5357au : 0xbea56562u)
                 : (word == 0 ? 0xe46a0359u : word == 1 ? 0x42f85949u : word == 2 ? 0xa4c63bbbu : 0x49f250a9u);
}
// `x` with the sign changed that bit `bit` of `signs` says.
__device__ __forceinline__ float flipped(float x, u32 signs, int bit) {
    return __uint_as_float(__float_as_uint(x) ^ (signs >> bit & 1) << 31);
}
__device__ __host__ constexpr int turn_group(int dim) { return dim < 128 ? dim : 128; }
__device__ __forceinline__ constexpr float turn_scale(int dim) { return dim < 128 ? 0.125f : 1.0f / 11.31370849898476f; }

// A head in a warp: lane i holds values 32 b + i in x[b].
template <bool back, int blocks>
__device__ __forceinline__ void turn_head(float (&x)[blocks]) {
    constexpr int per = turn_group(32 * blocks) / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < blocks; b++) x[b] = flipped(x[b], turn_signs(back, b % per), lane);
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
        for (int b = 0; b < blocks; b++) {
            const float other = __shfl_xor_sync(WARP_ALL, x[b], stride);
            x[b] = lane & stride ? other - x[b] : x[b] + other;
        }
    }
#pragma unroll
    for (int stride = 1; stride < per; stride *= 2) {
#pragma unroll
        for (int b = 0; b < blocks; b++) {
            if (b & stride) continue;
            const float u = x[b], w = x[b + stride];
            x[b] = u + w, x[b + stride] = u - w;
        }
    }
#pragma unroll
    for (int b = 0; b < blocks; b++)
        x[b] = flipped(__fmul_rn(x[b], turn_scale(32 * blocks)), turn_signs(!back, b % per), lane);
}

// Heads in a block of 256 threads, a value a thread; every thread takes part. `room` is 512 floats of shared memory.
template <int dim>
__device__ __forceinline__ float turn_back_values(float x, float* room) {
    const int lane = threadIdx.x % 32, word = threadIdx.x % turn_group(dim) / 32;
    x = flipped(x, turn_signs(true, word), lane);
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
        const float other = __shfl_xor_sync(WARP_ALL, x, stride);
        x = lane & stride ? other - x : x + other;
    }
#pragma unroll
    for (int stride = 32; stride < turn_group(dim); stride *= 2) {
        float* half = room + (stride == 32 ? 0 : 256);
        half[threadIdx.x] = x;
        __syncthreads();
        const float other = half[threadIdx.x ^ stride];
        x = threadIdx.x & stride ? other - x : x + other;
    }
    return flipped(__fmul_rn(x, turn_scale(dim)), turn_signs(false, word), lane);
}

// Rows of heads as products leave them: a lane has columns 8 j + 2 (lane % 4) + c of two rows in x[4 j + 2 row + c].
template <int dim>
__device__ __forceinline__ void turn_back_rows(float (&x)[dim / 2]) {
    constexpr int per = turn_group(dim) / 32;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < dim / 8; j++) {
        const u32 signs = turn_signs(true, j / 4 % per) >> (2 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) x[4 * j + i] = flipped(x[4 * j + i], signs, j % 4 * 8 + i % 2);
    }
#pragma unroll
    for (int i = 0; i < dim / 2; i += 2) {
        const float u = x[i], w = x[i + 1];
        x[i] = u + w, x[i + 1] = u - w;
    }
#pragma unroll
    for (int gap = 1; gap < 4; gap *= 2) {
#pragma unroll
        for (int i = 0; i < dim / 2; i++) {
            const float other = __shfl_xor_sync(WARP_ALL, x[i], gap);
            x[i] = t & gap ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int stride = 8; stride < turn_group(dim); stride *= 2) {
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
        const u32 signs = turn_signs(false, j / 4 % per) >> (2 * t);
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[4 * j + i] = flipped(x[4 * j + i] * turn_scale(dim), signs, j % 4 * 8 + i % 2);
    }
}
