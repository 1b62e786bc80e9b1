// Logits processors on the device: contract's `LogitsProcessors::apply`, value for value.
//
//   logits_edit_dense   edited = allowed(t) ? raw : -inf                      for rows that have edits
//   logits_edit_sparse  edited[t] += bias;  then per count: repetition, frequency and presence
//
// in   header: number of logits rows at int N_LOGITS_ROWS_AT; logits f32 [logits rows][STRIDE]; edits LogitEditsHeader
// out  edited f32 [logits rows][STRIDE], rows with edits only
// grid dense (ceil(VOCAB / 4096), rows) x 256; sparse rows x 256
// arch sm_80 and up     reference LogitEdits::apply     test crates/cuda/tests/rows.rs
#include "common/prelude.cuh"
#include "logits/edits.cuh"

extern "C" __global__ void __launch_bounds__(256)
    logits_edit_dense(const int* __restrict__ header, const float* __restrict__ logits, float* __restrict__ edited,
                      const LogitEditsHeader* __restrict__ edits) {
    pdl_launch();
    const int row = blockIdx.y;
    pdl_wait();
    if (row >= header[N_LOGITS_ROWS_AT]) return;
    const int edit_index = edits->of[row];
    if (edit_index < 0) return;
    const int mask = edits->edit[edit_index].mask;
    const unsigned long long* words = (const unsigned long long*)edits + mask;
    for (int i = 0; i < 16; i++) {
        const int id = blockIdx.x * 4096 + i * 256 + threadIdx.x;
        if (id >= VOCAB) return;
        const bool allowed = mask < 0 || (words[id >> 6] >> (id & 63) & 1);
        const size_t at = (size_t)row * STRIDE + id;
        edited[at] = allowed ? logits[at] : __int_as_float(0xff800000);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    logits_edit_sparse(const int* __restrict__ header, float* __restrict__ edited,
                       const LogitEditsHeader* __restrict__ edits) {
    pdl_launch();
    const int row = blockIdx.x;
    pdl_wait();
    if (row >= header[N_LOGITS_ROWS_AT]) return;
    const int edit_index = edits->of[row];
    if (edit_index < 0) return;
    const LogitEdit edit = edits->edit[edit_index];
    float* values = edited + (size_t)row * STRIDE;
    const BiasEntry* biases = (const BiasEntry*)((const unsigned long long*)edits + edit.bias);
    for (int i = threadIdx.x; i < edit.biases; i += 256) {
        const BiasEntry entry = biases[i];
        if ((unsigned)entry.token < VOCAB) values[entry.token] += entry.bias;
    }
    __syncthreads();
    const CountEntry* counts = (const CountEntry*)((const unsigned long long*)edits + edit.count);
    for (int i = threadIdx.x; i < edit.counts; i += 256) {
        const CountEntry entry = counts[i];
        const unsigned token = entry.token_seen & 0x7fffffffu;
        if (token >= VOCAB) continue;
        float x = values[token];
        if (entry.token_seen >> 31 && edit.repetition != 1.0f)
            x = x > 0.0f ? __fdiv_rn(x, edit.repetition) : __fmul_rn(x, edit.repetition);
        if (entry.generated)
            x = __fsub_rn(x, __fadd_rn(__fmul_rn(edit.frequency, (float)entry.generated), edit.presence));
        values[token] = x;
    }
}
