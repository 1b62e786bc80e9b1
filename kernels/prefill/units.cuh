// The tiles of a prefill product in the order in which persistent blocks take them.
//
// Before this file: TILE_ROWS, TILE_COLUMNS.
#pragma once

// A product as its kernel was given it.
struct Work {
    const char *x; // panels of rows_cap rows
    const char *w; // panels of w_rows rows
    const Chunk *chunk;
    int rows_cap;
    int w_rows;
    int k_blocks; // slices of 64 columns
    int splits;   // parts that K is cut in
    int *turns;   // [tiles], see target.cuh; not read where splits is 1
};

// One part of one tile.
struct Unit {
    int row, column, first_block, end_block, part, tile;
};

// Parts in order, in each part all tiles; rows run fastest within a band of 16 tiles of rows, so that what a wave
// reads of x stays in the L2 cache while w streams by once per band.
struct Units {
    int row_groups, tiles, total;

    __device__ __forceinline__ Units(const Work &work) {
        row_groups = (work.chunk->rows + TILE_ROWS - 1) / TILE_ROWS;
        tiles = row_groups * (work.w_rows / TILE_COLUMNS);
        total = tiles * work.splits;
    }

    __device__ __forceinline__ Unit at(const Work &work, int index) const {
        Unit unit;
        unit.part = index / tiles;
        unit.tile = index % tiles;
        const int band = 16, columns = work.w_rows / TILE_COLUMNS;
        const int first = unit.tile / (band * columns) * band;
        const int height = min(band, row_groups - first), within = unit.tile - first * columns;
        unit.row = (first + within % height) * TILE_ROWS;
        unit.column = within / height * TILE_COLUMNS;
        const int share = (work.k_blocks + work.splits - 1) / work.splits;
        unit.first_block = unit.part * share;
        unit.end_block = min(work.k_blocks, unit.first_block + share);
        return unit;
    }
};
