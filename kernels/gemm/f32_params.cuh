// Parameters of the f32 matrices beside the packed ones of a launch: f32_gemm.cuh (by FMA), f32_gemm_tf32.cuh (by
// 3xTF32).
#pragma once
#include "common/prelude.cuh"

struct F32Matrix {
    const float* weights;  // [n_out][cols]
    float* out;            // [ROWS][stride]
    int n_out, stride;
    int add;              // whether results are added to `out`; f32_gemm.cuh only
    int first_row_group;  // the matrix's first row group
};
struct F32Params {
    F32Matrix matrices[MAX_MATRICES];
    const float* x;   // [ROWS][cols]
    float* partials;  // [row_groups][k_slices][a row group's sums]; +0 before and after
    int n_matrices, cols;
    int row_groups, k_slices;
    int k_slice, _pad;  // values of a K-slice, a multiple of F32_CHUNK
};

__device__ __forceinline__ const F32Matrix& f32_matrix(const F32Params& params, int row_group) {
    int index = 0;
    while (index + 1 < params.n_matrices && row_group >= params.matrices[index + 1].first_row_group) index++;
    return params.matrices[index];
}
