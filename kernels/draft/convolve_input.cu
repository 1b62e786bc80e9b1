// Input of a draft's sublayer: the normed rows through its dynamic convolution, in the formats of the next GEMM.
//
//   y[t, c] = sum over tap of (base[0, tap, c] + dynamic[t, 0, tap, c / GROUP]) * in[t - tap, c]
//
// in   header Step     in f32 [rows][WIDTH]     base f32 [2][TAPS][WIDTH]
//      dynamic f32 [rows][2][TAPS][WIDTH / GROUP]
// out  y (norm/row_output.cuh)
// grid (groups of 256 / 4, rows) x 128, one warp per group
// smem none
// arch sm_80 and up     reference cpu::reference::draft::convolve_row     test crates/cuda/tests/drafts.rs
#include "draft/block_conv.cuh"
#include "norm/row_output.cuh"

extern "C" __global__ void __launch_bounds__(128)
    draft_convolve_input(const Step* step, const float* in, BlockConv conv, RowOutput out) {
    pdl_launch();
    const int row = blockIdx.y, group = blockIdx.x * 4 + threadIdx.x / 32;
    const bool is_active = row < step->rows && group < ROW_GROUPS;
    const int first = is_active ? step->tree[step->tree_of[row]].first : 0;
    const int column = group * 256 + threadIdx.x % 32 * 8;
    ConvBase base;
    if (column < WIDTH) load_base<0>(conv, column, base);
    pdl_wait();
    if (!is_active) return;
    float v[8] = {};
    if (column < WIDTH) convolve_8<0>(conv, base, in, row, first, column, v);
    store_row_group(out, row, group, v);
}
