// units.cuh for a warpgroup of sm_90a: the same products in the same order, with B read from shared memory by the tensor cores,
// so that 64 rows share what units.cuh reads for 16. The bits are the same (test). All four warps of a warpgroup come here together.
// Products of one step go together; while they run, the weights of the next are expanded into other registers.
#pragma once
#include "matmul/units.cuh"
#include "matmul/wgmma_sm90.cuh"

template <int KIND, int M, int N, int P>
__device__ __forceinline__ void multiply_grouped(Tile<KIND> (&tile)[M], const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    const u32 x_address = shared_address(x);
    u32 a[2][2][M][4];  // in turn; b, m
#pragma unroll
    for (int m = 0; m < M; m++) tile[m].template piece<P>(w[m]);
#pragma unroll
    for (int q = 0; q < piece_chunks(KIND); q++) {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].quarter(w[m], q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                tile[m].template step<0>(s, a[s][0][m]);
                tile[m].template step<1>(s, a[s][1][m]);
                if (s == 0) tile[m].turn();
            }
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int m = 0; m < M; m++) wgmma_f16(acc[m], a[s][b][m], wgmma_operand(x_address + q * N * 1024 + b * 512 + s * 256, 1024));
            wgmma_commit();
            wgmma_wait<1>();
        }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < M; m++) wgmma_done(acc[m]);
}
