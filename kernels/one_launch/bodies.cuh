// The kernels of the separate launches as functions of the consumer warps of one_launch/one_launch.cu.
//
// Their sources are the same and so are their bits. What differs is here: an entry is a function (KERNEL), blockIdx is
// the task's, a block barrier is one of the warps that run the function, and the dependency wait is the task's.
//
// Needs: task_block, wait_ready(); DELTA (0 or 1) with DELTA_K_HEADS, DELTA_V_HEADS, DELTA_GROUPED; ATTENTION (0 none,
// 1 decode_tree, 2 decode_fixed_splits_sm90) with the defines of those files.
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "common/wgmma_sm90.cuh"
#include "norm/row_output.cuh"
#include "rope/sincos.cuh"

#define BARRIER_OF_256 9
#define BARRIER_OF_384 10
#define APPEND_WARPS (CONSUMER_WARPS >= 12 ? 12 : CONSUMER_WARPS / 4 * 4)

#define blockIdx task_block
#define pdl_wait() wait_ready()
#define __syncthreads() named_barrier_sync<BARRIER_OF_256, 256>()

#if DELTA
namespace delta {
#define K_HEADS DELTA_K_HEADS
#define V_HEADS DELTA_V_HEADS
#define GROUPED DELTA_GROUPED
#include "gated_delta/decode_row_fused.cu"
#undef K_HEADS
#undef V_HEADS
#undef GROUPED
#undef WARPS
#undef HEAD_DIM
}  // namespace delta
#endif

#if ATTENTION
namespace attention {
#define HEAD_DIM ATTENTION_HEAD_DIM
// Not first in one of the branches below: the host expands includes whatever the condition.
#include "attention/kv_tiles.cuh"
#include "attention/qk_norm_rope_append.cu"
#undef WIDTH
#define WIDTH (HEADS * HEAD_DIM)
#include "attention/combine_splits.cu"
#undef WIDTH
#define WIDTH HIDDEN
#if FIXED_SPLITS
#if ATTENTION == 1
#define QUERY_COLUMNS (M16_TILES * 16)
#else
#define QUERY_COLUMNS (8 * N8_TILES)
#endif
#include "attention/fixed_splits_schedule.cuh"
#endif
#if ATTENTION == 1
#include "attention/decode_tree.cu"
#else
#undef __syncthreads
#define __syncthreads() named_barrier_sync<BARRIER_OF_384, 384>()
#include "attention/decode_fixed_splits_sm90.cu"
#endif
}  // namespace attention
#endif
#undef __syncthreads
#undef pdl_wait
#undef blockIdx
