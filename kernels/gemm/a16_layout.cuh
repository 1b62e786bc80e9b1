// Activations of a decode step as the GEMMs read them (A16), and the functions that write them.
//
// A16 holds `n8_tiles` = ceil(bucket / 8) tiles of 8 rows, and K rounded up to groups of 256, as 8 x 16-byte core
// matrices: a stage is one contiguous copy, and ldmatrix gives the B operand. Values past K are zero, written by the
// producer. Rows that the step does not have may hold anything.
//
// A16, f16: chunk C of 64 values, tile j, at byte (C * n8_tiles + j) * 1024. Value k of the chunk, row r: byte
//   k/8 * 128 + r%8 * 16 + k%8 * 2
//
// f32 activations are plain [rows][K].
// reference crates/cuda/src/pack/activations.rs (the same formulas on the host)     test
//           crates/cuda/tests/gemm_small_batch.rs
#pragma once
#include "common/prelude.cuh"

#define A16_TILE 1024

// Finite values beyond the range of f16 saturate; infinities and NaNs stay, so they show in the row's outputs.
__device__ __forceinline__ float clamp_to_f16(float v) {
    const float bound = v > 0.0f ? 65504.0f : -65504.0f;
    return fabsf(v) > 65504.0f && fabsf(v) < INF ? bound : v;
}
__device__ __forceinline__ u32 a16_f16x2(float lo, float hi) {
    return f32x2_to_f16x2(clamp_to_f16(lo), clamp_to_f16(hi));
}

// Writes values column .. column + 7 of a row; `column` is a multiple of 8 (zeros past K).
__device__ __forceinline__ void a16_store_8(void* a16, int n8_tiles, int row, int column, const float (&v)[8]) {
    char* tile = (char*)a16 + (size_t(column / 64) * n8_tiles + row / 8) * A16_TILE;
    *(uint4*)(tile + column % 64 / 8 * 128 + row % 8 * 16) =
        make_uint4(a16_f16x2(v[0], v[1]), a16_f16x2(v[2], v[3]), a16_f16x2(v[4], v[5]), a16_f16x2(v[6], v[7]));
}
// By one warp: writes group `group` of 256 values of a row; lane i holds values 8 i .. 8 i + 7 of the group (zeros past
// K).
__device__ __forceinline__ void a16_store(void* a16, int n8_tiles, int row, int group, const float (&v)[8]) {
    a16_store_8(a16, n8_tiles, row, 256 * group + threadIdx.x % 32 * 8, v);
}
