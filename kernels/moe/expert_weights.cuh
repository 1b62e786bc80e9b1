// Weights of experts: a stack is one packed matrix (gemm/weight_layout.cuh) with the rows of all experts, expert by
// expert. The rows of an expert are a multiple of 128, so an expert has row blocks of eight m16 tiles of its own.
//
// With EXPERT_TABLE, experts lie apart: a table has the address of each, on the device or of page-locked host memory
// that is read over the bus, and a stack is the offset of its matrix behind that address. The host writes the table
// between steps. Bits of results do not depend on it.
#pragma once
#include "common/prelude.cuh"
#include "common/sync.cuh"
#include "gemm/dequant_tile.cuh"

#ifndef EXPERT_TABLE
#define EXPERT_TABLE 0
#endif

struct ExpertStack {
    const u8* weights;  // an offset with EXPERT_TABLE, but for the shared expert
    int tiles;          // m16 tiles of an expert
    int cols;           // K, a multiple of 128
};

template <int VALUE>
struct SliceConstant {
    static constexpr int value = VALUE;
};

// Units that a warp copies and multiplies at a time, and their values of K.
__device__ constexpr int step_units(int kind) { return kind <= KIND_Q6K ? 1 : 2; }
__device__ constexpr int step_values(int kind) { return kind <= KIND_Q6K ? 256 : 128; }
__device__ constexpr int step_bytes(int kind) { return step_units(kind) * unit_tile_bytes(kind); }
// Steps along K; padding of K is left out.
__device__ __forceinline__ int n_steps(int kind, int cols) { return cols / step_values(kind); }

// Bytes of a row block.
template <int KIND>
__device__ __forceinline__ size_t row_block_bytes(const ExpertStack& s) {
    const int units = (s.cols + 255) / 256 * (unit_slices(KIND) == 2 ? 1 : 4);
    return 512 + size_t(units) * unit_tile_bytes(KIND) * 8;
}
// The row block of an m16 tile of the shared expert.
template <int KIND>
__device__ __forceinline__ const u8* shared_row_block(const ExpertStack& s, int tile) {
    return s.weights + size_t(tile / 8) * row_block_bytes<KIND>(s);
}
// The row block of an m16 tile of an expert.
template <int KIND>
__device__ __forceinline__ const u8* expert_row_block(const ExpertStack& s, const u64* table, int expert, int tile) {
#if EXPERT_TABLE
    return (const u8*)(__ldg(table + expert) + (u64)s.weights) + size_t(tile / 8) * row_block_bytes<KIND>(s);
#else
    return s.weights + size_t(expert * (s.tiles / 8) + tile / 8) * row_block_bytes<KIND>(s);
#endif
}
__device__ __forceinline__ float row_factor(const u8* row_block, int tile, int row) {
    return __ldg((const float*)row_block + tile % 8 * 16 + row);
}

// The halves of a step: its slices, or its units. Bytes of a tile in each.
__device__ constexpr int half_bytes(int kind, int half) {
    return unit_slices(kind) == 2 ? slice_tile_bytes(kind, half) : unit_tile_bytes(kind);
}

// By a warp: starts to copy half `HALF` of step `step` of a tile. `to` is where the step begins in shared memory.
template <int KIND, int HALF>
__device__ __forceinline__ void copy_half(u32 to, const u8* row_block, int tile, int step) {
    constexpr int BYTES = half_bytes(KIND, HALF), BEFORE = HALF ? half_bytes(KIND, 0) : 0;
    const int lane = threadIdx.x % 32;
    const u8* from = row_block + 512 + size_t(step) * step_bytes(KIND) * 8 + BEFORE * 8 + tile % 8 * BYTES;
#pragma unroll
    for (int i = 0; i < (BYTES + 511) / 512; i++)
        if (i * 32 + lane < BYTES / 16) cp_async_16(to + BEFORE + (i * 32 + lane) * 16, from + (i * 32 + lane) * 16);
}

// Rows of x of a step in shared memory, f16: bytes from a row to the next. 16 more than the values take, so that the
// rows of a B fragment lie in other banks.
__device__ constexpr int x_stride(int kind) { return step_values(kind) * 2 + 16; }

// Adds a step of M tiles times up to eight rows of x, both in shared memory, to acc. MMAs of 16 values go into acc in
// the order of gemm/mma_slice.cuh. x: the lane's row, value 2 * (lane % 4). `wait` is called before each half is read.
template <int KIND, int M, typename Wait>
__device__ __forceinline__ void multiply_step(const u8* const (&at)[M], const u8* x, float (&acc)[M][4],
                                              const Wait& wait) {
    TileDequantizer<KIND> tile[M];
    constexpr int CHUNKS = slice_chunks(KIND);
    const auto run_half = [&](auto half_constant) {
        constexpr int HALF = decltype(half_constant)::value, SLICE = unit_slices(KIND) == 2 ? HALF : 0;
        wait(half_constant);
        const u8* w[M];
#pragma unroll
        for (int m = 0; m < M; m++) w[m] = at[m] + (HALF ? half_bytes(KIND, 0) : 0);
        load_headers<SLICE>(tile, w);
#pragma unroll
        for (int m = 0; m < M; m++) tile[m].load_codes(w[m], 0);
        decode_scales_all<SLICE>(tile);
#pragma unroll
        for (int q = 0; q < CHUNKS; q++) {
#pragma unroll
            for (int m = 0; m < M; m++) tile[m].select_chunk(q);
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
                for (int run = 0; run < 2; run++) {
                    const u8* from = x + ((HALF * CHUNKS + q) * 4 + 2 * run + s) * 32;
                    const u32 b0 = *(const u32*)from, b1 = *(const u32*)(from + 16);
#pragma unroll
                    for (int m = 0; m < M; m++)
                        mma_f16(acc[m], a[run][m][0], a[run][m][1], a[run][m][2], a[run][m][3], b0, b1);
                }
            }
        }
    };
    run_half(SliceConstant<0>());
    run_half(SliceConstant<1>());
}
