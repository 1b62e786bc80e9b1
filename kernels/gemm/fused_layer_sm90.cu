// gemm/fused_layer_sm90: all GEMMs between two token mixers of a decode step (1 to 64 rows), in one persistent launch.
//
//   x += Wo y;   h = silu(Wgate n(x)) * (Wup n(x));   x += Wdown h;   p = W n(x) with W of the next layer
//   n(x) = x / sqrt(mean(x^2) + eps) * weight of the norm
//
// Each GEMM is a phase. A launch per GEMM loses 6 to 8 us at its ends, during which memory is idle. Here a producer
// warp prefetches weights of the next phase while this one ends; only x depends on the previous phase.
//
// Stream-K: the work units of a phase are distributed over all blocks (stream_k.cuh), and partial tiles are reduced in
// block order. The bits of a row depend on shapes and grid only, not on ROWS: batch-invariant.
//
// RMS norm is folded into the GEMMs around it. The epilogue that updates the residual x writes f16(x * weight *
// inv_rms * HEADROOM) with the last known inv_rms, and the sum of squares of each 16 columns. The next phase adds up
// the squares, which gives the true inv_rms, and multiplies its results by true / (last * HEADROOM).
//
// No grid barrier between GEMMs: activations carry an in-band ready flag (common/sync.cuh), so a block starts a phase
// as soon as its first K = 256 slice of x has landed. A grid barrier follows for what is needed later: squares, the
// residual stream, clearing of consumed activations, and x by bulk copies.
//
// Warps: 0..7 math; 8 weight and epilogue-operand producer; 9 activation producer; 10 and 11 auxiliary: grid barrier,
// norm scales, reduction of stream-K tiles, f32 matrices.
// All blocks are resident at once: grid = multiprocessors, and a block takes more than half of their shared memory.
// With programmatic dependent launch, this launch may wait for blocks of its predecessors only.
//
// in      FusedLayerParams (fused_layer_phases.cuh), by value
// out     residual f32 [ROWS][n_out]; results of EPILOGUE_STORE matrices; scales [ROWS], inv_rms of the rows of
//         the last norm
// grid    multiprocessors x 384 threads
// smem    RING_BYTES dynamic: STAGES stages, each a K-slice of 16 m16 tiles of weights and the same values of x
// scratch two times gridDim * 2 * 16 * N8_TILES * 512 bytes, +0 before and after. Phases alternate, since a block may
//         publish its first partial tile of a phase while another has yet to consume one of the phase before.
//         Activations between phases: +0 before and after; those of the last phase's input may be anything before, and
//         stay.
// defines ROWS, N8_TILES = ceil(ROWS / 8), RING_BYTES, KINDS (bit i: kind i occurs), MAX_MATRICES (per launch),
//         F32_MATRICES (f32 matrices in the last phase). From 17 rows on the math warps use wgmma.
// arch    sm_90a
// reference cpu::reference::{matmul, norm, activation}     test crates/cuda/tests/fused_layer.rs
#ifndef F32_MATRICES
#define F32_MATRICES 0
#endif
#define WARPS 8
#define M16_TILES 2           // m16 tiles of a warp, one in each row block of a tile
#define THREADS (WARPS * 32)  // of the math warps

#include "common/prelude.cuh"

// All math warps.
__device__ __forceinline__ void sync_math_warps() { named_barrier_sync<1, THREADS>(); }

// The auxiliary warps, which compute scales and multiply f32 matrices.
#define FIRST_AUX_WARP (WARPS + 2)
#define F32_WARPS 2
__device__ __forceinline__ int f32_thread() { return threadIdx.x - FIRST_AUX_WARP * 32; }
__device__ __forceinline__ int f32_warp() { return warp_index() - FIRST_AUX_WARP; }
__device__ __forceinline__ void f32_sync() { named_barrier_sync<2, F32_WARPS * 32>(); }

#include "gemm/fused_layer_phases.cuh"
#include "gemm/fused_layer_epilogue.cuh"
#include "gemm/f32_gemm_tf32.cuh"
#include "gemm/fused_layer_aux.cuh"
#include "gemm/fused_layer_tiles.cuh"
#include "gemm/mainloop.cuh"

// Registers per thread of math warps and of the other warps; the launch has 168 for each.
constexpr int MATH_REGISTERS = N8_TILES > 3 ? 200 : 208, AUX_REGISTERS = N8_TILES > 3 ? 104 : 88;
constexpr int STAGE_BYTES = WEIGHT_STAGE_BYTES + N8_TILES * A16_TILE * max_slice_chunks(0);
constexpr int STAGES = RING_BYTES / STAGE_BYTES;
// A warp may hold a slice while it waits for the next.
static_assert(STAGES >= 3, "the ring holds three slices of any kind");

// Between thread writes to shared memory and wgmma reads.
__device__ __forceinline__ void fence_proxy_async_shared() {
#if USE_WGMMA
    fence_proxy_async();
#endif
}

// Most weight slices in flight. More are no faster, and traffic between blocks queues behind them. They must be fewer
// than stages: while the producer waits for an empty stage it signals none of them, and a stage is released only after
// the next slice was signalled.
#ifndef MAX_IN_FLIGHT
#define MAX_IN_FLIGHT (STAGES > 4 ? 3 : 2)
#endif
static_assert(MAX_IN_FLIGHT < STAGES, "a stage is released after the next slice was signalled");

constexpr u32 FULL_TO_EMPTY = STAGES * 8;  // from the full barrier of a stage to its empty barrier
// Barriers of a stage: `landed`, its weights have arrived (only the producer waits for it); `full`, the producer has
// signalled that, and x is there; `empty`, all math warps have released it.
struct SharedStorage {
    // what consumers read, in ring order: x / 16, full barrier, parity, address of the next entry
    uint4 slots[2 * STAGES];
    u64 landed[STAGES], full[STAGES], empty[STAGES];
    u64 null_slot, phase_open, scales_ready, phase_done;
    u64 epilogue_full[2], epilogue_empty[2];  // of the two epilogue stages
    WorkRange ranges[MAX_PHASES];

    // One lane of each of warps 8 to 11 initialises some: each takes 60 clocks, and lanes of one warp would be
    // serialised.
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
// Epilogue operands, double-buffered by tile.
struct EpilogueStages {
    EpilogueSmem stages[2];
};
#if F32_MATRICES
#define F32_SMEM_BYTES sizeof(F32Smem)
#else
#define F32_SMEM_BYTES 0
#endif
static_assert(RING_BYTES + sizeof(RowScales) + sizeof(EpilogueStages) + sizeof(SharedStorage) + sizeof(scale_smem) +
                      F32_SMEM_BYTES <=
                  227 << 10,
              "more shared memory beside the ring than the host reserves (OWN_SHARED of its launch)");
// A stage of the ring by addresses: its `full` barrier, its memory, and the parity of its phase. `landed` and `empty`
// lie STAGES barriers before and after `full`.
struct RingCursor {
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

// Warp 8, one lane: weights, as far ahead as the ring reaches. Its instructions compete with the math warps, so what is
// known per tile is not recomputed per slice.
__device__ __forceinline__ void weight_producer(const FusedLayerParams& params, SharedStorage& smem,
                                                EpilogueStages& tiles, u32 ring) {
    u32 first = shared_address(smem.full);
    make_opaque(first, ring);  // else recomputed for each slice
    const u64 evict_first = policy_evict_first(), evict_last = policy_evict_last();
    // `state`: the stage to fill, at first with the parity of an already completed phase: all stages are empty.
    // `oldest`: the oldest slice in flight.
    RingCursor state = {first, ring, 1}, oldest = {first, ring, 0};
    int in_flight = 0, n_tiles = 0;
    const auto landed_barrier = [&](const RingCursor& state) { return state.barrier - STAGES * 8; };
    // Signals the math warps that the oldest slice has landed.
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
            u32 bytes[2][2];  // of the first and the second slice of a unit, by row block
            const u32 of_tile[2] = {s.first_slice_bytes, s.tile_bytes - s.first_slice_bytes};
#pragma unroll
            for (int m = 0; m < 2; m++) {
                rows[m] = row_tiles(s, row_block(phase.epilogue_kind, tile, m));
                weights[m] =
                    row_block_at(s, phase.epilogue_kind, tile, m) + rows[m] * (64 + range.begin.unit * s.tile_bytes);
                bytes[0][m] = rows[m] * of_tile[0];
                bytes[1][m] = rows[m] * of_tile[1];
            }
            const auto issue = [&](int p) {
                if (in_flight == MAX_IN_FLIGHT) signal_oldest();
                mbarrier_wait(state.barrier + FULL_TO_EMPTY, state.parity);
                mbarrier_arrive_expect_tx(landed_barrier(state), bytes[p][0] + bytes[p][1]);
                cp_async_bulk(state.stage, weights[0], bytes[p][0], landed_barrier(state), evict_first);
                if (bytes[p][1])
                    cp_async_bulk(state.stage + 8 * of_tile[p], weights[1], bytes[p][1], landed_barrier(state),
                                  evict_first);
                in_flight++;
                state.advance(first, ring);
#pragma unroll
                for (int m = 0; m < 2; m++) weights[m] += bytes[p][m];
            };
            // Operands of the tile's epilogue, into the buffer of the tile before last. They have a barrier of their
            // own: few slices are in flight, and one that came late would stall all.
            const auto load_epilogue_operands = [&]() {
                // This takes as long as the MMAs of two slices; landed slices are signalled first.
                while (in_flight && mbarrier_test_wait(landed_barrier(oldest), oldest.parity)) signal_oldest();
                EpilogueSmem& to = tiles.stages[n_tiles & 1];
                const u32 barrier = shared_address(smem.epilogue_full + (n_tiles & 1));
                // A short tile may end only after the slices in flight were signalled.
                const u32 ended = shared_address(smem.epilogue_empty + (n_tiles & 1)), parity = n_tiles >> 1 & 1 ^ 1;
                while (in_flight && !mbarrier_test_wait(ended, parity)) signal_oldest();
                mbarrier_wait(ended, parity);
                n_tiles++;
                to.blocks = tile_blocks(phase, s, tile);
                u32 norm_bytes[2];
#pragma unroll
                for (int m = 0; m < 2; m++)
                    norm_bytes[m] =
                        phase.norm_weight
                            ? max(0, min(128, s.n_out - row_block(phase.epilogue_kind, tile, m) * 128)) / 4 * 16
                            : 0;
                mbarrier_arrive_expect_tx(barrier, (rows[0] + rows[1]) * 64 + norm_bytes[0] + norm_bytes[1]);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if (rows[m])
                        cp_async_bulk(shared_address(to.factors[m]), row_block_at(s, phase.epilogue_kind, tile, m),
                                      rows[m] * 64, barrier, evict_first);
                    if (norm_bytes[m])
                        cp_async_bulk(shared_address(to.norm[m]),
                                      phase.norm_weight + row_block(phase.epilogue_kind, tile, m) * 128, norm_bytes[m],
                                      barrier, evict_last);
                }
            };
            bool is_new_tile = range.next < 0;  // not a stream-K tile
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

// Polls one slice of x until all of it is ready. COUNT: 16-byte words per lane.
template <int COUNT>
__device__ __forceinline__ void poll_slice(const u8* from, u32 to) {
    uint4 v[COUNT];
    bool waiting;
    do {
        waiting = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float4 seen = flag_load((const float4*)(from + (i * 32 + threadIdx.x % 32) * 16));
            v[i] = make_uint4(__float_as_uint(seen.x), __float_as_uint(seen.y), __float_as_uint(seen.z),
                              __float_as_uint(seen.w));
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) waiting |= min(min(v[i].x, v[i].y), min(v[i].z, v[i].w)) == 0;
    } while (__any_sync(WARP_ALL, waiting));
#pragma unroll
    for (int i = 0; i < COUNT; i++) st_shared_v4(to + (i * 32 + threadIdx.x % 32) * 16, v[i]);
}
// The same for more than fits registers: asynchronous copies to shared memory, checked there.
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

// Warp 9: x of every slice, by bulk copies once its phase is open, before that by polling ready flags.
// The parity of `phase_open` repeats after two phases, so this warp must see each phase open before the phase ends.
// That also holds in a block without units, where no other warp waits for this one.
__device__ __forceinline__ void activation_producer(const FusedLayerParams& params, SharedStorage& smem, u32 ring) {
    u32 first = shared_address(smem.full);
    make_opaque(first, ring);  // else recomputed for each slice
    const u32 phase_open = shared_address(&smem.phase_open), phase_done = shared_address(&smem.phase_done);
    const u64 evict_last = policy_evict_last();
    RingCursor state = {first, ring, 1};
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
                    break;  // a bulk copy brings this slice; its stage is empty already
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

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
    fused_layer(const __grid_constant__ FusedLayerParams params) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(16) RowScales rows;
    __shared__ __align__(16) EpilogueStages tiles;
    const int warp = warp_index();
    pdl_launch();
    __shared__ __align__(16) SharedStorage smem;
    // Many blocks start only when the kernel before has ended, and all others wait for them: each warp computes one
    // thing at most.
    if (warp < params.n_phases) smem.ranges[warp] = work_range_of(params.matrices, params.phases[warp]);
    static_assert(MAX_PHASES * 32 + 2 * STAGES <= THREADS + 128,
                  "a thread for each slot of the table, behind the warps that have ranges");
    const int slot = threadIdx.x - MAX_PHASES * 32;
    if (slot >= 0 && slot < 2 * STAGES)
        smem.slots[slot] = make_uint4((shared_address(ring) + slot % STAGES * STAGE_BYTES + WEIGHT_STAGE_BYTES) / 16,
                                      shared_address(smem.full + slot % STAGES), slot / STAGES,
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
        setmaxnreg_dec<AUX_REGISTERS>();
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
    setmaxnreg_inc<MATH_REGISTERS>();
    pdl_wait();

    // The table entry of the next slice, and its contents as last read.
    u32 slot_entry = shared_address(smem.slots);
    uint4 seen;
    int n_tiles = 0;
    const auto peek_next = [&]() { seen = ld_shared_v4(slot_entry); };
    // Waits for the slice that was peeked; the caller releases it.
    const auto consumer_wait = [&]() {
        mbarrier_wait(seen.y, seen.z);
        slot_entry = seen.w;
        return PipelineSlot{seen.x, seen.y};
    };
    const auto consumer_release = [&](const PipelineSlot& slot) { mbarrier_arrive(slot.barrier + FULL_TO_EMPTY); };
    const PipelineSlot null_slot = {0, shared_address(&smem.null_slot) - FULL_TO_EMPTY};
    const auto multiply = [&](const Matrix&, const TileShape& shape, int n, float (&acc)[M16_TILES][N8_TILES][4]) {
        gemm_mainloop(shape.kind, ring, n, warp_has_rows(shape.rows, warp), acc, consumer_wait, peek_next,
                      consumer_release, null_slot);
    };
    // The producer has loaded them (load_epilogue_operands).
    const auto wait_for_operands = [&](const Phase&, const Matrix&, int) -> const EpilogueSmem& {
        mbarrier_wait(shared_address(smem.epilogue_full + (n_tiles & 1)), n_tiles >> 1 & 1);
        return tiles.stages[n_tiles & 1];
    };
    const auto release_operands = [&]() {
        mbarrier_arrive(shared_address(smem.epilogue_empty + (n_tiles & 1)));
        n_tiles++;
    };
    math_warps(
        params, smem, rows, warp, [](const Phase&, const Matrix&, int, bool) {}, multiply, wait_for_operands,
        release_operands);
}
