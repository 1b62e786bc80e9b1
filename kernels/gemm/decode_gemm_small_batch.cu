// gemm/decode_gemm_small_batch: GEMM of packed weights for a decode step, several matrices W that share x in one
// launch.
//
//   out[row][n] (+)= sum over k of W[n][k] * x[row][k]        1 to 64 rows
//
// Memory-bound. A producer warp streams 256 rows x 128 values of weights per pipeline stage (20 KB of Q4K; 64 values of
// some kinds) into shared memory. The math warps dequantise them to f16 in registers (dequant_tile.cuh) and multiply
// them with all rows of x on tensor cores, f32 accumulators; a warp has two of the 16 m16 tiles.
//
// Stream-K: the work units of all matrices, in order, form one line; a unit costs its bytes / 16. Block b takes the
// units that begin in its equal range of the line (stream_k.cuh). The partition depends on shapes and grid only, not on
// ROWS: batch-invariant.
//
// Split tiles: of the blocks that share a tile of 256 rows, all but the last (which switches to another tile) reduce
// some of its m16 tiles in block order, from their accumulators and from partial sums that others publish in scratch.
// There is no fence and no counter: partial sums carry an in-band ready flag (common/sync.cuh). All blocks are resident
// at once or have ended, so polling ends.
//
// in      packed weights (weight_layout.cuh); x (a16_layout.cuh) for the same bucket of rows
// out     f32 [ROWS][stride] per matrix
// grid    multiprocessors (any number is correct) x 288 threads
// smem    STAGES * (16 m16 tiles of a slice + its x) bytes, dynamic
// scratch gridDim * 2 * 16 * N8_TILES * 512 bytes, +0 before and after
// defines ROWS, N8_TILES = ceil(ROWS / 8), STAGES, KINDS (bit i: kind i occurs), MAX_MATRICES (per launch),
//         F32_MATRICES (f32 matrices of the same input, f32_gemm.cuh)
// arch    sm_80 and up; from sm_90 bulk copies fill the ring, weights before the dependency wait; below, cp.async
// reference cpu::reference::matmul on the dequantised weights     test crates/cuda/tests/gemm_small_batch.rs
#ifndef F32_MATRICES
#define F32_MATRICES 0
#endif
#define WARPS 8
#define M16_TILES 2           // m16 tiles of a warp: w and w + 8 of the sixteen of a tile
#define THREADS (WARPS * 32)  // math threads; 32 more are the producer warp

#include "common/prelude.cuh"
#include "gemm/stream_k.cuh"
#include "common/sync.cuh"

// All math warps.
__device__ __forceinline__ void sync_math_warps() { named_barrier_sync<1, THREADS>(); }

#define F32_WARPS WARPS
__device__ __forceinline__ int f32_thread() { return threadIdx.x; }
__device__ __forceinline__ void f32_sync() { sync_math_warps(); }
#include "gemm/f32_gemm.cuh"
#include "gemm/mainloop.cuh"

struct Matrix {
    const u8* weights;
    float* out;
    int n_out;   // rows of W, columns of out
    int stride;  // floats from a row of out to the next
    int add;     // out += instead of out =
    int kind;
    int units;              // along K
    int tiles;              // of 256 rows
    int tile_bytes;         // of an m16 tile in a unit
    int first_slice_bytes;  // of an m16 tile in the first slice of a unit
    u32 first_cost;         // where its units begin on the line
    u32 cost;               // of a unit
    int slices;             // per unit
    int _pad;
};
struct SmallBatchParams {
    Matrix matrices[MAX_MATRICES];
    const u8* x;  // rows of this launch
    float4* scratch;
    int n_matrices;
    // bytes from 64 values of x to the next: N8_TILES * 1024, or more if other launches take rows of x too
    int x_chunk_stride;
    // block b begins at b * cost_per_block + min(b, big_blocks); at least the cost of any unit
    u32 cost_per_block, big_blocks;
#if F32_MATRICES
    F32Params f32;
#endif
};

constexpr int STAGE_BYTES = KINDS ? WEIGHT_STAGE_BYTES + N8_TILES * A16_TILE * max_slice_chunks(0) : 16;

// Start of a row block: its row factors, then its units.
__device__ __forceinline__ const u8* row_block_at(const Matrix& s, int row_block) {
    return s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8);
}
// Addresses and sizes of the next slice to load.
struct SliceIterator {
    const u8 *weights[2], *x;  // weights of both row blocks of the tile
    WorkPosition cursor;
    int rows[2];  // m16 tiles of the row blocks
    int units, slices, slice;
    int bytes[2];  // of an m16 tile, in this slice and in the other

    __device__ __forceinline__ void begin_tile(const SmallBatchParams& params) {
        const Matrix& s = params.matrices[cursor.matrix];
        units = s.units;
        slices = s.slices;
        slice = 0;
        bytes[0] = s.first_slice_bytes;
        bytes[1] = slices == 2 ? s.tile_bytes - s.first_slice_bytes : s.first_slice_bytes;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            rows[m] = row_tiles(s, cursor.tile * 2 + m);
            weights[m] = row_block_at(s, cursor.tile * 2 + m) + rows[m] * (64 + cursor.unit * s.tile_bytes);
        }
        x = params.x + size_t(cursor.unit) * slices * slices * params.x_chunk_stride;
    }
    __device__ __forceinline__ void advance(const SmallBatchParams& params) {
        weights[0] += rows[0] * bytes[0];
        weights[1] += rows[1] * bytes[0];
        x += slices * params.x_chunk_stride;
        const int other = bytes[1];
        bytes[1] = bytes[0];
        bytes[0] = other;
        if (++slice < slices) return;
        slice = 0;
        if (++cursor.unit < units) return;
        cursor.unit = 0;
        if (++cursor.tile == params.matrices[cursor.matrix].tiles) {
            cursor.tile = 0;
            cursor.matrix++;
        }
        if (cursor.matrix < params.n_matrices) begin_tile(params);
    }
};

// Row factors of the warp's rows lane / 4 and lane / 4 + 8 of each row block.
__device__ __forceinline__ void row_factors(const Matrix& s, int tile, int warp, float (&factors)[M16_TILES][2]) {
#pragma unroll
    for (int m = 0; m < M16_TILES; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int index = m * WARPS + warp, row_block = tile * 2 + index / 8;
            const float* from =
                (const float*)row_block_at(s, row_block) + index % 8 * 16 + threadIdx.x % 32 / 4 + i * 8;
            factors[m][i] = index % 8 < row_tiles(s, row_block) ? __ldg(from) : 0.0f;
        }
}

// Stores m16 tile `index` of a tile's sixteen.
__device__ __forceinline__ void store_m16_tile(const Matrix& s, int tile, int index, const float (&factors)[2],
                                               const float (&residual)[N8_TILES][4], const float (&acc)[N8_TILES][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N8_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = (tile * 16 + index) * 16 + lane / 4 + i / 2 * 8, row = n * 8 + lane % 4 * 2 + i % 2;
            if (row < ROWS && column < s.n_out)
                s.out[size_t(row) * s.stride + column] = residual[n][i] + acc[n][i] * factors[i / 2];
        }
}
// Previous values of that m16 tile in out if it is added to; else zeros.
__device__ __forceinline__ void load_residual(const Matrix& s, int tile, int index, float (&residual)[N8_TILES][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N8_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = (tile * 16 + index) * 16 + lane / 4 + i / 2 * 8, row = n * 8 + lane % 4 * 2 + i % 2;
            residual[n][i] = s.add && row < ROWS && column < s.n_out ? s.out[size_t(row) * s.stride + column] : 0.0f;
        }
}

// Reduces a tile that several blocks share (split tile, see above).
__device__ __forceinline__ void reduce_split_tile(const SmallBatchParams& params, const Matrix& s, int tile, int warp,
                                                  const float (&factors)[M16_TILES][2],
                                                  float (&acc)[M16_TILES][N8_TILES][4]) {
    constexpr int M16_TILE_FLOAT4 = N8_TILES * 32;  // float4 of an m16 tile
    const u32 begin = s.first_cost + u32(tile) * s.units * s.cost;
    const u32 first = block_at_cost(params, begin), last = block_at_cost(params, begin + u32(s.units - 1) * s.cost);
    // A block has at most two partial tiles: of a tile that others began, and of one that it begins.
    const auto partial = [&](u32 block, int index) {
        return params.scratch + ((size_t(block) * 2 + (block == first)) * 16 + index) * M16_TILE_FLOAT4 +
               threadIdx.x % 32;
    };
    const auto exists = [&](int index) { return index % 8 < row_tiles(s, tile * 2 + index / 8); };
#pragma unroll
    for (int m = 0; m < M16_TILES; m++) {
        const int index = m * WARPS + warp;
        if (first + (2 * warp + m) % (last - first) == blockIdx.x || !exists(index)) continue;
        float4* to = partial(blockIdx.x, index);
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
            flag_store(to + n * 32, make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
    }
#pragma unroll
    for (int m = 0; m < M16_TILES; m++) {
        const int index = m * WARPS + warp;
        if (first + (2 * warp + m) % (last - first) != blockIdx.x || !exists(index)) continue;
        float sum[N8_TILES][4], residual[N8_TILES][4];
        if (N8_TILES <= 4) load_residual(s, tile, index, residual);
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
        // Partial tiles of BATCH blocks are loaded together.
        constexpr int BATCH = N8_TILES == 1 ? 8 : N8_TILES <= 3 ? 4 : N8_TILES == 4 ? 3 : 1;
        for (u32 b0 = first; b0 <= last; b0 += BATCH) {
            float4 part[BATCH][N8_TILES];
#pragma unroll
            for (int f = 0; f < BATCH; f++) {
                const float4* from = partial(min(b0 + f, last), index);
#pragma unroll
                for (int n = 0; n < N8_TILES; n++) part[f][n] = flag_load(from + n * 32);
            }
#pragma unroll
            for (int f = 0; f < BATCH; f++) {
                const u32 block = b0 + f;
                if (block > last) break;
                float4* from = partial(block, index);
#pragma unroll
                for (int n = 0; n < N8_TILES; n++) {
                    float4 v = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
                    if (block != blockIdx.x) v = flag_consume(from + n * 32, part[f][n]);
                    sum[n][0] += v.x;
                    sum[n][1] += v.y;
                    sum[n][2] += v.z;
                    sum[n][3] += v.w;
                }
            }
        }
        if (N8_TILES > 4) load_residual(s, tile, index, residual);
        store_m16_tile(s, tile, index, factors[m], residual, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32)
    gemm_small_batch(const __grid_constant__ SmallBatchParams params) {
    extern __shared__ __align__(128) u8 ring[];
    const int warp = warp_index();
    pdl_launch();

    const u32 begin = range_begin(params, blockIdx.x), end = range_begin(params, blockIdx.x + 1);
    int n_slices = 0, n_units = 0;
    WorkPosition cursor = {0, 0, 0};
    for (int i = 0; i < params.n_matrices; i++) {
        const Matrix& s = params.matrices[i];
        const int from = unit_at_cost(s, begin), to = unit_at_cost(s, end);
        if (n_units == 0 && to > from) cursor = {i, from / s.units, from % s.units};
        n_slices += (to - from) * s.slices;
        n_units += to - from;
    }

    // Not a PipelineState, which the compiler keeps in other registers.
    int stage = 0;
    u32 parity = 0;
    const auto advance_stage = [&]() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    };
#if HAS_SM90
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];  // full, empty, and one of a null slot
    const u32 full = shared_address(barriers);
    const Pipeline<STAGES> pipeline = {full, full + 8 * STAGES};
    if (threadIdx.x == THREADS) {
        pipeline.init(1, THREADS);
        mbarrier_init(pipeline.empty_barrier(STAGES), THREADS);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (threadIdx.x == THREADS && n_slices) {
            const u32 ring_address = shared_address(ring);
            const u64 evict_first = policy_evict_first(), evict_last = policy_evict_last();
            const auto load_weights = [&](const SliceIterator& next_slice, int stage) {
                const u32 to = ring_address + stage * STAGE_BYTES;
                pipeline.producer_expect_tx(stage, (next_slice.rows[0] + next_slice.rows[1]) * next_slice.bytes[0] +
                                                       next_slice.slices * N8_TILES * A16_TILE);
                cp_async_bulk(to, next_slice.weights[0], next_slice.rows[0] * next_slice.bytes[0],
                              pipeline.full_barrier(stage), evict_first);
                if (next_slice.rows[1])
                    cp_async_bulk(to + 8 * next_slice.bytes[0], next_slice.weights[1],
                                  next_slice.rows[1] * next_slice.bytes[0], pipeline.full_barrier(stage), evict_first);
            };
            const auto load_x = [&](const SliceIterator& next_slice, int stage) {
                const u32 to = ring_address + stage * STAGE_BYTES + WEIGHT_STAGE_BYTES;
                if (params.x_chunk_stride == N8_TILES * A16_TILE) {
                    cp_async_bulk(to, next_slice.x, next_slice.slices * N8_TILES * A16_TILE,
                                  pipeline.full_barrier(stage), evict_last);
                } else {
                    for (int i = 0; i < next_slice.slices; i++)
                        cp_async_bulk(to + i * N8_TILES * A16_TILE, next_slice.x + size_t(i) * params.x_chunk_stride,
                                      N8_TILES * A16_TILE, pipeline.full_barrier(stage), evict_last);
                }
            };
            SliceIterator next_slice;
            next_slice.cursor = cursor;
            next_slice.begin_tile(params);
            SliceIterator first = next_slice;
            for (int i = 0; i < STAGES && i < n_slices; i++) {
                load_weights(next_slice, i);
                next_slice.advance(params);
            }
            pdl_wait();
            for (int i = 0; i < STAGES && i < n_slices; i++) {
                load_x(first, i);
                first.advance(params);
            }
            for (int i = STAGES; i < n_slices; i++) {
                pipeline.producer_acquire(stage, parity);
                load_weights(next_slice, stage);
                load_x(next_slice, stage);
                next_slice.advance(params);
                advance_stage();
            }
        }
        pdl_wait();
        return;
    }
#if F32_MATRICES
    __shared__ F32Smem f32_smem;
    f32_prologue(params.f32, f32_smem);
#endif
    pdl_wait();
    const auto consumer_wait = [&]() {
        pipeline.consumer_wait(stage, parity);
        const u32 weights = shared_address(ring) + stage * STAGE_BYTES;
        const PipelineSlot slot = {(weights + WEIGHT_STAGE_BYTES) / 16, pipeline.empty_barrier(stage)};
        advance_stage();
        return slot;
    };
    const auto consumer_release = [&](const PipelineSlot& slot) { mbarrier_arrive(slot.barrier); };
    const PipelineSlot null_slot = {0, pipeline.empty_barrier(STAGES)};
#else
    if (warp == WARPS) return;
#if F32_MATRICES
    __shared__ F32Smem f32_smem;
    f32_prologue(params.f32, f32_smem);
#endif
    SliceIterator next_slice;
    next_slice.cursor = cursor;
    if (n_slices) next_slice.begin_tile(params);
    int remaining = n_slices;  // slices to load
    const auto load = [&](int stage) {
        if (remaining > 0) {
            const u32 to = shared_address(ring) + stage * STAGE_BYTES;
#pragma unroll
            for (int m = 0; m < 2; m++)
                for (int i = threadIdx.x * 16; i < next_slice.rows[m] * next_slice.bytes[0]; i += THREADS * 16)
                    cp_async_16(to + m * 8 * next_slice.bytes[0] + i, next_slice.weights[m] + i);
            for (int i = threadIdx.x * 16; i < next_slice.slices * N8_TILES * A16_TILE; i += THREADS * 16)
                cp_async_16(to + WEIGHT_STAGE_BYTES + i,
                            next_slice.x + (i / (N8_TILES * A16_TILE)) * size_t(params.x_chunk_stride) +
                                i % (N8_TILES * A16_TILE));
            next_slice.advance(params);
            remaining--;
        }
        cp_async_commit();
    };
    pdl_wait();
    for (int i = 0; i < STAGES - 1; i++) load(i);
    // The stage of the previous slice is empty once all math warps are here.
    const auto consumer_wait = [&]() {
        cp_async_wait<STAGES - 2>();
        sync_math_warps();
        load(stage == 0 ? STAGES - 1 : stage - 1);
        const u32 weights = shared_address(ring) + stage * STAGE_BYTES;
        const PipelineSlot slot = {(weights + WEIGHT_STAGE_BYTES) / 16, 0};
        advance_stage();
        return slot;
    };
    const auto consumer_release = [](const PipelineSlot&) {};
    const PipelineSlot null_slot = {};
#endif

    float acc[M16_TILES][N8_TILES][4], factors[M16_TILES][2];
#if F32_MATRICES
    f32_mainloop(params.f32, f32_smem, [](int) { return 1.0f; });  // while the ring fills
#endif
    for (int finished = 0; finished < n_units;) {
        const Matrix& s = params.matrices[cursor.matrix];
        const int units = s.units, n = min(units - cursor.unit, n_units - finished);
        const bool has_work = warp_has_rows(row_tiles(s, cursor.tile * 2), warp);
        row_factors(s, cursor.tile, warp, factors);
#pragma unroll
        for (int m = 0; m < M16_TILES; m++)
#pragma unroll
            for (int i = 0; i < N8_TILES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[m][i][e] = 0.0f;
        gemm_mainloop(s.kind, ring, n, has_work, acc, consumer_wait, consumer_release, null_slot);
        if (n < units) {
            reduce_split_tile(params, s, cursor.tile, warp, factors, acc);
        } else {
#pragma unroll
            for (int m = 0; m < M16_TILES; m++) {
                float residual[N8_TILES][4];
                load_residual(s, cursor.tile, m * WARPS + warp, residual);
                store_m16_tile(s, cursor.tile, m * WARPS + warp, factors[m], residual, acc[m]);
            }
        }
        finished += n;
        cursor.unit = 0;
        if (++cursor.tile == s.tiles) {
            cursor.tile = 0;
            cursor.matrix++;
        }
    }
#if F32_MATRICES
    f32_epilogue(params.f32, [](int) { return 1.0f; });
#endif
}
