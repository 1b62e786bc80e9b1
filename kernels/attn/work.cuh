// Work of tree attention in spans (attn/spans.cuh) by warpgroup products.
//
// Items of a tree, each for one key head:
//   shared  a span, or tile t - 1 of those nodes that stand in the tile of the root, for NODES nodes: committed keys only
//   own     a tile for nodes of one path, up to NODES of them: its committed keys, then those of the path, each row
//           fetched from where it is. Nodes before others on a path share the tile: later keys are masked.
// Nodes beyond the tile of the root share the spans of the others as far as both have the same.
//
// Shared items of a tree are a class, and so are all tiles of nodes' own. A block takes items of one class, as many as give
// all blocks about the same to do.
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

// Spans that are items of a part and key head: `first` .. `last`, without those hidden.
struct Series {
    int tiles, first, last;
    Hidden hidden;
};
__device__ __forceinline__ int items_of(const Series& series) {
    return series.last - series.first - (series.hidden.to - series.hidden.from);
}

// What a tree's items are made from; bits are nodes.
struct Plot {
    u64 crossed;  // nodes beyond the tile of the root
    u64 tops;     // nodes that are not another's first child: runs of nodes on one path begin there
    u64 last;     // nodes that are last of those of an item of their own
    View tree;
    Series near, beyond;  // of nodes in the tile of the root; of those beyond it, what the others do not have
    int both;     // spans before this, of the others, are those of nodes beyond, too
    int tile;     // of the root
    int pairs;    // parts x key heads
    int shared;   // items of a pair: spans, then tile t - 1
    int owns;     // items of nodes' own
};

// Nodes of the run at whose end `path` leads, up to and with its last.
__device__ __forceinline__ int run_length(u64 path, u64 tops) { return __popcll(path >> (63 - __clzll(path & tops))); }
// Of those, how many share an item.
__device__ __forceinline__ int sharers(int length) { return (length - 1) % NODES + 1; }

__device__ __forceinline__ Series series_of(const View& tree, int t) {
    const int tiles = span_tiles(t), spans = spans_of(t, tiles);
    return {tiles, 0, spans, hidden_spans(tree, tiles, spans)};
}
__device__ __forceinline__ Plot plot_of(const View& tree, u64 crossed, u64 tops, u64 last) {
    const int t = tree.committed / TILE;
    Plot plot = {crossed, tops, last, tree, series_of(tree, t), {1, 0, 0, {0, 0}}, 0, t};
    if (crossed) {
        plot.beyond = series_of(tree, t + 1);
        if (plot.near.tiles == plot.beyond.tiles) {
            // Spans that end before tile t - 1; the next is the same where it is that tile.
            Series& beyond = plot.beyond;
            const int whole = t > 0 ? (t - 1) / beyond.tiles : 0;
            plot.both = min(whole * beyond.tiles == t - 1 ? beyond.last : whole, beyond.last);
            beyond.first = plot.both;
            beyond.hidden.from = max(beyond.hidden.from, beyond.first), beyond.hidden.to = max(beyond.hidden.to, beyond.hidden.from);
        }
    }
    plot.pairs = (tree.nodes + NODES - 1) / NODES * KV_HEADS;
    plot.shared = items_of(plot.near) + items_of(plot.beyond) + (t > 0);
    plot.owns = (__popcll(last) + __popcll(last & crossed)) * KV_HEADS;
    return plot;
}

// Looks at all trees; a warp.
__device__ __forceinline__ void survey(const Step* step, Plot* plots) {
    const int lane = threadIdx.x % 32;
    const int trees = step->trees;
    int first = 0;
    // All that one tree needs is on its way at once.
    View tree = view_of(step, 0);
    u64 path[2];
    int parent[2];
    const auto look = [&] {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = min(first + lane + 32 * h, STEP_ROWS - 1);
            path[h] = step->ancestors[row];
            parent[h] = step->parent[row] - first;
        }
    };
    look();
#pragma unroll 1
    for (int i = 0;;) {
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
        if (++i >= trees) break;
        first += tree.nodes;
        tree = view_of(step, i);
        look();
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
    bool own;
    u64 path;           // of nodes' own
    int queries;        // the same for items with the same queries
    int window, sinks;
    u32 row;            // where its keys begin in the cache, for those that fetch them
};

// What a shared item of a tree weighs; an item of nodes' own weighs ONE.
#define ONE (1 + OVERHEAD)
__device__ __forceinline__ int weight_of(const Plot& plot) { return max(plot.near.tiles, plot.beyond.tiles) + OVERHEAD; }

// The items of a block: `main` shared ones of tree `tree`, or nodes' own where it is -1, from `first` on, then nodes' own
// from `extra` on; `items` in all.
struct Share {
    int tree, first, main, extra, items;
};
// A block's share, by a warp. Lanes try how long blocks may take, from the mean on; the first that needs no more blocks
// than there are has it. Blocks of shared items that have time left take some of nodes' own, too.
__device__ __forceinline__ Share share_of_block(const Plot* plots, int trees) {
    const int lane = threadIdx.x % 32, blocks = gridDim.x;
    int owns = 0, all = 0, weight = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) {
        const int items = plots[i].shared * plots[i].pairs;
        all += items, weight += items * weight_of(plots[i]);
        owns += plots[i].owns;
    }
    all += owns, weight += owns * ONE;
    if (all <= blocks) {
        int index = blockIdx.x;
#pragma unroll 1
        for (int i = 0; i < trees; i++) {
            const int items = plots[i].shared * plots[i].pairs;
            if (index < items) return {i, index, 1, 0, 1};
            index -= items;
        }
        return {-1, index, index < owns, 0, index < owns};
    }
    const int mean = weight / blocks + 1;
    int most = mean + mean * lane / 24, needed = 0, taken = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) {
        const int w = weight_of(plots[i]), each = max(1, most / w), own = (plots[i].shared * plots[i].pairs + each - 1) / each;
        needed += own, taken += own * (max(0, most - each * w) / ONE);
    }
    const int alone = max(1, most / ONE);
    needed += (max(0, owns - taken) + alone - 1) / alone;
    const u32 enough = __ballot_sync(WARP_ALL, needed <= blocks);
    most = __shfl_sync(WARP_ALL, most, enough ? __ffs(enough) - 1 : 31);
    int before = 0;
    taken = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) {
        const int items = plots[i].shared * plots[i].pairs, w = weight_of(plots[i]), each = max(1, most / w);
        const int needed = (items + each - 1) / each, extras = max(0, most - each * w) / ONE, which = blockIdx.x - before;
        if (which < needed) {
            const int own = min(each, items - which * each), extra = min(owns, taken + which * extras);
            return {i, which * each, own, extra, own + min(extras, owns - extra)};
        }
        before += needed, taken += needed * extras;
    }
    const int each = max(1, most / ONE), first = min(taken, owns) + (blockIdx.x - before) * each;
    const int own = max(0, min(each, owns - first));
    return {-1, first, own, 0, own};
}

// Item `next` of a block.
__device__ __forceinline__ Item item_of(const Step* step, const Plot* plots, const Share& share, int next) {
    const bool shared = share.tree >= 0 && next < share.main;
    int index = next < share.main ? share.first + next : share.extra + next - share.main;
    int which = shared ? share.tree : 0;
#pragma unroll 1
    for (; !shared && index >= plots[which].owns; which++) index -= plots[which].owns;
    const Plot& plot = plots[which];
    const View& tree = plot.tree;
    Item item;
    item.tree = which, item.slot = tree.slot, item.committed = tree.committed, item.first = tree.first;
    item.window = tree.window, item.sinks = tree.sinks;
    if (shared) {
        const int pair = index / plot.shared, nears = items_of(plot.near);
        item.own = false, item.path = 0, item.at = 0;
        item.kv_head = pair % KV_HEADS;
        item.node = pair / KV_HEADS * NODES;
        item.nodes = min(tree.nodes - item.node, NODES);
        item.queries = which << 16 | pair;
        int i = index - pair * plot.shared;
        if (i == plot.shared - 1 && plot.tile > 0) {
            item.end = plot.tile * TILE, item.begin = item.end - TILE;
            item.near_to = plot.near.last, item.beyond_to = plot.near.last < plot.both ? plot.near.last : -1;
            return item;
        }
        const bool near = i < nears;
        const Series& series = near ? plot.near : plot.beyond;
        i += series.first - (near ? 0 : nears);
        const int span = i >= series.hidden.from ? i + series.hidden.to - series.hidden.from : i;
        int begin = span * series.tiles;
        const int end = min(begin + series.tiles, plot.tile - near);
        // A window's first span is never empty, though its one tile may be without weight.
        if (WINDOW && begin * TILE >= tree.sinks) begin = max(begin, min(near_tile(tree), end - 1));
        item.begin = begin * TILE, item.end = end * TILE;
        item.near_to = near ? span : -1;
        item.beyond_to = near && span >= plot.both ? -1 : span;
        return item;
    }
    item.own = true;
    item.kv_head = index % KV_HEADS;
    int skip = index / KV_HEADS;
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
    item.begin = (plot.tile + second) * TILE, item.end = item.begin + TILE;
    item.near_to = second ? -1 : plot.near.last + (plot.tile > 0);
    item.beyond_to = plot.beyond.last + second;
    item.queries = 1 << 24 | which << 16 | index;
    return item;
}
// Row of the cache where the tile of an item at `key` begins, 0 beyond its last.
__device__ __forceinline__ u32 row_at(const Item& item, int key, const Pages& pages) {
    return key < item.end ? (u32)kv_row(pages, item.slot, key, KV_HEADS, item.kv_head) : 0;
}
__device__ __forceinline__ u32 first_row(const Item& item, const Pages& pages) {
    return item.own ? 0 : row_at(item, item.begin, pages);
}

// Node `i` of an item.
__device__ __forceinline__ int node_of(const Item& item, int i) {
    if (!item.own) return item.node + i;
    u64 path = item.path;
#pragma unroll 1
    for (int up = item.nodes - 1 - i; up > 0; up--) path &= ~(1ull << (63 - __clzll(path)));
    return 63 - __clzll(path);
}
