// The kernels of the separate launches of several rows as functions of the consumer warps of several_rows.cu: their
// sources and so their bits are the same. What differs is as in bodies.cuh.
//
// Needs: task_block, wait_ready(); DELTA (0 or 1) with DELTA_K_HEADS, DELTA_V_HEADS, DELTA_GROUPED, DELTA_WARPS and the
// other defines of gated_delta/decode_recurrent; ATTENTION (0 or 1) with those of attention/decode_tree.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"
#define SOURCE 0
#include "norm/source_rows.cuh"
#include "norm/row_output.cuh"
#include "ffn/gate_function.cuh"
#include "rope/sincos.cuh"

#define DELTA_BARRIER 8
#define BARRIER_OF_256 9
#define ROW_WARPS (CONSUMER_WARPS / 4 * 4)  // whole blocks of four warps

#define blockIdx task_block
#define pdl_wait() wait_ready()

#if DELTA
namespace delta {
#define K_HEADS DELTA_K_HEADS
#define V_HEADS DELTA_V_HEADS
#define GROUPED DELTA_GROUPED
#define NODES ROWS
#define WARPS DELTA_WARPS
#define __syncthreads() named_barrier_sync<DELTA_BARRIER, DELTA_WARPS * 32>()
#include "gated_delta/decode_recurrent.cu"
#undef __syncthreads
#undef THREADS
#undef WARPS
#undef NODES
#undef WIDTH
#define WIDTH V_WIDTH
#define OUT_PANEL 0
#include "gated_delta/gated_norm.cu"
#undef WIDTH
#define WIDTH HIDDEN
#undef K_HEADS
#undef V_HEADS
#undef GROUPED
#undef HEAD_DIM
}  // namespace delta
#endif

#if ATTENTION
#define __syncthreads() named_barrier_sync<BARRIER_OF_256, 256>()
namespace attention {
#define HEAD_DIM ATTENTION_HEAD_DIM
#include "attention/kv_tiles.cuh"
#include "attention/qk_norm_rope_append.cu"
#undef WIDTH
#define WIDTH (HEADS * HEAD_DIM)
#include "attention/combine_splits.cu"
#undef WIDTH
#define WIDTH HIDDEN
#if FIXED_SPLITS
#define QUERY_COLUMNS (M16_TILES * 16)
#include "attention/fixed_splits_schedule.cuh"
#endif
#include "attention/decode_tree.cu"
}  // namespace attention
#undef __syncthreads
#endif

// The function of a task, by the warps that it has work for.
__device__ __forceinline__ void run_rows_body(const Task& task, int warp) {
    const u64* w = task.words;
#define AT(i, T) ((T)w[i])
#define FLOAT_AT(i) __uint_as_float(u32(w[i]))
#define OUTPUT_AT(i) \
    RowOutput { AT(i, float*), AT(i + 1, void*) }
#if DELTA
    if (task.kind == TASK_DELTA && warp < DELTA_WARPS)
        delta::gated_delta_recurrent_tree(
            AT(0, const Step*), AT(1, const float*), u32(w[2]), AT(3, const float*), u32(w[4]), AT(5, const float*),
            u32(w[6]), AT(7, const float*), w[8], AT(9, const float*), AT(10, const float*), AT(11, const float*),
            AT(12, const float*), w[13], AT(14, float*), w[15], AT(16, float*), AT(17, float4*));
    if (task.kind == TASK_GATED_NORM && warp < ROW_WARPS) {
        // Before its own wait it reads z, which is of the launch before the delta rule's.
        wait_ready();
        delta::gated_delta_norm(AT(0, const Step*), AT(1, const float*), u32(w[2]), AT(3, const float*), u32(w[4]),
                                AT(5, const float*), FLOAT_AT(6), OUTPUT_AT(7), nullptr, 0);
    }
#endif
#if ATTENTION
    if (task.kind == TASK_APPEND && warp < ROW_WARPS)
        attention::attn_qk_norm_rope_append(AT(0, const Step*), AT(1, float*), AT(2, const float*), AT(3, const float*),
                                            AT(4, const float*), AT(5, const float*), AT(6, const double*), AT(7, u16*),
                                            FLOAT_AT(8), attention::Plane{AT(9, u8*), AT(10, u16*)},
                                            attention::Plane{AT(11, u8*), AT(12, u16*)},
                                            attention::PageTable{AT(13, const int*), int(w[14]), int(w[14] >> 32)});
    if (task.kind == TASK_ATTENTION && warp < 8)
        attention::attn_decode_tree(AT(0, const Step*), AT(1, const u16*), attention::Plane{AT(2, u8*), AT(3, u16*)},
                                    attention::Plane{AT(4, u8*), AT(5, u16*)},
                                    attention::PageTable{AT(6, const int*), int(w[7]), int(w[7] >> 32)}, FLOAT_AT(8),
                                    AT(9, float*), int(w[10]));
    if (task.kind == TASK_COMBINE && warp < 8)
        attention::attn_combine_splits(AT(0, const Step*), AT(1, const float*), AT(2, const float*),
                                       AT(3, const float*), int(w[4]), OUTPUT_AT(5));
#endif
#undef OUTPUT_AT
#undef FLOAT_AT
#undef AT
}
#undef pdl_wait
#undef blockIdx
