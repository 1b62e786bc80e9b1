// The gated unit of the feed-forward, in the forms of the down projection.
//
//   y = silu(gate) * up
//
// in   header, see norm/source.cuh     gate, up [rows] rows of WIDTH f32, STRIDE floats apart
// out  y [rows][WIDTH] in any of the forms of norm/emit.cuh
// grid (groups of 256 / 4, rows) x 128, one warp per group
// arch sm_80 and up     reference cpu::reference::activation::swiglu     test norm::swiglu_equals_the_reference
// hot
#include "common/prelude.cuh"
#include "norm/source.cuh"
#include "norm/emit.cuh"

extern "C" __global__ void __launch_bounds__(128) ffn_swiglu(
    const Header* header, const float* gate, const float* up, Out out) {
    pdl_launch();
    const int row = blockIdx.y, group = blockIdx.x * 4 + threadIdx.x / 32;
    const bool real = row < source_rows(header) && group < OUT_GROUPS;
    pdl_wait();
    if (!real) return;
    float g[8], u[8];
    fetch<WIDTH>(gate + (size_t)row * STRIDE, group, g);
    fetch<WIDTH>(up + (size_t)row * STRIDE, group, u);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = silu(g[i]) * u[i];
    emit(out, row, group, g);
}
