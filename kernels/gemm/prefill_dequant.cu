// Dequantises a packed weight matrix to f16 panels, for the prefill GEMMs.
//
// in     w [n_out][K] of kind WEIGHT_KIND (weight_layout.cuh), not F32
// out    panels of panel_rows rows; row r goes to row first + r / 8 * step + r % 8. step 16 with first 0 and 8
//        interleaves two matrices in groups of 8 rows; step 8 keeps a matrix together
// grid   (units of K, row blocks of 128) x 256, a warp per m16 tile; values are rounded as in the decode GEMMs
// define WEIGHT_KIND (a KIND_ of weight_layout.cuh)     arch sm_80 and up
// reference cpu::reference (gguf codecs)     test crates/cuda/tests/prefill_gemm.rs
#include "common/prelude.cuh"
#include "gemm/weight_layout.cuh"
#include "gemm/dequant_tile.cuh"
#include "gemm/panel_layout.cuh"

__device__ __forceinline__ void store_panel_chunk(char* panels, int panel_rows, int row, int chunk, u32 a, u32 b, u32 c,
                                                  u32 d) {
    *(uint4*)(panels + panel_chunk(panel_rows, row, chunk)) = make_uint4(a, b, c, d);
}

// Two values times a row factor, rounded; beyond the range of f16 they saturate.
__device__ __forceinline__ u32 scale_f16x2(u32 pair, float factor) {
    return panel_f16x2(f16x2_lo(pair) * factor, f16x2_hi(pair) * factor);
}

// 64 values of a tile: register j of step (b, s) holds row lane / 4 + 8 * (j % 2), values 32 b + 16 s + 8 * (j / 2) + 2
// * (lane % 4) + 0, 1. Lanes of a quad exchange, so that each writes whole chunks of eight values.
template <int KIND>
__device__ __forceinline__ void dequant_64(TileDequantizer<KIND>& tile, const u8* src, int q, char* panels,
                                           int panel_rows, const int (&row)[2], const float (&factor)[2], int block) {
    const int lane = threadIdx.x % 32;
    u32 a[2][2][4];  // [b][s][j]
    if (q) {
        tile.load_codes(src, q);
    }
    tile.select_chunk(q);
    tile.template dequant<0>(0, a[0][0]);
    tile.template dequant<1>(0, a[1][0]);
    tile.rotate_codes();
    tile.template dequant<0>(1, a[0][1]);
    tile.template dequant<1>(1, a[1][1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int b = 0; b < 2; b++) {
            u32 v[4] = {scale_f16x2(a[b][0][i], factor[i]), scale_f16x2(a[b][0][i + 2], factor[i]),
                        scale_f16x2(a[b][1][i], factor[i]), scale_f16x2(a[b][1][i + 2], factor[i])};
            quad_transpose(v);
            store_panel_chunk(panels, panel_rows, row[i], block * 8 + b * 4 + lane % 4, v[0], v[1], v[2], v[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    prefill_dequant(const u8* w, int n_out, int units, int k_tiles, char* panels, int panel_rows, int first, int step) {
    const int unit = blockIdx.x, block = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = min(8, (n_out - block * 128 + 15) / 16);
    if (warp >= tiles) {
        return;
    }
    const u8* block_weights = w + (u64)block * (128 * 4 + (u64)units * unit_tile_bytes(WEIGHT_KIND) * 8);
    const u8* src = block_weights + tiles * (64 + (u64)unit * unit_tile_bytes(WEIGHT_KIND)) +
                    warp * slice_tile_bytes(WEIGHT_KIND, 0);
    const int g = lane / 4, r = block * 128 + warp * 16 + g;
    const int row[2] = {first + r / 8 * step + r % 8, first + (r / 8 + 1) * step + r % 8};
    const float* factors = (const float*)block_weights + warp * 16 + g;
    const float factor[2] = {factors[0], factors[8]};
    TileDequantizer<WEIGHT_KIND> tile;
#pragma unroll
    for (int slice = 0; slice < unit_slices(WEIGHT_KIND); slice++) {
        if (slice) {
            src += tiles * slice_tile_bytes(WEIGHT_KIND, 0) +
                   warp * (slice_tile_bytes(WEIGHT_KIND, 1) - slice_tile_bytes(WEIGHT_KIND, 0));
        }
        if (slice) {
            tile.template load_header<1>(src);
            tile.load_codes(src, 0);
            tile.template decode_scales<1>();
        } else {
            tile.template load_header<0>(src);
            tile.load_codes(src, 0);
            tile.template decode_scales<0>();
        }
#pragma unroll
        for (int q = 0; q < slice_chunks(WEIGHT_KIND); q++) {
            const int k_tile = (unit * unit_slices(WEIGHT_KIND) + slice) * slice_chunks(WEIGHT_KIND) + q;
            if (k_tile < k_tiles) {
                dequant_64(tile, src, q, panels, panel_rows, row, factor, k_tile);
            }
        }
    }
}
