// Prefill matrix product for Hopper: x[rows][K] · w[N][K]^T, both as f16 panels, f32 sums.
//
//   gemm_out     out = scale * x w^T             gemm_add     out += scale * x w^T
//   gemm_swiglu  h = f16(scale_out * silu(scale * gate) * (scale * up)), columns of w interleaved by eights: gate, up
//
// in   x, w    panels (panel.cuh), x of rows_cap rows, w of w_rows (a multiple of 256) rows
// out  out     f32 [rows][stride] of up to four segments (target.cuh);  h  panels of rows_cap rows, K = w_rows / 2
// grid persistent, one block of three warpgroups per multiprocessor: one keeps bulk copies of K-slices of 64 going
//      through a ring of 4, two multiply 64 x 256 each of a 128 x 256 tile. Blocks in clusters of CLUSTER (1 or 2)
//      work at the same columns and neighbouring rows, and each fetches its share of w for both. Rows run fastest.
// smem 4 x 48 KB + barriers;  arch sm_90a;  base path gemm.cu
// ref  cpu::reference::matmul::linear;  test prefill::gemm_matches_reference
#ifndef CLUSTER
#define CLUSTER 2
#endif
#define TILE_ROWS 128
#define TILE_COLUMNS 256
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "prefill/panel.cuh"
#include "prefill/target.cuh"
#include "prefill/units.cuh"
#include "prefill/wgmma.cuh"

#define STAGES 4
#define X_BYTES (TILE_ROWS * 128)
#define W_BYTES (TILE_COLUMNS * 128)
#define STAGE_BYTES (X_BYTES + W_BYTES)

__device__ __forceinline__ void produce(const Work &work, u32 ring, u32 full, u32 empty, int rank) {
    const Units units(work);
    const u64 x_panel = (u64)work.rows_cap * 128;
    const u64 w_panel = (u64)work.w_rows * 128;
    int stage = 0;
    u32 parity = 1;
    for (int index = blockIdx.x / CLUSTER; index < units.total; index += gridDim.x / CLUSTER) {
        const Unit unit = units.at(work, index, rank);
        const int row = min(unit.row, work.rows_cap - TILE_ROWS);
        const char *x = work.x + (u64)row * 128;
        const char *w = work.w + (u64)unit.column * 128;
        for (int block = unit.first_block; block < unit.end_block; block++) {
            const u32 to = ring + stage * STAGE_BYTES, bar = full + stage * 8;
            mbarrier_wait(empty + stage * 8, parity);
            mbarrier_expect(bar, STAGE_BYTES);
            bulk_copy(to, x + block * x_panel, X_BYTES, bar);
#if CLUSTER == 1
            bulk_copy(to + X_BYTES, w + block * w_panel, W_BYTES, bar);
#else
            const u32 part = W_BYTES / CLUSTER * rank;
            bulk_copy_to_all(to + X_BYTES + part, w + block * w_panel + part, W_BYTES / CLUSTER, bar,
                             (1 << CLUSTER) - 1);
#endif
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
}

// Lets the producers fill a stage again; one thread of each warpgroup calls it.
__device__ __forceinline__ void release(u32 bar) {
#if CLUSTER == 1
    mbarrier_arrive(bar);
#else
#pragma unroll
    for (int block = 0; block < CLUSTER; block++) { barrier_arrive_at(bar, block); }
#endif
}

template <class Store>
__device__ __forceinline__ void consume(const Work &work, u32 ring, u32 full, u32 empty, int rank,
                                        const Store &store) {
    const Units units(work);
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 128;
    const int rows = work.chunk->rows;
    int stage = 0;
    u32 parity = 0;
    for (int index = blockIdx.x / CLUSTER; index < units.total; index += gridDim.x / CLUSTER) {
        const Unit unit = units.at(work, index, rank);
        float sums[128];
        int previous = -1;
        for (int block = unit.first_block; block < unit.end_block; block++) {
            const u32 at = ring + stage * STAGE_BYTES;
            const u64 x = operand(at + group * (X_BYTES / 2)), w = operand(at + X_BYTES);
            mbarrier_wait(full + stage * 8, parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                wgmma_256(sums, x + 2 * k, w + 2 * k, block > unit.first_block || k > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (previous >= 0 && lane == 0) { release(empty + previous * 8); }
            previous = stage;
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        wgmma_wait<0>();
        if (previous >= 0 && lane == 0) { release(empty + previous * 8); }
        if (work.splits > 1) {
            if (unit.part > 0) { await_turn(work.turns, unit.tile, unit.part); }
        }
        const int row = unit.row + group * 64 + lane / 32 * 16 + lane % 32 / 4;
        store(unit, row, rows, lane, sums);
        if (work.splits > 1) {
            asm volatile("bar.sync 1, 256;" ::: "memory");
            if (threadIdx.x == 128) {
                __threadfence();
                pass_turn(work.turns, unit.tile, unit.part, work.splits);
            }
        }
    }
}

template <class Store> __device__ __forceinline__ void gemm(const Work &work, const Store &store) {
    extern __shared__ __align__(1024) char memory[];
    const u32 ring = shared_address(memory);
    const u32 full = ring + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    int rank = 0;
#if CLUSTER > 1
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + i * 8, 1);
            mbarrier_init(empty + i * 8, 2 * CLUSTER);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == 0) { produce(work, ring, full, empty, rank); }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume(work, ring, full, empty, rank, store);
    }
#if CLUSTER > 1
    // A block must not end while another may still copy into it or arrive at its barriers.
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

struct Columns {
    Segments segments;
    float scale;
    bool add;

    __device__ __forceinline__ void operator()(const Unit &unit, int row, int rows, int lane,
                                               const float (&sums)[128]) const {
        int column = unit.column;
        const Segment to = segment_of(segments, column);
        const bool onto = add || unit.part > 0;
        column += lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + 8 * half >= rows) { continue; }
#pragma unroll
            for (int j = 0; j < 32; j++) {
                store_pair(to, row + 8 * half, column + 8 * j, scale * sums[4 * j + 2 * half],
                           scale * sums[4 * j + 2 * half + 1], onto);
            }
        }
    }
};

struct Gated {
    char *h;
    int rows_cap;
    float scale, scale_out;

    __device__ __forceinline__ void operator()(const Unit &unit, int row, int rows, int lane,
                                               const float (&sums)[128]) const {
        const int first = unit.column / 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + 8 * half >= rows) { continue; }
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const float *gate = sums + 8 * j + 2 * half, *up = gate + 4;
                const float a = silu(scale * gate[0]) * (scale * up[0]) * scale_out;
                const float b = silu(scale * gate[1]) * (scale * up[1]) * scale_out;
                char *at = h + panel_chunk(rows_cap, row + 8 * half, first + j) + lane % 4 * 4;
                *(u32 *)at = panel_pair(a, b);
            }
        }
    }
};

#define ATTRIBUTES __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
extern "C" ATTRIBUTES gemm_out(const char *x, const char *w, const Chunk *chunk, int rows_cap, int w_rows,
                               int k_blocks, int splits, int *turns, float scale, Segments to) {
    gemm(Work{x, w, chunk, rows_cap, w_rows, k_blocks, splits, turns, scale}, Columns{to, scale, false});
}

extern "C" ATTRIBUTES gemm_add(const char *x, const char *w, const Chunk *chunk, int rows_cap, int w_rows,
                               int k_blocks, int splits, int *turns, float scale, Segments to) {
    gemm(Work{x, w, chunk, rows_cap, w_rows, k_blocks, splits, turns, scale}, Columns{to, scale, true});
}

extern "C" ATTRIBUTES gemm_swiglu(const char *x, const char *w, const Chunk *chunk, int rows_cap, int w_rows,
                                  int k_blocks, float scale, float scale_out, char *h) {
    gemm(Work{x, w, chunk, rows_cap, w_rows, k_blocks, 1, 0, scale}, Gated{h, rows_cap, scale, scale_out});
}
