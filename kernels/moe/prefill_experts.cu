// Products of a chunk's rows with their experts, grouped by expert; weights are dequantised in registers.
//
//   moe_prefill_gate_up  h[position][f] = silu(gate_e[f] . x[row]) * (up_e[f] . x[row])
//   moe_prefill_down     out[pair][n] = down_e[n] . h[position]
//
// A block has a tile of up to 64 rows of one expert (expert_tiles.cuh) and two row blocks of weights: 128 channels of
// gate and of up, or 256 columns of down. A warp has an m16 tile of each. Tiles of few rows take fewer MMAs: the number
// of n8 tiles is 1, 2, 4 or 8. K runs through a ring of slices filled by cp.async. Every sum over K has the order of
// gemm/mma_slice.cuh, whatever rows share the tile.
//
// in   work; x as panels (gemm/panel_layout.cuh) of rows_cap rows, or h f16 [pairs][F]; stacks gate, up, down
// out  h f16 [pairs][F], in the order of experts; out f32 [pairs][columns]
// grid (F / 128, tiles) or (columns / 256, tiles) x 256; blocks beyond the device-side count leave
// smem STAGES slices of weights and x, dynamic
// defines DOWN (0: gate and up; 1: down), USED, FIRST_KIND, SECOND_KIND (equal for down), STAGES,
//         EXPERT_TABLE (expert_weights.cuh)
// arch sm_80 and up     reference cpu::reference     test crates/cuda/tests/moe.rs
#include "common/prelude.cuh"
#include "gemm/mma_slice.cuh"
#include "gemm/panel_layout.cuh"
#include "moe/expert_tiles.cuh"
#include "moe/expert_weights.cuh"

#define THREADS 256

struct PrefillExpertsParams {
    PrefillWork work;
    const char* x;  // panels, or h
    ExpertStack first, second;
    int rows_cap;  // of panels
    int width;     // of the output
    void* out;
    const u64* table;  // with EXPERT_TABLE: addresses of experts
};

// Row of x of each row of the tile: of the chunk, or a position.
__shared__ int source_row[TILE_ROWS];

// Starts to load slice SLICE of unit `unit`: row blocks of weights, then x in the layout of gemm/a16_layout.cuh.
template <int KIND, int M, int N>
__device__ __forceinline__ void load_slice(const PrefillExpertsParams& params, u32 to, const u8* const (&row_block)[M],
                                           int unit, int slice, int cols) {
    const int bytes = 8 * (slice ? slice_tile_bytes(KIND, 1) : slice_tile_bytes(KIND, 0));
#pragma unroll
    for (int m = 0; m < M; m++) {
        const u8* from =
            row_block[m] + 512 + size_t(unit) * unit_tile_bytes(KIND) * 8 + (slice ? 8 * slice_tile_bytes(KIND, 0) : 0);
        for (int i = threadIdx.x; i < bytes / 16; i += THREADS) cp_async_16(to + m * bytes + i * 16, from + i * 16);
    }
    to += M * 8 * slice_tile_bytes(KIND, 0);
    constexpr int CHUNKS = slice_chunks(KIND), PIECES = 8 * CHUNKS;  // of 16 bytes in a row
    const int first_chunk8 = (unit * unit_slices(KIND) + slice) * PIECES;
#pragma unroll
    for (int i = 0; i < (N * 8 * PIECES + THREADS - 1) / THREADS; i++) {
        // Two neighbours of eight rows: whole sectors in device memory, few bank conflicts here.
        const int piece = threadIdx.x + i * THREADS, rest = piece >> 4;
        const int c = (piece & 1) + rest % (PIECES / 2) * 2, r = (piece >> 1 & 7) + rest / (PIECES / 2) * 8;
        if (N * 8 * PIECES % THREADS && r >= 8 * N) break;
        const int row = source_row[r];
        const char* from = DOWN ? params.x + size_t(row) * cols * 2 + (first_chunk8 + c) * 16
                                : params.x + panel_chunk(params.rows_cap, row, first_chunk8 + c);
        cp_async_16(to + (c / 8 * N + r / 8) * A16_TILE + c % 8 * 128 + r % 8 * 16, from);
    }
}

// acc += all of K.
template <int KIND, int M, int N>
__device__ __forceinline__ void accumulate(const PrefillExpertsParams& params, const u8* ring, int stage_bytes,
                                           const u8* const (&row_block)[M], int cols, float (&acc)[M][N][4]) {
    constexpr int SLICES = unit_slices(KIND);
    const int n_slices = cols / (64 * slice_chunks(KIND)), warp = threadIdx.x / 32;
    const auto load = [&](int index, int stage) {
        if (index < n_slices)
            load_slice<KIND, M, N>(params, shared_address(ring) + stage * stage_bytes, row_block, index / SLICES,
                                   index % SLICES, cols);
        cp_async_commit();
    };
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) load(i, i);
    TileDequantizer<KIND> tile[M];
    int stage = 0;
    const auto run_slice = [&](auto slice, int index) {
        constexpr int SLICE = decltype(slice)::value;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(index + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        const u8 *at = ring + stage * stage_bytes, *w[M];
#pragma unroll
        for (int m = 0; m < M; m++) w[m] = at + (m * 8 + warp) * slice_tile_bytes(KIND, SLICE);
        mma_slice<KIND, M, N, SLICE>(tile, w, at + M * 8 * slice_tile_bytes(KIND, 0), acc);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    };
    for (int index = 0; index < n_slices; index += SLICES) {
        run_slice(SliceConstant<0>(), index);
        if constexpr (SLICES == 2) run_slice(SliceConstant<1>(), index + 1);
    }
    cp_async_wait<0>();
}

constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int kind_stage_bytes(int kind, int m) {
    return m * 8 * slice_tile_bytes(kind, 0) + slice_chunks(kind) * 8 * A16_TILE;
}
constexpr int STAGE_BYTES = FIRST_KIND == SECOND_KIND
                                ? kind_stage_bytes(FIRST_KIND, 2)
                                : larger(kind_stage_bytes(FIRST_KIND, 1), kind_stage_bytes(SECOND_KIND, 1));

// The product of a tile of up to 8 N rows with both row blocks.
template <int N>
__device__ __forceinline__ void run_tile(const PrefillExpertsParams& params, const ExpertTile& tile, const u8* ring) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Tiles of two row blocks; the second of down may not exist.
    const int m16 = (DOWN ? 16 : 8) * blockIdx.x;
    const bool has_second = !DOWN || 2 * int(blockIdx.x) + 1 < params.first.tiles / 8;
    const u8* row_block[2] = {
        expert_row_block<FIRST_KIND>(params.first, params.table, tile.expert, m16),
        expert_row_block<SECOND_KIND>(params.second, params.table, tile.expert, m16 + (DOWN && has_second ? 8 : 0))};
    float acc[2][N][4] = {};
    if constexpr (FIRST_KIND == SECOND_KIND) {
        accumulate<FIRST_KIND, 2, N>(params, ring, STAGE_BYTES, row_block, params.first.cols, acc);
    } else {
        float one[1][N][4] = {}, other[1][N][4] = {};
        const u8 *first[1] = {row_block[0]}, *second[1] = {row_block[1]};
        accumulate<FIRST_KIND, 1, N>(params, ring, STAGE_BYTES, first, params.first.cols, one);
        accumulate<SECOND_KIND, 1, N>(params, ring, STAGE_BYTES, second, params.second.cols, other);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[0][n][i] = one[0][n][i], acc[1][n][i] = other[0][n][i];
    }
    float factor[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) factor[m][i] = row_factor(row_block[m], warp, g + 8 * i);
#if DOWN
    float* out = (float*)params.out;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = n * 8 + 2 * t + i;
            if (row >= tile.n) continue;
            float* to =
                out + size_t(params.work.pair_at[tile.first + row]) * params.width + blockIdx.x * 256 + warp * 16 + g;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                to[half * 8] = acc[0][n][half * 2 + i] * factor[0][half];
                if (has_second) to[128 + half * 8] = acc[1][n][half * 2 + i] * factor[1][half];
            }
        }
#else
    u16* out = (u16*)params.out;
    const bool is_odd = g & 1;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float v[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float gate = acc[0][n][half * 2 + i] * factor[0][half],
                            up = acc[1][n][half * 2 + i] * factor[1][half];
                v[i] = silu(gate) * up;
            }
            // Lanes of channels g and g + 1 exchange, so that each stores both of one row.
            const float received = __shfl_xor_sync(WARP_ALL, is_odd ? v[0] : v[1], 4);
            const u32 pair = is_odd ? a16_f16x2(received, v[1]) : a16_f16x2(v[0], received);
            const int row = n * 8 + 2 * t + is_odd;
            if (row < tile.n)
                *(u32*)(out + size_t(tile.first + row) * params.width + blockIdx.x * 128 + warp * 16 + half * 8 +
                        (g & ~1)) = pair;
        }
#endif
}

#if DOWN
#define ENTRY moe_prefill_down
#else
#define ENTRY moe_prefill_gate_up
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(const __grid_constant__ PrefillExpertsParams params) {
    extern __shared__ __align__(128) u8 ring[];
    if (int(blockIdx.y) >= *params.work.n_tiles) return;
    const ExpertTile tile = params.work.tiles[blockIdx.y];
    if (threadIdx.x < TILE_ROWS) {
        // Rows beyond the last repeat it; nobody reads their products.
        const int position = tile.first + min(int(threadIdx.x), tile.n - 1);
        source_row[threadIdx.x] = DOWN ? position : params.work.pair_at[position] / USED;
    }
    if (tile.n <= 8)
        run_tile<1>(params, tile, ring);
    else if (tile.n <= 16)
        run_tile<2>(params, tile, ring);
    else if (tile.n <= 32)
        run_tile<4>(params, tile, ring);
    else
        run_tile<8>(params, tile, ring);
}
