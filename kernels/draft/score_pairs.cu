// Scores of token pairs of a DFlash2 draft: the best candidates of each row behind each candidate of the row before.
//
//   S(a, b) = logit(b) + sum over r of predecessor[a, r] * gate[r] * successor[b, r]
//
// b is one of the row's TOP_K best by logit.
// a is the block's root at its first drafting row, else a candidate of the row before.
//
// in   header Step     reduced [logits rows][4 + 3 K] words of logits/top_k     gate f32 [logits rows][RANK]
//      predecessor, successor: [vocab] rows of ..._BYTES bytes in format ..._TYPE (the GGUF id)
// out  lists [logits rows][TOP_K][1 + 2 TOP_K] words: ln sum e^S; candidates, best first and equals in the order of
//      logits, as indices into the row's; S - ln sum e^S of each. Only the first list of a block's first row is written
// grid (ceil(TOP_K / 8), rows) x 256, one warp per a
// smem none
// arch sm_80 and up     reference cpu::reference::draft::pair_score     test crates/cuda/tests/drafts.rs
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "embedding/decode_value.cuh"
#include "logits/edits.cuh"

#define RANK_STEPS ((RANK + 31) / 32)
#define PER_LANE ((TOP_K + 31) / 32)
#define REDUCED_WORDS (4 + 3 * K)
#define LIST_WORDS (1 + 2 * TOP_K)

extern "C" __global__ void __launch_bounds__(256)
    draft_score_pairs(const Step* step, const int* reduced, const float* gates, const u8* __restrict__ predecessors,
                      const u8* __restrict__ successors, int* lists) {
    pdl_launch();
    const int row = blockIdx.y, parent = blockIdx.x * 8 + warp_index(), lane = threadIdx.x % 32;
    bool is_active = row < step->n_logits_rows && parent < TOP_K, is_first = false;
    int token = 0;
    if (is_active) {
        const int node = step->logits_row[row];
        const Tree tree = step->tree[step->tree_of[node]];
        is_first = node - tree.first == FIRST_ROW;
        token = step->token[tree.first];
        if (is_first && parent > 0) is_active = false;
    }
    pdl_wait();
    if (!is_active) return;
    const int* best = reduced + (size_t)row * REDUCED_WORDS;
    if (!is_first) token = best[4 + parent - REDUCED_WORDS];
    const u8* predecessor = predecessors + (size_t)token * PREDECESSOR_BYTES;
    float factor[RANK_STEPS];
#pragma unroll
    for (int i = 0; i < RANK_STEPS; i++) {
        const int r = 32 * i + lane;
        factor[i] = r < RANK ? decode_value<PREDECESSOR_TYPE>(predecessor, r) * gates[(size_t)row * RANK + r] : 0.0f;
    }
    // Lane i has candidates i and i + 32.
    int ids[PER_LANE];
    float score[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        ids[i] = 32 * i + lane < TOP_K ? best[4 + 32 * i + lane] : 0;
        score[i] = 32 * i + lane < TOP_K ? __int_as_float(best[4 + K + 32 * i + lane]) : -INF;
    }
#pragma unroll 8
    for (int b = 0; b < TOP_K; b++) {
        int id = ids[0];
#pragma unroll
        for (int i = 1; i < PER_LANE; i++) id = b / 32 == i ? ids[i] : id;
        const u8* successor = successors + (size_t)__shfl_sync(WARP_ALL, id, b % 32) * SUCCESSOR_BYTES;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < RANK_STEPS; i++) {
            const int r = 32 * i + lane;
            if (r < RANK) sum = fmaf(factor[i], decode_value<SUCCESSOR_TYPE>(successor, r), sum);
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (32 * i + lane == b) score[i] = nan_to_neg_inf(score[i] + sum);
    }
    float max = score[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; i++) max = fmaxf(max, score[i]);
    max = warp_max(max);
    float lse = max;
    if (max - max == 0.0f) {  // finite
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) sum += expf(score[i] - max);
        lse = max + logf(warp_sum(sum));
    }
    int rank[PER_LANE] = {};
#pragma unroll 4
    for (int b = 0; b < TOP_K; b++) {
        float other = score[0];
#pragma unroll
        for (int i = 1; i < PER_LANE; i++) other = b / 32 == i ? score[i] : other;
        other = __shfl_sync(WARP_ALL, other, b % 32);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) rank[i] += other > score[i] || (other == score[i] && b < 32 * i + lane);
    }
    int* list = lists + ((size_t)row * TOP_K + parent) * LIST_WORDS;
    if (lane == 0) list[0] = __float_as_int(lse);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (32 * i + lane >= TOP_K) continue;
        list[1 + rank[i]] = 32 * i + lane;
        list[1 + TOP_K + rank[i]] = __float_as_int(score[i] - lse);
    }
}
