// One layer of the gated delta rule for a step of one row, in one launch: convolution, gates, the rule, the output norm.
//
//   y, g, beta as in ssm/conv.cuh;   u, o as in delta/rule.cuh;   out = rms(o) * norm * silu(z)
//
// The bits are those of a tree of one node: delta/walk and delta/gated_norm one after the other. The state is read only: it
// is fetched before the dependent-launch wait, since nothing in a step writes states or windows.
//
// in:  x [CHANNELS], alpha, beta [NV], z [VALUES], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [NV],
//      state [slot][NV][128 v][128 k], norm [128]
// out: [VALUES] in any of the forms of norm/emit.cuh that a lane writes alone; k, u, g and x of the node in the factors
// grid NV, 256 threads: a block has a head, a warp 16 of its value columns in four turns, a lane 16 k of one in each
// shared memory: 2.1 KB. arch: sm_80. reference: cpu::reference::{conv, delta}, norm::gated_rms; test: verify_*, row_*
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"
#include "delta/rule.cuh"
#include "ssm/conv.cuh"
#include "norm/emit.cuh"

#define WARPS 8
#define TURNS (DIM / WARPS / 4)  // of four columns of a warp

// Sums of 8 values over the eight parts of a column, each in the order 4, 2, 1 parts apart: a lane ends with that of index
// `lane_part()`. At each gap it hands over the half of the values that it does not keep.
__device__ __forceinline__ float part_sums(const float (&x)[2 * TURNS]) {
    const int lane = threadIdx.x;
    float four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float keep = lane & 16 ? x[4 + i] : x[i], give = lane & 16 ? x[i] : x[4 + i];
        four[i] = keep + __shfl_xor_sync(WARP_ALL, give, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float keep = lane & 8 ? four[2 + i] : four[i], give = lane & 8 ? four[i] : four[2 + i];
        two[i] = keep + __shfl_xor_sync(WARP_ALL, give, 8);
    }
    const float keep = lane & 4 ? two[1] : two[0], give = lane & 4 ? two[0] : two[1];
    return keep + __shfl_xor_sync(WARP_ALL, give, 4);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
delta_row(const Step* step, const float* x, const float* alpha, const float* beta, const float* window, u64 window_stride,
          const float* weight, const float* a, const float* dt, const float* state, u64 state_stride, float* factors,
          u64 factor_stride, const float* z, const float* norm, float eps, RowOutput out) {
    __shared__ __align__(16) float mixed[3][DIM];  // q, k, v
    __shared__ __align__(16) float read[DIM];      // o
    __shared__ float gates[2];                     // decay, beta
    pdl_launch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x, key = key_head(head);
    if (step->trees < 1) {
        pdl_wait();
        return;
    }
    const int slot = step->tree[0].slot;
    const float* s0 = of_slot(state, slot, state_stride) +
                      ((u64)head * DIM + warp * 4 * TURNS + lane_column()) * DIM + 4 * lane_part();
    float4 s[TURNS][4];
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[t][i] = state_at(s0 + t * 4 * DIM + 32 * i);
    }
    // Warps 0, 1, 2 convolve q, k, v; warp 3 has the gates, warp 4 the output.
    const int conv_head = warp == 0 ? key : warp == 1 ? NK + key : 2 * NK + head;
    const int channel = conv_head * DIM + 4 * lane;
    Weights w;
    float4 past[TAPS - 1];
    float own_a = 0.0f, own_dt = 0.0f, scale[8];
    if (warp < 3) {
        const float* before = of_slot(window, slot, window_stride) + channel;
        w = load_weights(weight, channel);
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) past[i] = *(const float4*)(before + i * CHANNELS);
    } else if (warp == 3) {
        own_a = a[head], own_dt = dt[head];
    } else if (warp == 4) {
        fetch<DIM * 2>(norm - lane / 16 * DIM, 0, scale);
    }
    float* node = of_slot(factors, slot, factor_stride);
#if GROUPED
    const bool keeps_keys = head % (NV / NK) == 0;
#else
    const bool keeps_keys = head < NK;
#endif
    pdl_wait();
    float gate[8];
    if (warp < 3) {
        const float4 now = *(const float4*)(x + channel);
        const float4 y = normalise(convolve(w, past[0], past[1], past[2], now), conv_head);
        *(float4*)(mixed[warp] + 4 * lane) = y;
        if (warp == 2 || keeps_keys) *(float4*)(node + NODE_X + channel) = now;
        if (warp == 1 && keeps_keys) *(float4*)(node + key * DIM + 4 * lane) = y;
    } else if (warp == 3) {
        const float g = gate_g(alpha[head], own_a, own_dt);
        if (lane == 0) {
            gates[0] = expf(g);
            gates[1] = 1.0f / (1.0f + expf(-beta[head]));
            node[NODE_G + head] = g;
        }
    } else if (warp == 4) {
        fetch<DIM * 2>(z + (head - lane / 16) * DIM, 0, gate);
    }
    __syncthreads();
    const float qk = row_dot(*(const float4*)(mixed[0] + 4 * lane), *(const float4*)(mixed[1] + 4 * lane));
    float4 q[4], k[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q[i] = *(const float4*)(mixed[0] + 32 * i + 4 * lane_part());
        k[i] = *(const float4*)(mixed[1] + 32 * i + 4 * lane_part());
    }
    // Of turn t what the state gives to u at 2 t, what it gives to o behind it.
    float part[2 * TURNS];
#pragma unroll
    for (int t = 0; t < TURNS; t++) part[2 * t] = part_dot(k, s[t]), part[2 * t + 1] = part_dot(q, s[t]);
    const int column = warp * 4 * TURNS + lane / 8 * 4 + lane_column();
    const float decay = gates[0], mine = part_sums(part);
    const float of_u = node_u(gates[1], decay, mixed[2][column], mine);
    const float u = __shfl_xor_sync(WARP_ALL, of_u, 4);
    if (lane_part() % 2)
        read[column] = node_o(decay, mine, u, qk);
    else
        node[NODE_U + head * DIM + column] = of_u;
    __syncthreads();
    if (warp != 4) return;
    // Both halves of the warp work on the head; the half that stands for it in a group of two heads writes.
    float y[8];
    fetch<DIM * 2>(read - lane / 16 * DIM, 0, y);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(y[i], y[i], sum);
#pragma unroll
    for (int gap = 8; gap; gap >>= 1) sum += __shfl_xor_sync(WARP_ALL, sum, gap);
    const float factor = 1.0f / sqrtf(sum * (1.0f / DIM) + eps);
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = y[i] * factor * scale[i] * silu(gate[i]);
    const bool stands = lane / 16 == head % 2;
#if NV % 2
    // Nobody else writes the half of the last group that no head stands for.
    if (!stands) {
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = 0.0f;
    }
    if (stands || head == NV - 1) store_row_group(out, 0, head / 2, y);
#else
    if (stands) store_row_group(out, 0, head / 2, y);
#endif
}
