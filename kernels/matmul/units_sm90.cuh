// units.cuh for a warpgroup of sm_90a: the same products in the same order, with B read from shared memory by the tensor cores,
// so that 64 rows share what units.cuh reads for 16. The bits are the same (test). All four warps of a warpgroup come here together.
// Products of one step go together; while they run, the weights of the next are expanded into other registers, and those of a piece's
// last step run on into the next piece: `done` is called when all products of the pieces before have ended, `look` a step before
// `ahead`. `fetch(m, q)`: codes of quarter q of tile m; `x`: wgmma_operand_low of the piece's, the same in all lanes. After the last
// piece of all: products_end.
#pragma once
#include "matmul/units.cuh"
#include "matmul/wgmma_sm90.cuh"

template <int KIND, int M, int N, int P, typename Fetch, typename Ahead, typename Done, typename Look>
__device__ __forceinline__ void multiply_grouped(Tile<KIND> (&tile)[M], const Fetch& fetch, u32 x, float (&acc)[M][N][4], const Ahead& ahead,
                                                 const Done& done, const Look& look) {
    constexpr int QUARTERS = piece_chunks(KIND);
    const u64 base = wgmma_operand(x, 1024);
    u32 a[2][2][M][4];  // in turn; b, m
    begin_all<P>(tile);
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].ready(q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                tile[m].template step<0>(s, a[s][0][m]);
                tile[m].template step<1>(s, a[s][1][m]);
                if (s == 0)
                    tile[m].turn();
                else if (q + 1 < QUARTERS)
                    fetch(m, q + 1);
            }
            if (q + 1 == QUARTERS && s == 1) ahead();
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int m = 0; m < M; m++) wgmma_f16(acc[m], a[s][b][m], base + u64((q * N * 1024 + b * 512 + s * 256) / 16));
            wgmma_commit();
            if (q + 1 == QUARTERS && s == 0) look();
            wgmma_wait<1>();
            if (q == 0 && s == 0) done();
        }
    }
}

template <int M, int N>
__device__ __forceinline__ void products_end(float (&acc)[M][N][4]) {
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < M; m++) wgmma_done(acc[m]);
}
