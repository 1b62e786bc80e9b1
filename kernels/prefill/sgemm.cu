// Prefill matrix product in f32, for weights kept as f32: out[rows][n_out] = (add ? out : 0) + x[rows][K] · w[n_out][K]^T.
//
// in   x f32 [rows][K]      w f32 [n_out][K], plain      K a multiple of 4
// out  f32 [rows][stride]
// grid (ceil(n_out / 48), ceil(largest chunk / 16)), 256 threads: the tile is 16 rows x 48 columns, and thread (g, i, j) of
//      16 x 4 x 4 adds 4 x 12 products for the columns of K that are g modulo 16 in groups of four; the 16 partial sums
//      are then added in order. A row's bits depend on nothing but the row.
// smem 16 x 16 x 48 floats;  arch sm_80 and up
// ref  cpu::reference::matmul::linear;  test prefill::f32_product_matches_reference
#include "common/prelude.cuh"
#include "common/step.cuh"

#define ROWS 16
#define COLUMNS 48
#define SLICES 16

extern "C" __global__ void __launch_bounds__(256)
    prefill_sgemm(const float *x, const float *w, const Chunk *chunk, int n_out, int k, float *out, int stride, int add) {
    extern __shared__ float partial[];  // [slice][row][column]
    const int rows = chunk->rows, first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    if (first_row >= rows) { return; }
    const int slice = threadIdx.x % SLICES, i = threadIdx.x / SLICES / 4, j = threadIdx.x / SLICES % 4;
    const float *xs[4], *ws[12];
#pragma unroll
    for (int r = 0; r < 4; r++) { xs[r] = x + (u64)min(first_row + i * 4 + r, rows - 1) * k; }
#pragma unroll
    for (int c = 0; c < 12; c++) { ws[c] = w + (u64)min(first_column + j + 4 * c, n_out - 1) * k; }
    float sums[4][12] = {};
    for (int at = slice * 4; at < k; at += SLICES * 4) {
        float4 a[4];
#pragma unroll
        for (int r = 0; r < 4; r++) { a[r] = *(const float4 *)(xs[r] + at); }
#pragma unroll
        for (int c = 0; c < 12; c++) {
            const float4 b = *(const float4 *)(ws[c] + at);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                sums[r][c] = fmaf(a[r].x, b.x, fmaf(a[r].y, b.y, fmaf(a[r].z, b.z, fmaf(a[r].w, b.w, sums[r][c]))));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int c = 0; c < 12; c++) { partial[(slice * ROWS + i * 4 + r) * COLUMNS + j + 4 * c] = sums[r][c]; }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * COLUMNS; at += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SLICES; s++) { sum += partial[s * ROWS * COLUMNS + at]; }
        const int row = first_row + at / COLUMNS, column = first_column + at % COLUMNS;
        if (row < rows && column < n_out) {
            float *to = out + (u64)row * stride + column;
            *to = add ? *to + sum : sum;
        }
    }
}
