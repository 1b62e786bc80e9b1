// Causal convolution at the nodes of a draft tree, for kernels whose blocks need a part of the channels each.
//
// The inputs of a node are its three predecessors on its path and itself; positions before the tree are in the window.
// CLUSTER blocks form a cluster on sm_90 and up; elsewhere CLUSTER is 1. Needs: layout.cuh and conv.cuh.
#pragma once

#if !HAS_SM90
#undef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define CLUSTER_ATTRIBUTE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_ATTRIBUTE
#endif

__device__ __forceinline__ u32 cluster_rank() {
#if CLUSTER > 1
    return cluster_ctarank();
#else
    return 0;
#endif
}

// Input rows of the convolution, oldest first: nodes, or negative for rows of the window, -1 being the newest. A
// negative parent means none.
__device__ __forceinline__ void tap_rows(int (&taps)[TAPS], const int* parents, int node) {
    taps[0] = -3, taps[1] = -2, taps[2] = -1, taps[3] = node;
    int at = node;
#pragma unroll
    for (int tap = TAPS - 2; tap >= 0; tap--) {
        at = parents[at];
        if (at < 0) break;
        // The window shifts by one for every node before this one.
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++)
            if (i < tap) taps[i]++;
        taps[tap] = at;
    }
}

// Reads four channels of a node's four inputs, oldest first; the window ends at `newest`.
struct ConvInput {
    const float* x;
    const float* newest;
    u32 ld;
    __device__ __forceinline__ const float* at(int tap, int channel) const {
        const bool inside = tap >= 0;
        return (inside ? x : newest) + (channel + tap * (inside ? (int)ld : CHANNELS));
    }
    // Their addresses; `taps` as in the step header, one byte each.
    __device__ __forceinline__ void addresses(const float* (&from)[TAPS], u32 taps, int channel) const {
#pragma unroll
        for (int i = 0; i < TAPS; i++) from[i] = at((signed char)(taps >> 8 * i), channel);
    }
    __device__ __forceinline__ void fetch(float4 (&in)[TAPS], int4 line, int channel) const {
        const int taps[TAPS] = {line.x, line.y, line.z, line.w};
#pragma unroll
        for (int i = 0; i < TAPS; i++) in[i] = *(const float4*)at(taps[i], channel);
    }
};

// Channels local .. local + 3 of the block; the taps of channel c are weight[c % 4][c / 4] in units of 4.
template <int N>
__device__ __forceinline__ float4 conv_silu(const float (&weight)[4][N], const float4 (&in)[TAPS], int local) {
    Weights w;
#pragma unroll
    for (int c = 0; c < 4; c++) w.channel[c] = *(const float4*)&weight[c][local];
    return convolve(w, in[0], in[1], in[2], in[3]);
}

// Channel i of the block: 128 of q, 128 of k of key head `key`, then those of v from `v_channels`.
__device__ __forceinline__ int block_channel(int i, int key, int v_channels) {
    const int part = i / HEAD_DIM;
    return (part == 0 ? key * HEAD_DIM : part == 1 ? K_WIDTH + key * HEAD_DIM : v_channels) + i % HEAD_DIM;
}
// Starts cp.async of the conv weights of the block's channels.
template <int N, int THREADS_IN_BLOCK>
__device__ __forceinline__ void load_conv_weights(float (&to)[4][N], const float* weight, int key, int v_channels) {
#pragma unroll 1
    for (int i = threadIdx.x; i < N; i += THREADS_IN_BLOCK)
        cp_async_16(shared_address(&to[i % 4][i & ~3]), weight + (u64)block_channel(i, key, v_channels) * TAPS);
    cp_async_commit();
}
// Prefetches the block's channels of the window into L2.
template <int N, int THREADS_IN_BLOCK>
__device__ __forceinline__ void prefetch_window(const float* window, int key, int v_channels) {
#pragma unroll 1
    for (int i = 32 * threadIdx.x; i < N; i += 32 * THREADS_IN_BLOCK) {
#pragma unroll
        for (int row = 0; row < TAPS - 1; row++)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(window + row * CHANNELS + block_channel(i, key, v_channels)));
    }
}
