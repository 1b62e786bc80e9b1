// Attention of the rows of 1 to 4 trees over paged, quantised keys and values, on Hopper, for more than a few rows: as
// tree_sm90.cu, with one warpgroup that scores and weighs and two that sum values (attn/trio_sm90.cuh).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of split s;  c = scale log2 e
//
// in, out as tree.cu
// grid a block for each multiprocessor x 384: each takes a run of items (attn/items.cuh)
// smem see attn/trio_sm90.cuh, then Nodes
// arch sm_90a     reference cpu::reference::attention::attend     test attention::trees_over_*_equal_the_reference
// Spills 336 bytes at 144 columns: fields of an item, most of them outside the loop over keys. So it does not say "hot" yet.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/trio_sm90.cuh"
#include "attn/items.cuh"

// Row of the cache where the tile at `key` of an item begins; 0 for what does not exist.
__device__ __forceinline__ u32 row_of(const Item& item, int key, const Pages& pages) {
    const int position = position_of(key, item.first, item.near);
    return key < item.end ? (u32)kv_row(pages, item.tree.slot, position, KV_HEADS, item.kv_head) : 0;
}

template <int FORMAT, int STRIDE, int SLOTS>
__device__ __forceinline__ void begin(Fetch<FORMAT, STRIDE, SLOTS>& fetch, const Item& item, const Pages& pages) {
    fetch.key = item.begin;
    fetch.row = row_of(item, fetch.key, pages);
}
// The next tile, if the item has one more.
template <int FORMAT, int STRIDE, int SLOTS>
__device__ __forceinline__ void fetch_tile(Fetch<FORMAT, STRIDE, SLOTS>& fetch, const Item& item, const Plane& plane,
                                           const Pages& pages, u32 ring) {
    if (fetch.key < item.end) {
        // Nobody sees what is older than the window; it may never have been written.
        const int low = WINDOW > 0 ? item.tree.committed - WINDOW + 1 - fetch.key : 0;
        tile_load<FORMAT, STRIDE, 256>(fetch.to, plane, fetch.row, low, item.end - fetch.key, anew(threadIdx.x) - 128);
        fetch.key += TILE;
        const int position = position_of(fetch.key, item.first, item.near);
        if (position % PAGE == 0 || (WINDOW < 0 && fetch.key == item.near))
            fetch.row = row_of(item, fetch.key, pages);
        else
            fetch.row += TILE;
        fetch.to = fetch.after(fetch.to, ring);
    }
}

// Queries of an item to where products read them, by `warps` warps of which this is number `warp`.
__device__ __forceinline__ void load_queries(const Item& item, const u16* q16, u32 queries, int warp, int warps) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 4
    for (int column = warp; column < COLUMNS; column += warps) {
        const int m = item.m_first + column, node = m / GROUP_SIZE;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (node < item.tree.nodes) {
            const int head = item.kv_head * GROUP_SIZE + m % GROUP_SIZE;
            words = query_words<K_FORMAT>(q16 + ((size_t)(item.tree.first + node) * HEADS + head) * DIM, g, t);
        }
        store_query(queries, column, g, t, words);
    }
    publish();
}
__device__ __forceinline__ void load_nodes(const Step* step, const Item& item, Nodes& nodes) {
    if (threadIdx.x < item.tree.nodes) {
        nodes.seen[threadIdx.x] = seen_nodes(step, item.tree, threadIdx.x);
        nodes.at[threadIdx.x] = step->position[item.tree.first + threadIdx.x];
    }
}

// Everything there is to do for a block; planes and pages as the kernel has them.
struct Block {
    const Step* step;
    const u16* q16;
    Plane keys, values;
    Pages pages;
    float* partial;
    int rows, first, last;  // items first .. last
    u32 queries, weights, key_ring, value_ring;
    float scale_log2;
};

// The first tiles of an item, one slot of values less than there are.
__device__ __forceinline__ void fetch_first(const Block& block, const Item& item, FetchKeys& keys, FetchValues& values) {
    begin(keys, item, block.pages);
    begin(values, item, block.pages);
#pragma unroll 1
    for (int i = 0; i < K_RING; i++) fetch_tile(keys, item, block.keys, block.pages, block.key_ring);
#pragma unroll 1
    for (int i = 0; i < V_RING - 1; i++) fetch_tile(values, item, block.values, block.pages, block.value_ring);
    cp_async_commit();
}

// The warpgroup that scores: weights of every tile of every item, then the items' bases and sums of weights.
__device__ __forceinline__ void score(const Block& block, Item item, Marks& marks, Nodes& nodes) {
    const int lane = threadIdx.x % 32, warp = warp_index(), t = lane % 4;
    int tile = 0;
    u32 slot = block.key_ring;
#pragma unroll 1
    for (int next = block.first;;) {
        for (int column = threadIdx.x; column < COLUMNS; column += 128) marks.base[column] = 0.0f, marks.running[column] = -INF;
        float sums[OWN_SUMS], scores[4 * NT];
#pragma unroll
        for (int i = 0; i < OWN_SUMS; i++) sums[i] = 0.0f;
        bool unseen = true;
#pragma unroll 1
        for (int key = item.begin; key < item.end; key += TILE, tile++) {
            meet<384>(KEYS + (tile & 1));
            score_keys<RELEASE>(scores, slot, threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, block.queries, [&] {
                if (key > item.begin) tell<384>(FULL + (~tile & 1));
            });
            slot = FetchKeys::after(slot, block.key_ring);
            const int position = position_of(key, item.first, item.near);
            if (key + TILE > min(item.tree.committed, item.end) ||
                (WINDOW && position < item.tree.committed + STEP_ROWS - item.tree.window)) {
                const int m_first = anew(item.m_first), lane = anew(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = 8 * n + 2 * t + e, node = min((m_first + column) / GROUP_SIZE, item.tree.nodes - 1);
                        const u32 mine = u32(seen_keys(position, item.tree, nodes.seen[node], nodes.at[node]) >> (warp * 16 + g));
                        if (!(mine & 1)) scores[4 * n + e] = -INF;
                        if (!(mine >> 8 & 1)) scores[4 * n + 2 + e] = -INF;
                    }
            }
            // Six bases on their way at once.
            float most[4] = {-INF, -INF, -INF, -INF};
#pragma unroll
            for (int first = 0; first < NT; first += 6) {
                uint2 base[6];
#pragma unroll
                for (int n = first; n < min(first + 6, NT); n++)
                    base[n - first] = lds64(shared_address(marks.base) + 32 * n + 8 * t);
#pragma unroll
                for (int n = first; n < min(first + 6, NT); n++) hold_scores(scores, most, n, base[n - first], block.scale_log2);
            }
            unseen = store_tile(scores, sums, unseen, most, marks, tile, block.weights);
        }
        tell<384>(FULL + (~tile & 1));
        meet<128>(SCORING);
        const Item done = item;
        if (++next < block.last) {
            item = item_of(block.step, next);
        }
        join_sums(marks.parts[warp], sums);
        meet<128>(SCORING);
        float2* pairs = (float2*)(block.partial + (size_t)block.rows * HEADS * SPLITS * DIM);
        for (int column = threadIdx.x; column < COLUMNS; column += 128) {
            const int m = done.m_first + column, node = m / GROUP_SIZE;
            if (node >= done.tree.nodes) break;
            const float sum = sum_of_parts(marks, column);
            const int head = done.kv_head * GROUP_SIZE + m % GROUP_SIZE;
            pairs[((size_t)(done.tree.first + node) * HEADS + head) * SPLITS + done.split] = make_float2(marks.running[column], sum);
        }
        if (next == block.last) break;
        meet<128>(SCORING);
        if (item.queries != done.queries) {
            load_queries(item, block.q16, block.queries, warp, 4);
            load_nodes(block.step, item, nodes);
        }
    }
    leave(tile);
}

// Sums of the weighted values of every tile of every item; fetches everything.
__device__ __forceinline__ void sum(const Block& block, FetchKeys keys, FetchValues values, const Marks& marks) {
    const int lane = threadIdx.x % 32, warp = warp_index() - 4, g = lane / 4, t = lane % 4;
    int buffer = 0;
    u32 slot = block.value_ring;
    Item item = item_of(block.step, block.first);
#pragma unroll 1
    for (int next = block.first;;) {
        float sums[2][4 * NT];
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) sums[0][i] = sums[1][i] = 0.0f;
        // The scores of a tile begin before the values of the one before are asked for.
        cp_async_wait<0>();
        tell<384>(KEYS + buffer);
        if (item.begin + TILE < item.end) tell<384>(KEYS + (buffer ^ 1));
#pragma unroll 1
        for (int key = item.begin; key < item.end; key += TILE) {
            cp_async_wait<0>();
            meet<384>(FULL + buffer);
            if (key + 2 * TILE < item.end) tell<384>(KEYS + buffer);
            fetch_tile(keys, item, block.keys, block.pages, block.key_ring);
            fetch_tile(values, item, block.values, block.pages, block.value_ring);
            cp_async_commit();
            if (marks.moved[buffer]) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float2 by = *(const float2*)(marks.shrink[buffer] + 8 * n + 2 * t);
#pragma unroll
                    for (int m = 0; m < 2; m++) shrink(sums[m], n, by);
                }
            }
#pragma unroll
            for (int step = 0; step < TILE / 16; step++) {
                u32 v[4][2];
                value_fragments<V_FORMAT, V_STRIDE>(slot, step, warp, v);
                const u64 p = wgmma_desc(block.weights + buffer * PANEL_BYTES) + step * 2;
#pragma unroll
                for (int m = 0; m < 2; m++) add_product(sums[m], v[2 * m], v[2 * m + 1], p);
            }
            wgmma_wait<0>();
            tell<384>(EMPTY + buffer);
            slot = FetchValues::after(slot, block.value_ring);
            buffer ^= 1;
        }
        const Item done = item;
        if (++next < block.last) {
            item = item_of(block.step, next);
            fetch_first(block, item, keys, values);
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int m = done.m_first + 8 * n + 2 * t + e, node = m / GROUP_SIZE;
                if (node >= done.tree.nodes) continue;
                const int head = done.kv_head * GROUP_SIZE + m % GROUP_SIZE;
                const size_t index = ((size_t)(done.tree.first + node) * HEADS + head) * SPLITS + done.split;
                const float four[4] = {sums[0][4 * n + e], sums[0][4 * n + 2 + e], sums[1][4 * n + e], sums[1][4 * n + 2 + e]};
                store_four<V_FORMAT>(block.partial + index * DIM + warp * 32, g, four);
            }
        if (next == block.last) break;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) attn_tree(
    const Step* step, const u16* q16, Plane keys, Plane values, Pages pages, float scale_log2, float* partial, int rows) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_launch();
    const u32 queries = shared_address(shared), key_ring = queries + 6 * PANEL_BYTES;
    Marks& marks = *(Marks*)(shared + 6 * PANEL_BYTES + K_RING * FetchKeys::BYTES + V_RING * FetchValues::BYTES);
    Nodes& nodes = *(Nodes*)(&marks + 1);
    const int total = items_of(step);
    const Block block = {step, q16, keys, values, pages, partial, rows, (int)((i64)blockIdx.x * total / gridDim.x),
                         (int)((i64)(blockIdx.x + 1) * total / gridDim.x), queries, queries + 4 * PANEL_BYTES, key_ring,
                         key_ring + K_RING * FetchKeys::BYTES, scale_log2};
    if (block.first == block.last) {
        pdl_wait();
        return;
    }
    const Item item = item_of(step, block.first);
    const int warp = warp_index();
    const bool scores = warp < 4;
    FetchKeys fetch_keys;
    FetchValues fetch_values;
    fetch_keys.to = block.key_ring, fetch_values.to = block.value_ring;
    // Nothing in a step writes the header or committed keys and values: only queries and the rows of the nodes must be
    // waited for.
    const bool early = min(item.end, item.begin + K_RING * TILE) <= item.tree.committed;
    if (!early) pdl_wait();
    if (!scores) fetch_first(block, item, fetch_keys, fetch_values);
    if (early) pdl_wait();
    load_queries(item, q16, queries, warp, 12);
    load_nodes(step, item, nodes);
    __syncthreads();
    if (scores) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " SCORE_REGISTERS ";");
        score(block, item, marks, nodes);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 " SUM_REGISTERS ";");
        sum(block, fetch_keys, fetch_values, marks);
    }
}
