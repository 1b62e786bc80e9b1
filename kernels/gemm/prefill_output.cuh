// Where a prefill product goes: the tile order of its tiles, and what is done with a pair of neighbouring columns.
//
// The columns of a product are those of up to four matrices that blocks_per_split one input ("matrices"), each padded to a
// multiple of 256; a tile lies in one segment. `semaphores` orders the partial acc of a tile whose K is cut in `splits`
// equal parts: split 0 is written first, split s is added after split s - 1, so a sum has one fixed order, and the cut
// depends on the matrix alone. It holds one zero per tile and is left zero.
#pragma once
#include "common/prelude.cuh"

struct OutputMatrix {
    float *out; // [rows][stride]
    int width;  // true columns
    int stride;
};

struct OutputMatrices {
    OutputMatrix at[4];
};

// The segment of padded column `column`, which becomes relative to it.
__device__ __forceinline__ OutputMatrix output_matrix_of(const OutputMatrices &matrices, int &column) {
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

// *at = (accumulate ? *at : 0) + v, where it exists.
__device__ __forceinline__ void store_one(float *at, float v, bool in_bounds, bool accumulate) {
    if (in_bounds) { *at = accumulate ? __ldcg(at) + v : v; }
}

// Waits until `split_index` parts of tile `tile` have been added.
__device__ __forceinline__ void semaphore_wait(const int *semaphores, int tile, int split_index) {
    int value;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(semaphores + tile) : "memory");
    } while (value != split_index);
}

// Lets the split after `split_index` go, or clears the count after the last.
__device__ __forceinline__ void semaphore_release(int *semaphores, int tile, int split_index, int splits) {
    const int next_stage = split_index + 1 == splits ? 0 : split_index + 1;
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(semaphores + tile), "r"(next_stage) : "memory");
}
