// Gated delta rule, decode of one row, fused: convolution, gates, recurrence and output norm of a layer in one launch.
//
//   y, g, beta as in conv.cuh;   u, o as in recurrence.cuh;   out = rms_norm(o) * norm * silu(z)
//
// Same bits as decode_recurrent.cu + gated_norm.cu for a tree of one node. The state is only read, and loaded before
// pdl_wait, because a step writes neither states nor windows.
//
// in   x [CHANNELS], alpha, beta [V_HEADS], z [V_WIDTH], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt
//      [V_HEADS], state [slot][V_HEADS][128 v][128 k], norm [128]
// out  [V_WIDTH] in any format of norm/row_output.cuh that a lane writes alone; k, u, g and x of the node in the
//      factors
// grid V_HEADS x 256 threads: a block has one head, a warp 16 of its value columns in four passes, a lane 16 of k in
//      each
// smem 2.1 KB
// arch sm_80 and up     reference cpu::reference::{conv, delta}, norm::gated_rms
// test gated_delta_row::fused_delta_row_*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/recurrence.cuh"
#include "gated_delta/conv.cuh"
#include "norm/row_output.cuh"

#define WARPS 8
#define COLUMN_PASSES (HEAD_DIM / WARPS / 4)  // passes of four columns per warp

// Reduces 8 values over the eight parts of a column, each in the order 4, 2, 1 parts apart. A lane ends up with value
// `lane_part()`; at each distance it gives away the half that it does not keep.
__device__ __forceinline__ float reduce_parts(const float (&x)[2 * COLUMN_PASSES]) {
    const int lane = threadIdx.x;
    float four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float kept_half = lane & 16 ? x[4 + i] : x[i], given_half = lane & 16 ? x[i] : x[4 + i];
        four[i] = kept_half + __shfl_xor_sync(WARP_ALL, given_half, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float kept_half = lane & 8 ? four[2 + i] : four[i], given_half = lane & 8 ? four[i] : four[2 + i];
        two[i] = kept_half + __shfl_xor_sync(WARP_ALL, given_half, 8);
    }
    const float kept_half = lane & 4 ? two[1] : two[0], given_half = lane & 4 ? two[0] : two[1];
    return kept_half + __shfl_xor_sync(WARP_ALL, given_half, 4);
}

KERNEL(WARPS * 32)
gated_delta_row_fused(const Step* step, const float* x, const float* alpha, const float* beta, const float* window,
                      u64 window_stride, const float* weight, const float* a, const float* dt, const float* state,
                      u64 state_stride, float* factors, u64 factor_stride, const float* z, const float* norm, float eps,
                      RowOutput out) {
    __shared__ __align__(16) float qkv[3][HEAD_DIM];  // q, k, v
    __shared__ __align__(16) float o_row[HEAD_DIM];   // o
    __shared__ float gates[2];                        // decay, beta
    pdl_launch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x, key = key_head(head);
    if (step->trees < 1) {
        pdl_wait();
        return;
    }
    const int slot = step->tree[0].slot;
    const float* s0 = slot_ptr(state, slot, state_stride) +
                      ((u64)head * HEAD_DIM + warp * 4 * COLUMN_PASSES + lane_column()) * HEAD_DIM + 4 * lane_part();
    float4 s[COLUMN_PASSES][4];
#pragma unroll
    for (int t = 0; t < COLUMN_PASSES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[t][i] = load_state_once(s0 + t * 4 * HEAD_DIM + 32 * i);
    }
    // Warps 0, 1, 2 convolve q, k, v; warp 3 computes the gates; warp 4 the output norm.
    const int conv_head = warp == 0 ? key : warp == 1 ? K_HEADS + key : 2 * K_HEADS + head;
    const int channel = conv_head * HEAD_DIM + 4 * lane;
    Weights w;
    float4 past[TAPS - 1];
    float gate_a = 0.0f, gate_dt = 0.0f, scale[8];
    if (warp < 3) {
        const float* before = slot_ptr(window, slot, window_stride) + channel;
        w = load_weights(weight, channel);
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) past[i] = *(const float4*)(before + i * CHANNELS);
    } else if (warp == 3) {
        gate_a = a[head], gate_dt = dt[head];
    } else if (warp == 4) {
        load_row_group<HEAD_DIM * 2>(norm - lane / 16 * HEAD_DIM, 0, scale);
    }
    float* node = slot_ptr(factors, slot, factor_stride);
#if GROUPED
    const bool writes_key_factors = head % (V_HEADS / K_HEADS) == 0;
#else
    const bool writes_key_factors = head < K_HEADS;
#endif
    pdl_wait();
    float gate[8];  // silu(z)
    if (warp < 3) {
        float4 now[1];
        load_inputs<1>((const float4*)(x + channel), 0, now);
        const float4 y = normalize_head(convolve(w, past[0], past[1], past[2], now[0]), conv_head);
        *(float4*)(qkv[warp] + 4 * lane) = y;
        if (warp == 2 || writes_key_factors) *(float4*)(node + NODE_X + channel) = now[0];
        if (warp == 1 && writes_key_factors) *(float4*)(node + key * HEAD_DIM + 4 * lane) = y;
    } else if (warp == 3) {
        float v[2];
        load_inputs<2>(alpha + head, beta - alpha, v);
        const float g = log_decay(v[0], gate_a, gate_dt);
        if (lane == 0) {
            gates[0] = expf(g);
            gates[1] = 1.0f / (1.0f + expf(-v[1]));
            node[NODE_G + head] = g;
        }
    } else if (warp == 4) {
        float4 v[2];
        load_inputs<2>((const float4*)(z + (head - lane / 16) * HEAD_DIM + lane * 8), 1, v);
#pragma unroll
        for (int i = 0; i < 8; i++) gate[i] = silu((&v[i / 4].x)[i % 4]);
    }
    __syncthreads();
    const float qk = warp_dot(*(const float4*)(qkv[0] + 4 * lane), *(const float4*)(qkv[1] + 4 * lane));
    float4 q[4], k[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q[i] = *(const float4*)(qkv[0] + 32 * i + 4 * lane_part());
        k[i] = *(const float4*)(qkv[1] + 32 * i + 4 * lane_part());
    }
    // S^T k of pass t is at 2 t, S^T q after it.
    float part[2 * COLUMN_PASSES];
#pragma unroll
    for (int t = 0; t < COLUMN_PASSES; t++) part[2 * t] = partial_dot(k, s[t]), part[2 * t + 1] = partial_dot(q, s[t]);
    const int column = warp * 4 * COLUMN_PASSES + lane / 8 * 4 + lane_column();
    const float decay = gates[0], state_product = reduce_parts(part);
    const float u_of_lane = delta_u(gates[1], decay, qkv[2][column], state_product);
    const float u = __shfl_xor_sync(WARP_ALL, u_of_lane, 4);
    if (lane_part() % 2)
        o_row[column] = delta_o(decay, state_product, u, qk);
    else
        node[NODE_U + head * HEAD_DIM + column] = u_of_lane;
    __syncthreads();
    if (warp != 4) return;
    // Both halves of the warp compute the head; the half at the head's position in its group of two stores it.
    float y[8];
    load_row_group<HEAD_DIM * 2>(o_row - lane / 16 * HEAD_DIM, 0, y);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(y[i], y[i], sum);
#pragma unroll
    for (int gap = 8; gap; gap >>= 1) sum += __shfl_xor_sync(WARP_ALL, sum, gap);
    const float factor = 1.0f / sqrtf(sum * (1.0f / HEAD_DIM) + eps);
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = y[i] * factor * scale[i] * gate[i];
    const bool writes_group = lane / 16 == head % 2;
#if V_HEADS % 2
    // With an odd number of heads, the last head also stores the empty half of its group.
    if (!writes_group) {
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = 0.0f;
    }
    if (writes_group || head == V_HEADS - 1) store_row_group(out, 0, head / 2, y);
#else
    if (writes_group) store_row_group(out, 0, head / 2, y);
#endif
}
