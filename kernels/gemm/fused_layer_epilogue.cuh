// Epilogue of the fused layer: reduces partial tiles of other blocks and writes the results.
//
// Lane (g, t) = (lane / 4, lane % 4) has, for every n8 tile of rows of x, rows 2 t and 2 t + 1 of columns g (elements
// 0, 1) and g + 8 (elements 2, 3) of 16 columns of the result.
#pragma once
#include "gemm/fused_layer_phases.cuh"
#include "common/sync.cuh"

// inv_rms: last known 1 / rms of each row. correction: factor for GEMMs of activations that were scaled with the
// inv_rms before.
struct RowScales {
    float inv_rms[N8_TILES * 8], correction[N8_TILES * 8];
};

// Transposes an 8 x 8 matrix of f16 across the warp.
__device__ __forceinline__ u32 movmatrix_trans(u32 v) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
    return d;
}
// n8 tile `n` of 16 columns as f16: `low` the first eight columns, `high` the others.
__device__ __forceinline__ void store_f16_tile(u8* f16, int index, int n, u32 low, u32 high) {
    u8* to = f16 + (size_t(index / 4) * N8_TILES + n) * A16_TILE + index % 4 * 256 + threadIdx.x % 32 * 4;
    flag_store_f16x2(to, movmatrix_trans(low));
    flag_store_f16x2(to + 128, movmatrix_trans(high));
}
// Activations are padded to groups of 256 columns: zeros after the last 16 columns, by `count` threads.
__device__ __forceinline__ void zero_fill_f16(const Matrix& s, const Phase& phase, int thread, int count) {
    const int tiles = (s.n_out + 15) / 16, groups = (s.n_out + 255) / 256 * 16, missing = groups - tiles;
#pragma unroll 1
    for (int i = thread; i < missing * N8_TILES * 64; i += count) {
        const int index = tiles + i / 64 / N8_TILES, n = i / 64 % N8_TILES;
        flag_store_f16x2(phase.out_f16 + (size_t(index / 4) * N8_TILES + n) * A16_TILE + index % 4 * 256 + i % 64 * 4,
                         0);
    }
#pragma unroll 1
    for (int i = thread; phase.epilogue_kind == EPILOGUE_ADD_NORM && i < missing * ROWS; i += count)
        phase.out_squares[size_t(i / missing) * groups + tiles + i % missing] = 0.0f;
}

// Of a lane's columns g and g + 8: row factors of the weights, and weights of the norm (EPILOGUE_ADD_NORM).
struct ColumnScales {
    float factors[2], norm[2];
};
// The blocks that have units of a tile.
struct TileBlocks {
    u32 first, last;
    u32 n_reducers;  // blocks that reduce: all if none switches to another tile, else all but the last, or the only one

    // One block reduces: its warps keep their accumulators in registers.
    __device__ __forceinline__ bool has_single_reducer() const { return last - first <= 1; }
    // The first fragment that a warp of this block reduces.
    __device__ __forceinline__ int first_fragment(int warp) const { return blockIdx.x - first + n_reducers * warp; }
};
__device__ __forceinline__ TileBlocks tile_blocks(const Phase& phase, const Matrix& s, int tile) {
    if (phase.data_parallel_tiles) return {blockIdx.x, blockIdx.x, 1};
    const u32 cost = tile_cost(phase, s, tile), first = block_at_cost(phase, cost),
              last = block_at_cost(phase, cost + u32(s.units - 1) * s.cost);
    return {first, last, phase.tile_switch_cost == 0 ? last - first + 1 : last > first ? last - first : 1};
}

// Epilogue operands of a tile: row factors and, for EPILOGUE_ADD_NORM, norm weights of its row blocks. Loaded with the
// tile's first slice; past the matrix they may be anything.
struct EpilogueSmem {
    float factors[M16_TILES][128], norm[M16_TILES][128];
    TileBlocks blocks;
    u32 _pad;
};
__device__ __forceinline__ ColumnScales column_scales(const EpilogueSmem& tile, int m, int m16) {
    const int at = m16 * 16 + threadIdx.x % 32 / 4;
    return {{tile.factors[m][at], tile.factors[m][at + 8]},
            {tile.norm[m][at] * HEADROOM, tile.norm[m][at + 8] * HEADROOM}};
}

// Which of a lane's two rows and two columns exist. If ROWS is a multiple of 8, all rows do.
struct Bounds {
    bool rows[2], columns[2];

    __device__ __forceinline__ Bounds(const Matrix& s, int index, int n) {
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
// Offset of the lane's first row and column of a fragment, rows being `stride` apart; element i is at element_offset(i,
// stride). 32 bits suffice here and in partial tiles; 64-bit sums are twice the instructions.
__device__ __forceinline__ u32 output_offset(u32 index, u32 n, u32 stride) {
    return (n * 8 + threadIdx.x % 4 * 2) * stride + index * 16 + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int element_offset(int i, int stride) { return i % 2 * stride + i / 2 * 8; }

// Previous values of 16 columns and 8 rows of out. Another block of this launch may have written them.
__device__ __forceinline__ float4 load_residual(const float* from, int stride, const Bounds& bounds) {
    float residual[4];
#pragma unroll
    for (int i = 0; i < 4; i++) residual[i] = bounds[i] ? __ldcg(from + element_offset(i, stride)) : 0.0f;
    return make_float4(residual[0], residual[1], residual[2], residual[3]);
}

// `to`: the fragment in out.
__device__ __forceinline__ void epilogue_store(const Matrix& s, float* to, const Bounds& bounds, float2 factor,
                                               const ColumnScales& columns, float4 sum) {
    const float acc[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (bounds[i])
            to[element_offset(i, s.stride)] = acc[i] * columns.factors[i / 2] * (i % 2 ? factor.y : factor.x);
}

#ifdef EXCHANGE
// By a whole warp: the sum of both shards' values of a fragment, in the order of the shards.
__device__ __forceinline__ float4 exchange_fragment(const FragmentExchange& exchange, u32 fragment, float4 own) {
    own = make_float4(encode_ready(own.x), encode_ready(own.y), encode_ready(own.z), encode_ready(own.w));
    const u32 at = fragment * 32 + threadIdx.x % 32;
    asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(exchange.sent + at), "f"(own.x),
                 "f"(own.y), "f"(own.z), "f"(own.w)
                 : "memory");
    float4* const from = exchange.received + at;
    float4 other;
    u32 spins = exchange.watchdog_spins;
    do {
        asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(other.x), "=f"(other.y), "=f"(other.z), "=f"(other.w)
                     : "l"(from)
                     : "memory");
        if (--spins == 0) asm volatile("trap;");
    } while (__any_sync(WARP_ALL, !is_ready(other)));
    *from = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 a = exchange.rank ? other : own, b = exchange.rank ? own : other;
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
#endif

__device__ __forceinline__ void epilogue_add_norm(const Matrix& s, const Phase& phase, int index, int n,
                                                  const RowScales& rows, const ColumnScales& columns,
                                                  float4 residual_in, float4 sum) {
    const float residual[4] = {residual_in.x, residual_in.y, residual_in.z, residual_in.w},
                acc[4] = {sum.x, sum.y, sum.z, sum.w};
    const int lane = threadIdx.x % 32, row = n * 8 + lane % 4 * 2;
    const Bounds bounds(s, index, n);
    float* const to = s.out + output_offset(index, n, s.stride);
    float x[4], y[4];
#ifdef EXCHANGE
    const float4 sum_of_shards =
        exchange_fragment(*phase.exchange, index * N8_TILES + n,
                          make_float4(acc[0] * columns.factors[0], acc[1] * columns.factors[0],
                                      acc[2] * columns.factors[1], acc[3] * columns.factors[1]));
    x[0] = residual[0] + sum_of_shards.x;
    x[1] = residual[1] + sum_of_shards.y;
    x[2] = residual[2] + sum_of_shards.z;
    x[3] = residual[3] + sum_of_shards.w;
#else
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = residual[i] + acc[i] * columns.factors[i / 2];
#endif
    // First what other blocks wait for.
    if (phase.out_f16) {
        const float2 last = *(const float2*)&rows.inv_rms[row];
#pragma unroll
        for (int i = 0; i < 4; i++)
            y[i] = bounds.columns[i / 2] ? x[i] * columns.norm[i / 2] * (i % 2 ? last.y : last.x) : 0.0f;
        store_f16_tile(phase.out_f16, index, n, a16_f16x2(y[0], y[1]), a16_f16x2(y[2], y[3]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (bounds[i]) to[element_offset(i, s.stride)] = x[i];
        if (!bounds.columns[i / 2]) x[i] = 0.0f;
    }
    if (!phase.out_f16) return;
    if (phase.out_f32) {
        float* const floats = phase.out_f32 + output_offset(index, n, s.n_out);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (bounds[i]) floats[element_offset(i, s.n_out)] = y[i];
    }
    float squares[2] = {x[0] * x[0] + x[2] * x[2], x[1] * x[1] + x[3] * x[3]};
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int offset = 16; offset >= 4; offset >>= 1) squares[i] += __shfl_xor_sync(WARP_ALL, squares[i], offset);
        if (lane < 4 && bounds.rows[i])
            phase.out_squares[u32(row + i) * (u32(s.n_out + 255) / 256 * 16) + index] = squares[i];
    }
}

// Division by an approximate reciprocal, 2 ulp, without the branches of the exact one, which would block other work. 1
// may be added to an exponential that is rounded to zero where it is subnormal.
__device__ __forceinline__ float silu_approx(float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950216293335f));
    return __fdividef(v, 1.0f + e);
}

__device__ __forceinline__ void epilogue_swiglu(const Matrix& s, const Phase& phase, int index, int n,
                                                const RowScales& rows, const ColumnScales (&columns)[M16_TILES],
                                                float4 of_gate, float4 of_up) {
    const float gate[4] = {of_gate.x, of_gate.y, of_gate.z, of_gate.w}, up[4] = {of_up.x, of_up.y, of_up.z, of_up.w};
    const int lane = threadIdx.x % 32, column = index * 16 + lane / 4;
    const float2 factor = *(const float2*)&rows.correction[n * 8 + lane % 4 * 2];
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float f = i % 2 ? factor.y : factor.x;
        y[i] = silu_approx(gate[i] * columns[0].factors[i / 2] * f) * (up[i] * columns[1].factors[i / 2] * f);
        if (column + i / 2 * 8 >= s.n_out) y[i] = 0.0f;
    }
    store_f16_tile(phase.out_f16, index, n, a16_f16x2(y[0], y[1]), a16_f16x2(y[2], y[3]));
}

// The value as it is now, without a branch; if not wanted, -0.0, which is ready and adds nothing.
__device__ __forceinline__ float4 flag_load_if(bool enabled, const float4* from) {
    float4 v;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.f32 %0, 0f80000000;\n\tmov.f32 %1, %0;\n\tmov.f32 %2, "
        "%0;\n\tmov.f32 %3, %0;\n\t"
        "@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
        : "l"(from), "r"(u32(enabled))
        : "memory");
    return v;
}

// Whether any word is not ready, without branches.
__device__ __forceinline__ bool any_not_ready(const float4& v) {
    return !is_ready(v.x) | !is_ready(v.y) | !is_ready(v.z) | !is_ready(v.w);
}

// Start of a partial tile. A block has at most two: of a tile that others began, and of one that it begins.
#define PARTIAL_TILE (16 * N8_TILES * 32)
__device__ __forceinline__ float4* partial_tile(float4* scratch, u32 block, u32 first) {
    return scratch + (block * 2 + (block == first)) * PARTIAL_TILE;
}
__device__ __forceinline__ u32 fragment_offset(u32 m, u32 m16, u32 n) {
    return ((m * WARPS + m16) * N8_TILES + n) * 32;
}
__device__ __forceinline__ u32 fragment_lane_offset(u32 m, u32 m16, u32 n) {
    return fragment_offset(m, m16, n) + threadIdx.x % 32;
}

// Adds fragments of 16 columns and 8 rows published by blocks `from` .. last, in block order. The first is at
// `offset`, the others at(c) behind it. BATCH blocks at a time are polled until all are ready. POLL_ONE_WORD: if one is
// missing, polls one word of each block and then reads all again; for many blocks, whose warps would exceed the L2
// bandwidth otherwise.
template <int COUNT, int BATCH, bool POLL_ONE_WORD, typename At>
__device__ __forceinline__ void reduce_partials(float4* scratch, const TileBlocks& blocks, u32 from, u32 offset,
                                                const At& at, float4 (&sum)[COUNT]) {
    static_assert(COUNT == 1 || !POLL_ONE_WORD, "a lane polls one block's partial tile");
#pragma unroll 1
    for (u32 b0 = from; b0 <= blocks.last; b0 += BATCH) {
        // Only the first block's partial tile may be elsewhere.
        float4 *const first_part = partial_tile(scratch, b0, blocks.first) + offset, *const rest =
                                                                                         scratch +
                                                                                         b0 * 2 * PARTIAL_TILE + offset;
        const auto part_at = [&](int f, int c) { return (f ? rest + 2 * f * PARTIAL_TILE : first_part) + at(c); };
        const u32 more = blocks.last - b0;
        float4 part[BATCH][COUNT];
        bool waiting;
        do {
            waiting = false;
#pragma unroll
            for (int f = 0; f < BATCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++) part[f][c] = flag_load_if(f <= more, part_at(f, c));
#pragma unroll
            for (int f = 0; f < BATCH; f++)
#pragma unroll
                for (int c = 0; c < COUNT; c++) waiting |= any_not_ready(part[f][c]);
            // A warp-wide vote: after a loop that lanes leave one by one, the compiler takes all that follows for
            // divergent.
            waiting = __any_sync(WARP_ALL, waiting);
            if constexpr (POLL_ONE_WORD) {
                const u32 block = b0 + threadIdx.x % 32;
                const float* word = (const float*)(partial_tile(scratch, block, blocks.first) + offset);
                const bool is_polling = waiting && threadIdx.x % 32 < BATCH && block <= blocks.last;
                while (__any_sync(WARP_ALL, is_polling && !is_ready(flag_load(word)))) {}
            }
        } while (waiting);
#pragma unroll
        for (int f = 0; f < BATCH; f++)
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

// Number -> fragment: all rows of 16 columns before the next columns. If warps reduce several, the first ones are all
// that the first slice of the next phase's x waits for.
struct Fragment {
    u32 n, m, m16;

    __device__ __forceinline__ explicit Fragment(u32 i) : n(i % N8_TILES), m(i / N8_TILES / 8), m16(i / N8_TILES % 8) {}
};

// Publishes the accumulators of a partial tile for the blocks that reduce it, except row block `skip_row_block`.
__device__ __forceinline__ void publish_partial_tile(const Phase& phase, const Matrix& s, float4* scratch, int tile,
                                                     u32 first, int warp, const float (&acc)[M16_TILES][N8_TILES][4],
                                                     u32 skip_row_block = M16_TILES) {
#pragma unroll
    for (int m = 0; m < M16_TILES; m++) {
        if ((row_block(phase.epilogue_kind, tile, m) * 8 + warp) * 16 >= s.n_out || m == skip_row_block) continue;
        float4* to = partial_tile(scratch, blockIdx.x, first) + fragment_lane_offset(m, warp, 0);
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
            flag_store(to + n * 32, make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]));
    }
}

// Reduces the stream-K tiles of a phase by `warps` auxiliary warps of every block, this one being number `aux_warp`:
// 16 columns of gate and of up and 8 rows at a time.
__device__ __forceinline__ void reduce_stream_k_tiles(const Phase& phase, const Matrix& s, float4* scratch,
                                                      u32 aux_warp, u32 warps, const RowScales& rows) {
#pragma unroll 1
    for (u32 i = blockIdx.x + aux_warp * gridDim.x; i < (s.tiles - phase.stream_k_begin) * 8 * N8_TILES;
         i += warps * gridDim.x) {
        const u32 tile = phase.stream_k_begin + i / (8 * N8_TILES), m16 = i / N8_TILES % 8, n = i % N8_TILES;
        const int index = tile * 8 + m16;
        if (index * 16 >= s.n_out) continue;
        ColumnScales columns[M16_TILES];
#pragma unroll
        for (int m = 0; m < M16_TILES; m++) {
            const float* factors =
                (const float*)row_block_at(s, phase.epilogue_kind, tile, m) + m16 * 16 + threadIdx.x % 32 / 4;
            columns[m] = {{__ldg(factors), __ldg(factors + 8)}, {}};
        }
        const u32 first = stream_k_first_block(phase, s, tile);
        const TileBlocks blocks = {first, first + s.units - 1, 0};
        float4 sum[M16_TILES] = {};
        reduce_partials<M16_TILES, 2, false>(
            scratch, blocks, first, fragment_lane_offset(0, m16, n), [](int m) { return fragment_offset(m, 0, 0); },
            sum);
        epilogue_swiglu(s, phase, index, n, rows, columns, sum[0], sum[1]);
    }
}

// EPILOGUE_ADD_NORM: one fragment at a time; more would be more code than they gain.
__device__ __forceinline__ void reduce_fragments(const Phase& phase, const Matrix& s, float4* scratch, int tile,
                                                 const EpilogueSmem& smem, int warp, const RowScales& rows) {
    const TileBlocks blocks = smem.blocks;
#pragma unroll 1
    for (u32 i = blocks.first_fragment(warp); i < 16 * N8_TILES; i += blocks.n_reducers * WARPS) {
        const Fragment fragment(i);
        const int index = row_block(EPILOGUE_ADD_NORM, tile, fragment.m) * 8 + fragment.m16;
        if (index * 16 >= s.n_out) continue;
        const float4 residual =
            load_residual(s.out + output_offset(index, fragment.n, s.stride), s.stride, Bounds(s, index, fragment.n));
        float4 sum[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        const u32 offset = fragment_lane_offset(fragment.m, fragment.m16, fragment.n);
        reduce_partials<1, 8, true>(scratch, blocks, blocks.first, offset, [](int) { return 0; }, sum);
        epilogue_add_norm(s, phase, index, fragment.n, rows, column_scales(smem, fragment.m, fragment.m16), residual,
                          sum[0]);
    }
}

// Epilogue of a tile in this block. Blocks with a partial tile publish it; all but a last one that switches to another
// tile reduce some fragments of 16 columns and 8 rows, warps taking turns (EPILOGUE_SWIGLU: pairs of 16 columns).
// `wait_for_scales` returns once `rows` is valid. Registers used here are missing in the mainloop, so this code exists
// once.
template <typename Wait>
__device__ __forceinline__ void epilogue(const Phase& phase, const Matrix& s, float4* scratch, int tile, int warp,
                                         const RowScales& rows, const EpilogueSmem& smem, const Wait& wait_for_scales,
                                         const float (&acc)[M16_TILES][N8_TILES][4]) {
    const TileBlocks blocks = smem.blocks;
    const bool gated = phase.epilogue_kind == EPILOGUE_SWIGLU,
               keeps_accumulators = gated && blocks.has_single_reducer();
    const u32 first = blocks.first;
    const auto index_of = [&](int m, int m16) { return row_block(phase.epilogue_kind, tile, m) * 8 + m16; };
    const auto exists = [&](int m, int m16) { return index_of(m, m16) * 16 < s.n_out; };
    // If two blocks share an EPILOGUE_STORE tile, warps reduce what they have accumulated themselves: each block one
    // row block and publishes the other, or the first block both.
    const bool two_blocks = N8_TILES <= 4 && phase.epilogue_kind == EPILOGUE_STORE && blocks.last == first + 1,
               split_row_blocks = two_blocks && blocks.n_reducers == 2;
    const u32 rank = blockIdx.x - first;
    if (rank || !(keeps_accumulators || two_blocks && !split_row_blocks)) {
        publish_partial_tile(phase, s, scratch, tile, first, warp, acc, split_row_blocks ? rank : M16_TILES);
        if (rank >= blocks.n_reducers) return;
    }
    wait_for_scales();
    if (gated) {
        const int m16 = blocks.first_fragment(warp);
        if (m16 < 8 && exists(0, m16)) {
            const ColumnScales columns[M16_TILES] = {column_scales(smem, 0, m16), column_scales(smem, 1, m16)};
            constexpr int COLUMNS = N8_TILES > 4 ? N8_TILES : N8_TILES % 2 ? N8_TILES : 2;  // n8 tiles at a time
#pragma unroll
            for (int n0 = 0; n0 < N8_TILES; n0 += COLUMNS) {
                float4 sum[2 * COLUMNS];
#pragma unroll
                for (int c = 0; c < 2 * COLUMNS; c++) {
                    const float (&part)[4] = acc[c % 2][n0 + c / 2];
                    sum[c] = keeps_accumulators ? make_float4(part[0], part[1], part[2], part[3])
                                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                reduce_partials<2 * COLUMNS, COLUMNS == 1 ? 4 : 1, false>(
                    scratch, blocks, first + keeps_accumulators, fragment_lane_offset(0, m16, n0),
                    [](int c) { return fragment_offset(c % 2, 0, c / 2); }, sum);
                if constexpr (N8_TILES > 4) {
                    // Not unrolled: code that runs once is fetched from far. Selected by comparison: an array with a
                    // dynamic index lies in local memory.
#pragma unroll 1
                    for (int n = 0; n < COLUMNS; n++) {
                        float4 gate = sum[0], up = sum[1];
#pragma unroll
                        for (int other = 1; other < COLUMNS; other++)
                            if (n == other) gate = sum[2 * other], up = sum[2 * other + 1];
                        epilogue_swiglu(s, phase, index_of(0, m16), n0 + n, rows, columns, gate, up);
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++)
                        epilogue_swiglu(s, phase, index_of(0, m16), n0 + n, rows, columns, sum[2 * n], sum[2 * n + 1]);
                }
            }
        }
        return;
    }
    if (phase.epilogue_kind == EPILOGUE_STORE) {
        // All rows of 16 columns at a time.
#pragma unroll 1
        for (int i = (blockIdx.x - first) * WARPS + warp; i < M16_TILES * WARPS; i += blocks.n_reducers * WARPS) {
            const int m = i / WARPS, m16 = i % WARPS, index = index_of(m, m16);
            if (!exists(m, m16)) continue;
            float4 sum[N8_TILES];
#pragma unroll
            for (int n = 0; n < N8_TILES; n++) {
                sum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (two_blocks) {
                    const float (&a)[4] = acc[0][n], (&b)[4] = acc[1][n];
                    sum[n] = m ? make_float4(b[0], b[1], b[2], b[3]) : make_float4(a[0], a[1], a[2], a[3]);
                }
            }
            TileBlocks others = blocks;
            if (two_blocks) others.last = blocks.last - rank;
            reduce_partials<N8_TILES,
                            (N8_TILES == 1  ? 8
                             : N8_TILES > 4 ? 2
                                            : 3),
                            false>(
                scratch, others, two_blocks ? others.last : first, fragment_lane_offset(m, m16, 0),
                [](int n) { return fragment_offset(0, 0, n); }, sum);
            const ColumnScales columns = column_scales(smem, m, m16);
            float* to = s.out + output_offset(index, 0, s.stride);
#pragma unroll
            for (int n = 0; n < N8_TILES; n++) {
                epilogue_store(s, to, Bounds(s, index, n),
                               *(const float2*)&rows.correction[n * 8 + threadIdx.x % 4 * 2], columns, sum[n]);
                to += 8 * s.stride;
            }
        }
        return;
    }
    reduce_fragments(phase, s, scratch, tile, smem, warp, rows);
}
