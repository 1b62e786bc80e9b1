// One K-slice by wgmma: the MMAs of mma_slice.cuh in the same order, with B read from shared memory, so that 64 rows of
// weights share what mma_slice.cuh reads for 16. The bits are the same (test). All four warps of a warpgroup must take
// part.
// While MMAs of a step run, the weights of the next are dequantised into other registers; MMAs of a slice's last step
// overlap the next slice. `on_previous_drained`: called when all MMAs of earlier slices have ended. `peek_next`: called
// a step before `prefetch_next`. `load_codes(m, q)`: codes of chunk q of tile m. `x`: wgmma_desc_low of the slice's x,
// warp-uniform. After the last slice: wgmma_drain.
#pragma once
#include "gemm/mma_slice.cuh"
#include "gemm/wgmma_small_n_sm90.cuh"

template <int KIND, int M, int N, int SLICE, typename LoadCodes, typename PrefetchNext, typename OnPreviousDrained,
          typename PeekNext>
__device__ __forceinline__ void wgmma_slice(TileDequantizer<KIND> (&tile)[M], const LoadCodes& load_codes, u32 x,
                                            float (&acc)[M][N][4], const PrefetchNext& prefetch_next,
                                            const OnPreviousDrained& on_previous_drained, const PeekNext& peek_next) {
    constexpr int CHUNKS = slice_chunks(KIND);
    const u64 base = wgmma_desc_no_swizzle(x, 1024);
    u32 a[2][2][M][4];  // [double buffer][b][m]
    decode_scales_all<SLICE>(tile);
#pragma unroll
    for (int q = 0; q < CHUNKS; q++) {
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].select_chunk(q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                tile[m].template dequant<0>(s, a[s][0][m]);
                tile[m].template dequant<1>(s, a[s][1][m]);
                if (s == 0)
                    tile[m].rotate_codes();
                else if (q + 1 < CHUNKS)
                    load_codes(m, q + 1);
            }
            if (q + 1 == CHUNKS && s == 1) prefetch_next();
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int m = 0; m < M; m++)
                    wgmma_f16(acc[m], a[s][b][m], base + u64((q * N * 1024 + b * 512 + s * 256) / 16));
            wgmma_commit();
            if (q + 1 == CHUNKS && s == 0) peek_next();
            wgmma_wait<1>();
            if (q == 0 && s == 0) on_previous_drained();
        }
    }
}

template <int M, int N>
__device__ __forceinline__ void wgmma_drain(float (&acc)[M][N][4]) {
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < M; m++) wgmma_fence_operand(acc[m]);
}
