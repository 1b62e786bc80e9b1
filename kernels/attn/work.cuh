// Work of tree attention in spans (attn/spans.cuh) by warpgroup products.
//
// Items of a tree, each for one key head:
//   shared  a span, or tile t - 1 of those nodes that stand in the tile of the root, for NODES nodes: committed keys only
//   own     a tile for nodes of one path, up to NODES of them: its committed keys, then those of the path, each row
//           fetched from where it is. Nodes before others on a path share the tile: later keys are masked.
// Nodes beyond the tile of the root share the spans of the others as far as both have the same.
//
// Blocks take units, as many of a class as give all blocks about the same to do: spans of a tree; what its pairs of part and
// key head have behind those, a shorter span and tile t - 1, as one; all trees' tiles of nodes' own.
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
    int whole;    // of these, before the rest that is one unit
    int weights[2];  // of a span and of the rest
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
    const int nears = items_of(plot.near), beyonds = items_of(plot.beyond), tiles = plot.near.tiles;
    plot.shared = nears + beyonds + (t > 0);
    // Spans in progress are no longer than the rest; of two lengths, all are whole.
    const bool rest = nears > 0 && beyonds <= 1;
    plot.whole = rest ? nears - 1 : nears + beyonds;
    const int short_tiles = rest ? t - 1 - (plot.near.last - 1) * tiles : 0;
    plot.weights[0] = max(tiles, plot.beyond.tiles) + OVERHEAD;
    plot.weights[1] = short_tiles + (rest ? beyonds * (short_tiles + 1) : 0) + 1 + OVERHEAD * (plot.shared - plot.whole);
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

// What an item of nodes' own weighs.
#define ONE (1 + OVERHEAD)

// Class `k` of shared items: the rest of each pair of tree k / 2, which may be short and have time for nodes' own, and its spans.
struct Class {
    int units, items, weight;  // items: of a unit
};
__device__ __forceinline__ Class class_of(const Plot* plots, int k) {
    const Plot& plot = plots[k / 2];
    const int rest = plot.shared - plot.whole;
    return {k % 2 ? plot.whole * plot.pairs : rest ? plot.pairs : 0, k % 2 ? 1 : rest, plot.weights[1 - k % 2]};
}

// The items of a block: `main` shared ones of class `k`, from unit `first` on, or of tree k / 2 one by one where `k` is below
// 0, then nodes' own from `extra` on; `items` in all.
struct Share {
    int k, first, main, extra, items;
};
#define ONE_BY_ONE(tree) (-1 - 2 * (tree))
// A block's share, by a warp. Lanes try how long blocks may take, from the mean on; the first that needs no more blocks
// than there are has it. Nodes' own are for blocks that have no shared ones, or else for those that have time left.
__device__ __forceinline__ Share share_of_block(const Plot* plots, int trees) {
    const int lane = threadIdx.x % 32, blocks = gridDim.x;
    int owns = 0, all = 0, weight = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) {
        all += plots[i].shared * plots[i].pairs, owns += plots[i].owns;
        weight += (plots[i].whole * plots[i].weights[0] + plots[i].weights[1]) * plots[i].pairs;
    }
    if (all + owns <= blocks) {
        int index = blockIdx.x;
#pragma unroll 1
        for (int i = 0; i < trees; i++) {
            const int items = plots[i].shared * plots[i].pairs;
            if (index < items) return {ONE_BY_ONE(i), index, 1, 0, 1};
            index -= items;
        }
        return {0, 0, 0, index, index < owns};
    }
    const auto each_of = [&](const Class& c, int most) { return max(1, most / c.weight); };
    const auto blocks_of = [&](const Class& c, int each) { return (c.units + each - 1) / each; };
    const auto more_of = [&](const Class& c, int each, int most) { return max(0, most - each * c.weight) / ONE; };
    const int mean = (weight + owns * ONE) / blocks + 1;
    int most = mean + mean * lane / 24, needed = 0, room = 0;
#pragma unroll 1
    for (int k = 0; k < 2 * trees; k++) {
        const Class c = class_of(plots, k);
        const int each = each_of(c, most), own = blocks_of(c, each);
        needed += own, room += own * more_of(c, each, most);
    }
    const u32 enough = __ballot_sync(WARP_ALL, owns <= room + (blocks - needed) * (most / ONE) && needed <= blocks);
    const int found = enough ? __ffs(enough) - 1 : 31;
    most = __shfl_sync(WARP_ALL, most, found), needed = __shfl_sync(WARP_ALL, needed, found);
    // What blocks without shared items have no time for.
    const int others = blocks - needed, over = max(0, owns - others * (most / ONE));
    int before = 0, taken = 0;
#pragma unroll 1
    for (int k = 0; k < 2 * trees; k++) {
        const Class c = class_of(plots, k);
        const int each = each_of(c, most), own = blocks_of(c, each), which = blockIdx.x - before;
        // As many for each as are left, no more.
        const int more = own ? min(more_of(c, each, most), max(0, over - taken + own - 1) / own) : 0;
        if (which < own) {
            const int main = min(each, c.units - which * each) * c.items, extra = min(over, taken + which * more);
            return {k, which * each, main, extra, main + min(more, over - extra)};
        }
        before += own, taken += own * more;
    }
    const int each = (owns - over + others - 1) / others, extra = over + (blockIdx.x - before) * each;
    return {0, 0, 0, extra, max(0, min(each, owns - extra))};
}

// Item `next` of a block.
__device__ __forceinline__ Item item_of(const Step* step, const Plot* plots, const Share& share, int next) {
    const bool shared = next < share.main, single = share.k < 0, rest = !single && share.k % 2 == 0;
    int index = share.extra + next - share.main;
    int which = !shared ? 0 : single ? (-1 - share.k) / 2 : share.k / 2;
#pragma unroll 1
    for (; !shared && index >= plots[which].owns; which++) index -= plots[which].owns;
    const Plot& plot = plots[which];
    const View& tree = plot.tree;
    Item item;
    item.tree = which, item.slot = tree.slot, item.committed = tree.committed, item.first = tree.first;
    item.window = tree.window, item.sinks = tree.sinks;
    if (shared) {
        const int each = rest ? plot.shared - plot.whole : single ? plot.shared : plot.whole;
        const int unit = rest ? share.first * each + next : share.first + next;
        const int pair = unit / each, nears = items_of(plot.near);
        item.own = false, item.path = 0, item.at = 0;
        item.kv_head = pair % KV_HEADS;
        item.node = pair / KV_HEADS * NODES;
        item.nodes = min(tree.nodes - item.node, NODES);
        item.queries = which << 16 | pair;
        int i = unit - pair * each + (rest ? plot.whole : 0);
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
