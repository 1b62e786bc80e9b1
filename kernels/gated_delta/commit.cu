// Gated delta rule, commit: advances states and convolution windows of all layers past the accepted paths, in one
// launch.
//
//   node by node along the path: S <- e^g S + k u^T;   window <- the last 3 of (window, x of the path)
//
// in   commit (paths of node indices), factors [slot][layer][node][NODE_FLOATS]
// i/o  state [slot][layer][V_HEADS][128 v][128 k], window [slot][layer][3][CHANNELS]
// grid (V_HEADS * 2 + CHANNELS / 4 / 256, layers, paths) x 256 threads: a block has 64 value columns of one head, a
//      warp eight of them, a lane 4 of k; the last blocks slide the window, four channels per thread
// smem none
// arch sm_80 and up     reference cpu::reference::delta::update_state     test gated_delta::delta_commit_*
//
// Nodes are applied one after the other, so a path gives the same bits as its nodes committed one by one.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/state_update.cuh"

#define COLUMNS 64
#define COLUMNS_PER_WARP (COLUMNS / 8)

// Four blocks per SM overlap loads and math, with 64 registers per thread.
extern "C" __global__ void __launch_bounds__(256, 4)
    gated_delta_commit(const Commit* commit, float* state, u64 state_stride, u64 state_layer, float* window,
                       u64 window_stride, u64 window_layer, const float* factors, u64 factor_stride, u64 factor_layer) {
    pdl_wait();
    if ((int)blockIdx.z >= commit->paths) return;
    const Path* path = commit->path + blockIdx.z;
    const int length = path->length, slot = path->slot, layer = blockIdx.y;
    const float* nodes = slot_ptr(slot_ptr(factors, slot, factor_stride), layer, factor_layer);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    if (blockIdx.x >= V_HEADS * (HEAD_DIM / COLUMNS)) {
        const int channel = ((blockIdx.x - V_HEADS * (HEAD_DIM / COLUMNS)) * 256 + tid) * 4;
        if (channel >= CHANNELS || length == 0) return;
        float* own = slot_ptr(slot_ptr(window, slot, window_stride), layer, window_layer) + channel;
        float4 newest[TAPS - 1];
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) {
            const int at = length + i - (TAPS - 1);
            newest[i] = at >= 0 ? *(const float4*)(nodes + (u64)path->node[at] * NODE_FLOATS + NODE_X + channel)
                                : *(const float4*)(own + (at + TAPS - 1) * CHANNELS);
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) *(float4*)(own + i * CHANNELS) = newest[i];
        return;
    }
    const int head = blockIdx.x / (HEAD_DIM / COLUMNS);
    const int column = blockIdx.x % (HEAD_DIM / COLUMNS) * COLUMNS + warp * COLUMNS_PER_WARP;
    float* own =
        slot_ptr(slot_ptr(state, slot, state_stride), layer, state_layer) + ((u64)head * HEAD_DIM + column) * HEAD_DIM;
    float4 s[COLUMNS_PER_WARP];
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_WARP; c++) s[c] = *(const float4*)(own + c * HEAD_DIM + 4 * lane);
    const int key = key_head(head);
#pragma unroll 2
    for (int i = 0; i < length; i++) {
        const float* node = nodes + (u64)path->node[i] * NODE_FLOATS;
        const float4 k = *(const float4*)(node + key * HEAD_DIM + 4 * lane);
        const float decay = expf(node[NODE_G + head]);
#pragma unroll
        for (int c = 0; c < COLUMNS_PER_WARP; c += 4) {
            const float4 u = *(const float4*)(node + NODE_U + head * HEAD_DIM + column + c);
            update_state(s[c], k, u.x, decay);
            update_state(s[c + 1], k, u.y, decay);
            update_state(s[c + 2], k, u.z, decay);
            update_state(s[c + 3], k, u.w, decay);
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_WARP; c++) *(float4*)(own + c * HEAD_DIM + 4 * lane) = s[c];
}
