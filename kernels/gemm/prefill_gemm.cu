// Prefill GEMM for all GPUs from sm_80: x[rows][K] w[N][K]^T, both f16 panels, f32 accumulators.
//
//   prefill_gemm         out = (add ? out : 0) + scale * x w^T
//   prefill_gemm_swiglu  h = f16(scale_out * silu(scale * gate) * (scale * up)); w interleaves 8 rows of
//                        gate and 8 of up
//
// in   x, w  panels (panel_layout.cuh), x of rows_cap (a multiple of 128) rows, w of w_rows (a multiple of 256) rows
// out  out   f32 [rows][stride] of up to four matrices (prefill_output.cuh)
//      h     panels of rows_cap rows, K = w_rows / 2
// grid persistent, one block of eight warps per multiprocessor, a warp has 64 rows and a quarter of the columns of a
//      tile; K-slices of 32 through a pipeline filled by cp.async, which runs on into the next tile; rows run fastest
// smem 96 KB: 4 stages of 24 KB for 256 columns, 6 of 16 KB for 128     arch sm_80 and up; sm_90a has
//      prefill_gemm_sm90.cu     define SWIGLU (0 or 1: which entry), TILE_COLUMNS (128 or 256)
// reference cpu::reference::matmul::linear     test crates/cuda/tests/prefill_gemm.rs
#define TILE_ROWS 128
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gemm/panel_layout.cuh"
#include "gemm/prefill_output.cuh"
#include "gemm/prefill_tile_scheduler.cuh"

#define THREADS 256
#define N8_TILES (TILE_COLUMNS / 32)  // of a warp
#define X_BYTES (TILE_ROWS * 64)
#define STAGE_BYTES ((TILE_ROWS + TILE_COLUMNS) * 64)
#define STAGES (96 * 1024 / STAGE_BYTES)

struct Accumulators {
    float at[4][N8_TILES][4];  // [m16 tile][n8 tile][mma]
};

// A stage: 64 bytes of each row of x, then of w. The four 16-byte chunks of a row lie at (chunk ^ (row / 2 & 3)), so
// that eight rows of a chunk are in different banks. In a panel the half of a row is 64 bytes too: bit 6 of the address
// is that half, exclusive or bit 2 of the row.
//
// Runs ahead of the products by STAGES - 1 K-slices, over the tiles of this block in order.
struct Loader {
    WorkTile tile;
    int index, half_slice, stage;
    u32 from, to;  // of this thread, within a slice of x or w

    __device__ __forceinline__ Loader(const PrefillGemmParams& params, const TileScheduler& scheduler) {
        const u32 row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        from = row * 128 + ((chunk ^ (row & 7)) << 4);
        to = row * 64 + ((chunk ^ (row / 2 & 3)) << 4);
        index = blockIdx.x;
        stage = 0;
        start(params, scheduler);
    }

    __device__ __forceinline__ void start(const PrefillGemmParams& params, const TileScheduler& scheduler) {
        if (index < scheduler.total) {
            tile = scheduler.at(params, index);
            half_slice = 2 * tile.first_k_tile;
        }
    }

    // Starts the copy of the next K-slice, if there is one.
    __device__ __forceinline__ void load(const PrefillGemmParams& params, const TileScheduler& scheduler, u32 ring) {
        if (index < scheduler.total) {
            const u32 at = from ^ (half_slice & 1) * 64, stage_to = ring + stage * STAGE_BYTES + to;
            const char* x = params.x + ((u64)(half_slice / 2) * params.rows_cap + tile.row) * 128 + at;
            const char* w = params.w + ((u64)(half_slice / 2) * params.w_rows + tile.column) * 128 + at;
#pragma unroll
            for (int i = 0; i < TILE_ROWS / 64; i++) {
                cp_async_16(stage_to + i * 64 * 64, x + i * 64 * 128);
            }
#pragma unroll
            for (int i = 0; i < TILE_COLUMNS / 64; i++) {
                cp_async_16(stage_to + X_BYTES + i * 64 * 64, w + i * 64 * 128);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (++half_slice == 2 * tile.end_k_tile) {
                index += gridDim.x;
                start(params, scheduler);
            }
        }
        cp_async_commit();
    }
};

// Fragments of 16 values of K.
struct Fragments {
    u32 x[4][4], w[N8_TILES / 2][4];

    // k: 0 or 1, the half of the stage at `from`.
    __device__ __forceinline__ void load(u32 from, int k) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const u32 x_row = warp / 4 * 64 + lane % 16, w_row = warp % 4 * (8 * N8_TILES) + lane / 16 * 8 + lane % 8;
        const u32 x_from = from + x_row * 64 + (((2 * k + lane / 16) ^ (x_row / 2 & 3)) << 4);
        const u32 w_from = from + X_BYTES + w_row * 64 + (((2 * k + lane / 8 % 2) ^ (w_row / 2 & 3)) << 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ldmatrix_x4(x[i], x_from + i * 16 * 64);
        }
#pragma unroll
        for (int j = 0; j < N8_TILES / 2; j++) {
            ldmatrix_x4(w[j], w_from + j * 16 * 64);
        }
    }

    __device__ __forceinline__ void multiply(Accumulators& acc) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < N8_TILES; j++) {
                mma_f16(acc.at[i][j], x[i][0], x[i][1], x[i][2], x[i][3], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
};

template <class Epilogue>
__device__ __forceinline__ void gemm(const PrefillGemmParams& params, const Epilogue& epilogue) {
    extern __shared__ __align__(128) char memory[];
    const u32 ring = shared_address(memory);
    const TileScheduler scheduler(params);
    const int rows = params.chunk->rows;
    Loader loader(params, scheduler);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        loader.load(params, scheduler, ring);
    }
    int stage = 0;
    for (int index = blockIdx.x; index < scheduler.total; index += gridDim.x) {
        const WorkTile tile = scheduler.at(params, index);
        const int slices = 2 * (tile.end_k_tile - tile.first_k_tile);
        Accumulators acc = {};
        Fragments fragments[2];
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fragments[0].load(ring + stage * STAGE_BYTES, 0);
        for (int slice = 0; slice < slices; slice++) {
            // The stage of the slice before this one: its last fragments were read before the barrier.
            loader.load(params, scheduler, ring);
            fragments[1].load(ring + stage * STAGE_BYTES, 1);
            fragments[0].multiply(acc);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            // Behind the last slice this reads the next tile's first one, or nothing that is used.
            fragments[0].load(ring + stage * STAGE_BYTES, 0);
            fragments[1].multiply(acc);
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
        const int first = (tile.column + warp % 4 * (8 * N8_TILES)) / 16;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = tile.row + warp / 4 * 64 + i * 8 + lane / 4;
            u32 v[N8_TILES / 2];
#pragma unroll
            for (int j = 0; j < N8_TILES / 2; j++) {
                const float *gate = acc.at[i / 2][2 * j] + i % 2 * 2, *up = acc.at[i / 2][2 * j + 1] + i % 2 * 2;
                v[j] = panel_f16x2(gated(gate[0], up[0]), gated(gate[1], up[1]));
            }
#if TILE_COLUMNS == 256
            quad_transpose(v);
            if (row < rows) {
                *(uint4*)(h + panel_chunk(rows_cap, row, first + lane % 4)) = make_uint4(v[0], v[1], v[2], v[3]);
            }
#else
            if (row < rows) {
#pragma unroll
                for (int j = 0; j < N8_TILES / 2; j++) {
                    *(u32*)(h + panel_chunk(rows_cap, row, first + j) + lane % 4 * 4) = v[j];
                }
            }
#endif
        }
    }

    // By the approximate quotient: an exact one branches, and the result is rounded to f16.
    __device__ __forceinline__ float gated(float gate, float up) const {
        gate *= scale;
        return __fdividef(gate, 1.0f + __expf(-gate)) * (scale * up) * scale_out;
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
        column += warp % 4 * (8 * N8_TILES);
        const bool accumulate = add || tile.split > 0;
        const int first = tile.row + warp / 4 * 64 + lane / 4;
        if (to.width - column >= 8 * N8_TILES && to.stride % 4 == 0) {
            store_full(to, first, column, rows, acc, accumulate);
            return;
        }
        column += lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = first + i * 8;
            if (row >= rows) {
                break;
            }
            float* at = to.out + (u64)row * to.stride + column;
#pragma unroll
            for (int j = 0; j < N8_TILES; j++) {
                const float* pair = acc.at[i / 2][j] + i % 2 * 2;
                store_one(at + 8 * j, scale * pair[0], column + 8 * j < to.width, accumulate);
                store_one(at + 8 * j + 1, scale * pair[1], column + 8 * j + 1 < to.width, accumulate);
            }
        }
    }

    // Neighbouring lanes exchange pairs of two n8 tiles, so that each has four columns of one: a quad moves 64 bytes of
    // a row. Old values of 32 rows are loaded before the first of them is stored, as stores could alias.
    __device__ __forceinline__ void store_full(const OutputMatrix& to, int first, int column, int rows,
                                               const Accumulators& acc, bool accumulate) const {
        const int lane = threadIdx.x % 32, is_odd = lane % 2;
        column += 8 * is_odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 old[4][N8_TILES / 2] = {};
            const int remaining = rows - (first + half * 32);
            float* at = to.out + (u64)(first + half * 32) * to.stride + column;
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < N8_TILES / 2; j++) {
                    if (accumulate && i * 8 < remaining) {
                        old[i][j] = __ldcg((const float4*)(at + i * 8 * to.stride + 16 * j));
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int m = half * 2 + i / 2, e = i % 2 * 2;
#pragma unroll
                for (int j = 0; j < N8_TILES / 2; j++) {
                    const float *even = acc.at[m][2 * j] + e, *odd = acc.at[m][2 * j + 1] + e;
                    const float x = __shfl_xor_sync(WARP_ALL, is_odd ? even[0] : odd[0], 1);
                    const float y = __shfl_xor_sync(WARP_ALL, is_odd ? even[1] : odd[1], 1);
                    const float4 v = is_odd ? make_float4(x, y, odd[0], odd[1]) : make_float4(even[0], even[1], x, y);
                    const float4& o = old[i][j];
                    if (i * 8 < remaining) {
                        *(float4*)(at + i * 8 * to.stride + 16 * j) = make_float4(
                            fmaf(scale, v.x, o.x), fmaf(scale, v.y, o.y), fmaf(scale, v.z, o.z), fmaf(scale, v.w, o.w));
                    }
                }
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
