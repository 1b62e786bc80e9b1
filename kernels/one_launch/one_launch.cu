// A decode step of one row in one persistent launch: all layers, the final norm and the LM head.
//
// Each block runs its own list of tasks (task.cuh), which the host makes from the launches of the same plan. There is
// no grid barrier: rows that blocks exchange show by themselves which of their words are there, so a task waits for one
// trip of its input through L2. The last warp but one loads the weights of the consumer warps into their rings
// (ring.cuh). It does not wait for activations, so it is ahead of the tasks, across tasks and layers. The last warp
// copies tasks to shared memory. GEMV tasks divide the K ranges of their tiles among all consumer warps; other tasks
// are the kernels of the separate launches (bodies.cuh).
//
// Exchanged rows exist twice: a launch writes one set and makes the other, which the launch before wrote, absent.
// Within a launch every word is written once, so nothing is written over while it is read.
//
// The bits are those of the separate launches: K ranges, order of sums and functions are the same.
//
// in   lists [blocks], tasks, loads, sums: what blocks and their warps do     counters [n_counters + 3][32], 0
//      exchange [2][exchange_bytes], ABSENT     the counter behind `error` has the set of the next launch
// out  what the tasks write; counters 0; status: 0, or why a wait took too long: the number of the counter plus 1, or
//      another wait from 2^29 on
// grid one block per SM, all resident (cooperative), x (CONSUMER_WARPS + 2) * 32
// smem rings, input rows in f16 and f32 (two of each: tasks alternate), partial sums; dynamic. A task of attention
//      works in the first rings, whose loading waits for it.
// defines HIDDEN (width of normed rows), WIDTH (the same), NORM_WARPS, KINDS, MAX_COLUMNS (longest row of a matrix),
//      MAX_PARTS (partial sums of a tile, both matrices of SwiGLU), those of ring.cuh and bodies.cuh, CLOCKS (1: print
//      where the time of a launch goes)
// arch sm_80 and up; sm_90 loads by bulk copies
// reference the separate launches, bit for bit     test crates/cuda/tests/batch_invariance.rs
#undef PDL
#define KERNEL(...) __device__ __noinline__ void
#include "common/prelude.cuh"
#include "common/step.cuh"
#define CONSUMER_WARPS 14
#define CONSUMERS (CONSUMER_WARPS * 32)
#define LAUNCH_THREADS (CONSUMERS + 64)
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
        counter_wait(block_storage.wait_counter, block_storage.wait_value, 0x40000000u);
    __syncwarp();
}
#include "one_launch/bodies.cuh"

struct GemvOperands {
    const u8* x;  // f16, or with FLAG_NORM f32
    const float* norm;
    const float* residual;  // null for none
    u8* out;                // f32, SWIGLU: f16; exchanged
    u8* copy;               // the same for later launches, or null; SWIGLU: a16_layout.cuh
    const u8* factors[2];   // of the first 128 rows of each matrix
    int factor_stride;      // bytes from those to the next 128
    int kind;
    int columns;
    float eps;
    u16 parts[CONSUMER_WARPS];  // of each warp
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
    u32* counters;
    u32* status;
    u8* exchange;
    int n_counters, exchange_bytes;
};

// Dynamic shared memory: the rings are first.
#define RING_BYTES (CONSUMER_WARPS * RING_SLOTS * SLOT_BYTES)
struct Activations {
    u8* f16;      // [2][MAX_COLUMNS]
    float* f32;   // [2][HIDDEN]
    float* sums;  // [TILE_SLOTS][MAX_PARTS][16]
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
        ring_wait(shared_address(block_storage.task_empty + slot), (i / TASK_SLOTS & 1) ^ 1);
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

// The parts that a warp sums, 16 of them in the registers of its lanes and 16 on their way.
struct PartList {
    const u64* list;
    u64 window, ahead;
    int at;

    __device__ __forceinline__ void init(const SumPart* from) {
        list = (const u64*)from + threadIdx.x % 32;
        window = __ldg(list), ahead = __ldg(list + 32);
        list += 64, at = 0;
    }
    __device__ __forceinline__ SumPart take() {
        if (at == 16) {
            window = ahead, ahead = __ldg(list);
            list += 32, at = 0;
        }
        u64 words[2];
        words[0] = __shfl_sync(WARP_ALL, window, 2 * at);
        words[1] = __shfl_sync(WARP_ALL, window, 2 * at + 1);
        at++;
        return *(const SumPart*)words;
    }
};

// What the sum of a row of the tile is multiplied by and added to; lane i has row i.
struct RowTerms {
    float factor, up_factor;
    u32 residual;
};

struct Consumer {
    const LaunchParams& params;
    Activations x;
    PartList list;
    RingPosition ring;
    u8* memory;
    int input;  // which of the two rows the task's input is in
    Clocks& clocks;

    __device__ __forceinline__ u8* f16() const { return x.f16 + input * (2 * MAX_COLUMNS); }
    __device__ __forceinline__ float* f32() const { return x.f32 + input * HIDDEN; }

    // The task's input to shared memory, as soon as it is there. Other warps may still read the input before.
    __device__ __forceinline__ void load_input(const Task& task, const u8* from, const float* norm, int columns,
                                               float eps) {
        input ^= 1;
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
            load_normed_input<CONSUMER_WARPS>(load, weights, eps, block_storage.warp_sums, f16(), f32(),
                                              [] { consumer_sync(); });
        } else {
            constexpr int ROUNDS = (MAX_COLUMNS / 8 + CONSUMERS - 1) / CONSUMERS;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int i = threadIdx.x + r * CONSUMERS;
                if (i >= columns / 8) break;
                uint4 v[1];
                exchange_wait<1>((const uint4*)from + i, 0, v);
                *(uint4*)(f16() + i * 16) = v[0];
            }
            __syncwarp();
            clocks.landed();
        }
        consumer_sync();
    }

    // Loads them: they do not depend on the task's input.
    __device__ __forceinline__ RowTerms row_terms(const Task& task, const SumPart& part) const {
        const GemvOperands& operands = *(const GemvOperands*)task.words;
        const int row = part.tile * 16 + threadIdx.x % 16;
        const size_t at = size_t(row / 128) * operands.factor_stride + row % 128 * 4;
        RowTerms terms = {0.0f, 0.0f, 0u};
        if (threadIdx.x % 32 < 16 && row < task.count) {
            terms.factor = __ldg((const float*)(operands.factors[0] + at));
            if (task.flags & FLAG_SWIGLU) terms.up_factor = __ldg((const float*)(operands.factors[1] + at));
            if (operands.residual) terms.residual = exchange_load((const u32*)operands.residual + row);
        }
        return terms;
    }

    // Row lane of a tile has `sum`, and of gate and up also `up`.
    __device__ __forceinline__ void store_row(const Task& task, const SumPart& part, const RowTerms& terms, float sum,
                                              float up) const {
        const GemvOperands& operands = *(const GemvOperands*)task.words;
        const int lane = threadIdx.x % 32, row = part.tile * 16 + lane;
        const bool is_row = lane < 16 && row < task.count;
        if (task.flags & FLAG_SWIGLU) {
            const u32 y = f32_to_f16(clamp_to_f16(silu(0.0f + sum * terms.factor) * (0.0f + up * terms.up_factor)));
            const u32 pair = y | __shfl_down_sync(WARP_ALL, y, 1) << 16;
            if (is_row && lane % 2 == 0) {
                exchange_store(operands.out + row * 2, pair);
                if (operands.copy)
                    *(u32*)(operands.copy + row / 64 * A16_TILE + row % 64 / 8 * 128 + row % 8 * 2) = pair;
            }
        } else if (is_row) {
            u32 residual = terms.residual;
            if (operands.residual)
                poll_until(EXCHANGE_REASON, [&] {
                    if (residual != ABSENT) return true;
                    residual = exchange_load((const u32*)operands.residual + row);
                    return residual != ABSENT;
                });
            const u32 value = __float_as_uint(__uint_as_float(residual) + sum * terms.factor);
            exchange_store(operands.out + row * 4, value);
            if (operands.copy) ((u32*)operands.copy)[row] = value;
        }
    }

    // The warp's sum of a part; the last warp of a tile adds all of them.
    __device__ __forceinline__ void finish_part(const Task& task, const SumPart& part, const RowTerms& terms,
                                                const float (&acc)[4]) const {
        const int lane = threadIdx.x % 32;
        if (part.n_parts == 1) {
            const float low = __shfl_sync(WARP_ALL, acc[0], lane * 4 % 32),
                        high = __shfl_sync(WARP_ALL, acc[2], lane * 4 % 32);
            return store_row(task, part, terms, lane < 8 ? low : high, 0.0f);
        }
        const int slot = part.sequence % TILE_SLOTS;
        const int before = part.sequence / TILE_SLOTS;
        float* sums = x.sums + slot * (MAX_PARTS * 16);
        // The tile that had this slot before is summed.
        poll_until(0x80000001u, [&] { return *(volatile int*)(block_storage.sums + slot) >= before; });
        __threadfence_block();
        __syncwarp();
        if (lane % 4 == 0) {
            sums[part.part * 16 + lane / 4] = acc[0];
            sums[part.part * 16 + 8 + lane / 4] = acc[2];
        }
        __syncwarp();
        int is_last = 0;
        if (lane == 0) {
            __threadfence_block();
            is_last = atomicAdd(block_storage.parts + slot, 1) == part.n_parts - 1;
            __threadfence_block();
        }
        if (!__shfl_sync(WARP_ALL, is_last, 0)) return;
        __syncwarp();
        // Sums of several blocks begin at +0 in gemm/decode_gemm_small_batch.
        const float* from = sums + lane % 16;
        const auto sum_of = [&](int begin, int end) {
            constexpr int FETCH = 12;
            float sum = end - begin > 1 ? 0.0f + from[begin * 16] : from[begin * 16];
#pragma unroll 1
            for (int i = begin + 1; i < end; i += FETCH) {
                float v[FETCH];
#pragma unroll
                for (int j = 0; j < FETCH; j++) v[j] = from[min(i + j, end - 1) * 16];
#pragma unroll
                for (int j = 0; j < FETCH; j++)
                    if (i + j < end) sum += v[j];
            }
            return sum;
        };
        const float sum = sum_of(0, part.n_first),
                    up = part.n_first < part.n_parts ? sum_of(part.n_first, part.n_parts) : 0.0f;
        store_row(task, part, terms, sum, up);
        __syncwarp();
        if (lane == 0) {
            block_storage.parts[slot] = 0;
            __threadfence_block();
            atomicAdd(block_storage.sums + slot, 1);
        }
    }

    template <int KIND>
    __device__ __forceinline__ void products(const SumPart& part, float (&acc)[4]) {
        constexpr int UNIT_X_BYTES = unit_slices(KIND) * slice_chunks(KIND) * 128;
        const int warp = warp_index();
        u32 at = shared_address(f16()) + part.first_unit * UNIT_X_BYTES;
#pragma unroll 1
        for (int unit = 0; unit < part.units; unit++, at += UNIT_X_BYTES) {
            ring_wait(ring.full(warp), ring.parity);
            mma_units<KIND>(memory + ring.offset(warp), at, 0, 1, acc);
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty(warp));
            ring.advance();
        }
    }

    __device__ __forceinline__ void gemv(const Task& task) {
        const GemvOperands& operands = *(const GemvOperands*)task.words;
        const int n = operands.parts[warp_index()], kind = operands.kind;
        SumPart part = {};
        RowTerms terms = {};
        if (n > 0) part = list.take(), terms = row_terms(task, part);
        if (!(task.flags & FLAG_KEEP_INPUT))
            load_input(task, operands.x, operands.norm, operands.columns, operands.eps);
        clocks.ready();
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            SumPart next = part;
            RowTerms next_terms = terms;
            if (i + 1 < n) next = list.take(), next_terms = row_terms(task, next);
            float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#define PRODUCTS(KIND) products<KIND>(part, acc)
            DISPATCH_KIND(PRODUCTS)
#undef PRODUCTS
            if (i + 1 == n) clocks.multiplied();
            finish_part(task, part, terms, acc);
            part = next, terms = next_terms;
        }
    }

    // A warp per row, in the order of gemm/f32_gemm.cuh.
    __device__ __forceinline__ void gemv_f32(const Task& task) {
        const F32Operands& operands = *(const F32Operands*)task.words;
        const int warp = warp_index(), lane = threadIdx.x % 32;
        constexpr int QUADS = HIDDEN / 128;
        float4 weights[QUADS];
        if (warp < task.count) {
            const float* from = operands.weights + size_t(task.first + warp) * HIDDEN + lane * 4;
#pragma unroll
            for (int i = 0; i < QUADS; i++) weights[i] = __ldg((const float4*)(from + i * 128));
        }
        if (!(task.flags & FLAG_KEEP_INPUT))
            load_input(task, (const u8*)operands.x, operands.norm, HIDDEN, operands.eps);
        clocks.ready();
        if (warp >= task.count) return;
        float total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 w = weights[i], v = *(const float4*)(f32() + i * 128 + lane * 4);
            sum = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sum))));
            if ((i + 1) * 128 % operands.k_slice == 0 || i == QUADS - 1) total += warp_sum(sum), sum = 0.0f;
        }
        if (lane == 0) exchange_store(operands.out + task.first + warp, __float_as_uint(total));
    }

    // A task that is the function of a separate kernel.
    __device__ __forceinline__ void body(const Task& task) {
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
        if (task.kind == TASK_APPEND && warp < 12)
            attention::attn_qk_norm_rope_append(
                AT(0, const Step*), AT(1, float*), AT(2, const float*), AT(3, const float*), AT(4, const float*),
                AT(5, const float*), AT(6, const double*), AT(7, u16*), FLOAT_AT(8),
                attention::Plane{AT(9, u8*), AT(10, u16*)}, attention::Plane{AT(11, u8*), AT(12, u16*)},
                attention::PageTable{AT(13, const int*), int(w[14]), int(w[14] >> 32)});
        if (task.kind == TASK_ATTENTION) attend(task);
        if (task.kind == TASK_COMBINE && warp < 8)
            attention::attn_combine_splits(AT(0, const Step*), AT(1, const float*), AT(2, const float*),
                                           AT(3, const float*), int(w[4]), RowOutput{AT(5, float*), AT(6, void*)});
#endif
        consumer_sync();
        if (threadIdx.x == 0 && task.raise >= 0) counter_raise(params.counters + task.raise * COUNTER_STRIDE);
    }

#if ATTENTION
    // Works in the first rings: what they had before is summed, and nothing more is loaded until this is done.
    __device__ __forceinline__ void attend(const Task& task) {
        const u64* w = task.words;
        if (warp_index() < (ATTENTION == 2 ? 12 : 8))
            attention::attn_decode_tree(AT(0, const Step*), AT(1, const u16*),
                                        attention::Plane{AT(2, u8*), AT(3, u16*)},
                                        attention::Plane{AT(4, u8*), AT(5, u16*)},
                                        attention::PageTable{AT(6, const int*), int(w[7]), int(w[7] >> 32)},
                                        FLOAT_AT(8), AT(9, float*), int(w[10]));
#if HAS_SM90
        // Bulk copies into this memory follow.
        fence_proxy_async();
#endif
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&block_storage.workspace_free));
    }
#endif
};

__device__ __forceinline__ void consume_all(const LaunchParams& params, u8* memory, Clocks& clocks) {
    Activations x;
    x.f16 = memory + RING_BYTES;
    x.f32 = (float*)(x.f16 + 4 * MAX_COLUMNS);
    x.sums = x.f32 + 2 * HIDDEN;
    Consumer consumer = {params, x, {}, {0, 0}, memory, 0, clocks};
    consumer.list.init(params.sums + params.lists[blockIdx.x].sums[warp_index()]);
#pragma unroll 1
    for (int i = 0;; i++) {
        const int slot = i % TASK_SLOTS;
        ring_wait(shared_address(block_storage.task_full + slot), i / TASK_SLOTS & 1);
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

extern "C" __global__ void __launch_bounds__(LAUNCH_THREADS, 1) one_launch(const LaunchParams params) {
    extern __shared__ __align__(1024) u8 memory[];
    // Behind the counters: blocks that left, the error, the set of this launch.
    u32 *left = params.counters + params.n_counters * COUNTER_STRIDE, *error = left + COUNTER_STRIDE,
        *set = error + COUNTER_STRIDE;
    if (threadIdx.x == 0) {
        for (int warp = 0; warp < CONSUMER_WARPS; warp++)
            for (int i = 0; i < RING_SLOTS; i++) {
                mbarrier_init(shared_address(block_storage.full[warp] + i), HAS_SM90 ? 1 : 32);
                mbarrier_init(shared_address(block_storage.empty[warp] + i), 1);
            }
        for (int i = 0; i < TASK_SLOTS; i++) {
            mbarrier_init(shared_address(block_storage.task_full + i), 1);
            mbarrier_init(shared_address(block_storage.task_empty + i), CONSUMER_WARPS);
        }
        mbarrier_init(shared_address(&block_storage.workspace_free), CONSUMER_WARPS);
        for (int i = 0; i < TILE_SLOTS; i++) block_storage.parts[i] = block_storage.sums[i] = 0;
        block_storage.error = error;
        block_storage.is_aborted = 0;
#if HAS_SM90
        fence_mbarrier_init();
#endif
    }
    __syncthreads();
    const int warp = warp_index();
    Clocks clocks;
    const u32 this_set = *(volatile u32*)set & 1;
    if (warp == CONSUMER_WARPS) {
        const u32 first = threadIdx.x % 32 < CONSUMER_WARPS ? params.lists[blockIdx.x].loads[threadIdx.x % 32] : 0;
        load_weights(params.loads + first, shared_address(memory));
    } else if (warp > CONSUMER_WARPS) {
        copy_tasks(params, this_set);
    } else {
        consume_all(params, memory, clocks);
    }
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
