// The convolution before the delta rule for the nodes of trees, with everything that is done to its result.
//
//   y[row, ch] = silu(sum_j weight[ch, j] * input_j[ch]), inputs being the row itself, its parent, and so on, then
//   the window of its sequence; q and k heads: y / sqrt(sum(y^2) + 1e-6), q also / sqrt(128);
//   g = a * softplus(alpha + dt), beta = sigmoid(beta).
//
// in:  x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [NV]
// out: mixed [rows][CHANNELS], gates [rows][2][NV]; into the factors of each node: k, g and x
// grid (heads / 4 + 1, rows), 128 threads: a warp per head, the last block of a row does the gates
// shared memory: none. arch: sm_80. reference: cpu::reference::conv::tree, norm::l2, activation; test: tree_*, verify_*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"
#include "ssm/conv.cuh"

extern "C" __global__ void __launch_bounds__(128)
conv_tree(const Step* step, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha, const float* beta, u32 ld_beta,
          const float* window, u64 window_stride, const float* weight, const float* a, const float* dt, float* factors,
          u64 factor_stride, float* mixed, float* gates) {
    pdl_launch();
    const int row = blockIdx.y;
    const int lane = threadIdx.x % 32;
    const bool gate_block = blockIdx.x == gridDim.x - 1;
    const int head = blockIdx.x * 4 + threadIdx.x / 32;
    const int channel = head * DIM + 4 * lane;
    const bool active = !gate_block && head < 2 * NK + NV;
    Weights w;
    if (active) w = load_weights(weight, channel);
    pdl_wait();
    const int tree = step->tree_of[row];
    if (tree < 0) return;
    const Tree t = step->tree[tree];
    float* node = of_slot(factors, t.slot, factor_stride) + (u64)(row - t.first) * NODE_FLOATS;
    if (gate_block) {
        for (int h = threadIdx.x; h < NV; h += 128) {
            float g = gate_g(alpha[(u64)row * ld_alpha + h], a[h], dt[h]);
            gates[(u64)row * 2 * NV + h] = g;
            gates[(u64)row * 2 * NV + NV + h] = 1.0f / (1.0f + expf(-beta[(u64)row * ld_beta + h]));
            node[NODE_G + h] = g;
        }
        return;
    }
    if (!active) return;
    const float* before = of_slot(window, t.slot, window_stride) + channel;
    float4 in[TAPS];
    int at = row;
    int left = TAPS - 1;
#pragma unroll
    for (int tap = TAPS - 1; tap >= 0; tap--) {
        const float* from;
        if (at >= 0) {
            from = x + (u64)at * ld_x + channel;
            at = step->parent[at];
        } else {
            from = before + --left * CHANNELS;
        }
        in[tap] = *(const float4*)from;
    }
    *(float4*)(node + NODE_X + channel) = in[TAPS - 1];
    float4 y = normalise(convolve(w, in[0], in[1], in[2], in[3]), head);
    *(float4*)(mixed + (u64)row * CHANNELS + channel) = y;
    if (head >= NK && head < 2 * NK) *(float4*)(node + channel - KEYS) = y;
}
