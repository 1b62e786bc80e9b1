// A decode step of one row in one persistent launch: all layers, the final norm and the LM head.
//
// Each block runs its own list of tasks (task.cuh), which the host makes from the launches of the same plan. There is
// no grid barrier: rows that blocks exchange show by themselves which of their words are there, so a task waits for one
// trip of its input through L2. Weights do not depend on activations: each consumer warp has a ring of them
// (ring.cuh), which is full while it waits, across tasks and layers. The last warp copies tasks to shared memory. GEMV
// tasks divide the K ranges of their tiles among all consumer warps, then a thread adds up the sums of each row; other
// tasks are the kernels of the separate launches (bodies.cuh).
//
// Exchanged rows exist twice: a launch writes one set and makes the other, which the launch before wrote, absent.
// Within a launch every word is written once, so nothing is written over while it is read.
//
// The bits are those of the separate launches: K ranges, order of sums and functions are the same.
//
// in   lists [blocks], tasks, loads, sums, tiles: what blocks and their warps do     counters [n_counters + 3][32], 0
//      exchange [2][exchange_bytes], ABSENT     the counter behind `error` has the set of the next launch
// out  what the tasks write; counters 0; status: 0, or what a wait took too long for: EXCHANGE_REASON, COUNTER_REASON
// grid one block per SM, all resident (cooperative), x (CONSUMER_WARPS + 1) * 32
// smem rings, the input row in f16 and f32, partial sums; dynamic. A task of attention works in the first rings, whose
//      loading waits for it.
// defines CONSUMER_WARPS (MAX_CONSUMER_WARPS at most), HIDDEN (width of normed rows), WIDTH (the same), NORM_WARPS,
//      KINDS, MAX_COLUMNS (longest row of a matrix), MAX_SUMS (partial sums of a task), those of ring.cuh and
//      bodies.cuh, CLOCKS (1: print where the time of a launch goes)
// arch sm_80 and up; sm_90 loads by bulk copies
// reference the separate launches, bit for bit     test crates/cuda/tests/batch_invariance.rs
#undef PDL
#define KERNEL(...) __device__ __noinline__ void
#include "common/prelude.cuh"
#include "common/step.cuh"
#define CONSUMERS (CONSUMER_WARPS * 32)
#define LAUNCH_THREADS (CONSUMERS + 32)
#define CONSUMER_BARRIER 11
#include "one_launch/task.cuh"
#include "one_launch/exchange.cuh"
#include "gemm/gemv_input.cuh"
#include "gemm/gemv_tile.cuh"
#include "one_launch/ring.cuh"
#include "one_launch/clocks.cuh"

// Waits for the task's counter; each warp by itself.
__device__ __forceinline__ void wait_ready() {
    if (threadIdx.x % 32 == 0 && block_storage.wait_counter)
        counter_wait(block_storage.wait_counter, block_storage.wait_value, COUNTER_REASON);
    __syncwarp();
}
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

struct LaunchParams {
    const BlockLists* lists;
    const Task* tasks;
    const LoadPart* loads;
    const SumPart* sums;
    const TaskTile* tiles;
    u32* counters;
    u32* status;
    u8* exchange;
    int n_counters, exchange_bytes;
};

// Dynamic shared memory: the rings are first.
#define RING_BYTES (CONSUMER_WARPS * RING_SLOTS * SLOT_BYTES)
struct Activations {
    u8 f16[2 * MAX_COLUMNS];
    float f32[HIDDEN];
    float sums[MAX_SUMS][16];
};

__device__ __forceinline__ void consumer_sync() { named_barrier_sync<CONSUMER_BARRIER, CONSUMERS>(); }

// ---- the warp of tasks ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_tasks(const LaunchParams& params, u32 set) {
    const int lane = threadIdx.x % 32;
    const u64* list = (const u64*)(params.tasks + params.lists[blockIdx.x].tasks);
    const u64 exchanged = (u64)(params.exchange + size_t(set) * params.exchange_bytes);
    u64 next = __ldg(list + lane);
    u8* absent = params.exchange + size_t(set ^ 1) * params.exchange_bytes;
    int clear = (blockIdx.x * 32 + lane) * 16;
#pragma unroll 1
    for (int i = 0;; i++) {
        const int slot = i % TASK_SLOTS;
        // The header has four words; the upper half of the last says which operands are offsets.
        const u32 offsets = __shfl_sync(WARP_ALL, u32(next >> 32), 3);
        const bool is_end = u32(__shfl_sync(WARP_ALL, u32(next), 0)) == TASK_END;
        if (lane >= 4 && offsets >> (lane - 4) & 1) next += exchanged;
        mbarrier_wait(shared_address(block_storage.task_empty + slot), (i / TASK_SLOTS & 1) ^ 1);
        ((u64*)&block_storage.tasks[slot])[lane] = next;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(block_storage.task_full + slot));
        if (!is_end) next = __ldg(list + (i + 1) * 32 + lane);
        // The other set, a part with each task.
        for (int n = 0; clear < params.exchange_bytes && (n < 4 || is_end); n++, clear += gridDim.x * 512)
            *(uint4*)(absent + clear) = make_uint4(ABSENT, ABSENT, ABSENT, ABSENT);
        if (is_end) return;
    }
}

// ---- consumer warps ------------------------------------------------------------------------------------------------

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

// What a consumer warp does of a task. Nothing of it lives across tasks: what would, over the calls of bodies, would be
// spilled.
struct Consumer {
    const LaunchParams& params;
    u8* memory;
    Clocks& clocks;

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
        if (row.residual_at()) row.residual = exchange_load(residual_of(row));
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
                    residual = exchange_load(residual_of(row));
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
        if (threadIdx.x == 0) {
            block_storage.wait_counter = task.wait < 0 ? nullptr : params.counters + task.wait * COUNTER_STRIDE;
            block_storage.wait_value = task.wait_value;
            task_block = {task.first, 0};
        }
        consumer_sync();
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
        consumer_sync();
        if (threadIdx.x == 0 && task.raise >= 0) counter_raise(params.counters + task.raise * COUNTER_STRIDE);
#if ATTENTION
        if (task.kind == TASK_ATTENTION) refill();
#endif
    }

#if ATTENTION
    // Works in the first rings: what they had before is summed, and nothing more is loaded until this is done.
    __device__ __forceinline__ void attend(const Task& task, int warp) const {
        const u64* w = task.words;
        if (warp < (ATTENTION == 2 ? 12 : 8))
            attention::attn_decode_tree(AT(0, const Step*), AT(1, const u16*),
                                        attention::Plane{AT(2, u8*), AT(3, u16*)},
                                        attention::Plane{AT(4, u8*), AT(5, u16*)},
                                        attention::PageTable{AT(6, const int*), int(w[7]), int(w[7] >> 32)},
                                        FLOAT_AT(8), AT(9, float*), int(w[10]));
#if HAS_SM90
        // Bulk copies into this memory follow.
        fence_proxy_async();
#endif
    }
    // Fills the rings again.
    __device__ __forceinline__ void refill() const {
        Ring ring;
        ring.resume();
        ring.take();
        if (ring.what != LOAD_WORKSPACE) return;
        ring.at++;
        ring.take();
        ring.fill(memory, policy_evict_first());
        ring.leave();
    }
#endif
};

__device__ __forceinline__ void consume_all(const LaunchParams& params, u8* memory, Clocks& clocks) {
    const Consumer consumer = {params, memory, clocks};
    const int warp = warp_index();
    const BlockLists& lists = params.lists[blockIdx.x];
    if (threadIdx.x % 32 == 0)
        block_storage.warps[warp] = {params.sums + lists.sums[warp], params.loads + lists.loads[warp], 0, 0, 0};
    __syncwarp();
    {
        Ring ring;
        ring.resume();
        ring.take();
        ring.fill(memory, policy_evict_first());
        ring.leave();
        __syncwarp();
    }
#pragma unroll 1
    for (int i = 0;; i++) {
        const int slot = i % TASK_SLOTS;
        mbarrier_wait(shared_address(block_storage.task_full + slot), i / TASK_SLOTS & 1);
        const Task& task = block_storage.tasks[slot];
        if (task.kind == TASK_END) return;
        clocks.begin();
        if (task.kind == TASK_GEMV)
            consumer.gemv(task);
        else if (task.kind == TASK_GEMV_F32)
            consumer.gemv_f32(task);
        else
            consumer.body(task);
        __syncwarp();
        clocks.end(task, i);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(block_storage.task_empty + slot));
    }
}

extern "C" __global__ void __launch_bounds__(LAUNCH_THREADS, 1)
    one_launch(const __grid_constant__ LaunchParams params) {
    extern __shared__ __align__(1024) u8 memory[];
    // Behind the counters: blocks that left, the error, the set of this launch.
    u32 *left = params.counters + params.n_counters * COUNTER_STRIDE, *error = left + COUNTER_STRIDE,
        *set = error + COUNTER_STRIDE;
    if (threadIdx.x < CONSUMER_WARPS)
        for (int i = 0; i < RING_SLOTS; i++) mbarrier_init(shared_address(block_storage.full[threadIdx.x] + i), 1);
    if (threadIdx.x >= 32 && threadIdx.x < 32 + TASK_SLOTS) {
        mbarrier_init(shared_address(block_storage.task_full + threadIdx.x - 32), 1);
        mbarrier_init(shared_address(block_storage.task_empty + threadIdx.x - 32), CONSUMER_WARPS);
    }
    if (threadIdx.x == 0) {
        block_storage.error = error;
        block_storage.is_aborted = 0;
    }
#if HAS_SM90
    fence_mbarrier_init();
#endif
    const u32 this_set = *(volatile u32*)set & 1;
    if (threadIdx.x == 0) block_storage.exchanged = params.exchange + size_t(this_set) * params.exchange_bytes;
    __syncthreads();
    const int warp = warp_index();
    Clocks clocks;
    if (warp == CONSUMER_WARPS)
        copy_tasks(params, this_set);
    else
        consume_all(params, memory, clocks);
    // The last block to leave gives the status and clears the counters: no block waits any more.
    __syncthreads();
    __shared__ int is_last;
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(left, 1u) == gridDim.x - 1;
        __threadfence();
        if (is_last) {
            *params.status = atomicAdd(error, 0u);
            *set = this_set ^ 1;
            print_clocks();
        }
    }
    __syncthreads();
    if (is_last)
        for (int i = threadIdx.x; i < params.n_counters + 2; i += LAUNCH_THREADS)
            params.counters[i * COUNTER_STRIDE] = 0;
}
