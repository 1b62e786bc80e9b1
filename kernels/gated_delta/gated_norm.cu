// Gated output norm of the delta rule, head by head, in the formats of the output projection.
//
//   y[row, h, :] = rms_norm(o[row, h, :]) * norm * silu(z[row, h, :]);   rms_norm(x) = x / sqrt(mean(x^2) + eps)
//
// in   header, see norm/source_rows.cuh     o [rows] rows of V_WIDTH f32, ld_o apart     z likewise, ld_z apart
//      norm [128]
// out  y [rows][V_WIDTH] in any format of norm/row_output.cuh, or (OUT_PANEL) as f16 panels of gemm/panel_layout.cuh
// grid (groups of 256 / 4, rows) x 128 threads: a warp per group of two heads, eight values per lane
// smem none
// arch sm_80 and up     reference cpu::reference::norm::gated_rms
// test gated_delta::delta_layer_*, gated_delta_chunk::*
#include "common/prelude.cuh"
#include "gated_delta/layout.cuh"
#include "norm/source_rows.cuh"
#include "norm/row_output.cuh"
#include "gemm/panel_layout.cuh"

KERNEL(128)
gated_delta_norm(const Header* header, const float* o, u32 ld_o, const float* z, u32 ld_z, const float* norm, float eps,
                 RowOutput out, char* panel, int rows_cap) {
    pdl_launch();
    const int row = blockIdx.y, group = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    float weight[8];
    load_row_group<HEAD_DIM * 2>(norm - lane / 16 * HEAD_DIM, 0, weight);
    const bool active = row < n_source_rows(header) && group < ROW_GROUPS;
    // The kernels that produce o trigger this launch only after their own pdl_wait, so z is complete here. It must not
    // be read through L1, which is not coherent.
    float y[8], gate[8] = {};
    const int at = group * 256 + lane * 8;
    if (active && at < WIDTH) {
        const float4* from = (const float4*)(z + (u64)row * ld_z + at);
        const float4 low = __ldcg(from), high = __ldcg(from + 1);
        gate[0] = silu(low.x), gate[1] = silu(low.y), gate[2] = silu(low.z), gate[3] = silu(low.w);
        gate[4] = silu(high.x), gate[5] = silu(high.y), gate[6] = silu(high.z), gate[7] = silu(high.w);
    }
    pdl_wait();
    if (!active) return;
    load_row_group<WIDTH>(o + (u64)row * ld_o, group, y);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(y[i], y[i], sum);
#pragma unroll
    for (int gap = 8; gap; gap >>= 1) sum += __shfl_xor_sync(WARP_ALL, sum, gap);
    const float scale = 1.0f / sqrtf(sum * (1.0f / HEAD_DIM) + eps);
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = y[i] * scale * weight[i] * gate[i];
    store_row_group(out, row, group, y);
#if OUT_PANEL
    const int chunk8 = group * 32 + lane;
    if (chunk8 < (V_WIDTH + 63) / 64 * 8)
        *(uint4*)(panel + panel_chunk(rows_cap, row, chunk8)) = make_uint4(
            panel_f16x2(y[0], y[1]), panel_f16x2(y[2], y[3]), panel_f16x2(y[4], y[5]), panel_f16x2(y[6], y[7]));
#endif
}
