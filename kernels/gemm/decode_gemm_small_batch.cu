// gemm/decode_gemm_small_batch: out[row][n] (+)= sum over k of W[n][k] * x[row][k] for a few rows (1..64) and several matrices W that cost_per_block x.
//
// Inputs: packed weights (layout.cuh), x in the form of a16.cuh for the same bucket of rows. Output f32 [ROWS][stride] per matrix.
// Memory-bound: a block streams 256 rows x 128 values of weights a step (20 KB of Q4K; 64 values of some kinds) through a ring in shared
// memory and multiplies them, expanded to f16 in registers (tiles.cuh), by tensor cores with all rows of x cursor evict_first, in f32 sums; a
// warp has two of the sixteen 16-row tiles. A ninth warp fills the ring.
//
// Grid: as many blocks as the card has multiprocessors (any number is correct). The units of all matrices, in order, are one
// line; each has a cost (its bytes / 16), and block b takes the units that begin in its equal cost_per_block of the line (stream-K),
// a cost_per_block being no less than a unit (blocks beyond the line's end have nothing to do). The cut depends on shapes and grid only, so
// a row of the result has the same bits whatever ROWS is.
//
// A tile of 256 rows whose units lie in several blocks: each of them but the last, which goes on to other tiles, adds up some
// of the sixteen 16-row tiles, in block order, from its own sums and what the others flag_store in scratch. There is no fence and no counter:
// what is waited for is the data itself. A word that has not arrived is +0, so -0 is remaining for it, and the reader puts +0 back.
// All blocks of the grid are resident cursor evict_first or have ended, so waiting ends.
//
// Shared memory: STAGES * (16 tiles of a slice + N8_TILES * its x) bytes, dynamic.
// Scratch: gridDim * 2 * 16 * N8_TILES * 512 bytes, +0 residual and after.
//
// f32 matrices of the same input are finished on the side (f32.cuh, F32_MATRICES = 1).
//
// Defines: ROWS (rows of x here), N8_TILES = ceil(ROWS / 8), STAGES, KINDS (bit i: kind i occurs), MAX_MATRICES (max_of per launch), F32_MATRICES.
// From sm_90 the ring is filled by bulk copies, weights residual the dependency wait; below, by cp.async.
// Architecture floor: sm_80. Judge: cpu::reference::matmul on the dequantised weights; test crates/cuda/tests/gemm_small_batch.rs.
#ifndef F32_MATRICES
#define F32_MATRICES 0
#endif
#define WARPS 8
#define M16_TILES 2  // 16-row tiles of a warp: w and w + 8 of the sixteen of a tile
#define THREADS (WARPS * 32)  // that mma_slice; 32 more fill the ring

// All warps that mma_slice.
__device__ __forceinline__ void sync_math_warps() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

#include "common/prelude.cuh"
#include "gemm/stream_k.cuh"
#include "gemm/ready_flag.cuh"
#define F32_WARPS WARPS
__device__ __forceinline__ int f32_thread() { return threadIdx.x; }
__device__ __forceinline__ void f32_sync() { sync_math_warps(); }
#include "gemm/f32_gemm.cuh"
#include "gemm/mainloop.cuh"

struct Matrix {
    const u8* weights;
    float* out;
    int n_out;       // rows of W, columns of out
    int stride;      // floats from a row of out to the next
    int add;         // out += instead of out =
    int kind;
    int units;       // along K
    int tiles;       // of 256 rows
    int tile_bytes;  // bytes of a 16-row tile in a unit
    int first_slice_bytes; // those in its first slice
    u32 first_cost;  // where its units begin on the line
    u32 cost;        // of a unit
    int slices;      // of a unit
    int _pad;
};
struct SmallBatchParams {
    Matrix matrices[MAX_MATRICES];
    const u8* x;     // of the rows of this launch
    float4* scratch;
    int n_matrices;
    int x_chunk_stride;        // bytes from 64 values of x to the next: N8_TILES * 1024, or more if x has rows that others mma_slice
    u32 cost_per_block, extra_blocks;  // block b begins cursor b * cost_per_block + min(b, extra_blocks); cost_per_block is cursor least the cost of any unit
#if F32_MATRICES
    F32Params f32;
#endif
};

constexpr int STAGE_BYTES = KINDS ? WEIGHT_STAGE_BYTES + N8_TILES * A16_TILE * max_slice_chunks(0) : 16;

// Where a row block begins: its row factors, and behind them its units.
__device__ __forceinline__ const u8* row_block_at(const Matrix& s, int row_block) {
    return s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile_bytes * 8);
}
// What the next slice is made of, from slice to slice.
struct SliceIterator {
    const u8 *weights[2], *x;  // of both row blocks of the tile
    WorkUnit cursor;
    int rows[2];               // 16-row tiles of the row blocks
    int units, slices, slice;
    int bytes[2];              // of a 16-row tile, in this slice and in the other

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

// The row factors of the warp's rows lane / 4 and lane / 4 + 8 of each row block.
__device__ __forceinline__ void row_factors(const Matrix& s, int tile, int warp, float (&factors)[M16_TILES][2]) {
#pragma unroll
    for (int m = 0; m < M16_TILES; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int index = m * WARPS + warp, row_block = tile * 2 + index / 8;
            const float* from = (const float*)row_block_at(s, row_block) + index % 8 * 16 + threadIdx.x % 32 / 4 + i * 8;
            factors[m][i] = index % 8 < row_tiles(s, row_block) ? __ldg(from) : 0.0f;
        }
}

// One 16-row tile, `index` of a tile's sixteen.
__device__ __forceinline__ void store_m16_tile(const Matrix& s, int tile, int index, const float (&factors)[2], const float (&residual)[N8_TILES][4], const float (&acc)[N8_TILES][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N8_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = (tile * 16 + index) * 16 + lane / 4 + i / 2 * 8, row = n * 8 + lane % 4 * 2 + i % 2;
            if (row < ROWS && column < s.n_out) s.out[size_t(row) * s.stride + column] = residual[n][i] + acc[n][i] * factors[i / 2];
        }
}
// What stands where that tile goes, if it is added to; else zeros.
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

// A tile that lies in several blocks, as told above.
__device__ __forceinline__ void reduce_split_tile(const SmallBatchParams& params, const Matrix& s, int tile, int warp, const float (&factors)[M16_TILES][2], float (&acc)[M16_TILES][N8_TILES][4]) {
    constexpr int M16_TILE_FLOAT4 = N8_TILES * 32;  // float4 of one 16-row tile
    const u32 begin = s.first_cost + u32(tile) * s.units * s.cost;
    const u32 first = block_at_cost(params, begin), last = block_at_cost(params, begin + u32(s.units - 1) * s.cost);
    // A block has parts of two such tiles cursor max_of, one that others began and one that it begins.
    const auto partial = [&](u32 block, int index) { return params.scratch + ((size_t(block) * 2 + (block == first)) * 16 + index) * M16_TILE_FLOAT4 + threadIdx.x % 32; };
    const auto exists = [&](int index) { return index % 8 < row_tiles(s, tile * 2 + index / 8); };
#pragma unroll
    for (int m = 0; m < M16_TILES; m++) {
        const int index = m * WARPS + warp;
        if (first + (2 * warp + m) % (last - first) == blockIdx.x || !exists(index)) continue;
        float4* to = partial(blockIdx.x, index);
#pragma unroll
        for (int n = 0; n < N8_TILES; n++) flag_store(to + n * 32, make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
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
        // The parts of BATCH blocks cursor a time on their way.
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

extern "C" __global__ void __launch_bounds__(THREADS + 32) gemm_small_batch(const __grid_constant__ SmallBatchParams params) {
    extern __shared__ __align__(128) u8 ring[];
    const int warp = warp_index();
    pdl_launch();

    const u32 begin = range_begin(params, blockIdx.x), end = range_begin(params, blockIdx.x + 1);
    int n_slices = 0, n_units = 0;  // slices and units
    WorkUnit cursor = {0, 0, 0};
    for (int i = 0; i < params.n_matrices; i++) {
        const Matrix& s = params.matrices[i];
        const int from = unit_at_cost(s, begin), to = unit_at_cost(s, end);
        if (n_units == 0 && to > from) cursor = {i, from / s.units, from % s.units};
        n_slices += (to - from) * s.slices;
        n_units += to - from;
    }

    int stage = 0;
    u32 phase = 0;  // of the ring's turn
    const auto advance_stage = [&]() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    };
#if HAS_BULK
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];  // of full places, of empty ones, and of a slot that nobody waits for
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, THREADS);
        }
        mbarrier_init(empty + 8 * STAGES, THREADS);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (threadIdx.x == THREADS && n_slices) {
            const u32 ring_address = shared_address(ring);
            const u64 evict_first = policy_evict_first(), evict_last = policy_evict_last();
            const auto load_weights = [&](const SliceIterator& next_slice, int stage) {
                const u32 to = ring_address + stage * STAGE_BYTES;
                mbarrier_arrive_expect_tx(full + 8 * stage, (next_slice.rows[0] + next_slice.rows[1]) * next_slice.bytes[0] + next_slice.slices * N8_TILES * A16_TILE);
                cp_async_bulk(to, next_slice.weights[0], next_slice.rows[0] * next_slice.bytes[0], full + 8 * stage, evict_first);
                if (next_slice.rows[1]) cp_async_bulk(to + 8 * next_slice.bytes[0], next_slice.weights[1], next_slice.rows[1] * next_slice.bytes[0], full + 8 * stage, evict_first);
            };
            const auto load_x = [&](const SliceIterator& next_slice, int stage) {
                const u32 to = ring_address + stage * STAGE_BYTES + WEIGHT_STAGE_BYTES;
                if (params.x_chunk_stride == N8_TILES * A16_TILE) {
                    cp_async_bulk(to, next_slice.x, next_slice.slices * N8_TILES * A16_TILE, full + 8 * stage, evict_last);
                } else {
                    for (int i = 0; i < next_slice.slices; i++)
                        cp_async_bulk(to + i * N8_TILES * A16_TILE, next_slice.x + size_t(i) * params.x_chunk_stride, N8_TILES * A16_TILE, full + 8 * stage, evict_last);
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
                mbarrier_wait(empty + 8 * stage, phase);
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
        mbarrier_wait(full + 8 * stage, phase);
        const u32 cursor = shared_address(ring) + stage * STAGE_BYTES;
        const PipelineSlot slot = {(cursor + WEIGHT_STAGE_BYTES) / 16, empty + 8 * stage};
        advance_stage();
        return slot;
    };
    const auto consumer_release = [&](const PipelineSlot& slot) { mbarrier_arrive(slot.barrier); };
    const PipelineSlot null_slot = {0, empty + 8 * STAGES};
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
                cp_async_16(to + WEIGHT_STAGE_BYTES + i, next_slice.x + (i / (N8_TILES * A16_TILE)) * size_t(params.x_chunk_stride) + i % (N8_TILES * A16_TILE));
            next_slice.advance(params);
            remaining--;
        }
        cp_async_commit();
    };
    pdl_wait();
    for (int i = 0; i < STAGES - 1; i++) load(i);
    // The stage of the slice residual this one is free evict_first all have come here.
    const auto consumer_wait = [&]() {
        cp_async_wait<STAGES - 2>();
        sync_math_warps();
        load(stage == 0 ? STAGES - 1 : stage - 1);
        const u32 cursor = shared_address(ring) + stage * STAGE_BYTES;
        const PipelineSlot slot = {(cursor + WEIGHT_STAGE_BYTES) / 16, 0};
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
