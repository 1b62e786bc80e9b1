// gemm/gemv: GEMV of one row, for small models whose steps are bound by the number of launches and not by memory.
//
//   out[n] (+)= sum over k of W[n][k] * x[k]        for several matrices W that share x
//   NORM     x = rms_norm(row) * norm, computed by every block
//   SWIGLU   y[n] = silu(gate[n]) * up[n] instead, f16 input of the next GEMM
//
// A block has 16 rows of a matrix (SWIGLU: of both) and all of K. It loads all its weights before the dependency wait,
// so memory is busy with them, and with those of the next launch, while this launch waits for the one before. No two
// blocks share a sum.
// The bits are those of gemm/decode_gemm_small_batch in a bucket of any size: where that kernel splits a tile among
// blocks, sums are split here too, and reduced in the same order. The norm is norm/rms_norm, the gated unit
// ffn/gated_unit, f32 matrices f32_gemm.cuh.
//
// in      packed weights (weight_layout.cuh); NORM: row f32 [WIDTH] and norm f32 [WIDTH]; else x (a16_layout.cuh) for
//         one row
// out     f32 [n_out] per matrix; SWIGLU: a16_layout.cuh
// grid    F32_ROWS rows of the f32 matrices (F32_MATRICES), then m16 tiles of all matrices, x WARPS * 32 threads; a
//         warp has the sums between two splits
// smem    weights of the block, x in f16 (F32_MATRICES: in f32 too), 68 bytes per partial sum; dynamic
// defines WIDTH (a multiple of 256), WARPS, KINDS (bit i: kind i occurs), MAX_MATRICES (per launch), F32_MATRICES,
//         F32_ROWS (1, 2, 4 or 8: f32 rows of a block), NORM, NORM_WARPS, SWIGLU
// arch    sm_80 and up
// reference gemm/decode_gemm_small_batch, bit for bit     test crates/cuda/tests/gemv.rs
#include "common/prelude.cuh"
#define ROWS 1
#define THREADS (WARPS * 32)
#define F32_WARPS WARPS
__device__ __forceinline__ int f32_thread() { return threadIdx.x; }
__device__ __forceinline__ void f32_sync() { __syncthreads(); }
#include "gemm/f32_gemm.cuh"
#include "gemm/a16_layout.cuh"
#include "gemm/gemv_tile.cuh"
#include "norm/row_output.cuh"
#include "gemm/gemv_input.cuh"

struct GemvParams {
    Matrix matrices[MAX_MATRICES];
    const u8* x;
    const float* norm;
    WorkRanges ranges;
    int n_matrices;
    float eps;
    int weight_bytes, partials;  // of a tile: bytes of weights, and number of partial sums
#if F32_MATRICES
    F32Params f32;
#endif
};

#define N_MATRICES (1 + SWIGLU)

// Starts loading all weights of an m16 tile, unit after unit.
template <int KIND>
__device__ __forceinline__ void load_weights(u32 to, const TileRows& rows, int units) {
    constexpr int FIRST_SLICE = slice_tile_bytes(KIND, 0) / 16, UNIT = unit_tile_bytes(KIND) / 16;
    const u64 evict_first = policy_evict_first();
    // Not `to + 16 i`: with an L2 policy NVRTC 13.0.88 would take address and policy from uniform registers that
    // nothing has written (`LDGSTS [R + UR0], desc[UR1]`), in some units for sm_120.
    to += threadIdx.x * 16;
    for (int i = threadIdx.x; i < units * UNIT; i += THREADS, to += THREADS * 16) {
        const int unit = i / UNIT, at = i % UNIT;
        const u8* from = rows.weights + size_t(unit) * rows.unit_stride +
                         (at < FIRST_SLICE ? at * 16 : rows.second_slice + (at - FIRST_SLICE) * 16);
        cp_async_16_cache_hint(to, from, evict_first);
    }
}

// The input row for the packed and the f32 matrices.
struct Input {
    u8* f16;
    float* f32;
#if NORM
    NormWeights<WARPS> norm;
#endif
};

// Before the dependency wait.
__device__ __forceinline__ void prefetch_norm_weights(const GemvParams& params, Input& x) {
#if NORM
    load_norm_weights<WARPS>(params.norm, x.norm);
#endif
}
// After it; returns with the row in shared memory, visible to all threads.
__device__ __forceinline__ void load_input(const GemvParams& params, Input& x) {
#if NORM
    __shared__ float warp_sums[NORM_WARPS];
    const auto load = [&](int group, float (&v)[8]) { load_row_group<WIDTH>((const float*)params.x, group, v); };
    load_normed_input<WARPS>(load, x.norm, params.eps, warp_sums, x.f16, F32_MATRICES ? x.f32 : nullptr,
                             [] { __syncthreads(); });
#else
    load_f16_input<THREADS>(params.x, WIDTH, x.f16);
#endif
    cp_async_wait<0>();
    __syncthreads();
}

#if F32_MATRICES
// Rows of an f32 matrix, in the order of f32_gemm.cuh: as many as take no more shared memory than packed weights do.
__device__ __forceinline__ void f32_gemv(const GemvParams& params, float4* weights, Input& x) {
    const int group = blockIdx.x * F32_ROWS / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const F32Matrix& s = f32_matrix(params.f32, group);
    const int first = (group - s.first_row_group) * 8 + blockIdx.x * F32_ROWS % 8;
    for (int i = threadIdx.x; i < F32_ROWS * WIDTH / 4; i += THREADS) {
        const int row = min(first + i / (WIDTH / 4), s.n_out - 1);
        cp_async_16(shared_address(weights + i), s.weights + size_t(row) * WIDTH + i % (WIDTH / 4) * 4);
    }
    cp_async_commit();
    prefetch_norm_weights(params, x);
    pdl_wait();
    load_input(params, x);
    for (int n = warp; n < F32_ROWS; n += WARPS) {
        float total = 0.0f;
        for (int begin = 0; begin < WIDTH; begin += params.f32.k_slice) {
            float sum = 0.0f;
            for (int k = begin + lane * 4; k < min(WIDTH, begin + params.f32.k_slice); k += 128) {
                const float4 w = weights[n * (WIDTH / 4) + k / 4], v = *(const float4*)(x.f32 + k);
                sum = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sum))));
            }
            total += warp_sum(sum);
        }
        if (lane == 0) f32_store(s, 0, first + n, total);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 32 / WARPS)
    gemv_batch_1(const __grid_constant__ GemvParams params) {
    extern __shared__ __align__(128) u8 memory[];
    pdl_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Input x;
    x.f16 = memory + N_MATRICES * params.weight_bytes;
    x.f32 = (float*)(x.f16 + 2 * WIDTH);
    float* partials = F32_MATRICES ? x.f32 + WIDTH : x.f32;  // [N_MATRICES][params.partials][16]
    // [N_MATRICES][params.partials]: where a partial sum begins
    int* split_begin = (int*)(partials + N_MATRICES * params.partials * 16);
#if F32_MATRICES
    if (int(blockIdx.x) < params.f32.row_groups * (8 / F32_ROWS)) return f32_gemv(params, (float4*)memory, x);
#endif
    int matrix_index = 0;
    while (!SWIGLU && matrix_index + 1 < params.n_matrices &&
           int(blockIdx.x) >= params.matrices[matrix_index + 1].first_block)
        matrix_index++;
    const int index = blockIdx.x - params.matrices[matrix_index].first_block;
    TileRows rows[N_MATRICES];
#pragma unroll
    for (int t = 0; t < N_MATRICES; t++) {
        const Matrix& s = params.matrices[matrix_index + t];
        rows[t] = tile_rows(params.ranges, s, index);
        const int kind = s.kind;
#define FETCH(KIND) load_weights<KIND>(shared_address(memory + t * params.weight_bytes), rows[t], s.units)
        DISPATCH_KIND(FETCH)
#undef FETCH
    }
    cp_async_commit();
#pragma unroll
    for (int t = 0; t < N_MATRICES; t++)
        for (int i = threadIdx.x; i < rows[t].n; i += THREADS)
            split_begin[t * params.partials + i] =
                split_unit(params.ranges, params.matrices[matrix_index + t], rows[t], i);
    const Matrix& output = params.matrices[matrix_index];
    // Thread i < 16 writes row i.
    const int row = index * 16 + threadIdx.x;
    const bool has_row = threadIdx.x < 16 && row < output.n_out;
    float factor[N_MATRICES];
#pragma unroll
    for (int t = 0; t < N_MATRICES; t++)
        factor[t] = has_row ? row_factor(params.matrices[matrix_index + t], row) : 0.0f;
    prefetch_norm_weights(params, x);
    pdl_wait();
    const float residual = !SWIGLU && has_row && output.add ? output.out[row] : 0.0f;
    load_input(params, x);

    const int n_first = rows[0].n, n = SWIGLU ? n_first + rows[N_MATRICES - 1].n : n_first;
    for (int i = warp; i < n; i += WARPS) {
        const int t = SWIGLU && i >= n_first, part = t ? i - n_first : i;
        const Matrix& s = params.matrices[matrix_index + t];
        const int* at = split_begin + t * params.partials + part;
        const int from = at[0], to = i + 1 == n || i + 1 == n_first ? s.units : at[1];
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const int kind = s.kind;
#define PRODUCTS(KIND) mma_units<KIND>(memory + t * params.weight_bytes, shared_address(x.f16), from, to, acc)
        DISPATCH_KIND(PRODUCTS)
#undef PRODUCTS
        if (lane % 4 == 0) {
            float* to_sums = partials + (t * params.partials + part) * 16 + lane / 4;
            to_sums[0] = acc[0];
            to_sums[8] = acc[2];
        }
    }
    __syncthreads();
    if (!has_row) return;
    float value[N_MATRICES];
#pragma unroll
    for (int t = 0; t < N_MATRICES; t++) {
        const float* from = partials + t * params.partials * 16 + threadIdx.x;
        value[t] = sum_of_parts(from, rows[t].n, factor[t], residual);
    }
#if SWIGLU
    const float y = silu(value[0]) * value[1];
    *(u16*)((u8*)output.out + row / 64 * A16_TILE + row % 64 / 8 * 128 + row % 8 * 2) = f32_to_f16(clamp_to_f16(y));
#else
    output.out[row] = value[0];
#endif
}
