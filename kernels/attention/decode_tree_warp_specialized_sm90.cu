// Decode attention of 1 to 4 draft trees on Hopper for more than a few rows: as decode_tree_sm90.cu, but
// warp-specialized (attention/warp_specialized_sm90.cuh).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of split s;  c = scale log2 e
//
// in, out as decode_tree.cu
// grid one block per SM x 384 threads; a block takes a contiguous run of work items (work_items.cuh)
// smem see warp_specialized_sm90.cuh, then NodeMasks
// arch sm_90a     reference cpu::reference::attention::attend
// test attention::tree_attention_over_*_matches_reference
// Spills 336 bytes at 144 columns: fields of an item, most of them outside the loop over keys. So it is not marked hot.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/warp_specialized_sm90.cuh"
#include "attention/work_items.cuh"

// Cache row where the tile at `key` of an item begins; 0 past the end of the item.
__device__ __forceinline__ u32 tile_row(const WorkItem& item, int key, const PageTable& pages) {
    const int position = kv_position(key, item.range_begin, item.window_begin);
    return key < item.end ? (u32)kv_row(pages, item.tree.slot, position, KV_HEADS, item.kv_head) : 0;
}

template <int FORMAT, int STRIDE, int SLOTS>
__device__ __forceinline__ void start_loader(TileLoader<FORMAT, STRIDE, SLOTS>& loader, const WorkItem& item,
                                             const PageTable& pages) {
    loader.key = item.begin;
    loader.row = tile_row(item, loader.key, pages);
}
// Loads the next tile if the item has one more.
template <int FORMAT, int STRIDE, int SLOTS>
__device__ __forceinline__ void load_tile(TileLoader<FORMAT, STRIDE, SLOTS>& loader, const WorkItem& item,
                                          const Plane& plane, const PageTable& pages, u32 smem_tiles) {
    if (loader.key < item.end) {
        // No row sees keys older than the window; they may never have been written.
        const int low = WINDOW > 0 ? item.tree.committed - WINDOW + 1 - loader.key : 0;
        tile_load<FORMAT, STRIDE, 256>(loader.to, plane, loader.row, low, item.end - loader.key,
                                       int(opaque(threadIdx.x)) - 128);
        loader.key += KV_TILE;
        const int position = kv_position(loader.key, item.range_begin, item.window_begin);
        if (position % PAGE_SIZE == 0 || (WINDOW < 0 && loader.key == item.window_begin))
            loader.row = tile_row(item, loader.key, pages);
        else
            loader.row += KV_TILE;
        loader.to = loader.after(loader.to, smem_tiles);
    }
}

// Stores the queries of an item as the wgmma operand; `warp` of `warps` warps.
__device__ __forceinline__ void load_queries(const WorkItem& item, const u16* q16, u32 smem_q, int warp, int warps) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 4
    for (int column = warp; column < QUERY_COLUMNS; column += warps) {
        const int m = item.m_first + column, node = m / GROUP_SIZE;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (node < item.tree.nodes) {
            const int head = item.kv_head * GROUP_SIZE + m % GROUP_SIZE;
            words = query_words<K_FORMAT>(q16 + ((size_t)(item.tree.first + node) * HEADS + head) * HEAD_DIM, g, t);
        }
        store_query_words(smem_q, column, g, t, words);
    }
    fence_proxy_async();
}
__device__ __forceinline__ void load_nodes(const Step* step, const WorkItem& item, NodeMasks& nodes) {
    if (threadIdx.x < item.tree.nodes) {
        nodes.visible[threadIdx.x] = visible_nodes(step, item.tree, threadIdx.x);
        nodes.rope_position[threadIdx.x] = step->position[item.tree.first + threadIdx.x];
    }
}

// Kernel arguments and the block's share of the work.
struct KernelParams {
    const Step* step;
    const u16* q16;
    Plane keys, values;
    PageTable pages;
    float* partial;
    int rows, first_item, last_item;  // items first_item .. last_item
    u32 smem_q, smem_p, smem_k, smem_v;
    float scale_log2;
};

// Loads the first tiles of an item, V one stage less than there are.
__device__ __forceinline__ void load_first_tiles(const KernelParams& params, const WorkItem& item, KLoader& keys,
                                                 VLoader& values) {
    start_loader(keys, item, params.pages);
    start_loader(values, item, params.pages);
#pragma unroll 1
    for (int i = 0; i < K_STAGES; i++) load_tile(keys, item, params.keys, params.pages, params.smem_k);
#pragma unroll 1
    for (int i = 0; i < V_STAGES - 1; i++) load_tile(values, item, params.values, params.pages, params.smem_v);
    cp_async_commit();
}

// Softmax warpgroup: P of every tile of every item, then the bases and row sums of the item.
__device__ __forceinline__ void softmax_warpgroup(const KernelParams& params, WorkItem item, SoftmaxState& softmax,
                                                  NodeMasks& nodes) {
    const int lane = threadIdx.x % 32, warp = warp_index(), t = lane % 4;
    int tile = 0;
    u32 slot = params.smem_k;
#pragma unroll 1
    for (int next_item = params.first_item;;) {
        for (int column = threadIdx.x; column < QUERY_COLUMNS; column += 128)
            softmax.base[column] = 0.0f, softmax.running_max[column] = -INF;
        float sums[THREAD_SUMS], scores[4 * N8_TILES];
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
            const int position = kv_position(key, item.range_begin, item.window_begin);
            if (key + KV_TILE > min(item.tree.committed, item.end) ||
                (WINDOW && position < item.tree.committed + STEP_ROWS - item.tree.window)) {
                const int m_first = int(opaque(item.m_first)), lane = int(opaque(threadIdx.x % 32)), g = lane / 4,
                          t = lane % 4;
#pragma unroll
                for (int n = 0; n < N8_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = 8 * n + 2 * t + e,
                                  node = min((m_first + column) / GROUP_SIZE, item.tree.nodes - 1);
                        const u32 visible_to_lane =
                            u32(visible_keys(position, item.tree, nodes.visible[node], nodes.rope_position[node]) >>
                                (warp * 16 + g));
                        if (!(visible_to_lane & 1)) scores[4 * n + e] = -INF;
                        if (!(visible_to_lane >> 8 & 1)) scores[4 * n + 2 + e] = -INF;
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
        const WorkItem finished = item;
        if (++next_item < params.last_item) {
            item = work_item(params.step, next_item);
        }
        reduce_row_sums(softmax.warp_partials[warp], sums);
        named_barrier_sync<128>(SOFTMAX_BARRIER);
        float2* max_and_sum = (float2*)(params.partial + (size_t)params.rows * HEADS * SPLITS * HEAD_DIM);
        for (int column = threadIdx.x; column < QUERY_COLUMNS; column += 128) {
            const int m = finished.m_first + column, node = m / GROUP_SIZE;
            if (node >= finished.tree.nodes) break;
            const float sum = row_sum_of_column(softmax, column);
            const int head = finished.kv_head * GROUP_SIZE + m % GROUP_SIZE;
            max_and_sum[((size_t)(finished.tree.first + node) * HEADS + head) * SPLITS + finished.split] =
                make_float2(softmax.running_max[column], sum);
        }
        if (next_item == params.last_item) break;
        named_barrier_sync<128>(SOFTMAX_BARRIER);
        if (item.query_group != finished.query_group) {
            load_queries(item, params.q16, params.smem_q, warp, 4);
            load_nodes(params.step, item, nodes);
        }
    }
    drain_barriers(tile);
}

// PV warpgroups: accumulate P V of every tile of every item, and load all tiles.
__device__ __forceinline__ void pv_warpgroups(const KernelParams& params, KLoader keys, VLoader values,
                                              const SoftmaxState& softmax) {
    const int lane = threadIdx.x % 32, warp = warp_index() - 4, g = lane / 4, t = lane % 4;
    int buffer = 0;
    u32 slot = params.smem_v;
    WorkItem item = work_item(params.step, params.first_item);
#pragma unroll 1
    for (int next_item = params.first_item;;) {
        float sums[2][4 * N8_TILES];
#pragma unroll
        for (int i = 0; i < 4 * N8_TILES; i++) sums[0][i] = sums[1][i] = 0.0f;
        // Scores of the first tile start before V is waited for.
        cp_async_wait<0>();
        named_barrier_arrive<384>(K_FULL + buffer);
        if (item.begin + KV_TILE < item.end) named_barrier_arrive<384>(K_FULL + (buffer ^ 1));
#pragma unroll 1
        for (int key = item.begin; key < item.end; key += KV_TILE) {
            cp_async_wait<0>();
            named_barrier_sync<384>(P_FULL + buffer);
            if (key + 2 * KV_TILE < item.end) named_barrier_arrive<384>(K_FULL + buffer);
            load_tile(keys, item, params.keys, params.pages, params.smem_k);
            load_tile(values, item, params.values, params.pages, params.smem_v);
            cp_async_commit();
            if (softmax.rescaled[buffer]) {
#pragma unroll
                for (int n = 0; n < N8_TILES; n++) {
                    const float2 by = *(const float2*)(softmax.rescale[buffer] + 8 * n + 2 * t);
#pragma unroll
                    for (int m = 0; m < 2; m++) rescale_columns(sums[m], n, by);
                }
            }
#pragma unroll
            for (int step = 0; step < KV_TILE / 16; step++) {
                u32 v[4][2];
                value_fragments<V_FORMAT, V_STRIDE>(slot, step, warp, v);
                const u64 p = wgmma_desc(params.smem_p + buffer * PANEL_BYTES) + step * 2;
#pragma unroll
                for (int m = 0; m < 2; m++) pv_mma_step(sums[m], v[2 * m], v[2 * m + 1], p);
            }
            wgmma_wait<0>();
            named_barrier_arrive<384>(P_EMPTY + buffer);
            slot = VLoader::after(slot, params.smem_v);
            buffer ^= 1;
        }
        const WorkItem finished = item;
        if (++next_item < params.last_item) {
            item = work_item(params.step, next_item);
            load_first_tiles(params, item, keys, values);
        }
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int m = finished.m_first + 8 * n + 2 * t + e, node = m / GROUP_SIZE;
                if (node >= finished.tree.nodes) continue;
                const int head = finished.kv_head * GROUP_SIZE + m % GROUP_SIZE;
                const size_t index = ((size_t)(finished.tree.first + node) * HEADS + head) * SPLITS + finished.split;
                const float four_dims[4] = {sums[0][4 * n + e], sums[0][4 * n + 2 + e], sums[1][4 * n + e],
                                            sums[1][4 * n + 2 + e]};
                store_four_dims<V_FORMAT>(params.partial + index * HEAD_DIM + warp * 32, g, four_dims);
            }
        if (next_item == params.last_item) break;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attn_decode_tree(const Step* step, const u16* q16, Plane keys, Plane values, PageTable pages, float scale_log2,
                     float* partial, int rows) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_launch();
    const u32 smem_q = shared_address(shared), smem_k = smem_q + 6 * PANEL_BYTES;
    SoftmaxState& softmax =
        *(SoftmaxState*)(shared + 6 * PANEL_BYTES + K_STAGES * KLoader::BYTES + V_STAGES * VLoader::BYTES);
    NodeMasks& nodes = *(NodeMasks*)(&softmax + 1);
    const int total = num_work_items(step);
    const KernelParams params = {step,
                                 q16,
                                 keys,
                                 values,
                                 pages,
                                 partial,
                                 rows,
                                 (int)((i64)blockIdx.x * total / gridDim.x),
                                 (int)((i64)(blockIdx.x + 1) * total / gridDim.x),
                                 smem_q,
                                 smem_q + 4 * PANEL_BYTES,
                                 smem_k,
                                 smem_k + K_STAGES * KLoader::BYTES,
                                 scale_log2};
    if (params.first_item == params.last_item) {
        pdl_wait();
        return;
    }
    const WorkItem item = work_item(step, params.first_item);
    const int warp = warp_index();
    const bool is_softmax = warp < 4;
    KLoader load_keys;
    VLoader load_values;
    load_keys.to = params.smem_k, load_values.to = params.smem_v;
    // The step header and committed KV are not written during a step, so only q16 and the rows of the nodes need
    // pdl_wait.
    const bool keys_are_committed = min(item.end, item.begin + K_STAGES * KV_TILE) <= item.tree.committed;
    if (!keys_are_committed) pdl_wait();
    if (!is_softmax) load_first_tiles(params, item, load_keys, load_values);
    if (keys_are_committed) pdl_wait();
    load_queries(item, q16, smem_q, warp, 12);
    load_nodes(step, item, nodes);
    __syncthreads();
    if (is_softmax) {
        setmaxnreg_dec<SOFTMAX_REGISTERS>();
        softmax_warpgroup(params, item, softmax, nodes);
    } else {
        setmaxnreg_inc<PV_REGISTERS>();
        pv_warpgroups(params, load_keys, load_values, softmax);
    }
}
