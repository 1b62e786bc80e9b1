// Batch-invariant decode attention of 1 to TREE_PLANS draft trees on Hopper: fixed KV splits (fixed_splits.cuh),
// warp-specialized (warp_specialized_sm90.cuh).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of slot s;  c = scale log2 e
//
// in   as decode_tree.cu
// out  partial [rows][HEADS][SPLITS][HEAD_DIM] f32, then [rows][HEADS][SPLITS][2] f32 (m, l): the slots of split_slots
// grid one block per SM x 384 threads; a block takes the items of its BlockSchedule (fixed_splits_schedule.cuh)
// smem see warp_specialized_sm90.cuh, then TreeStorage
// arch sm_90a     reference cpu::reference::attention::attend
// test attention_batch_invariance::*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/warp_specialized_sm90.cuh"
#include "attention/fixed_splits_schedule.cuh"

// Named barrier of the PV warpgroups, besides those of warp_specialized_sm90.cuh.
#define PV_BARRIER 8
// cp.async groups that may be in flight when a tile starts: K of two tiles ahead and V of this one have landed.
#define PENDING_COPIES (K_STAGES - 3)
// Items in shared memory: those in flight, the next one for the softmax warpgroup, and the previous ones.
#define ITEM_SLOTS 8
// Items are prefetched this far ahead of the one in P V, as far as K is loaded.
#define ITEMS_AHEAD K_STAGES

#define NO_NODE 64
// As QK_UNROLL in swapped_operands_sm90.cuh.
#define PV_UNROLL (ROLLED ? 1 : KV_TILE / 16)
// Few columns leave registers for the next kernel of the stream, which may then start early.
#define SMALL_BLOCK (N8_TILES <= 2)

// Plans of the trees and the items in flight.
struct TreeStorage {
    TreePlan plans[TREE_PLANS];
    BlockSchedule schedule;
    WorkItem items[ITEM_SLOTS];
    u32 gather_row[4][KV_TILE];        // private items: cache row of each key, NO_ROW for none
    u8 node[ITEM_SLOTS][ITEM_NODES];   // nodes of the items, NO_NODE after the last
    u8 depth[ITEM_SLOTS][ITEM_NODES];  // their depths
    int rope_position[ITEM_NODES];     // positions of an item's nodes
    int softmax_index[ITEM_NODES];     // where the softmax warpgroup stores bases and row sums of its nodes
    int pv_index[2][ITEM_NODES];       // where the PV warpgroups store their accumulators; alternating by item
};

static_assert(sizeof(WorkItem) <= 80 && sizeof(TreePlan) <= 128, "launch::attention counts the bytes of shared memory");
static_assert(K_STAGES == V_STAGES || K_STAGES == V_STAGES + 1, "V loads trail K loads by one or two tiles");
static_assert(ITEM_SLOTS >= ITEMS_AHEAD + 4, "a new item must not overwrite one in use");

// Whether a node at `rope_position` sees the key at `key`; windows hide committed keys only.
__device__ __forceinline__ bool is_visible(const WorkItem& item, int rope_position, int key) {
    if (!WINDOW) return key <= rope_position;
    return key <= rope_position &&
           (rope_position - key < item.window || key >= item.committed || (WINDOW < 0 && key < item.sinks));
}

// Prefetches item `next` of the block; one warp.
__device__ __forceinline__ void prefetch_item(const Step* step, const PageTable& pages, TreeStorage& storage,
                                              int next) {
    const int lane = threadIdx.x % 32;
    WorkItem item = work_item(step, storage.plans, storage.schedule, next);
    item.row = first_kv_row(item, pages);
    if (lane == 0) storage.items[next % ITEM_SLOTS] = item;
    if (lane >= ITEM_NODES) return;
    const int node = lane < item.nodes ? item_node(item, lane) : NO_NODE;
    storage.node[next % ITEM_SLOTS][lane] = node;
    if (lane < item.nodes) storage.depth[next % ITEM_SLOTS][lane] = step->position[item.first + node] - item.committed;
}
// Index of node i's result as (row, head 0, slot); -1 for none.
__device__ __forceinline__ int partial_index(const TreeStorage& storage, int tree_index, int i) {
    const WorkItem& item = storage.items[tree_index % ITEM_SLOTS];
    const int node = storage.node[tree_index % ITEM_SLOTS][i];
    if (node == NO_NODE) return -1;
    const int slot = storage.plans[item.tree].past_root_tile >> node & 1 ? item.past_tile_slot : item.root_tile_slot;
    return slot < 0 ? -1 : (item.first + node) * HEADS * SPLITS + slot;
}

// Stores the queries of an item as the wgmma operand; `warp` of WARPS warps. With ZERO_FILL, columns without a node
// become zeros; otherwise they keep old data, and their results are unused.
template <int WARPS, int COLUMNS_AT_ONCE, bool ZERO_FILL>
__device__ __forceinline__ void load_queries(const TreeStorage& storage, int tree_index, const u16* q16, u32 smem_q,
                                             int warp) {
    const WorkItem& item = storage.items[tree_index % ITEM_SLOTS];
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, columns = item.nodes * GROUP_SIZE;
#pragma unroll 1
    for (int begin = warp; begin < (ZERO_FILL ? QUERY_COLUMNS : columns); begin += WARPS * COLUMNS_AT_ONCE) {
        uint4 words[COLUMNS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < COLUMNS_AT_ONCE; i++) {
            const int column = begin + i * WARPS;
            words[i] = make_uint4(0, 0, 0, 0);
            if (column < columns) {
                const int node = item.first + storage.node[tree_index % ITEM_SLOTS][column / GROUP_SIZE];
                const int head = item.kv_head * GROUP_SIZE + column % GROUP_SIZE;
                words[i] = query_words<K_FORMAT>(q16 + ((size_t)node * HEADS + head) * HEAD_DIM, g, t);
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS_AT_ONCE; i++)
            if (begin + i * WARPS < QUERY_COLUMNS) store_query_words(smem_q, begin + i * WARPS, g, t, words[i]);
    }
    fence_proxy_async();
}
// Result index and position of an item's nodes, for the softmax warpgroup.
__device__ __forceinline__ void load_node_slots(TreeStorage& storage, int tree_index) {
    if (threadIdx.x < ITEM_NODES) {
        storage.softmax_index[threadIdx.x] = partial_index(storage, tree_index, threadIdx.x);
        storage.rope_position[threadIdx.x] =
            storage.items[tree_index % ITEM_SLOTS].committed + storage.depth[tree_index % ITEM_SLOTS][threadIdx.x];
    }
}

// Kernel arguments and shared memory of the block.
struct KernelParams {
    const Step* step;
    const u16* q16;
    Plane keys, values;
    PageTable pages;
    float* partial;
    int rows;
    TreeStorage& storage;
    u32 smem_q, smem_p, smem_k, smem_v;
    float scale_log2;
};

// Where a tile is in the cache: at a row, gathered (a private item), or NO_TILE after the last.
struct TileSource {
    u32 row;
    int low;  // rows below this are older than the window and may never have been written
};
#define NO_TILE NO_ROW
#define GATHERED_TILE 0xfffffff0u

// Iterator over the tiles of a block's items, for the PV warpgroups.
struct TileIterator {
    int next;  // item of the next tile
    int key;   // its first key; -1 for the start of the item
    u32 row;   // its cache row; looked up early because the page table lookup has a long latency
};
__device__ __forceinline__ TileSource next_tile(const KernelParams& params, TileIterator& tiles) {
    TileSource source = {NO_TILE, 0};
    if (tiles.next >= params.storage.schedule.items) return source;
    const WorkItem& item = params.storage.items[tiles.next % ITEM_SLOTS];
    if (item.is_private) {
        source.row = GATHERED_TILE + tiles.next % 4;
        find_gather_rows(item, params.pages, params.storage.gather_row[tiles.next % 4], opaque(threadIdx.x) - 128);
        named_barrier_sync<256>(PV_BARRIER);
        tiles.next++;
        return source;
    }
    if (tiles.key < 0) tiles.key = item.begin, tiles.row = item.row;
    source.row = tiles.row;
    if (WINDOW > 0) source.low = item.committed - WINDOW + 1 - tiles.key;
    tiles.key += KV_TILE;
    if (tiles.key >= item.end)
        tiles.next++, tiles.key = -1;
    else if (tiles.key % PAGE_SIZE == 0)
        tiles.row = kv_row_at(item, tiles.key, params.pages);
    else
        tiles.row += KV_TILE;
    return source;
}
template <int FORMAT, int STRIDE>
__device__ __forceinline__ void load_tile(const TreeStorage& storage, const TileSource& source, const Plane& plane,
                                          u32 to) {
    if (source.row == NO_TILE) return;
    const int thread = int(opaque(threadIdx.x)) - 128;
    if (source.row >= GATHERED_TILE)
        tile_gather<FORMAT, STRIDE>(to, plane, storage.gather_row[source.row % 4], thread);
    else
        tile_load<FORMAT, STRIDE, 256>(to, plane, source.row, source.low, KV_TILE, thread);
}
__device__ __forceinline__ void load_keys(const KernelParams& params, const TileSource& source, int slot) {
    load_tile<K_FORMAT, K_STRIDE>(params.storage, source, params.keys, params.smem_k + slot * KLoader::BYTES);
}
__device__ __forceinline__ void load_values(const KernelParams& params, const TileSource& source, int slot) {
    load_tile<V_FORMAT, V_STRIDE>(params.storage, source, params.values, params.smem_v + slot * VLoader::BYTES);
}

// The last two tiles whose K was loaded; their V follows.
struct TileQueue {
    TileSource last, before;
    int ahead;  // tiles with K loaded and P V not done
};

// Loads the first tiles, V one stage less than there are; rows of nodes must not be read before pdl_wait.
__device__ __forceinline__ TileQueue load_first_tiles(const KernelParams& params, TileIterator& tiles) {
    TileQueue queue = {{NO_TILE, 0}, {NO_TILE, 0}, 0};
#pragma unroll 1
    for (int i = 0; i < K_STAGES; i++) {
        queue.before = queue.last, queue.last = next_tile(params, tiles);
        if (queue.last.row >= GATHERED_TILE) pdl_wait();
        load_keys(params, queue.last, i);
        if (i < V_STAGES - 1) load_values(params, queue.last, i);
        queue.ahead += queue.last.row != NO_TILE;
        cp_async_commit();
    }
    return queue;
}

// Softmax warpgroup: P of every tile of every item, then the bases and row sums of the item.
__device__ __forceinline__ void softmax_warpgroup(const KernelParams& params, SoftmaxState& softmax) {
    TreeStorage& storage = params.storage;
    const int lane = threadIdx.x % 32, warp = warp_index(), t = lane % 4;
    int tile = 0;
    u32 slot = params.smem_k;
    float sums[THREAD_SUMS], scores[4 * N8_TILES];
#pragma unroll 1
    for (int next = 0;;) {
        const WorkItem& item = storage.items[next % ITEM_SLOTS];
        for (int column = threadIdx.x; column < QUERY_COLUMNS; column += 128)
            softmax.base[column] = 0.0f, softmax.running_max[column] = -INF;
#pragma unroll
        for (int i = 0; i < THREAD_SUMS; i++) sums[i] = 0.0f;
        bool any_column_empty = true;
#pragma unroll 1
        for (int key = item.begin; key < item.end; key += KV_TILE, tile++) {
            named_barrier_sync<384>(K_FULL + (tile & 1));
            qk_mma_tile<PV_START_STEP>(scores, slot, threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, params.smem_q, [&] {
                if (key > item.begin) named_barrier_arrive<384>(P_FULL + (~tile & 1));
            });
            slot = KLoader::after(slot, params.smem_k);
            if (item.is_private || (WINDOW && key < item.committed + STEP_ROWS - item.window)) {
                const int lane = int(opaque(threadIdx.x % 32)), t = lane % 4, key_of_lane = key + warp * 16 + lane / 4;
#pragma unroll
                for (int n = 0; n < N8_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = (8 * n + 2 * t + e) / GROUP_SIZE,
                                  rope_position = storage.rope_position[min(i, ITEM_NODES - 1)];
                        if (!is_visible(item, rope_position, key_of_lane)) scores[4 * n + e] = -INF;
                        if (!is_visible(item, rope_position, key_of_lane + 8)) scores[4 * n + 2 + e] = -INF;
                    }
            }
            // Six loads of bases in flight.
            float tile_max[4] = {-INF, -INF, -INF, -INF};
#pragma unroll
            for (int first = 0; first < N8_TILES; first += 6) {
                uint2 base[6];
#pragma unroll
                for (int n = first; n < min(first + 6, N8_TILES); n++)
                    base[n - first] = lds64(shared_address(softmax.base) + 32 * n + 8 * t);
#pragma unroll
                for (int n = first; n < min(first + 6, N8_TILES); n++)
                    subtract_base(scores, tile_max, n, base[n - first], params.scale_log2);
            }
            any_column_empty = softmax_tile(scores, sums, any_column_empty, tile_max, softmax, tile, params.smem_p);
        }
        named_barrier_arrive<384>(P_FULL + (~tile & 1));
        named_barrier_sync<128>(SOFTMAX_BARRIER);
        reduce_row_sums(softmax.warp_partials[warp], sums);
        named_barrier_sync<128>(SOFTMAX_BARRIER);
        float2* max_and_sum = (float2*)(params.partial + (size_t)params.rows * HEADS * SPLITS * HEAD_DIM);
        for (int column = threadIdx.x; column < item.nodes * GROUP_SIZE; column += 128) {
            const float sum = row_sum_of_column(softmax, column);
            const int row_index = storage.softmax_index[column / GROUP_SIZE],
                      head = item.kv_head * GROUP_SIZE + column % GROUP_SIZE;
            if (row_index >= 0) max_and_sum[row_index + head * SPLITS] = make_float2(softmax.running_max[column], sum);
        }
        if (++next == storage.schedule.items) break;
        const WorkItem& next_work_item = storage.items[next % ITEM_SLOTS];
        named_barrier_sync<128>(SOFTMAX_BARRIER);
        load_node_slots(storage, next);
        if (next_work_item.query_group != item.query_group)
            load_queries < 4, QUERY_COLUMNS<96 ? 2 : 4, false>(storage, next, params.q16, params.smem_q, warp);
    }
    drain_barriers(tile);
}

// PV warpgroups: accumulate P V of every tile of every item, and load all tiles.
__device__ __forceinline__ void pv_warpgroups(const KernelParams& params, TileIterator tiles, TileQueue queue,
                                              const SoftmaxState& softmax) {
    TreeStorage& storage = params.storage;
    const int lane = threadIdx.x % 32, warp = warp_index() - 4, g = lane / 4, t = lane % 4;
    int buffer = 0, key_slot = 0, slot = 0;
    float sums[2][4 * N8_TILES];
    cp_async_wait<K_STAGES - 2>();
    named_barrier_arrive<384>(K_FULL);
    if (queue.ahead > 1) named_barrier_arrive<384>(K_FULL + 1);
#pragma unroll 1
    for (int next = 0; next < storage.schedule.items; next++) {
        // Prefetched here while the accumulators are dead; all threads pass a barrier before it is read.
        if (warp == 0 && next > 0 && next + ITEMS_AHEAD < storage.schedule.items)
            prefetch_item(params.step, params.pages, storage, next + ITEMS_AHEAD);
        const WorkItem& item = storage.items[next % ITEM_SLOTS];
#pragma unroll
        for (int i = 0; i < 4 * N8_TILES; i++) sums[0][i] = sums[1][i] = 0.0f;
        // Also read only after a barrier, and written again only after another.
        const int own = threadIdx.x - 128;
        if (own < ITEM_NODES) storage.pv_index[next & 1][own] = partial_index(storage, next, own);
#pragma unroll 1
        for (int keys_left = item.end - item.begin; keys_left > 0; keys_left -= KV_TILE) {
            cp_async_wait<PENDING_COPIES>();
            named_barrier_sync<384>(P_FULL + buffer);
            if (queue.ahead > 2) named_barrier_arrive<384>(K_FULL + buffer);
            const TileSource source = next_tile(params, tiles);
            load_keys(params, source, key_slot);
            load_values(params, K_STAGES == V_STAGES ? queue.last : queue.before, slot == 0 ? V_STAGES - 1 : slot - 1);
            cp_async_commit();
            queue.before = queue.last, queue.last = source;
            queue.ahead -= source.row == NO_TILE;
            if (softmax.rescaled[buffer]) {
#pragma unroll
                for (int n = 0; n < N8_TILES; n++) {
                    const float2 by = *(const float2*)(softmax.rescale[buffer] + 8 * n + 2 * t);
#pragma unroll
                    for (int m = 0; m < 2; m++) rescale_columns(sums[m], n, by);
                }
            }
            const u32 values = params.smem_v + slot * VLoader::BYTES;
#pragma unroll PV_UNROLL
            for (int step = 0; step < KV_TILE / 16; step++) {
                u32 v[4][2];
                value_fragments<V_FORMAT, V_STRIDE>(values, step, warp, v);
                const u64 p = wgmma_desc(params.smem_p + buffer * PANEL_BYTES) + step * 2;
#pragma unroll
                for (int m = 0; m < 2; m++) pv_mma_step(sums[m], v[2 * m], v[2 * m + 1], p);
            }
            wgmma_wait<0>();
            named_barrier_arrive<384>(P_EMPTY + buffer);
            key_slot = key_slot == K_STAGES - 1 ? 0 : key_slot + 1;
            slot = slot == V_STAGES - 1 ? 0 : slot + 1;
            buffer ^= 1;
        }
        const int t = int(opaque(threadIdx.x)) % 4, kv_head = item.kv_head;
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = 8 * n + 2 * t + e, i = column / GROUP_SIZE;
                const int row_index = i < ITEM_NODES ? storage.pv_index[next & 1][i] : -1;
                if (row_index < 0) continue;
                const size_t index = row_index + (kv_head * GROUP_SIZE + column % GROUP_SIZE) * SPLITS;
                const float four_dims[4] = {sums[0][4 * n + e], sums[0][4 * n + 2 + e], sums[1][4 * n + e],
                                            sums[1][4 * n + 2 + e]};
                store_four_dims<V_FORMAT>(params.partial + index * HEAD_DIM + warp * 32, g, four_dims);
            }
    }
}

KERNEL(384, SMALL_BLOCK ? 2 : 1)
attn_decode_tree(const Step* step, const u16* q16, Plane keys, Plane values, PageTable pages, float scale_log2,
                 float* partial, int rows) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_launch();
    const u32 smem_q = shared_address(shared), smem_k = smem_q + 6 * PANEL_BYTES;
    SoftmaxState& softmax =
        *(SoftmaxState*)(shared + 6 * PANEL_BYTES + K_STAGES * KLoader::BYTES + V_STAGES * VLoader::BYTES);
    TreeStorage& storage = *(TreeStorage*)(&softmax + 1);
    const int warp = warp_index();
    if (warp == 0) {
        plan_trees(step, storage.plans);
        const BlockSchedule schedule = schedule_of_block(storage.plans, step->trees);
        if (threadIdx.x == 0) storage.schedule = schedule;
    }
    __syncthreads();
    const int items = storage.schedule.items;
    if (items == 0) {
        pdl_wait();
        return;
    }
    if (warp >= 4 && warp <= 4 + ITEMS_AHEAD && warp - 4 < items) prefetch_item(step, pages, storage, warp - 4);
    __syncthreads();
    const KernelParams params = {step,      q16,
                                 keys,      values,
                                 pages,     partial,
                                 rows,      storage,
                                 smem_q,    smem_q + 4 * PANEL_BYTES,
                                 smem_k,    smem_k + K_STAGES * KLoader::BYTES,
                                 scale_log2};
    const bool is_softmax = warp < 4;
    // The step header and committed KV are not written during a step, so only q16 and the rows of the nodes need
    // pdl_wait.
    TileIterator tiles = {0, -1, 0};
    TileQueue queue;
    if (!is_softmax) queue = load_first_tiles(params, tiles);
    pdl_wait();
    load_queries<12, (QUERY_COLUMNS < 72 ? QUERY_COLUMNS + 11 : 72) / 12, true>(storage, 0, q16, smem_q, warp);
    load_node_slots(storage, 0);
    __syncthreads();
    if (is_softmax) {
#if !SMALL_BLOCK
        setmaxnreg_dec<SOFTMAX_REGISTERS>();
#endif
        softmax_warpgroup(params, softmax);
    } else {
#if !SMALL_BLOCK
        setmaxnreg_inc<PV_REGISTERS>();
#endif
        pv_warpgroups(params, tiles, queue, softmax);
    }
}
