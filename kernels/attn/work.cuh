// Work of tree attention in spans (attn/spans.cuh) by warpgroup products.
//
// Items of a tree, each for one key head:
//   shared  a span, or tile t - 1 of those nodes that stand in the tile of the root, for NODES nodes: committed keys only
//   own     a tile for nodes of one path, up to NODES of them: its committed keys, then those of the path, each row
//           fetched from where it is. Nodes before others on a path share the tile: later keys are masked.
// A span in progress that nodes beyond the tile of the root need one tile longer is stored, goes on, and is stored again.
//
// Items of one length make a class: an octave's spans, and all that are one tile. A block takes items of one class, as many
// as give all blocks about the same to do.
// Before this file: HEADS, KV_HEADS, COLUMNS, and what attn/spans.cuh and attn/kv.cuh want.
#pragma once
#include "attn/kv.cuh"
#include "attn/spans.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"

#define GROUP_SIZE (HEADS / KV_HEADS)
// Nodes of an item.
#define NODES (COLUMNS / GROUP_SIZE)
static_assert(NODES > 0, "a block takes all heads of a node");

// What beside its tiles an item weighs, in tiles.
#ifndef OVERHEAD
#define OVERHEAD 3
#endif

// What a tree's items are made from; bits are nodes.
struct Plot {
    u64 crossed;  // nodes beyond the tile of the root
    u64 tops;     // nodes that are not another's first child: runs of nodes on one path begin there
    u64 last;     // nodes that are last of those of an item of their own
    View tree;
    Hidden hidden;
    int tile;     // where the tile of the root begins
    int spans;    // seen, of a part and key head
    int pairs;    // parts x key heads
    int owns;     // items of nodes' own
};

// Nodes of the run at whose end `path` leads, up to and with its last.
__device__ __forceinline__ int run_length(u64 path, u64 tops) { return __popcll(path >> (63 - __clzll(path & tops))); }
// Of those, how many share an item.
__device__ __forceinline__ int sharers(int length) { return (length - 1) % NODES + 1; }

__device__ __forceinline__ Plot plot_of(const View& tree, u64 crossed, u64 tops, u64 last) {
    Plot plot = {crossed, tops, last, tree, hidden_spans(tree), tree.committed / TILE * TILE};
    const int before = spans_before(crossed ? plot.tile : plot.tile - TILE);
    plot.hidden.to = min(plot.hidden.to, before), plot.hidden.from = min(plot.hidden.from, plot.hidden.to);
    plot.spans = before - (plot.hidden.to - plot.hidden.from);
    plot.pairs = (tree.nodes + NODES - 1) / NODES * KV_HEADS;
    plot.owns = (__popcll(last) + __popcll(last & crossed)) * KV_HEADS;
    return plot;
}

// Looks at all trees; a warp.
__device__ __forceinline__ void survey(const Step* step, Plot* plots) {
    const int lane = threadIdx.x % 32;
    const int trees = step->trees;
    int first = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) {
        u64 path[2];
        int parent[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = min(first + lane + 32 * h, STEP_ROWS - 1);
            path[h] = step->ancestors[row];
            parent[h] = step->parent[row] - first;
        }
        const View tree = view_of(step, i);
        u64 parents = 0, tops = 0, crossed = 0, last = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int node = lane + 32 * h;
            if (32 * h < tree.nodes) {
                const bool inner = node > 0 && node < tree.nodes;
                const int key = inner ? parent[h] : -1 - lane;
                const u32 siblings = __match_any_sync(WARP_ALL, key);
                const bool follows = inner && __ffs(siblings) - 1 == lane && !(parents >> (key & 63) & 1);
                const u64 own = inner ? 1ull << parent[h] : 0;
                parents |= u64(__reduce_or_sync(WARP_ALL, u32(own))) | u64(__reduce_or_sync(WARP_ALL, u32(own >> 32))) << 32;
                tops |= u64(__ballot_sync(WARP_ALL, node < tree.nodes && !follows)) << 32 * h;
            }
        }
        const int beyond = tree.committed / TILE * TILE + TILE;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int node = lane + 32 * h;
            const bool live = node < tree.nodes;
            const int length = live ? run_length(path[h], tops) : 1;
            crossed |= u64(__ballot_sync(WARP_ALL, live && tree.committed + __popcll(path[h]) > beyond)) << 32 * h;
            last |= u64(__ballot_sync(WARP_ALL, live && (length % NODES == 0 || !(parents >> node & 1)))) << 32 * h;
        }
        const Plot plot = plot_of(tree, crossed, tops, last);
        if (lane == 0) plots[i] = plot;
        first += tree.nodes;
    }
    __syncwarp();
}

struct Item {
    int tree, slot, committed, first;
    int begin, end;     // keys, multiples of TILE
    int kv_head;
    int node;           // first node of a shared item, last of an item of nodes' own
    int nodes;
    int at;             // of nodes' own: position of the first
    int near_to, beyond_to;  // slots of nodes in the tile of the root and beyond it; -1 for none
    bool own, again, goes_on;
    u64 path;           // of nodes' own
    int queries;        // the same for items with the same queries
    int window, sinks;
    u32 row;            // where its keys begin in the cache, for those that fetch them
};

// Spans of the class of octave `k`, or of single tiles below that where it is -1: the first, counting those seen, and how
// many there are for a part and key head.
struct Class {
    int first, spans, each;  // each: with tile t - 1
};
__device__ __forceinline__ int seen_before(const Plot& plot, int span) {
    if (!WINDOW) return min(span, plot.spans);
    const int from = plot.hidden.from, to = plot.hidden.to;
    const int all = min(span, plot.spans + to - from);
    return min(all, from) + max(0, all - to);
}
__device__ __forceinline__ Class class_of(const Plot& plot, int k) {
    Class c;
    c.first = k < 0 ? 0 : seen_before(plot, 32 + 16 * k);
    c.spans = seen_before(plot, 48 + 16 * k) - c.first;
    c.each = c.spans + (k < 0 && plot.tile > 0);
    return c;
}
__device__ __forceinline__ int items_of(const Plot& plot, int k) { return class_of(plot, k).each * plot.pairs + (k < 0 ? plot.owns : 0); }
__device__ __forceinline__ int items_of(const Plot* plots, int trees, int k) {
    int items = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) items += items_of(plots[i], k);
    return items;
}
// Tiles of an item of a class, at most, and the weight of an item of one.
#define ONE (1 + OVERHEAD)
__device__ __forceinline__ int tiles_of(int k) { return k < 0 ? 1 : 2 << k; }

// The items of a block: `own` of class `k`, from `first` on, then single tiles from `extra` on; `items` in all.
struct Share {
    int k, first, own, extra, items;
};
// A block's share, by a warp. Lanes try how long blocks may take, from the mean on; the first that needs no more blocks
// than there are has it. Blocks of a class that have time left take single tiles, too.
__device__ __forceinline__ Share share_of_block(const Plot* plots, int trees) {
    const int lane = threadIdx.x % 32, blocks = gridDim.x;
    int top = -1;
#pragma unroll 1
    for (int i = 0; i < trees; i++) top = max(top, (span_at(max(plots[i].tile, TILE) - TILE) - 16) / 16 - 1);
    const int singles = items_of(plots, trees, -1);
    int all = singles, weight = singles * ONE;
#pragma unroll 1
    for (int k = top; k >= 0; k--) {
        const int items = items_of(plots, trees, k);
        all += items, weight += items * (tiles_of(k) + OVERHEAD);
    }
    int most = 0;
    if (all > blocks) {
        const int mean = weight / blocks + 1;
        most = mean + mean * lane / 24;
        int needed = 0, taken = 0;
#pragma unroll 1
        for (int k = top; k >= 0; k--) {
            const int w = tiles_of(k) + OVERHEAD, each = max(1, most / w), own = (items_of(plots, trees, k) + each - 1) / each;
            needed += own, taken += own * (max(0, most - each * w) / ONE);
        }
        const int each = max(1, most / ONE);
        needed += (max(0, singles - taken) + each - 1) / each;
        const u32 enough = __ballot_sync(WARP_ALL, needed <= blocks);
        most = __shfl_sync(WARP_ALL, most, enough ? __ffs(enough) - 1 : 31);
    }
    int before = 0, taken = 0;
#pragma unroll 1
    for (int k = top; k >= 0; k--) {
        const int items = items_of(plots, trees, k), w = tiles_of(k) + OVERHEAD, each = max(1, most / w);
        const int needed = (items + each - 1) / each, extras = max(0, most - each * w) / ONE, which = blockIdx.x - before;
        if (which < needed) {
            const int own = min(each, items - which * each), extra = min(singles, taken + which * extras);
            return {k, which * each, own, extra, own + min(extras, singles - extra)};
        }
        before += needed, taken += needed * extras;
    }
    const int each = max(1, most / ONE), first = min(taken, singles) + (blockIdx.x - before) * each;
    const int own = max(0, min(each, singles - first));
    return {-1, first, own, 0, own};
}

// The span that is counted as `i`, and where what is seen of it begins.
__device__ __forceinline__ int span_of_item(const Plot& plot, int i) {
    return WINDOW && i >= plot.hidden.from ? i + plot.hidden.to - plot.hidden.from : i;
}
__device__ __forceinline__ int seen_from(const Plot& plot, int span) {
    const int begin = span_begin(span);
    if (!WINDOW || span != plot.hidden.to || (WINDOW < 0 && begin < plot.tree.sinks)) return begin;
    // A span in progress is never empty, though its one tile may be without weight.
    return max(begin, min(plot.hidden.near, plot.tile - 2 * TILE));
}

// Item `next` of a block.
__device__ __forceinline__ Item item_of(const Step* step, const Plot* plots, const Share& share, int next) {
    const bool own = next < share.own;
    const int k = own ? share.k : -1;
    int index = own ? share.first + next : share.extra + next - share.own;
    Item item;
#pragma unroll 1
    for (int which = 0;; which++) {
        const Plot& plot = plots[which];
        const int items = items_of(plot, k);
        if (index >= items) {
            index -= items;
            continue;
        }
        const View& tree = plot.tree;
        item.tree = which, item.slot = tree.slot, item.committed = tree.committed, item.first = tree.first;
        item.window = tree.window, item.sinks = tree.sinks;
        item.again = item.goes_on = false, item.path = 0, item.at = 0;
        const Class own_class = class_of(plot, k);
        const int each = own_class.each, last_before = spans_before(plot.tile - TILE);
        item.own = index >= each * plot.pairs;
        if (!item.own) {
            const int pair = index / each, i = index - pair * each;
            item.kv_head = pair % KV_HEADS;
            item.node = pair / KV_HEADS * NODES;
            item.nodes = min(tree.nodes - item.node, NODES);
            item.queries = which << 16 | pair;
            if (i == own_class.spans) {
                item.begin = plot.tile - TILE, item.end = plot.tile;
                item.near_to = last_before, item.beyond_to = -1;
            } else {
                const int span = span_of_item(plot, own_class.first + i), end = span_begin(span + 1);
                item.begin = seen_from(plot, span);
                item.near_to = item.beyond_to = span;
                item.end = end;
                if (end > plot.tile - TILE) {
                    const bool fresh = item.begin >= plot.tile - TILE;
                    item.end = fresh ? plot.tile : plot.tile - TILE;
                    item.again = !fresh && plot.crossed;
                    if (fresh)
                        item.near_to = -1;
                    else
                        item.beyond_to = -1;
                }
            }
            return item;
        }
        const int alone = index - each * plot.pairs;
        item.kv_head = alone % KV_HEADS;
        int skip = alone / KV_HEADS;
        const int near = __popcll(plot.last);
        const bool second = skip >= near;
        u64 left = second ? plot.last & plot.crossed : plot.last;
        skip -= second ? near : 0;
#pragma unroll 1
        for (; skip; skip--) left &= left - 1;
        item.node = __ffsll(left) - 1;
        item.path = step->ancestors[tree.first + item.node];
        item.nodes = sharers(run_length(item.path, plot.tops));
        item.at = tree.committed + __popcll(item.path) - item.nodes;
        item.begin = plot.tile + (second ? TILE : 0), item.end = item.begin + TILE;
        item.near_to = second ? -1 : last_before + (plot.tile > 0);
        item.beyond_to = spans_before(plot.tile) + second;
        item.queries = 1 << 24 | which << 16 | alone;
        return item;
    }
}
// Row of the cache where the tile of an item at `key` begins, 0 beyond its last.
__device__ __forceinline__ u32 row_at(const Item& item, int key, const Pages& pages) {
    return key < item.end ? (u32)kv_row(pages, item.slot, key, KV_HEADS, item.kv_head) : 0;
}
__device__ __forceinline__ u32 first_row(const Item& item, const Pages& pages) {
    return item.own ? 0 : row_at(item, item.begin, pages);
}

// An item becomes a warp's own, in shared memory.
__device__ __forceinline__ void keep(Item& own, const Item& item) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) own = item;
    __syncwarp();
}
// What follows an item that says "again".
__device__ __forceinline__ void go_on(Item& own, const Pages& pages) {
    Item item = own;
    item.begin = item.end, item.end += TILE;
    item.row = first_row(item, pages);
    item.beyond_to = item.near_to, item.near_to = -1;
    item.again = false, item.goes_on = true;
    keep(own, item);
}

// Node `i` of an item.
__device__ __forceinline__ int node_of(const Item& item, int i) {
    if (!item.own) return item.node + i;
    u64 path = item.path;
#pragma unroll 1
    for (int up = item.nodes - 1 - i; up > 0; up--) path &= ~(1ull << (63 - __clzll(path)));
    return 63 - __clzll(path);
}
// The slot of node `i` of an item, as (row, head 0, slot); -1 if it has none. `node` is node_of.
__device__ __forceinline__ int place_of(const Item& item, const Plot* plots, int i, int node) {
    if (i >= item.nodes) return -1;
    const int slot = plots[item.tree].crossed >> node & 1 ? item.beyond_to : item.near_to;
    return slot < 0 ? -1 : (item.first + node) * HEADS * SPLITS + slot;
}
