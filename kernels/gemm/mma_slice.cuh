// One K-slice by mma.sync: 16 * M rows of weights times 8 * N rows of activations over 128 or 64 values of K, into f32
// accumulators. Operands are in shared memory, see weight_layout.cuh and a16_layout.cuh.
//
// MMAs of 16 values go into the same accumulator in the order of dequant_tile.cuh for any N: values 0, 32, 16, 48 on of
// every 64. So a row's bits depend on no other row. w[m]: the warp's tile in each of its M row blocks. x: 64 values of
// all n8 tiles, then the next 64. acc: C fragments.
//
// The first codes of a slice are loaded (`load_first_chunk`) while MMAs of the slice before still run: `prefetch_next`
// is called once, when all codes of this slice are in registers; it may wait for the next slice and load.
#pragma once
#include "gemm/a16_layout.cuh"
#include "gemm/dequant_tile.cuh"

template <int SLICE, int KIND, int M>
__device__ __forceinline__ void load_first_chunk(TileDequantizer<KIND> (&tile)[M], const u8* const (&w)[M]) {
    load_headers<SLICE>(tile, w);
#pragma unroll
    for (int m = 0; m < M; m++) tile[m].load_codes(w[m], 0);
}

// x_of_chunk(q): the address of 64 values of x; called once the products of the chunk before have read theirs.
template <int KIND, int M, int N, int SLICE, typename XOfChunk, typename PrefetchNext>
__device__ __forceinline__ void mma_slice(TileDequantizer<KIND> (&tile)[M], const u8* const (&w)[M],
                                          const XOfChunk& x_of_chunk, float (&acc)[M][N][4],
                                          const PrefetchNext& prefetch_next) {
    // ldmatrix: values 0..15 and 32..47 of 64 for s = 0, 16 more for s = 1.
    const int lane = threadIdx.x % 32;
    const u32 of_lane = lane / 16 * 512 + lane % 16 * 16;
    constexpr int N_AT_A_TIME = N <= 4 ? N : N == 6 ? 3 : N == 8 ? 4 : 1;  // n8 tiles per step
    constexpr int CHUNKS = slice_chunks(KIND);
    decode_scales_all<SLICE>(tile);
#pragma unroll
    for (int q = 0; q < CHUNKS; q++) {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].select_chunk(q);
        const u32 x = x_of_chunk(q) + of_lane;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 a[2][M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                tile[m].template dequant<0>(s, a[0][m]);
                tile[m].template dequant<1>(s, a[1][m]);
                if (s == 0)
                    tile[m].rotate_codes();
                else if (q + 1 < CHUNKS)
                    tile[m].load_codes(w[m], q + 1);
            }
#pragma unroll
            for (int n0 = 0; n0 < N; n0 += N_AT_A_TIME) {
                u32 b[N_AT_A_TIME][4];
#pragma unroll
                for (int n = 0; n < N_AT_A_TIME; n++) ldmatrix_x4(b[n], x + (n0 + n) * 1024 + s * 256);
                if (q + 1 == CHUNKS && s == 1 && n0 + N_AT_A_TIME >= N) prefetch_next();
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int n = 0; n < N_AT_A_TIME; n++)
                            mma_f16(acc[m][n0 + n], a[half][m][0], a[half][m][1], a[half][m][2], a[half][m][3],
                                    b[n][2 * half], b[n][2 * half + 1]);
            }
        }
    }
}

// The same for a slice of x in one place.
template <int KIND, int M, int N, int SLICE, typename PrefetchNext>
__device__ __forceinline__ void mma_slice(TileDequantizer<KIND> (&tile)[M], const u8* const (&w)[M], const u8* x,
                                          float (&acc)[M][N][4], const PrefetchNext& prefetch_next) {
    const u32 first = shared_address(x);
    mma_slice<KIND, M, N, SLICE>(tile, w, [&](int q) { return first + q * N * 1024; }, acc, prefetch_next);
}

// The whole slice, without prefetch.
template <int KIND, int M, int N, int SLICE>
__device__ __forceinline__ void mma_slice(TileDequantizer<KIND> (&tile)[M], const u8* const (&w)[M], const u8* x,
                                          float (&acc)[M][N][4]) {
    load_first_chunk<SLICE>(tile, w);
    mma_slice<KIND, M, N, SLICE>(tile, w, x, acc, []() {});
}
