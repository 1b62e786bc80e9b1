// QK norm + RoPE + KV cache append: everything between the q, k, v projections and attention, in one launch.
//
//   q, k = rope(rms_norm(head + bias) * norm), v += bias
//   k, v are Hadamard-rotated if stored so, quantized, and written at the row's position; q is rotated like k
//
// in   header   POSITIONS_FROM 0: Step   RoPE at position[row], written at tree.committed + row - tree.first
//               POSITIONS_FROM 1: PrefillChunk both at committed + row
//               POSITIONS_FROM 2: Commit rows are the entries of the paths, both at path.committed + entry
//               POSITIONS_FROM 3: MtpStep as Step, written behind the rows that the sequence drafted before
//      q        [rows][HEADS][Q_STRIDE] f32; the head is the first HEAD_DIM values, an output gate may follow
//      k, v     [rows] rows of [KV_HEADS][HEAD_DIM] f32, KV_STRIDE floats apart
//      norms    [HEAD_DIM] f32 each, with QK_NORM      frequency [ROPE / 2] f64
//      biases   of a projection's rows each, f32, with BIASES; null for none
//      VALUES_NORMED: heads of v go through a norm without weights
// out  Q_F16: q16 [rows][HEADS][HEAD_DIM] f16, else q in place;  the K and V planes
// grid (ceil((HEADS + 2 KV_HEADS) / 4), rows) x 128 threads, one warp per head
// smem none
// arch sm_80 and up     references cpu::reference::{norm::rms_in_place, rope, kv::encode}
// test attention::prefill_chunk_appends_keys_and_values_at_their_pages,
//      attention::extreme_rows_are_stored_as_the_codec_stores_them
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/head_norm_rope.cuh"
#include "attention/kv_cache.cuh"

#if POSITIONS_FROM == 0
typedef Step Header;
#elif POSITIONS_FROM == 1
typedef PrefillChunk Header;
#elif POSITIONS_FROM == 2
typedef Commit Header;
#else
typedef MtpStep Header;
#endif

#ifndef BIASES
#define BIASES 0
#endif

// Adds a head's part of a bias, if there is one.
__device__ __forceinline__ void add_bias(float (&x)[DIM_BLOCKS], const float* bias, int head) {
    if (!bias) return;
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) x[b] += bias[head * HEAD_DIM + 32 * b + threadIdx.x % 32];
}

struct RowPosition {
    int slot, rope, cache;
};

// Slot and positions of row `row`; false if there is no such row or it need not be stored.
__device__ __forceinline__ bool row_position(const Header* header, int row, int ring, RowPosition& position) {
#if POSITIONS_FROM == 0
    if (row >= header->rows) return false;
    const Tree tree = header->tree[header->tree_of[row]];
    position.slot = tree.slot;
    position.rope = header->position[row];
    position.cache = tree.committed + row - tree.first;
    return true;
#elif POSITIONS_FROM == 1
    if (row >= header->rows) return false;
    position.slot = header->slot;
    position.rope = position.cache = header->committed + row;
    // In a ring buffer, a later row of the same chunk may overwrite this one.
    return ring == 0 || row + ring * PAGE_SIZE >= header->rows;
#elif POSITIONS_FROM == 3
    const Step& step = header->step;
    if (row >= step.rows) return false;
    const int tree_index = step.tree_of[row];
    const Tree tree = step.tree[tree_index];
    position.slot = tree.slot;
    position.rope = step.position[row];
    position.cache = tree.committed + header->earlier[tree_index] + row - tree.first;
    return true;
#else
    for (int p = 0; p < header->paths; p++) {
        if (row < header->path[p].length) {
            position.slot = header->path[p].slot;
            position.rope = position.cache = header->path[p].committed + row;
            return true;
        }
        row -= header->path[p].length;
    }
    return false;
#endif
}

KERNEL(128)
attn_qk_norm_rope_append(const Header* header, float* q, const float* k, const float* v,
                         const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                         const double* __restrict__ frequency, u16* q16, float eps, Plane keys, Plane values,
                         PageTable pages
#if BIASES
                         ,
                         const float* __restrict__ q_bias, const float* __restrict__ k_bias,
                         const float* __restrict__ v_bias
#endif
) {
    pdl_launch();
    const int head = blockIdx.x * 4 + warp_index(), row = blockIdx.y, lane = threadIdx.x % 32;
    float norm[DIM_BLOCKS];
#if QK_NORM
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) norm[b] = (head < HEADS ? q_norm : k_norm)[32 * b + lane];
#endif
    RowPosition position;
    const bool active = head < HEADS + 2 * KV_HEADS && row_position(header, row, pages.ring_pages, position);
    // Angles and the cache row take longer than the work after pdl_wait, so they are computed before it.
    const bool is_key = head < HEADS + KV_HEADS;
    const int kv_head = head - HEADS - (is_key ? 0 : KV_HEADS);
    Angles angles;
    size_t kv_row_index = 0;
    if (active && is_key) angles = angles_of(position.rope, frequency);
    if (active && head >= HEADS) kv_row_index = kv_row(pages, position.slot, position.cache, KV_HEADS, kv_head);
    pdl_wait();
    if (!active) return;
    float x[DIM_BLOCKS];
    if (head < HEADS) {
        float* from = q + ((size_t)row * HEADS + head) * Q_STRIDE;
        load_inputs<DIM_BLOCKS>(from + lane, 32, x);
#if BIASES
        add_bias(x, q_bias, head);
#endif
#if QK_NORM
        rms_norm(x, norm, eps);
#endif
        apply_rope(x, angles);
        if (kv_rotated(K_FORMAT)) hadamard_head<false>(x);
#pragma unroll
        for (int b = 0; b < DIM_BLOCKS; b++) {
#if Q_F16
            q16[((size_t)row * HEADS + head) * HEAD_DIM + 32 * b + lane] = f32_to_f16(x[b]);
#else
            from[32 * b + lane] = x[b];
#endif
        }
        return;
    }
    const float* from = (is_key ? k : v) + (size_t)row * KV_STRIDE + kv_head * HEAD_DIM;
    load_inputs<DIM_BLOCKS>(from + lane, 32, x);
#if BIASES
    add_bias(x, is_key ? k_bias : v_bias, kv_head);
#endif
    if (is_key) {
#if QK_NORM
        rms_norm(x, norm, eps);
#endif
        apply_rope(x, angles);
        kv_store<K_FORMAT, DIM_BLOCKS>(keys, kv_row_index, x);
    } else {
#if VALUES_NORMED
        const float scale = rms_scale(x, eps);
#pragma unroll
        for (int b = 0; b < DIM_BLOCKS; b++) x[b] *= scale;
#endif
        kv_store<V_FORMAT, DIM_BLOCKS>(values, kv_row_index, x);
    }
}
