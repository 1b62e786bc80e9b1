// matmul/plain: out[row][n] (+)= sum over k of W[n][k] * x[row][k], everything f32 and row-major, for a few rows (1..64).
//
// For the few matrices that a file stores as f32 (gate projections of some files, 48 x 5120), where other forms would round.
// Grid: a block per 8 rows of W of every segment; its eight warps each take an eighth of K (256-value turns), a lane 8
// values of a turn. Rows of x go in passes of PASS. Sums: over a lane's values in order of k, then the warp's lanes by
// halves, then the warps in order; none depends on ROWS. Shared memory: 8 * 8 * PASS floats.
// Defines: ROWS (bucket), SEGMENTS. Architecture floor: sm_80. Judge: cpu::reference::matmul; test crates/cuda/tests/matmul.rs.
#include "common/prelude.cuh"

#define PASS (ROWS < 4 ? ROWS : 4)

struct Segment {
    const float* weights;  // [n_out][cols]
    float* out;            // [ROWS][stride]
    int n_out, stride;
    int add, first;        // first: the segment's first block
};
struct Work {
    Segment segments[SEGMENTS];
    const float* x;  // [ROWS][cols]
    int n_segments, cols;
};

extern "C" __global__ void __launch_bounds__(256) matmul_plain(const __grid_constant__ Work work) {
    __shared__ float room[8][8][PASS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_launch();
    int which = 0;
    while (which + 1 < work.n_segments && int(blockIdx.x) >= work.segments[which + 1].first) which++;
    const Segment& s = work.segments[which];
    const int n0 = (blockIdx.x - s.first) * 8, cols = work.cols;
    pdl_wait();
    for (int row0 = 0; row0 < ROWS; row0 += PASS) {
        float sum[8][PASS];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int r = 0; r < PASS; r++) sum[n][r] = 0.0f;
        for (int k0 = (warp * 32 + lane) * 4; k0 < cols; k0 += 1024) {
            float4 x[PASS];
#pragma unroll
            for (int r = 0; r < PASS; r++) {
                const float* from = work.x + size_t(min(row0 + r, ROWS - 1)) * cols + k0;
                x[r] = cols % 4 == 0 ? *(const float4*)from
                                     : make_float4(from[0], k0 + 1 < cols ? from[1] : 0.0f, k0 + 2 < cols ? from[2] : 0.0f, k0 + 3 < cols ? from[3] : 0.0f);
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float* from = s.weights + size_t(min(n0 + n, s.n_out - 1)) * cols + k0;
                const float4 w = cols % 4 == 0 ? *(const float4*)from
                                               : make_float4(from[0], k0 + 1 < cols ? from[1] : 0.0f, k0 + 2 < cols ? from[2] : 0.0f, k0 + 3 < cols ? from[3] : 0.0f);
#pragma unroll
                for (int r = 0; r < PASS; r++) {
                    sum[n][r] = fmaf(w.x, x[r].x, sum[n][r]);
                    sum[n][r] = fmaf(w.y, x[r].y, sum[n][r]);
                    sum[n][r] = fmaf(w.z, x[r].z, sum[n][r]);
                    sum[n][r] = fmaf(w.w, x[r].w, sum[n][r]);
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int r = 0; r < PASS; r++) {
                const float v = warp_sum(sum[n][r]);
                if (lane == 0) room[warp][n][r] = v;
            }
        __syncthreads();
        const int n = threadIdx.x / PASS, r = threadIdx.x % PASS;
        if (n < 8 && n0 + n < s.n_out && row0 + r < ROWS) {
            float v = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) v += room[w][n][r];
            float* to = s.out + size_t(row0 + r) * s.stride + n0 + n;
            *to = s.add ? *to + v : v;
        }
    }
}
