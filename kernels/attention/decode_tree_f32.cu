// Decode attention of tree rows in f32, keys in path order: committed positions, then the row's own nodes, root first.
//
//   out = softmax(scale * q K^T) V
//
// Simple and slow: for F32 caches, and for batch-invariant decode where decode_fixed_splits_sm90.cu cannot run. Keys
// are taken in runs of 256 along the path, so a row's bits depend on its path alone: a tree equals its tokens fed one
// by one.
//
// in   step     q [rows][HEADS][Q_STRIDE] f32, normed, with RoPE, rotated like k     K and V planes
// out  partial  [rows][HEADS][SPLITS][HEAD_DIM] f32, then [rows][HEADS][SPLITS][2] f32 (max in powers of two, sum);
//      only split 0 (SPLITS is 1)
// grid (HEADS, rows) x 256 threads
// smem one query, 256 scores and cache rows, reduction scratch
// arch sm_80 and up     reference cpu::reference::attention::attend
// test attention::tree_attention_over_*_matches_reference
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/kv_cache.cuh"
#include "attention/kv_range.cuh"

#define KEYS_PER_RUN 256

extern "C" __global__ void __launch_bounds__(256)
    attn_decode_tree_f32(const Step* step, const float* q, Plane keys, Plane values, PageTable pages, float scale,
                         float* partial, int rows) {
    pdl_launch();
    __shared__ float query[HEAD_DIM], score[KEYS_PER_RUN], scratch[8], group_sums[256];
    __shared__ size_t kv_row_of_key[KEYS_PER_RUN];
    const int head = blockIdx.x, row = blockIdx.y, kv_head = head / (HEADS / KV_HEADS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    pdl_wait();
    if (row >= step->rows) return;
    const WindowedTree tree = windowed_tree(step, step->tree_of[row]);
    const int node = row - tree.first, rope_position = step->position[row];
    const u64 nodes = visible_nodes(step, tree, node);
    const int window_begin =
        WINDOW && rope_position >= tree.window ? min(rope_position - tree.window + 1, tree.committed) : 0;
    // Sinks before the window are numbered just before it.
    const int begin = WINDOW < 0 ? window_begin - min(window_begin, tree.sinks) : window_begin;
    const int count = tree.committed - begin + __popcll(nodes);
    for (int i = threadIdx.x; i < HEAD_DIM; i += 256) query[i] = q[((size_t)row * HEADS + head) * Q_STRIDE + i];

    // 256 / HEAD_DIM groups of HEAD_DIM threads; each accumulates every (256 / HEAD_DIM)-th key of a run.
    const int groups = 256 / HEAD_DIM, d = threadIdx.x % HEAD_DIM, group = threadIdx.x / HEAD_DIM;
    float running_max = -INF, row_sum = 0.0f, acc = 0.0f;
    for (int run_begin = 0; run_begin < count; run_begin += KEYS_PER_RUN) {
        const int n = min(KEYS_PER_RUN, count - run_begin);
        __syncthreads();
        if (threadIdx.x < n) {
            int key = begin + run_begin + threadIdx.x;
            if (WINDOW < 0 && key < window_begin) {
                key -= begin;
            } else if (key >= tree.committed) {
                // The (key - committed)-th node of the path.
                u64 remaining = nodes;
                for (int skip = key - tree.committed; skip; skip--) remaining &= remaining - 1;
                key = tree.committed + __ffsll(remaining) - 1;
            }
            kv_row_of_key[threadIdx.x] = kv_row(pages, tree.slot, key, KV_HEADS, kv_head);
        }
        __syncthreads();
        for (int i = warp; i < n; i += 8) {
            float s = 0.0f;
            for (int j = lane; j < HEAD_DIM; j += 32)
                s += query[j] * kv_load<K_FORMAT, HEAD_DIM>(keys, kv_row_of_key[i], j);
            s = warp_sum(s) * scale;
            if (lane == 0) score[i] = s != s ? -INF : s;
        }
        __syncthreads();
        const float own_score = threadIdx.x < n ? score[threadIdx.x] : -INF;
        const float new_max = fmaxf(running_max, block_max<8>(own_score, scratch));
        if (new_max == -INF) continue;
        const float p = expf(own_score - new_max);
        const float rescale = expf(running_max - new_max);
        row_sum = row_sum * rescale + block_sum<8>(p, scratch);
        if (threadIdx.x < n) score[threadIdx.x] = p;
        __syncthreads();
        acc *= rescale;
        for (int i = group; i < n; i += groups)
            if (score[i] > 0.0f) acc += score[i] * kv_load<V_FORMAT, HEAD_DIM>(values, kv_row_of_key[i], d);
        running_max = new_max;
    }
    group_sums[threadIdx.x] = acc;
    __syncthreads();
    const size_t out = (size_t)row * HEADS + head;
    if (group == 0) {
        for (int p = 1; p < groups; p++) acc += group_sums[threadIdx.x + p * HEAD_DIM];
        partial[out * HEAD_DIM + d] = acc;
    }
    if (threadIdx.x == 0) {
        float* pair = partial + (size_t)rows * HEADS * HEAD_DIM + out * 2;
        pair[0] = running_max * 1.4426950408889634f;
        pair[1] = row_sum;
    }
}
