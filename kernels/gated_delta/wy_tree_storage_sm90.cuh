// What the warps of a block of delta/tree_sm90 share: its memory, where they meet, what blocks of a cluster send each other, and
// the products of a warpgroup with all nodes.
//
// Behind common/wgmma_sm90.cuh, gated_delta/layout.cuh and gated_delta/triangular_solve_sm90.cuh. Defines: NODES (a multiple of 8, at most 32), CLUSTER,
// SHARED (bytes that a launch asks for: crates/cuda/src/launch/delta/tree_sm90.rs).
#pragma once

#define WARPS 16
#define THREADS (WARPS * 32)
#define WARPGROUP_THREADS 128                     // threads of a warpgroup
#define MAX_NODES 32                       // nodes
#define TILES (NODES / 8)
#define THREAD_SUMS (4 * TILES)              // of a thread: two columns times a quarter of the nodes
#define COLUMNS 64
#define SLICES (HEAD_DIM / COLUMNS)
#define BLOCKS_PER_K_HEAD (V_HEADS / K_HEADS * SLICES)    // blocks of a key head
#define BLOCK_CHANNELS (2 * HEAD_DIM + COLUMNS)     // channels that a block has to do with: q, k, v
#define LANES_PER_V_ROW (COLUMNS / 4)          // lanes of a row of v
#define V_ROWS_PER_WARP (32 / LANES_PER_V_ROW)        // rows of v that a warp convolves at once
#define QK_WARPS 12                    // warps that may have rows of q and k
#define QK_ROWS (2 * MAX_NODES)               // keys, then queries
#define O_STRIDE (COLUMNS + 4)
#define K_SCALE 256.0f
#define Q_SCALE 2048.0f
#define G_SCALE 1099511627776.0f      // 2^40
#define LOG2_E 1.4426950408889634f

// Named barriers of a block, and how many threads meet there.
#define GATES_READY 1, 32 + WARPGROUP_THREADS     // for the third warpgroup
#define CONV_DONE 2, THREADS          // v and gates, for the first two
#define DIAGONAL_READY 3, 3 * 32      // diagonal blocks of A, for the warp that inverts
#define SYSTEM_READY 4, 3 * WARPGROUP_THREADS + 32   // inverses, A, P and what the state gives to o, for the first
#define O_READY 5, 3 * WARPGROUP_THREADS          // o, for the last two

struct SharedStorage {
    u8 qk_rows[QK_ROWS * 512];              // keys, then queries
    u8 state[COLUMNS * 512];
    float weight[4][BLOCK_CHANNELS];           // of channel c: [c % 4][c / 4] in units of 4 taps
    u32 taps[MAX_NODES];                   // of each node: common/step.cuh
    float v[MAX_NODES * COLUMNS];          // columns of a node stand where `swizzled` says
    float4 o_from_state[TILES][WARPGROUP_THREADS];     // what S0 gives to o, as the first warpgroup's sums lie
    float diagonal[MAX_NODES * DIAGONAL_STRIDE];  // blocks of 8 nodes of -A
    float a[MAX_NODES * PAIRS_STRIDE];         // -A in tf32 pairs, on its diagonal the inverses of blocks of I + A
    float p[MAX_NODES * PAIRS_STRIDE];         // P likewise
    float o[MAX_NODES * O_STRIDE];
    float squares[2 * SLICES][MAX_NODES];  // of o, over halves of the slices of a head
    float2 log_decay_sum[MAX_NODES];                // G times log2(e): the nearest f32, and what that leaves
    u64 ancestors[MAX_NODES];
    float2 gates[MAX_NODES];               // e^G, beta
    float column_scale[COLUMNS];
    u64 qk_barrier, squares_barrier;          // barriers
    u32 nonfinite;                          // nodes
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "a launch asks for less shared memory than a block uses");

__device__ __forceinline__ int swizzled(int node, int column) {
    return node * COLUMNS + (column ^ ((node >> 1 & 3) << 3));
}

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

__device__ __forceinline__ u32 mapa_shared_cluster(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// To the memory of a block of the cluster, counted on a barrier there.
__device__ __forceinline__ void st_async_cluster(u32 to, u32 x, u32 y, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async_cluster(u32 to, float x, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(x)), "r"(barrier)
                 : "memory");
}
// What others sent is there.
__device__ __forceinline__ void mbarrier_wait_cluster(u64& barrier) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t"
        "@done bra over;\n\tbra again;\n\tover:\n\t}" ::"r"(shared_address(&barrier))
        : "memory");
}

// d += a b, N being NODES; a lies in registers, or is a descriptor.
#if TILES == 2
#define WGMMA_PLACES "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define ACC_OF(d) ACC_8(d, 0)
#define WGMMA_SHAPE "m64n16k16"
#elif TILES == 3
#define WGMMA_PLACES "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}"
#define ACC_OF(d) ACC_8(d, 0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_SHAPE "m64n24k16"
#else
#define WGMMA_PLACES "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define ACC_OF(d) ACC_8(d, 0), ACC_8(d, 8)
#define WGMMA_SHAPE "m64n32k16"
#endif
__device__ __forceinline__ void wgmma(float (&d)[THREAD_SUMS], const u32 (&a)[4], u64 b) {
#if TILES == 2
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES ", {%8, %9, %10, %11}, %12, 1, 1, 1, 0;\n"
#elif TILES == 3
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES ", {%12, %13, %14, %15}, %16, 1, 1, 1, 0;\n"
#else
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE ".f32.f16.f16 " WGMMA_PLACES ", {%16, %17, %18, %19}, %20, 1, 1, 1, 0;\n"
#endif
                 : ACC_OF(d)
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
                 : ACC_OF(d)
                 : "l"(a), "l"(b));
}

// Step `s` of 16 values of an operand of `rows` rows that begins at `address`, its high parts.
__device__ __forceinline__ u64 k_step_descriptor(u32 address, int rows, int s) { return wgmma_desc(address + s / 4 * (rows * 128)) + 2 * (s % 4); }

// Lets the products that follow read what threads have written to shared memory.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
