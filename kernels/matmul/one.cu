// matmul/one: products of one row, for models whose steps are bound by the number and the ends of launches, not by memory.
//
//   out[n] (+)= sum over k of W[n][k] * x[k]        for several matrices W that share x
//   NORM:   x = rms(row) * norm, made by every block for itself
//   GATED:  y[n] = silu(gate[n]) * up[n] instead, halves for the product behind
//
// Inputs: packed weights (layout.cuh); NORM 1: row f32 [WIDTH] and norm f32 [WIDTH], NORM 0: x in the form of a16.cuh for a bucket of one
// row. Output f32 [n_out] per matrix, or with GATED the form of a16.cuh.
//
// A block has sixteen rows of a matrix, or with GATED of both, and all of K: it asks for all of its weights before the dependency wait,
// so memory is busy with them, and with those of the launch behind, while this launch waits for the one before. No two blocks share
// a sum. The bits are those of matmul/small in a bucket of any size: where that kernel cuts a tile among blocks, sums begin
// anew here too, and are added up in the same order; the norm is norm/rms, the gated unit ffn/swiglu, f32 matrices plain.cuh.
//
// Grid: groups of 8 rows of the f32 matrices (PLAIN), then tiles of 16 rows of all matrices. WARPS * 32 threads; a warp has the
// sums between two cuts.
// Shared memory, dynamic: weights of the block, x in halves (with PLAIN in f32 too), 68 bytes for each sum.
//
// Defines: WIDTH (a multiple of 256), WARPS, KINDS (bit i: kind i occurs), SEGMENTS (most per launch), PLAIN, NORM and NORM_WARPS, GATED.
// Architecture floor: sm_80. Judge: matmul/small, bit for bit; test crates/cuda/tests/one.rs.
// hot
#include "common/prelude.cuh"
#define ROWS 1
#define THREADS (WARPS * 32)
#define PLAIN_WARPS WARPS
__device__ __forceinline__ int plain_thread() { return threadIdx.x; }
__device__ __forceinline__ void plain_sync() { __syncthreads(); }
#include "matmul/plain.cuh"
#include "matmul/a16.cuh"
#include "matmul/tiles.cuh"
#include "norm/emit.cuh"

struct Segment {
    const u8* weights;
    float* out;       // with GATED, of the first: the halves
    int n_out, add;
    int kind, units;  // along K
    int first, tile;  // its first block; bytes of a 16-row tile in a unit
    u32 first_cost, cost;  // where its units begin on the line of matmul/small, and what each costs
};
struct Work {
    Segment segments[SEGMENTS];
    const u8* x;
    const float* norm;
    u32 share, extra;  // block b of matmul/small begins at b * share + min(b, extra)
    int n_segments;
    float eps;
    int weight_bytes, sums;  // room for a tile's weights, and for its sums
#if PLAIN
    Plain plain;
#endif
};

#define TILES (1 + GATED)
#define ROUNDS ((NORM_WARPS + WARPS - 1) / WARPS)
#define PER_WARP ((OUT_GROUPS + NORM_WARPS - 1) / NORM_WARPS)

// Sixteen rows of a matrix: what they are made of, and where matmul/small cuts the tile of 256 rows that they belong to.
struct Rows {
    const u8* weights;  // the tile's share of unit 0
    int step;           // bytes from a unit to the next
    int second;         // from its first piece to its second
    u32 tile_begin;     // its first unit, counted from the segment's
    u32 first;          // the block of matmul/small that begins it
    int n;              // how many have parts of it
};

__device__ __forceinline__ u32 share_begin(const Work& work, u32 block) { return block * work.share + min(block, work.extra); }
__device__ __forceinline__ u32 block_of(const Work& work, u32 cost) {
    const u32 wide = work.extra * (work.share + 1);
    return cost < wide ? cost / (work.share + 1) : work.extra + (cost - wide) / work.share;
}
// The first unit of the tile that begins in the share of the tile's block `part`, or one behind its last.
__device__ __forceinline__ int cut(const Work& work, const Segment& s, const Rows& rows, int part) {
    const u32 begin = share_begin(work, rows.first + part);
    const u32 unit = begin <= s.first_cost ? 0 : (begin - s.first_cost + s.cost - 1) / s.cost;
    return unit <= rows.tile_begin ? 0 : min(s.units, int(unit - rows.tile_begin));
}

// Rows 16 * index .. of a segment; their factors go to `factors`.
__device__ __forceinline__ Rows rows_of(const Work& work, const Segment& s, int index) {
    const int row_block = index / 8, tiles = min(8, (s.n_out - row_block * 128 + 15) / 16), first_piece = s.tile - [&] {
        switch (s.kind) {
            case KIND_Q4K: return piece_bytes(KIND_Q4K, 1);
            case KIND_Q5K: return piece_bytes(KIND_Q5K, 1);
            case KIND_Q6K: return piece_bytes(KIND_Q6K, 1);
        }
        return 0;
    }();
    const u8* block = s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile * 8);
    Rows rows;
    rows.weights = block + tiles * 64 + index % 8 * first_piece;
    rows.step = s.tile * tiles;
    rows.second = tiles * first_piece - index % 8 * (2 * first_piece - s.tile);
    rows.tile_begin = u32(index / 16) * s.units;
    const u32 begin = s.first_cost + rows.tile_begin * s.cost;
    rows.first = block_of(work, begin);
    rows.n = block_of(work, begin + u32(s.units - 1) * s.cost) - rows.first + 1;
    return rows;
}
__device__ __forceinline__ float factor_of(const Segment& s, int row) {
    const int row_block = row / 128;
    return __ldg((const float*)(s.weights + size_t(row_block) * (128 * 4 + size_t(s.units) * s.tile * 8)) + row % 128);
}

// Asks for all weights of a tile; unit after unit in `to`.
template <int KIND>
__device__ __forceinline__ void fetch_weights(u32 to, const Rows& rows, int units) {
    constexpr int FIRST = piece_bytes(KIND, 0) / 16, ALL = tile_bytes(KIND) / 16;
    const u64 once = policy_evict_first();
    for (int i = threadIdx.x; i < units * ALL; i += THREADS) {
        const int unit = i / ALL, at = i % ALL;
        const u8* from = rows.weights + size_t(unit) * rows.step + (at < FIRST ? at * 16 : rows.second + (at - FIRST) * 16);
        cp_async_16_hint(to + i * 16, from, once);
    }
}

// Products of one piece as matmul/units.cuh has them; x: halves one after the other.
template <int KIND, int P>
__device__ __forceinline__ void piece_products(Tile<KIND>& tile, const u8* weights, u32 x, float (&acc)[4]) {
    tile.template head<P>(weights);
    tile.fetch(weights, 0);
    tile.template begin<P>();
#pragma unroll
    for (int q = 0; q < piece_chunks(KIND); q++) {
        tile.ready(q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 a[2][4], b[4];
            tile.template step<0>(s, a[0]);
            tile.template step<1>(s, a[1]);
            if (s == 0)
                tile.turn();
            else if (q + 1 < piece_chunks(KIND))
                tile.fetch(weights, q + 1);
            // Every column is the row.
            ldmatrix_x4(b, x + q * 128 + s * 32);
            mma_f16(acc, a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            mma_f16(acc, a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
        }
    }
}
template <int KIND>
__device__ __forceinline__ void products(const u8* weights, u32 x, int from, int to, float (&acc)[4]) {
    x += threadIdx.x % 32 / 16 * 64 + threadIdx.x / 8 % 2 * 16;
    Tile<KIND> tile;
    for (int unit = from; unit < to; unit++) {
        const u8* at = weights + unit * tile_bytes(KIND);
        const u32 x_unit = x + unit * unit_pieces(KIND) * piece_chunks(KIND) * 128;
        piece_products<KIND, 0>(tile, at, x_unit, acc);
        if constexpr (unit_pieces(KIND) == 2) piece_products<KIND, 1>(tile, at + piece_bytes(KIND, 0), x_unit + piece_chunks(KIND) * 128, acc);
    }
}

#define EVERY_KIND(CALL)                               \
    switch (kind) {                                    \
        case KIND_Q4K: if constexpr (KINDS >> KIND_Q4K & 1) CALL(KIND_Q4K); break;     \
        case KIND_Q5K: if constexpr (KINDS >> KIND_Q5K & 1) CALL(KIND_Q5K); break;     \
        case KIND_Q6K: if constexpr (KINDS >> KIND_Q6K & 1) CALL(KIND_Q6K); break;     \
        case KIND_Q8: if constexpr (KINDS >> KIND_Q8 & 1) CALL(KIND_Q8); break;        \
        case KIND_WIDE: if constexpr (KINDS >> KIND_WIDE & 1) CALL(KIND_WIDE); break;  \
        case KIND_F16: if constexpr (KINDS >> KIND_F16 & 1) CALL(KIND_F16); break;     \
    }

// The row, as the products and the f32 matrices of a block read it.
struct Input {
    u8* halves;
    float* floats;
#if NORM
    float norm[ROUNDS][PER_WARP][8];
#endif
};

// Before the dependency wait.
__device__ __forceinline__ void begin_input(const Work& work, Input& x) {
#if NORM
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) {
            const int warp = threadIdx.x / 32 + r * WARPS;
            if (warp < NORM_WARPS) fetch<WIDTH>(work.norm, warp + i * NORM_WARPS, x.norm[r][i]);
        }
#endif
}
// After it; ends with the row in shared memory, for all threads.
__device__ __forceinline__ void make_input(const Work& work, Input& x) {
#if NORM
    // As norm/rms of NORM_WARPS warps, of which a warp here may have several.
    __shared__ float room[NORM_WARPS];
    float v[ROUNDS][PER_WARP][8];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int warp = threadIdx.x / 32 + r * WARPS;
        if (warp >= NORM_WARPS) break;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) fetch<WIDTH>((const float*)work.x, warp + i * NORM_WARPS, v[r][i]);
#pragma unroll
        for (int i = 0; i < PER_WARP; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[r][i][j] * v[r][i][j];
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) room[warp] = sum;
    }
    __syncthreads();
    float sum = room[0];
#pragma unroll
    for (int i = 1; i < NORM_WARPS; i++) sum += room[i];
    const float scale = 1.0f / sqrtf(sum / WIDTH + work.eps);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) {
            const int warp = threadIdx.x / 32 + r * WARPS, group = warp + i * NORM_WARPS;
            if (warp >= NORM_WARPS || group >= OUT_GROUPS) continue;
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = v[r][i][j] * scale * x.norm[r][i][j];
            const int at = group * 256 + threadIdx.x % 32 * 8;
            *(uint4*)(x.halves + at * 2) = make_uint4(a16_pair(y[0], y[1]), a16_pair(y[2], y[3]), a16_pair(y[4], y[5]), a16_pair(y[6], y[7]));
#if PLAIN
            ((float4*)(x.floats + at))[0] = make_float4(y[0], y[1], y[2], y[3]);
            ((float4*)(x.floats + at))[1] = make_float4(y[4], y[5], y[6], y[7]);
#endif
        }
#else
    for (int i = threadIdx.x; i < WIDTH / 8; i += THREADS) *(uint4*)(x.halves + i * 16) = __ldcg((const uint4*)(work.x + i * 128));
#endif
    cp_async_wait<0>();
    __syncthreads();
}

#if PLAIN
// Eight rows of an f32 matrix: sums as plain.cuh has them.
__device__ __forceinline__ void plain_rows(const Work& work, float4* weights, Input& x) {
    const int group = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const PlainSegment& s = plain_segment(work.plain, group);
    for (int i = threadIdx.x; i < 8 * WIDTH / 4; i += THREADS) {
        const int row = min((group - s.first) * 8 + i / (WIDTH / 4), s.n_out - 1);
        cp_async_16(shared_address(weights + i), s.weights + size_t(row) * WIDTH + i % (WIDTH / 4) * 4);
    }
    cp_async_commit();
    begin_input(work, x);
    pdl_wait();
    make_input(work, x);
    for (int n = warp; n < 8; n += WARPS) {
        float all = 0.0f;
        for (int begin = 0; begin < WIDTH; begin += work.plain.slice) {
            float sum = 0.0f;
            for (int k = begin + lane * 4; k < min(WIDTH, begin + work.plain.slice); k += 128) {
                const float4 w = weights[n * (WIDTH / 4) + k / 4], v = *(const float4*)(x.floats + k);
                sum = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sum))));
            }
            all += warp_sum(sum);
        }
        if (lane == 0) plain_store(s, 0, (group - s.first) * 8 + n, all);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 32 / WARPS) matmul_one(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) u8 memory[];
    pdl_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Input x;
    x.halves = memory + TILES * work.weight_bytes;
    x.floats = (float*)(x.halves + 2 * WIDTH);
    float* sums = PLAIN ? x.floats + WIDTH : x.floats;            // [TILES][work.sums][16]
    int* cuts = (int*)(sums + TILES * work.sums * 16);            // [TILES][work.sums], where a sum begins
#if PLAIN
    if (int(blockIdx.x) < work.plain.groups) return plain_rows(work, (float4*)memory, x);
#endif
    int which = 0;
    while (!GATED && which + 1 < work.n_segments && int(blockIdx.x) >= work.segments[which + 1].first) which++;
    const int index = blockIdx.x - work.segments[which].first;
    Rows rows[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const Segment& s = work.segments[which + t];
        rows[t] = rows_of(work, s, index);
        const int kind = s.kind;
#define FETCH(KIND) fetch_weights<KIND>(shared_address(memory + t * work.weight_bytes), rows[t], s.units)
        EVERY_KIND(FETCH)
#undef FETCH
    }
    cp_async_commit();
#pragma unroll
    for (int t = 0; t < TILES; t++)
        for (int i = threadIdx.x; i < rows[t].n; i += THREADS) cuts[t * work.sums + i] = cut(work, work.segments[which + t], rows[t], i);
    const Segment& own = work.segments[which];
    // Thread i < 16 ends row i.
    const int row = index * 16 + threadIdx.x;
    const bool ends = threadIdx.x < 16 && row < own.n_out;
    float factor[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) factor[t] = ends ? factor_of(work.segments[which + t], row) : 0.0f;
    begin_input(work, x);
    pdl_wait();
    const float before = !GATED && ends && own.add ? own.out[row] : 0.0f;
    make_input(work, x);

    const int n_first = rows[0].n, n = GATED ? n_first + rows[TILES - 1].n : n_first;
    for (int i = warp; i < n; i += WARPS) {
        const int t = GATED && i >= n_first, part = t ? i - n_first : i;
        const Segment& s = work.segments[which + t];
        const int* at = cuts + t * work.sums + part;
        const int from = at[0], to = i + 1 == n || i + 1 == n_first ? s.units : at[1];
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const int kind = s.kind;
#define PRODUCTS(KIND) products<KIND>(memory + t * work.weight_bytes, shared_address(x.halves), from, to, acc)
        EVERY_KIND(PRODUCTS)
#undef PRODUCTS
        if (lane % 4 == 0) {
            float* to_sums = sums + (t * work.sums + part) * 16 + lane / 4;
            to_sums[0] = acc[0];
            to_sums[8] = acc[2];
        }
    }
    __syncthreads();
    if (!ends) return;
    float value[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float* from = sums + t * work.sums * 16 + threadIdx.x;
        // What several blocks add up begins at +0 there.
        float sum = rows[t].n > 1 ? 0.0f + from[0] : from[0];
        for (int part = 1; part < rows[t].n; part++) sum += from[part * 16];
        value[t] = before + sum * factor[t];
    }
#if GATED
    const float y = silu(value[0]) * value[1];
    *(u16*)((u8*)own.out + row / 64 * A16_TILE + row % 64 / 8 * 128 + row % 8 * 2) = f32_to_f16(within_f16(y));
#else
    own.out[row] = value[0];
#endif
}
