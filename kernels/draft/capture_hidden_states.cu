// Hidden-state capture: copies the residual stream after a layer beside the captures of other layers, for the draft.
//
//   out[out_row(row)][OFFSET + i] = x[row][i]
//   out_row(row) = row; with TO_FEATURE_POOL: feature row of the row's tree + its node
//
// in   header: rows at int 0 (with TO_FEATURE_POOL a Step);  x f32 [rows][WIDTH]          out  rows of STRIDE f32
// grid (ceil(WIDTH / 1024), rows) x 256, four values per thread; WIDTH, OFFSET and STRIDE are multiples of 4
// arch sm_80 and up     reference a copy     test crates/cuda/tests/rows.rs
#include "common/prelude.cuh"
#include "common/step.cuh"

extern "C" __global__ void __launch_bounds__(256) capture_hidden_states(const int* header, const float* x, float* out) {
    pdl_launch();
    const int row = blockIdx.y, at = (blockIdx.x * 256 + threadIdx.x) * 4;
    const bool is_active = row < header[0] && at < WIDTH;
    size_t out_row = row;
#if TO_FEATURE_POOL
    const Step* step = (const Step*)header;
    if (is_active) {
        const int tree = step->tree_of[row];
        out_row = step->feature_row[tree] + row - step->tree[tree].first;
    }
#endif
    pdl_wait();
    if (!is_active) return;
    *(float4*)(out + out_row * STRIDE + OFFSET + at) = *(const float4*)(x + (size_t)row * WIDTH + at);
}
