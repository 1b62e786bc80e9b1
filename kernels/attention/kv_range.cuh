// KV range of a draft tree, its splits, and visibility masks.
//
// Cache positions are 0 .. committed, then one per node. A row sees the committed keys inside its window and the nodes
// that MASK selects: 0 its ancestors and itself, 1 all nodes, 2 the nodes up to itself. 3: the step is an MtpStep; the
// rows that the sequence drafted before come between the committed keys and the nodes, and a row sees its ancestors
// among both, and itself.
// WINDOW is the sliding window of every tree, 0 for none; -1 if each tree has its own window and attention sinks.
// A split is a run of whole 64-key tiles. Its bounds depend on `committed` alone, so the summation order of a row does
// not depend on the number of rows in the call.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"

#define KV_TILE 64

// Keys are numbered from `begin` to `end`. If sinks are separate from the window, their tiles are numbered just before
// the window, so that splits stay contiguous; kv_position maps a number to its cache position.
struct KvRange {
    int begin;         // first key that any row sees, a multiple of KV_TILE
    int window_begin;  // first key of the window, a multiple of KV_TILE; keys numbered before it are sinks
    int end;           // committed + earlier drafted rows + nodes
    int split_size;    // keys per split, a multiple of KV_TILE
};

// A tree and its sliding window.
struct WindowedTree : Tree {
    int window, sinks;
#if MASK == 3
    int earlier;
#endif
};

__device__ __forceinline__ WindowedTree windowed_tree(const Step* step, int tree) {
    WindowedTree view;
    (Tree&)view = step->tree[tree];
    view.window = WINDOW < 0 ? step->window[tree] : WINDOW;
    view.sinks = WINDOW < 0 ? step->sinks[tree] : 0;
#if MASK == 3
    view.earlier = ((const MtpStep*)step)->earlier[tree];
#endif
    return view;
}

__device__ __forceinline__ KvRange kv_range(const WindowedTree& tree) {
    KvRange range;
    range.window_begin =
        WINDOW && tree.committed >= tree.window ? (tree.committed - tree.window + 1) / KV_TILE * KV_TILE : 0;
    range.begin = WINDOW < 0
                      ? range.window_begin - min(range.window_begin, (tree.sinks + KV_TILE - 1) / KV_TILE * KV_TILE)
                      : range.window_begin;
    range.end = tree.committed + tree.nodes;
#if MASK == 3
    range.end += tree.earlier;
#endif
    const int max_keys = tree.committed + STEP_ROWS - range.begin;
    range.split_size = ((max_keys + SPLITS - 1) / SPLITS + KV_TILE - 1) / KV_TILE * KV_TILE;
    return range;
}

// Splits that hold at least one key.
__device__ __forceinline__ int num_splits(const KvRange& range) {
    return (range.end - range.begin + range.split_size - 1) / range.split_size;
}

// Cache position of key number `key`, a multiple of KV_TILE.
__device__ __forceinline__ int kv_position(int key, int begin, int window_begin) {
    return WINDOW < 0 && key < window_begin ? key - begin : key;
}

// Bit mask of the nodes that `node` sees.
__device__ __forceinline__ u64 visible_nodes(const Step* step, const Tree& tree, int node) {
#if MASK == 0 || MASK == 3
    return step->ancestors[tree.first + node];
#elif MASK == 1
    return tree.nodes == 64 ? ~0ull : (1ull << tree.nodes) - 1;
#else
    return node == 63 ? ~0ull : (2ull << node) - 1;
#endif
}

// Bit mask of the keys at cache positions `position` .. + 64 that a row sees. `nodes` are the row's visible nodes;
// `rope_position` is its sequence position, which the window counts from and which is at least `committed`.
__device__ __forceinline__ u64 visible_keys(int position, const WindowedTree& tree, u64 nodes, int rope_position) {
    const int committed_left = tree.committed - position;
    if (committed_left <= 0) return committed_left > -64 ? nodes >> -committed_left : 0;
    u64 keys = committed_left >= 64 ? ~0ull : (nodes << committed_left) | ((1ull << committed_left) - 1);
    if (WINDOW) {
        const u64 unwindowed = keys;
        const int before_window = min(min(rope_position - tree.window + 1 - position, committed_left), 64);
        if (before_window > 0) keys &= before_window == 64 ? 0 : ~0ull << before_window;
        if (WINDOW < 0 && position < tree.sinks) {
            const int sinks = tree.sinks - position;
            keys |= unwindowed & (sinks >= 64 ? ~0ull : (1ull << sinks) - 1);
        }
    }
    return keys;
}
