// Shapes and memory layouts of the gated delta kernels. Defines: K_HEADS key heads, V_HEADS value heads, GROUPED (0:
// value head h uses key head h % K_HEADS, 1: h / (V_HEADS / K_HEADS)). Heads are 128 wide; the convolution has 4 taps.
//
// state   [slot][layer][V_HEADS][128 v][128 k] f32: transposed, k runs fastest
// window  [slot][layer][3][CHANNELS] f32: convolution inputs before the committed position, oldest first
// factors [slot][layer][node][NODE_FLOATS] f32: WY factors of a node, stored in place of a state, in this order:
//   k [K_HEADS][128] normalized
//   u [V_HEADS][128]
//   g [V_HEADS], padded to a multiple of 32
//   x [CHANNELS], the convolution input
// mixed_qkv [row][CHANNELS] f32, in this order:
//   q [K_HEADS][128] normalized, / sqrt(128)
//   k [K_HEADS][128] normalized
//   v [V_HEADS][128]
// gates   [row][2][V_HEADS] f32: g (log decay, at most 0), then beta
#pragma once

#define HEAD_DIM 128
#define TAPS 4
#define K_WIDTH (K_HEADS * HEAD_DIM)
#define V_WIDTH (V_HEADS * HEAD_DIM)
#define CHANNELS (2 * K_WIDTH + V_WIDTH)
#define GATE_FLOATS ((V_HEADS + 31) / 32 * 32)
#define NODE_FLOATS (K_WIDTH + V_WIDTH + GATE_FLOATS + CHANNELS)
#define NODE_U K_WIDTH
#define NODE_G (K_WIDTH + V_WIDTH)
#define NODE_X (K_WIDTH + V_WIDTH + GATE_FLOATS)

// Four values of a committed state. A step reads it once, so L2 evicts it first.
__device__ __forceinline__ float4 load_state_once(const float* p) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.f32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p), "l"(policy_evict_first()));
    return v;
}

// Key head of a value head.
__device__ __forceinline__ int key_head(int v_head) {
#if GROUPED
    return v_head / (V_HEADS / K_HEADS);
#else
    return v_head % K_HEADS;
#endif
}

// Pointer advanced by `slot` strides of `bytes`.
template <typename T>
__device__ __forceinline__ T* slot_ptr(T* base, int slot, unsigned long long bytes) {
    return (T*)((char*)base + (unsigned long long)slot * bytes);
}
template <typename T>
__device__ __forceinline__ const T* slot_ptr(const T* base, int slot, unsigned long long bytes) {
    return (const T*)((const char*)base + (unsigned long long)slot * bytes);
}
