// decode_wy_tree_sm90.cu: shared memory, named barriers, cluster exchange, and the wgmma forms with all nodes as N.
//
// Needs: common/wgmma_sm90.cuh, layout.cuh, triangular_solve_sm90.cuh; NODES (a multiple of 8, at most 32), CLUSTER,
// SMEM_BYTES (dynamic shared memory of the launch: crates/cuda/src/launch/gated_delta/wy_tree_sm90.rs).
#pragma once

#define WARPS 16
#define THREADS (WARPS * 32)
#define WARPGROUP_THREADS 128
#define MAX_NODES 32
#define TILES (NODES / 8)
#define THREAD_SUMS (4 * TILES)  // two columns times a quarter of the nodes
#define COLUMNS 64
#define SLICES (HEAD_DIM / COLUMNS)
#define BLOCKS_PER_K_HEAD (V_HEADS / K_HEADS * SLICES)
#define BLOCK_CHANNELS (2 * HEAD_DIM + COLUMNS)  // channels of a block: q, k, v
#define LANES_PER_V_ROW (COLUMNS / 4)
#define V_ROWS_PER_WARP (32 / LANES_PER_V_ROW)  // rows of v that a warp convolves at once
#define QK_WARPS 12                             // warps that may have rows of q and k
#define QK_ROWS (2 * MAX_NODES)                 // keys, then queries
#define O_STRIDE (COLUMNS + 4)
#define K_SCALE 256.0f
#define Q_SCALE 2048.0f
#define G_SCALE 1099511627776.0f  // 2^40
#define LOG2_E 1.4426950408889634f

// Named barriers and their thread counts.
#define GATES_READY 1, 32 + WARPGROUP_THREADS       // for warpgroup 2
#define CONV_DONE 2, THREADS                        // v and gates, for warpgroups 0 and 1
#define DIAGONAL_READY 3, 3 * 32                    // diagonal blocks of A, for the warp that inverts them
#define SYSTEM_READY 4, 3 * WARPGROUP_THREADS + 32  // inverses, A, P and S0^T q, for warpgroup 0
#define O_READY 5, 3 * WARPGROUP_THREADS            // o, for warpgroups 2 and 3

struct SharedStorage {
    u8 qk_rows[QK_ROWS * 512];  // keys, then queries
    u8 state[COLUMNS * 512];
    float weight[4][BLOCK_CHANNELS];                // of channel c: [c % 4][c / 4] in units of 4 taps
    u32 taps[MAX_NODES];                            // per node: see common/step.cuh
    float v[MAX_NODES * COLUMNS];                   // a node's columns are at `swizzled`
    float4 o_from_state[TILES][WARPGROUP_THREADS];  // S0^T q part of o, in the accumulator layout of warpgroup 0
    float diagonal[MAX_NODES * DIAGONAL_STRIDE];    // 8 x 8 diagonal blocks of -A
    float a[MAX_NODES * PAIRS_STRIDE];  // -A in tf32 pairs; its diagonal blocks hold the inverses of those of I + A
    float p[MAX_NODES * PAIRS_STRIDE];  // P in tf32 pairs
    float o[MAX_NODES * O_STRIDE];
    float squares[2 * SLICES][MAX_NODES];  // of o, over halves of the slices of a head
    float2 log_decay_sum[MAX_NODES];       // G times log2(e): the nearest f32 and the remainder
    u64 ancestors[MAX_NODES];
    float2 gates[MAX_NODES];  // e^G, beta
    float column_scale[COLUMNS];
    u64 qk_barrier, squares_barrier;  // mbarriers
    u32 nonfinite;                    // bit mask of nodes
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the launch requests less shared memory than SharedStorage needs");

__device__ __forceinline__ int swizzled(int node, int column) {
    return node * COLUMNS + (column ^ ((node >> 1 & 3) << 3));
}

// d += a b with N = NODES; a is in registers or a descriptor.
#if TILES == 2
#define WGMMA_PLACES "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define WGMMA_SUMS(d) ACC_8(d, 0)
#define WGMMA_SHAPE "m64n16k16"
#elif TILES == 3
#define WGMMA_PLACES "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}"
#define WGMMA_SUMS(d) ACC_8(d, 0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_SHAPE "m64n24k16"
#else
#define WGMMA_PLACES "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define WGMMA_SUMS(d) ACC_8(d, 0), ACC_8(d, 8)
#define WGMMA_SHAPE "m64n32k16"
#endif
__device__ __forceinline__ void wgmma(float (&d)[THREAD_SUMS], const u32 (&a)[4], u64 b) {
#if TILES == 2
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES
                 ", {%8, %9, %10, %11}, %12, 1, 1, 1, 0;\n"
#elif TILES == 3
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES
                 ", {%12, %13, %14, %15}, %16, 1, 1, 1, 0;\n"
#else
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES
                 ", {%16, %17, %18, %19}, %20, 1, 1, 1, 0;\n"
#endif
                 : WGMMA_SUMS(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&d)[THREAD_SUMS], u64 a, u64 b) {
#if TILES == 2
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES ", %8, %9, 1, 1, 1, 0, 0;\n"
#elif TILES == 3
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES ", %12, %13, 1, 1, 1, 0, 0;\n"
#else
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES ", %16, %17, 1, 1, 1, 0, 0;\n"
#endif
                 : WGMMA_SUMS(d)
                 : "l"(a), "l"(b));
}

// Descriptor of K-step s (16 values) of the high plane of an operand of `rows` rows at `address`.
__device__ __forceinline__ u64 k_step_descriptor(u32 address, int rows, int s) {
    return wgmma_desc(address + s / 4 * (rows * 128)) + 2 * (s % 4);
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
