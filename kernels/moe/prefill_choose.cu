// The choice of the experts of a chunk's rows, and their grouping by expert.
//
//   moe_choose  choices of each row from its logits; shared_factor[row] = sigmoid(shared_gate . y[row])
//   moe_group   positions of all pairs in the order of experts, and the tiles of each expert's rows (expert_tiles.cuh)
//
// in   chunk     logits f32 [rows][EXPERTS]     y f32 [rows][WIDTH], shared_gate f32 [WIDTH] if SHARED
// out  choices [rows][USED], best first; shared_factor f32 [rows]; work
// grid moe_choose: rows / 8 x 256, a warp per row; moe_group: 1 x 1024
// The order of an expert's rows is not fixed: products of a row do not depend on its position.
// defines WIDTH (a multiple of 4), EXPERTS (at most 1024), USED, SHARED (0 or 1)
// arch sm_80 and up     reference cpu::reference::router     test crates/cuda/tests/moe.rs
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "moe/choose.cuh"
#include "moe/expert_tiles.cuh"

extern "C" __global__ void __launch_bounds__(256)
    moe_choose(const PrefillChunk* chunk, const float* logits, const float* y, const float* shared_gate, float scale,
               Choice* choices, float* shared_factor) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= chunk->rows) return;
    choose_row(logits + size_t(row) * EXPERTS, scale, choices + size_t(row) * USED);
#if SHARED
    const int lane = threadIdx.x % 32;
    const float4 *x = (const float4*)(y + size_t(row) * WIDTH), *w = (const float4*)shared_gate;
    float sum = 0.0f;
    for (int quad = lane; quad < WIDTH / 4; quad += 32) {
        const float4 a = x[quad], b = __ldg(w + quad);
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
        sum = fmaf(a.z, b.z, sum);
        sum = fmaf(a.w, b.w, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) shared_factor[row] = sigmoid(sum);
#endif
}

// By 1024 threads: the sum of v over the threads before, and over all.
__device__ __forceinline__ int sum_before(int v, int* warp_sums, int& all) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = v;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(WARP_ALL, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = 0;
    all = 0;
    for (int i = 0; i < 32; i++) {
        if (i == warp) before = all;
        all += warp_sums[i];
    }
    __syncthreads();
    return before + sum - v;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    moe_group(const PrefillChunk* chunk, const Choice* choices, PrefillWork work) {
    __shared__ int count[EXPERTS], next[EXPERTS], warp_sums[32];
    const int thread = threadIdx.x, pairs = chunk->rows * USED;
    if (thread < EXPERTS) count[thread] = 0;
    __syncthreads();
    for (int pair = thread; pair < pairs; pair += 1024) atomicAdd(count + choices[pair].expert, 1);
    __syncthreads();
    const int n = thread < EXPERTS ? count[thread] : 0, n_tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    int all_pairs, all_tiles;
    const int first = sum_before(n, warp_sums, all_pairs);
    const int first_tile = sum_before(n_tiles, warp_sums, all_tiles);
    if (thread < EXPERTS) next[thread] = first;
    for (int i = 0; i < n_tiles; i++)
        work.tiles[first_tile + i] = {thread, first + i * TILE_ROWS, min(TILE_ROWS, n - i * TILE_ROWS), 0};
    if (thread == 0) *work.n_tiles = all_tiles;
    __syncthreads();
    for (int pair = thread; pair < pairs; pair += 1024) work.pair_at[atomicAdd(next + choices[pair].expert, 1)] = pair;
}
