// RMS norm and RoPE of one head by a warp: lane i has values 32 b + i of the head in x[b].
//
// Needs: HEAD_DIM (a multiple of 32), ROPE (an even number up to HEAD_DIM), ROPE_ADJACENT (0 if absent): pairs are
// values 2 j and 2 j + 1 instead of j and j + ROPE / 2.
// references cpu::reference::{norm::rms_in_place, rope}
#pragma once
#include "common/prelude.cuh"
#include "rope/sincos.cuh"

#ifndef ROPE_ADJACENT
#define ROPE_ADJACENT 0
#endif
#define DIM_BLOCKS (HEAD_DIM / 32)
#define HALF_ROPE (ROPE / 2)
// Whether a lane has both values of its pairs.
#define ROPE_IN_LANE (!ROPE_ADJACENT && HALF_ROPE % 32 == 0)

__device__ __forceinline__ float rms_scale(const float (&x)[DIM_BLOCKS], float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) sum += x[b] * x[b];
    return 1.0f / sqrtf(warp_sum(sum) / HEAD_DIM + eps);
}

__device__ __forceinline__ void rms_norm(float (&x)[DIM_BLOCKS], const float (&norm)[DIM_BLOCKS], float eps) {
    const float scale = rms_scale(x, eps);
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) x[b] = x[b] * scale * norm[b];
}

// Sines and cosines of a row: lane i has pairs 32 b + i if ROPE_IN_LANE, else those of values 32 b + i.
#define ANGLES_PER_LANE (ROPE_IN_LANE ? HALF_ROPE / 32 : (ROPE + 31) / 32)
struct Angles {
    float sine[ANGLES_PER_LANE], cosine[ANGLES_PER_LANE];
};

__device__ __forceinline__ Angles angles_of(int position, const double* frequency) {
    Angles angles;
#pragma unroll
    for (int b = 0; b < ANGLES_PER_LANE; b++) {
        const int i = 32 * b + threadIdx.x % 32;
#if ROPE_ADJACENT
        const int pair = i < ROPE ? i / 2 : 0;
#else
        const int pair = ROPE_IN_LANE || i < HALF_ROPE ? i : i < ROPE ? i - HALF_ROPE : 0;
#endif
        sin_cos(position, frequency[pair], angles.sine[b], angles.cosine[b]);
    }
    return angles;
}

// Values of a pair in different lanes are exchanged by shuffles.
__device__ __forceinline__ void apply_rope(float (&x)[DIM_BLOCKS], const Angles& angles) {
#if ROPE_ADJACENT
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < (ROPE + 31) / 32; b++) {
        const float other = __shfl_xor_sync(WARP_ALL, x[b], 1);
        const float s = angles.sine[b], c = angles.cosine[b];
        if (32 * b + lane < ROPE) x[b] = lane % 2 ? x[b] * c + other * s : x[b] * c - other * s;
    }
#elif ROPE_IN_LANE
#pragma unroll
    for (int b = 0; b < HALF_ROPE / 32; b++) {
        const float s = angles.sine[b], c = angles.cosine[b];
        const float u = x[b], w = x[b + HALF_ROPE / 32];
        x[b] = u * c - w * s;
        x[b + HALF_ROPE / 32] = w * c + u * s;
    }
#else
    const int lane = threadIdx.x % 32;
    float old[DIM_BLOCKS];
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) old[b] = x[b];
#pragma unroll
    for (int b = 0; b < (ROPE + 31) / 32; b++) {
        const int i = 32 * b + lane;
        const int partner = i < HALF_ROPE ? i + HALF_ROPE : i < ROPE ? i - HALF_ROPE : i;
        float other = 0.0f;
#pragma unroll
        for (int from = 0; from < (ROPE + 31) / 32; from++) {
            const float v = __shfl_sync(WARP_ALL, old[from], partner % 32);
            if (partner / 32 == from) other = v;
        }
        if (i < ROPE) {
            const float s = angles.sine[b], c = angles.cosine[b];
            x[b] = i < HALF_ROPE ? old[b] * c - other * s : old[b] * c + other * s;
        }
    }
#endif
}
