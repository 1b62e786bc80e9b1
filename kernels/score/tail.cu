// Attention logits of a prompt's last tokens, layer by layer.
//
//   score_tail_queries  queries[t][h]     = rope?(rms_norm(q[row of t][h]) * q_norm)
//   score_tail_logits   logits[t][h][j]   = scale * queries[t][h] · rope?(rms_norm(k[j][h / GROUP]) * k_norm),
//                                           minus infinity behind the query's position
//
// in   chunk   rows of the prompt from position `committed` on
//      q       f32 [rows][HEADS][Q_STRIDE]      k  f32 [rows][KV_STRIDE], head g at g * HEAD_DIM: projections
//      norms   f32 [HEAD_DIM] each, with QK_NORM      frequency  f64 [ROPE / 2]
// out  queries f32 [tail][HEADS][HEAD_DIM]      logits  f32 [tail][HEADS][tokens]
// grid queries (ceil(HEADS / 4), rows of the largest chunk) x 128 threads, a warp per head
//      logits  (ceil(rows of the largest chunk / 4), KV_HEADS) x 128 threads, a warp per key
// smem none
// define HEAD_DIM, HEADS, KV_HEADS, Q_STRIDE, KV_STRIDE, ROPE, QK_NORM (0 or 1)
// arch sm_80 and up     references cpu::reference::{norm::rms_in_place, rope}
// test cpu_reference::scoring::scores_match_the_cpu_reference
#include "attention/head_norm_rope.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "score/call.cuh"

#define GROUP (HEADS / KV_HEADS)

// A head, normed, and rotated if the call says so.
__device__ __forceinline__ void load_head(const float* from, const float* norm, const double* frequency, float eps,
                                          int position, bool rotated, float (&x)[DIM_BLOCKS]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) x[b] = from[32 * b + lane];
#if QK_NORM
    float weight[DIM_BLOCKS];
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) weight[b] = norm[32 * b + lane];
    rms_norm(x, weight, eps);
#endif
    if (rotated) {
        apply_rope(x, angles_of(position, frequency));
    }
}

extern "C" __global__ void __launch_bounds__(128)
    score_tail_queries(const PrefillChunk* chunk, const ScoreCall* call, const float* q, const float* norm,
                       const double* frequency, float eps, float* queries) {
    const int head = blockIdx.x * 4 + warp_index(), row = blockIdx.y, position = chunk->committed + row;
    const int t = position - tail_position(*call, 0);
    if (head >= HEADS || row >= chunk->rows || t < 0) {
        return;
    }
    float x[DIM_BLOCKS];
    load_head(q + ((u64)row * HEADS + head) * Q_STRIDE, norm, frequency, eps, position, call->rotated, x);
    float* to = queries + ((u64)t * HEADS + head) * HEAD_DIM;
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) to[32 * b + threadIdx.x % 32] = x[b];
}

extern "C" __global__ void __launch_bounds__(128)
    score_tail_logits(const PrefillChunk* chunk, const ScoreCall* call, const float* k, const float* norm,
                      const double* frequency, float eps, const float* queries, float scale, float* logits) {
    const int row = blockIdx.x * 4 + warp_index(), kv_head = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= chunk->rows) {
        return;
    }
    const int position = chunk->committed + row, tokens = call->tokens;
    float key[DIM_BLOCKS];
    load_head(k + (u64)row * KV_STRIDE + kv_head * HEAD_DIM, norm, frequency, eps, position, call->rotated, key);
    for (int t = 0; t < call->tail; t++) {
        const bool visible = position <= tail_position(*call, t);
#pragma unroll 4
        for (int g = 0; g < GROUP; g++) {
            const u64 line = (u64)t * HEADS + kv_head * GROUP + g;
            float logit = -INF;
            if (visible) {
                const float* query = queries + line * HEAD_DIM;
                float sum = 0.0f;
#pragma unroll
                for (int b = 0; b < DIM_BLOCKS; b++) sum = fmaf(query[32 * b + lane], key[b], sum);
                logit = warp_sum(sum) * scale;
            }
            if (lane == 0) {
                logits[line * tokens + position] = logit;
            }
        }
    }
}
