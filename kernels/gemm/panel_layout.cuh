// f16 panels: the layout of prefill activations and dequantised weights in device memory.
//
// A matrix [rows][K] is cut into panels of 64 columns. A panel holds `rows_cap` rows of 128 bytes; the eight 16-byte
// chunks of a row lie at (chunk ^ (row & 7)), the 128-byte swizzle. So any run of rows of a panel that starts at a
// multiple of 8 is one contiguous copy into shared memory, where ldmatrix and wgmma descriptors read it without bank
// conflicts.
// Values are f16, multiplied by a power of two if their range asks for it, and saturate at 65504; NaN stays NaN. K is
// padded to 64 with zeros. Rows beyond the true ones may hold anything: a row affects only its own result.
#pragma once
#include "common/prelude.cuh"

// Byte offset of the 16-byte chunk that holds columns [8 * chunk8, 8 * chunk8 + 8) of `row`.
__device__ __forceinline__ u64 panel_chunk(int rows_cap, int row, int chunk8) {
    return ((u64)(chunk8 >> 3) * rows_cap + row) * 128 + (((chunk8 & 7) ^ (row & 7)) << 4);
}

// Two f32 to a pair of f16, `low` in the low half; finite values beyond the range become +-65504, NaN stays.
__device__ __forceinline__ u32 panel_f16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// A 4 x 4 transpose in a quad: lane t passes v[0..3] and gets word t of lanes 0..3.
__device__ __forceinline__ void quad_transpose(u32 (&v)[4]) {
    const bool is_odd = threadIdx.x & 1, is_upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 received = __shfl_xor_sync(WARP_ALL, is_odd ? v[i] : v[i + 1], 1);
        v[i] = is_odd ? received : v[i];
        v[i + 1] = is_odd ? v[i + 1] : received;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 received = __shfl_xor_sync(WARP_ALL, is_upper ? v[i] : v[i + 2], 2);
        v[i] = is_upper ? received : v[i];
        v[i + 2] = is_upper ? v[i + 2] : received;
    }
}
