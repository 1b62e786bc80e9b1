// How the rows of a prompt's chunk are grouped by expert: positions in the order of experts, cut into tiles of rows.
#pragma once

#define TILE_ROWS 64

// Up to TILE_ROWS rows of one expert. The others of its positions belong to other tiles.
struct ExpertTile {
    int expert;
    int first;  // position of the first row
    int n;      // rows
    int _pad;
};

// In device memory. Pair `row * USED + i` is choice i of a row.
struct PrefillWork {
    int* n_tiles;
    ExpertTile* tiles;
    int* pair_at;  // [pairs], by position
};
