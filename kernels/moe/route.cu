// The router of a decode step: logits in f32, the choice of each row's experts, and the list of chosen experts with
// their rows, in one launch.
//
//   logits[row][e] = sum over k of router[e][k] * y[row][k];  shared_factor[row] = sigmoid(shared_gate . y[row])
//
// A block has two outputs (experts, then the shared gate), a half of its threads each. A sum has one order for any
// number of rows: lanes, then warps. The block that finishes last chooses and lists (choose.cuh); in a step of one row
// decode_gate_up.cu does so. NORM: every block computes the norm of that row, in the order of norm/rms_norm.
//
// in   header (norm/source_rows.cuh)     router f32 [EXPERTS][WIDTH]     shared_gate f32 [WIDTH] if SHARED
//      y f32 [rows][WIDTH]; NORM: the row before its norm, and norm f32 [WIDTH]
// out  logits f32 [ROWS][EXPERTS + SHARED]; ROWS > 1: work (choose.cuh)
//      NORM: normed, the row after its norm (gemm/a16_layout.cuh)
//      counter: zero before and after
// grid ceil((EXPERTS + SHARED) / 2) x 256
// defines SOURCE, ROWS (bucket), WIDTH (a multiple of 4), EXPERTS, USED, SHARED (0 or 1), NORM_WARPS (0 without NORM;
//         else those of norm/rms_norm, at most 8, with ROWS 1)
// arch sm_80 and up     reference cpu::reference::router     test crates/cuda/tests/moe.rs
#include "common/prelude.cuh"
#include "moe/choose.cuh"
#include "norm/source_rows.cuh"
#if NORM_WARPS
#define OUT_F32 0
#define OUT_F16 1
#define N8_TILES 1
#include "norm/row_output.cuh"
#define GROUPS_PER_WARP ((ROW_GROUPS + NORM_WARPS - 1) / NORM_WARPS)
#endif

#define OUTPUTS (EXPERTS + SHARED)
#define PAIRS (ROWS * USED)
#define QUADS ((WIDTH / 4 + 127) / 128)

#if ROWS > 1
// Orders all pairs by expert and lists each expert's pairs, EXPERT_ROWS to an entry. Each pair finds its position by
// itself: how many pairs have a lower expert, and how many before it have its own.
__device__ __forceinline__ void list_experts(const Choice* chosen, int n_pairs, const DecodeWork& work) {
    __shared__ int entry_at[PAIRS], n_entries;
    if (threadIdx.x == 0) n_entries = 0;
    __syncthreads();
    for (int round = 0; round < 2; round++) {
        for (int pair = threadIdx.x; pair < n_pairs; pair += 256) {
            const int expert = chosen[pair].expert;
            int lower = 0, before = 0, same = 0;
            for (int other = 0; other < n_pairs; other++) {
                const int e = chosen[other].expert;
                lower += e < expert;
                same += e == expert;
                before += e == expert && other < pair;
            }
            const int leader = lower + before / EXPERT_ROWS * EXPERT_ROWS;
            if (round == 0) {
                if (before % EXPERT_ROWS) continue;
                const int entry = atomicAdd(&n_entries, 1);
                entry_at[leader] = entry;
                work.entries[entry].expert = expert;
                work.entries[entry].first = leader;
                work.entries[entry].n = min(EXPERT_ROWS, same - before);
            } else {
                work.entries[entry_at[leader]].pair[before % EXPERT_ROWS] = pair;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *work.n_entries = n_entries;
}
#endif

extern "C" __global__ void __launch_bounds__(256)
    moe_route(const Header* header, const float* y, const float* router, const float* shared_gate, float scale,
              float* logits, DecodeWork work, int* counter, const float* norm, float eps, void* normed) {
    pdl_launch();
    __shared__ float partial[ROWS][8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int output = blockIdx.x * 2 + part;
    const float* from = SHARED && output == EXPERTS ? shared_gate : router + size_t(min(output, EXPERTS - 1)) * WIDTH;
    float4 w[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int quad = thread + i * 128;
        w[i] = quad < WIDTH / 4 ? __ldg((const float4*)from + quad) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const int rows = min(ROWS, n_source_rows(header));
#if NORM_WARPS
    __shared__ __align__(16) float row_values[ROW_GROUPS * 256];
    __shared__ float warp_sums[NORM_WARPS];
    float norm_weight[GROUPS_PER_WARP][8], v[GROUPS_PER_WARP][8], squares = 0.0f;
    if (warp < NORM_WARPS) {
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) load_row_group<WIDTH>(norm, warp + i * NORM_WARPS, norm_weight[i]);
    }
    pdl_wait();
    if (warp < NORM_WARPS) {
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) load_row_group<WIDTH>(y, warp + i * NORM_WARPS, v[i]);
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) squares += v[i][j] * v[i][j];
        squares = warp_sum(squares);
        if (lane == 0) warp_sums[warp] = squares;
    }
    __syncthreads();
    squares = warp_sums[0];
#pragma unroll
    for (int i = 1; i < NORM_WARPS; i++) squares += warp_sums[i];
    const float norm_scale = 1.0f / sqrtf(squares / WIDTH + eps);
    if (warp < NORM_WARPS) {
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) {
            const int group = warp + i * NORM_WARPS;
            if (group >= ROW_GROUPS) break;
#pragma unroll
            for (int j = 0; j < 8; j++) v[i][j] = v[i][j] * norm_scale * norm_weight[i][j];
            float4* to = (float4*)(row_values + group * 256 + lane * 8);
            to[0] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
            to[1] = make_float4(v[i][4], v[i][5], v[i][6], v[i][7]);
            if (blockIdx.x == 0) a16_store(normed, N8_TILES, 0, group, v[i]);
        }
    }
    __syncthreads();
    y = row_values;
#else
    pdl_wait();
#endif
    for (int row = 0; row < rows; row++) {
        const float4* x = (const float4*)(y + size_t(row) * WIDTH);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const int quad = thread + i * 128;
            const float4 v = quad < WIDTH / 4 ? x[quad] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            sum = fmaf(w[i].x, v.x, sum);
            sum = fmaf(w[i].y, v.y, sum);
            sum = fmaf(w[i].z, v.z, sum);
            sum = fmaf(w[i].w, v.w, sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) partial[row][warp] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * 2; i += 256) {
        const float* sums = partial[i / 2] + i % 2 * 4;
        const int to = blockIdx.x * 2 + i % 2;
        if (to < OUTPUTS) logits[i / 2 * OUTPUTS + to] = ((sums[0] + sums[1]) + sums[2]) + sums[3];
    }
#if ROWS > 1
    __shared__ Choice chosen[PAIRS];
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) == int(gridDim.x) - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    for (int row = warp; row < rows; row += 8) {
        choose_row(logits + row * OUTPUTS, scale, chosen + row * USED);
#if SHARED
        if (lane == 0) work.shared_factor[row] = sigmoid(__ldcg(logits + row * OUTPUTS + EXPERTS));
#endif
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < rows * USED; pair += 256) work.choices[pair] = chosen[pair];
    list_experts(chosen, rows * USED, work);
#endif
}
