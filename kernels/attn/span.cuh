// Which keys a tree's rows see, and how they are split among blocks.
//
// Keys stand at cache positions: 0 .. committed, then one per node. A row sees committed keys inside its window
// and, of the nodes, those MASK says: 0 its ancestors and itself, 1 all nodes, 2 those up to itself.
// WINDOW is the window of every tree, 0 for none; -1 where each tree has its own, and sinks.
// Splits are runs of whole tiles of 64 positions; their bounds depend on `committed` alone, so what a row sums in
// which order does not depend on how many rows share the call.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"

#define TILE 64

// Keys are counted from `begin` to `end`. Where sinks stand apart from a window, tiles of them are counted just before
// it, so that runs of tiles remain runs: position_of says where a count stands in the cache.
struct Span {
    int begin;   // first key anybody sees, a multiple of TILE
    int near;    // the window's first key, a multiple of TILE; what is counted before it are sinks
    int end;     // committed + nodes
    int chunk;   // positions per split, a multiple of TILE
};

// A tree, and how far back it sees.
struct View : Tree {
    int window, sinks;
};

__device__ __forceinline__ View view_of(const Step* step, int tree) {
    View view;
    (Tree&)view = step->tree[tree];
    view.window = WINDOW < 0 ? step->window[tree] : WINDOW;
    view.sinks = WINDOW < 0 ? step->sinks[tree] : 0;
    return view;
}

__device__ __forceinline__ Span span_of(const View& tree) {
    Span span;
    span.near = WINDOW && tree.committed >= tree.window ? (tree.committed - tree.window + 1) / TILE * TILE : 0;
    span.begin = WINDOW < 0 ? span.near - min(span.near, (tree.sinks + TILE - 1) / TILE * TILE) : span.near;
    span.end = tree.committed + tree.nodes;
    const int most = tree.committed + STEP_ROWS - span.begin;
    span.chunk = ((most + SPLITS - 1) / SPLITS + TILE - 1) / TILE * TILE;
    return span;
}

// Splits that hold any key.
__device__ __forceinline__ int splits_of(const Span& span) {
    return (span.end - span.begin + span.chunk - 1) / span.chunk;
}

// The position of the key that is counted as `key`, a multiple of TILE.
__device__ __forceinline__ int position_of(int key, int begin, int near) {
    return WINDOW < 0 && key < near ? key - begin : key;
}

// Nodes that node `node` sees, as bits.
__device__ __forceinline__ u64 seen_nodes(const Step* step, const Tree& tree, int node) {
#if MASK == 0
    return step->ancestors[tree.first + node];
#elif MASK == 1
    return tree.nodes == 64 ? ~0ull : (1ull << tree.nodes) - 1;
#else
    return node == 63 ? ~0ull : (2ull << node) - 1;
#endif
}

// Which of the keys at cache positions `position` .. + 64 a row at rotary position `at` sees that sees `nodes`, as bits.
// A node's cache position is its index; its own position, which a window counts, is not below `committed`.
__device__ __forceinline__ u64 seen_keys(int position, const View& tree, u64 nodes, int at) {
    const int edge = tree.committed - position;
    if (edge <= 0) return edge > -64 ? nodes >> -edge : 0;
    u64 keys = edge >= 64 ? ~0ull : (nodes << edge) | ((1ull << edge) - 1);
    if (WINDOW) {
        const u64 all = keys;
        const int hidden = min(min(at - tree.window + 1 - position, edge), 64);
        if (hidden > 0) keys &= hidden == 64 ? 0 : ~0ull << hidden;
        if (WINDOW < 0 && position < tree.sinks) {
            const int sinks = tree.sinks - position;
            keys |= all & (sinks >= 64 ? ~0ull : (1ull << sinks) - 1);
        }
    }
    return keys;
}
