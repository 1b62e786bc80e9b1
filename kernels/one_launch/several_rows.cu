// A decode step of several rows in one persistent launch (frame.cuh): the nodes of a draft tree.
//
// A launch of the plan is a phase, and its results are where the plan has them. Every task waits until all tasks of the
// phase before have raised its counter, so phases are ordered as launches are; before its wait a task reads only what
// no phase writes. Rows that the step does not have are multiplied with the others, as in the separate launches, and
// nothing reads them.
//
// The norm of an input is part of the tasks that multiply it: every block norms all rows for itself, which takes less
// time than a phase of norms.
// Packed matrices: a warp sums a K range of 16 rows of W for all rows of x, whose operands it reads from global memory,
// 64 values ahead of the products: an A16 of 8 rows and 3,584 values would take more than half of a small GPU's shared
// memory. f32 matrices: a warp has a row of W, the order of sums is that of gemm/f32_gemm.cuh.
//
// in, out, grid as in frame.cuh
// work exchange: normed rows of each block, an A16 and, for f32 matrices, [ROWS][HIDDEN] f32
// smem rings, partial sums [MAX_SUMS][N8_TILES][32 lanes] float4; attention and the delta rule work in the first rings
//      and go on in the sums
// defines ROWS (bucket), N8_TILES (ROWS / 8, rounded up), SCRATCH_BYTES (normed rows of a block), GATED_UNITS (1: tasks
//      of gate and up have their unit, with the define of ffn/gate_function.cuh), those of frame.cuh and
//      rows_bodies.cuh
// arch sm_80 and up
// reference the separate launches, bit for bit     test crates/cuda/tests/batch_invariance.rs
#include "one_launch/frame.cuh"
#include "gemm/a16_layout.cuh"
#include "one_launch/rows_bodies.cuh"

struct PackedOperands {
    const u8* x;  // a16_layout.cuh
    u64 _unused;
    int chunk_stride, _pad;  // bytes from 64 values of x to the next
    u32 first_tile;
    int tiles;
    u16 parts[MAX_CONSUMER_WARPS];  // of each warp, 32 at most
};
struct F32RowsOperands {
    const float* x;        // [ROWS][HIDDEN]
    const float* weights;  // [rows of W][HIDDEN]
    float* out;            // [ROWS][stride]
    int k_slice, stride;
};
// With FLAG_NORM, from word NORM_WORD on: x is the norm of these rows.
#define NORM_WORD 20
struct NormOperands {
    const float* x;  // [ROWS][HIDDEN]
    const float* weight;
    const Step* step;
    float eps;
    int _pad;
};
static_assert(sizeof(PackedOperands) <= NORM_WORD * 8 && sizeof(F32RowsOperands) <= NORM_WORD * 8 &&
                  sizeof(NormOperands) <= sizeof(Task::words) - NORM_WORD * 8,
              "fits a task");

// Waits, then norms all rows as norm/rms_norm does with NORM_WARPS warps, a warp a row: as A16, and with FLAG_F32_INPUT
// in f32.
__device__ __noinline__ void norm_rows(const Task& task, u8* f16, float* f32) {
    const NormOperands& operands = *(const NormOperands*)(task.words + NORM_WORD);
    constexpr bool HAS_REGISTERS = ROW_GROUPS <= 4;
    float weight[ROW_GROUPS][8], v[ROW_GROUPS][8];
    const auto load_weight = [&](int group) { load_row_group<HIDDEN>(operands.weight, group, weight[group]); };
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
        if (HAS_REGISTERS) load_weight(g);
    const Step* step = operands.step;
    const bool of_logits = task.flags & FLAG_LOGITS_ROWS;
    const int rows = of_logits ? step->n_logits_rows : step->rows;
    wait_ready();
    for (int row = warp_index(); row < rows; row += CONSUMER_WARPS) {
        const float* x = operands.x + size_t(of_logits ? step->logits_row[row] : row) * HIDDEN;
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) load_row_group<HIDDEN>(x, g, v[g]);
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < NORM_WARPS; w++) {
            float sum = 0.0f;
#pragma unroll
            for (int g = w; g < ROW_GROUPS; g += NORM_WARPS)
#pragma unroll
                for (int j = 0; j < 8; j++) sum += v[g][j] * v[g][j];
            sum = warp_sum(sum);
            total = w ? total + sum : sum;
        }
        const float scale = 1.0f / sqrtf(total / HIDDEN + operands.eps);
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            const int column = g * 256 + threadIdx.x % 32 * 8;
            if (!HAS_REGISTERS) load_weight(g);
#pragma unroll
            for (int j = 0; j < 8; j++) v[g][j] = v[g][j] * scale * weight[g][j];
            a16_store(f16, N8_TILES, row, g, v[g]);
            if (task.flags & FLAG_F32_INPUT && column < HIDDEN) {
                float4* to = (float4*)(f32 + size_t(row) * HIDDEN + column);
                to[0] = make_float4(v[g][0], v[g][1], v[g][2], v[g][3]);
                to[1] = make_float4(v[g][4], v[g][5], v[g][6], v[g][7]);
            }
        }
    }
}

// The B operands of 64 values of all rows: register j of an n8 tile has values 8 j .. 8 j + 7.
struct RowsChunk {
    u32 b[N8_TILES][8];

    // x: of the lane.
    __device__ __forceinline__ void load(const u8* x) {
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                asm volatile("ld.global.u32 %0, [%1];"
                             : "=r"(b[n][j])
                             : "l"(__cvta_generic_to_global(x + n * A16_TILE + j * 128))
                             : "memory");
    }
};

// One K-slice in the order of gemm/mma_slice.cuh. `chunk` has the slice's first 64 values, and those behind it when
// this returns, unless it `is_last`.
template <int KIND, int SLICE>
__device__ __forceinline__ void mma_slice_rows(TileDequantizer<KIND>& tile, const u8* weights, RowsChunk& chunk,
                                               const u8*& x, int chunk_stride, bool is_last,
                                               float (&acc)[N8_TILES][4]) {
    tile.template load_header<SLICE>(weights);
    tile.load_codes(weights, 0);
    tile.template decode_scales<SLICE>();
#pragma unroll
    for (int q = 0; q < slice_chunks(KIND); q++) {
        RowsChunk next;
        const bool has_next = q + 1 < slice_chunks(KIND) || !is_last;
        if (has_next) next.load(x += chunk_stride);
        tile.select_chunk(q);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 a[2][4];
            tile.template dequant<0>(s, a[0]);
            tile.template dequant<1>(s, a[1]);
            if (s == 0)
                tile.rotate_codes();
            else if (q + 1 < slice_chunks(KIND))
                tile.load_codes(weights, q + 1);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int n = 0; n < N8_TILES; n++)
                    mma_f16(acc[n], a[half][0], a[half][1], a[half][2], a[half][3], chunk.b[n][4 * half + 2 * s],
                            chunk.b[n][4 * half + 2 * s + 1]);
        }
        if (has_next) chunk = next;
    }
}

struct PartialSums {
    float4 of_lane[MAX_SUMS][N8_TILES][32];
};

struct Consumer : TaskRunner {
    // The block's normed rows.
    __device__ __forceinline__ u8* normed_f16() const { return params.exchange + size_t(blockIdx.x) * SCRATCH_BYTES; }
    __device__ __forceinline__ float* normed_f32() const {
        return (float*)(normed_f16() + N8_TILES * ROW_GROUPS * 4 * A16_TILE);
    }
    // Waits for the input of a task that multiplies, and norms it.
    __device__ __forceinline__ void prepare_input(const Task& task) const {
        begin_body(task, {});
        if (task.flags & FLAG_KEEP_INPUT) return;
        if (!(task.flags & FLAG_NORM)) return wait_ready();
        norm_rows(task, normed_f16(), normed_f32());
        consumer_sync();
    }

    __device__ __forceinline__ PartialSums& sums() const { return *(PartialSums*)(memory + RING_BYTES); }

    template <int KIND>
    __device__ __forceinline__ void products(Ring& ring, u64 policy, const u8* x, int chunk_stride, int first_unit,
                                             int units, float (&acc)[N8_TILES][4]) const {
        constexpr int UNIT_CHUNKS = unit_slices(KIND) * slice_chunks(KIND);
        x += size_t(first_unit) * UNIT_CHUNKS * chunk_stride;
        TileDequantizer<KIND> tile;
        RowsChunk chunk;
        chunk.load(x);
#pragma unroll 1
        for (int unit = 0; unit < units; unit++) {
            clocks.ask_weights();
            ring.wait();
            clocks.have_weights();
            const u8* at = ring.unit(memory);
            const bool is_last = unit + 1 == units;
            mma_slice_rows<KIND, 0>(tile, at, chunk, x, chunk_stride, unit_slices(KIND) == 1 && is_last, acc);
            if constexpr (unit_slices(KIND) == 2)
                mma_slice_rows<KIND, 1>(tile, at + slice_tile_bytes(KIND, 0), chunk, x, chunk_stride, is_last, acc);
            ring.advance(memory, policy);
        }
    }

    // The sums `first` .. of n8 tile `t` in their order. A lane has two rows of W and two rows of x, as an accumulator
    // of mma.
    __device__ __forceinline__ void add_up(int first, int n, int t, float (&sum)[4]) const {
        const int lane = threadIdx.x % 32;
        float4 v = sums().of_lane[first][t][lane];
        sum[0] = v.x, sum[1] = v.y, sum[2] = v.z, sum[3] = v.w;
        if (n == 1) return;
        // Sums of several blocks begin at +0 in gemm/decode_gemm_small_batch.
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = 0.0f + sum[i];
#pragma unroll 4
        for (int i = 1; i < n; i++) {
            v = sums().of_lane[first + i][t][lane];
            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    }

    // A tile of 16 rows of W.
    struct Tile {
        const float* factors[2];
        bool adds;
        u8* out;
        int stride, first_sum, n_first, n_sums, rows;

        __device__ __forceinline__ Tile(const TaskTile* from) {
            uint4 words[3];
#pragma unroll
            for (int i = 0; i < 3; i++) words[i] = __ldg((const uint4*)from + i);
            factors[0] = (const float*)(words[0].x | u64(words[0].y) << 32);
            factors[1] = (const float*)(words[0].z | u64(words[0].w) << 32);
            adds = words[1].x | words[1].y;
            out = (u8*)(words[1].z | u64(words[1].w) << 32);
            stride = words[2].x, first_sum = words[2].y & 0xffff, n_first = words[2].y >> 16 & 0xff,
            n_sums = words[2].y >> 24, rows = words[2].z;
        }
        // Of the lane's row lane / 4 + 8 i of a matrix.
        __device__ __forceinline__ float factor(int matrix, int i) const {
            const int row = threadIdx.x % 32 / 4 + i * 8;
            return row < rows ? __ldg(factors[matrix] + row) : 0.0f;
        }
    };
    __device__ __forceinline__ void store_tile(const Tile& tile) const {
        const int lane = threadIdx.x % 32;
        const float factor[2] = {tile.factor(0, 0), tile.factor(0, 1)};
#pragma unroll
        for (int t = 0; t < N8_TILES; t++) {
            float* at = (float*)tile.out + size_t(t * 8 + lane % 4 * 2) * tile.stride + lane / 4;
            float residual[4] = {}, sum[4];
            if (tile.adds) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (lane / 4 + i / 2 * 8 < tile.rows) residual[i] = __ldcg(at + i % 2 * tile.stride + i / 2 * 8);
            }
            add_up(tile.first_sum, tile.n_sums, t, sum);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (lane / 4 + i / 2 * 8 < tile.rows)
                    at[i % 2 * tile.stride + i / 2 * 8] = residual[i] + sum[i] * factor[i / 2];
        }
    }
#if GATED_UNITS
    // Tiles of gate and up: ffn/gated_unit. `out` is where an A16 has the rows of W of the tile.
    __device__ __forceinline__ void store_gated_tile(const Tile& tile) const {
        const int lane = threadIdx.x % 32;
        const float gate_factor[2] = {tile.factor(0, 0), tile.factor(0, 1)},
                    up_factor[2] = {tile.factor(1, 0), tile.factor(1, 1)};
#pragma unroll
        for (int t = 0; t < N8_TILES; t++) {
            float gate[4], up[4];
            add_up(tile.first_sum, tile.n_first, t, gate);
            add_up(tile.first_sum + tile.n_first, tile.n_sums - tile.n_first, t, up);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float g = 0.0f + gate[i] * gate_factor[i / 2], u = 0.0f + up[i] * up_factor[i / 2];
                const u32 y = f32_to_f16(clamp_to_f16(gate_function(g) * u));
                // The next row of W is four lanes further on.
                const u32 pair = y | __shfl_down_sync(WARP_ALL, y, 4) << 16;
                if (lane / 4 % 2 == 0)
                    *(u32*)(tile.out + t * A16_TILE + i / 2 * 128 + (lane % 4 * 2 + i % 2) * 16 + lane / 4 * 2) = pair;
            }
        }
    }
#endif

    __device__ __forceinline__ void gemv(const Task& task) const {
        const PackedOperands& operands = *(const PackedOperands*)task.words;
        Ring ring;
        ring.resume();
        WarpState& state = block_storage.warps[ring.warp];
        const int n = operands.parts[ring.warp], lane = threadIdx.x % 32;
        u64 of_lane = 0;
        if (lane < n) of_lane = __ldg((const u64*)state.parts + lane);
        prepare_input(task);
        clocks.ready();
        ring.take();
        const u64 policy = policy_evict_first();
        const u8* x = (task.flags & FLAG_NORM ? normed_f16() : operands.x) + lane * 4;
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            const u64 part = __shfl_sync(WARP_ALL, of_lane, i);
            const int units = u16(part), first_unit = u16(part >> 16), sum = u16(part >> 32), kind = u16(part >> 48);
            float acc[N8_TILES][4] = {};
            if (units > 0) {
#define PRODUCTS(KIND) products<KIND>(ring, policy, x, operands.chunk_stride, first_unit, units, acc)
                DISPATCH_KIND(PRODUCTS)
#undef PRODUCTS
            }
#pragma unroll
            for (int t = 0; t < N8_TILES; t++)
                sums().of_lane[sum][t][lane] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        }
        clocks.multiplied();
        consumer_sync();
        clocks.together();
        for (int i = ring.warp; i < operands.tiles; i += CONSUMER_WARPS) {
            const Tile tile(params.tiles + operands.first_tile + i);
#if GATED_UNITS
            if (task.flags & FLAG_SWIGLU)
                store_gated_tile(tile);
            else
#endif
                store_tile(tile);
        }
        if (lane == 0) state.parts += n;
        ring.leave();
    }

    // Two rows of W, each by half of the warps.
    __device__ __forceinline__ void gemv_f32(const Task& task) const {
        const F32RowsOperands& operands = *(const F32RowsOperands*)task.words;
        const int warp = warp_index(), lane = threadIdx.x % 32, n = task.first + warp % 2;
        constexpr int QUADS = HIDDEN / 128, HALF = CONSUMER_WARPS / 2;
        float4 weights[QUADS] = {};
        const bool has_row = warp % 2 < task.count && warp / 2 < HALF;
#pragma unroll
        for (int i = 0; i < QUADS; i++)
            if (has_row)
                weights[i] = __ldg((const float4*)(operands.weights + size_t(n) * HIDDEN + lane * 4 + i * 128));
        prepare_input(task);
        clocks.ready();
        const float* rows = task.flags & FLAG_NORM ? normed_f32() : operands.x;
#pragma unroll 1
        for (int row = warp / 2; has_row && row < ROWS; row += HALF) {
            const float* x = rows + size_t(row) * HIDDEN + lane * 4;
            float total = 0.0f, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float4 w = weights[i], v = __ldcg((const float4*)(x + i * 128));
                sum = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sum))));
                if ((i + 1) * 128 % operands.k_slice == 0 || i == QUADS - 1) total += warp_sum(sum), sum = 0.0f;
            }
            if (lane == 0) operands.out[size_t(row) * operands.stride + n] = total;
        }
        consumer_sync();
    }

    // A task that is the function of a separate kernel.
    __device__ __forceinline__ void body(const Task& task) const {
        begin_body(task, {task.first, task.count, 0});
        run_rows_body(task, warp_index());
        leave_workspace(task);
        consumer_sync();
        refill(task);
    }
};
#include "one_launch/entry.cuh"
