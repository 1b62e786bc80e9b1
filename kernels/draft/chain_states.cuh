// States of a DSpark draft: the likeliest tokens of each depth, behind each of which one list of candidates follows.
//
// A tree has CHAIN_STATES of them at a depth, rows CHAIN_STATES * tree .. of everything that has a row per state. Those
// that it does not have are behind those that it has, with token -1. A block's root is the only state of depth 0.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"

#define CHAIN_STATES 8

// The logits row of depth `depth` of a tree; -1 if the tree does not draft so deep.
__device__ __forceinline__ int chain_logits_row(const Step* step, int tree, int depth) {
    if (tree >= step->trees) return -1;
    const int depths = step->n_logits_rows / step->trees;
    return depth < depths ? tree * depths + depth : -1;
}
