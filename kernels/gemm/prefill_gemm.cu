// Prefill GEMM for all GPUs from sm_80: x[rows][K] w[N][K]^T, both f16 panels, f32 accumulators.
//
//   prefill_gemm         out = (add ? out : 0) + scale * x w^T
//   prefill_gemm_swiglu  h = f16(scale_out * silu(scale * gate) * (scale * up)); w interleaves 8 rows of
//                        gate and 8 of up
//
// in   x, w  panels (panel_layout.cuh), x of rows_cap (a multiple of 128) rows, w of w_rows (a multiple of 256) rows
// out  out   f32 [rows][stride] of up to four matrices (prefill_output.cuh)
//      h     panels of rows_cap rows, K = w_rows / 2
// grid persistent, one block of eight warps per multiprocessor, a warp has 64 x 32 of a 128 x 128 tile; K-slices of 64
//      through a pipeline of 3 stages filled by cp.async; rows run fastest
// smem 3 x 32 KB     arch sm_80 and up; sm_90a has prefill_gemm_sm90.cu     define SWIGLU (0 or 1: which entry)
// reference cpu::reference::matmul::linear     test crates/cuda/tests/prefill_gemm.rs
#define TILE_ROWS 128
#define TILE_COLUMNS 128
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gemm/panel_layout.cuh"
#include "gemm/prefill_output.cuh"
#include "gemm/prefill_tile_scheduler.cuh"

#define STAGES 3
#define THREADS 256
#define TILE_BYTES (128 * 128)

struct Accumulators {
    float at[4][4][4];  // [m16 tile][n8 tile][mma]
};

// Starts loading K-slice `block` of the tile's rows and columns.
__device__ __forceinline__ void load_stage(const PrefillGemmParams& params, const WorkTile& tile, int block, u32 to) {
    const char* x = params.x + ((u64)block * params.rows_cap + tile.row) * 128;
    const char* w = params.w + ((u64)block * params.w_rows + tile.column) * 128;
#pragma unroll
    for (int i = 0; i < TILE_BYTES / 16 / THREADS; i++) {
        const u32 at = (threadIdx.x + i * THREADS) * 16;
        cp_async_16(to + at, x + at);
        cp_async_16(to + TILE_BYTES + at, w + at);
    }
}

// Adds the K-slice in shared memory at `from`.
__device__ __forceinline__ void mma_stage(Accumulators& acc, u32 from) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 x = from + (warp / 4 * 64 + lane % 16) * 128;
    const u32 w = from + TILE_BYTES + (warp % 4 * 32 + lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 a[4][4], b[2][4];
        const u32 x_chunk = ((2 * k + lane / 16) ^ (lane & 7)) << 4;
        const u32 w_chunk = ((2 * k + lane / 8 % 2) ^ (lane & 7)) << 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ldmatrix_x4(a[i], x + i * 16 * 128 + x_chunk);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            ldmatrix_x4(b[j], w + j * 16 * 128 + w_chunk);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                mma_f16(acc.at[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
}

template <class Epilogue>
__device__ __forceinline__ void gemm(const PrefillGemmParams& params, const Epilogue& epilogue) {
    extern __shared__ __align__(128) char memory[];
    const u32 ring = shared_address(memory);
    const TileScheduler scheduler(params);
    const int rows = params.chunk->rows;
    for (int index = blockIdx.x; index < scheduler.total; index += gridDim.x) {
        const WorkTile tile = scheduler.at(params, index);
        const int blocks = tile.end_k_tile - tile.first_k_tile;
        Accumulators acc = {};
        __syncthreads();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < blocks) {
                load_stage(params, tile, tile.first_k_tile + i, ring + i * 2 * TILE_BYTES);
            }
            cp_async_commit();
        }
        int stage = 0, next_stage = STAGES - 1;
        for (int i = 0; i < blocks; i++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            if (i + STAGES - 1 < blocks) {
                load_stage(params, tile, tile.first_k_tile + i + STAGES - 1, ring + next_stage * 2 * TILE_BYTES);
            }
            cp_async_commit();
            mma_stage(acc, ring + stage * 2 * TILE_BYTES);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        }
        if (tile.split > 0) {
            semaphore_wait(params.semaphores + tile.index, tile.split);
        }
        epilogue(tile, rows, acc);
        if (params.splits > 1) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                release_split(params, tile);
            }
        }
    }
}

#if SWIGLU
struct SwigluEpilogue {
    char* h;
    int rows_cap;
    float scale, scale_out;

    __device__ __forceinline__ void operator()(const WorkTile& tile, int rows, const Accumulators& acc) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int first = (tile.column + warp % 4 * 32) / 16;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = tile.row + warp / 4 * 64 + i * 8 + lane / 4;
            if (row >= rows) {
                break;
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float *gate = acc.at[i / 2][2 * j] + i % 2 * 2, *up = acc.at[i / 2][2 * j + 1] + i % 2 * 2;
                const float a = silu(scale * gate[0]) * (scale * up[0]) * scale_out;
                const float b = silu(scale * gate[1]) * (scale * up[1]) * scale_out;
                *(u32*)(h + panel_chunk(rows_cap, row, first + j) + lane % 4 * 4) = panel_f16x2(a, b);
            }
        }
    }
};
#else
struct StoreEpilogue {
    OutputMatrices matrices;
    float scale;
    bool add;

    __device__ __forceinline__ void operator()(const WorkTile& tile, int rows, const Accumulators& acc) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        int column = tile.column;
        const OutputMatrix to = output_matrix_of(matrices, column);
        column += warp % 4 * 32 + lane % 4 * 2;
        const bool accumulate = add || tile.split > 0, is_full_tile = to.width - column >= 32 && to.stride % 2 == 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = tile.row + warp / 4 * 64 + i * 8 + lane / 4;
            if (row >= rows) {
                break;
            }
            float* at = to.out + (u64)row * to.stride + column;
            if (is_full_tile) {
                float2 old[4] = {};
                if (accumulate) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        old[j] = __ldcg((const float2*)(at + 8 * j));
                    }
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float* pair = acc.at[i / 2][j] + i % 2 * 2;
                    *(float2*)(at + 8 * j) =
                        make_float2(fmaf(scale, pair[0], old[j].x), fmaf(scale, pair[1], old[j].y));
                }
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* pair = acc.at[i / 2][j] + i % 2 * 2;
                store_one(at + 8 * j, scale * pair[0], column + 8 * j < to.width, accumulate);
                store_one(at + 8 * j + 1, scale * pair[1], column + 8 * j + 1 < to.width, accumulate);
            }
        }
    }
};
#endif

#define KERNEL_ATTRIBUTES __global__ void __launch_bounds__(THREADS, 1)

#if SWIGLU
extern "C" KERNEL_ATTRIBUTES prefill_gemm_swiglu(const char* x, const char* w, const PrefillChunk* chunk, int rows_cap,
                                                 int w_rows, int k_tiles, float scale, float scale_out, char* h) {
    gemm(PrefillGemmParams{x, w, chunk, rows_cap, w_rows, k_tiles, 1, 0},
         SwigluEpilogue{h, rows_cap, scale, scale_out});
}
#else
extern "C" KERNEL_ATTRIBUTES prefill_gemm(const char* x, const char* w, const PrefillChunk* chunk, int rows_cap,
                                          int w_rows, int k_tiles, int splits, int* semaphores, float scale, int add,
                                          OutputMatrices to) {
    gemm(PrefillGemmParams{x, w, chunk, rows_cap, w_rows, k_tiles, splits, semaphores},
         StoreEpilogue{to, scale, add != 0});
}
#endif
