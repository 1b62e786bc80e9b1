// One piece of a small-batch product: 16 * M rows of weights times 8 * N rows of activations over 128 or 64 values of K, added
// to f32 accumulators. Everything is in shared memory, laid out as layout.cuh and a16.cuh say.
//
// Products of 16 values go in the order of tiles.cuh (values 0, 32, 16, 48 on of every 64) whatever N is, one after the other into
// the same accumulator, so a row's bits depend on no other row. w[m]: the warp's tile of each of its M row blocks; x: the
// piece's activations, 64 values of all N tiles after 64 values. acc as the C fragment.
//
// What comes first of a piece is fetched (`fetch_first`) while products of the piece before it still run: `ahead` is called once, when
// the piece's codes are all in registers, and may wait for the next piece and fetch.
#pragma once
#include "matmul/a16.cuh"
#include "matmul/tiles.cuh"

template <int P, int KIND, int M>
__device__ __forceinline__ void fetch_first(Tile<KIND> (&tile)[M], const u8* const (&w)[M]) {
    heads<P>(tile, w);
#pragma unroll
    for (int m = 0; m < M; m++) tile[m].fetch(w[m], 0);
}

template <int KIND, int M, int N, int P, typename Ahead>
__device__ __forceinline__ void multiply(Tile<KIND> (&tile)[M], const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4], const Ahead& ahead) {
    const int lane = threadIdx.x % 32;
    // ldmatrix: values 0..15 and 32..47 of 64 for s = 0, 16 more for s = 1.
    const u32 x_address = shared_address(x) + lane / 16 * 512 + lane % 16 * 16;
    constexpr int COLUMNS = N <= 4 ? N : N == 6 ? 3 : N == 8 ? 4 : 1;  // at a time
    constexpr int QUARTERS = piece_chunks(KIND);
    begin_all<P>(tile);
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].ready(q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 a[2][M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                tile[m].template step<0>(s, a[0][m]);
                tile[m].template step<1>(s, a[1][m]);
                if (s == 0)
                    tile[m].turn();
                else if (q + 1 < QUARTERS)
                    tile[m].fetch(w[m], q + 1);
            }
#pragma unroll
            for (int n0 = 0; n0 < N; n0 += COLUMNS) {
                u32 b[COLUMNS][4];
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) ldmatrix_x4(b[n], x_address + (q * N + n0 + n) * 1024 + s * 256);
                if (q + 1 == QUARTERS && s == 1 && n0 + COLUMNS >= N) ahead();
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int n = 0; n < COLUMNS; n++)
                            mma_f16(acc[m][n0 + n], a[half][m][0], a[half][m][1], a[half][m][2], a[half][m][3], b[n][2 * half], b[n][2 * half + 1]);
            }
        }
    }
}

// All of one piece, nothing ahead.
template <int KIND, int M, int N, int P>
__device__ __forceinline__ void multiply(Tile<KIND> (&tile)[M], const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    fetch_first<P>(tile, w);
    multiply<KIND, M, N, P>(tile, w, x, acc, []() {});
}
