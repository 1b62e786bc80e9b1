// Causal convolution, norms and gates of the gated delta rule: one head per warp, four neighboring channels per lane.
#pragma once

// Added to the sum of squares when q and k are normalized.
#define L2_EPS 1e-6f

// Weights of four channels: weight[c] holds the 4 taps of channel c, oldest first.
struct Weights {
    float4 channel[4];
};

__device__ __forceinline__ Weights load_weights(const float* weight, int channel) {
    Weights w;
#pragma unroll
    for (int c = 0; c < 4; c++) w.channel[c] = *(const float4*)(weight + (u64)(channel + c) * TAPS);
    return w;
}

// silu with an approximate division: 2 ulp, a sixth of the instructions.
__device__ __forceinline__ float silu_approx(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// silu(sum over taps of weight * input) of four channels; x0 is the oldest input.
__device__ __forceinline__ float4 convolve(const Weights& w, float4 x0, float4 x1, float4 x2, float4 x3) {
    float4 y;
    y.x = silu_approx(
        fmaf(w.channel[0].w, x3.x, fmaf(w.channel[0].z, x2.x, fmaf(w.channel[0].y, x1.x, w.channel[0].x * x0.x))));
    y.y = silu_approx(
        fmaf(w.channel[1].w, x3.y, fmaf(w.channel[1].z, x2.y, fmaf(w.channel[1].y, x1.y, w.channel[1].x * x0.y))));
    y.z = silu_approx(
        fmaf(w.channel[2].w, x3.z, fmaf(w.channel[2].z, x2.z, fmaf(w.channel[2].y, x1.z, w.channel[2].x * x0.z))));
    y.w = silu_approx(
        fmaf(w.channel[3].w, x3.w, fmaf(w.channel[3].z, x2.w, fmaf(w.channel[3].y, x1.w, w.channel[3].x * x0.w))));
    return y;
}

// A row of a warp as a vector of length `length`.
__device__ __forceinline__ float4 l2_normalize(float4 y, float length) {
    float sum = warp_sum(fmaf(y.w, y.w, fmaf(y.z, y.z, fmaf(y.y, y.y, y.x * y.x))));
    float scale = rsqrtf(sum + L2_EPS) * length;
    return make_float4(y.x * scale, y.y * scale, y.z * scale, y.w * scale);
}

// q and k heads are normalized, q is also scaled by 1/sqrt(128); v heads are not.
#define QUERY_LENGTH 0.08838834764831845f
__device__ __forceinline__ float4 normalize_head(float4 y, int head) {
    return head >= 2 * K_HEADS ? y : l2_normalize(y, head < K_HEADS ? QUERY_LENGTH : 1.0f);
}

// Log decay: g = a * softplus(alpha + dt).
__device__ __forceinline__ float log_decay(float alpha, float a, float dt) {
    float x = alpha + dt;
    return a * (x > 20.0f ? x : log1pf(expf(x)));
}
