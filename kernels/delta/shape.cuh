// Shapes and layouts that every delta kernel shares. Defines: NK key heads, NV value heads, GROUPED (0: value head
// h uses key head h % NK, 1: h / (NV / NK)). Key and value heads are 128 wide and the convolution has 4 taps.
//
// state   [slot][layer][NV][128 v][128 k] f32: transposed, k runs fastest
// window  [slot][layer][3][CHANNELS] f32: convolution inputs before the committed position, oldest first
// factors [slot][layer][node][NODE_FLOATS] f32: what a node leaves instead of a state, in this order:
//   k [NK][128] normalised, u [NV][128], g [NV] (padded to a multiple of 32), x [CHANNELS] convolution input
// mixed   [row][CHANNELS] f32: q [NK][128] (normalised, times 1/sqrt(128)), k [NK][128] (normalised), v [NV][128]
// gates   [row][2][NV] f32: g (at most 0), then beta
#pragma once

#define DIM 128
#define TAPS 4
#define KEYS (NK * DIM)
#define VALUES (NV * DIM)
#define CHANNELS (2 * KEYS + VALUES)
#define GATES ((NV + 31) / 32 * 32)
#define NODE_FLOATS (KEYS + VALUES + GATES + CHANNELS)
#define NODE_U KEYS
#define NODE_G (KEYS + VALUES)
#define NODE_X (KEYS + VALUES + GATES)

// Four values of a committed state. One step reads it once, so it is the first to leave the second-level cache again.
__device__ __forceinline__ float4 state_at(const float* p) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.f32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p), "l"(policy_evict_first()));
    return v;
}

// The key head of a value head.
__device__ __forceinline__ int key_head(int v_head) {
#if GROUPED
    return v_head / (NV / NK);
#else
    return v_head % NK;
#endif
}

// A pointer moved by `slot` strides of `bytes`.
template <typename T>
__device__ __forceinline__ T* of_slot(T* base, int slot, unsigned long long bytes) {
    return (T*)((char*)base + (unsigned long long)slot * bytes);
}
template <typename T>
__device__ __forceinline__ const T* of_slot(const T* base, int slot, unsigned long long bytes) {
    return (const T*)((const char*)base + (unsigned long long)slot * bytes);
}
