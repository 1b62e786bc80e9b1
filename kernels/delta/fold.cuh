// The one expression that brings a state past a node; whoever carries states uses it, so that bits agree.
#pragma once

// S <- decay S + k u for four k of one value column.
__device__ __forceinline__ void fold(float4& s, float4 k, float u, float decay) {
    s.x = fmaf(k.x, u, decay * s.x);
    s.y = fmaf(k.y, u, decay * s.y);
    s.z = fmaf(k.z, u, decay * s.z);
    s.w = fmaf(k.w, u, decay * s.w);
}
