// Attention in an order that follows from a row's position alone, so that a row has the same bits whether its token is a
// node of a tree or is fed by itself later.
//
// Tiles of 64 keys stand at multiples of 64. Tiles stand in spans, whose bounds depend on nothing: 64 keys up to 2,048,
// then 16 spans to each doubling. A row at position P = 64 t + r sums, each part by itself, from 0 on:
//   the spans before tile t - 1, the last of them as far as it reaches; tile t - 1; tile t up to P
// and adds the parts in this order (slots 0, 1, ..). What stands before tile t - 1 was committed before any node of a
// tree whose root is in tile t, and a tree is at most 64 deep: so nodes share spans and have at most two tiles of their
// own, in which keys stand where they will stand once they are committed.
// What a window hides counts as keys without weight; they change no bit.
// Before this file: what attn/span.cuh wants, with SPLITS the slots of a row: spans_before(most positions) + 2.
#pragma once
#include "attn/span.cuh"

__device__ __forceinline__ int span_begin(int span) {
    if (span < 32) return span * TILE;
    return (2048 + (span - 32) % 16 * 128) << (span - 32) / 16;
}
// The span that holds `position`.
__device__ __forceinline__ int span_at(int position) {
    if (position < 2048) return position / TILE;
    const int octave = 20 - __clz(position);
    return 32 + 16 * octave + (position >> (octave + 7)) % 16;
}
// Spans that hold positions before `end`, a multiple of TILE.
__device__ __forceinline__ int spans_before(int end) { return end <= 0 ? 0 : span_at(end - TILE) + 1; }

// Spans that nobody in a tree sees: `from` .. `to`.
struct Hidden {
    int from, to;
    int near;  // the window's first key, a multiple of TILE
};
__device__ __forceinline__ Hidden hidden_spans(const View& tree) {
    Hidden hidden = {0, 0, 0};
    if (WINDOW && tree.committed >= tree.window) {
        hidden.near = (tree.committed - tree.window + 1) / TILE * TILE;
        hidden.to = span_at(hidden.near);
        hidden.from = WINDOW < 0 ? min(spans_before((tree.sinks + TILE - 1) / TILE * TILE), hidden.to) : 0;
    }
    return hidden;
}

// Slots of a row.
struct Slots {
    int count;
    Hidden hidden;  // slots without anything in them
};
__device__ __forceinline__ Slots slots_of(const View& tree, int position) {
    const int before = spans_before(position / TILE * TILE - TILE);
    Slots slots = {before + (position >= TILE) + 1, hidden_spans(tree)};
    slots.hidden.to = min(slots.hidden.to, before);
    return slots;
}
