// Decode attention of 1 to 4 draft trees on Hopper: as decode_tree.cu, with wgmma on swapped operands
// (attention/swapped_operands_sm90.cuh).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of split s;  c = scale log2 e
//
// in, out as decode_tree.cu
// grid one resident wave x 256 threads; a block takes a contiguous run of work items (tree, part of QUERY_COLUMNS rows
//      of M, KV head, split) and loads the first K stages of the next item before it stores the current one
// smem see swapped_operands_sm90.cuh
// arch sm_90a     reference cpu::reference::attention::attend
// test attention::tree_attention_over_*_matches_reference
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/swapped_operands_sm90.cuh"
#include "attention/work_items.cuh"

// Cache rows where the two tiles of a KV block begin.
struct TileRows {
    u32 row[2];
};

// Rows of KV block `pass`; 0 past the end of the item.
__device__ __forceinline__ TileRows tile_rows(const WorkItem& item, int pass, const PageTable& pages) {
    TileRows rows;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        const int key = item.begin + pass * BLOCK_KV + tile * KV_TILE,
                  position = kv_position(key, item.range_begin, item.window_begin);
        rows.row[tile] = key < item.end ? (u32)kv_row(pages, item.tree.slot, position, KV_HEADS, item.kv_head) : 0;
    }
    return rows;
}

// Starts load h of an item: K of KV block h / 2 if h is even, V if h is odd. `rows` are those of its KV block; after V
// they advance to the next block, because the page table lookup has a long latency.
__device__ __forceinline__ void load_stage(const WorkItem& item, int h, TileRows& rows, const Plane& keys,
                                           const Plane& values, const PageTable& pages, u32 smem_kv) {
    const int first = item.begin + h / 2 * BLOCK_KV;
    if (first < item.end) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int position = first + tile * KV_TILE;
            // No row sees keys older than the window; they may never have been written.
            const int low = WINDOW > 0 ? item.tree.committed - WINDOW + 1 - position : 0, high = item.end - position;
            const u32 slot = smem_kv + h % STAGES * STAGE_BYTES;
            if (h % 2 == 0)
                tile_load<K_FORMAT, K_STRIDE>(slot + tile * K_TILE_BYTES, keys, rows.row[tile], low, high);
            else
                tile_load<V_FORMAT, V_STRIDE>(slot + tile * V_TILE_BYTES, values, rows.row[tile], low, high);
        }
        if (h % 2) rows = tile_rows(item, h / 2 + 1, pages);
    }
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(256, N8_TILES <= 2 ? 2 : 1)
    attn_decode_tree(const Step* step, const u16* q16, Plane keys, Plane values, PageTable pages, float scale_log2,
                     float* partial, int rows) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_launch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = warp / 4;
    const u32 smem_q = shared_address(shared), smem_p = smem_q + 4 * PANEL_BYTES, smem_kv = smem_p + 2 * PANEL_BYTES;
    SoftmaxStorage& softmax = *(SoftmaxStorage*)(shared + 6 * PANEL_BYTES + STAGES * STAGE_BYTES);
    NodeMasks& nodes = *(NodeMasks*)(&softmax + 1);
    // The step header and committed KV are not written during a step, so only q16 and the rows of the nodes need
    // pdl_wait.
    const int num_items = num_work_items(step);
    int next_item = (int)((i64)blockIdx.x * num_items / gridDim.x);
    const int last_item = (int)((i64)(blockIdx.x + 1) * num_items / gridDim.x);
    if (next_item == last_item) {
        pdl_wait();
        return;
    }
    WorkItem item = work_item(step, next_item);
    TileRows next_rows = tile_rows(item, 0, pages);
    const bool keys_are_committed = min(item.end, item.begin + STAGES / 2 * BLOCK_KV) <= item.tree.committed;
    if (!keys_are_committed) pdl_wait();
#pragma unroll 1
    for (int h = 0; h < STAGES - 1; h++) load_stage(item, h, next_rows, keys, values, pages, smem_kv);
    if (keys_are_committed) pdl_wait();
    int loaded_query_group = -1;
#pragma unroll 1
    while (true) {
        if (item.query_group != loaded_query_group) {
            loaded_query_group = item.query_group;
            // A warp takes columns warp, warp + 8, ..; a lane takes one 16-byte part of each, several loads in flight.
#pragma unroll 3
            for (int i = 0; i < N8_TILES; i++) {
                const int column = warp + 8 * i, m = item.m_first + column, node = m / GROUP_SIZE;
                uint4 words = make_uint4(0, 0, 0, 0);
                if (node < item.tree.nodes) {
                    const int head = item.kv_head * GROUP_SIZE + m % GROUP_SIZE;
                    words =
                        query_words<K_FORMAT>(q16 + ((size_t)(item.tree.first + node) * HEADS + head) * HEAD_DIM, g, t);
                }
                store_query_words(smem_q, column, g, t, words);
            }
            fence_proxy_async();
            if (threadIdx.x < item.tree.nodes) {
                nodes.visible[threadIdx.x] = visible_nodes(step, item.tree, threadIdx.x);
                nodes.rope_position[threadIdx.x] = step->position[item.tree.first + threadIdx.x];
            }
        }
        if (threadIdx.x < QUERY_COLUMNS) softmax.running_max[threadIdx.x] = -INF, softmax.row_sum[threadIdx.x] = 0.0f;

        float sums[2][4 * N8_TILES], scores[4 * N8_TILES];
#pragma unroll
        for (int i = 0; i < 4 * N8_TILES; i++) sums[0][i] = sums[1][i] = 0.0f;
#pragma unroll 1
        for (int j = 0; item.begin + j * BLOCK_KV < item.end; j++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            load_stage(item, 2 * j + STAGES - 1, next_rows, keys, values, pages, smem_kv);
            qk_mma(scores, smem_kv + 2 * j % STAGES * STAGE_BYTES + group * K_TILE_BYTES, smem_q);
            const int key = item.begin + j * BLOCK_KV + group * KV_TILE,
                      position = kv_position(key, item.range_begin, item.window_begin);
            if (key + KV_TILE > min(item.tree.committed, item.end) ||
                (WINDOW && position < item.tree.committed + STEP_ROWS - item.tree.window)) {
#pragma unroll
                for (int n = 0; n < N8_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = 8 * n + 2 * t + e,
                                  node = min((item.m_first + column) / GROUP_SIZE, item.tree.nodes - 1);
                        const u64 visible = key < item.end ? visible_keys(position, item.tree, nodes.visible[node],
                                                                          nodes.rope_position[node])
                                                           : 0;
                        const u32 visible_to_lane = u32(visible >> (warp % 4 * 16 + g));
                        if (!(visible_to_lane & 1)) scores[4 * n + e] = -INF;
                        if (!(visible_to_lane >> 8 & 1)) scores[4 * n + 2 + e] = -INF;
                    }
            }
            online_softmax(scores, sums, softmax, smem_p, scale_log2,
                           [&] { load_stage(item, 2 * j + STAGES, next_rows, keys, values, pages, smem_kv); });
            cp_async_wait<STAGES - 1>();
            __syncthreads();
            accumulate_row_sums(softmax);
            pv_mma(sums, smem_kv + (2 * j + 1) % STAGES * STAGE_BYTES, warp, smem_p);
        }
        __syncthreads();

        const WorkItem finished = item;
        if (++next_item < last_item) {
            item = work_item(step, next_item);
            next_rows = tile_rows(item, 0, pages);
#pragma unroll 1
            for (int h = 0; h < STAGES - 1; h++) load_stage(item, h, next_rows, keys, values, pages, smem_kv);
        }
        float* max_and_sum = partial + (size_t)rows * HEADS * SPLITS * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = 8 * n + 2 * t + e, m = finished.m_first + column, node = m / GROUP_SIZE;
                if (node >= finished.tree.nodes) continue;
                const int head = finished.kv_head * GROUP_SIZE + m % GROUP_SIZE;
                const size_t index = ((size_t)(finished.tree.first + node) * HEADS + head) * SPLITS + finished.split;
                const float four_dims[4] = {sums[0][4 * n + e], sums[0][4 * n + 2 + e], sums[1][4 * n + e],
                                            sums[1][4 * n + 2 + e]};
                store_four_dims<V_FORMAT>(partial + index * HEAD_DIM + warp * 32, g, four_dims);
                if (warp == 0 && g == 0) {
                    max_and_sum[2 * index] = softmax.running_max[column];
                    max_and_sum[2 * index + 1] = softmax.row_sum[column];
                }
            }
        if (next_item == last_item) return;
        __syncthreads();
    }
}
