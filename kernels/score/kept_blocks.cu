// Which key blocks of 128 positions the query blocks of a chunk attend to (FlashPrefill, arXiv 2603.06199).
//
//   score_block_means  mean[h][n]   = mean of the keys of block n
//   score_block_lse    lse[m][h][n] = ln sum over rows q of block m of exp(scale * q · mean[h / GROUP][n]),  n <= m
//   score_kept_blocks  bit n of kept[m][h]: n <= m, and n is a sink, in the window, m is one of the last blocks, or
//                      lse[m][h][n] >= max over n' of lse[m][h][n'] + log_alpha (a NaN keeps its block)
//
// in   chunk  committed is a multiple of 128: a block of positions lies in one chunk
//      cache  keys, rotated by position, F32 or F16, slot 0
//      q      f32 [rows][q_stride], head h at h * Q_STRIDE, rotated by position
// mid  means  f32 [KV_HEADS][max_blocks][HEAD_DIM]      lse f32 [blocks of the largest chunk][HEADS][max_blocks]
// out  kept   u32 [blocks of the largest chunk][HEADS][words], for attention/block_sparse.cuh; words up to that of m
// grid means (blocks of the chunk, KV_HEADS) x HEAD_DIM threads
//      lse   (tiles of 64 means, HEADS, blocks of the chunk) x 256 threads, a thread has 8 queries x 4 means
//      kept  (HEADS, blocks of the chunk) x 128 threads
// smem static: 16 columns of 128 queries and 64 means
// define HEAD_DIM (64, 128 or 256), HEADS, KV_HEADS, Q_STRIDE, K_FORMAT
// arch sm_80 and up     ref cpu::reference::score::{column_lse, kept_blocks}
// test cpu_reference::scoring::scores_match_the_cpu_reference,
//      cpu_reference::scoring::an_alpha_that_keeps_every_block_equals_dense_bit_for_bit
#include "attention/kv_cache.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "score/call.cuh"

#define BLOCK 128
#define MEANS 64
#define SLICE 16
#define GROUP (HEADS / KV_HEADS)

extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    score_block_means(const PrefillChunk* chunk, Plane keys, PageTable pages, float* means, int max_blocks) {
    const int rows = min(chunk->rows - int(blockIdx.x) * BLOCK, BLOCK), head = blockIdx.y;
    if (rows <= 0) {
        return;
    }
    pages.ring_pages = 0;
    const int first = chunk->committed + blockIdx.x * BLOCK;
    // A block lies in one page, whose rows of a head are contiguous.
    const size_t row = kv_row(pages, 0, first, KV_HEADS, head);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < rows; i++) {
        sum += kv_load<K_FORMAT, HEAD_DIM>(keys, row + i, threadIdx.x);
    }
    means[((u64)head * max_blocks + first / BLOCK) * HEAD_DIM + threadIdx.x] = sum / rows;
}

extern "C" __global__ void __launch_bounds__(256)
    score_block_lse(const PrefillChunk* chunk, const float* q, int q_stride, const float* means, int max_blocks,
                    float scale, float* lse) {
    __shared__ __align__(16) float queries[SLICE][BLOCK + 4], keys[SLICE][MEANS + 4];
    __shared__ float parts[BLOCK / 8][MEANS];
    const int first_row = blockIdx.z * BLOCK, rows = min(chunk->rows - first_row, BLOCK);
    const int head = blockIdx.y, first_mean = blockIdx.x * MEANS;
    const int own_block = chunk->committed / BLOCK + blockIdx.z;
    if (rows <= 0 || first_mean > own_block) {
        return;
    }
    const float* from_q = q + (u64)first_row * q_stride + head * Q_STRIDE;
    const float* from_k = means + ((u64)(head / GROUP) * max_blocks + first_mean) * HEAD_DIM;
    const int valid_means = min(own_block + 1 - first_mean, MEANS);
    // 16 threads share the queries 8 y to 8 y + 7, 16 the means 4 x to 4 x + 3.
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int load_row = threadIdx.x / 4, load_column = threadIdx.x % 4 * 4;
    float scores[8][4] = {};
    for (int column = 0; column < HEAD_DIM; column += SLICE) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCK / 64; i++) {
            const int row = load_row + i * 64;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < rows) {
                v = *(const float4*)(from_q + (u64)row * q_stride + column + load_column);
            }
            queries[load_column][row] = v.x;
            queries[load_column + 1][row] = v.y;
            queries[load_column + 2][row] = v.z;
            queries[load_column + 3][row] = v.w;
        }
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (load_row < valid_means) {
            v = *(const float4*)(from_k + (u64)load_row * HEAD_DIM + column + load_column);
        }
        keys[load_column][load_row] = v.x;
        keys[load_column + 1][load_row] = v.y;
        keys[load_column + 2][load_row] = v.z;
        keys[load_column + 3][load_row] = v.w;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SLICE; k++) {
            const float4 a0 = *(const float4*)&queries[k][8 * y], a1 = *(const float4*)&queries[k][8 * y + 4];
            const float4 b4 = *(const float4*)&keys[k][4 * x];
            const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w}, b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    scores[i][j] = fmaf(a[i], b[j], scores[i][j]);
                }
            }
        }
    }
    float max[4], sum[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        max[j] = -INF;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            scores[i][j] *= scale;
            if (8 * y + i < rows) {
                max[j] = fmaxf(max[j], scores[i][j]);
            }
        }
        parts[y][4 * x + j] = max[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        for (int i = 0; i < BLOCK / 8; i++) {
            max[j] = fmaxf(max[j], parts[i][4 * x + j]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (8 * y + i < rows) {
                sum[j] += expf(scores[i][j] - max[j]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        parts[y][4 * x + j] = sum[j];
    }
    __syncthreads();
    if (y == 0) {
        float* to = lse + ((u64)blockIdx.z * HEADS + head) * max_blocks + first_mean;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (4 * x + j < valid_means) {
                float all = 0.0f;
                for (int i = 0; i < BLOCK / 8; i++) {
                    all += parts[i][4 * x + j];
                }
                to[4 * x + j] = max[j] + logf(all);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    score_kept_blocks(const PrefillChunk* chunk, const ScoreCall* call, const float* lse, int max_blocks, u32* kept,
                      int words) {
    __shared__ float warp_results[4];
    const int head = blockIdx.x, query_block = blockIdx.y;
    if (query_block * BLOCK >= chunk->rows) {
        return;
    }
    const int own_block = chunk->committed / BLOCK + query_block;
    const float* from = lse + ((u64)query_block * HEADS + head) * max_blocks;
    float best = -INF;
    for (int n = threadIdx.x; n <= own_block; n += 128) {
        best = fmaxf(best, from[n]);
    }
    const float least = block_max<4>(best, warp_results) + call->log_alpha;
    const int n_blocks = (call->tokens + BLOCK - 1) / BLOCK;
    const bool is_dense = own_block + call->dense_last_blocks >= n_blocks;
    // The loop's bounds are those of the whole warp, which votes.
    for (int word = threadIdx.x / 32; word <= own_block / 32; word += 4) {
        const int n = word * 32 + threadIdx.x % 32;
        bool keep = false;
        if (n <= own_block) {
            const bool always = is_dense || n < call->sink_blocks || own_block - n < call->window_blocks;
            keep = always || !(from[n] < least);
        }
        const u32 bits = __ballot_sync(WARP_ALL, keep);
        if (threadIdx.x % 32 == 0) {
            kept[((u64)query_block * HEADS + head) * words + word] = bits;
        }
    }
}
