// Attention of the rows of 1 to 4 trees over paged, quantised keys and values, on Hopper, in an order that follows from
// each row's position alone (attn/spans.cuh): one warpgroup scores and weighs, two sum values (attn/trio_sm90.cuh).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of slot s;  c = scale log2 e
//
// in   as tree.cu
// out  partial [rows][HEADS][SPLITS][DIM] f32, behind it [rows][HEADS][SPLITS][2] f32 (m, l): the slots that slots_of has
// grid a block for each multiprocessor x 384: each takes a share of the items (attn/work.cuh)
// smem see attn/trio_sm90.cuh, then Nodes
// arch sm_90a     reference cpu::reference::attention::attend     test attention::a_node_has_the_bits_of_its_token_alone
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/trio_sm90.cuh"
#include "attn/work.cuh"

// One more barrier of the block (attn/trio_sm90.cuh): of the warpgroups that sum.
#define SUMMING 8
// Tiles whose copies may still be under way when one is begun: keys two tiles ahead and its own values are there.
#define PENDING (K_RING - 3)
// Items known at once: those under way, the one behind them that scores may stand in, and what was there before.
#define KNOWN 8
// Where items are found ahead of the one whose values are summed: as far as keys are fetched.
#define AHEAD K_RING

#define NO_NODE 64
// As with scores (attn/across_sm90.cuh).
#define SUM_UNROLL (ROLLED ? 1 : TILE / 16)
// Few columns leave registers to the kernel behind, which may then begin.
#define FEW (NT <= 2)

// What is known of trees and of the items under way.
struct Nodes {
    Plot plots[STEP_TREES];
    Share share;
    Item items[KNOWN];
    u32 row[4][TILE];        // of items of nodes' own: where its keys are in the cache, NOWHERE for none
    u8 node[KNOWN][NODES];   // of items: their nodes, NO_NODE behind the last
    u8 depth[KNOWN][NODES];  // and how far from the root these are
    int at[NODES];           // positions of an item's nodes
    int scored[NODES];       // where bases and sums of weights of its nodes belong
    int summed[2][NODES];    // where sums of an item's nodes belong, of items in turn
};

static_assert(sizeof(Item) <= 80 && sizeof(Plot) <= 128, "launch::attention counts the bytes of shared memory");
static_assert(K_RING == V_RING || K_RING == V_RING + 1, "values follow keys by one spot or two");
static_assert(KNOWN >= AHEAD + 4, "an item is written where nobody reads any more");

// Whether a node at position `at` sees the key at `key`: windows hide committed keys.
__device__ __forceinline__ bool sees(const Item& item, int at, int key) {
    if (!WINDOW) return key <= at;
    return key <= at && (at - key < item.window || key >= item.committed || (WINDOW < 0 && key < item.sinks));
}

// Finds item `next` of a block; a warp.
__device__ __forceinline__ void find_item(const Step* step, const Pages& pages, Nodes& nodes, int next) {
    const int lane = threadIdx.x % 32;
    Item item = item_of(step, nodes.plots, nodes.share, next);
    item.row = first_row(item, pages);
    if (lane == 0) nodes.items[next % KNOWN] = item;
    if (lane >= NODES) return;
    const int node = lane < item.nodes ? node_of(item, lane) : NO_NODE;
    nodes.node[next % KNOWN][lane] = node;
    if (lane < item.nodes) nodes.depth[next % KNOWN][lane] = step->position[item.first + node] - item.committed;
}
// Where what is found of an item's node `i` belongs, as (row, head 0, slot); -1 for nowhere.
__device__ __forceinline__ int place_of(const Nodes& nodes, int which, int i) {
    const Item& item = nodes.items[which % KNOWN];
    const int node = nodes.node[which % KNOWN][i];
    if (node == NO_NODE) return -1;
    const int slot = nodes.plots[item.tree].crossed >> node & 1 ? item.beyond_to : item.near_to;
    return slot < 0 ? -1 : (item.first + node) * HEADS * SPLITS + slot;
}

// Finds the rows of an item of nodes' own; the threads that sum.
__device__ __forceinline__ void find_rows(const Item& item, const Pages& pages, u32* rows) {
    const int thread = anew(threadIdx.x) - 128;
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

// Queries of item `which` to where products read them, by `WARPS` warps of which this is number `warp`; with ALL columns without
// a node become zeros, else they stay: nobody reads what becomes of them.
template <int WARPS, int AT_ONCE, bool ALL>
__device__ __forceinline__ void load_queries(const Nodes& nodes, int which, const u16* q16, u32 queries, int warp) {
    const Item& item = nodes.items[which % KNOWN];
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, columns = item.nodes * GROUP_SIZE;
#pragma unroll 1
    for (int begin = warp; begin < (ALL ? COLUMNS : columns); begin += WARPS * AT_ONCE) {
        uint4 words[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int column = begin + i * WARPS;
            words[i] = make_uint4(0, 0, 0, 0);
            if (column < columns) {
                const int node = item.first + nodes.node[which % KNOWN][column / GROUP_SIZE];
                const int head = item.kv_head * GROUP_SIZE + column % GROUP_SIZE;
                words[i] = query_words<K_FORMAT>(q16 + ((size_t)node * HEADS + head) * DIM, g, t);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (begin + i * WARPS < COLUMNS) store_query(queries, begin + i * WARPS, g, t, words[i]);
    }
    publish();
}
// What those that score want to know of an item's nodes.
__device__ __forceinline__ void load_nodes(Nodes& nodes, int which) {
    if (threadIdx.x < NODES) {
        nodes.scored[threadIdx.x] = place_of(nodes, which, threadIdx.x);
        nodes.at[threadIdx.x] = nodes.items[which % KNOWN].committed + nodes.depth[which % KNOWN][threadIdx.x];
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
    Nodes& nodes;
    u32 queries, weights, key_ring, value_ring;
    float scale_log2;
};

// Where a tile is in the cache: at a row, in the rows of an item of nodes' own, or behind the last.
struct Spot {
    u32 row;
    int low;  // rows before this are older than the window and may never have been written
};
#define NO_SPOT NOWHERE
#define OWN_SPOT 0xfffffff0u

// The tiles of a block's items, one behind the other, as the warpgroups that sum fetch them.
struct Stream {
    int next;  // item of the next tile
    int key;   // where the next tile begins; -1 for where its item does
    u32 row;   // where that is: looked up early, since the lookup takes a while
};
__device__ __forceinline__ Spot next_spot(const Block& block, Stream& stream) {
    Spot spot = {NO_SPOT, 0};
    if (stream.next >= block.nodes.share.items) return spot;
    const Item& item = block.nodes.items[stream.next % KNOWN];
    if (item.own) {
        spot.row = OWN_SPOT + stream.next % 4;
        find_rows(item, block.pages, block.nodes.row[stream.next % 4]);
        stream.next++;
        return spot;
    }
    if (stream.key < 0) stream.key = item.begin, stream.row = item.row;
    spot.row = stream.row;
    if (WINDOW > 0) spot.low = item.committed - WINDOW + 1 - stream.key;
    stream.key += TILE;
    if (stream.key >= item.end)
        stream.next++, stream.key = -1;
    else if (stream.key % PAGE == 0)
        stream.row = row_at(item, stream.key, block.pages);
    else
        stream.row += TILE;
    return spot;
}
template <int FORMAT, int STRIDE>
__device__ __forceinline__ void fetch(const Nodes& nodes, const Spot& spot, const Plane& plane, u32 to) {
    if (spot.row == NO_SPOT) return;
    const int thread = anew(threadIdx.x) - 128;
    if (spot.row >= OWN_SPOT)
        tile_gather<FORMAT, STRIDE>(to, plane, nodes.row[spot.row % 4], thread);
    else
        tile_load<FORMAT, STRIDE, 256>(to, plane, spot.row, spot.low, TILE, thread);
}
__device__ __forceinline__ void fetch_keys(const Block& block, const Spot& spot, int slot) {
    fetch<K_FORMAT, K_STRIDE>(block.nodes, spot, block.keys, block.key_ring + slot * FetchKeys::BYTES);
}
__device__ __forceinline__ void fetch_values(const Block& block, const Spot& spot, int slot) {
    fetch<V_FORMAT, V_STRIDE>(block.nodes, spot, block.values, block.value_ring + slot * FetchValues::BYTES);
}

// Spots of the last tiles whose keys were fetched, the last first: their values follow.
struct Spots {
    Spot last, before;
    int ahead;  // tiles whose keys were fetched, from that on whose values are summed
};

// The first tiles, one slot of values less than there are; what nodes left must not be fetched before pdl_wait.
__device__ __forceinline__ Spots fetch_first(const Block& block, Stream& stream) {
    Spots spots = {{NO_SPOT, 0}, {NO_SPOT, 0}, 0};
#pragma unroll 1
    for (int i = 0; i < K_RING; i++) {
        spots.before = spots.last, spots.last = next_spot(block, stream);
        if (spots.last.row >= OWN_SPOT) pdl_wait();
        fetch_keys(block, spots.last, i);
        if (i < V_RING - 1) fetch_values(block, spots.last, i);
        spots.ahead += spots.last.row != NO_SPOT;
        cp_async_commit();
    }
    return spots;
}

// The warpgroup that scores: weights of every tile of every item, then the items' bases and sums of weights.
__device__ __forceinline__ void score(const Block& block, Marks& marks) {
    Nodes& nodes = block.nodes;
    const int lane = threadIdx.x % 32, warp = warp_index(), t = lane % 4;
    int tile = 0;
    u32 slot = block.key_ring;
    float sums[OWN_SUMS], scores[4 * NT];
#pragma unroll 1
    for (int next = 0;;) {
        const Item& item = nodes.items[next % KNOWN];
        for (int column = threadIdx.x; column < COLUMNS; column += 128) marks.base[column] = 0.0f, marks.running[column] = -INF;
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
        if (++next == nodes.share.items) break;
        const Item& follows = nodes.items[next % KNOWN];
        meet<128>(SCORING);
        load_nodes(nodes, next);
        if (follows.queries != item.queries) load_queries<4, COLUMNS < 96 ? 2 : 4, false>(nodes, next, block.q16, block.queries, warp);
    }
    leave(tile);
}

// Sums of the weighted values of every tile of every item; fetches everything.
__device__ __forceinline__ void sum(const Block& block, Stream stream, Spots spots, const Marks& marks) {
    Nodes& nodes = block.nodes;
    const int lane = threadIdx.x % 32, warp = warp_index() - 4, g = lane / 4, t = lane % 4;
    int buffer = 0, key_slot = 0, slot = 0;
    float sums[2][4 * NT];
    cp_async_wait<K_RING - 2>();
    tell<384>(KEYS);
    if (spots.ahead > 1) tell<384>(KEYS + 1);
#pragma unroll 1
    for (int next = 0; next < nodes.share.items; next++) {
        // What follows is found while there are no sums yet; all pass a barrier before it is read.
        if (warp == 0 && next > 0 && next + AHEAD < nodes.share.items) find_item(block.step, block.pages, nodes, next + AHEAD);
        const Item& item = nodes.items[next % KNOWN];
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) sums[0][i] = sums[1][i] = 0.0f;
        // The same is true of these, and they pass another before these are written again.
        const int own = threadIdx.x - 128;
        if (own < NODES) nodes.summed[next & 1][own] = place_of(nodes, next, own);
#pragma unroll 1
        for (int left = item.end - item.begin; left > 0; left -= TILE) {
            cp_async_wait<PENDING>();
            meet<384>(FULL + buffer);
            if (spots.ahead > 2) tell<384>(KEYS + buffer);
            const Spot spot = next_spot(block, stream);
            fetch_keys(block, spot, key_slot);
            fetch_values(block, K_RING == V_RING ? spots.last : spots.before, slot == 0 ? V_RING - 1 : slot - 1);
            cp_async_commit();
            spots.before = spots.last, spots.last = spot;
            spots.ahead -= spot.row == NO_SPOT;
            if (marks.moved[buffer]) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float2 by = *(const float2*)(marks.shrink[buffer] + 8 * n + 2 * t);
#pragma unroll
                    for (int m = 0; m < 2; m++) shrink(sums[m], n, by);
                }
            }
            const u32 values = block.value_ring + slot * FetchValues::BYTES;
#pragma unroll SUM_UNROLL
            for (int step = 0; step < TILE / 16; step++) {
                u32 v[4][2];
                value_fragments<V_FORMAT, V_STRIDE>(values, step, warp, v);
                const u64 p = wgmma_desc(block.weights + buffer * PANEL_BYTES) + step * 2;
#pragma unroll
                for (int m = 0; m < 2; m++) add_product(sums[m], v[2 * m], v[2 * m + 1], p);
            }
            wgmma_wait<0>();
            tell<384>(EMPTY + buffer);
            key_slot = key_slot == K_RING - 1 ? 0 : key_slot + 1;
            slot = slot == V_RING - 1 ? 0 : slot + 1;
            buffer ^= 1;
        }
        const int t = anew(threadIdx.x) % 4, kv_head = item.kv_head;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = 8 * n + 2 * t + e, i = column / GROUP_SIZE;
                const int place = i < NODES ? nodes.summed[next & 1][i] : -1;
                if (place < 0) continue;
                const size_t index = place + (kv_head * GROUP_SIZE + column % GROUP_SIZE) * SPLITS;
                const float four[4] = {sums[0][4 * n + e], sums[0][4 * n + 2 + e], sums[1][4 * n + e], sums[1][4 * n + 2 + e]};
                store_four<V_FORMAT>(block.partial + index * DIM + warp * 32, g, four);
            }
    }
}

extern "C" __global__ void __launch_bounds__(384, FEW ? 2 : 1) attn_tree(
    const Step* step, const u16* q16, Plane keys, Plane values, Pages pages, float scale_log2, float* partial, int rows) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_launch();
    const u32 queries = shared_address(shared), key_ring = queries + 6 * PANEL_BYTES;
    Marks& marks = *(Marks*)(shared + 6 * PANEL_BYTES + K_RING * FetchKeys::BYTES + V_RING * FetchValues::BYTES);
    Nodes& nodes = *(Nodes*)(&marks + 1);
    const int warp = warp_index();
    if (warp == 0) {
        survey(step, nodes.plots);
        const Share share = share_of_block(nodes.plots, step->trees);
        if (threadIdx.x == 0) nodes.share = share;
    }
    __syncthreads();
    const int items = nodes.share.items;
    if (items == 0) {
        pdl_wait();
        return;
    }
    if (warp >= 4 && warp <= 4 + AHEAD && warp - 4 < items) find_item(step, pages, nodes, warp - 4);
    __syncthreads();
    const Block block = {step, q16, keys, values, pages, partial, rows, nodes, queries, queries + 4 * PANEL_BYTES,
                         key_ring, key_ring + K_RING * FetchKeys::BYTES, scale_log2};
    const bool scores = warp < 4;
    // Nothing in a step writes the header or committed keys and values: only queries and the rows of the nodes must be
    // waited for.
    Stream stream = {0, -1, 0};
    Spots spots;
    if (!scores) spots = fetch_first(block, stream);
    pdl_wait();
    load_queries<12, (COLUMNS < 72 ? COLUMNS + 11 : 72) / 12, true>(nodes, 0, q16, queries, warp);
    load_nodes(nodes, 0);
    __syncthreads();
    if (scores) {
#if !FEW
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " SCORE_REGISTERS ";");
#endif
        score(block, marks);
    } else {
#if !FEW
        asm volatile("setmaxnreg.inc.sync.aligned.u32 " SUM_REGISTERS ";");
#endif
        sum(block, stream, spots, marks);
    }
}
