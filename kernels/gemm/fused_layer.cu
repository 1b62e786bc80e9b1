// gemm/fused_layer: all GEMMs between two token mixers of a decode step (1 to 64 rows), in one persistent launch, by
// cp.async and mma.sync.
//
//   x += Wo y;   h = silu(Wgate n(x)) * (Wup n(x));   x += Wdown h;   p = W n(x) with W of the next layer
//   n(x) = x / sqrt(mean(x^2) + eps) * weight of the norm
//
// The phases, stream-K, folded norms and ready flags are those of fused_layer_sm90.cu, for GPUs without bulk copies
// and wgmma, and with 99 KB of shared memory in a block. The bits of a row depend on shapes and grid only, not on ROWS:
// batch-invariant. If kinds with large slices leave too little shared memory, more than 32 rows take several launches.
//
// Warps: 0..7 math, each with a ring of its own weights (weight_ring.cuh); 8 and 9 load x, by turns, polling its ready
// flags; 10 and 11 auxiliary (fused_layer_aux.cuh).
// All blocks are resident at once: grid = multiprocessors, and a block takes more than half of their shared memory.
//
// in      FusedLayerParams (fused_layer_aux.cuh), by value
// out     residual stream f32 [ROWS][n_out]; results of EPILOGUE_STORE matrices; scales [ROWS], inv_rms of the rows of
//         the last norm
// grid    multiprocessors x 384 threads
// smem    RING_BYTES dynamic: X_STAGES stages of x, and eight rings of weights
// scratch as fused_layer_sm90.cu
// defines ROWS, N8_TILES = ceil(ROWS / 8), RING_BYTES, KINDS (bit i: kind i occurs), MAX_MATRICES (per launch),
//         F32_MATRICES (f32 matrices in the last phase)
// arch    sm_80 and up
// reference cpu::reference::{matmul, norm, activation}     test crates/cuda/tests/fused_layer.rs
#ifndef F32_MATRICES
#define F32_MATRICES 0
#endif
#define WARPS 8
#define M16_TILES 2           // m16 tiles of a warp, one in each row block of a tile
#define THREADS (WARPS * 32)  // of the math warps
#ifndef NO_WGMMA
#define NO_WGMMA 1
#endif

#include "common/prelude.cuh"

// All math warps.
__device__ __forceinline__ void sync_math_warps() { named_barrier_sync<1, THREADS>(); }

// Warps that load x.
#define X_WARPS 2
// The auxiliary warps.
#define FIRST_AUX_WARP (WARPS + X_WARPS)
#define F32_WARPS 2
#define F32_CHUNK 128
__device__ __forceinline__ int f32_thread() { return threadIdx.x - FIRST_AUX_WARP * 32; }
__device__ __forceinline__ int f32_warp() { return warp_index() - FIRST_AUX_WARP; }
__device__ __forceinline__ void f32_sync() { named_barrier_sync<2, F32_WARPS * 32>(); }

#include "gemm/fused_layer_phases.cuh"
#include "gemm/fused_layer_epilogue.cuh"
#include "gemm/f32_gemm_tf32.cuh"
#include "gemm/fused_layer_aux.cuh"
#include "gemm/fused_layer_tiles.cuh"
#include "gemm/mainloop.cuh"

// A stage holds a slice of x, or a chunk of it where a slice would leave too little for weights. More stages for few
// rows, whose slices are short.
constexpr bool X_BY_CHUNK = N8_TILES > 4;
constexpr int X_STAGES = N8_TILES <= 2 ? 4 : 3;
constexpr int X_STAGE_BYTES = N8_TILES * A16_TILE * (X_BY_CHUNK ? 1 : max_slice_chunks(0));
#define WEIGHT_RING_BYTES ((RING_BYTES - X_STAGES * X_STAGE_BYTES) / WARPS / 16 * 16)
static_assert(WEIGHT_RING_BYTES >= M16_TILES * 2 * max_slice_tile_bytes(0), "a ring holds two slices of any kind");
#include "gemm/weight_ring.cuh"

struct SharedStorage {
    u64 full[X_STAGES], empty[X_STAGES];  // of the stages of x
    u64 phase_open, scales_ready, phase_done;
    WorkRange ranges[MAX_PHASES];
    WorkRange loading[WARPS];  // what each math warp has yet to load
    EpilogueSmem epilogue[2];  // operands, double-buffered by tile

    __device__ __forceinline__ void init_barriers() {
        const auto init = [](const u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), arrivals); };
        for (int i = 0; i < X_STAGES; i++) {
            init(full[i], WARP_LANES);
            init(empty[i], WARPS * WARP_LANES);
        }
        init(phase_open, 1);
        init(scales_ready, F32_WARPS * WARP_LANES);
        init(phase_done, (WARPS + X_WARPS) * WARP_LANES);
    }
};
#if F32_MATRICES
#define F32_SMEM_BYTES sizeof(F32Smem)
#else
#define F32_SMEM_BYTES 0
#endif
static_assert(sizeof(RowScales) + sizeof(SharedStorage) + sizeof(scale_smem) <= 13 << 10 && F32_SMEM_BYTES <= 8 << 10,
              "more shared memory beside the ring than the host reserves");

// A stage of x. Consumers begin with parity 0, producers with 1: all stages are empty.
struct XCursor {
    u32 stage, parity;

    __device__ __forceinline__ void advance() {
        if (++stage == X_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ u32 full(const SharedStorage& smem) const {
        return shared_address(smem.full) + 8 * stage;
    }
    __device__ __forceinline__ u32 empty(const SharedStorage& smem) const {
        return shared_address(smem.empty) + 8 * stage;
    }
};

// Loads a stage of x by one warp, polling until all of it is ready if it may come from this launch, and stores it once
// the stage is empty. What takes 64 registers is loaded only then: math warps take longer for so many rows than L2
// does. `chunk_stride`: bytes from 64 values to the next.
template <int CHUNKS>
__device__ __forceinline__ void load_x(const u8* from, u32 chunk_stride, bool has_flags, const XCursor& stage,
                                       const SharedStorage& smem, u32 x_ring) {
    constexpr int WORDS = 2 * N8_TILES;  // of 16 bytes in a chunk and lane
    constexpr bool LOADS_AHEAD = CHUNKS * WORDS < 16;
    const u32 lane = threadIdx.x % 32 * 16;
    float4 v[CHUNKS * WORDS];
    bool waiting;
    if (!LOADS_AHEAD) mbarrier_wait(stage.empty(smem), stage.parity);
    do {
        waiting = false;
#pragma unroll
        for (int i = 0; i < CHUNKS * WORDS; i++)
            v[i] = flag_load((const float4*)(from + i / WORDS * chunk_stride + i % WORDS * 512 + lane));
#pragma unroll
        for (int i = 0; i < CHUNKS * WORDS; i++) waiting |= any_not_ready(v[i]);
    } while (__any_sync(WARP_ALL, waiting && has_flags));
    if (LOADS_AHEAD) mbarrier_wait(stage.empty(smem), stage.parity);
    const u32 to = x_ring + stage.stage * X_STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < CHUNKS * WORDS; i++)
        st_shared_v4(to + i * 512 + lane, make_uint4(__float_as_uint(v[i].x), __float_as_uint(v[i].y),
                                                     __float_as_uint(v[i].z), __float_as_uint(v[i].w)));
}

// Warps 8 and 9: x of every stage, by turns.
// The parity of `phase_open` repeats after two phases, so these warps must see each phase open before the phase ends.
// They poll the input of a phase only once the phase before it is open: until then it may hold what the launch before
// has left.
__device__ __forceinline__ void activation_producer(const FusedLayerParams& params, SharedStorage& smem, u32 x_ring,
                                                    int index) {
    const u32 phase_open = shared_address(&smem.phase_open), phase_done = shared_address(&smem.phase_done);
    XCursor state = {0, 1};
    int turn = index;  // 0: this warp's
#pragma unroll 1
    for (int phase_index = 0; phase_index < params.n_phases; phase_index++) {
        const Phase& phase = params.phases[phase_index];
        const u32 stride = phase_index ? N8_TILES * A16_TILE : params.x_chunk_stride;
        WorkRange range = smem.ranges[phase_index];
#pragma unroll 1
        while (range.units) {
            const int n = range.run_length(), slices = params.matrices[range.begin.matrix].slices;
            const u8* x = phase.x + size_t(range.begin.unit) * slices * slices * stride;
            // A slice has as many chunks as a unit has slices.
            const int chunks = X_BY_CHUNK ? 1 : slices;
#pragma unroll 1
            for (int remaining = n * slices * (X_BY_CHUNK ? slices : 1); remaining; remaining--) {
                if (turn == 0) {
                    turn = X_WARPS;
                    if (!X_BY_CHUNK && slices == 2)
                        load_x<2>(x, stride, phase_index > 0, state, smem, x_ring);
                    else
                        load_x<1>(x, stride, phase_index > 0, state, smem, x_ring);
                    mbarrier_arrive(state.full(smem));
                }
                turn--;
                state.advance();
                x += chunks * stride;
            }
            range.advance(params.matrices, phase.epilogue_kind, n);
        }
        mbarrier_wait(phase_open, phase_index & 1);
        mbarrier_arrive(phase_done);
    }
}

// What a math warp has of the pipeline.
struct MathPipeline {
    const FusedLayerParams& params;
    SharedStorage& smem;
    u8* ring;
    u32 x_ring;
    int warp;
    WeightRing weights;
    XCursor x;

    // An address of the ring as a pointer.
    __device__ __forceinline__ const u8* pointer(u32 at) const { return ring + (at - shared_address(ring)); }
    // Waits for the next stage of x and returns its address.
    __device__ __forceinline__ u32 wait_for_x() {
        mbarrier_wait(x.full(smem), x.parity);
        return x_ring + x.stage * X_STAGE_BYTES;
    }
    __device__ __forceinline__ void release_x() {
        mbarrier_arrive(x.empty(smem));
        x.advance();
    }
    __device__ __forceinline__ void release_weights(u32 size) { weights.release(size, params, smem.ranges, warp); }

    // Adds the products of `units` work units to acc.
    template <int KIND>
    __device__ __forceinline__ void multiply(int units, float (&acc)[M16_TILES][N8_TILES][4]) {
        constexpr bool TWO_SLICES = unit_slices(KIND) == 2;
        TileDequantizer<KIND> tile[M16_TILES];
        const u8* w[M16_TILES];
        const auto load_slice = [&](auto slice) {
            constexpr int SLICE = decltype(slice)::value, BYTES = slice_tile_bytes(KIND, SLICE);
            w[0] = pointer(weights.wait(M16_TILES * BYTES));
            w[1] = w[0] + BYTES;
            load_first_chunk<SLICE>(tile, w);
        };
        // `more`: another slice follows. Its first codes are loaded under the last MMAs of this one.
        const auto run_slice = [&](auto slice, auto next, bool more) {
            constexpr int SLICE = decltype(slice)::value;
            const u8* const current[M16_TILES] = {w[0], w[1]};
            u32 values = 0;
            const auto x_of_chunk = [&](int q) {
                if (X_BY_CHUNK && q) release_x();
                if (X_BY_CHUNK || q == 0) values = wait_for_x();
                return X_BY_CHUNK ? values : values + q * N8_TILES * A16_TILE;
            };
            mma_slice<KIND, M16_TILES, N8_TILES, SLICE>(tile, current, x_of_chunk, acc, [&]() {
                release_weights(M16_TILES * slice_tile_bytes(KIND, SLICE));
                if (more) load_slice(next);
            });
            release_x();
        };
        load_slice(IntConstant<0>());
#pragma unroll 1
        for (int i = 0; i < units; i++) {
            run_slice(IntConstant<0>(), IntConstant<TWO_SLICES>(), TWO_SLICES || i + 1 < units);
            if constexpr (TWO_SLICES) run_slice(IntConstant<1>(), IntConstant<0>(), i + 1 < units);
        }
    }
    // The same for a warp without rows in the tile.
    __device__ __forceinline__ void skip(const Matrix& s, int units) {
#pragma unroll 1
        for (int i = 0; i < units * s.slices; i++) {
            const u32 size =
                M16_TILES * (s.slices == 2 && i % 2 ? s.tile_bytes - s.first_slice_bytes : s.first_slice_bytes);
            weights.wait(size);
            release_weights(size);
#pragma unroll 1
            for (int stage = 0; stage < (X_BY_CHUNK ? s.slices : 1); stage++) {
                wait_for_x();
                release_x();
            }
        }
    }
    __device__ __forceinline__ void multiply(const Matrix& s, bool has_rows, int units,
                                             float (&acc)[M16_TILES][N8_TILES][4]) {
        if (!has_rows) return skip(s, units);
        switch (s.kind) {
#define KIND_CASE(K)                                           \
    case K:                                                    \
        if constexpr (KINDS >> K & 1) multiply<K>(units, acc); \
        break;
            KIND_CASE(KIND_Q4K)
            KIND_CASE(KIND_Q5K) KIND_CASE(KIND_Q6K) KIND_CASE(KIND_Q8) KIND_CASE(KIND_U8_AFFINE) KIND_CASE(KIND_F16)
#undef KIND_CASE
        }
    }
};

// A float of read-only memory, loaded here and not where it is used.
__device__ __forceinline__ float load_now(const float* from) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * (X_WARPS + F32_WARPS), 1)
    fused_layer(const __grid_constant__ FusedLayerParams params) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(16) RowScales rows;
    __shared__ __align__(16) SharedStorage smem;
    const int warp = warp_index();
    pdl_launch();
    if (warp < params.n_phases) smem.ranges[warp] = work_range_of(params.matrices, params.phases[warp]);
    if (threadIdx.x == THREADS) smem.init_barriers();
    __syncthreads();
#if F32_MATRICES
    __shared__ F32Smem f32_smem;
#define F32_SMEM_ARG , f32_smem
#else
#define F32_SMEM_ARG
#endif
    const u32 x_ring = shared_address(ring) + WARPS * WEIGHT_RING_BYTES;
    if (warp >= FIRST_AUX_WARP) {
        aux_warps(params, smem, rows F32_SMEM_ARG);
        return;
    }
    if (warp >= WARPS) {
        pdl_wait();
        activation_producer(params, smem, x_ring, warp - WARPS);
        return;
    }
    MathPipeline pipeline = {params, smem, ring, x_ring, warp, {}, {0, 0}};
    pipeline.weights.init(shared_address(ring), smem.loading, warp);
    pipeline.weights.fill(params, smem.ranges, warp);
    pdl_wait();

    // This thread's operand of the epilogue, in flight under the products.
    const int m = threadIdx.x / 128, row = threadIdx.x % 128;
    float factor, norm;
    int n_tiles = 0;
    const auto begin_tile = [&](const Phase& phase, const Matrix& s, int tile, bool is_stream_k) {
        const int block = row_block(phase.epilogue_kind, tile, m);
        factor = norm = 0.0f;
        if (is_stream_k || row / 16 >= row_tiles(s, block)) return;
        factor = load_now((const float*)row_block_at(s, phase.epilogue_kind, tile, m) + row);
        if (phase.norm_weight && block * 128 + row < s.n_out) norm = load_now(phase.norm_weight + block * 128 + row);
    };
    const auto multiply = [&](const Matrix& s, const TileShape& shape, int n, float (&acc)[M16_TILES][N8_TILES][4]) {
        pipeline.multiply(s, warp_has_rows(shape.rows, warp), n, acc);
    };
    // A warp that is a tile ahead writes the other buffer; two tiles ahead it has passed this barrier with all warps.
    const auto share_operands = [&](const Phase& phase, const Matrix& s, int tile) -> const EpilogueSmem& {
        EpilogueSmem& operands = smem.epilogue[n_tiles++ & 1];
        operands.factors[m][row] = factor;
        operands.norm[m][row] = norm;
        if (threadIdx.x == 0) operands.blocks = tile_blocks(phase, s, tile);
        sync_math_warps();
        return operands;
    };
    math_warps(params, smem, rows, warp, begin_tile, multiply, share_operands, []() {});
}
