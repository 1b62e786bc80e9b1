// The choice of a row's experts, by one warp, and how decode steps list the rows of each chosen expert.
//
//   p = softmax(logits);  the USED experts of largest p, of equal ones those of lower index, best first
//   weight = scale * p / max(sum of the chosen p, 2^-14)
//
// A logit that is NaN counts as p = 0. The including file defines EXPERTS and USED.
// reference cpu::reference::router     test crates/cuda/tests/moe.rs
#pragma once
#include "common/prelude.cuh"

// A chosen expert and its factor in the row's sum.
struct Choice {
    int expert;
    float weight;
};

// Up to EXPERT_ROWS pairs (row, choice) of one expert in a decode step. Pair `row * USED + i` is choice i of a row.
#define EXPERT_ROWS 8
struct ExpertRows {
    int expert;
    int first;  // position of the first pair in the order of experts
    int n;      // pairs
    int _pad;
    int pair[EXPERT_ROWS];
};

// What a decode step knows about its experts, in device memory.
struct DecodeWork {
    int* n_entries;
    ExpertRows* entries;
    Choice* choices;       // [rows][USED], best first
    float* shared_factor;  // [rows], of the shared expert
};

// By a warp: the choices of a row into `out`. The logits were written by other blocks.
__device__ __forceinline__ void choose_row(const float* logits, float scale, Choice* out) {
    constexpr int PER_LANE = (EXPERTS + 31) / 32;
    const int lane = threadIdx.x % 32;
    float p[PER_LANE], shift = -INF;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = i * 32 + lane;
        p[i] = expert < EXPERTS ? __ldcg(logits + expert) : -INF;
        shift = fmaxf(shift, p[i]);
    }
    shift = warp_max(shift);
    // Bits of p + 1, which order as p does; 0: no expert, or one that was chosen.
    u32 key[PER_LANE];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const float e = expf(p[i] - shift);
        p[i] = e >= 0.0f ? e : 0.0f;
        const bool exists = i * 32 + lane < EXPERTS;
        if (exists) sum += p[i];
        key[i] = exists ? __float_as_uint(p[i]) + 1 : 0;
    }
    sum = warp_sum(sum);
    float chosen = 0.0f, own = 0.0f;
    int own_expert = 0;
#pragma unroll
    for (int j = 0; j < USED; j++) {
        u32 best_key = 0;
        int best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (key[i] > best_key) best_key = key[i], best = i * 32 + lane;
        const u32 most = __reduce_max_sync(WARP_ALL, best_key);
        best = __reduce_min_sync(WARP_ALL, best_key == most ? u32(best) : 0x7fffffffu);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (i * 32 + lane == best) key[i] = 0;
        const float value = __uint_as_float(most - 1) / sum;
        chosen += value;
        if (lane == j % 32) own = value, own_expert = best;
        if (j % 32 == 31 || j + 1 == USED) {
            // Weights are scaled below, when the sum is complete.
            if (lane <= j % 32) out[j / 32 * 32 + lane] = {own_expert, own};
        }
    }
    __syncwarp();
    const float factor = scale / fmaxf(chosen, 1.0f / 16384.0f);
    for (int j = lane; j < USED; j += 32) out[j].weight *= factor;
    __syncwarp();
}
