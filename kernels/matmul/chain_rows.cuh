// What a warp of a chain does with the sums of its 16-row tiles: gathers those that other blocks have, and writes the results.
//
// Lane (g, t) = (lane / 4, lane % 4) has, for every tile of 8 rows of x, rows 2 t and 2 t + 1 of columns g (elements 0, 1) and
// g + 8 (elements 2, 3) of 16 columns of the result.
#pragma once
#include "matmul/chain.cuh"
#include "matmul/scratch.cuh"

// 1 / rms of the rows, as last known, and what products of halves made with the one before are to be multiplied by.
struct RowScales {
    float last[NT * 8], factor[NT * 8];
};

// A matrix of 8 x 8 halves across the warp, transposed.
__device__ __forceinline__ u32 transposed(u32 v) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
    return d;
}
// Two halves that tell by themselves that they are there (scratch.cuh): a pair of +0 is left as one of -0.
__device__ __forceinline__ void leave_halves(u8* to, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v ? v : 0x80008000u) : "memory");
}
// Tile `n` of 16 columns as halves: `low` the first eight columns, `high` the others.
__device__ __forceinline__ void put_halves(u8* halves, int index, int n, u32 low, u32 high) {
    u8* to = halves + (size_t(index / 4) * NT + n) * A16_TILE + index % 4 * 256 + threadIdx.x % 32 * 4;
    leave_halves(to, transposed(low));
    leave_halves(to + 128, transposed(high));
}
// Halves are there in whole groups of 256: zeros behind the last tile of 16 columns, by `count` threads.
__device__ __forceinline__ void put_zeros(const Segment& s, const Stage& stage, int thread, int count) {
    const int tiles = (s.n_out + 15) / 16, groups = (s.n_out + 255) / 256 * 16, missing = groups - tiles;
#pragma unroll 1
    for (int i = thread; i < missing * NT * 64; i += count) {
        const int index = tiles + i / 64 / NT, n = i / 64 % NT;
        leave_halves(stage.halves + (size_t(index / 4) * NT + n) * A16_TILE + index % 4 * 256 + i % 64 * 4, 0);
    }
#pragma unroll 1
    for (int i = thread; stage.write == ADD && i < missing * ROWS; i += count) stage.squares[size_t(i / missing) * groups + tiles + i % missing] = 0.0f;
}

// Of the columns g and g + 8 that a lane has in a tile of 16: factors of the weights, and of the norm behind ADD.
struct Columns {
    float factors[2], norm[2];
};
// Blocks that have units of a tile, the first and the last.
struct Blocks {
    u32 first, last;
    u32 summing;  // how many of them sum: all where none goes on to another tile, else all but the last, or the only one

    // Where one block sums, its warps sum what they have multiplied themselves, which need not be left for others.
    __device__ __forceinline__ bool one_sums() const { return last - first <= 1; }
    // The first piece that a warp of this block sums.
    __device__ __forceinline__ int begin(int warp) const { return blockIdx.x - first + summing * warp; }
};
__device__ __forceinline__ Blocks blocks_of(const Stage& stage, const Segment& s, int tile) {
    if (stage.own_tiles) return {blockIdx.x, blockIdx.x, 1};
    const u32 cost = tile_cost(stage, s, tile), first = block_of(stage, cost), last = block_of(stage, cost + u32(s.units - 1) * s.cost);
    return {first, last, stage.gap == 0 ? last - first + 1 : last > first ? last - first : 1};
}

// What the end of a tile needs: row factors and, behind ADD, weights of the norm of its row blocks, asked for with the tile's first
// piece. Past the matrix they may be anything.
struct TileRoom {
    float factors[MT][128], norm[MT][128];
    Blocks blocks;
    u32 _pad;
};
__device__ __forceinline__ Columns columns_of(const TileRoom& tile, int m, int in_block) {
    const int at = in_block * 16 + threadIdx.x % 32 / 4;
    return {{tile.factors[m][at], tile.factors[m][at + 8]}, {tile.norm[m][at] * HEADROOM, tile.norm[m][at + 8] * HEADROOM}};
}

// Of a lane's two rows of 8 of x and its two columns of 16: which there are. Where rows are whole eights nothing is asked.
struct There {
    bool rows[2], columns[2];

    __device__ __forceinline__ There(const Segment& s, int index, int n) {
        const int row = n * 8 + threadIdx.x % 4 * 2, column = index * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            rows[i] = ROWS % 8 == 0 || row + i < ROWS;
            columns[i] = column + i * 8 < s.n_out;
        }
    }
    // Element i of the lane's four.
    __device__ __forceinline__ bool operator[](int i) const { return rows[i % 2] && columns[i / 2]; }
};
// Where the lane's first row and column of a piece go, in rows of `stride`; element i is at of_element(i, stride). Here as in parts 32 bits
// hold every place: 64-bit sums are twice the instructions.
__device__ __forceinline__ u32 place_of(u32 index, u32 n, u32 stride) {
    return (n * 8 + threadIdx.x % 4 * 2) * stride + index * 16 + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int of_element(int i, int stride) { return i % 2 * stride + i / 2 * 8; }

// What stands where the sums of 16 columns and 8 rows go. Another block of this launch may have written it.
__device__ __forceinline__ float4 fetch_before(const float* from, int stride, const There& there) {
    float before[4];
#pragma unroll
    for (int i = 0; i < 4; i++) before[i] = there[i] ? __ldcg(from + of_element(i, stride)) : 0.0f;
    return make_float4(before[0], before[1], before[2], before[3]);
}

// `to`: where the piece goes.
__device__ __forceinline__ void finish_store(const Segment& s, float* to, const There& there, float2 factor, const Columns& columns, float4 sum) {
    const float acc[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (there[i]) to[of_element(i, s.stride)] = acc[i] * columns.factors[i / 2] * (i % 2 ? factor.y : factor.x);
}

__device__ __forceinline__ void finish_add(const Segment& s, const Stage& stage, int index, int n, const RowScales& rows, const Columns& columns,
                                           float4 old, float4 sum) {
    const float before[4] = {old.x, old.y, old.z, old.w}, acc[4] = {sum.x, sum.y, sum.z, sum.w};
    const int lane = threadIdx.x % 32, row = n * 8 + lane % 4 * 2;
    const There there(s, index, n);
    float* const to = s.out + place_of(index, n, s.stride);
    float x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = before[i] + acc[i] * columns.factors[i / 2];
    // First what other blocks wait for.
    if (stage.halves) {
        const float2 last = *(const float2*)&rows.last[row];
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = there.columns[i / 2] ? x[i] * columns.norm[i / 2] * (i % 2 ? last.y : last.x) : 0.0f;
        put_halves(stage.halves, index, n, a16_pair(y[0], y[1]), a16_pair(y[2], y[3]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (there[i]) to[of_element(i, s.stride)] = x[i];
        if (!there.columns[i / 2]) x[i] = 0.0f;
    }
    if (!stage.halves) return;
    if (stage.floats) {
        float* const floats = stage.floats + place_of(index, n, s.n_out);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (there[i]) floats[of_element(i, s.n_out)] = y[i];
    }
    float squares[2] = {x[0] * x[0] + x[2] * x[2], x[1] * x[1] + x[3] * x[3]};
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int gap = 16; gap >= 4; gap >>= 1) squares[i] += __shfl_xor_sync(WARP_ALL, squares[i], gap);
        if (lane < 4 && there.rows[i]) stage.squares[u32(row + i) * (u32(s.n_out + 255) / 256 * 16) + index] = squares[i];
    }
}

// Division by an approximate reciprocal, 2 ulp, without the branches of the exact one, between which nothing else can run. What 1 is added
// to may be rounded to zero where it is subnormal.
__device__ __forceinline__ float quick_silu(float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950216293335f));
    return __fdividef(v, 1.0f + e);
}

__device__ __forceinline__ void finish_gated(const Segment& s, const Stage& stage, int index, int n, const RowScales& rows, const Columns (&columns)[MT],
                                             float4 of_gate, float4 of_up) {
    const float gate[4] = {of_gate.x, of_gate.y, of_gate.z, of_gate.w}, up[4] = {of_up.x, of_up.y, of_up.z, of_up.w};
    const int lane = threadIdx.x % 32, column = index * 16 + lane / 4;
    const float2 factor = *(const float2*)&rows.factor[n * 8 + lane % 4 * 2];
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float f = i % 2 ? factor.y : factor.x;
        y[i] = quick_silu(gate[i] * columns[0].factors[i / 2] * f) * (up[i] * columns[1].factors[i / 2] * f);
        if (column + i / 2 * 8 >= s.n_out) y[i] = 0.0f;
    }
    put_halves(stage.halves, index, n, a16_pair(y[0], y[1]), a16_pair(y[2], y[3]));
}

// What is there now, without a branch; where nothing is wanted something that has arrived and adds nothing.
__device__ __forceinline__ float4 peek_if(bool wanted, const float4* from) {
    float4 v;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.f32 %0, 0f80000000;\n\tmov.f32 %1, %0;\n\tmov.f32 %2, %0;\n\tmov.f32 %3, %0;\n\t"
        "@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
        : "l"(from), "r"(u32(wanted))
        : "memory");
    return v;
}

// Whether any word of it has yet to arrive, without branches.
__device__ __forceinline__ bool is_missing(const float4& v) { return !has_arrived(v.x) | !has_arrived(v.y) | !has_arrived(v.z) | !has_arrived(v.w); }

// Where the sums of a part begin: a block has parts of two split tiles at most, one that others began and one that it begins.
#define PART (16 * NT * 32)
__device__ __forceinline__ float4* part_of(float4* scratch, u32 block, u32 first) { return scratch + (block * 2 + (block == first)) * PART; }
__device__ __forceinline__ u32 place_of_piece(u32 m, u32 in_block, u32 n) { return ((m * WARPS + in_block) * NT + n) * 32; }
__device__ __forceinline__ u32 place_in_part(u32 m, u32 in_block, u32 n) { return place_of_piece(m, in_block, n) + threadIdx.x % 32; }

// Adds pieces of 16 columns and 8 rows that blocks `from` .. last have left, in the order of the blocks. The first is at `place` of a part,
// others at(c) behind it. FETCH blocks at a time are looked at until all their parts are there; with ONE_WORD, where one is missing, at a
// word of each until they are, and then at all again: it is for many blocks, whose warps want more than the second-level cache carries in
// the time of a look.
template <int COUNT, int FETCH, bool ONE_WORD, typename At>
__device__ __forceinline__ void gather(float4* scratch, const Blocks& blocks, u32 from, u32 place, const At& at, float4 (&sum)[COUNT]) {
    static_assert(COUNT == 1 || !ONE_WORD, "a lane looks at a block's part");
#pragma unroll 1
    for (u32 b0 = from; b0 <= blocks.last; b0 += FETCH) {
        // Only the first of all is elsewhere.
        float4 *const head = part_of(scratch, b0, blocks.first) + place, *const tail = scratch + b0 * 2 * PART + place;
        const auto part_at = [&](int f, int c) { return (f ? tail + 2 * f * PART : head) + at(c); };
        const u32 more = blocks.last - b0;
        float4 part[FETCH][COUNT];
        bool waiting;
        do {
            waiting = false;
#pragma unroll
            for (int f = 0; f < FETCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++) part[f][c] = peek_if(f <= more, part_at(f, c));
#pragma unroll
            for (int f = 0; f < FETCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++) waiting |= is_missing(part[f][c]);
            // Together, as the compiler is to know: behind a loop that lanes leave one by one it takes all that follows for divergent.
            waiting = __any_sync(WARP_ALL, waiting);
            if constexpr (ONE_WORD) {
                const u32 block = b0 + threadIdx.x % 32;
                const float* word = (const float*)(part_of(scratch, block, blocks.first) + place);
                const bool looks = waiting && threadIdx.x % 32 < FETCH && block <= blocks.last;
                while (__any_sync(WARP_ALL, looks && !has_arrived(peek(word)))) {}
            }
        } while (waiting);
#pragma unroll
        for (int f = 0; f < FETCH; f++)
#pragma unroll
            for (int c = 0; c < COUNT; c++) {
                if (f <= more) *part_at(f, c) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                sum[c].x += part[f][c].x;
                sum[c].y += part[f][c].y;
                sum[c].z += part[f][c].z;
                sum[c].w += part[f][c].w;
            }
    }
}

// Which piece of 16 columns and 8 rows a number means: all rows of 16 columns come before the next columns. Where warps sum more than one,
// the first are all that the first piece of the next stage's x waits for.
struct Piece {
    u32 n, m, in_block;

    __device__ __forceinline__ explicit Piece(u32 i) : n(i % NT), m(i / NT / 8), in_block(i / NT % 8) {}
};

// What the warp has multiplied of a tile that block `first` and others have units of, for those who sum it; but not of row block `kept`.
__device__ __forceinline__ void leave_part(const Stage& stage, const Segment& s, float4* scratch, int tile, u32 first, int warp, const float (&acc)[MT][NT][4],
                                           u32 kept = MT) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if ((row_block(stage.write, tile, m) * 8 + warp) * 16 >= s.n_out || m == kept) continue;
        float4* to = part_of(scratch, blockIdx.x, first) + place_in_part(m, warp, 0);
#pragma unroll
        for (int n = 0; n < NT; n++) leave(to + n * 32, make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
    }
}

// The loose tiles of a stage, by two warps of every block, `aside` of them this one: a pair of 16 columns and 8 rows at a time.
__device__ __forceinline__ void sum_loose(const Stage& stage, const Segment& s, float4* scratch, u32 aside, u32 warps, const RowScales& rows) {
#pragma unroll 1
    for (u32 i = blockIdx.x + aside * gridDim.x; i < (s.tiles - stage.loose) * 8 * NT; i += warps * gridDim.x) {
        const u32 tile = stage.loose + i / (8 * NT), in_block = i / NT % 8, n = i % NT;
        const int index = tile * 8 + in_block;
        if (index * 16 >= s.n_out) continue;
        Columns columns[MT];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const float* factors = (const float*)row_block_at(s, stage.write, tile, m) + in_block * 16 + threadIdx.x % 32 / 4;
            columns[m] = {{__ldg(factors), __ldg(factors + 8)}, {}};
        }
        const u32 first = loose_first(stage, s, tile);
        const Blocks blocks = {first, first + s.units - 1, 0};
        float4 sum[MT] = {};
        gather<MT, 2, false>(scratch, blocks, first, place_in_part(0, in_block, n), [](int m) { return place_of_piece(m, 0, 0); }, sum);
        finish_gated(s, stage, index, n, rows, columns, sum[0], sum[1]);
    }
}

// ADD: pieces from `begin` on in steps of what the summing blocks have of warps, one at a time: more are more code than they gain.
__device__ __forceinline__ void sum_pieces(const Stage& stage, const Segment& s, float4* scratch, int tile, const TileRoom& room, int warp,
                                           const RowScales& rows) {
    const Blocks blocks = room.blocks;
#pragma unroll 1
    for (u32 i = blocks.begin(warp); i < 16 * NT; i += blocks.summing * WARPS) {
        const Piece piece(i);
        const int index = row_block(ADD, tile, piece.m) * 8 + piece.in_block;
        if (index * 16 >= s.n_out) continue;
        const float4 before = fetch_before(s.out + place_of(index, piece.n, s.stride), s.stride, There(s, index, piece.n));
        float4 sum[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        const u32 place = place_in_part(piece.m, piece.in_block, piece.n);
        gather<1, 8, true>(scratch, blocks, blocks.first, place, [](int) { return 0; }, sum);
        finish_add(s, stage, index, piece.n, rows, columns_of(room, piece.m, piece.in_block), before, sum[0]);
    }
}

// The end of a tile in this block. Blocks that have some of it leave their parts, and all but a last one that goes on to other
// tiles sum some pieces of 16 columns and 8 rows, their warps in turn; with GATED some pairs of 16 columns. `wait_for_scales`: until
// `rows` is there. Registers that are taken here are missing in the products: this code stands here once.
template <typename Wait>
__device__ __forceinline__ void finish(const Stage& stage, const Segment& s, float4* scratch, int tile, int warp, const RowScales& rows,
                                       const TileRoom& room, const Wait& wait_for_scales, const float (&acc)[MT][NT][4]) {
    const Blocks blocks = room.blocks;
    const bool gated = stage.write == GATED, keeps_own = gated && blocks.one_sums();
    const u32 first = blocks.first;
    const auto index_of = [&](int m, int in_block) { return row_block(stage.write, tile, m) * 8 + in_block; };
    const auto is_there = [&](int m, int in_block) { return index_of(m, in_block) * 16 < s.n_out; };
    // Where two blocks have a tile of STORE, warps sum what they have multiplied themselves: those of each a row block, whose other they
    // leave, or those of the first block both.
    const bool in_pairs = NT <= 4 && stage.write == STORE && blocks.last == first + 1, halves = in_pairs && blocks.summing == 2;
    const u32 own = blockIdx.x - first;
    if (own || !(keeps_own || in_pairs && !halves)) {
        leave_part(stage, s, scratch, tile, first, warp, acc, halves ? own : MT);
        if (own >= blocks.summing) return;
    }
    wait_for_scales();
    if (gated) {
        const int in_block = blocks.begin(warp);
        if (in_block < 8 && is_there(0, in_block)) {
            const Columns columns[MT] = {columns_of(room, 0, in_block), columns_of(room, 1, in_block)};
            constexpr int COLUMNS = NT > 4 ? NT : NT % 2 ? NT : 2;  // of eight rows, at a time
#pragma unroll
            for (int n0 = 0; n0 < NT; n0 += COLUMNS) {
                float4 sum[2 * COLUMNS];
#pragma unroll
                for (int c = 0; c < 2 * COLUMNS; c++) {
                    const float (&part)[4] = acc[c % 2][n0 + c / 2];
                    sum[c] = keeps_own ? make_float4(part[0], part[1], part[2], part[3]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                gather<2 * COLUMNS, COLUMNS == 1 ? 4 : 1, false>(
                    scratch, blocks, first + keeps_own, place_in_part(0, in_block, n0), [](int c) { return place_of_piece(c % 2, 0, c / 2); }, sum);
                if constexpr (NT > 4) {
                    // Not unrolled, since what runs once is fetched from afar (NOTES.md, version 12), and picked by comparisons:
                    // an array that is picked from by a number lies in local memory.
#pragma unroll 1
                    for (int n = 0; n < COLUMNS; n++) {
                        float4 gate = sum[0], up = sum[1];
#pragma unroll
                        for (int other = 1; other < COLUMNS; other++)
                            if (n == other) gate = sum[2 * other], up = sum[2 * other + 1];
                        finish_gated(s, stage, index_of(0, in_block), n0 + n, rows, columns, gate, up);
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) finish_gated(s, stage, index_of(0, in_block), n0 + n, rows, columns, sum[2 * n], sum[2 * n + 1]);
                }
            }
        }
        return;
    }
    if (stage.write == STORE) {
        // All rows of 16 columns at a time.
#pragma unroll 1
        for (int i = (blockIdx.x - first) * WARPS + warp; i < MT * WARPS; i += blocks.summing * WARPS) {
            const int m = i / WARPS, in_block = i % WARPS, index = index_of(m, in_block);
            if (!is_there(m, in_block)) continue;
            float4 sum[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                sum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (in_pairs) {
                    const float (&a)[4] = acc[0][n], (&b)[4] = acc[1][n];
                    sum[n] = m ? make_float4(b[0], b[1], b[2], b[3]) : make_float4(a[0], a[1], a[2], a[3]);
                }
            }
            Blocks others = blocks;
            if (in_pairs) others.last = blocks.last - own;
            gather<NT, (NT == 1 ? 8 : NT > 4 ? 2 : 3), false>(
                scratch, others, in_pairs ? others.last : first, place_in_part(m, in_block, 0), [](int n) { return place_of_piece(0, 0, n); }, sum);
            const Columns columns = columns_of(room, m, in_block);
            float* to = s.out + place_of(index, 0, s.stride);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                finish_store(s, to, There(s, index, n), *(const float2*)&rows.factor[n * 8 + threadIdx.x % 4 * 2], columns, sum[n]);
                to += 8 * s.stride;
            }
        }
        return;
    }
    sum_pieces(stage, s, scratch, tile, room, warp, rows);
}
