// The dynamic convolution of a draft layer along the rows of a block.
//
//   out[t, c] = sum over tap of (base[SIDE, tap, c] + dynamic[t, SIDE, tap, c / GROUP]) * in[t - tap, c]
//
// SIDE is 0 at the input of a sublayer and 1 at its output. Rows before the block's first are zero.
// Defines WIDTH (a multiple of 8), TAPS and GROUP.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"

#define CONV_GROUPS (WIDTH / GROUP)

struct BlockConv {
    const float* base;     // [2][TAPS][WIDTH]
    const float* dynamic;  // [rows][2][TAPS][CONV_GROUPS]
};

__device__ __forceinline__ void load_8(const float* from, float (&v)[8]) {
    const float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// The static weights of one side for values column .. column + 7: constant, so they may be loaded before the dependency
// wait. `column` is a multiple of 8 below WIDTH.
struct ConvBase {
    float at[TAPS][8];
};

template <int SIDE>
__device__ __forceinline__ void load_base(const BlockConv& conv, int column, ConvBase& base) {
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) load_8(conv.base + (size_t)(SIDE * TAPS + tap) * WIDTH + column, base.at[tap]);
}

// Values column .. column + 7 of a row, after the dependency wait. `first` is the block's first row.
template <int SIDE>
__device__ __forceinline__ void convolve_8(const BlockConv& conv, const ConvBase& base, const float* in, int row,
                                           int first, int column, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = 0.0f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
        // A row before the first weighs nothing; the row read in its place is one that this row sums anyway.
        const bool exists = row - tap >= first;
        float x[8];
        load_8(in + (size_t)(exists ? row - tap : first) * WIDTH + column, x);
        const float* dynamic = conv.dynamic + ((size_t)row * 2 * TAPS + SIDE * TAPS + tap) * CONV_GROUPS;
        const float shared = dynamic[column / GROUP];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float weight = base.at[tap][j] + (GROUP % 8 == 0 ? shared : dynamic[(column + j) / GROUP]);
            v[j] += (exists ? weight : 0.0f) * x[j];
        }
    }
}
