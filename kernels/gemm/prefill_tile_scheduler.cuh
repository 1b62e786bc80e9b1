// The tiles of a prefill product in the order in which persistent blocks take them.
//
// Before this file: TILE_ROWS, TILE_COLUMNS.
#pragma once

// A product as its kernel was given it.
struct PrefillGemmParams {
    const char *x; // panels of rows_cap rows
    const char *w; // panels of w_rows rows
    const Chunk *chunk;
    int rows_cap;
    int w_rows;
    int k_blocks; // slices of 64 columns
    int splits;   // parts that K is cut in
    int *semaphores;   // [tiles], see target.cuh; not read where splits is 1
};

// One split of one tile.
struct WorkTile {
    int row, column, first_block, end_block, split, tile;
};

// Parts in order, in each split all tiles; rows run fastest within a band of 16 tiles of rows, so that what a wave
// reads of x stays in the L2 cache while w streams by once per band.
struct TileScheduler {
    int row_groups, tiles, total;

    __device__ __forceinline__ TileScheduler(const PrefillGemmParams &params) {
        row_groups = (params.chunk->rows + TILE_ROWS - 1) / TILE_ROWS;
        tiles = row_groups * (params.w_rows / TILE_COLUMNS);
        total = tiles * params.splits;
    }

    __device__ __forceinline__ WorkTile at(const PrefillGemmParams &params, int index) const {
        WorkTile tile;
        tile.split = index / tiles;
        tile.tile = index % tiles;
        const int band = 16, columns = params.w_rows / TILE_COLUMNS;
        const int first = tile.tile / (band * columns) * band;
        const int height = min(band, row_groups - first), within = tile.tile - first * columns;
        tile.row = (first + within % height) * TILE_ROWS;
        tile.column = within / height * TILE_COLUMNS;
        const int blocks_per_split = (params.k_blocks + params.splits - 1) / params.splits;
        tile.first_block = tile.split * blocks_per_split;
        tile.end_block = min(params.k_blocks, tile.first_block + blocks_per_split);
        return tile;
    }
};
