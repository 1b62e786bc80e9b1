// Puts the splits of attention together, gates the result, and writes it in the forms of the output projection.
//
//   out = (sum_s 2^(m_s - M) O_s) / (sum_s 2^(m_s - M) l_s) * sigmoid(gate)
//
// in   step     partial [rows][HEADS][SPLITS][DIM] f32, behind it [rows][HEADS][SPLITS][2] f32 (m, l)
//      q        [rows][HEADS][Q_STRIDE] f32; with GATE, values DIM .. 2 DIM of a head are its gate
// out  [rows][HEADS * DIM] in any of the forms of norm/emit.cuh (WIDTH = HEADS * DIM)
// grid (groups of 256 values, rows) x 256: each of 8 warps sums every eighth split, in order, then the eight in order
// arch sm_80 and up     reference cpu::reference::{attention::attend, activation::sigmoid_gate}
// test attention::trees_over_*_equal_the_reference
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "norm/emit.cuh"
#include "attn/span.cuh"

extern "C" __global__ void __launch_bounds__(256) attn_combine(
    const Step* step, const float* q, const float* partial, int rows, Out out) {
    pdl_launch();
    __shared__ float part[8][256];
    __shared__ float weights[8][32][2];
    const int group = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int at = group * 256 + lane * 8, head = at / DIM;
    const bool real = at < WIDTH;
    if (row >= step->rows) return;
    const Tree tree = step->tree[step->tree_of[row]];
#if SPLITS > 1
    const int splits = splits_of(span_of(tree));
#else
    const int splits = 1;
#endif
    const size_t index = (size_t)row * HEADS + head;
    pdl_wait();
#if GATE
    float4 gates[2];
    if (real && warp == 0) {
        const float4* gate = (const float4*)(q + index * Q_STRIDE + DIM + at % DIM);
        gates[0] = gate[0], gates[1] = gate[1];
    }
#endif
    const float* pairs = partial + (size_t)rows * HEADS * SPLITS * DIM + index * SPLITS * 2;
    const float* values = partial + index * SPLITS * DIM + at % DIM;

    // Each warp scales to the largest maximum among its own splits; the warps are then scaled to the largest of all.
    float most = -INF, sum = 0.0f, acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (real) {
        for (int s = warp; s < splits; s += 8) most = fmaxf(most, pairs[2 * s]);
#pragma unroll 4
        for (int s = warp; s < splits; s += 8) {
            const float m = pairs[2 * s];
            if (m == -INF) continue;
            const float w = exp2f(m - most);
            const float4 a = ((const float4*)(values + (size_t)s * DIM))[0], b = ((const float4*)(values + (size_t)s * DIM))[1];
            sum += w * pairs[2 * s + 1];
            acc[0] += w * a.x, acc[1] += w * a.y, acc[2] += w * a.z, acc[3] += w * a.w;
            acc[4] += w * b.x, acc[5] += w * b.y, acc[6] += w * b.z, acc[7] += w * b.w;
        }
    }
    weights[warp][lane][0] = most;
    weights[warp][lane][1] = sum;
#pragma unroll
    for (int i = 0; i < 8; i++) part[warp][i * 32 + lane] = acc[i];
    __syncthreads();
    if (warp) return;
    const int used = min(8, splits);
    for (int w = 1; w < used; w++) most = fmaxf(most, weights[w][lane][0]);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) acc[i] = 0.0f;
    for (int w = 0; w < used; w++) {
        const float m = weights[w][lane][0];
        if (m == -INF) continue;
        const float share = exp2f(m - most);
        sum += share * weights[w][lane][1];
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i] += share * part[w][i * 32 + lane];
    }
    // A row whose every key has no weight gives zeros.
    const float scale = sum > 0.0f ? 1.0f / sum : sum == sum ? 0.0f : sum;
#pragma unroll
    for (int i = 0; i < 8; i++) acc[i] *= scale;
#if GATE
    if (real) {
        const float4 a = gates[0], b = gates[1];
        acc[0] *= sigmoid(a.x), acc[1] *= sigmoid(a.y), acc[2] *= sigmoid(a.z), acc[3] *= sigmoid(a.w);
        acc[4] *= sigmoid(b.x), acc[5] *= sigmoid(b.y), acc[6] *= sigmoid(b.z), acc[7] *= sigmoid(b.w);
    }
#endif
    emit(out, row, group, acc);
}
