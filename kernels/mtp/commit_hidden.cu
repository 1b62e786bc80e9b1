// Makes the hidden row of each committed path's last node the row of the last committed position.
//
//   pool[slot's row 0] = pool[slot's row 1 + last[tree]]
//
// in   header MtpStep, whose trees are the committed paths
// out  pool, see mtp/hidden_rows.cuh
// grid (ceil(HIDDEN / 1024), STEP_TREES) x 256, four values per thread
// smem none
// arch sm_80 and up     reference a copy     test crates/cuda/tests/mtp_kernels.rs
#include "mtp/hidden_rows.cuh"

extern "C" __global__ void __launch_bounds__(HIDDEN_THREADS) mtp_commit_hidden(const MtpStep* header, float* pool) {
    pdl_launch();
    const int tree = blockIdx.y, at = (blockIdx.x * HIDDEN_THREADS + threadIdx.x) * 4;
    const bool is_active = tree < header->step.trees && at < HIDDEN;
    size_t from = 0, to = 0;
    if (is_active) {
        const int slot = header->step.tree[tree].slot;
        from = hidden_row_index(slot, header->last[tree]), to = hidden_row_index(slot, -1);
    }
    pdl_wait();
    if (!is_active) return;
    *(float4*)(pool + to * HIDDEN + at) = *(const float4*)(pool + from * HIDDEN + at);
}
