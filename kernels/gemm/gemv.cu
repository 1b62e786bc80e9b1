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
// blocks, sums are split here too, and reduced in the same order. The norm is norm/rms_norm, the gated unit ffn/swiglu,
// f32 matrices f32_gemm.cuh.
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
#include "gemm/dequant_tile.cuh"
#include "norm/row_output.cuh"

struct Matrix {
    const u8* weights;
    float* out;  // SWIGLU: the f16 output, of the first matrix
    int n_out, add;
    int kind, units;              // along K
    int first_block, tile_bytes;  // its first block; bytes of an m16 tile in a unit
    u32 first_cost, cost;  // where its units begin on the line of gemm/decode_gemm_small_batch, and the cost of each
};
struct GemvParams {
    Matrix matrices[MAX_MATRICES];
    const u8* x;
    const float* norm;
    // block b of gemm/decode_gemm_small_batch begins at b * cost_per_block + min(b, big_blocks)
    u32 cost_per_block, big_blocks;
    int n_matrices;
    float eps;
    int weight_bytes, partials;  // of a tile: bytes of weights, and number of partial sums
#if F32_MATRICES
    F32Params f32;
#endif
};

#define N_MATRICES (1 + SWIGLU)
#define NORM_ROUNDS ((NORM_WARPS + WARPS - 1) / WARPS)
#define GROUPS_PER_WARP ((ROW_GROUPS + NORM_WARPS - 1) / NORM_WARPS)

// 16 rows of a matrix: their weights, and how gemm/decode_gemm_small_batch splits the tile of 256 rows that they belong
// to.
struct TileRows {
    const u8* weights;  // of unit 0
    int unit_stride;    // bytes from a unit to the next
    int second_slice;   // bytes from its first slice to its second
    u32 first_unit;     // its first unit, counted from the matrix's
    u32 first_block;    // the block of gemm/decode_gemm_small_batch that begins the tile
    int n;              // blocks that share it
};

__device__ __forceinline__ u32 range_begin(const GemvParams& params, u32 block) {
    return block * params.cost_per_block + min(block, params.big_blocks);
}
__device__ __forceinline__ u32 block_at_cost(const GemvParams& params, u32 cost) {
    const u32 wide = params.big_blocks * (params.cost_per_block + 1);
    return cost < wide ? cost / (params.cost_per_block + 1) : params.big_blocks + (cost - wide) / params.cost_per_block;
}
// First unit of the tile in block `part` of those that share it, or one past its last.
__device__ __forceinline__ int split_unit(const GemvParams& params, const Matrix& s, const TileRows& rows, int part) {
    const u32 begin = range_begin(params, rows.first_block + part);
    const u32 unit = begin <= s.first_cost ? 0 : (begin - s.first_cost + s.cost - 1) / s.cost;
    return unit <= rows.first_unit ? 0 : min(s.units, int(unit - rows.first_unit));
}

// Rows 16 * index .. of a matrix.
__device__ __forceinline__ TileRows tile_rows(const GemvParams& params, const Matrix& s, int index) {
    const int row_block = index / 8, tiles = min(8, (s.n_out - row_block * 128 + 15) / 16),
              first_slice_bytes = s.tile_bytes - [&] {
                  switch (s.kind) {
                      case KIND_Q4K:
                          return slice_tile_bytes(KIND_Q4K, 1);
                      case KIND_Q5K:
                          return slice_tile_bytes(KIND_Q5K, 1);
                      case KIND_Q6K:
                          return slice_tile_bytes(KIND_Q6K, 1);
                  }
                  return 0;
              }();
    const u8* block = s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8);
    TileRows rows;
    rows.weights = block + tiles * 64 + index % 8 * first_slice_bytes;
    rows.unit_stride = s.tile_bytes * tiles;
    rows.second_slice = tiles * first_slice_bytes - index % 8 * (2 * first_slice_bytes - s.tile_bytes);
    rows.first_unit = u32(index / 16) * s.units;
    const u32 begin = s.first_cost + rows.first_unit * s.cost;
    rows.first_block = block_at_cost(params, begin);
    rows.n = block_at_cost(params, begin + u32(s.units - 1) * s.cost) - rows.first_block + 1;
    return rows;
}
__device__ __forceinline__ float row_factor(const Matrix& s, int row) {
    const int row_block = row / 128;
    return __ldg((const float*)(s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8)) +
                 row % 128);
}

// Starts loading all weights of an m16 tile, unit after unit.
template <int KIND>
__device__ __forceinline__ void load_weights(u32 to, const TileRows& rows, int units) {
    constexpr int FIRST_SLICE = slice_tile_bytes(KIND, 0) / 16, UNIT = unit_tile_bytes(KIND) / 16;
    const u64 evict_first = policy_evict_first();
    for (int i = threadIdx.x; i < units * UNIT; i += THREADS) {
        const int unit = i / UNIT, at = i % UNIT;
        const u8* from = rows.weights + size_t(unit) * rows.unit_stride +
                         (at < FIRST_SLICE ? at * 16 : rows.second_slice + (at - FIRST_SLICE) * 16);
        cp_async_16_cache_hint(to + i * 16, from, evict_first);
    }
}

// One K-slice as gemm/mma_slice.cuh does it; x: consecutive f16.
template <int KIND, int SLICE>
__device__ __forceinline__ void mma_slice(TileDequantizer<KIND>& tile, const u8* weights, u32 x, float (&acc)[4]) {
    tile.template load_header<SLICE>(weights);
    tile.load_codes(weights, 0);
    tile.template decode_scales<SLICE>();
#pragma unroll
    for (int q = 0; q < slice_chunks(KIND); q++) {
        tile.select_chunk(q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 a[2][4], b[4];
            tile.template dequant<0>(s, a[0]);
            tile.template dequant<1>(s, a[1]);
            if (s == 0)
                tile.rotate_codes();
            else if (q + 1 < slice_chunks(KIND))
                tile.load_codes(weights, q + 1);
            // All columns of B are the row.
            ldmatrix_x4(b, x + q * 128 + s * 32);
            mma_f16(acc, a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            mma_f16(acc, a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
        }
    }
}
template <int KIND>
__device__ __forceinline__ void mma_units(const u8* weights, u32 x, int from, int to, float (&acc)[4]) {
    x += threadIdx.x % 32 / 16 * 64 + threadIdx.x / 8 % 2 * 16;
    TileDequantizer<KIND> tile;
    for (int unit = from; unit < to; unit++) {
        const u8* at = weights + unit * unit_tile_bytes(KIND);
        const u32 x_unit = x + unit * unit_slices(KIND) * slice_chunks(KIND) * 128;
        mma_slice<KIND, 0>(tile, at, x_unit, acc);
        if constexpr (unit_slices(KIND) == 2)
            mma_slice<KIND, 1>(tile, at + slice_tile_bytes(KIND, 0), x_unit + slice_chunks(KIND) * 128, acc);
    }
}

#define DISPATCH_KIND(CALL)                                                  \
    switch (kind) {                                                          \
        case KIND_Q4K:                                                       \
            if constexpr (KINDS >> KIND_Q4K & 1) CALL(KIND_Q4K);             \
            break;                                                           \
        case KIND_Q5K:                                                       \
            if constexpr (KINDS >> KIND_Q5K & 1) CALL(KIND_Q5K);             \
            break;                                                           \
        case KIND_Q6K:                                                       \
            if constexpr (KINDS >> KIND_Q6K & 1) CALL(KIND_Q6K);             \
            break;                                                           \
        case KIND_Q8:                                                        \
            if constexpr (KINDS >> KIND_Q8 & 1) CALL(KIND_Q8);               \
            break;                                                           \
        case KIND_U8_AFFINE:                                                 \
            if constexpr (KINDS >> KIND_U8_AFFINE & 1) CALL(KIND_U8_AFFINE); \
            break;                                                           \
        case KIND_F16:                                                       \
            if constexpr (KINDS >> KIND_F16 & 1) CALL(KIND_F16);             \
            break;                                                           \
    }

// The input row for the packed and the f32 matrices.
struct Input {
    u8* f16;
    float* f32;
#if NORM
    float norm[NORM_ROUNDS][GROUPS_PER_WARP][8];
#endif
};

// Before the dependency wait.
__device__ __forceinline__ void prefetch_norm_weights(const GemvParams& params, Input& x) {
#if NORM
#pragma unroll
    for (int r = 0; r < NORM_ROUNDS; r++)
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) {
            const int warp = threadIdx.x / 32 + r * WARPS;
            if (warp < NORM_WARPS) load_row_group<WIDTH>(params.norm, warp + i * NORM_WARPS, x.norm[r][i]);
        }
#endif
}
// After it; returns with the row in shared memory, visible to all threads.
__device__ __forceinline__ void load_input(const GemvParams& params, Input& x) {
#if NORM
    // As norm/rms_norm with NORM_WARPS warps; a warp here may have several of those.
    __shared__ float warp_sums[NORM_WARPS];
    float v[NORM_ROUNDS][GROUPS_PER_WARP][8];
#pragma unroll
    for (int r = 0; r < NORM_ROUNDS; r++) {
        const int warp = threadIdx.x / 32 + r * WARPS;
        if (warp >= NORM_WARPS) break;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++)
            load_row_group<WIDTH>((const float*)params.x, warp + i * NORM_WARPS, v[r][i]);
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[r][i][j] * v[r][i][j];
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) warp_sums[warp] = sum;
    }
    __syncthreads();
    float sum = warp_sums[0];
#pragma unroll
    for (int i = 1; i < NORM_WARPS; i++) sum += warp_sums[i];
    const float scale = 1.0f / sqrtf(sum / WIDTH + params.eps);
#pragma unroll
    for (int r = 0; r < NORM_ROUNDS; r++)
#pragma unroll
        for (int i = 0; i < GROUPS_PER_WARP; i++) {
            const int warp = threadIdx.x / 32 + r * WARPS, group = warp + i * NORM_WARPS;
            if (warp >= NORM_WARPS || group >= ROW_GROUPS) continue;
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = v[r][i][j] * scale * x.norm[r][i][j];
            const int at = group * 256 + threadIdx.x % 32 * 8;
            *(uint4*)(x.f16 + at * 2) =
                make_uint4(a16_f16x2(y[0], y[1]), a16_f16x2(y[2], y[3]), a16_f16x2(y[4], y[5]), a16_f16x2(y[6], y[7]));
#if F32_MATRICES
            ((float4*)(x.f32 + at))[0] = make_float4(y[0], y[1], y[2], y[3]);
            ((float4*)(x.f32 + at))[1] = make_float4(y[4], y[5], y[6], y[7]);
#endif
        }
#else
    for (int i = threadIdx.x; i < WIDTH / 8; i += THREADS)
        *(uint4*)(x.f16 + i * 16) = __ldcg((const uint4*)(params.x + i * 128));
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
        rows[t] = tile_rows(params, s, index);
        const int kind = s.kind;
#define FETCH(KIND) load_weights<KIND>(shared_address(memory + t * params.weight_bytes), rows[t], s.units)
        DISPATCH_KIND(FETCH)
#undef FETCH
    }
    cp_async_commit();
#pragma unroll
    for (int t = 0; t < N_MATRICES; t++)
        for (int i = threadIdx.x; i < rows[t].n; i += THREADS)
            split_begin[t * params.partials + i] = split_unit(params, params.matrices[matrix_index + t], rows[t], i);
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
        // Sums of several blocks begin at +0 in gemm/decode_gemm_small_batch.
        float sum = rows[t].n > 1 ? 0.0f + from[0] : from[0];
        for (int part = 1; part < rows[t].n; part++) sum += from[part * 16];
        value[t] = residual + sum * factor[t];
    }
#if SWIGLU
    const float y = silu(value[0]) * value[1];
    *(u16*)((u8*)output.out + row / 64 * A16_TILE + row % 64 / 8 * 128 + row % 8 * 2) = f32_to_f16(clamp_to_f16(y));
#else
    output.out[row] = value[0];
#endif
}
