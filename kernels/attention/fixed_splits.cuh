// Attention in an order that follows from a row's position alone, so that a row has the same bits whether its token is a
// node of a tree or is fed by itself later.
//
// Tiles of 64 keys stand at multiples of 64. A row at position P = 64 t + r sums, each part by itself, from 0 on:
//   spans of split_tiles(t) tiles up to tile t - 1, the last of them as far as it reaches; tile t - 1; tile t up to P
// and adds the parts in this order (slots 0, 1, ..). What stands before tile t - 1 was committed before any node of a
// tree whose root is in tile t, and a tree is at most 64 deep: so nodes share spans and have at most two tiles of their
// own, in which keys stand where they will stand once they are committed. A row has the spans that its position wants and
// no more: nodes of one tree want others where its root stands in the last tile before spans become longer.
// What a window hides counts as keys without weight; they change no bit.
// Before this file: what attention/kv_range.cuh wants; MAX_FIXED_SPLITS, the spans of a row at most; SPLITS, the slots of a row.
#pragma once
#include "attention/kv_range.cuh"

// Tiles of the spans of a row in tile `t`, and how many spans there are.
__device__ __forceinline__ int split_tiles(int t) { return t <= 1 ? 1 : (t - 2 + MAX_FIXED_SPLITS) / MAX_FIXED_SPLITS; }
__device__ __forceinline__ int num_fixed_splits(int t, int tiles) { return t <= 1 ? 0 : (t - 2 + tiles) / tiles; }

// Spans `from` .. `to` that nobody in a tree sees, of `spans` spans of `tiles` tiles.
struct HiddenSplits {
    int from, to;
};
// The tile in which a tree's window begins.
__device__ __forceinline__ int window_tile(const WindowedTree& tree) {
    return WINDOW && tree.committed >= tree.window ? (tree.committed - tree.window + 1) / KV_TILE : 0;
}
__device__ __forceinline__ HiddenSplits hidden_splits(const WindowedTree& tree, int tiles, int splits) {
    if (!WINDOW) return {0, 0};
    const int to = min(window_tile(tree) / tiles, splits);
    return {WINDOW < 0 ? min(((tree.sinks + KV_TILE - 1) / KV_TILE + tiles - 1) / tiles, to) : 0, to};
}

// SplitSlots of a row.
struct SplitSlots {
    int count;
    HiddenSplits hidden;  // slots without anything in them
};
__device__ __forceinline__ SplitSlots split_slots(const WindowedTree& tree, int position) {
    const int t = position / KV_TILE, tiles = split_tiles(t), splits = num_fixed_splits(t, tiles);
    return {splits + (t > 0) + 1, hidden_splits(tree, tiles, splits)};
}
