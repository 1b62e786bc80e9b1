// A decode step of one row in one persistent launch: all layers, the final norm and the LM head (frame.cuh).
//
// There is no grid barrier: rows that blocks exchange show by themselves which of their words are there (exchange.cuh),
// so a task waits for one trip of its input through L2. Exchanged rows exist twice: a launch writes one set and makes
// the other, which the launch before wrote, absent. Within a launch every word is written once, so nothing is written
// over while it is read.
//
// in, out, grid as in frame.cuh
// smem rings, the input row in f16 and f32, partial sums; attention works in the first rings
// defines MAX_COLUMNS (longest row of a matrix), those of frame.cuh and bodies.cuh
// arch sm_80 and up
// reference the separate launches, bit for bit     test crates/cuda/tests/batch_invariance.rs
#include "one_launch/frame.cuh"
#include "one_launch/exchange.cuh"
#include "gemm/gemv_input.cuh"
#include "one_launch/bodies.cuh"

struct GemvOperands {
    const u8* x;  // f16, or with FLAG_NORM f32
    const float* norm;
    int columns;
    float eps;
    u32 first_tile;
    int tiles;
    u16 parts[MAX_CONSUMER_WARPS];  // of each warp, 32 at most
};
struct F32Operands {
    const float* x;
    const float* norm;
    const float* weights;  // [rows][HIDDEN]
    float* out;            // exchanged
    int k_slice;
    float eps;
};
static_assert(sizeof(GemvOperands) <= sizeof(Task::words) && sizeof(F32Operands) <= sizeof(Task::words), "fits a task");

struct Activations {
    u8 f16[2 * MAX_COLUMNS];
    float f32[HIDDEN];
    float sums[MAX_SUMS][16];
};

// A row of a tile of the task, which one thread adds up: a warp has two tiles, or one of gate and up.
struct TileRow {
    uint4 tile[3];  // a TaskTile
    int row;        // -1 for none
    bool is_up;
    float factor;
    u32 residual;

    __device__ __forceinline__ const float* factors() const {
        return (const float*)(is_up ? tile[0].z | u64(tile[0].w) << 32 : tile[0].x | u64(tile[0].y) << 32);
    }
    __device__ __forceinline__ u64 residual_at() const { return tile[1].x | u64(tile[1].y) << 32; }
    __device__ __forceinline__ u8* copy() const { return (u8*)(tile[1].z | u64(tile[1].w) << 32); }
    __device__ __forceinline__ u32 out() const { return tile[2].x; }
    __device__ __forceinline__ int first_sum() const { return tile[2].y & 0xffff; }
    __device__ __forceinline__ int n_first() const { return tile[2].y >> 16 & 0xff; }
    __device__ __forceinline__ int n_sums() const { return tile[2].y >> 24; }
    __device__ __forceinline__ bool exists() const { return row >= 0 && row < int(tile[2].z); }
};

struct Consumer : TaskRunner {
    __device__ __forceinline__ Activations& x() const { return *(Activations*)(memory + RING_BYTES); }

    // The task's input to shared memory, as soon as it is there. No warp reads the input before any more.
    __device__ __forceinline__ void load_input(const Task& task, const u8* from, const float* norm, int columns,
                                               float eps) const {
        if (task.flags & FLAG_NORM) {
            NormWeights<CONSUMER_WARPS> weights;
            load_norm_weights<CONSUMER_WARPS>(norm, weights);
            const auto load = [&](int group, float (&v)[8]) {
                const int column = group * 256 + threadIdx.x % 32 * 8;
                uint4 words[2] = {};
                if (column < HIDDEN) exchange_wait<2>((const uint4*)((const float*)from + column), 1, words);
                v[0] = __uint_as_float(words[0].x), v[1] = __uint_as_float(words[0].y);
                v[2] = __uint_as_float(words[0].z), v[3] = __uint_as_float(words[0].w);
                v[4] = __uint_as_float(words[1].x), v[5] = __uint_as_float(words[1].y);
                v[6] = __uint_as_float(words[1].z), v[7] = __uint_as_float(words[1].w);
                __syncwarp();
                clocks.landed();
            };
            load_normed_input<CONSUMER_WARPS>(load, weights, eps, block_storage.warp_sums, x().f16, x().f32,
                                              [] { consumer_sync(); });
        } else {
            constexpr int ROUNDS = (MAX_COLUMNS / 8 + CONSUMERS - 1) / CONSUMERS;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int i = threadIdx.x + r * CONSUMERS;
                if (i >= columns / 8) break;
                uint4 v[1];
                exchange_wait<1>((const uint4*)from + i, 0, v);
                *(uint4*)(x().f16 + i * 16) = v[0];
            }
            __syncwarp();
            clocks.landed();
        }
        consumer_sync();
    }

    // This thread's row of the task.
    __device__ __forceinline__ TileRow find_row(const Task& task, const GemvOperands& operands) const {
        const bool is_gated = task.flags & FLAG_SWIGLU;
        const int index = is_gated ? warp_index() : threadIdx.x / 16;
        TileRow row = {};
        row.row = -1;
        if (index >= operands.tiles) return row;
        const uint4* from = (const uint4*)(params.tiles + operands.first_tile + index);
#pragma unroll
        for (int i = 0; i < 3; i++) row.tile[i] = __ldg(from + i);
        row.row = threadIdx.x % 16;
        row.is_up = is_gated && threadIdx.x % 32 >= 16;
        return row;
    }
    // What its sum is multiplied by and added to. They do not depend on the task's input.
    __device__ __forceinline__ void load_terms(TileRow& row) const {
        if (!row.exists()) return;
        row.factor = __ldg(row.factors() + row.row);
        if (row.residual_at()) row.residual = load_relaxed(residual_of(row));
    }
    __device__ __forceinline__ const u32* residual_of(const TileRow& row) const {
        const u64 at = row.residual_at();
        const u8* from = at & RESIDUAL_EXCHANGED ? block_storage.exchanged + (at & ~RESIDUAL_EXCHANGED) : (const u8*)at;
        return (const u32*)from + row.row;
    }

    // Adds up the sums of the thread's row in their order and stores the row.
    __device__ __forceinline__ void store_row(const Task& task, const TileRow& row) const {
        if (row.row < 0) return;
        const bool is_gated = task.flags & FLAG_SWIGLU;
        const int n = row.is_up ? row.n_sums() - row.n_first() : is_gated ? row.n_first() : row.n_sums();
        const float* from = x().sums[row.first_sum() + (row.is_up ? row.n_first() : 0)] + row.row;
        constexpr int FETCH = 8;
        // Sums of several blocks begin at +0 in gemm/decode_gemm_small_batch.
        float sum = n > 1 ? 0.0f + from[0] : from[0];
#pragma unroll 1
        for (int i = 1; i < n; i += FETCH) {
            float v[FETCH];
#pragma unroll
            for (int j = 0; j < FETCH; j++) v[j] = from[min(i + j, n - 1) * 16];
#pragma unroll
            for (int j = 0; j < FETCH; j++)
                if (i + j < n) sum += v[j];
        }
        if (is_gated) {
            const float value = 0.0f + sum * row.factor, up = __shfl_down_sync(WARP_ALL, value, 16);
            const u32 y = f32_to_f16(clamp_to_f16(silu(value) * up));
            const u32 pair = y | __shfl_down_sync(WARP_ALL, y, 1) << 16;
            if (row.is_up || row.row % 2) return;
            exchange_store(block_storage.exchanged + row.out() + row.row * 2, pair);
            if (row.copy()) *(u32*)(row.copy() + row.row / 8 * 128 + row.row % 8 * 2) = pair;
        } else if (row.exists()) {
            u32 residual = row.residual;
            if (row.residual_at())
                poll_until(EXCHANGE_REASON, [&] {
                    if (residual != ABSENT) return true;
                    residual = load_relaxed(residual_of(row));
                    return residual != ABSENT;
                });
            const u32 value = __float_as_uint(__uint_as_float(residual) + sum * row.factor);
            exchange_store(block_storage.exchanged + row.out() + row.row * 4, value);
            if (row.copy()) ((u32*)row.copy())[row.row] = value;
        }
    }

    template <int KIND>
    __device__ __forceinline__ void products(Ring& ring, u64 policy, int first_unit, int units, float (&acc)[4]) const {
        constexpr int UNIT_X_BYTES = unit_slices(KIND) * slice_chunks(KIND) * 128;
        u32 at = shared_address(x().f16) + first_unit * UNIT_X_BYTES;
#pragma unroll 1
        for (int unit = 0; unit < units; unit++, at += UNIT_X_BYTES) {
            clocks.ask_weights();
            ring.wait();
            clocks.have_weights();
            mma_units<KIND>(ring.unit(memory), at, 0, 1, acc);
            ring.advance(memory, policy);
        }
    }

    __device__ __forceinline__ void gemv(const Task& task) const {
        const GemvOperands& operands = *(const GemvOperands*)task.words;
        Ring ring;
        ring.resume();
        WarpState& state = block_storage.warps[ring.warp];
        const int n = operands.parts[ring.warp], lane = threadIdx.x % 32;
        u64 of_lane = 0;
        if (lane < n) of_lane = __ldg((const u64*)state.parts + lane);
        TileRow row = find_row(task, operands);
        if (task.flags & FLAG_KEEP_INPUT)
            consumer_sync();
        else
            load_input(task, operands.x, operands.norm, operands.columns, operands.eps);
        clocks.ready();
        load_terms(row);
        ring.take();
        const u64 policy = policy_evict_first();
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            const u64 part = __shfl_sync(WARP_ALL, of_lane, i);
            const int units = u16(part), first_unit = u16(part >> 16), sum = u16(part >> 32), kind = u16(part >> 48);
            float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#define PRODUCTS(KIND) products<KIND>(ring, policy, first_unit, units, acc)
            DISPATCH_KIND(PRODUCTS)
#undef PRODUCTS
            float* to = x().sums[sum] + lane / 4;
            if (lane % 4 == 0) to[0] = acc[0], to[8] = acc[2];
        }
        clocks.multiplied();
        consumer_sync();
        clocks.together();
        store_row(task, row);
        if (lane == 0) state.parts += n;
        ring.leave();
    }

    // A warp per row, in the order of gemm/f32_gemm.cuh.
    __device__ __forceinline__ void gemv_f32(const Task& task) const {
        const F32Operands& operands = *(const F32Operands*)task.words;
        const int warp = warp_index(), lane = threadIdx.x % 32;
        constexpr int QUADS = HIDDEN / 128;
        float4 weights[QUADS] = {};
        if (warp < task.count) {
            const float* from = operands.weights + size_t(task.first + warp) * HIDDEN + lane * 4;
#pragma unroll
            for (int i = 0; i < QUADS; i++) weights[i] = __ldg((const float4*)(from + i * 128));
        }
        if (!(task.flags & FLAG_KEEP_INPUT))
            load_input(task, (const u8*)operands.x, operands.norm, HIDDEN, operands.eps);
        clocks.ready();
        float total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 w = weights[i], v = *(const float4*)(x().f32 + i * 128 + lane * 4);
            sum = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sum))));
            if ((i + 1) * 128 % operands.k_slice == 0 || i == QUADS - 1) total += warp_sum(sum), sum = 0.0f;
        }
        if (lane == 0 && warp < task.count) exchange_store(operands.out + task.first + warp, __float_as_uint(total));
        consumer_sync();
    }

    // A task that is the function of a separate kernel.
    __device__ __forceinline__ void body(const Task& task) const {
        const u64* w = task.words;
        begin_body(task, {task.first, 0, 0});
        const int warp = warp_index();
#define AT(i, T) ((T)w[i])
#define FLOAT_AT(i) __uint_as_float(u32(w[i]))
#if DELTA
        if (task.kind == TASK_DELTA && warp < 8)
            delta::gated_delta_row_fused(AT(0, const Step*), AT(1, const float*), AT(2, const float*),
                                         AT(3, const float*), AT(4, const float*), w[5], AT(6, const float*),
                                         AT(7, const float*), AT(8, const float*), AT(9, const float*), w[10],
                                         AT(11, float*), w[12], AT(13, const float*), AT(14, const float*),
                                         FLOAT_AT(15), RowOutput{AT(16, float*), AT(17, void*)});
#endif
#if ATTENTION
        if (task.kind == TASK_APPEND && warp < APPEND_WARPS)
            attention::attn_qk_norm_rope_append(
                AT(0, const Step*), AT(1, float*), AT(2, const float*), AT(3, const float*), AT(4, const float*),
                AT(5, const float*), AT(6, const double*), AT(7, u16*), FLOAT_AT(8),
                attention::Plane{AT(9, u8*), AT(10, u16*)}, attention::Plane{AT(11, u8*), AT(12, u16*)},
                attention::PageTable{AT(13, const int*), int(w[14]), int(w[14] >> 32)});
        if (task.kind == TASK_ATTENTION) attend(task, warp);
        if (task.kind == TASK_COMBINE && warp < 8)
            attention::attn_combine_splits(AT(0, const Step*), AT(1, const float*), AT(2, const float*),
                                           AT(3, const float*), int(w[4]), RowOutput{AT(5, float*), AT(6, void*)});
#endif
        leave_workspace(task);
        consumer_sync();
        refill(task);
    }

#if ATTENTION
    // Works in the first rings.
    __device__ __forceinline__ void attend(const Task& task, int warp) const {
        const u64* w = task.words;
        if (warp < (ATTENTION == 2 ? 12 : 8))
            attention::attn_decode_tree(AT(0, const Step*), AT(1, const u16*),
                                        attention::Plane{AT(2, u8*), AT(3, u16*)},
                                        attention::Plane{AT(4, u8*), AT(5, u16*)},
                                        attention::PageTable{AT(6, const int*), int(w[7]), int(w[7] >> 32)},
                                        FLOAT_AT(8), AT(9, float*), int(w[10]));
    }
#endif
};
#include "one_launch/entry.cuh"
