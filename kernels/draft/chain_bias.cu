// Logits of one depth of a DSpark draft behind each of its states.
//
//   biased[state] += logits[row of the depth];   logits[row of the depth] = biased[state 0]
//
// The second is for those who compare whole rows along the likeliest chain.
//
// in   header Step     depth     logits f32 [logits rows][VOCAB]     tokens i32 [states]
//      biased f32 [states][VOCAB]: the bias of each state
// grid (ceil(VOCAB / 1024), trees) x 256
// smem none
// arch sm_80 and up     reference cpu::draft::conditional     test crates/cuda/tests/drafts.rs
#include "draft/chain_states.cuh"

extern "C" __global__ void __launch_bounds__(256)
    draft_chain_bias(const Step* step, int depth, float* logits, const int* tokens, float* biased) {
    pdl_launch();
    const int tree = blockIdx.y;
    const int row = chain_logits_row(step, tree, depth);
    pdl_wait();
    if (row < 0) return;
    int n = 0;
    while (n < CHAIN_STATES && tokens[tree * CHAIN_STATES + n] >= 0) n++;
    float* from = logits + (size_t)row * VOCAB;
    float* to = biased + (size_t)tree * CHAIN_STATES * VOCAB;
#if VOCAB % 4 == 0
    const int at = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (at >= VOCAB) return;
    const float4 logit = *(const float4*)(from + at);
#pragma unroll
    for (int s = 0; s < CHAIN_STATES; s++) {
        if (s >= n) break;
        float4 v = *(const float4*)(to + (size_t)s * VOCAB + at);
        v.x += logit.x, v.y += logit.y, v.z += logit.z, v.w += logit.w;
        *(float4*)(to + (size_t)s * VOCAB + at) = v;
        if (s == 0) *(float4*)(from + at) = v;
    }
#else
    for (int i = 0; i < 4; i++) {
        const int at = blockIdx.x * 1024 + i * 256 + threadIdx.x;
        if (at >= VOCAB) return;
        const float logit = from[at];
        for (int s = 0; s < n; s++) {
            const float v = to[(size_t)s * VOCAB + at] + logit;
            to[(size_t)s * VOCAB + at] = v;
            if (s == 0) from[at] = v;
        }
    }
#endif
}
