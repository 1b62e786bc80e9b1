// The one form of the recurrence's read-out, so that decode of one row and of a tree agree in every bit.
//
//   u = beta (v - e^g S^T k);   o = e^g S^T q + u (q . k), which is (e^g S + k u^T)^T q
//
// Both products read the parent's state, so they are computed together, and a leaf changes no state.
// A state column is in eight lanes of a warp, 16 keys each; a warp has four columns at a time.
#pragma once
#include "gated_delta/state_update.cuh"

// A lane's column of the four and its part of k: 32 i + 4 part .. of i < 4.
__device__ __forceinline__ int lane_column() { return threadIdx.x % 4; }
__device__ __forceinline__ int lane_part() { return threadIdx.x % 32 / 4; }

// This lane's partial dot product over 128 keys. Partials are summed 4, 2 and 1 parts apart.
__device__ __forceinline__ float partial_dot(const float4 (&a)[4], const float4 (&b)[4]) {
    float x = a[0].x * b[0].x, y = a[0].y * b[0].y;
    x = fmaf(a[0].z, b[0].z, x), y = fmaf(a[0].w, b[0].w, y);
#pragma unroll
    for (int i = 1; i < 4; i++) {
        x = fmaf(a[i].x, b[i].x, x), y = fmaf(a[i].y, b[i].y, y);
        x = fmaf(a[i].z, b[i].z, x), y = fmaf(a[i].w, b[i].w, y);
    }
    return x + y;
}

// q . k from four values of each per lane, over the whole warp: partials are summed 16, 8, .. 1 lanes apart.
__device__ __forceinline__ float dot4(float4 q, float4 k) {
    return fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.y, k.y, q.x * k.x)));
}
__device__ __forceinline__ float warp_dot(float4 q, float4 k) { return warp_sum(dot4(q, k)); }

__device__ __forceinline__ float delta_u(float beta, float decay, float v, float state_k) {
    return beta * fmaf(-decay, state_k, v);
}
__device__ __forceinline__ float delta_o(float decay, float state_q, float u, float qk) {
    return fmaf(u, qk, decay * state_q);
}
