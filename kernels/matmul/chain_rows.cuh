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
// Halves are there in whole groups of 256: zeros behind the last tile of 16 columns.
__device__ __forceinline__ void put_zeros(const Segment& s, const Stage& stage, int index, int n) {
    if (index != (s.n_out - 1) / 16) return;
    const int groups = (s.n_out + 255) / 256 * 16, row = n * 8 + threadIdx.x % 32;
    for (int more = index + 1; more < groups; more++) {
        put_halves(stage.halves, more, n, 0, 0);
        if (stage.write == ADD && threadIdx.x % 32 < 8 && row < ROWS) stage.squares[size_t(row) * groups + more] = 0.0f;
    }
}

// Of the columns g and g + 8 that a lane has in a tile of 16: factors of the weights, and of the norm behind ADD. Zeros past the matrix.
struct Columns {
    float factors[2], norm[2];
};
// Of the 16-row tiles whose sums a warp may finish, one in each row block: fetched before the products, since then they would be
// waited for. Factors, then weights of the norm.
struct ColumnRoom {
    float values[WARPS][MT][32];
};
__device__ __forceinline__ void fetch_columns(const Segment& s, const Stage& stage, int tile, int in_block, float (&room)[MT][32]) {
    const int lane = threadIdx.x % 32, at = in_block * 16 + lane % 16;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const int block = row_block(stage.write, tile, m);
        const bool there = lane < 16 ? in_block < row_tiles(s, block) : stage.norm && block * 128 + at < s.n_out;
        const float* from = lane < 16 ? (const float*)row_block_at(s, stage.write, tile, m) + at : stage.norm + block * 128 + at;
        if (there)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&room[m][lane])), "l"(from) : "memory");
        else
            room[m][lane] = 0.0f;
    }
    cp_async_commit();
}
__device__ __forceinline__ void await_columns() {
    cp_async_wait<0>();
    __syncwarp();
}
__device__ __forceinline__ Columns columns_of(const float (&room)[32]) {
    const int g = threadIdx.x % 32 / 4;
    return {{room[g], room[g + 8]}, {room[16 + g] * HEADROOM, room[24 + g] * HEADROOM}};
}

// What stands where the sums of 16 columns and 8 rows go. Another block of this launch may have written it.
__device__ __forceinline__ float4 fetch_before(const Segment& s, int index, int n) {
    const int lane = threadIdx.x % 32;
    float before[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = index * 16 + lane / 4 + i / 2 * 8, row = n * 8 + lane % 4 * 2 + i % 2;
        before[i] = row < ROWS && column < s.n_out ? __ldcg(s.out + size_t(row) * s.stride + column) : 0.0f;
    }
    return make_float4(before[0], before[1], before[2], before[3]);
}

__device__ __forceinline__ void finish_store(const Segment& s, int index, int n, const RowScales& rows, const Columns& columns, float4 sum) {
    const float acc[4] = {sum.x, sum.y, sum.z, sum.w};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = index * 16 + lane / 4 + i / 2 * 8, row = n * 8 + lane % 4 * 2 + i % 2;
        if (row < ROWS && column < s.n_out) s.out[size_t(row) * s.stride + column] = acc[i] * columns.factors[i / 2] * rows.factor[row];
    }
}

__device__ __forceinline__ void finish_add(const Segment& s, const Stage& stage, int index, int n, const RowScales& rows, const Columns& columns,
                                           float4 old, float4 sum) {
    const float before[4] = {old.x, old.y, old.z, old.w}, acc[4] = {sum.x, sum.y, sum.z, sum.w};
    const int lane = threadIdx.x % 32, column = index * 16 + lane / 4, row = n * 8 + lane % 4 * 2;
    const bool there[2] = {column < s.n_out, column + 8 < s.n_out};
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = before[i] + acc[i] * columns.factors[i / 2];
        if (row + i % 2 < ROWS && there[i / 2]) s.out[size_t(row + i % 2) * s.stride + column + i / 2 * 8] = x[i];
        if (!there[i / 2]) x[i] = 0.0f;
    }
    if (!stage.halves) return;
    const float2 last = *(const float2*)&rows.last[row];
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = x[i] * columns.norm[i / 2] * (i % 2 ? last.y : last.x);
    put_halves(stage.halves, index, n, a16_pair(y[0], y[1]), a16_pair(y[2], y[3]));
    if (stage.floats) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i % 2 < ROWS && there[i / 2]) stage.floats[size_t(row + i % 2) * s.n_out + column + i / 2 * 8] = y[i];
    }
    float squares[2] = {x[0] * x[0] + x[2] * x[2], x[1] * x[1] + x[3] * x[3]};
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int gap = 16; gap >= 4; gap >>= 1) squares[i] += __shfl_xor_sync(WARP_ALL, squares[i], gap);
        if (lane < 4 && row + i < ROWS) stage.squares[size_t(row + i) * ((s.n_out + 255) / 256 * 16) + index] = squares[i];
    }
    put_zeros(s, stage, index, n);
}

// Division by an approximate reciprocal, 2 ulp, without the branches of the exact one, between which nothing else can run.
__device__ __forceinline__ float quick_silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

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
    put_zeros(s, stage, index, n);
}

// What is there now, without a branch; where nothing is wanted something that has arrived.
__device__ __forceinline__ float4 peek_if(bool wanted, const float4* from) {
    float4 v;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.f32 %0, 0f3f800000;\n\tmov.f32 %1, %0;\n\tmov.f32 %2, %0;\n\tmov.f32 %3, %0;\n\t"
        "@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
        : "l"(from), "r"(u32(wanted))
        : "memory");
    return v;
}

// Adds COUNT pieces of 16 columns and 8 rows that blocks first .. last have left, in the order of the blocks. place(block, c): where.
// FETCH blocks at a time are looked at until all their parts are there.
template <int COUNT, int FETCH, typename Where>
__device__ __forceinline__ void gather(u32 first, u32 last, const Where& place, float4 (&sum)[COUNT]) {
#pragma unroll 1
    for (u32 b0 = first; b0 <= last; b0 += FETCH) {
        float4 part[FETCH][COUNT];
        bool waiting;
        do {
#pragma unroll
            for (int f = 0; f < FETCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++) part[f][c] = peek_if(b0 + f <= last, place(b0 + f, c));
            waiting = false;
#pragma unroll
            for (int f = 0; f < FETCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++) waiting |= !has_arrived(part[f][c]);
        } while (waiting);
#pragma unroll
        for (int f = 0; f < FETCH; f++) {
            if (b0 + f > last) break;
#pragma unroll
            for (int c = 0; c < COUNT; c++) {
                *place(b0 + f, c) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                sum[c].x += part[f][c].x;
                sum[c].y += part[f][c].y;
                sum[c].z += part[f][c].z;
                sum[c].w += part[f][c].w;
            }
        }
    }
}

// Blocks that have units of a tile, the first and the last.
struct Blocks {
    u32 first, last;

    // All but the last sum, or the only one.
    __device__ __forceinline__ int summing() const { return max(1, int(last - first)); }
    // Where one block sums, its warps sum what they have multiplied themselves, which need not be left for others.
    __device__ __forceinline__ bool keeps_own() const { return last - first <= 1; }
    __device__ __forceinline__ u32 first_left() const { return first + keeps_own(); }
    // The first piece that a warp of this block sums; more are a multiple of 8 further, and so of the same tiles of their row blocks.
    __device__ __forceinline__ int begin(int warp) const { return blockIdx.x - first + summing() * warp; }
};
// The sums of a warp's tiles, where they can be picked by a number: in local memory.
struct Own {
    float4 parts[MT * NT];
};
__device__ __forceinline__ Blocks blocks_of(const Stage& stage, const Segment& s, int tile) {
    const u32 cost = s.first_cost + u32(tile) * s.units * s.cost;
    return {block_of(stage, cost), block_of(stage, cost + u32(s.units - 1) * s.cost)};
}

// Which piece of 16 columns and 8 rows a number means. Those of one 16-row tile come after those of another, so that a block's are
// spread over tiles.
struct Piece {
    int n, m, in_block;

    __device__ __forceinline__ explicit Piece(int i) : n(i / 16), m(i % 16 / 8), in_block(i % 8) {}
};

// Pieces from `begin` on in steps of what the summing blocks have of warps, one after the other. Several together would take registers
// from the products.
template <typename Where>
__device__ __forceinline__ void sum_pieces(const Stage& stage, const Segment& s, int tile, Blocks blocks, const Own& own, int begin, const RowScales& rows,
                                           const float (&room)[MT][32], const Where& place) {
    const int step = blocks.summing() * WARPS;
#pragma unroll 1
    for (int i = begin; i < 16 * NT; i += step) {
        const Piece piece(i);
        const int block = row_block(stage.write, tile, piece.m), index = block * 8 + piece.in_block;
        if (piece.in_block >= row_tiles(s, block)) continue;
        float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f), sum[1] = {before};
        if (stage.write == ADD) before = fetch_before(s, index, piece.n);
        if (blocks.keeps_own()) sum[0] = own.parts[piece.m * NT + piece.n];
        gather<1, 8>(blocks.first_left(), blocks.last, [&](u32 block, int) { return place(block, piece.m, piece.in_block, piece.n); }, sum);
        const Columns columns = columns_of(room[piece.m]);
        if (stage.write == STORE)
            finish_store(s, index, piece.n, rows, columns, sum[0]);
        else
            finish_add(s, stage, index, piece.n, rows, columns, before, sum[0]);
    }
}

// The end of a tile in this block. Blocks that have some of it leave their parts, and all but the last, which goes on to other
// tiles, sum some pieces of 16 columns and 8 rows, their warps in turn; with GATED some pairs of 16 columns. `wait_for_scales`: until
// `rows` is there. Registers that are taken here are missing in the products: this code stands here once.
template <typename Wait>
__device__ __forceinline__ void finish(const Stage& stage, const Segment& s, float4* scratch, int tile, Blocks blocks, int warp, const RowScales& rows,
                                       const float (&room)[MT][32], const Wait& wait_for_scales, const float (&acc)[MT][NT][4]) {
    const bool gated = stage.write == GATED;
    const u32 first = blocks.first;
    const auto is_there = [&](int m, int in_block) { return in_block < row_tiles(s, row_block(stage.write, tile, m)); };
    const auto index_of = [&](int m, int in_block) { return row_block(stage.write, tile, m) * 8 + in_block; };
    // A block has parts of two split tiles at most, one that others began and one that it begins.
    const auto place = [&](u32 block, int m, int in_block, int n) {
        return scratch + (((size_t(block) * 2 + (block == first)) * 16 + m * WARPS + in_block) * NT + n) * 32 + threadIdx.x % 32;
    };
    // Fetched before the products, so there by now; not to land in the next tile's.
    await_columns();
    Own kept;
    if (!blocks.keeps_own() || blockIdx.x != first) {
#pragma unroll
        for (int m = 0; m < MT; m++)
            if (is_there(m, warp)) {
                float4* to = place(blockIdx.x, m, warp, 0);
#pragma unroll
                for (int n = 0; n < NT; n++) leave(to + n * 32, make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
            }
        if (blockIdx.x == blocks.last) return;
    } else if (!gated) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++) kept.parts[m * NT + n] = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
    }
    wait_for_scales();
    if (gated) {
        const int in_block = blocks.begin(warp);
        if (in_block < 8 && is_there(0, in_block)) {
            const Columns columns[MT] = {columns_of(room[0]), columns_of(room[1])};
            constexpr int COLUMNS = NT > 4 ? NT : NT % 2 ? NT : 2;  // of eight rows, at a time
#pragma unroll
            for (int n0 = 0; n0 < NT; n0 += COLUMNS) {
                float4 sum[2 * COLUMNS];
#pragma unroll
                for (int c = 0; c < 2 * COLUMNS; c++) {
                    const float (&part)[4] = acc[c % 2][n0 + c / 2];
                    sum[c] = blocks.keeps_own() ? make_float4(part[0], part[1], part[2], part[3]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                const auto where = [&](u32 block, int c) { return place(block, c % 2, in_block, n0 + c / 2); };
                gather<2 * COLUMNS, COLUMNS == 1 ? 4 : 1>(blocks.first_left(), blocks.last, where, sum);
                if constexpr (NT > 4) {
                    // Not unrolled, since the kernel is larger than what a multiprocessor keeps of instructions, and picked by comparisons:
                    // an array that is picked from by a number lies in local memory.
#pragma unroll 1
                    for (int n = 0; n < NT; n++) {
                        float4 gate = sum[0], up = sum[1];
#pragma unroll
                        for (int other = 1; other < NT; other++)
                            if (n == other) gate = sum[2 * other], up = sum[2 * other + 1];
                        finish_gated(s, stage, index_of(0, in_block), n, rows, columns, gate, up);
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) finish_gated(s, stage, index_of(0, in_block), n0 + n, rows, columns, sum[2 * n], sum[2 * n + 1]);
                }
            }
        }
        return;
    }
    sum_pieces(stage, s, tile, blocks, kept, blocks.begin(warp), rows, room, place);
}
