// Work items of decode_tree.cu with fixed KV splits (fixed_splits_schedule.cuh): a block takes those of its
// BlockSchedule. The next item is prefetched while this one is computed.
// Needs: M16_TILES, TREE_PLANS, SoftmaxStorage, and what fixed_splits_schedule.cuh and kv_tiles.cuh need.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/fixed_splits_schedule.cuh"
#include "attention/kv_tiles.cuh"

struct ItemStorage {
    TreePlan plans[TREE_PLANS];
    WorkItem items[2];
    BlockSchedule schedule;
    int step_row[2][STEP_ROWS];  // of the nodes of both items
    int result[2][STEP_ROWS];    // index of their results for head 0, -1 for none
    u32 gather_row[KV_TILE];     // private items: cache row of each key, NO_ROW for none
};
static_assert(sizeof(WorkItem) <= 80 && sizeof(TreePlan) <= 128 && sizeof(BlockSchedule) <= 24,
              "launch::attention counts the bytes of shared memory");

struct DecodeItem {
    WindowedTree tree;
    int kv_head, begin, buffer;
    bool is_private;
    int m_first, m_rows, m_tiles;  // m_first is 0
    int tiles;                     // KV tiles

    __device__ __forceinline__ int position(int j) const { return begin + j * KV_TILE; }
    __device__ __forceinline__ bool is_committed(int) const { return !is_private; }
    __device__ __forceinline__ int step_row(const ItemStorage& storage, int m) const {
        return storage.step_row[buffer][m / GROUP_SIZE];
    }
    // -1 for none.
    __device__ __forceinline__ int result(const ItemStorage& storage, int m) const {
        const int of_node = storage.result[buffer][m / GROUP_SIZE];
        return of_node < 0 ? -1 : of_node + (kv_head * GROUP_SIZE + m % GROUP_SIZE) * SPLITS;
    }
    template <int FORMAT, int STRIDE>
    __device__ __forceinline__ void load_tile(const ItemStorage& storage, u32 to, const Plane& plane,
                                              const PageTable& pages, int j) const {
        if (is_private) {
            tile_gather<FORMAT, STRIDE>(to, plane, storage.gather_row, threadIdx.x);
            return;
        }
        const int at = position(j), low = WINDOW > 0 ? tree.committed - WINDOW + 1 - at : 0;
        tile_load<FORMAT, STRIDE>(to, plane, kv_row(pages, tree.slot, at, KV_HEADS, kv_head), low, KV_TILE);
    }
};

// The items of a block.
struct DecodeItems {
    int next;

    __device__ __forceinline__ DecodeItems(const Step* step, ItemStorage& storage) : next(0) {
        const int warp = warp_index();
        if (warp == 0) {
            plan_trees(step, storage.plans);
            const BlockSchedule schedule = schedule_of_block(storage.plans, step->trees);
            if (threadIdx.x == 0) storage.schedule = schedule;
            __syncwarp();
            if (schedule.items > 0) prefetch(step, storage, 0);
        }
        __syncthreads();
    }

    // Puts item `index` of the block where it is read; one warp.
    __device__ static __forceinline__ void prefetch(const Step* step, ItemStorage& storage, int index) {
        const WorkItem item = work_item(step, storage.plans, storage.schedule, index);
        const int lane = threadIdx.x % 32;
        if (lane == 0) storage.items[index & 1] = item;
        const u64 past_root_tile = storage.plans[item.tree].past_root_tile;
#pragma unroll 1
        for (int i = lane; i < item.nodes; i += 32) {
            const int node = item_node(item, i),
                      slot = past_root_tile >> node & 1 ? item.past_tile_slot : item.root_tile_slot;
            storage.step_row[index & 1][i] = item.first + node;
            storage.result[index & 1][i] = slot < 0 ? -1 : (item.first + node) * HEADS * SPLITS + slot;
        }
    }

    // The next item, whose marks of visible keys it writes; false after the last. All threads.
    __device__ __forceinline__ bool take(const Step* step, const PageTable& pages, ItemStorage& storage,
                                         SoftmaxStorage& softmax, DecodeItem& item) {
        if (next >= storage.schedule.items) return false;
        // What the item before read may be overwritten, and this one's words are there.
        __syncthreads();
        const int buffer = next++ & 1;
        const WorkItem& work = storage.items[buffer];
        item.tree.slot = work.slot, item.tree.committed = work.committed, item.tree.first = work.first;
        item.tree.nodes = work.nodes, item.tree.window = work.window, item.tree.sinks = work.sinks;
        item.kv_head = work.kv_head, item.begin = work.begin, item.buffer = buffer, item.is_private = work.is_private;
        item.tiles = (work.end - work.begin) / KV_TILE;
        item.m_first = 0, item.m_rows = work.nodes * GROUP_SIZE, item.m_tiles = (item.m_rows + 15) / 16;
        if (work.is_private) find_gather_rows(work, pages, storage.gather_row, threadIdx.x);
        if (threadIdx.x < work.nodes) {
            const int position = step->position[storage.step_row[buffer][threadIdx.x]];
            // Keys of the path come in order.
            softmax.visible[threadIdx.x] = ~0ull >> (63 - (position - work.committed));
            softmax.rope_position[threadIdx.x] = position;
        }
        if (work.is_private) __syncthreads();
        return true;
    }
    // Before the next call of `take`. All threads.
    __device__ __forceinline__ void prefetch_next(const Step* step, ItemStorage& storage) const {
        if (warp_index() == 7 && next < storage.schedule.items) prefetch(step, storage, next);
    }
};
