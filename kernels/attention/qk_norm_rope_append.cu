// QK norm + RoPE + KV cache append: everything between the q, k, v projections and attention, in one launch.
//
//   q, k = rope(rms_norm(head) * norm)      k, v are Hadamard-rotated if stored so, quantized, and written at the row's
//                                           position; q is rotated like k
//
// in   header   POSITIONS_FROM 0: Step   RoPE at position[row], written at tree.committed + row - tree.first
//               POSITIONS_FROM 1: PrefillChunk both at committed + row
//               POSITIONS_FROM 2: Commit rows are the entries of the paths, both at path.committed + entry
//               POSITIONS_FROM 3: MtpStep as Step, written behind the rows that the sequence drafted before
//      q        [rows][HEADS][Q_STRIDE] f32; the head is the first HEAD_DIM values, an output gate may follow
//      k, v     [rows] rows of [KV_HEADS][HEAD_DIM] f32, KV_STRIDE floats apart
//      norms    [HEAD_DIM] f32 each, with QK_NORM      frequency [ROPE / 2] f64
//      VALUES_NORMED: heads of v go through a norm without weights
// out  Q_F16: q16 [rows][HEADS][HEAD_DIM] f16, else q in place;  the K and V planes
// grid (ceil((HEADS + 2 KV_HEADS) / 4), rows) x 128 threads, one warp per head
// smem none
// arch sm_80 and up     references cpu::reference::{norm::rms_in_place, rope, kv::encode}
// test attention::prefill_chunk_appends_keys_and_values_at_their_pages,
//      attention::extreme_rows_are_stored_as_the_codec_stores_them
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "rope/sincos.cuh"
#include "attention/kv_cache.cuh"

#define DIM_BLOCKS (HEAD_DIM / 32)
#define HALF_ROPE (ROPE / 2)

#if POSITIONS_FROM == 0
typedef Step Header;
#elif POSITIONS_FROM == 1
typedef PrefillChunk Header;
#elif POSITIONS_FROM == 2
typedef Commit Header;
#else
typedef MtpStep Header;
#endif

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

__device__ __forceinline__ float rms_scale(const float (&x)[DIM_BLOCKS], float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) sum += x[b] * x[b];
    return 1.0f / sqrtf(warp_sum(sum) / HEAD_DIM + eps);
}

__device__ __forceinline__ void rms_norm(float (&x)[DIM_BLOCKS], const float (&norm)[DIM_BLOCKS], float eps) {
    const float scale = rms_scale(x, eps);
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) x[b] = x[b] * scale * norm[b];
}

// Sines and cosines of a row: lane i has pairs 32 b + i if HALF_ROPE is a multiple of 32, else values 32 b + i.
#define ANGLES_PER_LANE (HALF_ROPE % 32 == 0 ? HALF_ROPE / 32 : (ROPE + 31) / 32)
struct Angles {
    float sine[ANGLES_PER_LANE], cosine[ANGLES_PER_LANE];
};

__device__ __forceinline__ Angles angles_of(int position, const double* frequency) {
    Angles angles;
#pragma unroll
    for (int b = 0; b < ANGLES_PER_LANE; b++) {
        const int i = 32 * b + threadIdx.x % 32;
        const int pair = HALF_ROPE % 32 == 0 || i < HALF_ROPE ? i : i < ROPE ? i - HALF_ROPE : 0;
        sin_cos(position, frequency[pair], angles.sine[b], angles.cosine[b]);
    }
    return angles;
}

// Pairs (j, j + HALF_ROPE): in one lane if HALF_ROPE is a multiple of 32, else exchanged by shuffles.
__device__ __forceinline__ void apply_rope(float (&x)[DIM_BLOCKS], const Angles& angles) {
#if HALF_ROPE % 32 == 0
#pragma unroll
    for (int b = 0; b < HALF_ROPE / 32; b++) {
        const float s = angles.sine[b], c = angles.cosine[b];
        const float u = x[b], w = x[b + HALF_ROPE / 32];
        x[b] = u * c - w * s;
        x[b + HALF_ROPE / 32] = w * c + u * s;
    }
#else
    const int lane = threadIdx.x % 32;
    float old[DIM_BLOCKS];
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) old[b] = x[b];
#pragma unroll
    for (int b = 0; b < (ROPE + 31) / 32; b++) {
        const int i = 32 * b + lane;
        const int partner = i < HALF_ROPE ? i + HALF_ROPE : i < ROPE ? i - HALF_ROPE : i;
        float other = 0.0f;
#pragma unroll
        for (int from = 0; from < (ROPE + 31) / 32; from++) {
            const float v = __shfl_sync(WARP_ALL, old[from], partner % 32);
            if (partner / 32 == from) other = v;
        }
        if (i < ROPE) {
            const float s = angles.sine[b], c = angles.cosine[b];
            x[b] = i < HALF_ROPE ? old[b] * c - other * s : old[b] * c + other * s;
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(128)
    attn_qk_norm_rope_append(const Header* header, float* q, const float* k, const float* v,
                             const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                             const double* __restrict__ frequency, u16* q16, float eps, Plane keys, Plane values,
                             PageTable pages) {
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
#pragma unroll
        for (int b = 0; b < DIM_BLOCKS; b++) x[b] = from[32 * b + lane];
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
#pragma unroll
    for (int b = 0; b < DIM_BLOCKS; b++) x[b] = from[32 * b + lane];
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
