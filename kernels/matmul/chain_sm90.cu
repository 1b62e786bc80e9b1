// matmul/chain: all products between two mixers of a step of few rows (1..64), in one launch of blocks that stay.
//
//   x += out y;   h = silu(gate n(x)) * (up n(x));   x += down h;   p = in n(x) for the matrices `in` of the next layer
//   n(x) = x / sqrt(mean(x^2) + eps) * weights of the norm
//
// A launch for each of them loses 6 to 8 us at its ends, in which memory rests. Here a ninth warp fills a ring in shared memory with the
// weights of the next stage while this one ends; only x waits for the barrier between two stages.
//
// A stage is cut among the blocks, its weights are multiplied and its tiles are summed as in small.cu: the bits of a row
// depend on shapes and grid only, not on ROWS.
//
// The norm is folded into the products around it. Who adds to the residual x writes what the next stage reads with the row's last known
// scale, half(x * weights * last * HEADROOM), and the sum of squares of each 16 columns. The next stage adds those up, which gives the
// scale that is true, and multiplies its results by true / (last * HEADROOM).
//
// Warps: 0..7 multiply, 8 fetches weights, 9 x and keeps the barrier, 10 and 11 add up squares and multiply f32 matrices.
// Barrier: a word whose top bit turns when the last of the blocks has come (block 0 adds what turns it less the others' ones), so it may
// begin with either value and needs no reset. Warps 0..7 tell warp 9 when their results are written (`done`); it comes to the barrier for
// the block and tells all when the next stage is open (`open`). All blocks are resident at once: grid = multiprocessors, and
// a block takes more than half the shared memory of one. With dependent launch this launch may wait for blocks of its predecessors alone.
//
// in   Chain (chain.cuh), by value
// out  residual f32 [ROWS][n_out], results of STORE segments, scales [ROWS] of the rows of the last norm
// smem RING bytes, dynamic: pieces of any kind one after the other, each of 16 tiles of weights and the x of the same values
// scratch (scratch.cuh) gridDim * 2 * 16 * NT * 512 bytes, +0 before and after
// Defines: ROWS, NT = ceil(ROWS / 8), RING, KINDS (bit i: kind i occurs), SEGMENTS (most per launch), PLAIN (f32 matrices in the last
// stage). Below sm_90 the eight warps fill the ring by cp.async and nothing is fetched across a barrier. sm_90a multiplies more than 16
// rows by warpgroup products.
// Architecture floor: sm_80. Judge: cpu::reference::matmul, norm, activation; test crates/cuda/tests/chain.rs.
#ifndef PLAIN
#define PLAIN 0
#endif
#define WARPS 8
#define MT 2  // 16-row tiles of a warp, one in each row block of a tile
#define THREADS (WARPS * 32)  // that multiply

// All warps that multiply.
__device__ __forceinline__ void sync_multipliers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

#include "common/prelude.cuh"

// Who scales rows and multiplies f32 matrices: two warps of their own, or below sm_90 those that multiply.
#if HAS_BULK
#define SIDE_FIRST (WARPS + 2)
#define PLAIN_WARPS 2
#else
#define SIDE_FIRST 0
#define PLAIN_WARPS WARPS
#endif
__device__ __forceinline__ int plain_thread() { return threadIdx.x - SIDE_FIRST * 32; }
__device__ __forceinline__ void plain_sync() { asm volatile("bar.sync 2, %0;" ::"n"(PLAIN_WARPS * 32) : "memory"); }

#include "matmul/chain.cuh"
#include "matmul/chain_rows.cuh"
#include "matmul/plain.cuh"
#include "matmul/walk.cuh"

struct Chain {
    Segment segments[SEGMENTS];
    Stage stages[STAGES];
    float4* scratch;
    u32* barrier;
    float* scales;  // 1 / rms of the rows as last known: read, and written after the last norm
    float eps;
    int n_stages;
#if PLAIN
    Plain plain;
#endif
};

constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int max_piece(int kind) {
    return kind == KINDS_PACKED ? 0 : most(KINDS >> kind & 1 ? most(piece_bytes(kind, 0), piece_bytes(kind, 1)) : 0, max_piece(kind + 1));
}
constexpr int max_chunks(int kind) { return kind == KINDS_PACKED ? 1 : most(KINDS >> kind & 1 ? piece_chunks(kind) : 1, max_chunks(kind + 1)); }
constexpr int LARGEST = 16 * max_piece(0) + NT * A16_TILE * max_chunks(0);
// With one piece taken anywhere, the next finds room in front of it or behind.
static_assert(RING >= (HAS_BULK ? 3 : 2) * LARGEST, "a ring of three pieces of any kind, or of two where they have fixed places");

__device__ __forceinline__ u32 at_barrier(const u32* barrier) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(barrier) : "memory");
    return v & 0x80000000u;
}
__device__ __forceinline__ void come_to_barrier(u32* barrier) {
    const u32 one = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(barrier), "r"(one) : "memory");
}
// Between what threads write or read and what bulk copies read.
__device__ __forceinline__ void copies_fence() {
#if HAS_BULK
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// When a stage is open: the scales of the rows that its input is made of. The warps that do it take rows in turn.
__device__ __forceinline__ void row_scales(const Chain& chain, int which, RowScales& rows) {
    const Stage& stage = chain.stages[which];
    const int warp = plain_thread() / 32, lane = threadIdx.x % 32;
    if (stage.sums == nullptr) {
        for (int row = plain_thread(); row < NT * 8; row += PLAIN_WARPS * 32) {
            if (which == 0) rows.last[row] = row < ROWS ? __ldcg(chain.scales + row) : 0.0f;
            rows.factor[row] = 1.0f;
        }
        return;
    }
    constexpr int TURNS = (ROWS + PLAIN_WARPS - 1) / PLAIN_WARPS, TOGETHER = TURNS < 6 ? TURNS : 6, LOADS = 3;
    const int quads = (stage.width + 255) / 256 * 4;
    const float inverse = 1.0f / stage.width;
    for (int first = warp; first < ROWS; first += PLAIN_WARPS * TOGETHER) {
        float sum[TOGETHER];
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) sum[r] = 0.0f;
        for (int i = lane; i < quads; i += 32 * LOADS) {
            float4 v[LOADS][TOGETHER];
#pragma unroll
            for (int l = 0; l < LOADS; l++)
#pragma unroll
                for (int r = 0; r < TOGETHER; r++) {
                    v[l][r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (i + 32 * l < quads) v[l][r] = __ldcg((const float4*)stage.sums + size_t(min(first + r * PLAIN_WARPS, ROWS - 1)) * quads + i + 32 * l);
                }
#pragma unroll
            for (int l = 0; l < LOADS; l++)
#pragma unroll
                for (int r = 0; r < TOGETHER; r++) sum[r] += (v[l][r].x + v[l][r].y) + (v[l][r].z + v[l][r].w);
        }
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            const int row = first + r * PLAIN_WARPS;
            const float scale = 1.0f / sqrtf(warp_sum(sum[r]) * inverse + chain.eps);
            if (lane == 0 && row < ROWS) {
                rows.factor[row] = scale / (rows.last[row] * HEADROOM);
                rows.last[row] = scale;
                if (blockIdx.x == 0) chain.scales[row] = scale;
            }
        }
    }
}

#if HAS_BULK
#define PLACES 16  // pieces of the ring at most

struct Room {
    u64 full[PLACES], empty[PLACES], placed[PLACES], open, ready, done;
    uint2 places[PLACES];  // where a piece's weights and x begin in the ring
};

// Warp 8, one lane: weights, as far ahead as the ring reaches.
__device__ __forceinline__ void fill(const Chain& chain, Room& room, u32 ring) {
    const u32 full = shared_address(room.full), empty = shared_address(room.empty), placed = shared_address(room.placed);
    const u64 once = policy_evict_first(), keep = policy_evict_last();
    WeightFeed weights;
    weights.stage = 0;
    bool more = weights.enter(chain.segments, chain.stages, chain.n_stages);
    u32 slot = 0, oldest = 0, parity = 0, held = 0;  // places: of the next piece, of the oldest, its turn of the ring, how many are taken
    u32 head = 0, tail = 0;                          // bytes that are taken
    int tile = -1, of_stage = -1, of_segment = -1;
    while (more) {
        if (weights.at.tile != tile || weights.stage != of_stage || weights.at.segment != of_segment) {
            // What the tile's end needs, into L2: behind all the weights under way it would come late.
            tile = weights.at.tile, of_stage = weights.stage, of_segment = weights.at.segment;
            const Segment& s = chain.segments[of_segment];
            const Stage& stage = chain.stages[of_stage];
#pragma unroll
            for (int m = 0; m < 2; m++)
                if (weights.rows[m]) {
                    bulk_prefetch(row_block_at(s, stage.write, tile, m), weights.rows[m] * 64, keep);
                    const int column = row_block(stage.write, tile, m) * 128, bytes = min(128, s.n_out - column) / 4 * 16;
                    if (stage.norm && bytes) bulk_prefetch(stage.norm + column, bytes, keep);
                }
        }
        const u32 size = 16 * weights.bytes[0] + weights.pieces * NT * A16_TILE;
        u32 at;
        for (;;) {
            // Taken is tail .. head, or all but head .. tail.
            const bool around = held && head <= tail;
            const bool turns = !around && head + size > RING;
            at = turns ? 0 : head;
            if (held < PLACES && (around || turns ? at + size <= tail : true)) break;
            mbarrier_wait(empty + 8 * oldest, parity);
            if (++oldest == PLACES) {
                oldest = 0;
                parity ^= 1;
            }
            if (--held)
                tail = room.places[oldest].x;
            else
                head = tail = 0;
        }
        room.places[slot] = make_uint2(at, at + 16 * weights.bytes[0]);
        head = at + size;
        held++;
        const u32 to = ring + at, barrier = full + 8 * slot;
        mbarrier_expect(barrier, (weights.rows[0] + weights.rows[1]) * weights.bytes[0] + weights.pieces * NT * A16_TILE);
        mbarrier_arrive(placed + 8 * slot);
        bulk_load(to, weights.weights[0], weights.rows[0] * weights.bytes[0], barrier, once);
        if (weights.rows[1]) bulk_load(to + 8 * weights.bytes[0], weights.weights[1], weights.rows[1] * weights.bytes[0], barrier, once);
        if (++slot == PLACES) slot = 0;
        more = weights.advance(chain.segments, chain.stages, chain.n_stages);
    }
}

// Warp 9, one lane: the barrier, and x of every piece whose stage is open and whose weights have a place.
__device__ __forceinline__ void keep_barrier(const Chain& chain, Room& room, u32 ring) {
    const u32 full = shared_address(room.full), placed = shared_address(room.placed), open = shared_address(&room.open), done = shared_address(&room.done);
    const u64 keep = policy_evict_last();
    InputFeed x;
    x.stage = 0;
    bool more = x.enter(chain.segments, chain.stages, chain.n_stages);
    u32 slot = 0, parity = 0;
    u32 before = 0;
    for (int stage = 0; stage < chain.n_stages; stage++) {
        if (stage) {
            mbarrier_wait(done, (stage - 1) & 1);
            come_to_barrier(chain.barrier);
            while (at_barrier(chain.barrier) == before) {}
            before ^= 0x80000000u;
            copies_fence();
        }
        mbarrier_arrive(open);
        while (more && x.stage == stage) {
            mbarrier_wait(placed + 8 * slot, parity);
            bulk_load(ring + room.places[slot].y, x.x, x.bytes, full + 8 * slot, keep);
            if (++slot == PLACES) {
                slot = 0;
                parity ^= 1;
            }
            more = x.advance(chain.segments, chain.stages, chain.n_stages);
        }
        if (stage == 0) before = at_barrier(chain.barrier);
    }
}

// Warps 10 and 11.
#if PLAIN
#define SIDE_ROOM , PlainRoom& plain_room
#else
#define SIDE_ROOM
#endif
__device__ __forceinline__ void stand_aside(const Chain& chain, Room& room, RowScales& rows SIDE_ROOM) {
    const u32 open = shared_address(&room.open), ready = shared_address(&room.ready);
#if PLAIN
    plain_begin(chain.plain, plain_room);
#endif
    pdl_wait();
    for (int which = 0; which < chain.n_stages; which++) {
        mbarrier_wait(open, which & 1);
        row_scales(chain, which, rows);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(ready);
    }
#if PLAIN
    plain_sync();
    const auto factor = [&](int row) { return rows.factor[row]; };
    plain_jobs(chain.plain, plain_room, factor);
    plain_end(chain.plain, factor);
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 128) matmul_chain(const __grid_constant__ Chain chain) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ RowScales rows;
    const int warp = threadIdx.x / 32;
    pdl_launch();
#if HAS_BULK
    __shared__ __align__(8) Room room;
    const u32 full = shared_address(room.full), empty = shared_address(room.empty), open = shared_address(&room.open), ready = shared_address(&room.ready), done = shared_address(&room.done);
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < PLACES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, WARPS);
            mbarrier_init(shared_address(room.placed + i), 1);
        }
        mbarrier_init(open, 1);
        mbarrier_init(ready, PLAIN_WARPS);
        mbarrier_init(done, WARPS);
        mbarrier_init_fence();
    }
    __syncthreads();
#if PLAIN
    __shared__ PlainRoom plain_room;
#define SIDE_ROOM_HERE , plain_room
#else
#define SIDE_ROOM_HERE
#endif
    if (warp >= WARPS) {
        if (warp == WARPS) {
            if (threadIdx.x % 32 == 0) fill(chain, room, shared_address(ring));
        } else if (warp == WARPS + 1) {
            pdl_wait();
            if (threadIdx.x % 32 == 0) keep_barrier(chain, room, shared_address(ring));
        } else {
            stand_aside(chain, room, rows SIDE_ROOM_HERE);
        }
        return;
    }
#else
    if (warp >= WARPS) return;
    u32 before = at_barrier(chain.barrier);
#if PLAIN
    __shared__ PlainRoom plain_room;
    plain_begin(chain.plain, plain_room);
#endif
#endif
    pdl_wait();

#if HAS_BULK
    u32 piece = 0;  // of all stages
#endif
    for (int which = 0; which < chain.n_stages; which++) {
        const Stage& stage = chain.stages[which];
#if HAS_BULK
        mbarrier_wait(open, which & 1);
        // The place of the next piece, waited for; whoever takes it gives it back.
        const auto take = [&]() {
            const u32 slot = piece % PLACES;
            mbarrier_wait(full + 8 * slot, piece / PLACES & 1);
            piece++;
            const uint2 place = room.places[slot];
            return Place{slot, place.x, place.y};
        };
        const auto give = [&](const Place& place) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * place.slot);
        };
#else
        if (which) {
            sync_multipliers();
            if (threadIdx.x == 0) {
                come_to_barrier(chain.barrier);
                while (at_barrier(chain.barrier) == before) {}
            }
            before ^= 0x80000000u;
            sync_multipliers();
        }
        constexpr int TURNS = RING / LARGEST < 2 ? 2 : RING / LARGEST;
        int slot = 0;
        WeightFeed weights;
        InputFeed x;
        weights.stage = x.stage = which;
        bool more = weights.enter(chain.segments, chain.stages, which + 1);
        x.enter(chain.segments, chain.stages, which + 1);
        const auto load = [&](int slot) {
            if (more) {
                const u32 to = shared_address(ring) + slot * LARGEST;
#pragma unroll
                for (int m = 0; m < 2; m++)
                    for (int i = threadIdx.x * 16; i < weights.rows[m] * weights.bytes[0]; i += THREADS * 16)
                        cp_async_16(to + m * 8 * weights.bytes[0] + i, weights.weights[m] + i);
                for (int i = threadIdx.x * 16; i < x.bytes; i += THREADS * 16) cp_async_16(to + LARGEST - NT * A16_TILE * max_chunks(0) + i, x.x + i);
                more = weights.advance(chain.segments, chain.stages, which + 1);
                x.advance(chain.segments, chain.stages, which + 1);
            }
            cp_async_commit();
        };
        for (int i = 0; i < TURNS - 1; i++) load(i);
        // The slot of the piece before this one is free once all have come here.
        const auto take = [&]() {
            cp_async_wait<TURNS - 2>();
            sync_multipliers();
            load(slot == 0 ? TURNS - 1 : slot - 1);
            const Place place = {u32(slot), u32(slot) * LARGEST, u32(slot + 1) * LARGEST - NT * A16_TILE * max_chunks(0)};
            slot = slot + 1 == TURNS ? 0 : slot + 1;
            return place;
        };
        const auto give = [](const Place&) {};
#endif
        const bool last_stage = which + 1 == chain.n_stages;
#if HAS_BULK
        bool waited = false;
        const auto wait_for_scales = [&]() {
            if (!waited) mbarrier_wait(ready, which & 1);
            waited = true;
        };
#else
        const auto wait_for_scales = []() {};
        row_scales(chain, which, rows);
        sync_multipliers();
#if PLAIN
        if (last_stage) plain_jobs(chain.plain, plain_room, [&](int row) { return rows.factor[row]; });
#endif
#endif
        Cursor at = {0, 0, 0};
        const int units_here = share_of(chain.segments, stage, at);
        for (int over = 0; over < units_here;) {
            const Segment& s = chain.segments[at.segment];
            const int units = s.units, n = min(units - at.unit, units_here - over);
            const bool mine = has_rows(row_tiles(s, row_block(stage.write, at.tile, 0)));
            float acc[MT][NT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int i = 0; i < NT; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[m][i][e] = 0.0f;
            walk(s.kind, ring, n, mine, acc, take, give);
            finish(stage, s, chain.scratch, at.tile, n < units, warp, rows, wait_for_scales, acc);
            over += n;
            at.unit = 0;
            if (++at.tile == s.tiles) {
                at.tile = 0;
                at.segment++;
            }
        }
#if PLAIN && !HAS_BULK
        if (last_stage) plain_end(chain.plain, [&](int row) { return rows.factor[row]; });
#endif
#if HAS_BULK
        wait_for_scales();
        if (!last_stage) {
            copies_fence();
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(done);
        }
#endif
    }
}
