// Gate and up projections of the chosen experts and of the shared one, with the gated unit.
//
//   h[position][f] = silu(gate_e[f] . x[row]) * (up_e[f] . x[row])        for every pair (row, expert e)
//
// A block has up to eight rows of one expert and 16 channels: an m16 tile of gate and the same of up, read once for
// all rows. Its warps take steps of K in turns and multiply them by mma.sync (expert_weights.cuh); their sums are added
// in the order of warps. So a row's bits depend on no other row.
//
// A step of one row has no list: every block of it chooses the row's experts from the logits (route.cu).
//
// in   header, work (choose.cuh), logits f32 [ROWS][EXPERTS + SHARED], x (gemm/a16_layout.cuh) for the bucket,
//      stacks gate, up [EXPERTS][F][WIDTH]
//      shared_gate, shared_up [F of the shared expert][WIDTH]
// out  h f16 [ROWS * USED][F], in the order of experts; shared_h f16 [ROWS][F of the shared expert]
// grid (max F / 16, entries + ceil(ROWS / 8) if SHARED) x 256; blocks without work leave by the device-side count
// smem a step of both tiles and of eight rows of x for each warp, dynamic
// defines SOURCE, ROWS, WIDTH, EXPERTS, USED, SHARED, MAX_ENTRIES, GATE_KIND, UP_KIND, SHARED_GATE_KIND,
//         SHARED_UP_KIND, EXPERT_TABLE (expert_weights.cuh)
// arch sm_80 and up     reference cpu::reference     test crates/cuda/tests/moe.rs
#include "common/prelude.cuh"
#include "gemm/a16_layout.cuh"
#include "moe/choose.cuh"
#include "moe/expert_weights.cuh"
#include "norm/source_rows.cuh"

#define N8_TILES ((ROWS + 7) / 8)
#define X_ROWS (ROWS < EXPERT_ROWS ? ROWS : EXPERT_ROWS)
#define TRANSPOSED 17  // floats from a row of x to the next in sums of a tile

struct GateUpParams {
    DecodeWork work;
    const char* x;
    ExpertStack gate, up, shared_gate, shared_up;
    u16 *h, *shared_h;
    const float* logits;
    float scale;       // of the experts' weights
    const u64* table;  // with EXPERT_TABLE: addresses of experts
    u32* uses;         // and how often each was read, [EXPERTS]; counted by one block of each entry
};

// The rows of the block: up to eight of the step.
struct X {
    const char* a16;
    const int* row;  // [n], in shared memory
    int n;
};

// Adds the warp's steps of M tiles of one kind to acc. ring: the warp's part of shared memory.
template <int KIND, int M>
__device__ __forceinline__ void add_steps(u8* ring, const u8* const (&row_block)[M], int tile, int cols,
                                          const X& x_rows, float (&acc)[M][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* x = ring + M * step_bytes(KIND);
    for (int step = warp; step < n_steps(KIND, cols); step += 8) {
        const u8* at[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            at[m] = ring + m * step_bytes(KIND);
            copy_half<KIND, 0>(shared_address(at[m]), row_block[m], tile, step);
        }
        constexpr int PIECES = step_values(KIND) / 8;
        for (int i = lane; i < x_rows.n * PIECES; i += 32) {
            const int row = x_rows.row[i / PIECES], chunk8 = step * PIECES + i % PIECES;
            cp_async_16(
                shared_address(x) + i / PIECES * x_stride(KIND) + i % PIECES * 16,
                x_rows.a16 + (size_t(chunk8 / 8) * N8_TILES + row / 8) * A16_TILE + chunk8 % 8 * 128 + row % 8 * 16);
        }
        cp_async_commit();
#pragma unroll
        for (int m = 0; m < M; m++) copy_half<KIND, 1>(shared_address(at[m]), row_block[m], tile, step);
        cp_async_commit();
        const auto wait = [](auto half) {
            cp_async_wait<1 - decltype(half)::value>();
            __syncwarp();
        };
        multiply_step<KIND, M>(at, x + min(lane / 4, X_ROWS - 1) * x_stride(KIND) + lane % 4 * 4, acc, wait);
        __syncwarp();
    }
}

template <int GATE, int UP>
__device__ __forceinline__ void gate_up(u8* ring, const ExpertStack& gate, const ExpertStack& up,
                                        const u8* const (&row_block)[2], int tile, const X& x, float (&acc)[2][4],
                                        float (&factor)[2][2]) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) factor[m][i] = row_factor(row_block[m], tile, g + 8 * i);
    if constexpr (GATE == UP) {
        add_steps<GATE, 2>(ring, row_block, tile, gate.cols, x, acc);
    } else {
        float one[1][4] = {}, other[1][4] = {};
        const u8 *first[1] = {row_block[0]}, *second[1] = {row_block[1]};
        add_steps<GATE, 1>(ring, first, tile, gate.cols, x, one);
        add_steps<UP, 1>(ring, second, tile, up.cols, x, other);
#pragma unroll
        for (int i = 0; i < 4; i++) acc[0][i] = one[0][i], acc[1][i] = other[0][i];
    }
}

constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int warp_bytes(int kind) { return 2 * step_bytes(kind) + X_ROWS * x_stride(kind); }
constexpr int WARP_BYTES = larger(larger(warp_bytes(GATE_KIND), warp_bytes(UP_KIND)),
                                  SHARED ? larger(warp_bytes(SHARED_GATE_KIND), warp_bytes(SHARED_UP_KIND)) : 0);
static_assert(WARP_BYTES >= 2 * 8 * TRANSPOSED * 4, "sums of a warp take the place of its steps");

extern "C" __global__ void __launch_bounds__(256, X_ROWS < 8 ? 3 : 2)
    moe_gate_up(const Header* header, const __grid_constant__ GateUpParams params) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ int row_of[EXPERT_ROWS];
#if ROWS > 1
    pdl_launch();
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool is_shared = SHARED && blockIdx.y >= MAX_ENTRIES;
    const int rows = min(ROWS, n_source_rows(header));
    pdl_wait();
#if ROWS == 1
    // Behind the wait: decode_down.cu reads the logits before its own.
    pdl_launch();
#endif
    int n, expert = 0, first;
    if (is_shared) {
        first = (blockIdx.y - MAX_ENTRIES) * EXPERT_ROWS;
        n = min(EXPERT_ROWS, rows - first);
        if (n <= 0 || int(blockIdx.x) >= params.shared_gate.tiles) return;
        if (threadIdx.x < EXPERT_ROWS) row_of[threadIdx.x] = first + threadIdx.x;
    } else {
#if ROWS == 1
        __shared__ Choice chosen[USED];
        if (warp == 0) choose_row(params.logits, params.scale, chosen);
        __syncthreads();
        n = 1;
        first = blockIdx.y;
        if (threadIdx.x == 0) row_of[0] = 0;
        expert = chosen[blockIdx.y].expert;
        if (int(blockIdx.x) >= params.gate.tiles) return;
#else
        // Read together; entries beyond the count may hold anything.
        const ExpertRows* entry = params.work.entries + blockIdx.y;
        const int n_entries = __ldcg(params.work.n_entries);
        expert = __ldcg(&entry->expert);
        const int pair = __ldcg(entry->pair + threadIdx.x % EXPERT_ROWS);
        n = __ldcg(&entry->n);
        first = __ldcg(&entry->first);
        if (int(blockIdx.y) >= n_entries || int(blockIdx.x) >= params.gate.tiles) return;
        if (threadIdx.x < EXPERT_ROWS) row_of[threadIdx.x] = pair / USED;
#endif
#if EXPERT_TABLE
        if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(params.uses + expert, 1u);
#endif
    }
    __syncthreads();
    const X x = {params.x, row_of, n};
    float acc[2][4] = {}, factor[2][2];
    u8* own = ring + warp * WARP_BYTES;
    const int tile = blockIdx.x;
#if SHARED
    if (is_shared) {
        const u8* row_block[2] = {shared_row_block<SHARED_GATE_KIND>(params.shared_gate, tile),
                                  shared_row_block<SHARED_UP_KIND>(params.shared_up, tile)};
        gate_up<SHARED_GATE_KIND, SHARED_UP_KIND>(own, params.shared_gate, params.shared_up, row_block, tile, x, acc,
                                                  factor);
    } else
#endif
    {
        const u8* row_block[2] = {expert_row_block<GATE_KIND>(params.gate, params.table, expert, tile),
                                  expert_row_block<UP_KIND>(params.up, params.table, expert, tile)};
        gate_up<GATE_KIND, UP_KIND>(own, params.gate, params.up, row_block, tile, x, acc, factor);
    }
    float* sums = (float*)own;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[(m * 8 + 2 * t + i % 2) * TRANSPOSED + g + i / 2 * 8] = acc[m][i] * factor[m][i / 2];
    __syncthreads();
    const int f = threadIdx.x % 16, column = threadIdx.x / 16;
    if (column >= n) return;
    float value[2] = {0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < 8; w++)
#pragma unroll
        for (int m = 0; m < 2; m++)
            value[m] += *(const float*)(ring + w * WARP_BYTES + ((m * 8 + column) * TRANSPOSED + f) * 4);
    const int width = 16 * (is_shared ? params.shared_gate.tiles : params.gate.tiles);
    u16* to = (is_shared ? params.shared_h : params.h) + size_t(first + column) * width + blockIdx.x * 16 + f;
    *to = f32_to_f16(clamp_to_f16(silu(value[0]) * value[1]));
}
