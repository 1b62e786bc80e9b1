// Output of a prefill GEMM: up to four matrices that share one input.
//
// The columns of the GEMM are those of the matrices, each padded to a multiple of 256, so a tile lies in one matrix.
// With `splits` equal parts of K (split-K), `semaphores` orders the partial sums of a tile: split 0 is stored first,
// split s is added after split s - 1. So a sum has one fixed order. It holds one zero per tile, and is zero again
// afterwards.
#pragma once
#include "common/prelude.cuh"

struct OutputMatrix {
    float* out;  // [rows][stride]
    int width;   // true columns
    int stride;
};

struct OutputMatrices {
    OutputMatrix at[4];
};

// The matrix of padded column `column`, which becomes relative to it.
__device__ __forceinline__ OutputMatrix output_matrix_of(const OutputMatrices& matrices, int& column) {
    OutputMatrix matrix = matrices.at[0];
#pragma unroll
    for (int i = 1; i < 4; i++) {
        const int padded = (matrix.width + 255) & ~255;
        if (column >= padded && matrices.at[i].width > 0) {
            column -= padded;
            matrix = matrices.at[i];
        } else {
            break;
        }
    }
    return matrix;
}

// *at = (accumulate ? *at : 0) + v, if in bounds.
__device__ __forceinline__ void store_one(float* at, float v, bool in_bounds, bool accumulate) {
    if (in_bounds) {
        *at = accumulate ? __ldcg(at) + v : v;
    }
}
