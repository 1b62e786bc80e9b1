// The one form of the state update, S <- e^g S + k u^T; all kernels that advance states use it, so their bits agree.
#pragma once

// S + k u for four k of one value column; S is already decayed.
__device__ __forceinline__ void add_outer_product(float4& s, float4 k, float u) {
    s.x = fmaf(k.x, u, s.x);
    s.y = fmaf(k.y, u, s.y);
    s.z = fmaf(k.z, u, s.z);
    s.w = fmaf(k.w, u, s.w);
}

// S <- decay S + k u for four k of one value column.
__device__ __forceinline__ void update_state(float4& s, float4 k, float u, float decay) {
    s.x *= decay, s.y *= decay, s.z *= decay, s.w *= decay;
    add_outer_product(s, k, u);
}
