// Attention in an order that follows from a row's position alone, so that a row has the same bits whether its token is a
// node of a tree or is fed by itself later.
//
// Tiles of 64 keys stand at multiples of 64. A row at position P = 64 t + r sums, each part by itself, from 0 on:
//   spans of span_tiles(t) tiles up to tile t - 1, the last of them as far as it reaches; tile t - 1; tile t up to P
// and adds the parts in this order (slots 0, 1, ..). What stands before tile t - 1 was committed before any node of a
// tree whose root is in tile t, and a tree is at most 64 deep: so nodes share spans and have at most two tiles of their
// own, in which keys stand where they will stand once they are committed. A row has the spans that its position wants and
// no more: nodes of one tree want others where its root stands in the last tile before spans become longer.
// What a window hides counts as keys without weight; they change no bit.
// Before this file: what attn/span.cuh wants; SPANS, the spans of a row at most; SPLITS, the slots of a row.
#pragma once
#include "attn/span.cuh"

// Tiles of the spans of a row in tile `t`, and how many spans there are.
__device__ __forceinline__ int span_tiles(int t) { return t <= 1 ? 1 : (t - 2 + SPANS) / SPANS; }
__device__ __forceinline__ int spans_of(int t, int tiles) { return t <= 1 ? 0 : (t - 2 + tiles) / tiles; }

// Spans `from` .. `to` that nobody in a tree sees, of `spans` spans of `tiles` tiles.
struct Hidden {
    int from, to;
};
// The tile in which a tree's window begins.
__device__ __forceinline__ int near_tile(const View& tree) {
    return WINDOW && tree.committed >= tree.window ? (tree.committed - tree.window + 1) / TILE : 0;
}
__device__ __forceinline__ Hidden hidden_spans(const View& tree, int tiles, int spans) {
    if (!WINDOW) return {0, 0};
    const int to = min(near_tile(tree) / tiles, spans);
    return {WINDOW < 0 ? min(((tree.sinks + TILE - 1) / TILE + tiles - 1) / tiles, to) : 0, to};
}

// Slots of a row.
struct Slots {
    int count;
    Hidden hidden;  // slots without anything in them
};
__device__ __forceinline__ Slots slots_of(const View& tree, int position) {
    const int t = position / TILE, tiles = span_tiles(t), spans = spans_of(t, tiles);
    return {spans + (t > 0) + 1, hidden_spans(tree, tiles, spans)};
}
