// matmul/chain_sm90: all products between two mixers of a step of few rows (1..64), in one launch of blocks that stay.
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
// Between two stages nobody waits for all: halves tell by themselves that they are there (scratch.cuh), so a block begins the next
// stage with the first 256 values of x that it needs. Behind the words comes a barrier, for what is wanted later: squares, the residual
// stream, what may be made absent again, and x by bulk copies.
//
// Warps: 0..7 multiply, 8 fetches weights and what the end of a tile needs, 9 x, 10 keeps the barrier, 10 and 11 add up squares, sum
// loose tiles and multiply f32 matrices.
// Barrier: a word whose top bit turns when the last of the blocks has come (block 0 adds what turns it less the others' ones), so it may
// begin with either value and needs no reset. Warps 0..7 tell warp 10 when their results are written, and warp 9 when it has seen the stage
// open (`done`); it comes to the barrier for the block and tells all when the next stage is open (`open`). All blocks are resident at
// once: grid = multiprocessors, and a block takes more than half the shared memory of one. With dependent launch this launch may wait for
// blocks of its predecessors alone.
//
// in   Chain (chain.cuh), by value
// out  residual f32 [ROWS][n_out], results of STORE segments, scales [ROWS] of the rows of the last norm
// smem RING bytes, dynamic: places for a piece of any kind each, 16 tiles of weights and the x of the same values
// scratch (scratch.cuh) twice gridDim * 2 * 16 * NT * 512 bytes, +0 before and after; stages take turns, since a block may leave its
//      first part of a stage while another has yet to take one of the stage before. Halves between stages: +0 before and after; those of
//      the last stage's input may be anything before, and stay.
// Defines: ROWS, NT = ceil(ROWS / 8), RING, KINDS (bit i: kind i occurs), SEGMENTS (most per launch), PLAIN (f32 matrices in the last
// stage). More than 16 rows are multiplied by warpgroup products.
// Architecture: sm_90a. Judge: cpu::reference::matmul, norm, activation; test crates/cuda/tests/chain.rs.
#ifndef PLAIN
#define PLAIN 0
#endif
#define WARPS 8
#define MT 2  // 16-row tiles of a warp, one in each row block of a tile
#define THREADS (WARPS * 32)  // that multiply

// All warps that multiply.
__device__ __forceinline__ void sync_multipliers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

#include "common/prelude.cuh"

// Who scales rows and multiplies f32 matrices: two warps of their own.
#define SIDE_FIRST (WARPS + 2)
#define PLAIN_WARPS 2
__device__ __forceinline__ int plain_thread() { return threadIdx.x - SIDE_FIRST * 32; }
__device__ __forceinline__ int plain_warp() { return warp_index() - SIDE_FIRST; }
__device__ __forceinline__ void plain_sync() { asm volatile("bar.sync 2, %0;" ::"n"(PLAIN_WARPS * 32) : "memory"); }

#include "matmul/chain.cuh"
#include "matmul/chain_rows.cuh"
#include "matmul/plain_sm90.cuh"
#include "matmul/walk.cuh"

struct Chain {
    Segment segments[SEGMENTS];
    Stage stages[STAGES];
    float4* scratch;
    u32* barrier;   // 256 bytes; behind it two times MOST_ROWS scales
    float* scales;  // 1 / rms of the rows as last known: read, and written after the last norm
    float eps;
    u16 n_stages, n_opened;  // n_opened: with those that have no products
#if PLAIN
    Plain plain;
#endif
};

// Registers of a thread that multiplies and of the others, which share what the launch has: 168 each.
constexpr int PRODUCT_REGISTERS = NT > 3 ? 200 : 208, SIDE_REGISTERS = NT > 3 ? 104 : 88;
constexpr int SLOT = W_BYTES + NT * A16_TILE * max_chunks(0);
constexpr int SLOTS = RING / SLOT;
// A warp may hold a piece while it waits for the next.
static_assert(SLOTS >= 3, "a ring of three pieces of any kind");

// Where parts of a stage's tiles are left.
__device__ __forceinline__ float4* scratch_of(const Chain& chain, int which) { return chain.scratch + size_t(which & 1) * gridDim.x * 2 * 16 * NT * 32; }

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
__device__ __forceinline__ void copies_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Between what threads write to shared memory and what warpgroup products read.
__device__ __forceinline__ void products_fence() {
#if GROUPED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Where blocks tell each other the scales of the rows of a stage's input, behind the barrier: +0 before and after. Only stages 1 and 3
// scale, and have a place each; stage 2 makes that of stage 1 absent again, stage 1 of the next chain that of stage 3.
#define MOST_ROWS 64
__device__ __forceinline__ float* told_scales(const Chain& chain, int which) { return (float*)(chain.barrier + 64) + which / 2 * MOST_ROWS; }

// A warp hands over what its lanes have read or written: every lane arrives for itself, which racecheck follows and which costs less than
// one lane of a warp that has come together.
#define LANES 32

// Whether the phase of this parity is over.
__device__ __forceinline__ u32 mbarrier_is_over(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over;
}

// When a stage is open: the scales of the rows that its input is made of. A block adds up the squares of a row or two or none, and tells
// all; where rows are so few that a warp has one, each block adds up all, which saves telling.
#define ALONE (ROWS <= PLAIN_WARPS)
__device__ __forceinline__ void set_scale(const Chain& chain, RowScales& rows, int row, float scale) {
    rows.factor[row] = scale / (rows.last[row] * HEADROOM);
    rows.last[row] = scale;
    if (blockIdx.x == 0) chain.scales[row] = scale;
}
__device__ __forceinline__ void tell_scales(const Chain& chain, int which, RowScales& rows) {
    const Stage& stage = chain.stages[which];
    static_assert(NT * 8 <= PLAIN_WARPS * 32, "a thread for each row");
    const int mine = plain_thread(), warp = plain_warp(), lane = threadIdx.x % 32;
    if (stage.sums == nullptr) {
        if (mine < NT * 8) {
            if (which == 0) rows.last[mine] = mine < ROWS ? __ldcg(chain.scales + mine) : 0.0f;
            rows.factor[mine] = 1.0f;
        }
        return;
    }
    constexpr int LOADS = 3;
    const int quads = (stage.width + 255) / 256 * 4;
    // The last blocks, which have no job of f32 matrices where these are few.
    const int first = ALONE ? warp : (gridDim.x - 1 - blockIdx.x) * PLAIN_WARPS + warp;
#pragma unroll 1
    for (int row = first; row < ROWS; row += PLAIN_WARPS * gridDim.x) {
        float sum = 0.0f;
#pragma unroll 1
        for (int i = lane; i < quads; i += 32 * LOADS) {
            float4 v[LOADS];
#pragma unroll
            for (int l = 0; l < LOADS; l++) {
                v[l] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i + 32 * l < quads) v[l] = __ldcg((const float4*)stage.sums + size_t(row) * quads + i + 32 * l);
            }
#pragma unroll
            for (int l = 0; l < LOADS; l++) sum += (v[l].x + v[l].y) + (v[l].z + v[l].w);
        }
        sum = warp_sum(sum);
        const float scale = 1.0f / sqrtf(sum * (1.0f / stage.width) + chain.eps);
        if (lane == 0) {
            if (ALONE)
                set_scale(chain, rows, row, scale);
            else
                leave(told_scales(chain, which) + row, scale);
        }
    }
}
__device__ __forceinline__ void take_scales(const Chain& chain, int which, RowScales& rows) {
    if (ALONE || chain.stages[which].sums == nullptr) return;
    const int mine = plain_thread();
    static_assert(PLAIN_WARPS * 32 <= MOST_ROWS, "a place for each thread");
    float scale;
    do {
        scale = peek(told_scales(chain, which) + mine);
    } while (__any_sync(WARP_ALL, mine < ROWS && !has_arrived(scale)));
    if (mine < ROWS) set_scale(chain, rows, mine, scale);
}

// Pieces of weights under way at most. More would be no faster, and what blocks exchange waits in the memory's queues behind them. They
// must be fewer than places: while the lane that fills waits for a place it tells of none of them, and a place is given back only when
// the piece behind it has been told of.
#ifndef UNDER_WAY
#define UNDER_WAY (SLOTS > 4 ? 3 : 2)
#endif
static_assert(UNDER_WAY < SLOTS, "a place is given back when the piece behind it has been told of");

constexpr u32 TO_EMPTY = SLOTS * 8;  // from the barrier of a full place to that of the same when empty
// Barriers of a piece's place: `landed`, its weights are there, which only the lane that fills waits for; `full`, that lane has told so and
// its x is there; `empty`, all warps have given it back.
struct Room {
    uint4 places[2 * SLOTS];  // for those that multiply, in turn: x / 16, `full`, its parity, address of the next
    u64 landed[SLOTS], full[SLOTS], empty[SLOTS];
    u64 nowhere, open, ready, done;
    u64 columns[2], ended[2];  // whether rooms of tiles are full, and free again
    Share shares[STAGES];

    // A lane of each of warps 8 to 11 begins some: each takes it 60 clocks, and lanes of one warp would take turns.
    __device__ __forceinline__ void begin_barriers(int warp) {
        if (threadIdx.x % 32) return;
        const auto begin = [](const u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), arrivals); };
        if (warp == WARPS) {
            for (int i = 0; i < SLOTS; i++) begin(landed[i], 1);
            for (int i = 0; i < 2; i++) begin(columns[i], 1);
        } else if (warp == WARPS + 1) {
            for (int i = 0; i < SLOTS; i++) begin(full[i], 1 + LANES);
            begin(open, 1);
        } else if (warp == WARPS + 2) {
            for (int i = 0; i < SLOTS; i++) begin(empty[i], WARPS * LANES);
            begin(nowhere, WARPS * LANES);
        } else if (warp == WARPS + 3) {
            for (int i = 0; i < 2; i++) begin(ended[i], WARPS * LANES);
            begin(ready, PLAIN_WARPS * LANES);
            begin(done, (WARPS + 1) * LANES);
        }
        mbarrier_init_fence();
    }
};
// The rooms of a block's tiles, in turn.
struct TileRooms {
    TileRoom rooms[2];
};
#if PLAIN
#define PLAIN_BYTES sizeof(PlainRoom)
#else
#define PLAIN_BYTES 0
#endif
static_assert(RING + sizeof(RowScales) + sizeof(TileRooms) + sizeof(Room) + sizeof(scale_room) + PLAIN_BYTES <= 227 << 10,
              "beside the ring there is more than the host counts with (launch::chain::OWN_SHARED)");
// One lane of a warp that is whole: ptxas wraps what one thread alone may issue into a loop over lanes, unless it was chosen so.
__device__ __forceinline__ bool is_elected() {
    u32 chosen;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(chosen));
    return chosen;
}
// A place of the ring: its barrier `full`, where it lies, and the parity of its turn. `landed` and `empty` lie SLOTS before and behind `full`.
struct Turn {
    u32 barrier, at, parity;

    __device__ __forceinline__ void next(u32 first, u32 ring) {
        barrier += 8;
        at += SLOT;
        if (barrier == first + SLOTS * 8) {
            barrier = first;
            at = ring;
            parity ^= 1;
        }
    }
};

// Warp 8, one lane: weights, as far ahead as the ring reaches. Beside products every instruction is paid, so of a piece nothing is worked out
// that is known of its tile.
__device__ __forceinline__ void fill(const Chain& chain, Room& room, TileRooms& tiles, u32 ring) {
    u32 first = shared_address(room.full);
    asm volatile("" : "+r"(first), "+r"(ring));  // else made anew for each piece
    const u64 once = policy_evict_first(), keep = policy_evict_last();
    // Of this piece; the first turn finds all places empty: the phase before the first counts as over. Of the oldest under way.
    Turn turn = {first, ring, 1}, awaited = {first, ring, 0};
    int untold = 0, n_tiles = 0;
    const auto landed_of = [&](const Turn& turn) { return turn.barrier - SLOTS * 8; };
    // Tells those that multiply of the oldest piece under way, when it has landed.
    const auto tell = [&]() {
        mbarrier_wait(landed_of(awaited), awaited.parity);
        mbarrier_arrive(awaited.barrier);
        awaited.next(first, ring);
        untold--;
    };
#pragma unroll 1
    for (int which = 0; which < chain.n_stages; which++) {
        const Stage& stage = chain.stages[which];
        Share share = room.shares[which];
#pragma unroll 1
        while (share.units) {
            const Segment& s = chain.segments[share.at.segment];
            const int tile = share.at.tile, n = share.run();
            const u8* weights[2];
            int rows[2];
            u32 bytes[2][2];  // of the first and the second piece of a unit, in the row blocks
            const u32 of_tile[2] = {s.first_piece, s.tile - s.first_piece};
#pragma unroll
            for (int m = 0; m < 2; m++) {
                rows[m] = row_tiles(s, row_block(stage.write, tile, m));
                weights[m] = row_block_at(s, stage.write, tile, m) + rows[m] * (64 + share.at.unit * s.tile);
                bytes[0][m] = rows[m] * of_tile[0];
                bytes[1][m] = rows[m] * of_tile[1];
            }
            const auto issue = [&](int p) {
                if (untold == UNDER_WAY) tell();
                mbarrier_wait(turn.barrier + TO_EMPTY, turn.parity);
                mbarrier_expect(landed_of(turn), bytes[p][0] + bytes[p][1]);
                bulk_load(turn.at, weights[0], bytes[p][0], landed_of(turn), once);
                if (bytes[p][1]) bulk_load(turn.at + 8 * of_tile[p], weights[1], bytes[p][1], landed_of(turn), once);
                untold++;
                turn.next(first, ring);
#pragma unroll
                for (int m = 0; m < 2; m++) weights[m] += bytes[p][m];
            };
            // What the tile's end needs, in the room of the tile before last. With a barrier of its own: the pieces under way are few, and
            // one that came late by it would hold up all.
            const auto begin_tile = [&]() {
                // This takes as long as the products of two pieces, and what has landed is not to wait for it.
                while (untold && mbarrier_is_over(landed_of(awaited), awaited.parity)) tell();
                TileRoom& to = tiles.rooms[n_tiles & 1];
                const u32 barrier = shared_address(room.columns + (n_tiles & 1));
                // Short tiles may end only when they are told of the pieces under way.
                const u32 ended = shared_address(room.ended + (n_tiles & 1)), parity = n_tiles >> 1 & 1 ^ 1;
                while (untold && !mbarrier_is_over(ended, parity)) tell();
                mbarrier_wait(ended, parity);
                n_tiles++;
                to.blocks = blocks_of(stage, s, tile);
                u32 norm_bytes[2];
#pragma unroll
                for (int m = 0; m < 2; m++) norm_bytes[m] = stage.norm ? max(0, min(128, s.n_out - row_block(stage.write, tile, m) * 128)) / 4 * 16 : 0;
                mbarrier_expect(barrier, (rows[0] + rows[1]) * 64 + norm_bytes[0] + norm_bytes[1]);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if (rows[m]) bulk_load(shared_address(to.factors[m]), row_block_at(s, stage.write, tile, m), rows[m] * 64, barrier, once);
                    if (norm_bytes[m]) bulk_load(shared_address(to.norm[m]), stage.norm + row_block(stage.write, tile, m) * 128, norm_bytes[m], barrier, keep);
                }
            };
            bool begins = share.next < 0;  // a tile that is not loose
#pragma unroll 1
            for (int left = n; left; left--) {
                issue(0);
                if (begins) begin_tile();
                begins = false;
                if (s.pieces == 2) issue(1);
            }
            share.go_on(chain.segments, stage.write, n);
        }
    }
    while (untold) tell();
}

// One piece of x, looked at until all of it is there. COUNT: 16 bytes of each lane.
template <int COUNT>
__device__ __forceinline__ void bring(const u8* from, u32 to) {
    uint4 v[COUNT];
    bool waiting;
    do {
        waiting = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float4 seen = peek((const float4*)(from + (i * 32 + threadIdx.x % 32) * 16));
            v[i] = make_uint4(__float_as_uint(seen.x), __float_as_uint(seen.y), __float_as_uint(seen.z), __float_as_uint(seen.w));
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) waiting |= min(min(v[i].x, v[i].y), min(v[i].z, v[i].w)) == 0;
    } while (__any_sync(WARP_ALL, waiting));
#pragma unroll
    for (int i = 0; i < COUNT; i++) put_shared16(to + (i * 32 + threadIdx.x % 32) * 16, v[i]);
}
// The same of more than registers have room for, by copies that a lane starts and then looks at.
__device__ __forceinline__ void bring_many(const u8* from, u32 to, int count) {
    const u32 at = threadIdx.x % 32 * 16;
    u32 missing = count == 32 ? 0xffffffffu : (1u << count) - 1;
    while (missing) {
#pragma unroll 2
        for (int i = 0; i < count; i++)
            if (missing >> i & 1) cp_async_16(to + at + i * 512, from + at + i * 512);
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll 2
        for (int i = 0; i < count; i++) {
            const uint4 v = shared16(to + at + i * 512);
            if (v.x && v.y && v.z && v.w) missing &= ~(1u << i);
        }
    }
}

// Warp 9: x of every piece, by bulk copies once its stage is open, and before that by the word. A parity tells of a phase until the next
// is over, so no stage is done before this warp has seen it open: of a block without units nobody else waits for it.
__device__ __forceinline__ void feed(const Chain& chain, Room& room, u32 ring) {
    u32 first = shared_address(room.full);
    asm volatile("" : "+r"(first), "+r"(ring));  // else made anew for each piece
    const u32 open = shared_address(&room.open), done = shared_address(&room.done);
    const u64 keep = policy_evict_last();
    Turn turn = {first, ring, 1};
#pragma unroll 1
    for (int which = 0; which < chain.n_stages; which++) {
        const Stage& stage = chain.stages[which];
        bool opened = which == 0;
        Share share = room.shares[which];
#pragma unroll 1
        while (share.units) {
            const int n = share.run(), pieces = chain.segments[share.at.segment].pieces;
            const u32 bytes = pieces * NT * A16_TILE;
            const u8* x = stage.x + size_t(share.at.unit) * pieces * bytes;
            const auto next = [&]() {
                turn.next(first, ring);
                x += bytes;
            };
            int left = n * pieces;
#pragma unroll 1
            while (left && !opened) {
                mbarrier_wait(turn.barrier + TO_EMPTY, turn.parity);
                opened = __all_sync(WARP_ALL, mbarrier_is_over(open, which & 1));
                if (opened) {
                    copies_fence();
                    break;  // this piece comes by a copy, and its place is free already
                }
                const u32 to = turn.at + W_BYTES;
                if constexpr (NT > 4)
                    bring_many(x, to, pieces * 2 * NT);
                else if (pieces == 2)
                    bring<4 * NT>(x, to);
                else
                    bring<2 * NT>(x, to);
                products_fence();
                mbarrier_arrive(turn.barrier);
                next();
                left--;
            }
#pragma unroll 1
            for (; left; left--) {
                mbarrier_wait(turn.barrier + TO_EMPTY, turn.parity);
                if (is_elected()) {
                    mbarrier_arrive(turn.barrier, LANES - 1);
                    mbarrier_expect(turn.barrier, bytes);
                    bulk_load(turn.at + W_BYTES, x, bytes, turn.barrier, keep);
                }
                next();
            }
            share.go_on(chain.segments, stage.write, n);
        }
        mbarrier_wait(open, which & 1);
        mbarrier_arrive(done);
    }
}

// Warps 10 and 11.
#if PLAIN
#define SIDE_ROOM , PlainRoom& plain_room
#else
#define SIDE_ROOM
#endif
__device__ __forceinline__ void stand_aside(const Chain& chain, Room& room, RowScales& rows SIDE_ROOM) {
    const u32 open = shared_address(&room.open), ready = shared_address(&room.ready), done = shared_address(&room.done);
    const bool keeps = plain_thread() == 0;
#if PLAIN
    plain_begin(chain.plain, plain_room);
#endif
    pdl_wait();
    u32 before = 0;
    if (keeps) before = at_barrier(chain.barrier);
    for (int which = 0; which < chain.n_opened; which++) {
        if (keeps) {
            if (which) {
                mbarrier_wait(done, (which - 1) & 1);
                copies_fence();
                come_to_barrier(chain.barrier);
                while (at_barrier(chain.barrier) == before) {}
                before ^= 0x80000000u;
                copies_fence();
            }
            mbarrier_arrive(open);
        }
        mbarrier_wait(open, which & 1);
        const Stage& stage = chain.stages[which];
        const bool multiplies = which < chain.n_stages;
        if (multiplies) tell_scales(chain, which, rows);
#if PLAIN
        // While others add up.
        if (!ALONE && which + 1 == chain.n_stages) plain_jobs(chain.plain, plain_room);
#endif
        if (multiplies) take_scales(chain, which, rows);
        if (blockIdx.x == 0 && stage.halves) put_zeros(chain.segments[stage.first], stage, plain_thread(), PLAIN_WARPS * 32);
#pragma unroll 1
        for (int i = blockIdx.x * PLAIN_WARPS * 32 + plain_thread(); i < stage.n_spent; i += gridDim.x * PLAIN_WARPS * 32)
            stage.spent[i] = make_uint4(0, 0, 0, 0);
        if (blockIdx.x == 0 && (which == 1 || which == 2)) told_scales(chain, which == 1 ? 3 : 1)[plain_thread()] = 0.0f;
        mbarrier_arrive(ready);
        if (multiplies && stage.own_tiles) {
            mbarrier_wait(ready, which & 1);
            sum_loose(stage, chain.segments[stage.first], scratch_of(chain, which), plain_warp(), PLAIN_WARPS, rows);
            plain_sync();
        }
    }
#if PLAIN
    if (ALONE) plain_jobs(chain.plain, plain_room);
    plain_sync();
    plain_end(chain.plain, plain_room, [&](int row) { return rows.factor[row]; });
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) matmul_chain(const __grid_constant__ Chain chain) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(16) RowScales rows;
    __shared__ __align__(16) TileRooms tiles;
    const int warp = warp_index();
    pdl_launch();
    __shared__ __align__(16) Room room;
    const u32 ready = shared_address(&room.ready), done = shared_address(&room.done);
    // Many blocks begin only when the kernel before has ended, and all wait for them: no warp has more than one thing to work out.
    if (warp < chain.n_stages) room.shares[warp] = share_of(chain.segments, chain.stages[warp]);
    static_assert(STAGES * 32 + 2 * SLOTS <= THREADS + 128, "a thread for each place of the table, behind the warps that have shares");
    const int place = threadIdx.x - STAGES * 32;
    if (place >= 0 && place < 2 * SLOTS)
        room.places[place] = make_uint4((shared_address(ring) + place % SLOTS * SLOT + W_BYTES) / 16, shared_address(room.full + place % SLOTS), place / SLOTS,
                                        shared_address(room.places + (place + 1) % (2 * SLOTS)));
    room.begin_barriers(warp);
    __syncthreads();
#if PLAIN
    __shared__ PlainRoom plain_room;
#define SIDE_ROOM_HERE , plain_room
#else
#define SIDE_ROOM_HERE
#endif
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SIDE_REGISTERS));
        if (warp == WARPS) {
            if (is_elected()) fill(chain, room, tiles, shared_address(ring));
        } else if (warp == WARPS + 1) {
            pdl_wait();
            feed(chain, room, shared_address(ring));
        } else {
            stand_aside(chain, room, rows SIDE_ROOM_HERE);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
    pdl_wait();

    // The next piece's entry of the table, and what it says as last looked.
    u32 entry = shared_address(room.places);
    uint4 seen;
    int n_tiles = 0;
    const auto look = [&]() { seen = shared16(entry); };
    // Waits for the piece that was looked for; whoever takes it gives it back.
    const auto take = [&]() {
        mbarrier_wait(seen.y, seen.z);
        entry = seen.w;
        return Place{seen.x, seen.y};
    };
    const auto give = [&](const Place& place) { mbarrier_arrive(place.barrier + TO_EMPTY); };
    const Place nowhere = {0, shared_address(&room.nowhere) - TO_EMPTY};
    for (int which = 0; which < chain.n_stages; which++) {
        const Stage& stage = chain.stages[which];
        float4* scratch = scratch_of(chain, which);
        bool waited = false;
        const auto wait_for_scales = [&]() {
            if (!waited) mbarrier_wait(ready, which & 1);
            waited = true;
        };
        Share share = room.shares[which];
        const Cursor& at = share.at;
        while (share.units) {
            const Segment& s = chain.segments[at.segment];
            const bool loose = share.next >= 0;
            const int n = share.run();
            float acc[MT][NT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int i = 0; i < NT; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[m][i][e] = 0.0f;
            walk(share.shape.kind, ring, n, has_rows(share.shape.rows, warp), acc, take, look, give, nowhere);
            if (loose) {
                leave_part(stage, s, scratch, at.tile, loose_first(stage, s, at.tile), warp, acc);
            } else {
                mbarrier_wait(shared_address(room.columns + (n_tiles & 1)), n_tiles >> 1 & 1);
                finish(stage, s, scratch, at.tile, warp, rows, tiles.rooms[n_tiles & 1], wait_for_scales, acc);
                mbarrier_arrive(shared_address(room.ended + (n_tiles & 1)));
                n_tiles++;
            }
            share.go_on(chain.segments, stage.write, n);
        }
        wait_for_scales();
        mbarrier_arrive(done);
    }
}
