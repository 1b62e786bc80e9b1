// Decode attention of 1 to 4 draft trees over the paged, quantized KV cache: split-K flash decoding on mma.m16n8k16.
//
//   O_s = sum_j 2^(c q.k_j - m_s) v_j,  l_s = sum_j 2^(c q.k_j - m_s)     over the keys of split s;  c = scale log2 e
//
// All query heads of a KV head and all rows of a tree form one M dimension (m = node * GROUP_SIZE + head in group). So
// a block reads each key once per split for any number of rows. Committed keys need no mask. Tiles that hold nodes or
// the edge of a window are masked with each row's 64 ancestor bits.
//
// A split is processed in tiles of 64 keys. For Q K^T the warps divide a tile by keys; P goes through shared memory as
// f16; for P V they divide it by head dims. Row sums of P are products with ones. Tiles, K-steps and accumulation have
// the same order in every launch shape, so a row's bits depend neither on the row count nor on M16_TILES. With
// FIXED_SPLITS the splits follow from a row's position alone, so they are those of the token decoded alone.
//
// in   step     q16 [rows][HEADS][HEAD_DIM] f16, normed and rotated     K and V planes in any format except F32
// out  partial  [rows][HEADS][SPLITS][HEAD_DIM] f32, then [rows][HEADS][SPLITS][2] f32 (m, l); splits without keys are
//      neither written here nor read by combine_splits
// grid one resident wave x 256 threads; a block takes the items of split_items.cuh or of fixed_split_items.cuh
// smem Q M16_TILES * 32 HEAD_DIM, P M16_TILES * 2048, STAGES tiles of K or V, softmax state; with FIXED_SPLITS plans of
//      TREE_PLANS trees and two items
// arch sm_80 and up     reference cpu::reference::attention::attend
// test attention::tree_attention_over_*_matches_reference, attention_batch_invariance::*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/kv_range.cuh"
#include "attention/kv_tiles.cuh"

#define GROUP_SIZE (HEADS / KV_HEADS)
// Q K^T: KEY_WARPS warps divide the keys of a tile, 8 KEY_TILES each; the other factor of warps divides the M tiles.
#if M16_TILES == 1
#define KEY_WARPS 8
#else
#define KEY_WARPS 4
#endif
#define KEY_TILES (8 / KEY_WARPS)
#define QK_PARTS (8 / KEY_WARPS)
#define QK_TILES ((M16_TILES + QK_PARTS - 1) / QK_PARTS)
// P V: DIM_BLOCKS warps divide the head dims, 32 each; the other factor of warps divides the M tiles.
#define PV_PARTS (8 / DIM_BLOCKS)
#define PV_TILES ((M16_TILES + PV_PARTS - 1) / PV_PARTS)
#define L_TILES ((PV_TILES + DIM_BLOCKS - 1) / DIM_BLOCKS)

#define K_STRIDE key_stride(K_FORMAT)
#define V_STRIDE value_stride(V_FORMAT)
#define ONES 0x3c003c00u
// Unroll factors (2, 1) save 1.5 us of 12 at 24 rows and 512 keys, but cost a quarter of the speed at 128K keys.
// Half for M16_TILES 2: two blocks share an SM there, and a thread has 128 registers.
#ifndef QK_UNROLL
#define QK_UNROLL (M16_TILES == 2 ? DIM_BLOCKS / 2 : DIM_BLOCKS)
#endif
#ifndef PV_UNROLL
#define PV_UNROLL 4
#endif

__device__ __host__ constexpr int larger_of(int a, int b) { return a > b ? a : b; }
#define STAGE_BYTES larger_of(tile_bytes(K_FORMAT, K_STRIDE), tile_bytes(V_FORMAT, V_STRIDE))

struct SoftmaxStorage {
    float tile_max[M16_TILES * 16][KEY_WARPS];  // max score of the current tile
    float running_max[2][M16_TILES * 16];       // running max before and after the current tile
    float rescale[M16_TILES * 16];              // factor on the accumulators of earlier tiles
    u64 visible[STEP_ROWS];
    int rope_position[STEP_ROWS];
};

#if FIXED_SPLITS
#define QUERY_COLUMNS (M16_TILES * 16)
#include "attention/fixed_split_items.cuh"
#else
#include "attention/split_items.cuh"
#endif

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

KERNEL(256, M16_TILES <= 2 ? 2 : 1)
attn_decode_tree(const Step* step, const u16* q16, Plane keys, Plane values, PageTable pages, float scale_log2,
                 float* partial, int rows) {
    extern __shared__ __align__(16) u8 shared[];
    pdl_launch();
    const int lane = threadIdx.x % 32, warp = warp_index(), g = lane / 4, t = lane % 4;
    // The step header and committed KV are not written during a step, so only q16 and the rows of the nodes need
    // pdl_wait.
    SoftmaxStorage& softmax = *(SoftmaxStorage*)(shared + M16_TILES * (32 * HEAD_DIM + 2048) + STAGES * STAGE_BYTES);
    ItemStorage& storage = *(ItemStorage*)(&softmax + 1);
    DecodeItems items(step, storage);
    DecodeItem item;
    bool waited = false;
    while (items.take(step, pages, storage, softmax, item)) {
        const int m_rows = item.m_rows, tiles = item.m_tiles;
        const u32 smem_q = shared_address(shared);
        const u32 smem_p = smem_q + M16_TILES * 32 * HEAD_DIM;
        const u32 smem_kv = smem_p + M16_TILES * 2048;

        // Load h is K of tile h / 2 if h is even, V if h is odd.
        const int loads = item.tiles * 2;
        auto load = [&](int h) {
            if (h < loads) {
                const u32 to = smem_kv + h % STAGES * STAGE_BYTES;
                if (h % 2 == 0)
                    item.template load_tile<K_FORMAT, K_STRIDE>(storage, to, keys, pages, h / 2);
                else
                    item.template load_tile<V_FORMAT, V_STRIDE>(storage, to, values, pages, h / 2);
            }
            cp_async_commit();
        };
        const bool keys_are_committed = item.is_committed(STAGES / 2);
        if (!keys_are_committed && !waited) pdl_wait();
#pragma unroll 1
        for (int h = 0; h < STAGES - 1; h++) load(h);
        if (keys_are_committed && !waited) pdl_wait();
        waited = true;

        // Q in fragment order: [M tile][dim block][row g or g + 8][lane], 16 bytes each; rows past the last are zeros.
        for (int i = threadIdx.x; i < tiles * DIM_BLOCKS * 64; i += 256) {
            const int target_lane = i % 32, m = i / (64 * DIM_BLOCKS) * 16 + i / 32 % 2 * 8 + target_lane / 4,
                      b = i / 64 % DIM_BLOCKS;
            uint4 words = make_uint4(0, 0, 0, 0);
            if (m < m_rows) {
                const int row = item.step_row(storage, m);
                const int head = item.kv_head * GROUP_SIZE + (item.m_first + m) % GROUP_SIZE;
                words = query_words<K_FORMAT>(q16 + ((size_t)row * HEADS + head) * HEAD_DIM, b, target_lane % 4);
            }
            *(uint4*)(shared + i * 16) = words;
        }
        for (int i = threadIdx.x; i < M16_TILES * 16; i += 256) softmax.running_max[0][i] = -INF;
        items.prefetch_next(step, storage);

        const int key_warp = warp % KEY_WARPS, qk_part = warp / KEY_WARPS;
        const int block = warp % DIM_BLOCKS, pv_part = warp / DIM_BLOCKS;
        float o[PV_TILES][4][4], row_sum[L_TILES][4];
#pragma unroll
        for (int i = 0; i < PV_TILES; i++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[i][n][c] = 0.0f;
#pragma unroll
        for (int i = 0; i < L_TILES; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) row_sum[i][c] = 0.0f;

        float s[QK_TILES][KEY_TILES][4];
        // ---- scores of tile j and their row maxima ----
        auto compute_scores = [&](int j) {
            const int position = item.position(j);
            const WindowedTree& tree = item.tree;
            const u32 tile = smem_kv + 2 * j % STAGES * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < QK_TILES; i++)
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int c = 0; c < 4; c++) s[i][n][c] = 0.0f;
#pragma unroll QK_UNROLL
            for (int b = 0; b < DIM_BLOCKS; b++) {
                u32 k[KEY_TILES][4];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
                    key_fragment<K_FORMAT, K_STRIDE>(tile, (key_warp * KEY_TILES + n) * 8 + g, b, k[n]);
#pragma unroll
                for (int i = 0; i < QK_TILES; i++) {
                    const int m = qk_part + i * QK_PARTS;
                    if (m < tiles) {
                        const u32 at = smem_q + ((m * DIM_BLOCKS + b) * 64 + lane) * 16;
                        const uint4 low = lds128(at), high = lds128(at + 512);
#pragma unroll
                        for (int n = 0; n < KEY_TILES; n++) {
                            mma_f16(s[i][n], low.x, high.x, low.y, high.y, k[n][0], k[n][1]);
                            mma_f16(s[i][n], low.z, high.z, low.w, high.w, k[n][2], k[n][3]);
                        }
                    }
                }
            }
            const bool masked =
                position + KV_TILE > tree.committed || (WINDOW && position < tree.committed + STEP_ROWS - tree.window);
#pragma unroll
            for (int i = 0; i < QK_TILES; i++) {
                const int m = qk_part + i * QK_PARTS;
                if (m < tiles) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int row = m * 16 + g + 8 * r;
                        float top = -INF;
                        if (masked) {
                            // Visibility bits of this thread's columns: 8 n + e.
                            u32 visible = ~0u;
                            if (row < m_rows) {
                                const int node = (item.m_first + row) / GROUP_SIZE;
                                visible = u32(
                                    visible_keys(position, tree, softmax.visible[node], softmax.rope_position[node]) >>
                                    (key_warp * KEY_TILES * 8 + 2 * t));
                            }
#pragma unroll
                            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                                for (int e = 0; e < 2; e++)
                                    if (!(visible >> (8 * n + e) & 1)) s[i][n][2 * r + e] = -INF;
                        }
#pragma unroll
                        for (int n = 0; n < KEY_TILES; n++) top = fmaxf(top, fmaxf(s[i][n][2 * r], s[i][n][2 * r + 1]));
                        top = fmaxf(top, __shfl_xor_sync(WARP_ALL, top, 1));
                        top = fmaxf(top, __shfl_xor_sync(WARP_ALL, top, 2));
                        if (t == 0) softmax.tile_max[row][key_warp] = top;
                    }
                }
            }
        };
        // ---- P of tile j from its scores ----
        auto softmax_tile = [&](int j) {
#pragma unroll
            for (int i = 0; i < QK_TILES; i++) {
                const int m = qk_part + i * QK_PARTS;
                if (m < tiles) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int row = m * 16 + g + 8 * r;
                        const float old_max = softmax.running_max[j & 1][row];
                        float top = -INF;
#pragma unroll
                        for (int w = 0; w < KEY_WARPS; w++) top = fmaxf(top, softmax.tile_max[row][w]);
                        // From here on scores are exponents of two; the scale is not negative.
                        top = fmaxf(old_max, top * scale_log2);
                        const float base = top == -INF ? 0.0f : top;
                        if (t == 0 && key_warp == 0) {
                            softmax.running_max[(j & 1) ^ 1][row] = top;
                            softmax.rescale[row] = exp2_approx(old_max - base);
                        }
#pragma unroll
                        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                s[i][n][2 * r + e] = exp2_approx(fmaf(s[i][n][2 * r + e], scale_log2, -base));
                    }
                    // The C fragments of two key tiles form the A fragment of one K-step of 16 keys.
#if KEY_WARPS == 4
                    u32* to = (u32*)(shared + M16_TILES * 32 * HEAD_DIM + ((m * 4 + key_warp) * 32 + lane) * 16);
                    *(uint4*)to =
                        make_uint4(f32x2_to_f16x2(s[i][0][0], s[i][0][1]), f32x2_to_f16x2(s[i][0][2], s[i][0][3]),
                                   f32x2_to_f16x2(s[i][1][0], s[i][1][1]), f32x2_to_f16x2(s[i][1][2], s[i][1][3]));
#else
                    u32* to = (u32*)(shared + M16_TILES * 32 * HEAD_DIM + ((m * 4 + key_warp / 2) * 32 + lane) * 16 +
                                     key_warp % 2 * 8);
                    *(uint2*)to =
                        make_uint2(f32x2_to_f16x2(s[i][0][0], s[i][0][1]), f32x2_to_f16x2(s[i][0][2], s[i][0][3]));
#endif
                }
            }
        };
        // ---- O += P V of tile j ----
        auto accumulate_pv = [&](int j) {
            const u32 tile = smem_kv + (2 * j + 1) % STAGES * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < PV_TILES; i++) {
                const int m = pv_part + i * PV_PARTS;
                if (m < tiles) {
                    const float a = softmax.rescale[m * 16 + g], b = softmax.rescale[m * 16 + g + 8];
                    if (__any_sync(WARP_ALL, a != 1.0f || b != 1.0f)) {
#pragma unroll
                        for (int n = 0; n < 4; n++) o[i][n][0] *= a, o[i][n][1] *= a, o[i][n][2] *= b, o[i][n][3] *= b;
                        if (i % DIM_BLOCKS == block)
                            row_sum[i / DIM_BLOCKS][0] *= a, row_sum[i / DIM_BLOCKS][1] *= a,
                                row_sum[i / DIM_BLOCKS][2] *= b, row_sum[i / DIM_BLOCKS][3] *= b;
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
                        const uint4 p = lds128(smem_p + ((m * 4 + k) * 32 + lane) * 16);
#pragma unroll
                        for (int n = 0; n < 4; n++) mma_f16(o[i][n], p.x, p.y, p.z, p.w, v[n][0], v[n][1]);
                        if (i % DIM_BLOCKS == block) mma_f16(row_sum[i / DIM_BLOCKS], p.x, p.y, p.z, p.w, ONES, ONES);
                    }
                }
            }
        };

        const int n_tiles = item.tiles;
#if STAGES >= 4
        // Scores of tile j + 1 and P V of tile j run between the same two barriers.
        for (int j = -1; j < n_tiles; j++) {
            if (j < 0)
                cp_async_wait<STAGES - 2>();
            else
                cp_async_wait<STAGES - 4>();
            __syncthreads();
            if (j >= 0) {
#pragma unroll 1
                for (int h = 2 * j + STAGES - 1; h <= 2 * j + STAGES; h++) load(h);
            }
            if (j + 1 < n_tiles) compute_scores(j + 1);
            if (j >= 0) accumulate_pv(j);
            __syncthreads();
            if (j + 1 < n_tiles) softmax_tile(j + 1);
        }
#else
        for (int j = 0; j < n_tiles; j++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            load(2 * j + STAGES - 1);
            compute_scores(j);
            __syncthreads();
            softmax_tile(j);
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            load(2 * j + STAGES);
            accumulate_pv(j);
        }
#endif

        const int last = n_tiles & 1;
        float* pairs = partial + (size_t)rows * HEADS * SPLITS * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < PV_TILES; i++) {
            const int m = pv_part + i * PV_PARTS;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = m * 16 + g + 8 * r;
                if (m < tiles && row < m_rows) {
                    const int result = item.result(storage, row);
                    if (result < 0) continue;
                    const size_t index = result;
                    store_dims<V_FORMAT>(partial + index * HEAD_DIM + block * 32, o[i], r);
                    if (i % DIM_BLOCKS == block && t == 0) {
                        pairs[2 * index] = softmax.running_max[last][row];
                        pairs[2 * index + 1] = row_sum[i / DIM_BLOCKS][2 * r];
                    }
                }
            }
        }
    }
}
