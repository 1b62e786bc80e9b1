// Fixed KV splits (batch-invariant decode): the summation order follows from a row's position alone, so a row has the
// same bits as a node of a tree and as a single token.
//
// Tiles of 64 keys start at multiples of 64. A row at position P = 64 t + r has these parts, each accumulated from 0:
//   splits of split_tiles(t) tiles up to tile t - 1, the last one possibly shorter; tile t - 1; tile t up to P
// and combine_splits adds them in this order (slots 0, 1, ..). Keys before tile t - 1 were committed before any node of
// a tree whose root is in tile t, and a tree is at most 64 deep. So nodes share all splits and have at most two private
// tiles, where keys have the positions they will have after the commit. The number of splits follows from the row's
// position: if the root is in the last tile before splits grow longer, nodes of one tree use two different cuts.
// Keys outside a window get zero weight, which changes no bit.
// Needs: the defines of kv_range.cuh; MAX_FIXED_SPLITS, the most splits of a row; SPLITS, the slots of a row.
#pragma once
#include "attention/kv_range.cuh"

// Tiles per split of a row in tile t, and the number of its splits.
__device__ __forceinline__ int split_tiles(int t) { return t <= 1 ? 1 : (t - 2 + MAX_FIXED_SPLITS) / MAX_FIXED_SPLITS; }
__device__ __forceinline__ int num_fixed_splits(int t, int tiles) { return t <= 1 ? 0 : (t - 2 + tiles) / tiles; }

// Splits begin .. end of `splits`, each of `tiles` tiles, that no row of the tree sees.
struct MaskedSplits {
    int begin, end;
};
// Tile where the window of a tree begins.
__device__ __forceinline__ int window_tile(const WindowedTree& tree) {
    return WINDOW && tree.committed >= tree.window ? (tree.committed - tree.window + 1) / KV_TILE : 0;
}
__device__ __forceinline__ MaskedSplits masked_splits(const WindowedTree& tree, int tiles, int splits) {
    if (!WINDOW) return {0, 0};
    const int end = min(window_tile(tree) / tiles, splits);
    return {WINDOW < 0 ? min(((tree.sinks + KV_TILE - 1) / KV_TILE + tiles - 1) / tiles, end) : 0, end};
}

// Slots of a row in the partial results.
struct SplitSlots {
    int count;
    MaskedSplits masked;  // slots without keys
};
__device__ __forceinline__ SplitSlots split_slots(const WindowedTree& tree, int position) {
    const int t = position / KV_TILE, tiles = split_tiles(t), splits = num_fixed_splits(t, tiles);
    return {splits + (t > 0) + 1, masked_splits(tree, tiles, splits)};
}
