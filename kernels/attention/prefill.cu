// Prefill attention: causal, for a chunk of a prompt over the paged KV cache; f16 operands, f32 accumulators.
//
//   out[i][h] = sum_j softmax_j(scale * q[i][h] · k[j][h / GROUP]) v[j][h / GROUP] (* sigmoid(gate[i][h])),  j <=
//   committed + i, and j > committed + i - WINDOW with a window
//
// in   q       f32 [rows][q_stride], head h at h * HEAD_STRIDE, its gate (HEAD_STRIDE = 2 * HEAD_DIM) follows it
//      cache   K and V including the chunk's own, in any format except F32 (kv_cache.cuh); queries are rotated like K
//      kept    BLOCK_SPARSE: j only in the key blocks of these masks (block_sparse.cuh); committed is a multiple of 128
// out  panels  f16, rows_cap rows, K = HEADS * HEAD_DIM; 0 if not wanted
//      y       f32 [rows][HEADS * HEAD_DIM]; 0 if not wanted
// grid (HEADS, tiles of 64 rows of the largest chunk) x 256 threads, longest tile first. Four consumer warps own 16
//      rows each; four producer warps dequantize K and V to f16 in shared memory, K while the previous V is in use and
//      the other way round. Key tiles start at absolute multiples of 64, so a row's bits do not depend on the chunking
//      of the prompt. A key whose score is NaN has zero weight.
// smem 3 * 64 * 2 * HEAD_DIM bytes
// define HEAD_DIM (a multiple of 64), HEADS, KV_HEADS, GATED, PANELS_OUT, F32_OUT (0 or 1), K_FORMAT, V_FORMAT,
//      BLOCK_SPARSE (0 or 1; 0 if absent), WINDOW (keys that a row sees; 0, or absent, for all)
// arch sm_80 and up     ref cpu::reference::attention::attend
// test prefill_attention::prefill_attention_matches_reference, cpu_reference::scoring::scores_match_the_cpu_reference
#define QUERIES 64
#define PRODUCER_THREADS 128
#define THREADS 256
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/block_sparse.cuh"
#include "attention/kv_cache.cuh"
#include "attention/prefill_epilogue.cuh"
#include "attention/prefill_kv_tiles.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif
#define LOWEST_SCORE (-1e30f)

// Q of the block as f16; rows past `rows` are zero.
__device__ __forceinline__ void load_queries(const float* q, int q_stride, int first, int rows, u32 to) {
    for (int unit = threadIdx.x; unit < QUERIES * HEAD_DIM / 8; unit += THREADS) {
        const int row = unit / (HEAD_DIM / 8), chunk = unit % (HEAD_DIM / 8);
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
        if (first + row < rows) {
            const float4* from = (const float4*)(q + (u64)(first + row) * q_stride + chunk * 8);
            a = from[0];
            b = from[1];
        }
        const u32 low[2] = {panel_f16x2(a.x, a.y), panel_f16x2(a.z, a.w)};
        const u32 new_max[2] = {panel_f16x2(b.x, b.y), panel_f16x2(b.z, b.w)};
        store_chunk(to + tile_chunk(row, chunk), low[0], low[1], new_max[0], new_max[1]);
    }
}

// The C fragment of n8 tile j.
__device__ __forceinline__ float (&c_fragment(float (&sums)[HEAD_DIM / 2], int j))[4] {
    return *(float (*)[4])(sums + 4 * j);
}

// Named barriers between the producer and the consumer warps.
enum Barrier { K_FULL = 1, K_EMPTY, V_FULL, V_EMPTY };

template <class Tile>
__device__ __forceinline__ void load_tile(Tile& tile, const Plane& cache, u64 row, int valid, u32 to, Barrier free,
                                          bool wait, Barrier full) {
    const int thread = threadIdx.x - (THREADS - PRODUCER_THREADS);
    if (!Tile::WRITES_AT_BEGIN) {
        tile.begin(cache, row, valid, to, thread);
    }
    if (wait) {
        named_barrier_sync<THREADS>(free);
    }
    if (Tile::WRITES_AT_BEGIN) {
        tile.begin(cache, row, valid, to, thread);
    }
    tile.finish(to, thread);
    named_barrier_arrive<THREADS>(full);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attn_prefill(const float* q, int q_stride, const PrefillChunk* chunk, PageTable pages, Plane keys, Plane values,
                 float scale, char* panels, int rows_cap, float* y KEPT_BLOCKS_PARAMETERS) {
    extern __shared__ __align__(128) char memory[];
    const int rows = chunk->rows, committed = chunk->committed;
    const int tiles = (rows + QUERIES - 1) / QUERIES;
    if (blockIdx.y >= tiles) {
        return;
    }
    const int first = (tiles - 1 - blockIdx.y) * QUERIES, head = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 smem_q = shared_address(memory), smem_k = smem_q + QUERIES * 2 * HEAD_DIM,
              smem_v = smem_k + KV_TILE * 2 * HEAD_DIM;
    const int end = committed + min(first + QUERIES, rows);
    const KeptBlocks kept = KEPT_BLOCKS(HEADS, head, first);
#if WINDOW
    // Keys that no row of the block sees change no bit: their weight is zero.
    const int begin_of_first = max(committed + first - WINDOW + 1, 0) / KV_TILE * KV_TILE;
#else
    const int begin_of_first = kept.next(0, end);
#endif
    load_queries(q + head * HEAD_STRIDE, q_stride, first, rows, smem_q);
    __syncthreads();
    if (threadIdx.x >= THREADS - PRODUCER_THREADS) {
        const int slot = chunk->slot, kv_head = head / (HEADS / KV_HEADS);
        pages.ring_pages = 0;
        for (int begin = begin_of_first; begin < end; begin = kept.next(begin + KV_TILE, end)) {
            const u64 row = kv_row(pages, slot, begin, KV_HEADS, kv_head);
            const int valid = min(end - begin, KV_TILE);
            KvTileFetcher<K_FORMAT> tile_of_keys;
            load_tile(tile_of_keys, keys, row, valid, smem_k, K_EMPTY, begin > begin_of_first, K_FULL);
            KvTileFetcher<V_FORMAT> tile_of_values;
            load_tile(tile_of_values, values, row, valid, smem_v, V_EMPTY, begin > begin_of_first, V_FULL);
        }
        return;
    }

    // Chunk 2k + c of a row is at (2k) ^ (c ^ row & 7).
    // So a lane's address is one base with bits flipped by 32 * (k % 4).
    const u32 q_lane = smem_q + (warp * 16 + lane % 16) * (2 * HEAD_DIM) + ((lane / 16 ^ lane & 7) << 4);
    const u32 k_lane = smem_k + (lane / 16 * 8 + lane % 8) * (2 * HEAD_DIM) + ((lane / 8 % 2 ^ lane & 7) << 4);
    const u32 v_lane = smem_v + (lane % 16) * (2 * HEAD_DIM) + ((lane / 16 ^ lane & 7) << 4);
    float sums[HEAD_DIM / 2] = {};
    float row_max[2] = {LOWEST_SCORE, LOWEST_SCORE}, row_sum[2] = {0.0f, 0.0f};
    const int row_position = committed + first + warp * 16 + lane / 4;
    const float log2_scale = scale * 1.4426950408889634f;
    for (int begin = begin_of_first, next; begin < end; begin = next) {
        next = kept.next(begin + KV_TILE, end);
        named_barrier_sync<THREADS>(K_FULL);
        float scores[KV_TILE / 8][4] = {};
#pragma unroll 4
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            u32 a[4];
            ldmatrix_x4(a, (q_lane ^ k % 4 * 32) + k / 4 * 128);
#pragma unroll
            for (int j = 0; j < KV_TILE / 16; j++) {
                u32 b[4];
                ldmatrix_x4(b, (k_lane ^ k % 4 * 32) + k / 4 * 128 + j * 16 * (2 * HEAD_DIM));
                mma_f16(scores[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_f16(scores[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
        if (next < end) {
            named_barrier_arrive<THREADS>(K_EMPTY);
        }

        const bool needs_mask =
            begin + KV_TILE > committed + first || (WINDOW && begin + WINDOW < committed + first + QUERIES);
        float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int j = 0; j < KV_TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float s = scores[j][i] * log2_scale;
                const int key = begin + j * 8 + lane % 4 * 2 + i % 2, query = row_position + i / 2 * 8;
                if (needs_mask && (key > query || (WINDOW && key <= query - WINDOW))) {
                    s = -INF;
                }
                scores[j][i] = fmaxf(s, -INF);  // NaN becomes -inf
                new_max[i / 2] = fmaxf(new_max[i / 2], scores[j][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(WARP_ALL, new_max[i], 1));
            new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(WARP_ALL, new_max[i], 2));
            const float rescale = exp2f(row_max[i] - new_max[i]);
            row_max[i] = new_max[i];
            row_sum[i] *= rescale;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++) {
                sums[4 * j + 2 * i] *= rescale;
                sums[4 * j + 2 * i + 1] *= rescale;
            }
        }
        u32 p[KV_TILE / 16][4];
#pragma unroll
        for (int j = 0; j < KV_TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float a = exp2f(scores[j][2 * i] - row_max[i]), b = exp2f(scores[j][2 * i + 1] - row_max[i]);
                row_sum[i] += a + b;
                p[j / 2][j % 2 * 2 + i] = f32x2_to_f16x2(a, b);
            }
        }
        named_barrier_sync<THREADS>(V_FULL);
#pragma unroll
        for (int k = 0; k < KV_TILE / 16; k++) {
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 16; j++) {
                u32 b[4];
                ldmatrix_x4_trans(b, (v_lane ^ j % 4 * 32) + j / 4 * 128 + k * 16 * (2 * HEAD_DIM));
                mma_f16(c_fragment(sums, 2 * j), p[k][0], p[k][1], p[k][2], p[k][3], b[0], b[1]);
                mma_f16(c_fragment(sums, 2 * j + 1), p[k][0], p[k][1], p[k][2], p[k][3], b[2], b[3]);
            }
        }
        if (next < end) {
            named_barrier_arrive<THREADS>(V_EMPTY);
        }
    }

    if (kv_rotated(V_FORMAT)) {
        hadamard_inverse_rows<HEAD_DIM>(sums);
    }
    const auto at = [&](int j, int half, int c) { return sums[4 * j + 2 * half + c]; };
    store_head_rows({q, q_stride, rows, panels, rows_cap, y}, first + warp * 16, head, row_sum, at);
}
