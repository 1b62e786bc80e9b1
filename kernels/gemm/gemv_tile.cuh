// Tiles of 16 rows of a GEMV of one row: where their weights are, how K is split, partial sums by mma, and their sum.
//
// Sums are split and added as gemm/decode_gemm_small_batch does it, so a row has its bits. gemm/gemv.cu and
// one_launch/one_launch.cu include this.
// Needs: KINDS (bit i: kind i occurs).
#pragma once
#include "common/prelude.cuh"
#include "gemm/dequant_tile.cuh"

struct Matrix {
    const u8* weights;
    float* out;  // SWIGLU: the f16 output, of the first matrix
    int n_out, add;
    int kind, units;              // along K
    int first_block, tile_bytes;  // its first block; bytes of an m16 tile in a unit
    u32 first_cost, cost;  // where its units begin on the line of gemm/decode_gemm_small_batch, and the cost of each
};
// Block b of gemm/decode_gemm_small_batch begins at b * cost_per_block + min(b, big_blocks).
struct WorkRanges {
    u32 cost_per_block, big_blocks;
};

// 16 rows of a matrix: their weights, and how gemm/decode_gemm_small_batch splits the tile of 256 rows that they belong
// to.
struct TileRows {
    const u8* weights;  // of unit 0
    int unit_stride;    // bytes from a unit to the next
    int second_slice;   // bytes from its first slice to its second
    u32 first_unit;     // its first unit, counted from the matrix's
    u32 first_block;    // the block of gemm/decode_gemm_small_batch that begins the tile
    int n;              // blocks that share it
};

__device__ __forceinline__ u32 range_begin(const WorkRanges& ranges, u32 block) {
    return block * ranges.cost_per_block + min(block, ranges.big_blocks);
}
__device__ __forceinline__ u32 block_at_cost(const WorkRanges& ranges, u32 cost) {
    const u32 wide = ranges.big_blocks * (ranges.cost_per_block + 1);
    return cost < wide ? cost / (ranges.cost_per_block + 1) : ranges.big_blocks + (cost - wide) / ranges.cost_per_block;
}
// First unit of the tile in block `part` of those that share it, or one past its last.
__device__ __forceinline__ int split_unit(const WorkRanges& ranges, const Matrix& s, const TileRows& rows, int part) {
    const u32 begin = range_begin(ranges, rows.first_block + part);
    const u32 unit = begin <= s.first_cost ? 0 : (begin - s.first_cost + s.cost - 1) / s.cost;
    return unit <= rows.first_unit ? 0 : min(s.units, int(unit - rows.first_unit));
}

// Rows 16 * index .. of a matrix.
__device__ __forceinline__ TileRows tile_rows(const WorkRanges& ranges, const Matrix& s, int index) {
    const int row_block = index / 8, tiles = min(8, (s.n_out - row_block * 128 + 15) / 16),
              first_slice_bytes = s.tile_bytes - [&] {
                  switch (s.kind) {
                      case KIND_Q4K:
                          return slice_tile_bytes(KIND_Q4K, 1);
                      case KIND_Q5K:
                          return slice_tile_bytes(KIND_Q5K, 1);
                      case KIND_Q6K:
                          return slice_tile_bytes(KIND_Q6K, 1);
                  }
                  return 0;
              }();
    const u8* block = s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8);
    TileRows rows;
    rows.weights = block + tiles * 64 + index % 8 * first_slice_bytes;
    rows.unit_stride = s.tile_bytes * tiles;
    rows.second_slice = tiles * first_slice_bytes - index % 8 * (2 * first_slice_bytes - s.tile_bytes);
    rows.first_unit = u32(index / 16) * s.units;
    const u32 begin = s.first_cost + rows.first_unit * s.cost;
    rows.first_block = block_at_cost(ranges, begin);
    rows.n = block_at_cost(ranges, begin + u32(s.units - 1) * s.cost) - rows.first_block + 1;
    return rows;
}
__device__ __forceinline__ float row_factor(const Matrix& s, int row) {
    const int row_block = row / 128;
    return __ldg((const float*)(s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8)) +
                 row % 128);
}

// One K-slice as gemm/mma_slice.cuh does it; x: consecutive f16.
template <int KIND, int SLICE>
__device__ __forceinline__ void mma_slice(TileDequantizer<KIND>& tile, const u8* weights, u32 x, float (&acc)[4]) {
    tile.template load_header<SLICE>(weights);
    tile.load_codes(weights, 0);
    tile.template decode_scales<SLICE>();
#pragma unroll
    for (int q = 0; q < slice_chunks(KIND); q++) {
        tile.select_chunk(q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 a[2][4], b[4];
            tile.template dequant<0>(s, a[0]);
            tile.template dequant<1>(s, a[1]);
            if (s == 0)
                tile.rotate_codes();
            else if (q + 1 < slice_chunks(KIND))
                tile.load_codes(weights, q + 1);
            // All columns of B are the row.
            ldmatrix_x4(b, x + q * 128 + s * 32);
            mma_f16(acc, a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            mma_f16(acc, a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
        }
    }
}
template <int KIND>
__device__ __forceinline__ void mma_units(const u8* weights, u32 x, int from, int to, float (&acc)[4]) {
    x += threadIdx.x % 32 / 16 * 64 + threadIdx.x / 8 % 2 * 16;
    TileDequantizer<KIND> tile;
    for (int unit = from; unit < to; unit++) {
        const u8* at = weights + unit * unit_tile_bytes(KIND);
        const u32 x_unit = x + unit * unit_slices(KIND) * slice_chunks(KIND) * 128;
        mma_slice<KIND, 0>(tile, at, x_unit, acc);
        if constexpr (unit_slices(KIND) == 2)
            mma_slice<KIND, 1>(tile, at + slice_tile_bytes(KIND, 0), x_unit + slice_chunks(KIND) * 128, acc);
    }
}

#define DISPATCH_KIND(CALL)                                                  \
    switch (kind) {                                                          \
        case KIND_Q4K:                                                       \
            if constexpr (KINDS >> KIND_Q4K & 1) CALL(KIND_Q4K);             \
            break;                                                           \
        case KIND_Q5K:                                                       \
            if constexpr (KINDS >> KIND_Q5K & 1) CALL(KIND_Q5K);             \
            break;                                                           \
        case KIND_Q6K:                                                       \
            if constexpr (KINDS >> KIND_Q6K & 1) CALL(KIND_Q6K);             \
            break;                                                           \
        case KIND_Q8:                                                        \
            if constexpr (KINDS >> KIND_Q8 & 1) CALL(KIND_Q8);               \
            break;                                                           \
        case KIND_U8_AFFINE:                                                 \
            if constexpr (KINDS >> KIND_U8_AFFINE & 1) CALL(KIND_U8_AFFINE); \
            break;                                                           \
        case KIND_F16:                                                       \
            if constexpr (KINDS >> KIND_F16 & 1) CALL(KIND_F16);             \
            break;                                                           \
    }

// A row's result from the `n` partial sums of its tile, 16 floats apart.
__device__ __forceinline__ float sum_of_parts(const float* from, int n, float factor, float residual) {
    // Sums of several blocks begin at +0 in gemm/decode_gemm_small_batch.
    float sum = n > 1 ? 0.0f + from[0] : from[0];
    for (int part = 1; part < n; part++) sum += from[part * 16];
    return residual + sum * factor;
}
