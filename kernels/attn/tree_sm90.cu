// Attention of the rows of 1 to 4 trees over paged, quantised keys and values, on Hopper: as tree.cu, by warpgroup
// products (attn/across_sm90.cuh).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of split s;  c = scale log2 e
//
// in, out as tree.cu
// grid as many blocks as the card holds at once, x 256: each takes a run of items (tree, part of COLUMNS rows of M, key
//      head, split), M being node * GROUP_SIZE + head of the group, and fetches the next item's first keys before it
//      stores what it has
// smem see attn/across_sm90.cuh
// arch sm_90a     reference cpu::reference::attention::attend     test attention::trees_over_*_equal_the_reference
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/across_sm90.cuh"
#include "attn/items.cuh"

// Where the two tiles of an item's pass are in the cache, in rows.
struct Rows {
    u32 of[2];
};

// Of pass `pass`; what does not exist is not looked up.
__device__ __forceinline__ Rows rows_of(const Item& item, int pass, const Pages& pages) {
    Rows rows;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        const int key = item.begin + pass * PASS + tile * TILE, position = position_of(key, item.first, item.near);
        rows.of[tile] = key < item.end ? (u32)kv_row(pages, item.tree.slot, position, KV_HEADS, item.kv_head) : 0;
    }
    return rows;
}

// Half `h` of an item's work is pass h / 2 of the keys, or of the values when h is odd: begins to fetch it. `rows` are
// those of its pass, and then of the next: looked up early, since the lookup takes a while.
__device__ __forceinline__ void load(const Item& item, int h, Rows& rows, const Plane& keys, const Plane& values, const Pages& pages,
                                     u32 ring) {
    const int first = item.begin + h / 2 * PASS;
    if (first < item.end) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int position = first + tile * TILE;
            // Nobody sees what is older than the window; it may never have been written.
            const int low = WINDOW > 0 ? item.tree.committed - WINDOW + 1 - position : 0, high = item.end - position;
            const u32 slot = ring + h % RING * SLOT_BYTES;
            if (h % 2 == 0)
                tile_load<K_FORMAT, K_STRIDE>(slot + tile * K_TILE_BYTES, keys, rows.of[tile], low, high);
            else
                tile_load<V_FORMAT, V_STRIDE>(slot + tile * V_TILE_BYTES, values, rows.of[tile], low, high);
        }
        if (h % 2) rows = rows_of(item, h / 2 + 1, pages);
    }
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(256, NT <= 2 ? 2 : 1) attn_tree(
    const Step* step, const u16* q16, Plane keys, Plane values, Pages pages, float scale_log2, float* partial, int rows) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_launch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = warp / 4;
    const u32 queries = shared_address(shared), weights = queries + 4 * PANEL_BYTES, ring = weights + 2 * PANEL_BYTES;
    Stats& stats = *(Stats*)(shared + 6 * PANEL_BYTES + RING * SLOT_BYTES);
    Nodes& nodes = *(Nodes*)(&stats + 1);
    // Nothing in a step writes the header or committed keys and values: only queries and the rows of the nodes must be
    // waited for.
    const int total = items_of(step);
    int next = (int)((i64)blockIdx.x * total / gridDim.x);
    const int last = (int)((i64)(blockIdx.x + 1) * total / gridDim.x);
    if (next == last) {
        pdl_wait();
        return;
    }
    Item item = item_of(step, next);
    Rows ahead = rows_of(item, 0, pages);
    const bool early = min(item.end, item.begin + RING / 2 * PASS) <= item.tree.committed;
    if (!early) pdl_wait();
#pragma unroll 1
    for (int h = 0; h < RING - 1; h++) load(item, h, ahead, keys, values, pages, ring);
    if (early) pdl_wait();
    int held = -1;
#pragma unroll 1
    while (true) {
        if (item.queries != held) {
            held = item.queries;
            // A warp takes columns warp, warp + 8, ..; a lane one part of one block of each, several on their way at once.
#pragma unroll 3
            for (int i = 0; i < NT; i++) {
                const int column = warp + 8 * i, m = item.m_first + column, node = m / GROUP_SIZE;
                uint4 words = make_uint4(0, 0, 0, 0);
                if (node < item.tree.nodes) {
                    const int head = item.kv_head * GROUP_SIZE + m % GROUP_SIZE;
                    words = query_words<K_FORMAT>(q16 + ((size_t)(item.tree.first + node) * HEADS + head) * DIM, g, t);
                }
                store_query(queries, column, g, t, words);
            }
            publish();
            if (threadIdx.x < item.tree.nodes) {
                nodes.seen[threadIdx.x] = seen_nodes(step, item.tree, threadIdx.x);
                nodes.at[threadIdx.x] = step->position[item.tree.first + threadIdx.x];
            }
        }
        if (threadIdx.x < COLUMNS) stats.running[threadIdx.x] = -INF, stats.total[threadIdx.x] = 0.0f;

        float sums[2][4 * NT], scores[4 * NT];
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) sums[0][i] = sums[1][i] = 0.0f;
#pragma unroll 1
        for (int j = 0; item.begin + j * PASS < item.end; j++) {
            cp_async_wait<RING - 2>();
            __syncthreads();
            load(item, 2 * j + RING - 1, ahead, keys, values, pages, ring);
            score_tile(scores, ring + 2 * j % RING * SLOT_BYTES + group * K_TILE_BYTES, queries);
            const int key = item.begin + j * PASS + group * TILE, position = position_of(key, item.first, item.near);
            if (key + TILE > min(item.tree.committed, item.end) ||
                (WINDOW && position < item.tree.committed + STEP_ROWS - item.tree.window)) {
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = 8 * n + 2 * t + e, node = min((item.m_first + column) / GROUP_SIZE, item.tree.nodes - 1);
                        const u64 seen =
                            key < item.end ? seen_keys(position, item.tree, nodes.seen[node], nodes.at[node]) : 0;
                        const u32 mine = u32(seen >> (warp % 4 * 16 + g));
                        if (!(mine & 1)) scores[4 * n + e] = -INF;
                        if (!(mine >> 8 & 1)) scores[4 * n + 2 + e] = -INF;
                    }
            }
            weigh(scores, sums, stats, weights, scale_log2, [&] { load(item, 2 * j + RING, ahead, keys, values, pages, ring); });
            cp_async_wait<RING - 1>();
            __syncthreads();
            count_weights(stats);
            add_values(sums, ring + (2 * j + 1) % RING * SLOT_BYTES, warp, weights);
        }
        __syncthreads();

        const Item done = item;
        if (++next < last) {
            item = item_of(step, next);
            ahead = rows_of(item, 0, pages);
#pragma unroll 1
            for (int h = 0; h < RING - 1; h++) load(item, h, ahead, keys, values, pages, ring);
        }
        float* pairs = partial + (size_t)rows * HEADS * SPLITS * DIM;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = 8 * n + 2 * t + e, m = done.m_first + column, node = m / GROUP_SIZE;
                if (node >= done.tree.nodes) continue;
                const int head = done.kv_head * GROUP_SIZE + m % GROUP_SIZE;
                const size_t index = ((size_t)(done.tree.first + node) * HEADS + head) * SPLITS + done.split;
                const float four[4] = {sums[0][4 * n + e], sums[0][4 * n + 2 + e], sums[1][4 * n + e], sums[1][4 * n + 2 + e]};
                store_four<V_FORMAT>(partial + index * DIM + warp * 32, g, four);
                if (warp == 0 && g == 0) {
                    pairs[2 * index] = stats.running[column];
                    pairs[2 * index + 1] = stats.total[column];
                }
            }
        if (next == last) return;
        __syncthreads();
    }
}
