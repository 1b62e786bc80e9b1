// Prefill matrix product for Hopper: x[rows][K] · w[N][K]^T, both as f16 panels, f32 sums.
//
//   prefill_gemm   out = (add ? out : 0) + scale * x w^T
//   prefill_gated  h = f16(scale_out * silu(scale * gate) * (scale * up)), columns of w interleaved by eights: gate, up
//
// in   x, w    panels (panel.cuh), x of rows_cap rows, w of w_rows (a multiple of 256) rows
// out  out     f32 [rows][stride] of up to four segments (target.cuh);  h  panels of rows_cap rows, K = w_rows / 2
// grid persistent, one block of three warpgroups per multiprocessor: one keeps bulk copies of K-slices of 64 going
//      through a ring of 4, two multiply 64 x 256 each of a 128 x 256 tile. Rows run fastest.
// smem 4 x 48 KB, 8 x 4 KB through which sums leave, barriers;  arch sm_90a;  base path gemm.cu;  define GATED (0 or 1: which entry)
// ref  cpu::reference::matmul::linear;  test prefill::gemm_matches_reference
// hot
#define TILE_ROWS 128
#define TILE_COLUMNS 256
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "prefill/panel.cuh"
#include "prefill/target.cuh"
#include "prefill/units.cuh"
#include "common/wgmma_sm90.cuh"
#include "prefill/bulk_sm90.cuh"

#define STAGES 4
#define STAGING (16 * 64 * 4) // bytes of a warp: 16 rows, 64 columns
#define X_BYTES (TILE_ROWS * 128)
#define W_BYTES (TILE_COLUMNS * 128)
#define STAGE_BYTES (X_BYTES + W_BYTES)

__device__ __forceinline__ void produce(const Work &work, u32 ring, u32 full, u32 empty) {
    const Units units(work);
    const u64 x_panel = (u64)work.rows_cap * 128;
    const u64 w_panel = (u64)work.w_rows * 128;
    int stage = 0;
    u32 parity = 1;
    for (int index = blockIdx.x; index < units.total; index += gridDim.x) {
        const Unit unit = units.at(work, index);
        const char *x = work.x + (u64)unit.row * 128;
        const char *w = work.w + (u64)unit.column * 128;
        for (int block = unit.first_block; block < unit.end_block; block++) {
            const u32 to = ring + stage * STAGE_BYTES, bar = full + stage * 8;
            mbarrier_wait(empty + stage * 8, parity);
            mbarrier_expect(bar, STAGE_BYTES);
            bulk_copy(to, x + block * x_panel, X_BYTES, bar);
            bulk_copy(to + X_BYTES, w + block * w_panel, W_BYTES, bar);
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
}

template <class Store>
__device__ __forceinline__ void consume(const Work &work, u32 ring, u32 full, u32 empty,
                                        const Store &store) {
    const Units units(work);
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 128;
    const int rows = work.chunk->rows;
    int stage = 0;
    u32 parity = 0;
    for (int index = blockIdx.x; index < units.total; index += gridDim.x) {
        const Unit unit = units.at(work, index);
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
            if (previous >= 0 && lane == 0) { mbarrier_arrive(empty + previous * 8); }
            previous = stage;
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        wgmma_wait<0>();
        if (previous >= 0 && lane == 0) { mbarrier_arrive(empty + previous * 8); }
        if (work.splits > 1) {
            if (unit.part > 0) { await_turn(work.turns, unit.tile, unit.part); }
        }
        store(unit, unit.row + group * 64 + lane / 32 * 16, rows, ring + STAGES * STAGE_BYTES + 128, sums);
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
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + i * 8, 1);
            mbarrier_init(empty + i * 8, 2);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == 0) { produce(work, ring, full, empty); }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume(work, ring, full, empty, store);
    }
}

#if GATED
struct Gated {
    char *h;
    int rows_cap;
    float scale, scale_out;

    __device__ __forceinline__ void operator()(const Unit &unit, int first_row, int rows, u32, float (&sums)[128]) const {
        const int lane = threadIdx.x % 32, row = first_row + lane / 4, first = unit.column / 16 + lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int chunk = 0; chunk < 16; chunk += 4) {
                u32 v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float *gate = sums + 8 * (chunk + j) + 2 * half, *up = gate + 4;
                    v[j] = panel_pair(gated(gate[0], up[0]), gated(gate[1], up[1]));
                }
                quad_transpose(v);
                if (row + 8 * half < rows) {
                    *(uint4 *)(h + panel_chunk(rows_cap, row + 8 * half, first + chunk)) =
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
struct Columns {
    Segments segments;
    float scale;
    bool add;

    // A warp hands its 16 rows on in pieces of 64 columns through its own part of shared memory, so that what goes out is
    // whole lines.
    __device__ __forceinline__ void operator()(const Unit &unit, int first, int rows, u32 staging,
                                               float (&sums)[128]) const {
        int column = unit.column;
        const Segment to = segment_of(segments, column);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        const bool onto = add || unit.part > 0;
        const bool whole = to.width - column >= TILE_COLUMNS && to.stride % 4 == 0;
        const u32 own = staging + warp * STAGING;
#pragma unroll
        for (int piece = 0; piece < 4; piece++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = lane / 4 + 8 * half;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float *v = sums + 4 * (8 * piece + j) + 2 * half;
                    const u32 chunk = (2 * j + lane % 4 / 2) ^ (row & 7) * 2;
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(own + row * 256 + chunk * 16 + lane % 2 * 8),
                                 "f"(scale * v[0]), "f"(scale * v[1])
                                 : "memory");
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int row = 2 * i + lane / 16, at = column + piece * 64 + lane % 16 * 4;
                const u32 chunk = (lane % 16) ^ (row & 7) * 2;
                float4 v;
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                             : "r"(own + row * 256 + chunk * 16)
                             : "memory");
                if (first + row < rows) { store_four(to, first + row, at, v, whole, onto); }
            }
            __syncwarp();
        }
    }

    __device__ __forceinline__ void store_four(const Segment &to, int row, int column, const float4 &v, bool whole,
                                               bool onto) const {
        float *at = to.out + (u64)row * to.stride + column;
        if (!whole) {
            store_one(at, v.x, column < to.width, onto);
            store_one(at + 1, v.y, column + 1 < to.width, onto);
            store_one(at + 2, v.z, column + 2 < to.width, onto);
            store_one(at + 3, v.w, column + 3 < to.width, onto);
        } else if (onto) {
            add_four(at, v);
        } else {
            *(float4 *)at = v;
        }
    }
};
#endif

#define ATTRIBUTES __global__ void __launch_bounds__(384, 1)
#if GATED
extern "C" ATTRIBUTES prefill_gated(const char *x, const char *w, const Chunk *chunk, int rows_cap, int w_rows,
                                    int k_blocks, float scale, float scale_out, char *h) {
    gemm(Work{x, w, chunk, rows_cap, w_rows, k_blocks, 1, 0}, Gated{h, rows_cap, scale, scale_out});
}
#else
extern "C" ATTRIBUTES prefill_gemm(const char *x, const char *w, const Chunk *chunk, int rows_cap, int w_rows,
                                   int k_blocks, int splits, int *turns, float scale, int add, Segments to) {
    gemm(Work{x, w, chunk, rows_cap, w_rows, k_blocks, splits, turns}, Columns{to, scale, add != 0});
}
#endif
