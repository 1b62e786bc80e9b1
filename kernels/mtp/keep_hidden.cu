// Keeps hidden rows for the multi-token-prediction head: rows of the residual stream after a final norm.
//
//   pool[to(i)] = x[i] / sqrt(mean(x[i]^2) + eps) * norm
//   ROWS_OF 0: the nodes of a Step's trees, at the nodes' places
//   ROWS_OF 1: the rows of an MtpStep, behind those that their sequences drafted before
//   ROWS_OF 2: the last row of a PrefillChunk, at the place of the last committed position
//
// in   header: Step, MtpStep or PrefillChunk     x f32 [rows][HIDDEN]     norm f32 [HIDDEN]
// out  pool, see mtp/hidden_rows.cuh
// grid rows (1 for ROWS_OF 2) x 256 threads, the row in registers
// smem 32 bytes
// arch sm_80 and up     reference cpu::reference::norm::rms     test crates/cuda/tests/mtp_kernels.rs
#include "mtp/hidden_rows.cuh"

#if ROWS_OF == 0
typedef Step Header;
#elif ROWS_OF == 1
typedef MtpStep Header;
#else
typedef PrefillChunk Header;
#endif

extern "C" __global__ void __launch_bounds__(HIDDEN_THREADS)
    mtp_keep_hidden(const Header* header, const float* x, const float* __restrict__ norm, float eps, float* pool) {
    pdl_launch();
    __shared__ float warp_sums[HIDDEN_THREADS / 32];
#if ROWS_OF == 2
    const int row = header->rows - 1;
    const bool is_active = row >= 0;
    const size_t to = hidden_row_index(header->slot, -1);
#else
    const int row = blockIdx.x;
#if ROWS_OF == 0
    const Step& step = *header;
#else
    const Step& step = header->step;
#endif
    const bool is_active = row < step.rows;
    size_t to = 0;
    if (is_active) {
        const int tree = step.tree_of[row];
        int node = row - step.tree[tree].first;
#if ROWS_OF == 1
        node += header->earlier[tree];
#endif
        to = hidden_row_index(step.tree[tree].slot, node);
    }
#endif
    pdl_wait();
    if (!is_active) return;
    HiddenRow values;
    load_hidden_row(x + (size_t)row * HIDDEN, values);
    norm_hidden_row(values, norm, eps, warp_sums);
    store_hidden_row(pool + to * HIDDEN, values);
}
