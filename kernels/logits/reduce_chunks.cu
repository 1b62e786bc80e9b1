// Logits reduction, first of two passes: maxima and log-sum-exp parts of every chunk of a row.
//
//   per group of GROUP_SIZE logits   max                        of the edited row
//   per chunk of CHUNK_SIZE logits   max, sum e^(x - max)       of the edited and of the raw row
//
// in   header: number of logits rows at int N_LOGITS_ROWS_AT     logits f32 [logits rows][STRIDE]
//      edited f32 [logits rows][STRIDE], read for rows that have edits; edits: LogitEditsHeader or null
// out  scratch f32 [rows][ROW_SCRATCH]
// grid (ceil(N_CHUNKS / 8), rows, 2) x 256, one warp per chunk; z = 1 takes the raw row of rows with edits
// arch sm_80 and up     reference cpu::reference::rows::row     test crates/cuda/tests/rows.rs
// NaN counts as minus infinity. Each chunk is summed in one fixed order.
#include "common/prelude.cuh"
#include "logits/edits.cuh"

#define WARPS 8
#define VALUES (CHUNK_SIZE / 32)

// header and edits are not __restrict__, or the compiler moves their loads after the dependency wait: one more round
// trip.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    logits_reduce_chunks(const int* header, const float* __restrict__ logits, const float* __restrict__ edited,
                         const LogitEditsHeader* edits, float* __restrict__ scratch) {
    pdl_launch();
    const int row = blockIdx.y, raw = blockIdx.z;
    const int lane = threadIdx.x & 31, chunk = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const bool has_edits = edit_of(edits, row) >= 0;
    const bool is_active = row < header[N_LOGITS_ROWS_AT] && chunk < N_CHUNKS && (!raw || has_edits);
    pdl_wait();
    if (!is_active) return;
    const float* values = (has_edits && !raw ? edited : logits) + (size_t)row * STRIDE;
    float* out = scratch + (size_t)row * ROW_SCRATCH;
    const float neg_inf = __int_as_float(0xff800000);

    float x[VALUES];
    const int begin = chunk * CHUNK_SIZE;
#pragma unroll
    for (int i = 0; i < VALUES / 4; i++) {
        const int at = begin + i * 128 + lane * 4;
#if STRIDE % 4 == 0
        float4 v = make_float4(neg_inf, neg_inf, neg_inf, neg_inf);
        if (at < VOCAB) v = *(const float4*)(values + at);
        x[4 * i] = nan_to_neg_inf(v.x), x[4 * i + 1] = nan_to_neg_inf(v.y), x[4 * i + 2] = nan_to_neg_inf(v.z),
              x[4 * i + 3] = nan_to_neg_inf(v.w);
        // If VOCAB is a multiple of 4, a vector that begins inside the row ends inside it.
        if (VOCAB % 4 == 0) continue;
#pragma unroll
        for (int j = 1; j < 4; j++) x[4 * i + j] = at + j < VOCAB ? x[4 * i + j] : neg_inf;
#else
#pragma unroll
        for (int j = 0; j < 4; j++) x[4 * i + j] = at + j < VOCAB ? nan_to_neg_inf(values[at + j]) : neg_inf;
#endif
    }

    // Groups are 32 or 256 values: 8 lanes of one vector load, or both loads of a whole warp.
    float max_value = neg_inf;
#if GROUP_SIZE == 32
#pragma unroll
    for (int i = 0; i < VALUES / 4; i++) {
        float m = fmaxf(fmaxf(x[4 * i], x[4 * i + 1]), fmaxf(x[4 * i + 2], x[4 * i + 3]));
        max_value = fmaxf(max_value, m);
#pragma unroll
        for (int offset = 4; offset; offset >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, offset));
        const int group = (begin + i * 128) / 32 + lane / 8;
        if (!raw && lane % 8 == 0 && group < N_GROUPS) out[group] = m;
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) max_value = fmaxf(max_value, __shfl_xor_sync(~0u, max_value, offset));
#else
#pragma unroll
    for (int i = 0; i < VALUES / 8; i++) {
        float m = neg_inf;
#pragma unroll
        for (int j = 0; j < 8; j++) m = fmaxf(m, x[8 * i + j]);
#pragma unroll
        for (int offset = 16; offset; offset >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, offset));
        max_value = fmaxf(max_value, m);
        const int group = begin / 256 + i;
        if (!raw && lane == 0 && group < N_GROUPS) out[group] = m;
    }
#endif
    float sum = 0.0f;
    if (max_value - max_value == 0.0f) {  // finite
#pragma unroll
        for (int i = 0; i < VALUES; i++) sum += __expf(x[i] - max_value);
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) {
        float* pair = out + N_GROUPS + 2 * (raw * N_CHUNKS + chunk);
        pair[0] = max_value;
        pair[1] = sum;
    }
}
