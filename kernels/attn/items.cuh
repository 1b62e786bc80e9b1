// Work of tree attention by warpgroup products: items, and where the keys of their passes are.
//
// An item is a split of a tree's keys for one key head and a part of COLUMNS rows of M, M being node * GROUP_SIZE + head
// of the group. Before this file: HEADS, KV_HEADS, COLUMNS, and what attn/span.cuh and attn/kv.cuh want.
#pragma once
#include "attn/kv.cuh"
#include "attn/span.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"

#define GROUP_SIZE (HEADS / KV_HEADS)

struct Nodes {
    u64 seen[STEP_ROWS];
    int at[STEP_ROWS];
};

struct Item {
    View tree;
    int begin, end;   // keys, counted as span_of counts them
    int first, near;  // the span's
    int kv_head, split, m_first;
    int queries;      // the same for items with the same queries
};

// Item `index`; splits of the same queries stand together.
__device__ __forceinline__ Item item_of(const Step* step, int index) {
    Item item;
#pragma unroll 1
    for (int which = 0;; which++) {
        item.tree = view_of(step, which);
        const Span span = span_of(item.tree);
        const int splits = splits_of(span), parts = (item.tree.nodes * GROUP_SIZE + COLUMNS - 1) / COLUMNS;
        const int items = splits * KV_HEADS * parts;
        if (index < items) {
            const int pair = index / splits;
            item.split = index - pair * splits;
            item.kv_head = pair % KV_HEADS;
            item.m_first = pair / KV_HEADS * COLUMNS;
            item.begin = span.begin + item.split * span.chunk;
            item.end = min(item.begin + span.chunk, span.end);
            item.first = span.begin, item.near = span.near;
            item.queries = which << 16 | pair;
            return item;
        }
        index -= items;
    }
}

// Items of a step.
__device__ __forceinline__ int items_of(const Step* step) {
    int total = 0;
#pragma unroll 1
    for (int i = 0; i < step->trees; i++) {
        const View tree = view_of(step, i);
        total += splits_of(span_of(tree)) * KV_HEADS * ((tree.nodes * GROUP_SIZE + COLUMNS - 1) / COLUMNS);
    }
    return total;
}
