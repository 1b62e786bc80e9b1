// Prefill attention in f32 throughout: causal, for caches stored as F32.
//
//   out[i][h] = sum_j softmax_j(scale * q[i][h] · k[j][h / GROUP]) v[j][h / GROUP] (* sigmoid(gate[i][h])),  j <=
//   committed + i, and j > committed + i - WINDOW with a window
//
// in   q       f32 [rows][q_stride], head h at h * HEAD_STRIDE, its gate (HEAD_STRIDE = 2 * HEAD_DIM) follows it
//      cache   K and V including the chunk's own, in any format of kv_cache.cuh; queries are rotated like K
//      kept    BLOCK_SPARSE: j only in the key blocks of these masks (block_sparse.cuh); committed is a multiple of 128
// out  panels  f16, rows_cap rows, K = HEADS * HEAD_DIM; 0 if not wanted
//      y       f32 [rows][HEADS * HEAD_DIM]; 0 if not wanted
// grid (HEADS, 16-row tiles of the largest chunk) x 128 threads; a warp has four rows. Keys are taken one by one in
//      order of position, so a row's bits do not depend on its neighbors. A key whose score is NaN has zero weight.
// smem none
// define HEAD_DIM (a multiple of 32), HEADS, KV_HEADS, GATED (0 or 1), K_FORMAT, V_FORMAT, BLOCK_SPARSE (0 or
//      1; 0 if absent), WINDOW (keys that a row sees; 0, or absent, for all)
// arch sm_80 and up     ref cpu::reference::attention::attend
// test prefill_attention::prefill_attention_matches_reference, cpu_reference::scoring::scores_match_the_cpu_reference
#include "attention/block_sparse.cuh"
#include "attention/kv_cache.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gemm/panel_layout.cuh"

#define HEAD_STRIDE (GATED ? 2 * HEAD_DIM : HEAD_DIM)
#define PER_LANE (HEAD_DIM / 32)
#define ROWS 4
#ifndef WINDOW
#define WINDOW 0
#endif
#define LOWEST_SCORE (-1e30f)

extern "C" __global__ void __launch_bounds__(128)
    attn_prefill_f32(const float* q, int q_stride, const PrefillChunk* chunk, PageTable pages, Plane keys, Plane values,
                     float scale, char* panels, int rows_cap, float* y KEPT_BLOCKS_PARAMETERS) {
    const int rows = chunk->rows, head = blockIdx.x, lane = threadIdx.x % 32;
    const int first = blockIdx.y * 16 + threadIdx.x / 32 * ROWS, last = min(first + ROWS, rows) - 1;
    if (first >= rows) {
        return;
    }
    const int slot = chunk->slot, committed = chunk->committed, kv_head = head / (HEADS / KV_HEADS);
    float query[ROWS][PER_LANE], sums[ROWS][PER_LANE] = {}, row_max[ROWS], row_sum[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float* from = q + (u64)min(first + r, last) * q_stride + head * HEAD_STRIDE;
        row_max[r] = LOWEST_SCORE;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            query[r][i] = from[i * 32 + lane];
        }
    }
    const KeptBlocks kept = KEPT_BLOCKS(HEADS, head, first);
    const int end = committed + last + 1;
    const int begin = WINDOW ? max(committed + first - WINDOW + 1, 0) : kept.next(0, end);
    for (int position = begin; position < end; position = kept.next(position + 1, end)) {
        const size_t row = kv_row(pages, slot, position, KV_HEADS, kv_head);
        float key[PER_LANE], value[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            key[i] = kv_load<K_FORMAT, HEAD_DIM>(keys, row, i * 32 + lane);
            value[i] = kv_load<V_FORMAT, HEAD_DIM>(values, row, i * 32 + lane);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float score = 0.0f;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                score = fmaf(query[r][i], key[i], score);
            }
            score = fmaxf(warp_sum(score) * scale, -INF);  // NaN becomes -inf
            const int query = committed + first + r;
            if (position > query || (WINDOW && position <= query - WINDOW) || score == -INF) {
                continue;
            }
            const float new_max = fmaxf(row_max[r], score), rescale = expf(row_max[r] - new_max),
                        p = expf(score - new_max);
            row_max[r] = new_max;
            row_sum[r] = row_sum[r] * rescale + p;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                sums[r][i] = fmaf(sums[r][i], rescale, p * value[i]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int out_row = first + r;
        if (out_row > last) {
            break;
        }
        if (kv_rotated(V_FORMAT)) {
            hadamard_head<true>(sums[r]);
        }
        const float* gate = q + (u64)out_row * q_stride + head * HEAD_STRIDE + HEAD_DIM;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            float v = row_sum[r] > 0.0f ? sums[r][i] / row_sum[r] : 0.0f;
            if (GATED) {
                v /= 1.0f + expf(-gate[i * 32 + lane]);
            }
            const int column = head * HEAD_DIM + i * 32 + lane;
            if (panels) {
                *(u16*)(panels + panel_chunk(rows_cap, out_row, column / 8) + column % 8 * 2) = (u16)panel_f16x2(v, v);
            }
            if (y) {
                y[(u64)out_row * (HEADS * HEAD_DIM) + column] = v;
            }
        }
    }
}
