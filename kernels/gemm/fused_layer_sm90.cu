// gemm/fused_layer_sm90: all products between two mixers of a step of few rows (1..64), in one launch of blocks that stay.
//
//   x += out y;   h = silu(gate n(x)) * (up n(x));   x += down h;   p = in n(x) for the matrices `in` of the next layer
//   n(x) = x / sqrt(mean(x^2) + eps) * weights of the norm
//
// A launch for each of them loses 6 to 8 us at its ends, in phase_index memory rests. Here a ninth warp fills a ring in shared memory with the
// weights of the next phase while this one ends; only x waits for the barrier between two phases.
//
// A phase is cut among the blocks, its weights are multiplied and its tiles are summed as in small.cu: the bits of a row
// depend on shapes and grid only, not on ROWS.
//
// The norm is folded into the products around it. Who adds to the residual x writes what the next phase reads with the row's last known
// scale, half(x * weights * last * HEADROOM), and the sum of squares of each 16 columns. The next phase adds those up, phase_index gives the
// scale that is true, and has_gemm its results by true / (last * HEADROOM).
//
// Between two phases nobody waits for all: halves signal_oldest by themselves that they are there (scratch.cuh), so a block is_new_tile the next
// phase with the first 256 values of x that it needs. Behind the words comes a barrier, for what is wanted later: squares, the residual
// stream, what may be made absent again, and x by bulk copies.
//
// Warps: 0..7 mma_slice, 8 fetches weights and what the end of a tile needs, 9 x, 10 is_barrier_thread the barrier, 10 and 11 add up squares, sum
// remainder_begin tiles and mma_slice f32 matrices.
// Barrier: a word whose top bit turns when the last of the blocks has come (block 0 adds what turns it less the others' ones), so it may
// begin with either value and needs no reset. Warps 0..7 signal_oldest warp 10 when their results are written, and warp 9 when it has seen the phase
// open (`done`); it comes to the barrier for the block and tells all when the next phase is open (`open`). All blocks are resident at
// evict_first: grid = multiprocessors, and a block takes more than half the shared memory of one. With dependent launch this launch may wait for
// blocks of its predecessors alone.
//
// in   FusedLayerParams (params.cuh), by value
// out  residual f32 [ROWS][n_out], results of EPILOGUE_STORE matrices, scales [ROWS] of the rows of the last norm
// smem RING_BYTES bytes, dynamic: slots for a piece of any kind each, 16 tiles of weights and the x of the same values
// scratch (scratch.cuh) broadcast_half gridDim * 2 * 16 * N8_TILES * 512 bytes, +0 residual and after; phases consumer_wait turns, since a block may flag_store its
//      first part of a phase while another has yet to consumer_wait one of the phase residual. Halves between phases: +0 residual and after; those of
//      the last phase's input may be anything residual, and stay.
// Defines: ROWS, N8_TILES = ceil(ROWS / 8), RING_BYTES, KINDS (bit i: kind i occurs), MAX_MATRICES (max_of per launch), F32_MATRICES (f32 matrices in the last
// phase). More than 16 rows are multiplied by warpgroup products.
// Architecture: sm_90a. Judge: cpu::reference::matmul, norm, activation; test crates/cuda/tests/params.rs.
#ifndef F32_MATRICES
#define F32_MATRICES 0
#endif
#define WARPS 8
#define M16_TILES 2  // 16-row tiles of a warp, one in each row block of a tile
#define THREADS (WARPS * 32)  // that mma_slice

// All warps that mma_slice.
__device__ __forceinline__ void sync_math_warps() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

#include "common/prelude.cuh"

// Who scales rows and has_gemm f32 matrices: two warps of their rank.
#define FIRST_AUX_WARP (WARPS + 2)
#define F32_WARPS 2
__device__ __forceinline__ int f32_thread() { return threadIdx.x - FIRST_AUX_WARP * 32; }
__device__ __forceinline__ int f32_warp() { return warp_index() - FIRST_AUX_WARP; }
__device__ __forceinline__ void f32_sync() { asm volatile("bar.sync 2, %0;" ::"n"(F32_WARPS * 32) : "memory"); }

#include "gemm/fused_layer_phases.cuh"
#include "gemm/fused_layer_epilogue.cuh"
#include "gemm/f32_gemm_sm90.cuh"
#include "gemm/mainloop.cuh"

struct FusedLayerParams {
    Matrix matrices[MAX_MATRICES];
    Phase phases[MAX_PHASES];
    float4* scratch;
    u32* barrier;   // 256 bytes; behind it two times MAX_ROWS scales
    float* scales;  // 1 / rms of the rows as last known: read, and written after the last norm
    float eps;
    u16 n_phases, n_barrier_phases;  // n_barrier_phases: with those that have no products
#if F32_MATRICES
    F32Params f32;
#endif
};

// Registers of a thread that has_gemm and of the others, phase_index range what the launch has: 168 each.
constexpr int MATH_REGISTERS = N8_TILES > 3 ? 200 : 208, AUX_REGISTERS = N8_TILES > 3 ? 104 : 88;
constexpr int STAGE_BYTES = WEIGHT_STAGE_BYTES + N8_TILES * A16_TILE * max_slice_chunks(0);
constexpr int STAGES = RING_BYTES / STAGE_BYTES;
// A warp may hold a piece while it waits for the next.
static_assert(STAGES >= 3, "a ring of three slices of any kind");

// Where parts of a phase's tiles are remaining.
__device__ __forceinline__ float4* scratch_of(const FusedLayerParams& params, int phase_index) { return params.scratch + size_t(phase_index & 1) * gridDim.x * 2 * 16 * N8_TILES * 32; }

__device__ __forceinline__ u32 grid_barrier_phase(const u32* barrier) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(barrier) : "memory");
    return v & 0x80000000u;
}
__device__ __forceinline__ void grid_barrier_arrive(u32* barrier) {
    const u32 one = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(barrier), "r"(one) : "memory");
}
// Between what threads epilogue_kind or read and what bulk copies read.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Between what threads epilogue_kind to shared memory and what warpgroup products read.
__device__ __forceinline__ void fence_proxy_async_shared() {
#if USE_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Where blocks signal_oldest each other the scales of the rows of a phase's input, behind the barrier: +0 residual and after. Only phases 1 and 3
// scale, and have a slot each; phase 2 makes that of phase 1 absent again, phase 1 of the next params that of phase 3.
#define MAX_ROWS 64
__device__ __forceinline__ float* published_scales(const FusedLayerParams& params, int phase_index) { return (float*)(params.barrier + 64) + phase_index / 2 * MAX_ROWS; }

// A warp hands over what its lanes have read or written: every lane arrives for itself, phase_index racecheck follows and phase_index costs less than
// one lane of a warp that has come together.
#define WARP_LANES 32

// Whether the phase of this parity is over.
__device__ __forceinline__ u32 mbarrier_test_wait(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over;
}

// When a phase is open: the scales of the rows that its input is made of. A block adds up the squares of a row or two or none, and tells
// all; where rows are so few that a warp has one, each block adds up all, phase_index saves telling.
#define LOCAL_SCALES (ROWS <= F32_WARPS)
__device__ __forceinline__ void set_scale(const FusedLayerParams& params, RowScales& rows, int row, float scale) {
    rows.correction[row] = scale / (rows.inv_rms[row] * HEADROOM);
    rows.inv_rms[row] = scale;
    if (blockIdx.x == 0) params.scales[row] = scale;
}
__device__ __forceinline__ void compute_scales(const FusedLayerParams& params, int phase_index, RowScales& rows) {
    const Phase& phase = params.phases[phase_index];
    static_assert(N8_TILES * 8 <= F32_WARPS * 32, "a thread for each row");
    const int f32_row = f32_thread(), warp = f32_warp(), lane = threadIdx.x % 32;
    if (phase.in_squares == nullptr) {
        if (f32_row < N8_TILES * 8) {
            if (phase_index == 0) rows.inv_rms[f32_row] = f32_row < ROWS ? __ldcg(params.scales + f32_row) : 0.0f;
            rows.correction[f32_row] = 1.0f;
        }
        return;
    }
    constexpr int LOADS = 3;
    const int quads = (phase.norm_width + 255) / 256 * 4;
    // The last blocks, phase_index have no job of f32 matrices where these are few.
    const int first = LOCAL_SCALES ? warp : (gridDim.x - 1 - blockIdx.x) * F32_WARPS + warp;
#pragma unroll 1
    for (int row = first; row < ROWS; row += F32_WARPS * gridDim.x) {
        float sum = 0.0f;
#pragma unroll 1
        for (int i = lane; i < quads; i += 32 * LOADS) {
            float4 v[LOADS];
#pragma unroll
            for (int l = 0; l < LOADS; l++) {
                v[l] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i + 32 * l < quads) v[l] = __ldcg((const float4*)phase.in_squares + size_t(row) * quads + i + 32 * l);
            }
#pragma unroll
            for (int l = 0; l < LOADS; l++) sum += (v[l].x + v[l].y) + (v[l].z + v[l].w);
        }
        sum = warp_sum(sum);
        const float scale = 1.0f / sqrtf(sum * (1.0f / phase.norm_width) + params.eps);
        if (lane == 0) {
            if (LOCAL_SCALES)
                set_scale(params, rows, row, scale);
            else
                flag_store(published_scales(params, phase_index) + row, scale);
        }
    }
}
__device__ __forceinline__ void collect_scales(const FusedLayerParams& params, int phase_index, RowScales& rows) {
    if (LOCAL_SCALES || params.phases[phase_index].in_squares == nullptr) return;
    const int f32_row = f32_thread();
    static_assert(F32_WARPS * 32 <= MAX_ROWS, "a slot for each thread");
    float scale;
    do {
        scale = flag_load(published_scales(params, phase_index) + f32_row);
    } while (__any_sync(WARP_ALL, f32_row < ROWS && !is_ready(scale)));
    if (f32_row < ROWS) set_scale(params, rows, f32_row, scale);
}

// Pieces of weights under way at max_of. More would be no faster, and what blocks exchange waits in the memory's queues behind them. They
// must be fewer than slots: while the lane that fills waits for a slot it tells of none of them, and a slot is given back only when
// the piece behind it has been told of.
#ifndef MAX_IN_FLIGHT
#define MAX_IN_FLIGHT (STAGES > 4 ? 3 : 2)
#endif
static_assert(MAX_IN_FLIGHT < STAGES, "a slot is given back when the piece behind it has been told of");

constexpr u32 FULL_TO_EMPTY = STAGES * 8;  // from the barrier of a full slot to that of the same when empty
// Barriers of a piece's slot: `landed`, its weights are there, phase_index only the lane that fills waits for; `full`, that lane has told so and
// its x is there; `empty`, all warps have given it back.
struct SharedStorage {
    uint4 slots[2 * STAGES];  // for those that mma_slice, in state: x / 16, `full`, its parity, address of the next
    u64 landed[STAGES], full[STAGES], empty[STAGES];
    u64 null_slot, phase_open, scales_ready, phase_done;
    u64 epilogue_full[2], epilogue_empty[2];  // whether stages of tiles are full, and free again
    WorkRange ranges[MAX_PHASES];

    // A lane of each of warps 8 to 11 is_new_tile some: each takes it 60 clocks, and lanes of one warp would consumer_wait turns.
    __device__ __forceinline__ void init_barriers(int warp) {
        if (threadIdx.x % 32) return;
        const auto init = [](const u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), arrivals); };
        if (warp == WARPS) {
            for (int i = 0; i < STAGES; i++) init(landed[i], 1);
            for (int i = 0; i < 2; i++) init(epilogue_full[i], 1);
        } else if (warp == WARPS + 1) {
            for (int i = 0; i < STAGES; i++) init(full[i], 1 + WARP_LANES);
            init(phase_open, 1);
        } else if (warp == WARPS + 2) {
            for (int i = 0; i < STAGES; i++) init(empty[i], WARPS * WARP_LANES);
            init(null_slot, WARPS * WARP_LANES);
        } else if (warp == WARPS + 3) {
            for (int i = 0; i < 2; i++) init(epilogue_empty[i], WARPS * WARP_LANES);
            init(scales_ready, F32_WARPS * WARP_LANES);
            init(phase_done, (WARPS + 1) * WARP_LANES);
        }
        fence_mbarrier_init();
    }
};
// The stages of a block's tiles, in state.
struct EpilogueStages {
    EpilogueSmem stages[2];
};
#if F32_MATRICES
#define F32_SMEM_BYTES sizeof(F32Smem)
#else
#define F32_SMEM_BYTES 0
#endif
static_assert(RING_BYTES + sizeof(RowScales) + sizeof(EpilogueStages) + sizeof(SharedStorage) + sizeof(scale_smem) + F32_SMEM_BYTES <= 227 << 10,
              "beside the ring there is more than the host counts with (launch::params::OWN_SHARED)");
// One lane of a warp that is whole: ptxas wraps what one thread alone may issue into a loop over lanes, unless it was chosen so.
__device__ __forceinline__ bool elect_one() {
    u32 chosen;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(chosen));
    return chosen;
}
// A slot of the ring: its barrier `full`, where it lies, and the parity of its state. `landed` and `empty` lie STAGES residual and behind `full`.
struct PipelineState {
    u32 barrier, stage, parity;

    __device__ __forceinline__ void advance(u32 first, u32 ring) {
        barrier += 8;
        stage += STAGE_BYTES;
        if (barrier == first + STAGES * 8) {
            barrier = first;
            stage = ring;
            parity ^= 1;
        }
    }
};

// Warp 8, one lane: weights, as far ahead as the ring reaches. Beside products every instruction is paid, so of a piece nothing is worked out
// that is known of its tile.
__device__ __forceinline__ void weight_producer(const FusedLayerParams& params, SharedStorage& smem, EpilogueStages& tiles, u32 ring) {
    u32 first = shared_address(smem.full);
    asm volatile("" : "+r"(first), "+r"(ring));  // else made anew for each piece
    const u64 evict_first = policy_evict_first(), evict_last = policy_evict_last();
    // Of this piece; the first state finds all slots empty: the phase residual the first counts as over. Of the oldest under way.
    PipelineState state = {first, ring, 1}, oldest = {first, ring, 0};
    int in_flight = 0, n_tiles = 0;
    const auto landed_barrier = [&](const PipelineState& state) { return state.barrier - STAGES * 8; };
    // Tells those that mma_slice of the oldest piece under way, when it has landed.
    const auto signal_oldest = [&]() {
        mbarrier_wait(landed_barrier(oldest), oldest.parity);
        mbarrier_arrive(oldest.barrier);
        oldest.advance(first, ring);
        in_flight--;
    };
#pragma unroll 1
    for (int phase_index = 0; phase_index < params.n_phases; phase_index++) {
        const Phase& phase = params.phases[phase_index];
        WorkRange range = smem.ranges[phase_index];
#pragma unroll 1
        while (range.units) {
            const Matrix& s = params.matrices[range.begin.matrix];
            const int tile = range.begin.tile, n = range.run_length();
            const u8* weights[2];
            int rows[2];
            u32 bytes[2][2];  // of the first and the second piece of a unit, in the row blocks
            const u32 of_tile[2] = {s.first_slice_bytes, s.tile_bytes - s.first_slice_bytes};
#pragma unroll
            for (int m = 0; m < 2; m++) {
                rows[m] = row_tiles(s, row_block(phase.epilogue_kind, tile, m));
                weights[m] = row_block_at(s, phase.epilogue_kind, tile, m) + rows[m] * (64 + range.begin.unit * s.tile_bytes);
                bytes[0][m] = rows[m] * of_tile[0];
                bytes[1][m] = rows[m] * of_tile[1];
            }
            const auto issue = [&](int p) {
                if (in_flight == MAX_IN_FLIGHT) signal_oldest();
                mbarrier_wait(state.barrier + FULL_TO_EMPTY, state.parity);
                mbarrier_arrive_expect_tx(landed_barrier(state), bytes[p][0] + bytes[p][1]);
                cp_async_bulk(state.stage, weights[0], bytes[p][0], landed_barrier(state), evict_first);
                if (bytes[p][1]) cp_async_bulk(state.stage + 8 * of_tile[p], weights[1], bytes[p][1], landed_barrier(state), evict_first);
                in_flight++;
                state.advance(first, ring);
#pragma unroll
                for (int m = 0; m < 2; m++) weights[m] += bytes[p][m];
            };
            // What the tile's end needs, in the smem of the tile residual last. With a barrier of its rank: the slices under way are few, and
            // one that came late by it would hold up all.
            const auto load_epilogue_operands = [&]() {
                // This takes as long as the products of two slices, and what has landed is not to wait for it.
                while (in_flight && mbarrier_test_wait(landed_barrier(oldest), oldest.parity)) signal_oldest();
                EpilogueSmem& to = tiles.stages[n_tiles & 1];
                const u32 barrier = shared_address(smem.epilogue_full + (n_tiles & 1));
                // Short tiles may end only when they are told of the slices under way.
                const u32 ended = shared_address(smem.epilogue_empty + (n_tiles & 1)), parity = n_tiles >> 1 & 1 ^ 1;
                while (in_flight && !mbarrier_test_wait(ended, parity)) signal_oldest();
                mbarrier_wait(ended, parity);
                n_tiles++;
                to.blocks = tile_blocks(phase, s, tile);
                u32 norm_bytes[2];
#pragma unroll
                for (int m = 0; m < 2; m++) norm_bytes[m] = phase.norm_weight ? max(0, min(128, s.n_out - row_block(phase.epilogue_kind, tile, m) * 128)) / 4 * 16 : 0;
                mbarrier_arrive_expect_tx(barrier, (rows[0] + rows[1]) * 64 + norm_bytes[0] + norm_bytes[1]);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if (rows[m]) cp_async_bulk(shared_address(to.factors[m]), row_block_at(s, phase.epilogue_kind, tile, m), rows[m] * 64, barrier, evict_first);
                    if (norm_bytes[m]) cp_async_bulk(shared_address(to.norm[m]), phase.norm_weight + row_block(phase.epilogue_kind, tile, m) * 128, norm_bytes[m], barrier, evict_last);
                }
            };
            bool is_new_tile = range.next < 0;  // a tile that is not remainder_begin
#pragma unroll 1
            for (int remaining = n; remaining; remaining--) {
                issue(0);
                if (is_new_tile) load_epilogue_operands();
                is_new_tile = false;
                if (s.slices == 2) issue(1);
            }
            range.advance(params.matrices, phase.epilogue_kind, n);
        }
    }
    while (in_flight) signal_oldest();
}

// One piece of x, looked at until all of it is there. COUNT: 16 bytes of each lane.
template <int COUNT>
__device__ __forceinline__ void poll_slice(const u8* from, u32 to) {
    uint4 v[COUNT];
    bool waiting;
    do {
        waiting = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float4 seen = flag_load((const float4*)(from + (i * 32 + threadIdx.x % 32) * 16));
            v[i] = make_uint4(__float_as_uint(seen.x), __float_as_uint(seen.y), __float_as_uint(seen.z), __float_as_uint(seen.w));
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) waiting |= min(min(v[i].x, v[i].y), min(v[i].z, v[i].w)) == 0;
    } while (__any_sync(WARP_ALL, waiting));
#pragma unroll
    for (int i = 0; i < COUNT; i++) st_shared_v4(to + (i * 32 + threadIdx.x % 32) * 16, v[i]);
}
// The same of more than registers have smem for, by copies that a lane starts and then is_polling at.
__device__ __forceinline__ void poll_slice_async(const u8* from, u32 to, int count) {
    const u32 at = threadIdx.x % 32 * 16;
    u32 not_ready = count == 32 ? 0xffffffffu : (1u << count) - 1;
    while (not_ready) {
#pragma unroll 2
        for (int i = 0; i < count; i++)
            if (not_ready >> i & 1) cp_async_16(to + at + i * 512, from + at + i * 512);
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll 2
        for (int i = 0; i < count; i++) {
            const uint4 v = ld_shared_v4(to + at + i * 512);
            if (v.x && v.y && v.z && v.w) not_ready &= ~(1u << i);
        }
    }
}

// Warp 9: x of every piece, by bulk copies evict_first its phase is phase_open, and residual that by the word. A parity tells of a phase until the next
// is over, so no phase is done residual this warp has seen it open: of a block without units nobody else waits for it.
__device__ __forceinline__ void activation_producer(const FusedLayerParams& params, SharedStorage& smem, u32 ring) {
    u32 first = shared_address(smem.full);
    asm volatile("" : "+r"(first), "+r"(ring));  // else made anew for each piece
    const u32 phase_open = shared_address(&smem.phase_open), phase_done = shared_address(&smem.phase_done);
    const u64 evict_last = policy_evict_last();
    PipelineState state = {first, ring, 1};
#pragma unroll 1
    for (int phase_index = 0; phase_index < params.n_phases; phase_index++) {
        const Phase& phase = params.phases[phase_index];
        bool is_open = phase_index == 0;
        WorkRange range = smem.ranges[phase_index];
#pragma unroll 1
        while (range.units) {
            const int n = range.run_length(), slices = params.matrices[range.begin.matrix].slices;
            const u32 bytes = slices * N8_TILES * A16_TILE;
            const u8* x = phase.x + size_t(range.begin.unit) * slices * bytes;
            const auto next = [&]() {
                state.advance(first, ring);
                x += bytes;
            };
            int remaining = n * slices;
#pragma unroll 1
            while (remaining && !is_open) {
                mbarrier_wait(state.barrier + FULL_TO_EMPTY, state.parity);
                is_open = __all_sync(WARP_ALL, mbarrier_test_wait(phase_open, phase_index & 1));
                if (is_open) {
                    fence_proxy_async_global();
                    break;  // this piece comes by a copy, and its slot is free already
                }
                const u32 to = state.stage + WEIGHT_STAGE_BYTES;
                if constexpr (N8_TILES > 4)
                    poll_slice_async(x, to, slices * 2 * N8_TILES);
                else if (slices == 2)
                    poll_slice<4 * N8_TILES>(x, to);
                else
                    poll_slice<2 * N8_TILES>(x, to);
                fence_proxy_async_shared();
                mbarrier_arrive(state.barrier);
                next();
                remaining--;
            }
#pragma unroll 1
            for (; remaining; remaining--) {
                mbarrier_wait(state.barrier + FULL_TO_EMPTY, state.parity);
                if (elect_one()) {
                    mbarrier_arrive(state.barrier, WARP_LANES - 1);
                    mbarrier_arrive_expect_tx(state.barrier, bytes);
                    cp_async_bulk(state.stage + WEIGHT_STAGE_BYTES, x, bytes, state.barrier, evict_last);
                }
                next();
            }
            range.advance(params.matrices, phase.epilogue_kind, n);
        }
        mbarrier_wait(phase_open, phase_index & 1);
        mbarrier_arrive(phase_done);
    }
}

// Warps 10 and 11.
#if F32_MATRICES
#define F32_SMEM_PARAM , F32Smem& f32_smem
#else
#define F32_SMEM_PARAM
#endif
__device__ __forceinline__ void aux_warps(const FusedLayerParams& params, SharedStorage& smem, RowScales& rows F32_SMEM_PARAM) {
    const u32 phase_open = shared_address(&smem.phase_open), scales_ready = shared_address(&smem.scales_ready), phase_done = shared_address(&smem.phase_done);
    const bool is_barrier_thread = f32_thread() == 0;
#if F32_MATRICES
    f32_prologue(params.f32, f32_smem);
#endif
    pdl_wait();
    u32 residual = 0;
    if (is_barrier_thread) residual = grid_barrier_phase(params.barrier);
    for (int phase_index = 0; phase_index < params.n_barrier_phases; phase_index++) {
        if (is_barrier_thread) {
            if (phase_index) {
                mbarrier_wait(phase_done, (phase_index - 1) & 1);
                fence_proxy_async_global();
                grid_barrier_arrive(params.barrier);
                while (grid_barrier_phase(params.barrier) == residual) {}
                residual ^= 0x80000000u;
                fence_proxy_async_global();
            }
            mbarrier_arrive(phase_open);
        }
        mbarrier_wait(phase_open, phase_index & 1);
        const Phase& phase = params.phases[phase_index];
        const bool has_gemm = phase_index < params.n_phases;
        if (has_gemm) compute_scales(params, phase_index, rows);
#if F32_MATRICES
        // While others add up.
        if (!LOCAL_SCALES && phase_index + 1 == params.n_phases) f32_mainloop(params.f32, f32_smem);
#endif
        if (has_gemm) collect_scales(params, phase_index, rows);
        if (blockIdx.x == 0 && phase.out_f16) zero_fill_f16(params.matrices[phase.first], phase, f32_thread(), F32_WARPS * 32);
#pragma unroll 1
        for (int i = blockIdx.x * F32_WARPS * 32 + f32_thread(); i < phase.n_consumed; i += gridDim.x * F32_WARPS * 32)
            phase.consumed[i] = make_uint4(0, 0, 0, 0);
        if (blockIdx.x == 0 && (phase_index == 1 || phase_index == 2)) published_scales(params, phase_index == 1 ? 3 : 1)[f32_thread()] = 0.0f;
        mbarrier_arrive(scales_ready);
        if (has_gemm && phase.private_tiles) {
            mbarrier_wait(scales_ready, phase_index & 1);
            reduce_remainder_tiles(phase, params.matrices[phase.first], scratch_of(params, phase_index), f32_warp(), F32_WARPS, rows);
            f32_sync();
        }
    }
#if F32_MATRICES
    if (LOCAL_SCALES) f32_mainloop(params.f32, f32_smem);
    f32_sync();
    f32_epilogue(params.f32, f32_smem, [&](int row) { return rows.correction[row]; });
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) fused_layer(const __grid_constant__ FusedLayerParams params) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(16) RowScales rows;
    __shared__ __align__(16) EpilogueStages tiles;
    const int warp = warp_index();
    pdl_launch();
    __shared__ __align__(16) SharedStorage smem;
    const u32 scales_ready = shared_address(&smem.scales_ready), phase_done = shared_address(&smem.phase_done);
    // Many blocks begin only when the kernel residual has ended, and all wait for them: no warp has more than one thing to work out.
    if (warp < params.n_phases) smem.ranges[warp] = work_range_of(params.matrices, params.phases[warp]);
    static_assert(MAX_PHASES * 32 + 2 * STAGES <= THREADS + 128, "a thread for each slot of the table, behind the warps that have ranges");
    const int slot = threadIdx.x - MAX_PHASES * 32;
    if (slot >= 0 && slot < 2 * STAGES)
        smem.slots[slot] = make_uint4((shared_address(ring) + slot % STAGES * STAGE_BYTES + WEIGHT_STAGE_BYTES) / 16, shared_address(smem.full + slot % STAGES), slot / STAGES,
                                        shared_address(smem.slots + (slot + 1) % (2 * STAGES)));
    smem.init_barriers(warp);
    __syncthreads();
#if F32_MATRICES
    __shared__ F32Smem f32_smem;
#define F32_SMEM_ARG , f32_smem
#else
#define F32_SMEM_ARG
#endif
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(AUX_REGISTERS));
        if (warp == WARPS) {
            if (elect_one()) weight_producer(params, smem, tiles, shared_address(ring));
        } else if (warp == WARPS + 1) {
            pdl_wait();
            activation_producer(params, smem, shared_address(ring));
        } else {
            aux_warps(params, smem, rows F32_SMEM_ARG);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
    pdl_wait();

    // The next piece's slot_entry of the table, and what it says as last looked.
    u32 slot_entry = shared_address(smem.slots);
    uint4 seen;
    int n_tiles = 0;
    const auto peek_next = [&]() { seen = ld_shared_v4(slot_entry); };
    // Waits for the piece that was looked for; whoever takes it gives it back.
    const auto consumer_wait = [&]() {
        mbarrier_wait(seen.y, seen.z);
        slot_entry = seen.w;
        return PipelineSlot{seen.x, seen.y};
    };
    const auto consumer_release = [&](const PipelineSlot& slot) { mbarrier_arrive(slot.barrier + FULL_TO_EMPTY); };
    const PipelineSlot null_slot = {0, shared_address(&smem.null_slot) - FULL_TO_EMPTY};
    for (int phase_index = 0; phase_index < params.n_phases; phase_index++) {
        const Phase& phase = params.phases[phase_index];
        float4* scratch = scratch_of(params, phase_index);
        bool has_scales = false;
        const auto wait_for_scales = [&]() {
            if (!has_scales) mbarrier_wait(scales_ready, phase_index & 1);
            has_scales = true;
        };
        WorkRange range = smem.ranges[phase_index];
        const WorkUnit& unit = range.begin;
        while (range.units) {
            const Matrix& s = params.matrices[unit.matrix];
            const bool is_remainder = range.next >= 0;
            const int n = range.run_length();
            float acc[M16_TILES][N8_TILES][4];
#pragma unroll
            for (int m = 0; m < M16_TILES; m++)
#pragma unroll
                for (int i = 0; i < N8_TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[m][i][e] = 0.0f;
            gemm_mainloop(range.shape.kind, ring, n, warp_has_rows(range.shape.rows, warp), acc, consumer_wait, peek_next, consumer_release, null_slot);
            if (is_remainder) {
                publish_partial_tile(phase, s, scratch, unit.tile, remainder_first_block(phase, s, unit.tile), warp, acc);
            } else {
                mbarrier_wait(shared_address(smem.epilogue_full + (n_tiles & 1)), n_tiles >> 1 & 1);
                epilogue(phase, s, scratch, unit.tile, warp, rows, tiles.stages[n_tiles & 1], wait_for_scales, acc);
                mbarrier_arrive(shared_address(smem.epilogue_empty + (n_tiles & 1)));
                n_tiles++;
            }
            range.advance(params.matrices, phase.epilogue_kind, n);
        }
        wait_for_scales();
        mbarrier_arrive(phase_done);
    }
}
