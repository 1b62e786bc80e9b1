// Prefill GEMM for sm_90a: x[rows][K] w[N][K]^T, both f16 panels, f32 accumulators.
//
//   prefill_gemm         out = (add ? out : 0) + scale * x w^T
//   prefill_gemm_swiglu  h = f16(scale_out * silu(scale * gate) * (scale * up)); w interleaves 8 rows of
//                        gate and 8 of up
//
// in   x, w  panels (panel_layout.cuh), x of rows_cap rows, w of w_rows (a multiple of 256) rows
// out  out   f32 [rows][stride] of up to four matrices (prefill_output.cuh)
//      h     panels of rows_cap rows, K = w_rows / 2
// grid persistent, one block of three warpgroups per multiprocessor: a producer fills a pipeline of 4 stages with
//      K-slices of 64 by bulk copies, two consumers multiply 64 x 256 each of a 128 x 256 tile by wgmma; rows run
//      fastest
// smem 4 x 48 KB, 8 x 4 KB of epilogue staging, barriers     arch sm_90a     define SWIGLU (0 or 1: which entry)
// reference cpu::reference::matmul::linear     test crates/cuda/tests/prefill_gemm.rs
#define TILE_ROWS 128
#define TILE_COLUMNS 256
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gemm/panel_layout.cuh"
#include "gemm/prefill_output.cuh"
#include "gemm/prefill_tile_scheduler.cuh"
#include "common/wgmma_sm90.cuh"
#include "common/sync.cuh"

#define STAGES 4
#define STAGING (16 * 64 * 4)  // bytes per warp: 16 rows, 64 columns
#define X_BYTES (TILE_ROWS * 128)
#define W_BYTES (TILE_COLUMNS * 128)
#define STAGE_BYTES (X_BYTES + W_BYTES)

__device__ __forceinline__ void producer(const PrefillGemmParams& params, u32 ring, const Pipeline<STAGES>& pipeline) {
    const TileScheduler scheduler(params);
    const u64 x_panel = (u64)params.rows_cap * 128;
    const u64 w_panel = (u64)params.w_rows * 128;
    PipelineState<STAGES> state = {0, 1};
    for (int index = blockIdx.x; index < scheduler.total; index += gridDim.x) {
        const WorkTile tile = scheduler.at(params, index);
        const char* x = params.x + (u64)tile.row * 128;
        const char* w = params.w + (u64)tile.column * 128;
        for (int block = tile.first_k_tile; block < tile.end_k_tile; block++) {
            const u32 to = ring + state.stage * STAGE_BYTES, full = pipeline.full_barrier(state.stage);
            pipeline.producer_acquire(state.stage, state.parity);
            pipeline.producer_expect_tx(state.stage, STAGE_BYTES);
            cp_async_bulk(to, x + block * x_panel, X_BYTES, full);
            cp_async_bulk(to + X_BYTES, w + block * w_panel, W_BYTES, full);
            state.advance();
        }
    }
}

template <class Epilogue>
__device__ __forceinline__ void consumer(const PrefillGemmParams& params, u32 ring, const Pipeline<STAGES>& pipeline,
                                         const Epilogue& epilogue) {
    const TileScheduler scheduler(params);
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 128;
    const int rows = params.chunk->rows;
    PipelineState<STAGES> state = {0, 0};
    for (int index = blockIdx.x; index < scheduler.total; index += gridDim.x) {
        const WorkTile tile = scheduler.at(params, index);
        float acc[128];
        int previous = -1;
        for (int block = tile.first_k_tile; block < tile.end_k_tile; block++) {
            const u32 at = ring + state.stage * STAGE_BYTES;
            const u64 x = wgmma_desc(at + group * (X_BYTES / 2)), w = wgmma_desc(at + X_BYTES);
            pipeline.consumer_wait(state.stage, state.parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                wgmma_m64n256(acc, x + 2 * k, w + 2 * k, block > tile.first_k_tile || k > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (previous >= 0 && lane == 0) {
                pipeline.consumer_release(previous);
            }
            previous = state.stage;
            state.advance();
        }
        wgmma_wait<0>();
        if (previous >= 0 && lane == 0) {
            pipeline.consumer_release(previous);
        }
        if (params.splits > 1) {
            if (tile.split > 0) {
                semaphore_wait(params.semaphores + tile.index, tile.split);
            }
        }
        epilogue(tile, tile.row + group * 64 + lane / 32 * 16, rows, ring + STAGES * STAGE_BYTES + 128, acc);
        if (params.splits > 1) {
            named_barrier_sync<1, 256>();
            if (threadIdx.x == 128) {
                __threadfence();
                release_split(params, tile);
            }
        }
    }
}

template <class Epilogue>
__device__ __forceinline__ void gemm(const PrefillGemmParams& params, const Epilogue& epilogue) {
    extern __shared__ __align__(1024) char memory[];
    const u32 ring = shared_address(memory);
    const u32 barriers = ring + STAGES * STAGE_BYTES;
    const Pipeline<STAGES> pipeline = {barriers, barriers + STAGES * 8};
    if (threadIdx.x == 0) {
        pipeline.init(1, 2);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<56>();
        if (threadIdx.x == 0) {
            producer(params, ring, pipeline);
        }
    } else {
        setmaxnreg_inc<224>();
        consumer(params, ring, pipeline, epilogue);
    }
}

#if SWIGLU
struct SwigluEpilogue {
    char* h;
    int rows_cap;
    float scale, scale_out;

    __device__ __forceinline__ void operator()(const WorkTile& tile, int first_row, int rows, u32,
                                               float (&acc)[128]) const {
        const int lane = threadIdx.x % 32, row = first_row + lane / 4, first = tile.column / 16 + lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int chunk = 0; chunk < 16; chunk += 4) {
                u32 v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float *gate = acc + 8 * (chunk + j) + 2 * half, *up = gate + 4;
                    v[j] = panel_f16x2(gated(gate[0], up[0]), gated(gate[1], up[1]));
                }
                quad_transpose(v);
                if (row + 8 * half < rows) {
                    *(uint4*)(h + panel_chunk(rows_cap, row + 8 * half, first + chunk)) =
                        make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
        }
    }

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

    // A warp stores its 16 rows in blocks of 64 columns through its staging in shared memory, so that stores are whole
    // lines.
    __device__ __forceinline__ void operator()(const WorkTile& tile, int first, int rows, u32 staging,
                                               float (&acc)[128]) const {
        int column = tile.column;
        const OutputMatrix to = output_matrix_of(matrices, column);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        const bool accumulate = add || tile.split > 0;
        const bool is_full_tile = to.width - column >= TILE_COLUMNS && to.stride % 4 == 0;
        const u32 warp_staging = staging + warp * STAGING;
#pragma unroll
        for (int column_block = 0; column_block < 4; column_block++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = lane / 4 + 8 * half;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float* v = acc + 4 * (8 * column_block + j) + 2 * half;
                    const u32 chunk = (2 * j + lane % 4 / 2) ^ (row & 7) * 2;
                    asm volatile(
                        "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(warp_staging + row * 256 + chunk * 16 + lane % 2 * 8),
                        "f"(scale * v[0]), "f"(scale * v[1])
                        : "memory");
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int row = 2 * i + lane / 16, at = column + column_block * 64 + lane % 16 * 4;
                const u32 chunk = (lane % 16) ^ (row & 7) * 2;
                float4 v;
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                             : "r"(warp_staging + row * 256 + chunk * 16)
                             : "memory");
                if (first + row < rows) {
                    store_4(to, first + row, at, v, is_full_tile, accumulate);
                }
            }
            __syncwarp();
        }
    }

    __device__ __forceinline__ void store_4(const OutputMatrix& to, int row, int column, const float4& v,
                                            bool is_full_tile, bool accumulate) const {
        float* at = to.out + (u64)row * to.stride + column;
        if (!is_full_tile) {
            store_one(at, v.x, column < to.width, accumulate);
            store_one(at + 1, v.y, column + 1 < to.width, accumulate);
            store_one(at + 2, v.z, column + 2 < to.width, accumulate);
            store_one(at + 3, v.w, column + 3 < to.width, accumulate);
        } else if (accumulate) {
            red_add_v4(at, v);
        } else {
            *(float4*)at = v;
        }
    }
};
#endif

#define KERNEL_ATTRIBUTES __global__ void __launch_bounds__(384, 1)
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
