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
// Tile `n` of 16 columns as halves: `low` the first eight columns, `high` the others.
__device__ __forceinline__ void put_halves(u8* halves, int index, int n, u32 low, u32 high) {
    u8* to = halves + (size_t(index / 4) * NT + n) * A16_TILE + index % 4 * 256 + threadIdx.x % 32 * 4;
    *(u32*)to = transposed(low);
    *(u32*)(to + 128) = transposed(high);
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
// `index`: of the tile in the matrix (m = 0, or both row blocks of one), whose row block is `m` of `tile`.
__device__ __forceinline__ void fetch_columns(const Segment& s, const Stage& stage, int tile, int m, int in_block, Columns& columns) {
    const int block = row_block(stage.write, tile, m);
    const bool there = in_block < row_tiles(s, block);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = in_block * 16 + threadIdx.x % 32 / 4 + i * 8;
        columns.factors[i] = there ? __ldg((const float*)row_block_at(s, stage.write, tile, m) + at) : 0.0f;
        columns.norm[i] = stage.norm && block * 128 + at < s.n_out ? __ldg(stage.norm + block * 128 + at) * HEADROOM : 0.0f;
    }
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

__device__ __forceinline__ void finish_gated(const Segment& s, const Stage& stage, int index, int n, const RowScales& rows, const Columns (&columns)[MT],
                                             float4 of_gate, float4 of_up) {
    const float gate[4] = {of_gate.x, of_gate.y, of_gate.z, of_gate.w}, up[4] = {of_up.x, of_up.y, of_up.z, of_up.w};
    const int lane = threadIdx.x % 32, column = index * 16 + lane / 4;
    const float2 factor = *(const float2*)&rows.factor[n * 8 + lane % 4 * 2];
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float f = i % 2 ? factor.y : factor.x;
        y[i] = silu(gate[i] * columns[0].factors[i / 2] * f) * (up[i] * columns[1].factors[i / 2] * f);
        if (column + i / 2 * 8 >= s.n_out) y[i] = 0.0f;
    }
    put_halves(stage.halves, index, n, a16_pair(y[0], y[1]), a16_pair(y[2], y[3]));
    put_zeros(s, stage, index, n);
}

// Sums of COUNT pieces of 16 columns and 8 rows that blocks first .. last have left, in the order of the blocks. place(block, c): where.
// FETCH blocks at a time are looked at until all their parts are there. Of pieces that are not wanted there is nothing.
template <int COUNT, int FETCH, typename Where>
__device__ __forceinline__ void gather(u32 first, u32 last, const bool (&wanted)[COUNT], const Where& place, float4 (&sum)[COUNT]) {
#pragma unroll
    for (int c = 0; c < COUNT; c++) sum[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 b0 = first; b0 <= last; b0 += FETCH) {
        float4 part[FETCH][COUNT];
        bool waiting;
        do {
#pragma unroll
            for (int f = 0; f < FETCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++)
                    if (wanted[c]) part[f][c] = peek(place(min(b0 + f, last), c));
            waiting = false;
#pragma unroll
            for (int f = 0; f < FETCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++) waiting |= wanted[c] && !has_arrived(part[f][c]);
        } while (waiting);
#pragma unroll
        for (int f = 0; f < FETCH; f++) {
            if (b0 + f > last) break;
#pragma unroll
            for (int c = 0; c < COUNT; c++) {
                if (!wanted[c]) continue;
                *place(b0 + f, c) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                sum[c].x += part[f][c].x;
                sum[c].y += part[f][c].y;
                sum[c].z += part[f][c].z;
                sum[c].w += part[f][c].w;
            }
        }
    }
}

// The end of a tile in this block. Where it lies in several blocks all leave their parts, and all but the last, which goes on to other
// tiles, sum some pieces of 16 columns and 8 rows, their warps in turn; with GATED some pairs of 16 columns. `wait_for_scales`: until
// `rows` is there.
template <typename Wait>
__device__ __forceinline__ void finish(const Stage& stage, const Segment& s, float4* scratch, int tile, bool split, int warp, const RowScales& rows,
                                       const Wait& wait_for_scales, const float (&acc)[MT][NT][4]) {
    const bool gated = stage.write == GATED;
    const auto is_there = [&](int m, int in_block) { return in_block < row_tiles(s, row_block(stage.write, tile, m)); };
    const auto index_of = [&](int m, int in_block) { return row_block(stage.write, tile, m) * 8 + in_block; };
    if (!split) {
        Columns columns[MT];
#pragma unroll
        for (int m = 0; m < MT; m++) fetch_columns(s, stage, tile, m, warp, columns[m]);
        wait_for_scales();
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (!is_there(m, warp) || (gated && m)) continue;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const auto sum = [&](int of) { return make_float4(acc[of][n][0], acc[of][n][1], acc[of][n][2], acc[of][n][3]); };
                if (gated)
                    finish_gated(s, stage, index_of(m, warp), n, rows, columns, sum(0), sum(1));
                else if (stage.write == STORE)
                    finish_store(s, index_of(m, warp), n, rows, columns[m], sum(m));
                else
                    finish_add(s, stage, index_of(m, warp), n, rows, columns[m], fetch_before(s, index_of(m, warp), n), sum(m));
            }
        }
        return;
    }
    const u32 cost = s.first_cost + u32(tile) * s.units * s.cost;
    const u32 first = block_of(stage, cost), last = block_of(stage, cost + u32(s.units - 1) * s.cost);
    // A block has parts of two split tiles at most, one that others began and one that it begins.
    const auto place = [&](u32 block, int m, int in_block, int n) {
        return scratch + (((size_t(block) * 2 + (block == first)) * 16 + m * WARPS + in_block) * NT + n) * 32 + threadIdx.x % 32;
    };
#pragma unroll
    for (int m = 0; m < MT; m++)
        if (is_there(m, warp)) {
#pragma unroll
            for (int n = 0; n < NT; n++) leave(place(blockIdx.x, m, warp, n), make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
        }
    if (blockIdx.x == last) return;
    wait_for_scales();
    const int summing = last - first, own = blockIdx.x - first;
    if (gated) {
#pragma unroll 1
        for (int in_block = own + summing * warp; in_block < 8; in_block += summing * WARPS) {
            if (!is_there(0, in_block)) continue;
            Columns columns[MT];
            fetch_columns(s, stage, tile, 0, in_block, columns[0]);
            fetch_columns(s, stage, tile, 1, in_block, columns[1]);
            constexpr int COLUMNS = NT <= 4 ? NT : 2;  // of eight rows, at a time
#pragma unroll 1
            for (int n0 = 0; n0 < NT; n0 += COLUMNS) {
                float4 sum[2 * COLUMNS];
                bool all[2 * COLUMNS];
#pragma unroll
                for (int c = 0; c < 2 * COLUMNS; c++) all[c] = true;
                gather<2 * COLUMNS, COLUMNS == 1 ? 4 : 2>(first, last, all, [&](u32 block, int c) { return place(block, c % 2, in_block, n0 + c / 2); }, sum);
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) finish_gated(s, stage, index_of(0, in_block), n0 + n, rows, columns, sum[2 * n], sum[2 * n + 1]);
            }
        }
        return;
    }
    // Some pieces at a time, so that one is not waited for after the other.
    constexpr int TOGETHER = NT <= 2 ? 1 : NT <= 4 ? 3 : 2;
    const int step = summing * WARPS;
#pragma unroll 1
    for (int begin = own + summing * warp; begin < 16 * NT; begin += step * TOGETHER) {
        // Pieces of one 16-row tile after those of another, so that a block's are spread over tiles.
        int of_n[TOGETHER], of_m[TOGETHER], of_block[TOGETHER];
        bool wanted[TOGETHER];
        Columns columns[TOGETHER];
        float4 sum[TOGETHER], before[TOGETHER];
#pragma unroll
        for (int c = 0; c < TOGETHER; c++) {
            const int i = begin + c * step;
            of_n[c] = i / 16, of_m[c] = i % 16 / 8, of_block[c] = i % 8;
            wanted[c] = i < 16 * NT && is_there(of_m[c], of_block[c]);
            if (!wanted[c]) continue;
            fetch_columns(s, stage, tile, of_m[c], of_block[c], columns[c]);
            if (stage.write == ADD) before[c] = fetch_before(s, index_of(of_m[c], of_block[c]), of_n[c]);
        }
        gather<TOGETHER, 12 / TOGETHER>(first, last, wanted, [&](u32 block, int c) { return place(block, of_m[c], of_block[c], of_n[c]); }, sum);
#pragma unroll
        for (int c = 0; c < TOGETHER; c++) {
            if (!wanted[c]) continue;
            if (stage.write == STORE)
                finish_store(s, index_of(of_m[c], of_block[c]), of_n[c], rows, columns[c], sum[c]);
            else
                finish_add(s, stage, index_of(of_m[c], of_block[c]), of_n[c], rows, columns[c], before[c], sum[c]);
        }
    }
}
