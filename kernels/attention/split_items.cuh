// Work items of decode_tree.cu with free KV splits: (tree, split, KV head, part of M).
//
// Splits fill the GPU, so they depend on the context limit. If there is little work, M is cut finer so that every block
// has some.
// Needs: M16_TILES, GROUP_SIZE, SoftmaxStorage, and the defines of kv_range.cuh and kv_tiles.cuh.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/kv_range.cuh"
#include "attention/kv_tiles.cuh"

struct ItemStorage {};

struct DecodeItem {
    WindowedTree tree;
    KvRange range;
    int kv_head, split, begin, end;  // key numbers, as in KvRange
    int m_first, m_rows, m_tiles;    // rows of M from m_first on, and the tiles of 16 that the item has of them
    int tiles;                       // KV tiles

    // Cache position of KV tile j.
    __device__ __forceinline__ int position(int j) const {
        return kv_position(begin + j * KV_TILE, range.begin, range.window_begin);
    }
    // Whether the first `n` KV tiles are all committed.
    __device__ __forceinline__ bool is_committed(int n) const {
        return min(end, begin + n * KV_TILE) <= tree.committed;
    }
    // Row of the step and index of the result of row m of the item.
    __device__ __forceinline__ int step_row(const ItemStorage&, int m) const {
        return tree.first + (m_first + m) / GROUP_SIZE;
    }
    __device__ __forceinline__ int result(const ItemStorage& storage, int m) const {
        return (step_row(storage, m) * HEADS + kv_head * GROUP_SIZE + (m_first + m) % GROUP_SIZE) * SPLITS + split;
    }
    template <int FORMAT, int STRIDE>
    __device__ __forceinline__ void load_tile(const ItemStorage&, u32 to, const Plane& plane, const PageTable& pages,
                                              int j) const {
        const int at = position(j);
        // No row sees keys older than the window; they may never have been written.
        const int low = WINDOW > 0 ? tree.committed - WINDOW + 1 - at : 0;
        tile_load<FORMAT, STRIDE>(to, plane, kv_row(pages, tree.slot, at, KV_HEADS, kv_head), low, range.end - at);
    }
};

// The items of a block.
struct DecodeItems {
    int next, most_m_tiles;

    __device__ __forceinline__ DecodeItems(const Step* step, ItemStorage&) : next(blockIdx.x) {
        int total = 0;
#pragma unroll 1
        for (int i = 0; i < step->trees; i++) {
            const WindowedTree tree = windowed_tree(step, i);
            total += num_splits(kv_range(tree)) * all_m_tiles(tree);
        }
        most_m_tiles = max(1, min(M16_TILES, (total * KV_HEADS + (int)gridDim.x - 1) / (int)gridDim.x));
    }
    // M tiles of 16 rows per KV head of a tree.
    __device__ static __forceinline__ int all_m_tiles(const Tree& tree) { return (tree.nodes * GROUP_SIZE + 15) / 16; }

    // The next item, whose marks of visible keys it writes; false after the last. All threads.
    __device__ __forceinline__ bool take(const Step* step, const PageTable&, ItemStorage&, SoftmaxStorage& softmax,
                                         DecodeItem& item) {
        const int trees = step->trees;
        int index = next, tree_index = 0, parts = 0;
#pragma unroll 1
        for (; tree_index < trees; tree_index++) {
            item.tree = windowed_tree(step, tree_index);
            item.range = kv_range(item.tree);
            parts = (all_m_tiles(item.tree) + most_m_tiles - 1) / most_m_tiles;
            const int items = num_splits(item.range) * KV_HEADS * parts;
            if (index < items) break;
            index -= items;
        }
        if (tree_index == trees) return false;
        next += gridDim.x;
        item.kv_head = index / parts % KV_HEADS, item.split = index / (parts * KV_HEADS);
        item.begin = item.range.begin + item.split * item.range.split_size;
        item.end = min(item.begin + item.range.split_size, item.range.end);
        item.tiles = (item.end - item.begin + KV_TILE - 1) / KV_TILE;
        item.m_first = index % parts * most_m_tiles * 16;
        item.m_rows = item.tree.nodes * GROUP_SIZE - item.m_first;
        item.m_tiles = min(most_m_tiles, (item.m_rows + 15) / 16);
        __syncthreads();
        if (threadIdx.x < item.tree.nodes) {
            softmax.visible[threadIdx.x] = visible_nodes(step, item.tree, threadIdx.x);
            softmax.rope_position[threadIdx.x] = step->position[item.tree.first + threadIdx.x];
        }
        return true;
    }
    __device__ __forceinline__ void prefetch_next(const Step*, const ItemStorage&) const {}
};
