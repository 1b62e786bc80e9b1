// Tile scheduler of the prefill GEMMs: the order in which persistent blocks take tiles.
//
// The including file defines TILE_ROWS and TILE_COLUMNS.
#pragma once
#include "common/step.cuh"
#include "common/sync.cuh"

// Arguments of a prefill GEMM.
struct PrefillGemmParams {
    const char* x;  // panels of rows_cap rows
    const char* w;  // panels of w_rows rows
    const Chunk* chunk;
    int rows_cap;
    int w_rows;
    int k_blocks;     // K-slices of 64
    int splits;       // split-K
    int* semaphores;  // [tiles], see prefill_output.cuh; not read if splits is 1
};

// One split of one tile.
struct WorkTile {
    int row, column, first_block, end_block, split, index;
};

// Splits in order, in each all tiles. Rows run fastest within a band of 16 row tiles, so that a wave's part of x stays
// in L2 while w streams by once per band.
struct TileScheduler {
    int row_groups, tiles, total;

    __device__ __forceinline__ TileScheduler(const PrefillGemmParams& params) {
        row_groups = (params.chunk->rows + TILE_ROWS - 1) / TILE_ROWS;
        tiles = row_groups * (params.w_rows / TILE_COLUMNS);
        total = tiles * params.splits;
    }

    __device__ __forceinline__ WorkTile at(const PrefillGemmParams& params, int index) const {
        WorkTile tile;
        tile.split = index / tiles;
        tile.index = index % tiles;
        const int band = 16, columns = params.w_rows / TILE_COLUMNS;
        const int first = tile.index / (band * columns) * band;
        const int height = min(band, row_groups - first), within = tile.index - first * columns;
        tile.row = (first + within % height) * TILE_ROWS;
        tile.column = within / height * TILE_COLUMNS;
        const int blocks_per_split = (params.k_blocks + params.splits - 1) / params.splits;
        tile.first_block = tile.split * blocks_per_split;
        tile.end_block = min(params.k_blocks, tile.first_block + blocks_per_split);
        return tile;
    }
};

// Releases the split after this one, or clears the semaphore after the last.
__device__ __forceinline__ void release_split(const PrefillGemmParams& params, const WorkTile& tile) {
    semaphore_release(params.semaphores + tile.index, tile.split + 1 == params.splits ? 0 : tile.split + 1);
}
