// Prefill GEMM for f32 weights: out[rows][n_out] = (add ? out : 0) + x[rows][K] w[n_out][K]^T.
//
// 3xTF32 on tensor cores: x = high + low, and a product is high * high + high * low + low * high, which leaves out
// 2^-20 of it. Tensor cores truncate sums too: 5e-6 of a row's norm at K = 5120 (measured); f32 FMA loses 1e-6.
//
// in   x f32 [rows][K]      w f32 [n_out][K] of up to four matrices      K a multiple of 4
// out  f32 [rows][stride] of each
// grid (ceil(columns / 48), ceil(largest chunk / 32)) x 256: a block has 32 rows and 48 columns, each matrix padded to
//      8 columns. Eight warps take K in steps of 16 in turn, and their sums are added in order, so a row's bits depend
//      on nothing but the row. In a step, lane t of a quad holds k = 4t .. 4t + 3 of both operands: the same order of k
//      in both
// smem 8 x 32 x 48 floats (48 KB)     arch sm_80 and up
// reference cpu::reference::matmul::linear     test crates/cuda/tests/prefill_gemm.rs
#include "common/prelude.cuh"
#include "common/step.cuh"

#define WARPS 8
#define ROWS 32
#define COLUMNS 48
#define TILES (COLUMNS / 8)

struct F32Matrix {
    const float* w;  // [width][K]
    float* out;      // [rows][stride]
    int width, stride;
};

struct F32Matrices {
    F32Matrix at[4];
};

// The matrix of padded column `column`, which becomes relative to it.
__device__ __forceinline__ F32Matrix f32_matrix_of(const F32Matrices& matrices, int& column) {
    F32Matrix matrix = matrices.at[0];
#pragma unroll
    for (int i = 1; i < 4; i++) {
        const int padded = (matrix.width + 7) & ~7;
        if (column < padded || matrices.at[i].width == 0) {
            break;
        }
        column -= padded;
        matrix = matrices.at[i];
    }
    return matrix;
}

// Four floats as tf32 terms.
struct Tf32Split {
    u32 high[4], low[4];

    __device__ __forceinline__ Tf32Split(const float* from, bool in_bounds) {
        const float4 v = in_bounds ? *(const float4*)from : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            high[i] = __float_as_uint(x[i]) & 0xffffe000u;
            low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    prefill_sgemm(const float* x, const PrefillChunk* chunk, int k, F32Matrices matrices, int add) {
    extern __shared__ float warp_sums_smem[];  // [warp][row][column]
    const int rows = chunk->rows, first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    if (first_row >= rows) {
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float *xs[4], *ws[TILES];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        xs[i] = x + (u64)min(first_row + i * 8 + g, rows - 1) * k + t * 4;
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        int column = first_column + j * 8 + g;
        const F32Matrix from = f32_matrix_of(matrices, column);
        ws[j] = from.w + (u64)min(column, from.width - 1) * k + t * 4;
    }
    float sums[2][TILES][4] = {};
#pragma unroll 2
    for (int at = warp * 16; at < k; at += WARPS * 16) {
        const bool in_bounds = at + t * 4 < k;
        const Tf32Split a[4] = {Tf32Split(xs[0] + at, in_bounds), Tf32Split(xs[1] + at, in_bounds),
                                Tf32Split(xs[2] + at, in_bounds), Tf32Split(xs[3] + at, in_bounds)};
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            const Tf32Split b(ws[j] + at, in_bounds);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Tf32Split &upper = a[2 * i], &lower = a[2 * i + 1];
#pragma unroll
                for (int s = 0; s < 4; s += 2) {
                    mma_tf32(sums[i][j], upper.low[s], lower.low[s], upper.low[s + 1], lower.low[s + 1], b.high[s],
                             b.high[s + 1]);
                    mma_tf32(sums[i][j], upper.high[s], lower.high[s], upper.high[s + 1], lower.high[s + 1], b.low[s],
                             b.low[s + 1]);
                    mma_tf32(sums[i][j], upper.high[s], lower.high[s], upper.high[s + 1], lower.high[s + 1], b.high[s],
                             b.high[s + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < TILES; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float* dst = warp_sums_smem + (warp * ROWS + i * 16 + half * 8 + g) * COLUMNS + j * 8 + t * 2;
                *(float2*)dst = make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
            }
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * COLUMNS; at += WARPS * 32) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            sum += warp_sums_smem[i * ROWS * COLUMNS + at];
        }
        int column = first_column + at % COLUMNS;
        const int row = first_row + at / COLUMNS;
        const F32Matrix dst = f32_matrix_of(matrices, column);
        if (row < rows && column < dst.width) {
            float* out = dst.out + (u64)row * dst.stride + column;
            *out = add ? *out + sum : sum;
        }
    }
}
