// Puts the splits of attention together, gates the result, and writes it in the forms of the output projection.
//
//   out = (sum_s 2^(m_s - M) O_s) / (sum_s 2^(m_s - M) l_s), turned back if values are stored turned, * sigmoid(gate)
//
// A thread has one value, a warp 32 values of one head. Splits are added in order, their l by warp_sum. With BY_POSITION
// splits are the slots of attn/spans.cuh.
//
// in   step     partial [rows][HEADS][SPLITS][DIM] f32, behind it [rows][HEADS][SPLITS][2] f32 (m, l)
//      q        [rows][HEADS][Q_STRIDE] f32; with GATE, values DIM .. 2 DIM of a head are its gate
// out  [rows][HEADS * DIM] in any of the forms of norm/emit.cuh (WIDTH = HEADS * DIM)
// grid (groups of 256 values, rows) x 256, a thread per value
// arch sm_80 and up     reference cpu::reference::{attention::attend, activation::sigmoid_gate}
// test attention::trees_over_*_equal_the_reference
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/kv.cuh"
#include "attn/span.cuh"
#if BY_POSITION
#include "attn/spans.cuh"
#endif
#include "norm/emit.cuh"

// Splits whose values are fetched together: all of a row, half, or a third; more at once would not stay in registers.
#define ROUNDS (SPLITS <= 16 ? 1 : SPLITS <= 48 ? 2 : 3)
#define FETCH ((SPLITS + ROUNDS - 1) / ROUNDS)

struct Value {
    const float* o;      // [SPLITS][DIM], moved to the value
    const float2* pairs; // (m, l) [SPLITS]
    int n;               // splits there are
    int from, to;        // those of them that have no keys
    float first[FETCH];
};

__device__ __forceinline__ bool has(const Value& v, int split) { return split < v.n && (split < v.from || split >= v.to); }

// Begins to fetch value `value` of head `index` = row * HEADS + head; `rows` are those that `partial` has room for.
__device__ __forceinline__ void fetch_value(Value& v, const float* partial, int rows, size_t index, int value, int n, int from,
                                            int to) {
    v.o = partial + index * SPLITS * DIM + value;
    v.pairs = (const float2*)(partial + (size_t)rows * HEADS * SPLITS * DIM) + index * SPLITS;
    v.n = n, v.from = from, v.to = to;
#pragma unroll
    for (int s = 0; s < FETCH; s++) v.first[s] = has(v, s) ? __ldcg(v.o + s * DIM) : 0.0f;
}

// The value; all lanes of the warp take part.
__device__ __forceinline__ float merge(const Value& v) {
    const int lane = threadIdx.x % 32;
    float most = -INF, weight[(SPLITS + 31) / 32], l[(SPLITS + 31) / 32];
#pragma unroll
    for (int i = 0; i < (SPLITS + 31) / 32; i++) {
        const float2 pair = has(v, lane + 32 * i) ? __ldcg(v.pairs + lane + 32 * i) : make_float2(-INF, 0.0f);
        weight[i] = pair.x, l[i] = pair.y;
        most = fmaxf(most, pair.x);
    }
    most = warp_max(most);
    // A split that sees no key has no weight, whatever it left.
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (SPLITS + 31) / 32; i++) {
        weight[i] = weight[i] == -INF ? 0.0f : exp2f(weight[i] - most);
        sum += weight[i] == 0.0f ? 0.0f : weight[i] * l[i];
    }
    sum = warp_sum(sum);
    float acc = 0.0f;
    const auto add = [&](int s, float o) {
        float w = weight[0];
#pragma unroll
        for (int i = 1; i < (SPLITS + 31) / 32; i++) w = s / 32 == i ? weight[i] : w;
        w = __shfl_sync(WARP_ALL, w, s % 32);
        if (w != 0.0f) acc = fmaf(w, o, acc);
    };
#pragma unroll
    for (int s = 0; s < FETCH; s++) {
        // Most rows have few.
        if (s % 8 == 0 && s >= v.n) break;
        add(s, v.first[s]);
    }
#pragma unroll
    for (int begin = FETCH; begin < SPLITS; begin += FETCH) {
        if (begin >= v.n) break;
        float o[FETCH];
#pragma unroll
        for (int i = 0; i < FETCH; i++) o[i] = begin + i < SPLITS && has(v, begin + i) ? __ldcg(v.o + (begin + i) * DIM) : 0.0f;
#pragma unroll
        for (int s = begin; s < begin + FETCH && s < SPLITS; s++) {
            if (s % 8 == 0 && s >= v.n) break;
            add(s, o[s - begin]);
        }
    }
    // A row whose every key has no weight gives zeros.
    return acc * (sum > 0.0f ? 1.0f / sum : sum == sum ? 0.0f : sum);
}

extern "C" __global__ void __launch_bounds__(256) attn_combine(
    const Step* step, const float* q, const float* partial, int rows, RowOutput out) {
    pdl_launch();
    __shared__ __align__(16) float values[256];
    __shared__ float room[kv_turned(V_FORMAT) ? 512 : 1];
    const int group = blockIdx.x, row = blockIdx.y, warp = warp_index(), first = group * 256 + warp * 32, at = first + threadIdx.x % 32;
    const int head = first / DIM;  // heads are multiples of 32 wide, so warps are whole
    if (row >= step->rows) return;
    int n = 1, from = 0, to = 0;
#if BY_POSITION
    const Slots slots = slots_of(view_of(step, step->tree_of[row]), step->position[row]);
    n = slots.count, from = slots.hidden.from, to = slots.hidden.to;
#elif SPLITS > 1
    n = splits_of(span_of(view_of(step, step->tree_of[row])));
#endif
    const size_t index = (size_t)row * HEADS + head;
    pdl_wait();
    float result = 0.0f, gate = 1.0f;
    if (first < WIDTH) {
        Value value;
        fetch_value(value, partial, rows, index, at % DIM, n, from, to);
#if GATE
        // The gate stands behind the head in the projection.
        gate = sigmoid(q[index * Q_STRIDE + DIM + at % DIM]);
#endif
        result = merge(value);
    }
    if (kv_turned(V_FORMAT)) result = turn_back_values<DIM>(result, room);
    values[threadIdx.x] = result * gate;
    __syncthreads();
    if (warp > 0) return;
    const float4 a = ((const float4*)values)[2 * threadIdx.x], b = ((const float4*)values)[2 * threadIdx.x + 1];
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    store_row_group(out, row, group, v);
}
