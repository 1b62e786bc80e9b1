// The states of one depth of a DSpark draft: the likeliest tokens that the depth before reaches, what their bias is
// computed from, and how sure the draft is behind them.
//
//   reached (token, weight): weight[s] + logit - lse for each candidate of each state s of the depth before
//   states                   the first candidate of state 0, then the likeliest others; each token once, of equals the
//                            first; at most CHAIN_STATES and at most step.candidates
//   row[state]               previous[token]                                in the formats of the GEMM
//   confidence[state]        sigmoid(weight . [y; previous[token]] + bias)      with CONFIDENCE
//
// in   header Step     depth     reduced [states][4 + 3 K] words of logits/top_k, of the depth before
//      before: tokens and weights of the states of the depth before
//      ids i32: the target's ids of the draft's, or null
//      previous: [vocab] rows of PREVIOUS_BYTES bytes in format PREVIOUS_TYPE (the GGUF id)
//      y f32 [logits rows][HIDDEN]     confidence_weight f32 [HIDDEN + WIDTH], confidence_bias f32 [1] or null
// out  tokens i32, weights f64 and confidences f32 [states]     rows (norm/row_output.cuh; WIDTH is the rank)
// grid trees x 256, one warp per state
// smem 128 bytes
// arch sm_80 and up     reference cpu::draft::conditional     test crates/cuda/tests/drafts.rs
#include "draft/chain_states.cuh"
#include "embedding/decode_value.cuh"
#include "norm/row_output.cuh"

#define REDUCED_WORDS (4 + 3 * K)
#define REACHED (CHAIN_STATES * K)
#define PER_LANE ((REACHED + 31) / 32)

struct States {
    int* token;
    double* weight;
};

// The best of a warp's candidates: the heaviest, of equals the first. Index -1 for none.
struct Candidate {
    double weight;
    int index, token;
};

__device__ __forceinline__ Candidate warp_best(Candidate best) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
        Candidate other;
        other.weight = __shfl_xor_sync(WARP_ALL, best.weight, offset);
        other.index = __shfl_xor_sync(WARP_ALL, best.index, offset);
        other.token = __shfl_xor_sync(WARP_ALL, best.token, offset);
        const bool is_better =
            best.index < 0 || other.weight > best.weight || (other.weight == best.weight && other.index < best.index);
        if (other.index >= 0 && is_better) best = other;
    }
    return best;
}

// By one warp: the states behind those of the depth before.
__device__ void select_states(const int* reduced, States before, const int* ids, int tree, int candidates, int* token,
                              double* weight) {
    const int lane = threadIdx.x % 32, first = tree * CHAIN_STATES;
    int reached[PER_LANE];
    double weights[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int index = 32 * i + lane, state = first + index / K, rank = index % K;
        reached[i] = -1;
        if (index >= REACHED || before.token[state] < 0) continue;
        const int* best = reduced + (size_t)state * REDUCED_WORDS;
        if (rank >= min(best[2], candidates)) continue;
        weights[i] = before.weight[state] + (double)(__int_as_float(best[4 + K + rank]) - __int_as_float(best[1]));
        const int id = best[4 + rank];
        if (weights[i] - weights[i] == 0.0) reached[i] = ids ? ids[id] : id;
    }
    const int head = reduced[(size_t)first * REDUCED_WORDS + 4];
    const int chain = ids ? ids[head] : head;
    int n = 0;
    // First the greedy chain, then the others.
#pragma unroll 1
    for (int step = 0; step <= CHAIN_STATES && n < min(CHAIN_STATES, candidates); step++) {
        Candidate best = {0.0, -1, -1};
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const bool counts = reached[i] >= 0 && (step > 0 || reached[i] == chain);
            if (counts && (best.index < 0 || weights[i] > best.weight)) best = {weights[i], 32 * i + lane, reached[i]};
        }
        best = warp_best(best);
        if (best.index < 0) continue;
        if (lane == 0) token[n] = best.token, weight[n] = best.weight;
        n++;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (reached[i] == best.token) reached[i] = -1;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    draft_chain_select(const Step* step, int depth, const int* reduced, States before, States states,
                       const int* __restrict__ ids, const u8* __restrict__ previous, const float* y,
                       const float* __restrict__ confidence_weight, const float* __restrict__ confidence_bias,
                       float* confidences, RowOutput rows) {
    pdl_launch();
    __shared__ int token[CHAIN_STATES];
    __shared__ double weight[CHAIN_STATES];
    __shared__ float warp_sums[8];
    const int tree = blockIdx.x, warp = warp_index(), lane = threadIdx.x % 32;
    const int logits_row = chain_logits_row(step, tree, depth);
    if (threadIdx.x < CHAIN_STATES) {
        token[threadIdx.x] =
            depth == 0 && threadIdx.x == 0 && logits_row >= 0 ? step->token[step->tree[tree].first] : -1;
        weight[threadIdx.x] = 0.0;
    }
    __syncthreads();
    pdl_wait();
    if (depth > 0 && logits_row >= 0 && warp == 0)
        select_states(reduced, before, ids, tree, step->candidates, token, weight);
#if CONFIDENCE
    float of_hidden = 0.0f;
    if (logits_row >= 0) {
        for (int i = threadIdx.x; i < HIDDEN; i += 256)
            of_hidden = fmaf(confidence_weight[i], y[(size_t)logits_row * HIDDEN + i], of_hidden);
    }
    of_hidden = block_sum<8>(of_hidden, warp_sums);
#else
    __syncthreads();
#endif
    const int state = tree * CHAIN_STATES + warp, own = token[warp];
    if (lane == 0) states.token[state] = own, states.weight[state] = weight[warp];
    // A state that is none gets some token's row: rows of equal logits would be the slowest to reduce.
    const u8* from = previous + (size_t)max(own, 0) * PREVIOUS_BYTES;
    float of_token = 0.0f;
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; group++) {
        const int column = group * 256 + lane * 8;
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = column + j < WIDTH ? decode_value<PREVIOUS_TYPE>(from, column + j) : 0.0f;
#if CONFIDENCE
            if (column + j < WIDTH) of_token = fmaf(confidence_weight[HIDDEN + column + j], v[j], of_token);
#endif
        }
        store_row_group(rows, state, group, v);
    }
#if CONFIDENCE
    of_token = warp_sum(of_token);
    const float bias = confidence_bias ? confidence_bias[0] : 0.0f;
    if (lane == 0) confidences[state] = sigmoid(of_hidden + of_token + bias);
#endif
}
