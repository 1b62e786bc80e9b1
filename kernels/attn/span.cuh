// Which keys a tree's rows see, and how they are split among blocks.
//
// Keys stand at cache positions: 0 .. committed, then one per node. A row sees committed keys inside its window
// and, of the nodes, those MASK says: 0 its ancestors and itself, 1 all nodes, 2 those up to itself.
// Splits are runs of whole tiles of 64 positions; their bounds depend on `committed` alone, so what a row sums in
// which order does not depend on how many rows share the call.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"

#define TILE 64

struct Span {
    int begin;   // first position anybody sees, a multiple of TILE
    int end;     // committed + nodes
    int chunk;   // positions per split, a multiple of TILE
};

__device__ __forceinline__ Span span_of(const Tree& tree) {
    Span span;
    span.begin = WINDOW && tree.committed >= WINDOW ? (tree.committed - WINDOW + 1) / TILE * TILE : 0;
    span.end = tree.committed + tree.nodes;
    const int most = tree.committed + STEP_ROWS - span.begin;
    span.chunk = ((most + SPLITS - 1) / SPLITS + TILE - 1) / TILE * TILE;
    return span;
}

// Splits that hold any key.
__device__ __forceinline__ int splits_of(const Span& span) {
    return (span.end - span.begin + span.chunk - 1) / span.chunk;
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
__device__ __forceinline__ u64 seen_keys(int position, int committed, u64 nodes, int at) {
    const int edge = committed - position;
    if (edge <= 0) return edge > -64 ? nodes >> -edge : 0;
    u64 keys = edge >= 64 ? ~0ull : (nodes << edge) | ((1ull << edge) - 1);
    if (WINDOW) {
        const int hidden = min(min(at - WINDOW + 1 - position, edge), 64);
        if (hidden > 0) keys &= hidden == 64 ? 0 : ~0ull << hidden;
    }
    return keys;
}
