// From tail logits to chunk scores.
//
//   score_tail_softmax  stats[t][h] = {max_j, 1 / sum_j exp(logits[t][h][j] - max)}, {0, 0} if no logit is a number
//   score_raise         best[t][j]  = max(best[t][j], max_h softmax_j(logits[t][h])); a NaN has no weight
//   score_means         means[j]    = mean over t of best[t][j]
//   score_chunks        scores[c]   = mean over j of chunk c of the mean of means[j - reach ..= j + reach], shorter at
//                                     the ends of the prompt
//
// in   logits f32 [tail][HEADS][tokens]
// io   best   f32 [tail][tokens], zero before the first layer
// mid  stats  f32 [tail][HEADS][2]      means f64 [tokens]
// out  scores f32 [ceil(tokens / chunk)]
// grid softmax (HEADS, most tail queries) x 512 threads; raise (ceil(most tokens / 256), most tail queries), means and
//      chunks ceil(most tokens / 256), all x 256 threads
// smem static: sums of warps
// define HEADS
// arch sm_80 and up     ref cpu::reference::score::{raise_to_softmax, chunk_scores}
// test cpu_reference::scoring::scores_match_the_cpu_reference
#include "common/prelude.cuh"
#include "score/call.cuh"

#define SOFTMAX_WARPS 16

extern "C" __global__ void __launch_bounds__(32 * SOFTMAX_WARPS)
    score_tail_softmax(const ScoreCall* call, const float* logits, float* stats) {
    __shared__ float warp_results[SOFTMAX_WARPS];
    __shared__ double warp_sums[SOFTMAX_WARPS];
    const int head = blockIdx.x, t = blockIdx.y, tokens = call->tokens;
    if (t >= call->tail) {
        return;
    }
    const u64 line = (u64)t * HEADS + head;
    const float* from = logits + line * tokens;
    float max = -INF;
    for (int j = threadIdx.x; j < tokens; j += 32 * SOFTMAX_WARPS) {
        max = fmaxf(max, from[j]);
    }
    max = block_max<SOFTMAX_WARPS>(max, warp_results);
    // In f64, since a long prompt sums many small numbers.
    double sum = 0.0;
    for (int j = threadIdx.x; j < tokens; j += 32 * SOFTMAX_WARPS) {
        const float logit = from[j];
        sum += logit == logit ? expf(logit - max) : 0.0f;
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
        sum += __shfl_xor_sync(WARP_ALL, sum, offset);
    }
    if (threadIdx.x % 32 == 0) {
        warp_sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double all = 0.0;
        for (int i = 0; i < SOFTMAX_WARPS; i++) {
            all += warp_sums[i];
        }
        const bool has_weight = max > -INF;
        stats[2 * line] = has_weight ? max : 0.0f;
        stats[2 * line + 1] = has_weight ? (float)(1.0 / all) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    score_raise(const ScoreCall* call, const float* logits, const float* stats, float* best) {
    const int j = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y, tokens = call->tokens;
    if (t >= call->tail || j >= tokens) {
        return;
    }
    float* to = best + (u64)t * tokens + j;
    float weight = *to;
#pragma unroll 4
    for (int head = 0; head < HEADS; head++) {
        const u64 line = (u64)t * HEADS + head;
        const float logit = logits[line * tokens + j];
        if (logit == logit) {
            weight = fmaxf(weight, expf(logit - stats[2 * line]) * stats[2 * line + 1]);
        }
    }
    *to = weight;
}

extern "C" __global__ void __launch_bounds__(256) score_means(const ScoreCall* call, const float* best, double* means) {
    const int j = blockIdx.x * 256 + threadIdx.x, tokens = call->tokens;
    if (j >= tokens) {
        return;
    }
    double sum = 0.0;
    for (int t = 0; t < call->tail; t++) {
        sum += best[(u64)t * tokens + j];
    }
    means[j] = sum / call->tail;
}

extern "C" __global__ void __launch_bounds__(256)
    score_chunks(const ScoreCall* call, const double* means, float* scores) {
    const int chunk = blockIdx.x * 256 + threadIdx.x, tokens = call->tokens;
    const i64 first = (i64)chunk * call->chunk;
    if (first >= tokens) {
        return;
    }
    const int end = (int)min(first + call->chunk, (i64)tokens);
    double sum = 0.0;
    for (int j = (int)first; j < end; j++) {
        const int low = max(j - call->reach, 0), high = min(j + call->reach + 1, tokens);
        double near = 0.0;
        for (int i = low; i < high; i++) {
            near += means[i];
        }
        sum += near / (high - low);
    }
    scores[chunk] = (float)(sum / (end - (int)first));
}
