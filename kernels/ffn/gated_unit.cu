// Gated unit of the feed-forward network: y = f(gate) * up, in the formats that the down projection reads.
//
// f is silu, or gelu by its tanh formula with GELU.
//
// in   header (norm/source_rows.cuh)     gate, up: rows of WIDTH f32, STRIDE floats apart
// out  y [rows][WIDTH] (norm/row_output.cuh)
// grid (groups of 256 / 4, rows) x 128, one warp per group
// arch sm_80 and up     references cpu::reference::activation::{swiglu, geglu}     test crates/cuda/tests/norm.rs
#include "common/prelude.cuh"
#include "ffn/gate_function.cuh"
#include "norm/source_rows.cuh"
#include "norm/row_output.cuh"

extern "C" __global__ void __launch_bounds__(128)
    gated_unit_rows(const Header* header, const float* gate, const float* up, RowOutput out) {
    pdl_launch();
    const int row = blockIdx.y, group = blockIdx.x * 4 + threadIdx.x / 32;
    const bool is_active = row < n_source_rows(header) && group < ROW_GROUPS;
    pdl_wait();
    if (!is_active) return;
    float g[8], u[8];
    load_row_group<WIDTH>(gate + (size_t)row * STRIDE, group, g);
    load_row_group<WIDTH>(up + (size_t)row * STRIDE, group, u);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = gate_function(g[i]) * u[i];
    store_row_group(out, row, group, g);
}
