// Scale and cap of a draft's logits, in place.
//
//   x = scale * x;   CAPPED: x = cap * tanh(x / cap)
//
// in   header Step     logits f32 [logits rows][VOCAB]
// grid (ceil(VOCAB / 1024), rows) x 256
// smem none
// arch sm_80 and up     reference contract::draft, the formula of logits     test crates/cuda/tests/drafts.rs
#include "common/prelude.cuh"
#include "common/step.cuh"

extern "C" __global__ void __launch_bounds__(256)
    draft_transform_logits(const Step* step, float* logits, float scale, float cap) {
    pdl_launch();
    const int row = blockIdx.y;
    const bool is_active = row < step->n_logits_rows;
    pdl_wait();
    if (!is_active) return;
    float* values = logits + (size_t)row * VOCAB;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = blockIdx.x * 1024 + i * 256 + threadIdx.x;
        if (at >= VOCAB) continue;
        const float x = scale * values[at];
#if CAPPED
        values[at] = cap * tanhf(x / cap);
#else
        values[at] = x;
#endif
    }
}
