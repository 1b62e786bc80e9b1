// Work items of tree attention with swapped operands.
//
// An item is one split of a tree's keys for one KV head and a part of QUERY_COLUMNS rows of M (m = node * GROUP_SIZE +
// head in group). Needs: HEADS, KV_HEADS, QUERY_COLUMNS, and the defines of kv_range.cuh and kv_cache.cuh.
#pragma once
#include "attention/kv_cache.cuh"
#include "attention/kv_range.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"

#define GROUP_SIZE (HEADS / KV_HEADS)

struct NodeMasks {
    u64 visible[STEP_ROWS];
    int rope_position[STEP_ROWS];
};

struct WorkItem {
    WindowedTree tree;
    int begin, end;                 // key numbers, as in KvRange
    int range_begin, window_begin;  // of the tree's KvRange
    int kv_head, split, m_first;
    int query_group;  // equal for items with the same queries
};

// Work item `index`; splits of the same queries are neighbors.
__device__ __forceinline__ WorkItem work_item(const Step* step, int index) {
    WorkItem item;
#pragma unroll 1
    for (int tree_index = 0;; tree_index++) {
        item.tree = windowed_tree(step, tree_index);
        const KvRange range = kv_range(item.tree);
        const int splits = num_splits(range),
                  parts = (item.tree.nodes * GROUP_SIZE + QUERY_COLUMNS - 1) / QUERY_COLUMNS;
        const int items = splits * KV_HEADS * parts;
        if (index < items) {
            const int pair = index / splits;
            item.split = index - pair * splits;
            item.kv_head = pair % KV_HEADS;
            item.m_first = pair / KV_HEADS * QUERY_COLUMNS;
            item.begin = range.begin + item.split * range.split_size;
            item.end = min(item.begin + range.split_size, range.end);
            item.range_begin = range.begin, item.window_begin = range.window_begin;
            item.query_group = tree_index << 16 | pair;
            return item;
        }
        index -= items;
    }
}

// Number of work items of a step.
__device__ __forceinline__ int num_work_items(const Step* step) {
    int total = 0;
#pragma unroll 1
    for (int i = 0; i < step->trees; i++) {
        const WindowedTree tree = windowed_tree(step, i);
        total +=
            num_splits(kv_range(tree)) * KV_HEADS * ((tree.nodes * GROUP_SIZE + QUERY_COLUMNS - 1) / QUERY_COLUMNS);
    }
    return total;
}
