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
    const PrefillChunk* chunk;
    int rows_cap;
    int w_rows;
    int k_tiles;      // K-tiles of 64 values
    int splits;       // split-K
    int* semaphores;  // [tiles], see prefill_output.cuh; not read if splits is 1
};

// One split of one tile.
struct WorkTile {
    int row, column, first_k_tile, end_k_tile, split, index;
};

// Splits in order, in each all tiles. Rows run fastest within a raster group of 16 row tiles, so that a wave's part of
// x stays in L2 while w streams by once per raster group.
struct TileScheduler {
    int row_tiles, tiles, total;

    __device__ __forceinline__ TileScheduler(const PrefillGemmParams& params) {
        row_tiles = (params.chunk->rows + TILE_ROWS - 1) / TILE_ROWS;
        tiles = row_tiles * (params.w_rows / TILE_COLUMNS);
        total = tiles * params.splits;
    }

    __device__ __forceinline__ WorkTile at(const PrefillGemmParams& params, int index) const {
        WorkTile tile;
        tile.split = index / tiles;
        tile.index = index % tiles;
        const int raster_group = 16, columns = params.w_rows / TILE_COLUMNS;
        const int first = tile.index / (raster_group * columns) * raster_group;
        const int height = min(raster_group, row_tiles - first), within = tile.index - first * columns;
        tile.row = (first + within % height) * TILE_ROWS;
        tile.column = within / height * TILE_COLUMNS;
        const int k_tiles_per_split = (params.k_tiles + params.splits - 1) / params.splits;
        tile.first_k_tile = tile.split * k_tiles_per_split;
        tile.end_k_tile = min(params.k_tiles, tile.first_k_tile + k_tiles_per_split);
        return tile;
    }
};

// Releases the split after this one, or clears the semaphore after the last.
__device__ __forceinline__ void release_split(const PrefillGemmParams& params, const WorkTile& tile) {
    semaphore_release(params.semaphores + tile.index, tile.split + 1 == params.splits ? 0 : tile.split + 1);
}
