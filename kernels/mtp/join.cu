// Input of the multi-token-prediction head: the token's embedding beside the hidden row of the position before it, each
// through its own norm.
//
//   y[i] = [rms(e[i]) * embedding_norm, rms(h) * hidden_norm]                rms(x) = x / sqrt(mean(x^2) + eps)
//   FROM_CHUNK 0: h = pool[before[i]]
//   FROM_CHUNK 1: h = rms(x[i - 1]) * final_norm, and pool[slot's row 0] for i = 0
//
// in   header: MtpStep, or PrefillChunk with FROM_CHUNK     e f32 [rows][HIDDEN]     pool, see mtp/hidden_rows.cuh
//      with FROM_CHUNK: x f32 [rows][HIDDEN], the residual stream, and final_norm     norms f32 [HIDDEN]
// out  y [rows][2 HIDDEN]: with PANELS f16 panels of gemm/panel_layout.cuh and f32 rows, each 0 if not wanted; else in
//      any format of norm/row_output.cuh
// grid rows x 256 threads, the row in registers
// smem 32 bytes
// arch sm_80 and up     reference cpu::reference::norm::rms     test crates/cuda/tests/mtp_kernels.rs
#include "mtp/hidden_rows.cuh"
#include "norm/row_output.cuh"
#include "gemm/panel_layout.cuh"

#if FROM_CHUNK
typedef PrefillChunk Header;
#else
typedef MtpStep Header;
#endif

struct JoinedOutput {
#if PANELS
    char* panels;
    float* y;
    u64 rows_cap;
#else
    RowOutput rows;
#endif
};

// Writes one half of a row, whose first column is `first`.
__device__ __forceinline__ void store_half(const JoinedOutput& out, int row, int first, const HiddenRow& half) {
#pragma unroll
    for (int i = 0; i < HIDDEN_CHUNKS_PER_THREAD; i++) {
        const int chunk = threadIdx.x + HIDDEN_THREADS * i, column = first + 8 * chunk;
        if (chunk >= HIDDEN_CHUNKS) continue;
        const float (&v)[8] = half.at[i];
#if PANELS
        if (out.panels) {
            *(uint4*)(out.panels + panel_chunk((int)out.rows_cap, row, column / 8)) = make_uint4(
                panel_f16x2(v[0], v[1]), panel_f16x2(v[2], v[3]), panel_f16x2(v[4], v[5]), panel_f16x2(v[6], v[7]));
        }
        if (out.y) {
            float4* to = (float4*)(out.y + (size_t)row * (2 * HIDDEN) + column);
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
#else
        store_row_8(out.rows, row, column, v);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(HIDDEN_THREADS)
    mtp_join(const Header* header, const float* embedding, const float* x, const float* pool,
             const float* __restrict__ final_norm, const float* __restrict__ embedding_norm,
             const float* __restrict__ hidden_norm, float eps, JoinedOutput out) {
    pdl_launch();
    __shared__ float warp_sums[HIDDEN_THREADS / 32];
    const int row = blockIdx.x;
#if FROM_CHUNK
    const bool is_active = row < header->rows;
    const bool from_pool = row == 0;
    const float* before =
        from_pool ? pool + hidden_row_index(header->slot, -1) * HIDDEN : x + (size_t)(row - 1) * HIDDEN;
#else
    const bool is_active = row < header->step.rows;
    const bool from_pool = true;
    const float* before = pool + (is_active ? (size_t)header->before[row] : 0) * HIDDEN;
#endif
    pdl_wait();
    if (!is_active) return;
    HiddenRow half;
    load_hidden_row(embedding + (size_t)row * HIDDEN, half);
    norm_hidden_row(half, embedding_norm, eps, warp_sums);
    store_half(out, row, 0, half);
    load_hidden_row(before, half);
    if (!from_pool) norm_hidden_row(half, final_norm, eps, warp_sums);
    norm_hidden_row(half, hidden_norm, eps, warp_sums);
    store_half(out, row, HIDDEN, half);
#if !PANELS && OUT_F16 && WIDTH % 256
    // The GEMM reads whole groups of 256 values.
    const int column = WIDTH + 8 * threadIdx.x;
    const float zeros[8] = {};
    if (column < ROW_GROUPS * 256) a16_store_8(out.rows.f16, N8_TILES, row, column, zeros);
#endif
}
