// Gathers the pending features (captured hidden states) of accepted paths, in the formats that the draft's GEMM reads.
//
//   y[i] = x[path.slot][path.node[i]]        paths in order, i counted through them
//
// in   commit     x f32 [slots][FEATURE_ROWS][WIDTH]
// out  y (norm/row_output.cuh)
// grid (groups of 256 / 4, rows) x 128, one warp per group
// arch sm_80 and up     reference a copy     test crates/cuda/tests/rows.rs
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "norm/row_output.cuh"

extern "C" __global__ void __launch_bounds__(128)
    draft_gather_path_rows(const Commit* commit, const float* x, RowOutput out) {
    pdl_launch();
    const int group = blockIdx.x * 4 + threadIdx.x / 32;
    pdl_wait();
    if (group >= ROW_GROUPS) return;
    int row = blockIdx.y;
    for (int p = 0; p < commit->paths; p++) {
        const Path& path = commit->path[p];
        if (row < path.length) {
            float v[8];
            load_row_group<WIDTH>(x + ((size_t)path.slot * FEATURE_ROWS + path.node[row]) * WIDTH, group, v);
            store_row_group(out, blockIdx.y, group, v);
            return;
        }
        row -= path.length;
    }
}
