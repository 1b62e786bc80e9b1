// Attention of tree rows in f32, keys in path order: committed positions, then the row's own nodes, root first.
//
//   out = softmax(scale * q K^T) V
//
// Slow and plain: it serves caches that hold F32, and `--exact` where attn/tree_spans_sm90.cu cannot. Keys are taken in
// runs of 256 of the path, so a row's bits depend on its path alone: a tree equals the same tokens fed one by one.
//
// in   step     q [rows][HEADS][Q_STRIDE] f32, normed, roped and turned as keys are     planes of keys and values
// out  partial  [rows][HEADS][SPLITS][DIM] f32 and behind it [rows][HEADS][SPLITS][2] (max in units of log 2, sum);
//      this kernel fills split 0 (SPLITS is 1)
// grid (HEADS, rows) x 256
// arch sm_80 and up     reference cpu::reference::attention::attend     test attention::trees_over_*_equal_the_reference
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/kv.cuh"
#include "attn/span.cuh"

#define KEYS 256

extern "C" __global__ void __launch_bounds__(256) attn_path(
    const Step* step, const float* q, Plane keys, Plane values, Pages pages, float scale, float* partial, int rows) {
    pdl_launch();
    __shared__ float query[DIM], score[KEYS], room[8], sums[256];
    __shared__ size_t place[KEYS];
    const int head = blockIdx.x, row = blockIdx.y, kv_head = head / (HEADS / KV_HEADS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    pdl_wait();
    if (row >= step->rows) return;
    const View tree = view_of(step, step->tree_of[row]);
    const int node = row - tree.first, at = step->position[row];
    const u64 nodes = seen_nodes(step, tree, node);
    const int near = WINDOW && at >= tree.window ? min(at - tree.window + 1, tree.committed) : 0;
    // Sinks that stand before the window are counted just before it.
    const int begin = WINDOW < 0 ? near - min(near, tree.sinks) : near;
    const int count = tree.committed - begin + __popcll(nodes);
    for (int i = threadIdx.x; i < DIM; i += 256) query[i] = q[((size_t)row * HEADS + head) * Q_STRIDE + i];

    // Threads are [256 / DIM] groups of DIM; each group sums every (256 / DIM)-th key of a run.
    const int parts = 256 / DIM, d = threadIdx.x % DIM, part = threadIdx.x / DIM;
    float most = -INF, sum = 0.0f, acc = 0.0f;
    for (int from = 0; from < count; from += KEYS) {
        const int n = min(KEYS, count - from);
        __syncthreads();
        if (threadIdx.x < n) {
            int key = begin + from + threadIdx.x;
            if (WINDOW < 0 && key < near) {
                key -= begin;
            } else if (key >= tree.committed) {
                // The (key - committed)-th node of the path.
                u64 left = nodes;
                for (int skip = key - tree.committed; skip; skip--) left &= left - 1;
                key = tree.committed + __ffsll(left) - 1;
            }
            place[threadIdx.x] = kv_row(pages, tree.slot, key, KV_HEADS, kv_head);
        }
        __syncthreads();
        for (int i = warp; i < n; i += 8) {
            float s = 0.0f;
            for (int j = lane; j < DIM; j += 32) s += query[j] * kv_load<K_FORMAT, DIM>(keys, place[i], j);
            s = warp_sum(s) * scale;
            if (lane == 0) score[i] = s != s ? -INF : s;
        }
        __syncthreads();
        const float mine = threadIdx.x < n ? score[threadIdx.x] : -INF;
        const float now = fmaxf(most, block_max<8>(mine, room));
        if (now == -INF) continue;
        const float weight = expf(mine - now);
        const float shrink = expf(most - now);
        sum = sum * shrink + block_sum<8>(weight, room);
        if (threadIdx.x < n) score[threadIdx.x] = weight;
        __syncthreads();
        acc *= shrink;
        for (int i = part; i < n; i += parts)
            if (score[i] > 0.0f) acc += score[i] * kv_load<V_FORMAT, DIM>(values, place[i], d);
        most = now;
    }
    sums[threadIdx.x] = acc;
    __syncthreads();
    const size_t out = (size_t)row * HEADS + head;
    if (part == 0) {
        for (int p = 1; p < parts; p++) acc += sums[threadIdx.x + p * DIM];
        partial[out * DIM + d] = acc;
    }
    if (threadIdx.x == 0) {
        float* pair = partial + (size_t)rows * HEADS * DIM + out * 2;
        pair[0] = most * 1.4426950408889634f;
        pair[1] = sum;
    }
}
