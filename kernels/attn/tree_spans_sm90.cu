// Attention of the rows of 1 to 4 trees over paged, quantised keys and values, on Hopper, in an order that follows from
// each row's position alone (attn/spans.cuh): one warpgroup scores and weighs, two sum values (attn/trio_sm90.cuh).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of slot s;  c = scale log2 e
//
// in   as tree.cu
// out  partial [rows][HEADS][SPLITS][DIM] f32, behind it [rows][HEADS][SPLITS][2] f32 (m, l): the slots that slots_of has
// grid RESIDENT blocks for each multiprocessor x 384: each takes a run of items (attn/work.cuh)
// smem see attn/trio_sm90.cuh, then Nodes
// arch sm_90a     reference cpu::reference::attention::attend     test attention::a_node_has_the_bits_of_its_token_alone
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/trio_sm90.cuh"
#include "attn/work.cuh"

// One more barrier of the block (attn/trio_sm90.cuh): of the warpgroups that sum.
#define SUMMING 8

// What is known of trees and of the items under way.
struct Nodes {
    Plot plots[STEP_TREES];
    Item items[12];          // of each warp: in registers they would push out sums
    Item nexts[8];           // what follows, of each warp that sums
    u32 row[TILE];           // of an item of nodes' own: where its keys are in the cache, NOWHERE for none
    int at[NODES];           // positions of an item's nodes
    int scored[NODES];       // where bases and sums of weights of its nodes belong
    int summed[2][NODES];    // where sums of an item's nodes belong, of items in turn
};

static_assert(sizeof(Item) <= 88 && sizeof(Plot) <= 80, "launch::attention counts the bytes of shared memory");

// Whether a node at position `at` sees the key at `key`: windows hide committed keys.
__device__ __forceinline__ bool sees(const Item& item, int at, int key) {
    if (!WINDOW) return key <= at;
    return key <= at && (at - key < item.window || key >= item.committed || (WINDOW < 0 && key < item.sinks));
}

template <int FORMAT, int STRIDE, int SLOTS>
__device__ __forceinline__ void begin(Fetch<FORMAT, STRIDE, SLOTS>& fetch, const Item& item) {
    fetch.key = item.begin, fetch.row = item.row;
}
// The next tile, if the item has one more; `rows` are those of an item of nodes' own.
template <int FORMAT, int STRIDE, int SLOTS>
__device__ __forceinline__ void fetch_tile(Fetch<FORMAT, STRIDE, SLOTS>& fetch, const Item& item, const Plane& plane,
                                           const Pages& pages, u32 ring, const u32* rows) {
    if (fetch.key < item.end) {
        const int thread = anew(threadIdx.x) - 128;
        if (item.own) {
            tile_gather<FORMAT, STRIDE>(fetch.to, plane, rows, thread);
            fetch.key += TILE;
        } else {
            // Nobody sees what is older than the window; it may never have been written.
            const int low = WINDOW > 0 ? item.committed - WINDOW + 1 - fetch.key : 0;
            tile_load<FORMAT, STRIDE, 256>(fetch.to, plane, fetch.row, low, TILE, thread);
            fetch.key += TILE;
            if (fetch.key % PAGE == 0)
                fetch.row = row_at(item, fetch.key, pages);
            else
                fetch.row += TILE;
        }
        fetch.to = fetch.after(fetch.to, ring);
    }
}

// Finds the rows of an item of nodes' own; the threads that sum.
__device__ __forceinline__ void find_rows(const Item& item, const Pages& pages, u32* rows) {
    const int thread = threadIdx.x - 128;
    if (thread < TILE) {
        const int position = item.begin + thread;
        const bool seen = position < item.committed && (WINDOW <= 0 || position > item.committed - WINDOW);
        if (seen || position < item.committed || position >= item.committed + __popcll(item.path))
            rows[thread] = seen ? (u32)kv_row(pages, item.slot, position, KV_HEADS, item.kv_head) : NOWHERE;
    } else if (thread < 2 * TILE) {
        const int node = thread - TILE;
        const int at = item.committed + __popcll(item.path & ((1ull << node) - 1)) - item.begin;
        if (item.path >> node & 1 && at >= 0 && at < TILE)
            rows[at] = (u32)kv_row(pages, item.slot, item.committed + node, KV_HEADS, item.kv_head);
    }
    meet<256>(SUMMING);
}

// Queries of an item to where products read them, by `warps` warps of which this is number `warp`.
__device__ __forceinline__ void load_queries(const Item& item, const u16* q16, u32 queries, int warp, int warps) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 2
    for (int column = warp; column < COLUMNS; column += warps) {
        const int i = column / GROUP_SIZE;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (i < item.nodes) {
            const int head = item.kv_head * GROUP_SIZE + column % GROUP_SIZE;
            words = query_words<K_FORMAT>(q16 + ((size_t)(item.first + node_of(item, i)) * HEADS + head) * DIM, g, t);
        }
        store_query(queries, column, g, t, words);
    }
    publish();
}
// What those that score want to know of an item's nodes.
__device__ __forceinline__ void load_nodes(const Step* step, const Item& item, Nodes& nodes) {
    if (threadIdx.x < NODES) {
        const int node = node_of(item, threadIdx.x);
        nodes.scored[threadIdx.x] = place_of(item, nodes.plots, threadIdx.x, node);
        if (threadIdx.x < item.nodes) nodes.at[threadIdx.x] = step->position[item.first + node];
    }
}

// Everything there is to do for a block; planes and pages as the kernel has them.
struct Block {
    const Step* step;
    const u16* q16;
    Plane keys, values;
    Pages pages;
    float* partial;
    int rows;
    Share share;
    Nodes& nodes;
    u32 queries, weights, key_ring, value_ring;
    float scale_log2;
};

// The first tiles of an item, one slot of values less than there are.
__device__ __forceinline__ void fetch_first(const Block& block, const Item& item, FetchKeys& keys, FetchValues& values) {
    if (item.own) find_rows(item, block.pages, block.nodes.row);
    begin(keys, item);
    begin(values, item);
#pragma unroll 1
    for (int i = 0; i < K_RING; i++) fetch_tile(keys, item, block.keys, block.pages, block.key_ring, block.nodes.row);
#pragma unroll 1
    for (int i = 0; i < V_RING - 1; i++) fetch_tile(values, item, block.values, block.pages, block.value_ring, block.nodes.row);
    cp_async_commit();
}

// The warpgroup that scores: weights of every tile of every item, then the items' bases and sums of weights.
__device__ __forceinline__ void score(const Block& block, Item& item, Marks& marks) {
    Nodes& nodes = block.nodes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    int tile = 0;
    u32 slot = block.key_ring;
    float sums[OWN_SUMS], scores[4 * NT];
    bool unseen = true;
#pragma unroll 1
    for (int next = 0;;) {
        if (!item.goes_on) {
            for (int column = threadIdx.x; column < COLUMNS; column += 128) marks.base[column] = 0.0f, marks.running[column] = -INF;
#pragma unroll
            for (int i = 0; i < OWN_SUMS; i++) sums[i] = 0.0f;
            unseen = true;
        }
#pragma unroll 1
        for (int key = item.begin; key < item.end; key += TILE, tile++) {
            meet<384>(KEYS + (tile & 1));
            score_keys<RELEASE>(scores, slot, threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, block.queries, [&] {
                if (key > item.begin) tell<384>(FULL + (~tile & 1));
            });
            slot = FetchKeys::after(slot, block.key_ring);
            if (item.own || (WINDOW && key < item.committed + STEP_ROWS - item.window)) {
                const int lane = anew(threadIdx.x % 32), t = lane % 4, own_key = key + warp * 16 + lane / 4;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = (8 * n + 2 * t + e) / GROUP_SIZE, at = nodes.at[min(i, NODES - 1)];
                        if (!sees(item, at, own_key)) scores[4 * n + e] = -INF;
                        if (!sees(item, at, own_key + 8)) scores[4 * n + 2 + e] = -INF;
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
        join_sums(marks.parts[warp], sums);
        meet<128>(SCORING);
        float2* pairs = (float2*)(block.partial + (size_t)block.rows * HEADS * SPLITS * DIM);
        for (int column = threadIdx.x; column < item.nodes * GROUP_SIZE; column += 128) {
            const float sum = sum_of_parts(marks, column);
            const int place = nodes.scored[column / GROUP_SIZE], head = item.kv_head * GROUP_SIZE + column % GROUP_SIZE;
            if (place >= 0) pairs[place + head * SPLITS] = make_float2(marks.running[column], sum);
        }
        const int before = item.queries;
        if (item.again)
            go_on(item, block.pages);
        else if (++next < block.share.items)
            keep(item, item_of(block.step, nodes.plots, block.share, next));
        else
            break;
        meet<128>(SCORING);
        load_nodes(block.step, item, nodes);
        if (item.queries != before) load_queries(item, block.q16, block.queries, warp, 4);
    }
    leave(tile);
}

// Sums of the weighted values of every tile of every item; fetches everything.
__device__ __forceinline__ void sum(const Block& block, Item& item, FetchKeys keys, FetchValues values, const Marks& marks) {
    Nodes& nodes = block.nodes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, g = lane / 4, t = lane % 4;
    int buffer = 0;
    u32 slot = block.value_ring;
    float sums[2][4 * NT];
    int turn = 0;
#pragma unroll 1
    for (int next = 0;;) {
        if (!item.goes_on) {
            // What follows is found while there are no sums yet.
            if (++next < block.share.items) {
                Item follows = item_of(block.step, nodes.plots, block.share, next);
                follows.row = first_row(follows, block.pages);
                keep(nodes.nexts[warp], follows);
            }
#pragma unroll
            for (int i = 0; i < 4 * NT; i++) sums[0][i] = sums[1][i] = 0.0f;
        }
        // All pass a barrier before these are read, and another before they are written again.
        const int own = threadIdx.x - 128;
        if (own < NODES) nodes.summed[turn][own] = place_of(item, nodes.plots, own, node_of(item, own));
        // The scores of a tile begin before the values of the one before are asked for.
        cp_async_wait<0>();
        tell<384>(KEYS + buffer);
        if (item.begin + TILE < item.end) tell<384>(KEYS + (buffer ^ 1));
#pragma unroll 1
        for (int key = item.begin; key < item.end; key += TILE) {
            cp_async_wait<0>();
            meet<384>(FULL + buffer);
            if (key + 2 * TILE < item.end) tell<384>(KEYS + buffer);
            fetch_tile(keys, item, block.keys, block.pages, block.key_ring, nodes.row);
            fetch_tile(values, item, block.values, block.pages, block.value_ring, nodes.row);
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
                const u64 p = operand(block.weights + buffer * PANEL_BYTES) + step * 2;
#pragma unroll
                for (int m = 0; m < 2; m++) add_product(sums[m], v[2 * m], v[2 * m + 1], p);
            }
            wgmma_wait<0>();
            tell<384>(EMPTY + buffer);
            slot = FetchValues::after(slot, block.value_ring);
            buffer ^= 1;
        }
        const int kv_head = item.kv_head;
        const bool more = item.again || next < block.share.items;
        if (more) {
            if (item.again)
                go_on(item, block.pages);
            else
                keep(item, nodes.nexts[warp]);
            fetch_first(block, item, keys, values);
        }
        const int t = anew(threadIdx.x) % 4;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = 8 * n + 2 * t + e, i = column / GROUP_SIZE;
                const int place = i < NODES ? nodes.summed[turn][i] : -1;
                if (place < 0) continue;
                const size_t index = place + (kv_head * GROUP_SIZE + column % GROUP_SIZE) * SPLITS;
                const float four[4] = {sums[0][4 * n + e], sums[0][4 * n + 2 + e], sums[1][4 * n + e], sums[1][4 * n + 2 + e]};
                store_four<V_FORMAT>(block.partial + index * DIM + warp * 32, g, four);
            }
        if (!more) break;
        turn ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(384, RESIDENT) attn_tree(
    const Step* step, const u16* q16, Plane keys, Plane values, Pages pages, float scale_log2, float* partial, int rows) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_launch();
    const u32 queries = shared_address(shared), key_ring = queries + 6 * PANEL_BYTES;
    Marks& marks = *(Marks*)(shared + 6 * PANEL_BYTES + K_RING * FetchKeys::BYTES + V_RING * FetchValues::BYTES);
    Nodes& nodes = *(Nodes*)(&marks + 1);
    // Each warp writes the same.
    survey(step, nodes.plots);
    const Share share = share_of_block(nodes.plots, step->trees);
    const Block block = {step, q16, keys, values, pages, partial, rows, share, nodes, queries, queries + 4 * PANEL_BYTES,
                         key_ring, key_ring + K_RING * FetchKeys::BYTES, scale_log2};
    if (share.items == 0) {
        pdl_wait();
        return;
    }
    Item& item = nodes.items[threadIdx.x / 32];
    Item first = item_of(step, nodes.plots, share, 0);
    first.row = first_row(first, pages);
    keep(item, first);
    const bool scores = threadIdx.x < 128;
    FetchKeys fetch_keys;
    FetchValues fetch_values;
    fetch_keys.to = block.key_ring, fetch_values.to = block.value_ring;
    // Nothing in a step writes the header or committed keys and values: only queries and the rows of the nodes must be
    // waited for.
    if (item.own) pdl_wait();
    if (!scores) fetch_first(block, item, fetch_keys, fetch_values);
    if (!item.own) pdl_wait();
    load_queries(item, q16, queries, threadIdx.x / 32, 12);
    load_nodes(step, item, nodes);
    __syncthreads();
    if (scores) {
#if RESIDENT == 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " SCORE_REGISTERS ";");
#endif
        score(block, item, marks);
    } else {
#if RESIDENT == 1
        asm volatile("setmaxnreg.inc.sync.aligned.u32 " SUM_REGISTERS ";");
#endif
        sum(block, item, fetch_keys, fetch_values, marks);
    }
}
