// Attention of the rows of 1 to 4 trees over paged, quantised keys and values, on Hopper, in an order that follows from
// each row's position alone (attn/spans.cuh): one warpgroup scores and weighs, two sum values.
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of slot s;  c = scale log2 e
//
// A key is expanded once for all columns of a block, a value too. Weights go through two buffers in shared memory: those
// of tile j + 1 are made while values of tile j are summed, and nobody else waits for anybody.
//
// Scores are held against a base m_s that follows the greatest score only when that is SLACK above it: weights are at
// most 2^SLACK, and sums are seldom rescaled. A column's base, weights and sums depend on its own scores alone, and all
// sums are made in one order, so its bits do not depend on NT, on the rings or on who shares the block.
//
// in   as tree.cu
// out  partial [rows][HEADS][SPLITS][DIM] f32, behind it [rows][HEADS][SPLITS][2] f32 (m, l): the slots that slots_of has
// grid RESIDENT blocks for each multiprocessor x 384: each takes a run of items (attn/work.cuh)
// smem queries [4][COLUMNS][64] f16, weights [2][COLUMNS][64] f16 (128-byte swizzle), K_RING tiles of keys, V_RING of
//      values, Marks, Nodes
// arch sm_90a     reference cpu::reference::attention::attend     test attention::a_node_has_the_bits_of_its_token_alone
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/across_sm90.cuh"
#include "attn/work.cuh"

// Keys two tiles ahead are there before values of a tile are summed, and values of the tile before are still read then.
static_assert(K_RING >= 3 && V_RING >= 2, "rings are too short");
#define SLACK 8.0f
// Sums of weights of a thread: half of its columns, the lane 16 apart has the other half.
#define OWN_SUMS (4 * ((NT + 3) / 4))
// Registers of a thread that scores and of one that sums: what launch bounds give to all, shared out anew.
#define SCORE_REGISTERS "136"
#define SUM_REGISTERS "184"
// Barriers of the block: of the warpgroup that scores, and for tiles of either parity: keys are there, weights are there,
// weights are done with.
#define SCORING 1
#define KEYS 6
#define FULL 2
#define EMPTY 4
#define SUMMING 8
// Sums of a tile begin when so many eighths of the next tile's scores are on their way: at once the products of both
// would share the tensor cores, which then had nothing to do while weights are made.
#ifndef RELEASE
#define RELEASE 8
#endif

struct Marks {
    float base[COLUMNS];       // what scores are held against, in powers of two; 0 before any key was seen
    float running[COLUMNS];    // the same; -INF before any key was seen
    float shift[COLUMNS];      // how far the last move went
    float shrink[2][COLUMNS];  // what sums before a tile are multiplied with, if it moved any base
    float parts[4][COLUMNS];   // of each scoring warp: greatest scores, or sums of weights
    int moved[2];
};

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

template <int THREADS>
__device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void tell(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
// Whether any thread of the scoring warpgroup says so.
__device__ __forceinline__ bool any_scoring(bool mine) {
    u32 any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
        : "=r"(any)
        : "r"((u32)mine), "n"(SCORING)
        : "memory");
    return any != 0;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Whether a node at position `at` sees the key at `key`: windows hide committed keys.
__device__ __forceinline__ bool sees(const Item& item, int at, int key) {
    if (!WINDOW) return key <= at;
    return key <= at && (at - key < item.window || key >= item.committed || (WINDOW < 0 && key < item.sinks));
}

// The same, but what follows from it is computed where it stands: kept in registers from tile to tile it would push out
// sums, and local memory is far away beside so much shared memory.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What the warpgroups that sum fetch: tiles of keys or of values, into SLOTS slots one after the other.
template <int FORMAT, int STRIDE, int SLOTS>
struct Fetch {
    static constexpr int BYTES = tile_bytes(FORMAT, STRIDE);
    int key;  // next to be fetched
    u32 to;   // and its slot
    u32 row;  // where it is: looked up early, since the lookup takes a while

    __device__ __forceinline__ void start(const Item& item) { key = item.begin, row = item.row; }
    __device__ __forceinline__ void next(const Item& item, const Plane& plane, const Pages& pages, u32 ring, const u32* rows) {
        if (key < item.end) {
            const int thread = anew(threadIdx.x) - 128;
            if (item.own) {
                tile_gather<FORMAT, STRIDE>(to, plane, rows, thread);
                key += TILE;
            } else {
                // Nobody sees what is older than the window; it may never have been written.
                const int low = WINDOW > 0 ? item.committed - WINDOW + 1 - key : 0;
                tile_load<FORMAT, STRIDE, 256>(to, plane, row, low, TILE, thread);
                key += TILE;
                if (key % PAGE == 0)
                    row = row_at(item, key, pages);
                else
                    row += TILE;
            }
            to = after(to, ring);
        }
    }
    // The slot behind `slot`.
    static __device__ __forceinline__ u32 after(u32 slot, u32 ring) {
        return slot + BYTES == ring + SLOTS * BYTES ? ring : slot + BYTES;
    }
};
typedef Fetch<K_FORMAT, K_STRIDE, K_RING> FetchKeys;
typedef Fetch<V_FORMAT, V_STRIDE, V_RING> FetchValues;

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

// The column of a thread's sum `i`.
__device__ __forceinline__ int own_column(int i) {
    const int lane = threadIdx.x % 32;
    return 8 * (i / 4 * 4 + i % 4 / 2 + lane / 16 * 2) + 2 * (lane % 4) + i % 2;
}

// Scores against their bases become scores against moved bases where a column's greatest is SLACK above its own, or its
// first; sums of weights follow. True while a column has seen no key. 128 threads.
__device__ __forceinline__ bool move_bases(float (&scores)[4 * NT], float (&sums)[OWN_SUMS], Marks& marks, float* shrink) {
    const int lane = anew(threadIdx.x % 32), warp = threadIdx.x / 32, t = lane % 4;
    // A score that is NaN has no weight.
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) scores[i] = fmaxf(scores[i], -INF);
    join_columns(
        marks.parts[warp], [&](int n, int e) { return fmaxf(scores[4 * n + e], scores[4 * n + 2 + e]); },
        [](float a, float b) { return fmaxf(a, b); });
    meet<128>(SCORING);
    bool unseen = false;
#pragma unroll 1
    for (int column = threadIdx.x; column < COLUMNS; column += 128) {
        float most = marks.parts[0][column];
#pragma unroll
        for (int w = 1; w < 4; w++) most = fmaxf(most, marks.parts[w][column]);
        const bool first = marks.running[column] == -INF;
        const float by = first ? (most == -INF ? 0.0f : most) : most > SLACK ? most : 0.0f;
        marks.shift[column] = by;
        shrink[column] = first ? 1.0f : exp2_approx(-by);
        marks.base[column] += by;
        if (!first || most > -INF) marks.running[column] = marks.base[column];
        unseen |= first && most == -INF;
    }
    unseen = any_scoring(unseen);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 by = *(const float2*)(marks.shift + 8 * n + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // Infinite scores over an infinite base have no weight.
            scores[4 * n + 2 * r] = fmaxf(scores[4 * n + 2 * r] - by.x, -INF);
            scores[4 * n + 2 * r + 1] = fmaxf(scores[4 * n + 2 * r + 1] - by.y, -INF);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_SUMS; i++)
        if (own_column(i) < COLUMNS) sums[i] *= shrink[own_column(i)];
    meet<128>(SCORING);
    return unseen;
}

// Weights of a warp's 16 keys, keys along the rows of the panel at `weights`; adds them to `sums`.
__device__ __forceinline__ void store_weights(const float (&scores)[4 * NT], float (&sums)[OWN_SUMS], u32 weights) {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 * 2 + lane / 8 % 2;
    const bool upper = lane / 16;
    float added[8];
    u32 halves[4];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = exp2_approx(scores[4 * n + i]);
        halves[n % 2 * 2] = f32x2_to_f16x2(w[0], w[1]);
        halves[n % 2 * 2 + 1] = f32x2_to_f16x2(w[2], w[3]);
        added[n % 4 * 2] = w[0] + w[2], added[n % 4 * 2 + 1] = w[1] + w[3];
        if (n % 2) {
            const u32 at = weights + panel_at(8 * (n - 1 + lane / 16) + lane % 8, chunk);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(halves[0]),
                         "r"(halves[1]), "r"(halves[2]), "r"(halves[3])
                         : "memory");
        } else if (n == NT - 1) {
            const u32 at = weights + panel_at(8 * n + lane % 8, chunk);
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(halves[0]), "r"(halves[1])
                         : "memory");
        }
        if (n % 4 == 3 || n == NT - 1) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float low = j / 2 <= n % 4 ? added[j] : 0.0f, high = j / 2 + 2 <= n % 4 ? added[4 + j] : 0.0f;
                sums[n / 4 * 4 + j] += (upper ? high : low) + __shfl_xor_sync(WARP_ALL, upper ? low : high, 16);
            }
        }
    }
}

// A warp's sums of each column, to to[column].
__device__ __forceinline__ void join_sums(float* to, const float (&sums)[OWN_SUMS]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < OWN_SUMS / 4; k++) {
        const float* v = sums + 4 * k;
        float w[2];
#pragma unroll
        for (int j = 0; j < 2; j++) w[j] = (g & 2 ? v[j + 2] : v[j]) + __shfl_xor_sync(WARP_ALL, g & 2 ? v[j] : v[j + 2], 8);
        const float x = (g & 1 ? w[1] : w[0]) + __shfl_xor_sync(WARP_ALL, g & 1 ? w[0] : w[1], 4);
        const int n = 4 * k + g / 4 * 2 + g / 2 % 2;
        if (n < NT) to[8 * n + 2 * t + g % 2] = x;
    }
}

// scores[64 keys][COLUMNS] of the tile at `tile`; calls `between` when RELEASE of the products' 8 parts are on their way.
template <class Between>
__device__ __forceinline__ void score_keys(float (&scores)[4 * NT], u32 tile, u32 queries, const Between& between) {
    const int key = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (b == RELEASE) between();
        u32 low[4], high[4];
        key_fragment<K_FORMAT, K_STRIDE>(tile, key, b, low);
        key_fragment<K_FORMAT, K_STRIDE>(tile, key + 8, b, high);
        const u64 q = operand(queries + b / 2 * PANEL_BYTES) + b % 2 * 4;
        wgmma_fence();
        product(scores, low[0], high[0], low[1], high[1], q, b > 0);
        product(scores, low[2], high[2], low[3], high[3], q + 2, 1);
        wgmma_commit();
        wgmma_wait<IN_FLIGHT>();
    }
    if (RELEASE == BLOCKS) between();
    wgmma_wait<0>();
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
    keys.start(item);
    values.start(item);
#pragma unroll 1
    for (int i = 0; i < K_RING; i++) keys.next(item, block.keys, block.pages, block.key_ring, block.nodes.row);
#pragma unroll 1
    for (int i = 0; i < V_RING - 1; i++) values.next(item, block.values, block.pages, block.value_ring, block.nodes.row);
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
            score_keys(scores, slot, block.queries, [&] {
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
            // Six bases on their way at once, and a greatest score for each place in a fragment.
            float most[4] = {-INF, -INF, -INF, -INF};
#pragma unroll
            for (int first = 0; first < NT; first += 6) {
                uint2 base[6];
#pragma unroll
                for (int n = first; n < min(first + 6, NT); n++)
                    base[n - first] = lds64(shared_address(marks.base) + 32 * n + 8 * t);
#pragma unroll
                for (int n = first; n < min(first + 6, NT); n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float own = __uint_as_float(i % 2 ? base[n - first].y : base[n - first].x);
                        scores[4 * n + i] = fmaf(scores[4 * n + i], block.scale_log2, -own);
                        most[i] = max_or_nan(most[i], scores[4 * n + i]);
                    }
                }
            }
            const int buffer = tile & 1;
            // Values of the tile before the last are done with, and so are their weights.
            if (tile >= 2) meet<384>(EMPTY + buffer);
            const bool moves = any_scoring(!(max_or_nan(max_or_nan(most[0], most[1]), max_or_nan(most[2], most[3])) <= SLACK)) || unseen;
            if (moves) unseen = move_bases(scores, sums, marks, marks.shrink[buffer]);
            if (threadIdx.x == 0) marks.moved[buffer] = moves;
            store_weights(scores, sums, block.weights + buffer * PANEL_BYTES);
            // This waits for all that the thread has on its way: others do the copying.
            publish();
        }
        tell<384>(FULL + (~tile & 1));
        meet<128>(SCORING);
        join_sums(marks.parts[warp], sums);
        meet<128>(SCORING);
        float2* pairs = (float2*)(block.partial + (size_t)block.rows * HEADS * SPLITS * DIM);
        for (int column = threadIdx.x; column < item.nodes * GROUP_SIZE; column += 128) {
            float sum = marks.parts[0][column];
#pragma unroll
            for (int w = 1; w < 4; w++) sum += marks.parts[w][column];
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
    // Nobody leaves a barrier half full.
    if (tile >= 2) meet<384>(EMPTY + (tile & 1));
    meet<384>(EMPTY + (~tile & 1));
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
            keys.next(item, block.keys, block.pages, block.key_ring, nodes.row);
            values.next(item, block.values, block.pages, block.value_ring, nodes.row);
            cp_async_commit();
            if (marks.moved[buffer]) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float2 by = *(const float2*)(marks.shrink[buffer] + 8 * n + 2 * t);
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        sums[m][4 * n] *= by.x, sums[m][4 * n + 1] *= by.y, sums[m][4 * n + 2] *= by.x, sums[m][4 * n + 3] *= by.y;
                }
            }
#pragma unroll
            for (int step = 0; step < TILE / 16; step++) {
                u32 v[4][2];
                value_fragments<V_FORMAT, V_STRIDE>(slot, step, warp, v);
                const u64 p = operand(block.weights + buffer * PANEL_BYTES) + step * 2;
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    wgmma_fence();
                    product(sums[m], v[2 * m][0], v[2 * m + 1][0], v[2 * m][1], v[2 * m + 1][1], p, 1);
                    wgmma_commit();
                    wgmma_wait<1>();
                }
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
