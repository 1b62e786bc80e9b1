// The gated delta rule over a tree, node by node: states are carried from parent to child and written where a later
// child will need them.
//
//   S <- e^g S_parent;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q
//
// Every node's result has the bits that a step of this node alone would give after its ancestors were committed one
// by one: the judge of delta/tree and its stand-in where tree and no tree must agree exactly.
//
// in:  mixed [rows][CHANNELS], gates [rows][2][NV], state [slot][NV][128 v][128 k]
// out: o [rows][VALUES]; u of each node into the factors; states [row][NV][128 v][128 k] of nodes whose last child
//      does not follow them at once
// grid (4, NV, trees), 256 threads: a warp has four value columns, a lane 4 k of each
// shared memory: none. arch: sm_80. reference: cpu::reference::delta::tree; test: tree_*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"
#include "delta/fold.cuh"

#define MINE 4

// Sums of four values over the warp, each in the order of warp_sum.
__device__ __forceinline__ void warp_sums(float (&x)[MINE]) {
#pragma unroll
    for (int c = 0; c < MINE; c++) x[c] = warp_sum(x[c]);
}

__device__ __forceinline__ float dot(float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}

extern "C" __global__ void __launch_bounds__(256)
tree_persist(const Step* step, const float* mixed, const float* gates, const float* state, u64 state_stride,
             float* factors, u64 factor_stride, float* o, float* states) {
    pdl_launch();
    pdl_wait();
    if ((int)blockIdx.z >= step->trees) return;
    const Tree tree = step->tree[blockIdx.z];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
    const int column = blockIdx.x * 32 + warp * MINE;
    const int key = key_head(head);
    const u64 place = ((u64)head * DIM + column) * DIM + 4 * lane;
    const float* s0 = of_slot(state, tree.slot, state_stride) + place;
    float* node = of_slot(factors, tree.slot, factor_stride);
    float4 s[MINE];
    for (int i = 0; i < tree.nodes; i++, node += NODE_FLOATS) {
        const int row = tree.first + i;
        const int parent = step->parent[row];
        if (parent < 0 || parent != row - 1) {
            const float* from = parent < 0 ? s0 : states + (u64)parent * VALUES * DIM + place;
#pragma unroll
            for (int c = 0; c < MINE; c++) s[c] = *(const float4*)(from + c * DIM);
        }
        const float* own = mixed + (u64)row * CHANNELS;
        const float4 q = *(const float4*)(own + key * DIM + 4 * lane);
        const float4 k = *(const float4*)(own + KEYS + key * DIM + 4 * lane);
        const float4 v = *(const float4*)(own + 2 * KEYS + head * DIM + column);
        const float decay = expf(gates[(u64)row * 2 * NV + head]);
        const float beta = gates[(u64)row * 2 * NV + NV + head];
        float seen[MINE];
#pragma unroll
        for (int c = 0; c < MINE; c++)
            seen[c] = dot(k, make_float4(decay * s[c].x, decay * s[c].y, decay * s[c].z, decay * s[c].w));
        warp_sums(seen);
        float4 u = make_float4(beta * (v.x - seen[0]), beta * (v.y - seen[1]), beta * (v.z - seen[2]),
                               beta * (v.w - seen[3]));
        fold(s[0], k, u.x, decay);
        fold(s[1], k, u.y, decay);
        fold(s[2], k, u.z, decay);
        fold(s[3], k, u.w, decay);
        float read[MINE];
#pragma unroll
        for (int c = 0; c < MINE; c++) read[c] = dot(q, s[c]);
        warp_sums(read);
        if (lane == 0) {
            *(float4*)(node + NODE_U + head * DIM + column) = u;
            *(float4*)(o + (u64)row * VALUES + head * DIM + column) = make_float4(read[0], read[1], read[2], read[3]);
        }
        // A leaf's state is wanted by nobody, and an only child that follows finds it in the registers.
        bool wanted = false;
        for (int j = row + 2; j < tree.first + tree.nodes; j++) wanted |= step->parent[j] == row;
        if (wanted) {
            float* to = states + (u64)row * VALUES * DIM + place;
#pragma unroll
            for (int c = 0; c < MINE; c++) *(float4*)(to + c * DIM) = s[c];
        }
    }
}
