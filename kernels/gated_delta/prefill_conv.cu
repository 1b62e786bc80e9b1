// Gated delta rule, chunked prefill: causal convolution of consecutive positions, with silu, q/k norms and gates.
//
//   y[row, ch] = silu(sum_j weight[ch, j] * x[row - 3 + j, ch]), rows before the first from the window;
//   q and k heads: y / sqrt(sum(y^2) + 1e-6), q also / sqrt(128);
//   g = a * softplus(alpha + dt), beta = sigmoid(beta).
//
// in   x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS] (slid by prefill_chunk_scan), weight
//      [CHANNELS][4], a, dt [V_HEADS]
// out  mixed_qkv [rows][CHANNELS] words: q and k heads as 128 bf16 and the 128 bf16 of their remainders, v heads as
//      f32; gates [rows][2][V_HEADS]
// grid (heads / 8 + 1, rows / 16) x 256 threads: a warp takes a head through 16 rows, the last column computes the
//      gates
// smem none
// arch sm_80 and up     reference cpu::reference::conv::sequence, norm::l2     test gated_delta_chunk::*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/conv.cuh"
#include "gated_delta/chunk_layout.cuh"

#define ROWS 16
#define BATCH 8

extern "C" __global__ void __launch_bounds__(256)
    gated_delta_conv_chunk(const PrefillChunk* chunk, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha,
                           const float* beta, u32 ld_beta, const float* window, u64 window_stride, const float* weight,
                           const float* a, const float* dt, float* mixed_qkv, float* gates) {
    const int lane = threadIdx.x % 32;
    const int head = blockIdx.x * 8 + threadIdx.x / 32;
    const int first = blockIdx.y * ROWS;
    const bool gate_block = blockIdx.x == gridDim.x - 1;
    const int channel = head * HEAD_DIM + 4 * lane;
    const bool active = !gate_block && head < 2 * K_HEADS + V_HEADS;
    Weights w;
    if (active) w = load_weights(weight, channel);
    pdl_wait();
    pdl_launch();
    const int last = min(chunk->rows, first + ROWS);
    if (gate_block) {
        for (int i = threadIdx.x; i < (last - first) * V_HEADS; i += 256) {
            const u64 row = first + i / V_HEADS;
            const int h = i % V_HEADS;
            gates[row * 2 * V_HEADS + h] = log_decay(alpha[row * ld_alpha + h], a[h], dt[h]);
            gates[row * 2 * V_HEADS + V_HEADS + h] = 1.0f / (1.0f + expf(-beta[row * ld_beta + h]));
        }
        return;
    }
    if (!active || first >= last) return;
    const float* before = slot_ptr(window, chunk->slot, window_stride) + channel;
    float4 past[TAPS - 1];
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++) {
        const int row = first + i - (TAPS - 1);
        past[i] = *(const float4*)(row >= 0 ? x + (u64)row * ld_x + channel : before + (row + TAPS - 1) * CHANNELS);
    }
    // A batch of rows is loaded before its first row is stored, because the stores could alias later loads.
    for (int row = first; row < last; row += BATCH) {
        float4 now[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) now[i] = *(const float4*)(x + (u64)min(row + i, last - 1) * ld_x + channel);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (row + i >= last) return;
            const float4 y = normalize_head(convolve(w, past[0], past[1], past[2], now[i]), head);
            past[0] = past[1], past[1] = past[2], past[2] = now[i];
            float* to = mixed_qkv + (u64)(row + i) * CHANNELS + head * HEAD_DIM;
            if (head < 2 * K_HEADS) {
                uint2 high, low;
                split_bf16(y.x, y.y, high.x, low.x);
                split_bf16(y.z, y.w, high.y, low.y);
                ((uint2*)to)[lane] = high;
                ((uint2*)to)[32 + lane] = low;
            } else {
                ((float4*)to)[lane] = y;
            }
        }
    }
}
