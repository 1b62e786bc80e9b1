// Work schedule of decode attention with fixed KV splits (fixed_splits.cuh).
//
// Work items of a tree, each for one KV head:
//   shared   a split, or tile t - 1 for the nodes in the tile of the root; ITEM_NODES nodes; committed keys only
//   private  one tile for up to ITEM_NODES nodes of one path: its committed keys, then the keys of the path, gathered
//            row by row. Nodes earlier on the path share the tile; later keys are masked.
// Nodes past the root's tile share the splits of the other nodes as long as both cuts agree.
//
// Blocks take units of shared items so that all blocks have about the same cost. A unit is one split of a tree, or the
// rest of a (part, KV head) pair: a shorter last split and tile t - 1. Private items fill the remaining time.
// Needs: HEADS, KV_HEADS, QUERY_COLUMNS, and the defines of fixed_splits.cuh and kv_cache.cuh.
#pragma once
#include "attention/kv_cache.cuh"
#include "attention/kv_tiles.cuh"
#include "attention/fixed_splits.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"

#define GROUP_SIZE (HEADS / KV_HEADS)
// Nodes of an item.
#define ITEM_NODES (QUERY_COLUMNS / GROUP_SIZE)
static_assert(ITEM_NODES > 0, "a block takes all heads of a node");

// Fixed cost of a work item, in KV tiles.
#ifndef ITEM_OVERHEAD
#define ITEM_OVERHEAD 3
#endif

// Splits first .. last of a (part, KV head) pair, except the masked ones.
struct SplitSeries {
    int tiles, first, last;
    MaskedSplits masked;
};
__device__ __forceinline__ int num_items(const SplitSeries& series) {
    return series.last - series.first - (series.masked.end - series.masked.begin);
}

// Schedule of one tree; bit masks are over nodes.
struct TreePlan {
    u64 past_root_tile;  // nodes past the root's tile
    u64 chain_tops;      // nodes that are not a first child: chains of nodes on one path start there
    u64 last;            // last node of each private item
    WindowedTree tree;
    // for nodes in the root's tile; for nodes past it, the splits that the others do not have
    SplitSeries root_tile, past_tile;
    int common_splits;  // splits below this index are the same for both
    int tile;           // tile of the root
    int pairs;          // parts x KV heads
    int shared_items;   // items of a pair: splits, then tile t - 1
    int full_splits;    // of these, the ones before the rest unit
    int costs[2];       // of a split and of the rest unit, in tiles
    int private_items;  // number of private items
};

// Length of the chain that ends at the last node of `path`.
__device__ __forceinline__ int chain_length(u64 path, u64 chain_tops) {
    return __popcll(path >> (63 - __clzll(path & chain_tops)));
}
// Nodes of a chain of `length` that share its last item.
__device__ __forceinline__ int nodes_in_item(int length) { return (length - 1) % ITEM_NODES + 1; }

__device__ __forceinline__ SplitSeries split_series(const WindowedTree& tree, int t) {
    const int tiles = split_tiles(t), splits = num_fixed_splits(t, tiles);
    return {tiles, 0, splits, masked_splits(tree, tiles, splits)};
}
__device__ __forceinline__ TreePlan tree_plan(const WindowedTree& tree, u64 past_root_tile, u64 chain_tops, u64 last) {
    const int t = tree.committed / KV_TILE;
    TreePlan plan = {past_root_tile, chain_tops, last, tree, split_series(tree, t), {1, 0, 0, {0, 0}}, 0, t};
    if (past_root_tile) {
        plan.past_tile = split_series(tree, t + 1);
        if (plan.root_tile.tiles == plan.past_tile.tiles) {
            // Splits that end before tile t - 1; the next one is also common if it is that tile.
            SplitSeries& past_tile = plan.past_tile;
            const int full_splits = t > 0 ? (t - 1) / past_tile.tiles : 0;
            plan.common_splits =
                min(full_splits * past_tile.tiles == t - 1 ? past_tile.last : full_splits, past_tile.last);
            past_tile.first = plan.common_splits;
            past_tile.masked.begin = max(past_tile.masked.begin, past_tile.first),
            past_tile.masked.end = max(past_tile.masked.end, past_tile.masked.begin);
        }
    }
    plan.pairs = (tree.nodes + ITEM_NODES - 1) / ITEM_NODES * KV_HEADS;
    const int root_items = num_items(plan.root_tile), past_items = num_items(plan.past_tile),
              tiles = plan.root_tile.tiles;
    plan.shared_items = root_items + past_items + (t > 0);
    // The last split is no longer than the others; with two different cuts, every split is a unit of its own.
    const bool short_last = root_items > 0 && past_items <= 1;
    plan.full_splits = short_last ? root_items - 1 : root_items + past_items;
    const int short_tiles = short_last ? t - 1 - (plan.root_tile.last - 1) * tiles : 0;
    plan.costs[0] = max(tiles, plan.past_tile.tiles) + ITEM_OVERHEAD;
    plan.costs[1] = short_tiles + (short_last ? past_items * (short_tiles + 1) : 0) + 1 +
                    ITEM_OVERHEAD * (plan.shared_items - plan.full_splits);
    plan.private_items = (__popcll(last) + __popcll(last & past_root_tile)) * KV_HEADS;
    return plan;
}

// Makes the plans of all trees; one warp.
__device__ __forceinline__ void plan_trees(const Step* step, TreePlan* plans) {
    const int lane = threadIdx.x % 32;
    const int trees = step->trees;
    int first = 0;
    // The loads of a tree are all in flight at once.
    WindowedTree tree = windowed_tree(step, 0);
    u64 path[2];
    int parent[2];
    const auto load_tree = [&] {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = min(first + lane + 32 * h, STEP_ROWS - 1);
            path[h] = step->ancestors[row];
            parent[h] = step->parent[row] - first;
        }
    };
    load_tree();
#pragma unroll 1
    for (int i = 0;;) {
        u64 parents = 0, chain_tops = 0, past_root_tile = 0, last = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int node = lane + 32 * h;
            if (32 * h < tree.nodes) {
                const bool inner = node > 0 && node < tree.nodes;
                const int key = inner ? parent[h] : -1 - lane;
                const u32 siblings = __match_any_sync(WARP_ALL, key);
                const bool follows = inner && __ffs(siblings) - 1 == lane && !(parents >> (key & 63) & 1);
                const u64 own = inner ? 1ull << parent[h] : 0;
                parents |= u64(__reduce_or_sync(WARP_ALL, u32(own))) | u64(__reduce_or_sync(WARP_ALL, u32(own >> 32)))
                                                                           << 32;
                chain_tops |= u64(__ballot_sync(WARP_ALL, node < tree.nodes && !follows)) << 32 * h;
            }
        }
        const int past_tile = tree.committed / KV_TILE * KV_TILE + KV_TILE;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int node = lane + 32 * h;
            const bool live = node < tree.nodes;
            const int length = live ? chain_length(path[h], chain_tops) : 1;
            past_root_tile |= u64(__ballot_sync(WARP_ALL, live && tree.committed + __popcll(path[h]) > past_tile))
                              << 32 * h;
            last |= u64(__ballot_sync(WARP_ALL, live && (length % ITEM_NODES == 0 || !(parents >> node & 1))))
                    << 32 * h;
        }
        const TreePlan plan = tree_plan(tree, past_root_tile, chain_tops, last);
        if (lane == 0) plans[i] = plan;
        if (++i >= trees) break;
        first += tree.nodes;
        tree = windowed_tree(step, i);
        load_tree();
    }
    __syncwarp();
}

struct WorkItem {
    int tree, slot, committed, first;
    int begin, end;  // keys, multiples of KV_TILE
    int kv_head;
    int node;  // first node of a shared item, last node of a private one
    int nodes;
    int first_position;                  // private items: position of the first node
    int root_tile_slot, past_tile_slot;  // result slot of nodes in the root's tile and past it; -1 for none
    bool is_private;
    u64 path;         // private items only
    int query_group;  // equal for items with the same queries
    int window, sinks;
    u32 row;  // first cache row, for the loading warps
};

// Cost of a private item, in tiles.
#define PRIVATE_ITEM_COST (1 + ITEM_OVERHEAD)

// Class k of shared items: k even, the rest units of tree k / 2 (short, so private items fit beside them); k odd, its
// splits.
struct ItemClass {
    int units, items, cost;  // items: per unit
};
__device__ __forceinline__ ItemClass item_class(const TreePlan* plans, int k) {
    const TreePlan& plan = plans[k / 2];
    const int short_last = plan.shared_items - plan.full_splits;
    return {k % 2        ? plan.full_splits * plan.pairs
            : short_last ? plan.pairs
                         : 0,
            k % 2 ? 1 : short_last, plan.costs[1 - k % 2]};
}

// Work of a block: `main` shared items of class k from unit `first`, or single items of tree (-1 - k) / 2 if k < 0;
// then private items from `extra`. `items` in all.
struct BlockSchedule {
    int k, first, main, extra, items;
};
#define SINGLE_ITEMS(tree) (-1 - 2 * (tree))
// Schedule of this block; one warp. Each lane tries a time limit, starting at the mean; the lowest limit that needs no
// more blocks than the grid has wins. Private items go to blocks without shared items first, then into the time left
// elsewhere.
__device__ __forceinline__ BlockSchedule schedule_of_block(const TreePlan* plans, int trees) {
    const int lane = threadIdx.x % 32, blocks = gridDim.x;
    int private_items = 0, all = 0, cost = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) {
        all += plans[i].shared_items * plans[i].pairs, private_items += plans[i].private_items;
        cost += (plans[i].full_splits * plans[i].costs[0] + plans[i].costs[1]) * plans[i].pairs;
    }
    if (all + private_items <= blocks) {
        int index = blockIdx.x;
#pragma unroll 1
        for (int i = 0; i < trees; i++) {
            const int items = plans[i].shared_items * plans[i].pairs;
            if (index < items) return {SINGLE_ITEMS(i), index, 1, 0, 1};
            index -= items;
        }
        return {0, 0, 0, index, index < private_items};
    }
    const auto units_per_block = [&](const ItemClass& c, int limit) { return max(1, limit / c.cost); };
    const auto blocks_for = [&](const ItemClass& c, int per_block) { return (c.units + per_block - 1) / per_block; };
    const auto extra_items = [&](const ItemClass& c, int per_block, int limit) {
        return max(0, limit - per_block * c.cost) / PRIVATE_ITEM_COST;
    };
    const int mean = (cost + private_items * PRIVATE_ITEM_COST) / blocks + 1;
    int limit = mean + mean * lane / 24, needed_blocks = 0, spare = 0;
#pragma unroll 1
    for (int k = 0; k < 2 * trees; k++) {
        const ItemClass c = item_class(plans, k);
        const int per_block = units_per_block(c, limit), own = blocks_for(c, per_block);
        needed_blocks += own, spare += own * extra_items(c, per_block, limit);
    }
    const u32 enough =
        __ballot_sync(WARP_ALL, private_items <= spare + (blocks - needed_blocks) * (limit / PRIVATE_ITEM_COST) &&
                                    needed_blocks <= blocks);
    const int found = enough ? __ffs(enough) - 1 : 31;
    limit = __shfl_sync(WARP_ALL, limit, found), needed_blocks = __shfl_sync(WARP_ALL, needed_blocks, found);
    // Private items that the blocks without shared items have no time for.
    const int others = blocks - needed_blocks, left_over = max(0, private_items - others * (limit / PRIVATE_ITEM_COST));
    int before = 0, taken = 0;
#pragma unroll 1
    for (int k = 0; k < 2 * trees; k++) {
        const ItemClass c = item_class(plans, k);
        const int per_block = units_per_block(c, limit), own = blocks_for(c, per_block),
                  tree_index = blockIdx.x - before;
        // Evenly, but no more than are left.
        const int private_of_block =
            own ? min(extra_items(c, per_block, limit), max(0, left_over - taken + own - 1) / own) : 0;
        if (tree_index < own) {
            const int main = min(per_block, c.units - tree_index * per_block) * c.items,
                      extra = min(left_over, taken + tree_index * private_of_block);
            return {k, tree_index * per_block, main, extra, main + min(private_of_block, left_over - extra)};
        }
        before += own, taken += own * private_of_block;
    }
    const int per_block = (private_items - left_over + others - 1) / others,
              extra = left_over + (blockIdx.x - before) * per_block;
    return {0, 0, 0, extra, max(0, min(per_block, private_items - extra))};
}

// Work item `next` of a block.
__device__ __forceinline__ WorkItem work_item(const Step* step, const TreePlan* plans, const BlockSchedule& schedule,
                                              int next) {
    const bool shared_items = next < schedule.main, single = schedule.k < 0,
               short_last = !single && schedule.k % 2 == 0;
    int index = schedule.extra + next - schedule.main;
    int tree_index = !shared_items ? 0 : single ? (-1 - schedule.k) / 2 : schedule.k / 2;
#pragma unroll 1
    for (; !shared_items && index >= plans[tree_index].private_items; tree_index++)
        index -= plans[tree_index].private_items;
    const TreePlan& plan = plans[tree_index];
    const WindowedTree& tree = plan.tree;
    WorkItem item;
    item.tree = tree_index, item.slot = tree.slot, item.committed = tree.committed, item.first = tree.first;
    item.window = tree.window, item.sinks = tree.sinks;
    if (shared_items) {
        const int per_block = short_last ? plan.shared_items - plan.full_splits
                              : single   ? plan.shared_items
                                         : plan.full_splits;
        const int unit = short_last ? schedule.first * per_block + next : schedule.first + next;
        const int pair = unit / per_block, root_items = num_items(plan.root_tile);
        item.is_private = false, item.path = 0, item.first_position = 0;
        item.kv_head = pair % KV_HEADS;
        item.node = pair / KV_HEADS * ITEM_NODES;
        item.nodes = min(tree.nodes - item.node, ITEM_NODES);
        item.query_group = tree_index << 16 | pair;
        int i = unit - pair * per_block + (short_last ? plan.full_splits : 0);
        if (i == plan.shared_items - 1 && plan.tile > 0) {
            item.end = plan.tile * KV_TILE, item.begin = item.end - KV_TILE;
            item.root_tile_slot = plan.root_tile.last,
            item.past_tile_slot = plan.root_tile.last < plan.common_splits ? plan.root_tile.last : -1;
            return item;
        }
        const bool in_root_tile = i < root_items;
        const SplitSeries& series = in_root_tile ? plan.root_tile : plan.past_tile;
        i += series.first - (in_root_tile ? 0 : root_items);
        const int span = i >= series.masked.begin ? i + series.masked.end - series.masked.begin : i;
        int begin = span * series.tiles;
        const int end = min(begin + series.tiles, plan.tile - in_root_tile);
        // The first split of a window is never empty, but its only tile may have zero weight.
        if (WINDOW && begin * KV_TILE >= tree.sinks) begin = max(begin, min(window_tile(tree), end - 1));
        item.begin = begin * KV_TILE, item.end = end * KV_TILE;
        item.root_tile_slot = in_root_tile ? span : -1;
        item.past_tile_slot = in_root_tile && span >= plan.common_splits ? -1 : span;
        return item;
    }
    item.is_private = true;
    item.kv_head = index % KV_HEADS;
    int skip = index / KV_HEADS;
    const int in_root_tile = __popcll(plan.last);
    const bool second = skip >= in_root_tile;
    u64 remaining = second ? plan.last & plan.past_root_tile : plan.last;
    skip -= second ? in_root_tile : 0;
#pragma unroll 1
    for (; skip; skip--) remaining &= remaining - 1;
    item.node = __ffsll(remaining) - 1;
    item.path = step->ancestors[tree.first + item.node];
    item.nodes = nodes_in_item(chain_length(item.path, plan.chain_tops));
    item.first_position = tree.committed + __popcll(item.path) - item.nodes;
    item.begin = (plan.tile + second) * KV_TILE, item.end = item.begin + KV_TILE;
    item.root_tile_slot = second ? -1 : plan.root_tile.last + (plan.tile > 0);
    item.past_tile_slot = plan.past_tile.last + second;
    item.query_group = 1 << 24 | tree_index << 16 | index;
    return item;
}
// Cache row where the tile at `key` begins; 0 past the end of the item.
__device__ __forceinline__ u32 kv_row_at(const WorkItem& item, int key, const PageTable& pages) {
    return key < item.end ? (u32)kv_row(pages, item.slot, key, KV_HEADS, item.kv_head) : 0;
}
__device__ __forceinline__ u32 first_kv_row(const WorkItem& item, const PageTable& pages) {
    return item.is_private ? 0 : kv_row_at(item, item.begin, pages);
}

// Finds the cache rows of a private item's keys: committed ones, then those of the path; NO_ROW for none. Threads 0 ..
// 2 KV_TILE, then a barrier.
__device__ __forceinline__ void find_gather_rows(const WorkItem& item, const PageTable& pages, u32* rows, u32 thread) {
    if (thread < KV_TILE) {
        const int position = item.begin + thread;
        const bool is_node = position >= item.committed && position < item.committed + __popcll(item.path);
        if (is_node) return;
        const bool is_kept = position < item.committed && (WINDOW <= 0 || position > item.committed - WINDOW);
        rows[thread] = is_kept ? (u32)kv_row(pages, item.slot, position, KV_HEADS, item.kv_head) : NO_ROW;
    } else if (thread < 2 * KV_TILE) {
        const int node = thread - KV_TILE;
        const int at = item.committed + __popcll(item.path & ((1ull << node) - 1)) - item.begin;
        if (item.path >> node & 1 && at >= 0 && at < KV_TILE)
            rows[at] = (u32)kv_row(pages, item.slot, item.committed + node, KV_HEADS, item.kv_head);
    }
}

// Node i of an item.
__device__ __forceinline__ int item_node(const WorkItem& item, int i) {
    if (!item.is_private) return item.node + i;
    u64 path = item.path;
#pragma unroll 1
    for (int up = item.nodes - 1 - i; up > 0; up--) path &= ~(1ull << (63 - __clzll(path)));
    return 63 - __clzll(path);
}
