// Down projections of the chosen experts and of the shared one, and their sum into the residual stream.
//
//   out[row] += shared_factor[row] * (shared_down . shared_h[row])
//               + sum over choices, best first, of weight * (down_e . h[position])
//
// A block has 16 columns of all experts. Its warps take entries (up to eight rows of one expert) in turns, each all
// of K through a ring of two steps of its own; products stay in shared memory until all are there. Then each row's sum
// is made in its own order. So a row's bits depend on no other row, and each expert is read once.
//
// In a step of one row, every block chooses the row's experts from the logits by itself, and loads their weights before
// the dependency wait: decode_gate_up.cu lets this kernel start when the logits are there.
//
// in   header, work (choose.cuh), logits f32 [ROWS][EXPERTS + SHARED], h, shared_h as decode_gate_up.cu wrote them,
//      stacks down [EXPERTS][WIDTH][F], shared_down [WIDTH][F of the shared expert]
// out  out f32 [ROWS][WIDTH], added to; with STORE replaced, as the partial sums of a shard
// grid WIDTH / 16 x WARPS * 32
// smem products f32 [ROWS * (USED + SHARED)][16], then WARPS * 2 steps of a tile and of eight rows of h, dynamic
// defines SOURCE, ROWS, WIDTH, EXPERTS, USED, SHARED, MAX_ENTRIES, DOWN_KIND, SHARED_DOWN_KIND, WARPS,
//         STORE, EXPERT_TABLE (expert_weights.cuh)
// arch sm_80 and up     reference cpu::reference     test crates/cuda/tests/moe.rs
#include "common/prelude.cuh"
#include "moe/choose.cuh"
#include "moe/expert_weights.cuh"
#include "norm/source_rows.cuh"

#define STAGES 2
#define STEP_ROWS_OF_X (ROWS < EXPERT_ROWS ? ROWS : EXPERT_ROWS)
#define N_PRODUCTS (ROWS * (USED + SHARED))

struct DownParams {
    DecodeWork work;
    const u16 *h, *shared_h;
    ExpertStack down, shared_down;
    float* out;
    const float* logits;
    float scale;       // of the experts' weights
    const u64* table;  // with EXPERT_TABLE: addresses of experts
};

template <int VALUE>
struct KindConstant {
    static constexpr int value = VALUE;
};

__device__ constexpr int stage_bytes(int kind) { return step_bytes(kind) + STEP_ROWS_OF_X * x_stride(kind); }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int STAGE_BYTES = larger(stage_bytes(DOWN_KIND), SHARED ? stage_bytes(SHARED_DOWN_KIND) : 0);

// A step of a work item: an entry of the list, or a group of rows of the shared expert.
struct WorkStep {
    int item, step;
};

struct WorkItem {
    const u16* h;
    int expert, n, first;
    bool is_shared;
};

// By a warp: starts to load the part of a step of the rows of h.
template <int KIND>
__device__ __forceinline__ void load_h(u32 to, int cols, const WorkItem& item, int step) {
    constexpr int PIECES = step_values(KIND) / 8;
    const u16* h = item.h + step * step_values(KIND);
    for (int i = threadIdx.x % 32; i < item.n * PIECES; i += 32)
        cp_async_16(to + step_bytes(KIND) + i / PIECES * x_stride(KIND) + i % PIECES * 16,
                    h + size_t(i / PIECES) * cols + i % PIECES * 8);
}

template <int KIND>
__device__ __forceinline__ void multiply(const u8* at, bool wait_for_all, float (&acc)[1][4]) {
    const int lane = threadIdx.x % 32, row = min(lane / 4, STEP_ROWS_OF_X - 1);
    const u8* h = at + step_bytes(KIND) + row * x_stride(KIND) + lane % 4 * 4;
    const u8* tiles[1] = {at};
    // The step after this one is on its way, in two halves as well.
    const auto wait = [&](auto half) {
        if (wait_for_all)
            cp_async_wait<0>();
        else
            cp_async_wait<3 - decltype(half)::value>();
        __syncwarp();
    };
    multiply_step<KIND, 1>(tiles, h, acc, wait);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    moe_down(const Header* header, const __grid_constant__ DownParams params) {
    extern __shared__ __align__(128) u8 memory[];
    float* products = (float*)memory;
    pdl_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rows = min(ROWS, n_source_rows(header));
#if ROWS == 1
    __shared__ Choice chosen[USED];
    if (warp == 0) choose_row(params.logits, params.scale, chosen);
    __syncthreads();
    const int n_entries = USED;
#else
    __shared__ ExpertRows entries[MAX_ENTRIES];
    __shared__ int n_listed;
    pdl_wait();
    for (int i = threadIdx.x; i < MAX_ENTRIES * int(sizeof(ExpertRows) / 16); i += WARPS * 32)
        ((uint4*)entries)[i] = __ldcg((const uint4*)params.work.entries + i);
    if (threadIdx.x == 0) n_listed = __ldcg(params.work.n_entries);
    __syncthreads();
    const int n_entries = n_listed;
#endif
    const int n_items = n_entries + (SHARED ? (rows + EXPERT_ROWS - 1) / EXPERT_ROWS : 0);
    const int expert_steps = n_steps(DOWN_KIND, params.down.cols);
    const int shared_steps = SHARED ? n_steps(SHARED_DOWN_KIND, params.shared_down.cols) : 0;
    const auto item_at = [&](int index) {
        WorkItem item;
        item.is_shared = SHARED && index >= n_entries;
        if (item.is_shared) {
            item.expert = 0;
            item.first = (index - n_entries) * EXPERT_ROWS;
            item.n = min(EXPERT_ROWS, rows - item.first);
            item.h = params.shared_h + size_t(item.first) * params.shared_down.cols;
        } else {
#if ROWS == 1
            item.expert = chosen[index].expert;
            item.first = index;
            item.n = 1;
#else
            item.expert = entries[index].expert;
            item.first = entries[index].first;
            item.n = entries[index].n;
#endif
            item.h = params.h + size_t(item.first) * params.down.cols;
        }
        return item;
    };
    u8* ring = memory + N_PRODUCTS * 64 + warp * STAGES * STAGE_BYTES;
    const int tile = blockIdx.x;  // of 16 columns, in every matrix
    // Calls `load(kind, to, row_block, item, step)` for a step, if it exists.
    const auto with_step = [&](const WorkStep& at, int stage, const auto& load) {
        if (at.item >= n_items) return;
        const WorkItem item = item_at(at.item);
        const u32 to = shared_address(ring) + stage * STAGE_BYTES;
#if SHARED
        if (item.is_shared)
            load(KindConstant<SHARED_DOWN_KIND>(), to, shared_row_block<SHARED_DOWN_KIND>(params.shared_down, tile),
                 item, at.step);
        else
#endif
            load(KindConstant<DOWN_KIND>(), to,
                 expert_row_block<DOWN_KIND>(params.down, params.table, item.expert, tile), item, at.step);
    };
    const auto first_half = [](auto kind, u32 to, const u8* row_block, const WorkItem&, int step) {
        copy_half<decltype(kind)::value, 0>(to, row_block, blockIdx.x, step);
    };
    const auto second_half = [](auto kind, u32 to, const u8* row_block, const WorkItem&, int step) {
        copy_half<decltype(kind)::value, 1>(to, row_block, blockIdx.x, step);
    };
    const auto rows_of_h = [&](auto kind, u32 to, const u8*, const WorkItem& item, int step) {
        load_h<decltype(kind)::value>(to, item.is_shared ? params.shared_down.cols : params.down.cols, item, step);
    };
    const auto after = [&](const WorkStep& at) {
        const int steps = SHARED && at.item >= n_entries ? shared_steps : expert_steps;
        return at.step + 1 == steps ? WorkStep{at.item + WARPS, 0} : WorkStep{at.item, at.step + 1};
    };
    const auto load = [&](const WorkStep& at, int stage) {
        with_step(at, stage, first_half);
        with_step(at, stage, rows_of_h);
        cp_async_commit();
        with_step(at, stage, second_half);
        cp_async_commit();
    };
    WorkStep next = {warp, 0};
#if ROWS == 1
    const WorkStep first = next, second = after(first);
    with_step(first, 0, first_half);
    with_step(first, 0, second_half);
    with_step(second, 1, first_half);
    with_step(second, 1, second_half);
    next = after(second);
    pdl_wait();
    with_step(first, 0, rows_of_h);
    with_step(second, 1, rows_of_h);
    cp_async_commit();
#else
    for (int i = 0; i < STAGES; i++) {
        load(next, i);
        next = after(next);
    }
#endif
    // What the thread's value of the sum needs beside products; read early.
    float weight[USED], shared_factor = 0.0f, old = 0.0f;
    const auto load_sum = [&](int i) {
        const int row = i / 16;
        if (i >= rows * 16) return;
#pragma unroll
        for (int j = 0; j < USED; j++) {
#if ROWS == 1
            weight[j] = chosen[j].weight;
#else
            weight[j] = __ldcg(&params.work.choices[row * USED + j].weight);
#endif
        }
#if SHARED
        shared_factor = ROWS == 1 ? sigmoid(__ldcg(params.logits + EXPERTS)) : __ldcg(params.work.shared_factor + row);
#endif
#ifdef STORE
        old = 0.0f;
#else
        old = params.out[size_t(row) * WIDTH + blockIdx.x * 16 + i % 16];
#endif
    };
    load_sum(threadIdx.x);
    int stage = 0, n_done = 0;
    for (int index = warp; index < n_items; index += WARPS) {
        const WorkItem item = item_at(index);
        float acc[1][4] = {};
        const int steps = item.is_shared ? shared_steps : expert_steps;
        // Read early: the first of them may come from device memory.
        const u8* row_block = expert_row_block<DOWN_KIND>(params.down, params.table, item.expert, tile);
#if SHARED
        if (item.is_shared) row_block = shared_row_block<SHARED_DOWN_KIND>(params.shared_down, tile);
#endif
        const float factor[2] = {row_factor(row_block, tile, g), row_factor(row_block, tile, g + 8)};
        for (int step = 0; step < steps; step++) {
            const u8* at = ring + stage * STAGE_BYTES;
            const bool wait_for_all = ROWS == 1 && n_done++ < STAGES;
#if SHARED
            if (item.is_shared)
                multiply<SHARED_DOWN_KIND>(at, wait_for_all, acc);
            else
#endif
                multiply<DOWN_KIND>(at, wait_for_all, acc);
            __syncwarp();
            load(next, stage);
            next = after(next);
            stage ^= 1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = 2 * t + i % 2;
            if (column >= item.n) continue;
#if ROWS == 1
            const int product = item.is_shared ? USED : index;
#else
            const int product = item.is_shared ? ROWS * USED + item.first + column : entries[index].pair[column];
#endif
            products[product * 16 + g + i / 2 * 8] = acc[0][i] * factor[i / 2];
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < rows * 16; i += WARPS * 32) {
        if (i >= WARPS * 32) load_sum(i);
        const int row = i / 16, column = i % 16;
        float sum = 0.0f;
#if SHARED
        sum = shared_factor * products[(ROWS * USED + row) * 16 + column];
#endif
#pragma unroll
        for (int j = 0; j < USED; j++) sum = fmaf(weight[j], products[(row * USED + j) * 16 + column], sum);
        params.out[size_t(row) * WIDTH + blockIdx.x * 16 + column] = old + sum;
    }
}
