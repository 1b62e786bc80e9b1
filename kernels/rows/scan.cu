// Row reduction, first of two: what one pass over logits can say about every part of a row.
//
//   per group of GROUP logits   max                                        of the edited row
//   per run of RUN logits       max, sum e^(x - max)                       of the edited and of the raw row
//
// in   header   asked rows at int ASKED_AT              logits [asked][STRIDE] f32
//      edited   [asked][STRIDE] f32, read for rows that have edits; edits: EditHead or null
// out  scratch  [rows][ROW_SCRATCH] f32
// grid (ceil(RUNS / 8), rows, 2), one warp per run; z = 1 takes the raw row of rows with edits
// arch sm_80 and up     reference cpu::reference::rows::row     test rows::reduction_equals_the_reference
// NaN counts as minus infinity. Each run is summed in one fixed order.
// hot
#include "common/prelude.cuh"
#include "rows/edits.cuh"

#define WARPS 8
#define VALUES (RUN / 32)

// The header and edits are not __restrict__, or the compiler moves their loads behind the dependent-launch wait: a trip more.
extern "C" __global__ void __launch_bounds__(WARPS * 32) rows_scan(
    const int* header, const float* __restrict__ logits, const float* __restrict__ edited, const EditHead* edits,
    float* __restrict__ scratch) {
    pdl_launch();
    const int row = blockIdx.y, raw = blockIdx.z;
    const int lane = threadIdx.x & 31, run = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const bool has_edits = edit_of(edits, row) >= 0;
    const bool real = row < header[ASKED_AT] && run < RUNS && (!raw || has_edits);
    pdl_wait();
    if (!real) return;
    const float* values = (has_edits && !raw ? edited : logits) + (size_t)row * STRIDE;
    float* out = scratch + (size_t)row * ROW_SCRATCH;
    const float none = __int_as_float(0xff800000);

    float x[VALUES];
    const int begin = run * RUN;
#pragma unroll
    for (int i = 0; i < VALUES / 4; i++) {
        const int at = begin + i * 128 + lane * 4;
#if STRIDE % 4 == 0
        float4 v = make_float4(none, none, none, none);
        if (at < VOCAB) v = *(const float4*)(values + at);
        x[4 * i] = clean(v.x), x[4 * i + 1] = clean(v.y), x[4 * i + 2] = clean(v.z), x[4 * i + 3] = clean(v.w);
        // Four that begin inside a row of whole fours are inside it.
        if (VOCAB % 4 == 0) continue;
#pragma unroll
        for (int j = 1; j < 4; j++) x[4 * i + j] = at + j < VOCAB ? x[4 * i + j] : none;
#else
#pragma unroll
        for (int j = 0; j < 4; j++) x[4 * i + j] = at + j < VOCAB ? clean(values[at + j]) : none;
#endif
    }

    // Groups are 32 or 256 values: 8 lanes of one vector load, or both loads of a whole warp.
    float most = none;
#if GROUP == 32
#pragma unroll
    for (int i = 0; i < VALUES / 4; i++) {
        float m = fmaxf(fmaxf(x[4 * i], x[4 * i + 1]), fmaxf(x[4 * i + 2], x[4 * i + 3]));
        most = fmaxf(most, m);
#pragma unroll
        for (int off = 4; off; off >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, off));
        const int group = (begin + i * 128) / 32 + lane / 8;
        if (!raw && lane % 8 == 0 && group < GROUPS) out[group] = m;
    }
#pragma unroll
    for (int off = 16; off; off >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, off));
#else
#pragma unroll
    for (int i = 0; i < VALUES / 8; i++) {
        float m = none;
#pragma unroll
        for (int j = 0; j < 8; j++) m = fmaxf(m, x[8 * i + j]);
#pragma unroll
        for (int off = 16; off; off >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, off));
        most = fmaxf(most, m);
        const int group = begin / 256 + i;
        if (!raw && lane == 0 && group < GROUPS) out[group] = m;
    }
#endif
    float sum = 0.0f;
    if (most - most == 0.0f) {  // finite
#pragma unroll
        for (int i = 0; i < VALUES; i++) sum += __expf(x[i] - most);
    }
#pragma unroll
    for (int off = 16; off; off >>= 1) sum += __shfl_xor_sync(~0u, sum, off);
    if (lane == 0) {
        float* pair = out + GROUPS + 2 * (raw * RUNS + run);
        pair[0] = most;
        pair[1] = sum;
    }
}
