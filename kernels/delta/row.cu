// One layer of the gated delta rule for a step of one row, in one launch: convolution, gates, the rule, the output norm.
//
//   y, g, beta as in ssm/conv_tree;   S <- e^g S;  u = beta (v - S^T k);  o = (S + k u^T)^T q
//   out = rms(o) * norm * silu(z)
//
// The bits are those of ssm/conv_tree, delta/tree_persist and delta/gated_norm one after the other. The state is read
// only: it is fetched before the dependent-launch wait, since nothing in a step writes states or windows.
//
// in:  x [CHANNELS], alpha, beta [NV], z [VALUES], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [NV],
//      state [slot][NV][128 v][128 k], norm [128]
// out: [VALUES] in any of the forms of norm/emit.cuh that a lane writes alone; k, u, g and x of the node in the factors
// grid NV, 256 threads: a block has a head, a warp 16 of its value columns in two turns, a lane 4 k of each
// shared memory: 2.1 KB. arch: sm_80. reference: cpu::reference::{conv, delta}, norm::gated_rms; test: verify_*, row_*
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"
#include "delta/fold.cuh"
#include "ssm/conv.cuh"
#include "norm/emit.cuh"

#define WARPS 8
#define TURN 8  // columns of a warp that are summed together
#define TURNS (DIM / WARPS / TURN)

// Sums of 8 values over the warp, each in the order of warp_sum: a lane ends with that of column `column_of(lane)`.
// At each of the first three gaps a lane hands over the half of the columns that it does not keep.
__device__ __forceinline__ float warp_sums(const float (&x)[TURN]) {
    const int lane = threadIdx.x % 32;
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
    float one = keep + __shfl_xor_sync(WARP_ALL, give, 4);
    one += __shfl_xor_sync(WARP_ALL, one, 2);
    one += __shfl_xor_sync(WARP_ALL, one, 1);
    return one;
}
// The first lane that holds column c is 4 c.
__device__ __forceinline__ int column_of(int lane) { return lane / 4; }

__device__ __forceinline__ float dot(float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
delta_row(const Step* step, const float* x, const float* alpha, const float* beta, const float* window, u64 window_stride,
          const float* weight, const float* a, const float* dt, const float* state, u64 state_stride, float* factors,
          u64 factor_stride, const float* z, const float* norm, float eps, Out out) {
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
    const float* s0 = of_slot(state, slot, state_stride) + ((u64)head * DIM + warp * TURNS * TURN) * DIM + 4 * lane;
    float4 s[TURNS][TURN];
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
#pragma unroll
        for (int c = 0; c < TURN; c++) s[t][c] = __ldg((const float4*)(s0 + (t * TURN + c) * DIM));
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
    const float4 q = *(const float4*)(mixed[0] + 4 * lane), k = *(const float4*)(mixed[1] + 4 * lane);
    const float decay = gates[0], rate = gates[1];
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        const int column = (warp * TURNS + t) * TURN + column_of(lane);
        float part[TURN];
#pragma unroll
        for (int c = 0; c < TURN; c++) {
            const float4 old = s[t][c];
            part[c] = dot(k, make_float4(decay * old.x, decay * old.y, decay * old.z, decay * old.w));
        }
        const float u = rate * (mixed[2][column] - warp_sums(part));
#pragma unroll
        for (int c = 0; c < TURN; c++) {
            fold(s[t][c], k, __shfl_sync(WARP_ALL, u, 4 * c), decay);
            part[c] = dot(q, s[t][c]);
        }
        const float o = warp_sums(part);
        if (lane % 4 == 0) {
            node[NODE_U + head * DIM + column] = u;
            read[column] = o;
        }
    }
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
    const bool mine = lane / 16 == head % 2;
#if NV % 2
    // Nobody else writes the half of the last group that no head stands for.
    if (!mine) {
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = 0.0f;
    }
    if (mine || head == NV - 1) emit(out, 0, head / 2, y);
#else
    if (mine) emit(out, 0, head / 2, y);
#endif
}
