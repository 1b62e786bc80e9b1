// Attention of the rows of 1 to 4 trees over paged, quantised keys and values, split among blocks (flash decoding).
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of split s;  c = scale log2 e
//
// All query heads of a key head and all rows of a tree are one M dimension (m = node * GROUP_SIZE + head of the group),
// so every key is read once per split however many rows there are. Committed keys need no mask; tiles that hold nodes or
// a window's edge are masked by each row's 64 ancestor bits.
//
// A split is worked through in tiles of 64 keys. Scores of a tile are shared out among the warps by key, go through
// shared memory as f16 weights, and are multiplied with values shared out by dims. Tiles, steps and the sums in the
// products are in one order for every shape of launch, and sums of weights are products with ones: a row's bits do not
// depend on how many rows share the call, nor on MT.
//
// in   step     q16 [rows][HEADS][DIM] f16, normed and turned     planes of keys and values in any format but F32
// out  partial  [rows][HEADS][SPLITS][DIM] f32, behind it [rows][HEADS][SPLITS][2] f32 (m, l); splits without keys are
//      not written, combine does not read them
// grid as many blocks as the card holds at once, x 256: each takes every gridDim.x-th work item
// smem queries MT * 32 DIM, weights MT * 2048, RING tiles of keys or values, maxima
// arch sm_80 and up     reference cpu::reference::attention::attend     test attention::trees_over_*_equal_the_reference
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/span.cuh"
#include "attn/tiles.cuh"

#define GROUP_SIZE (HEADS / KV_HEADS)
// Scores: KEY_WARPS warps share the keys of a tile, 8 KEY_TILES each; the others take every QK_PARTS-th tile of M.
#if MT == 1
#define KEY_WARPS 8
#else
#define KEY_WARPS 4
#endif
#define KEY_TILES (8 / KEY_WARPS)
#define QK_PARTS (8 / KEY_WARPS)
#define QK_TILES ((MT + QK_PARTS - 1) / QK_PARTS)
// Outputs: BLOCKS warps share the dims, 32 each; the others take every PV_PARTS-th tile of M.
#define PV_PARTS (8 / BLOCKS)
#define PV_TILES ((MT + PV_PARTS - 1) / PV_PARTS)
#define L_TILES ((PV_TILES + BLOCKS - 1) / BLOCKS)

#define K_STRIDE key_stride(K_FORMAT)
#define V_STRIDE value_stride(V_FORMAT)
#define ONES 0x3c003c00u
// Rolled loops (2, 1) won 1.5 us of 12 at 24 rows and 512 keys and lost a quarter of the speed at 128K keys.
// Half at MT 2, where two blocks share a multiprocessor and a thread has 128 registers.
#ifndef QK_UNROLL
#define QK_UNROLL (MT == 2 ? BLOCKS / 2 : BLOCKS)
#endif
#ifndef PV_UNROLL
#define PV_UNROLL 4
#endif

__device__ __host__ constexpr int most(int a, int b) { return a > b ? a : b; }
#define SLOT_BYTES most(tile_bytes(K_FORMAT, K_STRIDE), tile_bytes(V_FORMAT, V_STRIDE))

struct Stats {
    float maxima[MT * 16][KEY_WARPS];  // of the scores of this tile
    float running[2][MT * 16];         // of all scores so far, before and after this tile
    float shrink[MT * 16];             // what sums so far are multiplied with
    u64 seen[STEP_ROWS];
    int at[STEP_ROWS];
};

// Tiles of 16 rows of M that a tree has for one key head.
__device__ __forceinline__ int m_tiles(const Tree& tree) { return (tree.nodes * GROUP_SIZE + 15) / 16; }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

extern "C" __global__ void __launch_bounds__(256, MT <= 2 ? 2 : 1) attn_tree(
    const Step* step, const u16* q16, Plane keys, Plane values, Pages pages, float scale_log2, float* partial, int rows) {
    extern __shared__ __align__(16) u8 shared[];
    pdl_launch();
    const int lane = threadIdx.x % 32, warp = warp_index(), g = lane / 4, t = lane % 4;
    // Nothing in a step writes the header or committed keys and values: only queries and the rows of the nodes must be
    // waited for.
    //
    // Work items are (tree, split, key head, part of M). With little to do M is cut finer, so that all blocks get some.
    const int trees = step->trees;
    int work = 0;
#pragma unroll 1
    for (int i = 0; i < trees; i++) {
        const View own = view_of(step, i);
        work += splits_of(span_of(own)) * m_tiles(own);
    }
    const int per_item = max(1, min(MT, (work * KV_HEADS + (int)gridDim.x - 1) / (int)gridDim.x));
    bool waited = false;
    for (int next = blockIdx.x;; next += gridDim.x) {
        int item = next, which = 0, parts = 0;
        View tree;
        Span span;
#pragma unroll 1
        for (; which < trees; which++) {
            tree = view_of(step, which);
            span = span_of(tree);
            parts = (m_tiles(tree) + per_item - 1) / per_item;
            const int items = splits_of(span) * KV_HEADS * parts;
            if (item < items) break;
            item -= items;
        }
        if (which == trees) break;
        const int part = item % parts, kv_head = item / parts % KV_HEADS, split = item / (parts * KV_HEADS);
        const int begin = span.begin + split * span.chunk, end = min(begin + span.chunk, span.end);
        const int m_first = part * per_item * 16, m_rows = tree.nodes * GROUP_SIZE - m_first;
        const int tiles = min(per_item, (m_rows + 15) / 16);
        __syncthreads();

        const u32 queries = shared_address(shared);
        const u32 weights = queries + MT * 32 * DIM;
        const u32 ring = weights + MT * 2048;
        Stats& stats = *(Stats*)(shared + MT * (32 * DIM + 2048) + RING * SLOT_BYTES);

        // Half `h` of the work is tile h / 2 of the keys, or of the values when h is odd.
        const int halves = (end - begin + TILE - 1) / TILE * 2;
        auto load = [&](int h) {
            if (h < halves) {
                const int key = begin + h / 2 * TILE, position = position_of(key, span.begin, span.near);
                const size_t row = kv_row(pages, tree.slot, position, KV_HEADS, kv_head);
                const u32 to = ring + h % RING * SLOT_BYTES;
                // Nobody sees what is older than the window; it may never have been written.
                const int low = WINDOW > 0 ? tree.committed - WINDOW + 1 - position : 0, high = span.end - position;
                if (h % 2 == 0)
                    tile_load<K_FORMAT, K_STRIDE>(to, keys, row, low, high);
                else
                    tile_load<V_FORMAT, V_STRIDE>(to, values, row, low, high);
            }
            cp_async_commit();
        };
        const bool early = min(end, begin + RING / 2 * TILE) <= tree.committed;
        if (!early && !waited) pdl_wait();
#pragma unroll 1
        for (int h = 0; h < RING - 1; h++) load(h);
        if (early && !waited) pdl_wait();
        waited = true;

        // Queries in fragment order: [tile of M][block][rows g or g + 8][lane], 16 bytes each; zeros past the last row.
        for (int i = threadIdx.x; i < tiles * BLOCKS * 64; i += 256) {
            const int to_lane = i % 32, m = i / (64 * BLOCKS) * 16 + i / 32 % 2 * 8 + to_lane / 4, b = i / 64 % BLOCKS;
            uint4 words = make_uint4(0, 0, 0, 0);
            if (m < m_rows) {
                const int row = tree.first + (m_first + m) / GROUP_SIZE;
                const int head = kv_head * GROUP_SIZE + (m_first + m) % GROUP_SIZE;
                words = query_words<K_FORMAT>(q16 + ((size_t)row * HEADS + head) * DIM, b, to_lane % 4);
            }
            *(uint4*)(shared + i * 16) = words;
        }
        for (int i = threadIdx.x; i < MT * 16; i += 256) stats.running[0][i] = -INF;
        if (threadIdx.x < tree.nodes) {
            stats.seen[threadIdx.x] = seen_nodes(step, tree, threadIdx.x);
            stats.at[threadIdx.x] = step->position[tree.first + threadIdx.x];
        }

        const int key_warp = warp % KEY_WARPS, qk_part = warp / KEY_WARPS;
        const int block = warp % BLOCKS, pv_part = warp / BLOCKS;
        float o[PV_TILES][4][4], l[L_TILES][4];
#pragma unroll
        for (int i = 0; i < PV_TILES; i++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[i][n][c] = 0.0f;
#pragma unroll
        for (int i = 0; i < L_TILES; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) l[i][c] = 0.0f;

        float s[QK_TILES][KEY_TILES][4];
        // ---- scores of tile `j`, and their maxima ----
        auto score = [&](int j) {
            const int position = position_of(begin + j * TILE, span.begin, span.near);
            const u32 tile = ring + 2 * j % RING * SLOT_BYTES;
#pragma unroll
            for (int i = 0; i < QK_TILES; i++)
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int c = 0; c < 4; c++) s[i][n][c] = 0.0f;
#pragma unroll QK_UNROLL
            for (int b = 0; b < BLOCKS; b++) {
                u32 k[KEY_TILES][4];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
                    key_fragment<K_FORMAT, K_STRIDE>(tile, (key_warp * KEY_TILES + n) * 8 + g, b, k[n]);
#pragma unroll
                for (int i = 0; i < QK_TILES; i++) {
                    const int m = qk_part + i * QK_PARTS;
                    if (m < tiles) {
                        const u32 at = queries + ((m * BLOCKS + b) * 64 + lane) * 16;
                        const uint4 low = lds128(at), high = lds128(at + 512);
#pragma unroll
                        for (int n = 0; n < KEY_TILES; n++) {
                            mma_f16(s[i][n], low.x, high.x, low.y, high.y, k[n][0], k[n][1]);
                            mma_f16(s[i][n], low.z, high.z, low.w, high.w, k[n][2], k[n][3]);
                        }
                    }
                }
            }
            const bool masked = position + TILE > tree.committed || (WINDOW && position < tree.committed + STEP_ROWS - tree.window);
#pragma unroll
            for (int i = 0; i < QK_TILES; i++) {
                const int m = qk_part + i * QK_PARTS;
                if (m < tiles) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int row = m * 16 + g + 8 * r;
                        float top = -INF;
                        if (masked) {
                            // Bits of this thread's columns: 8 n + e.
                            u32 seen = ~0u;
                            if (row < m_rows) {
                                const int node = (m_first + row) / GROUP_SIZE;
                                seen = u32(seen_keys(position, tree, stats.seen[node], stats.at[node]) >>
                                           (key_warp * KEY_TILES * 8 + 2 * t));
                            }
#pragma unroll
                            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                                for (int e = 0; e < 2; e++)
                                    if (!(seen >> (8 * n + e) & 1)) s[i][n][2 * r + e] = -INF;
                        }
#pragma unroll
                        for (int n = 0; n < KEY_TILES; n++) top = fmaxf(top, fmaxf(s[i][n][2 * r], s[i][n][2 * r + 1]));
                        top = fmaxf(top, __shfl_xor_sync(WARP_ALL, top, 1));
                        top = fmaxf(top, __shfl_xor_sync(WARP_ALL, top, 2));
                        if (t == 0) stats.maxima[row][key_warp] = top;
                    }
                }
            }
        };
        // ---- weights of tile `j` from its scores ----
        auto weigh = [&](int j) {
#pragma unroll
            for (int i = 0; i < QK_TILES; i++) {
                const int m = qk_part + i * QK_PARTS;
                if (m < tiles) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int row = m * 16 + g + 8 * r;
                        const float before = stats.running[j & 1][row];
                        float top = -INF;
#pragma unroll
                        for (int w = 0; w < KEY_WARPS; w++) top = fmaxf(top, stats.maxima[row][w]);
                        // Scores become powers of two here; scale is not negative.
                        top = fmaxf(before, top * scale_log2);
                        const float base = top == -INF ? 0.0f : top;
                        if (t == 0 && key_warp == 0) {
                            stats.running[(j & 1) ^ 1][row] = top;
                            stats.shrink[row] = exp2_approx(before - base);
                        }
#pragma unroll
                        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                s[i][n][2 * r + e] = exp2_approx(fmaf(s[i][n][2 * r + e], scale_log2, -base));
                    }
                    // C fragments of two key tiles are the A fragment of one step of 16 keys.
#if KEY_WARPS == 4
                    u32* to = (u32*)(shared + MT * 32 * DIM + ((m * 4 + key_warp) * 32 + lane) * 16);
                    *(uint4*)to = make_uint4(f32x2_to_f16x2(s[i][0][0], s[i][0][1]), f32x2_to_f16x2(s[i][0][2], s[i][0][3]),
                                             f32x2_to_f16x2(s[i][1][0], s[i][1][1]), f32x2_to_f16x2(s[i][1][2], s[i][1][3]));
#else
                    u32* to = (u32*)(shared + MT * 32 * DIM + ((m * 4 + key_warp / 2) * 32 + lane) * 16 + key_warp % 2 * 8);
                    *(uint2*)to = make_uint2(f32x2_to_f16x2(s[i][0][0], s[i][0][1]), f32x2_to_f16x2(s[i][0][2], s[i][0][3]));
#endif
                }
            }
        };
        // ---- weights times values of tile `j` ----
        auto accumulate = [&](int j) {
            const u32 tile = ring + (2 * j + 1) % RING * SLOT_BYTES;
#pragma unroll
            for (int i = 0; i < PV_TILES; i++) {
                const int m = pv_part + i * PV_PARTS;
                if (m < tiles) {
                    const float a = stats.shrink[m * 16 + g], b = stats.shrink[m * 16 + g + 8];
                    if (__any_sync(WARP_ALL, a != 1.0f || b != 1.0f)) {
#pragma unroll
                        for (int n = 0; n < 4; n++) o[i][n][0] *= a, o[i][n][1] *= a, o[i][n][2] *= b, o[i][n][3] *= b;
                        if (i % BLOCKS == block)
                            l[i / BLOCKS][0] *= a, l[i / BLOCKS][1] *= a, l[i / BLOCKS][2] *= b, l[i / BLOCKS][3] *= b;
                    }
                }
            }
#pragma unroll PV_UNROLL
            for (int k = 0; k < 4; k++) {
                u32 v[4][2];
                value_fragments<V_FORMAT, V_STRIDE>(tile, k, block, v);
#pragma unroll
                for (int i = 0; i < PV_TILES; i++) {
                    const int m = pv_part + i * PV_PARTS;
                    if (m < tiles) {
                        const uint4 p = lds128(weights + ((m * 4 + k) * 32 + lane) * 16);
#pragma unroll
                        for (int n = 0; n < 4; n++) mma_f16(o[i][n], p.x, p.y, p.z, p.w, v[n][0], v[n][1]);
                        if (i % BLOCKS == block) mma_f16(l[i / BLOCKS], p.x, p.y, p.z, p.w, ONES, ONES);
                    }
                }
            }
        };

        const int n_tiles = halves / 2;
#if RING >= 4
        // Scores of the next tile and outputs of this one stand between the same two barriers.
        for (int j = -1; j < n_tiles; j++) {
            if (j < 0)
                cp_async_wait<RING - 2>();
            else
                cp_async_wait<RING - 4>();
            __syncthreads();
            if (j >= 0) {
#pragma unroll 1
                for (int h = 2 * j + RING - 1; h <= 2 * j + RING; h++) load(h);
            }
            if (j + 1 < n_tiles) score(j + 1);
            if (j >= 0) accumulate(j);
            __syncthreads();
            if (j + 1 < n_tiles) weigh(j + 1);
        }
#else
        for (int j = 0; j < n_tiles; j++) {
            cp_async_wait<RING - 2>();
            __syncthreads();
            load(2 * j + RING - 1);
            score(j);
            __syncthreads();
            weigh(j);
            cp_async_wait<RING - 2>();
            __syncthreads();
            load(2 * j + RING);
            accumulate(j);
        }
#endif

        const int last = n_tiles & 1;
        float* pairs = partial + (size_t)rows * HEADS * SPLITS * DIM;
#pragma unroll
        for (int i = 0; i < PV_TILES; i++) {
            const int m = pv_part + i * PV_PARTS;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = m * 16 + g + 8 * r;
                if (m < tiles && row < m_rows) {
                    const int head = kv_head * GROUP_SIZE + (m_first + row) % GROUP_SIZE;
                    const size_t index =
                        ((size_t)(tree.first + (m_first + row) / GROUP_SIZE) * HEADS + head) * SPLITS + split;
                    store_dims<V_FORMAT>(partial + index * DIM + block * 32, o[i], r);
                    if (i % BLOCKS == block && t == 0) {
                        pairs[2 * index] = stats.running[last][row];
                        pairs[2 * index + 1] = l[i / BLOCKS][2 * r];
                    }
                }
            }
        }
    }
}
