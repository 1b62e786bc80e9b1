// Combines the KV splits of attention, applies the output gate, and writes the rows in the formats of the output
// projection.
//
//   out = (sum_s 2^(m_s - M) O_s) / (sum_s 2^(m_s - M) l_s), rotated back if V is stored rotated, * sigmoid(gate)
//   SINKS: the denominator also has 2^(sink log2 e - M), a score of the head without a value
//
// One value per thread, 32 values of a head per warp. Splits are added in order; their l by warp_sum. With FIXED_SPLITS
// the splits are the slots of fixed_splits.cuh.
//
// in   step     partial [rows][HEADS][SPLITS][HEAD_DIM] f32, then [rows][HEADS][SPLITS][2] f32 (m, l)
//      q        [rows][HEADS][Q_STRIDE] f32; with GATED, values HEAD_DIM .. 2 HEAD_DIM of a head are its gate
//      sinks    [HEADS] f32, with SINKS
// out  [rows][HEADS * HEAD_DIM] in any format of norm/row_output.cuh (WIDTH = HEADS * HEAD_DIM)
// grid (groups of 256 values, rows) x 256 threads
// smem 1 KB, 3 KB with rotation
// arch sm_80 and up     reference cpu::reference::{attention::attend, activation::sigmoid_gate}
// test attention::tree_attention_over_*_matches_reference
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/kv_cache.cuh"
#include "attention/kv_range.cuh"
#if FIXED_SPLITS
#include "attention/fixed_splits.cuh"
#endif
#include "norm/row_output.cuh"

// Splits loaded together: all of a row, half, or a third; more would not fit in registers.
#define FETCH_ROUNDS (SPLITS <= 16 ? 1 : SPLITS <= 48 ? 2 : 3)
#define SPLITS_PER_FETCH ((SPLITS + FETCH_ROUNDS - 1) / FETCH_ROUNDS)

struct SplitReader {
    const float* o;                // [SPLITS][HEAD_DIM], at this thread's value
    const float2* max_and_sum;     // (m, l) [SPLITS]
    int n;                         // number of splits
    int masked_begin, masked_end;  // those of them without keys
    float fetched[SPLITS_PER_FETCH];
};

__device__ __forceinline__ bool split_has_keys(const SplitReader& v, int split) {
    return split < v.n && (split < v.masked_begin || split >= v.masked_end);
}

// Starts loading value `value` of head `index` = row * HEADS + head; `rows` is the row capacity of `partial`.
__device__ __forceinline__ void prefetch_splits(SplitReader& v, const float* partial, int rows, size_t index, int value,
                                                int n, int masked_begin, int masked_end) {
    v.o = partial + index * SPLITS * HEAD_DIM + value;
    v.max_and_sum = (const float2*)(partial + (size_t)rows * HEADS * SPLITS * HEAD_DIM) + index * SPLITS;
    v.n = n, v.masked_begin = masked_begin, v.masked_end = masked_end;
#pragma unroll
    for (int s = 0; s < SPLITS_PER_FETCH; s++) v.fetched[s] = split_has_keys(v, s) ? __ldcg(v.o + s * HEAD_DIM) : 0.0f;
}

// The combined value; all lanes of the warp take part. `sink` is a score in base 2, -INF for none.
__device__ __forceinline__ float merge_splits(const SplitReader& v, float sink) {
    const int lane = threadIdx.x % 32;
    float max_of_splits = sink, weight[(SPLITS + 31) / 32], l[(SPLITS + 31) / 32];
#pragma unroll
    for (int i = 0; i < (SPLITS + 31) / 32; i++) {
        const float2 max_and_sum_of_lane =
            split_has_keys(v, lane + 32 * i) ? __ldcg(v.max_and_sum + lane + 32 * i) : make_float2(-INF, 0.0f);
        weight[i] = max_and_sum_of_lane.x, l[i] = max_and_sum_of_lane.y;
        max_of_splits = fmaxf(max_of_splits, max_and_sum_of_lane.x);
    }
    max_of_splits = warp_max(max_of_splits);
    // A split without a visible key has zero weight, whatever its partial result is.
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (SPLITS + 31) / 32; i++) {
        weight[i] = weight[i] == -INF ? 0.0f : exp2f(weight[i] - max_of_splits);
        sum += weight[i] == 0.0f ? 0.0f : weight[i] * l[i];
    }
    sum = warp_sum(sum);
#if SINKS
    sum += exp2f(sink - max_of_splits);
#endif
    float acc = 0.0f;
    const auto add = [&](int s, float o) {
        float w = weight[0];
#pragma unroll
        for (int i = 1; i < (SPLITS + 31) / 32; i++) w = s / 32 == i ? weight[i] : w;
        w = __shfl_sync(WARP_ALL, w, s % 32);
        if (w != 0.0f) acc = fmaf(w, o, acc);
    };
#pragma unroll
    for (int s = 0; s < SPLITS_PER_FETCH; s++) {
        // Most rows have few splits.
        if (s % 8 == 0 && s >= v.n) break;
        add(s, v.fetched[s]);
    }
#pragma unroll
    for (int begin = SPLITS_PER_FETCH; begin < SPLITS; begin += SPLITS_PER_FETCH) {
        if (begin >= v.n) break;
        float o[SPLITS_PER_FETCH];
#pragma unroll
        for (int i = 0; i < SPLITS_PER_FETCH; i++)
            o[i] = begin + i < SPLITS && split_has_keys(v, begin + i) ? __ldcg(v.o + (begin + i) * HEAD_DIM) : 0.0f;
#pragma unroll
        for (int s = begin; s < begin + SPLITS_PER_FETCH && s < SPLITS; s++) {
            if (s % 8 == 0 && s >= v.n) break;
            add(s, o[s - begin]);
        }
    }
    // A row without any weight gives zeros.
    return acc * (sum > 0.0f ? 1.0f / sum : sum == sum ? 0.0f : sum);
}

KERNEL(256)
attn_combine_splits(const Step* step, const float* q, const float* partial, const float* __restrict__ sinks, int rows,
                    RowOutput out) {
    pdl_launch();
    __shared__ __align__(16) float values[256];
    __shared__ float scratch[kv_rotated(V_FORMAT) ? 512 : 1];
    const int group = blockIdx.x, row = blockIdx.y, warp = warp_index(), head_first = group * 256 + warp * 32,
              column = head_first + threadIdx.x % 32;
    const int head = head_first / HEAD_DIM;  // heads are multiples of 32 wide, so a warp is within one head
    if (row >= step->rows) return;
    int n = 1, masked_begin = 0, masked_end = 0;
#if FIXED_SPLITS
    const SplitSlots slots = split_slots(windowed_tree(step, step->tree_of[row]), step->position[row]);
    n = slots.count, masked_begin = slots.masked.begin, masked_end = slots.masked.end;
#elif SPLITS > 1
    n = num_splits(kv_range(windowed_tree(step, step->tree_of[row])));
#endif
    const size_t index = (size_t)row * HEADS + head;
    float sink = -INF;
#if SINKS
    if (head_first < WIDTH) sink = sinks[head] * 1.4426950408889634f;
#endif
    pdl_wait();
    float result = 0.0f, gate = 1.0f;
    if (head_first < WIDTH) {
        SplitReader value;
        prefetch_splits(value, partial, rows, index, column % HEAD_DIM, n, masked_begin, masked_end);
#if GATED
        // In the projection, the gate follows the head.
        float v[1];
        load_inputs<1>(q + index * Q_STRIDE + HEAD_DIM + column % HEAD_DIM, 0, v);
        gate = sigmoid(v[0]);
#endif
        result = merge_splits(value, sink);
    }
    if (kv_rotated(V_FORMAT)) result = hadamard_inverse_values<HEAD_DIM>(result, scratch);
    values[threadIdx.x] = result * gate;
    __syncthreads();
    if (warp > 0) return;
    const float4 a = ((const float4*)values)[2 * threadIdx.x], b = ((const float4*)values)[2 * threadIdx.x + 1];
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    store_row_group(out, row, group, v);
}
