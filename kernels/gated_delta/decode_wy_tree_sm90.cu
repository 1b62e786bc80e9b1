// Gated delta rule, decode of one draft tree of up to 32 nodes in WY form on Hopper: decode_wy_tree.cu and, with NORM,
// gated_norm.cu in one launch, with four specialized warpgroups.
//
// Convolution and gates: see conv.cuh. With G_i the sum of g over the path root..i, anc(i) the strict ancestors and S0
// the committed state:
//   A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j in anc(i);   R_i = beta_i (v_i - e^(G_i) S0^T k_i)
//   U = (I + A)^-1 R;   o_i = e^(G_i) S0^T q_i + sum_(j in anc(i) or j = i) P_ij u_j, P_ij = e^(G_i - G_j) (q_i . k_j)
//   NORM: y_i = rms_norm(o_i) * norm * silu(z_i), head by head
//
// in   x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [V_HEADS],
//      state [slot][V_HEADS][128 v][128 k]; with NORM z [rows][ld_z], norm [128]
// out  k, u, g and x of each node in the factors; o [rows][V_WIDTH], or with NORM y in the formats of
//      norm/row_output.cuh
// grid (V_HEADS * 2) x 512 threads: a block has 64 value columns of one head. Blocks of one key head are neighbors;
//      CLUSTER of them form a cluster that convolves q and k together and writes each row to the shared memory of all.
// smem SharedStorage, all dynamic
// arch sm_90a     reference cpu::reference::{conv, delta}::tree, norm::gated_rms
// test gated_delta::delta_tree_*, delta_layer_*
//
// Warpgroups: 0 to 2 convolve q and k, 1 and 3 v; one warp computes the gates. Then 0 computes R, U and o, 1 the S0^T q
// part of o, 2 A and P, one warp of 3 the inverses of the diagonal blocks; 2 and 3 norm o. Blocks exchange rows of q
// and k and sums of squares of o by st.async, which counts on an mbarrier of the receiver. Products with the state and
// of keys use f16 pairs (split_f16.cuh), the triangular system tf32 pairs (triangular_solve_sm90.cuh).
//
// A node's sums do not depend on the number of nodes, but they differ from decode_wy_tree.cu. A node with a non-finite
// key, value or gate is excluded, and it and its descendants get NaN; nothing else changes. A value that overflows only
// in the solver may also spoil other nodes in the same value column. G is in fixed point (2^-40), so sums along paths
// are exact in any order.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "common/wgmma_sm90.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/split_f16.cuh"
#include "gated_delta/conv.cuh"
#include "gated_delta/tree_conv.cuh"
#include "gated_delta/triangular_solve_sm90.cuh"
#include "gated_delta/wy_tree_storage_sm90.cuh"
#if NORM
#include "norm/row_output.cuh"
#endif

// Key head, value head and column slice of a block.
struct BlockWork {
    int key, head, slice;
    int first_column;  // of its head
    int v_channels;    // first channel of v
};
__device__ __forceinline__ BlockWork block_work() {
    BlockWork work;
    work.key = blockIdx.x / BLOCKS_PER_K_HEAD, work.slice = blockIdx.x % SLICES;
    const int head_of_key = blockIdx.x % BLOCKS_PER_K_HEAD / SLICES;
    work.head = GROUPED ? work.key * (V_HEADS / K_HEADS) + head_of_key : head_of_key * K_HEADS + work.key;
    work.first_column = work.slice * COLUMNS;
    work.v_channels = 2 * K_WIDTH + work.head * HEAD_DIM + work.first_column;
    return work;
}

// Convolution task of a lane: four channels of q (part 0), k (1) or v (2) of a node.
struct ConvTask {
    int node, part, within;
    __device__ __forceinline__ int channel(const BlockWork& work) const {
        return (part == 2 ? work.v_channels : part * K_WIDTH + work.key * HEAD_DIM) + within;
    }
};
// Convolution tasks of a warp: rows of the block's part of q and k, then pairs of rows of v.
struct ConvTasks {
    int row, qk_end, pair, v_end, stride;
    __device__ __forceinline__ ConvTasks(int warp, int nodes) {
        qk_end = (2 * nodes - cluster_rank() + CLUSTER - 1) / CLUSTER;
        row = warp < QK_WARPS ? warp : qk_end;
        // Pairs of v are for the first three warps of the last warpgroup; what exceeds three rounds of it goes to the
        // second.
        const bool last = warp >= QK_WARPS, second = warp / 4 == 1;
        stride = last ? 3 : 4;
        pair = last ? warp - QK_WARPS : second ? 9 + warp - 4 : MAX_NODES;
        v_end = min((nodes + V_ROWS_PER_WARP - 1) / V_ROWS_PER_WARP, last ? 9 : MAX_NODES / V_ROWS_PER_WARP);
    }
    __device__ __forceinline__ bool more() const { return row < qk_end || pair < v_end; }
    __device__ __forceinline__ void next() {
        if (row < qk_end)
            row += QK_WARPS;
        else
            pair += stride;
    }
    __device__ __forceinline__ ConvTask task() const {
        const int qk_index = cluster_rank() + CLUSTER * row, lane = threadIdx.x % 32;
        if (row < qk_end) return {qk_index >> 1, qk_index & 1, 4 * lane};
        return {pair * V_ROWS_PER_WARP + lane / LANES_PER_V_ROW, 2, lane % LANES_PER_V_ROW * 4};
    }
};

// A load that the compiler keeps in program order.
__device__ __forceinline__ float4 load_in_order(const float* from) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// S0^T k or S0^T q, depending on `rows`: a warp's 16 state columns times all nodes.
__device__ __forceinline__ void state_products(float (&sums)[THREAD_SUMS], SharedStorage& smem, u32 rows,
                                               int column16) {
    const u32 state = shared_address(smem.state);
    u32 high[8][4], low[8][4];
#pragma unroll
    for (int s = 0; s < 8; s++) {
        load_a_fragment(high[s], state, COLUMNS, column16, column16 + 8, s);
        load_a_fragment(low[s], state + LOW_PLANE(COLUMNS), COLUMNS, column16, column16 + 8, s);
    }
    float low_sums[THREAD_SUMS] = {};
    mbarrier_wait_cluster(shared_address(&smem.qk_barrier));
    fence_proxy_async();
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 8; s++) {
        wgmma(sums, high[s], k_step_descriptor(rows, QK_ROWS, s));
        wgmma(low_sums, high[s], k_step_descriptor(rows + LOW_PLANE(QK_ROWS), QK_ROWS, s));
        wgmma(low_sums, low[s], k_step_descriptor(rows, QK_ROWS, s));
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < THREAD_SUMS; i++) sums[i] += low_sums[i];
}

// R from S0^T k. A non-finite value becomes zero and marks its node, because it would reach all nodes.
__device__ __forceinline__ void make_rhs(float (&x)[THREAD_SUMS], SharedStorage& smem, const float (&column_factor)[2],
                                         int column) {
    const int t = threadIdx.x % 4;
    float check = 0.0f;
#pragma unroll
    for (int jt = 0; jt < TILES; jt++) {
        const int i = 8 * jt + 2 * t;
        const float4 gate = *(const float4*)&smem.gates[i];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float* v = smem.v + swizzled(i, column + 8 * h);
            float (&own)[2] = *(float (*)[2])(x + 4 * jt + 2 * h);
            own[0] = gate.y * (v[0] - own[0] * (gate.x * column_factor[h]));
            own[1] = gate.w * (v[COLUMNS] - own[1] * (gate.z * column_factor[h]));
            check = fmaf(own[0], 0.0f, fmaf(own[1], 0.0f, check));
        }
    }
    if (check == 0.0f) return;
    u32 nonfinite = 0;
#pragma unroll
    for (int i = 0; i < THREAD_SUMS; i++) {
        const bool finite = fabsf(x[i]) < INF;
        nonfinite |= finite ? 0 : 1u << i / 4 * 8 + i % 2;
        x[i] = finite ? x[i] : 0.0f;
    }
    if (nonfinite) atomicOr(&smem.nonfinite, nonfinite << 2 * t);
}

// Called by warpgroup 1, for warpgroup 0.
__device__ __forceinline__ void store_o_from_state(const float (&x)[THREAD_SUMS], SharedStorage& smem,
                                                   const float (&column_factor)[2]) {
#pragma unroll
    for (int jt = 0; jt < TILES; jt++) {
        const float4 gate = *(const float4*)&smem.gates[8 * jt + threadIdx.x % 4 * 2];
        smem.o_from_state[jt][threadIdx.x % WARPGROUP_THREADS] =
            make_float4(x[4 * jt] * (gate.x * column_factor[0]), x[4 * jt + 1] * (gate.z * column_factor[0]),
                        x[4 * jt + 2] * (gate.x * column_factor[1]), x[4 * jt + 3] * (gate.z * column_factor[1]));
    }
}

// e^(G_i - G_j) times the operand scales, and -beta for A; zero if j is not on the path of i. 16 nodes i per warp.
__device__ __forceinline__ void decay_matrix(float (&decay)[THREAD_SUMS], const SharedStorage& smem, bool is_key,
                                             int i0) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = i0 + 8 * h;
        const u32 path = ((u32)smem.ancestors[i] & (is_key ? ~(1u << i) : WARP_ALL)) >> 2 * t;
        const float2 sum = smem.log_decay_sum[i];
        const float scale = is_key ? smem.gates[i].y * (-1.0f / (K_SCALE * K_SCALE)) : 1.0f / (K_SCALE * Q_SCALE);
#pragma unroll
        for (int jt = 0; jt < TILES; jt++) {
            const float4 of = *(const float4*)&smem.log_decay_sum[8 * jt + 2 * t];
            const float x = scale * exp2_approx((sum.x - of.x) + (sum.y - of.y)),
                        y = scale * exp2_approx((sum.x - of.z) + (sum.y - of.w));
            decay[4 * jt + 2 * h] = path >> 8 * jt & 1 ? x : 0.0f;
            decay[4 * jt + 2 * h + 1] = path >> 8 * jt + 1 & 1 ? y : 0.0f;
        }
    }
}

// A and P, by warpgroup 2: two warps have keys, two have queries, 16 nodes each, times all keys.
__device__ __forceinline__ void qk_products(SharedStorage& smem, int warp) {
    const bool is_key = warp % 4 < 2;
    const int t = threadIdx.x % 4, i0 = warp % 2 * 16 + threadIdx.x % 32 / 4;
    const u32 rows = shared_address(smem.qk_rows);
    float decay[THREAD_SUMS], sums[THREAD_SUMS] = {}, low_sums[THREAD_SUMS] = {};
    named_barrier_sync(GATES_READY);
    decay_matrix(decay, smem, is_key, i0);
    mbarrier_wait_cluster(shared_address(&smem.qk_barrier));
    fence_proxy_async();
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 8; s++) {
        const u64 high = k_step_descriptor(rows, QK_ROWS, s),
                  low = k_step_descriptor(rows + LOW_PLANE(QK_ROWS), QK_ROWS, s);
        wgmma(sums, high, high);
        wgmma(low_sums, high, low);
        wgmma(low_sums, low, high);
    }
    wgmma_commit();
    wgmma_wait<0>();
    float check = 0.0f;
#pragma unroll
    for (int i = 0; i < THREAD_SUMS; i++) {
        // An entry that is masked out may hold anything.
        sums[i] = decay[i] == 0.0f ? 0.0f : (sums[i] + low_sums[i]) * decay[i];
        check = fmaf(sums[i], 0.0f, check);
    }
    // A non-finite value in A would reach all nodes; in P only its own.
    if (is_key && check != 0.0f) {
        u32 nonfinite = 0;
#pragma unroll
        for (int i = 0; i < THREAD_SUMS; i++) {
            const bool finite = fabsf(sums[i]) < INF;
            nonfinite |= finite ? 0 : 1u << i % 4 / 2 * 8;
            sums[i] = finite ? sums[i] : 0.0f;
        }
        if (nonfinite) atomicOr(&smem.nonfinite, nonfinite << i0);
    }
    if (is_key) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = warp % 2 ? sums[(8 + 6 * h) % THREAD_SUMS] : sums[6 * h],
                        y = warp % 2 ? sums[(9 + 6 * h) % THREAD_SUMS] : sums[6 * h + 1];
            *(float2*)(smem.diagonal + (i0 + 8 * h) * DIAGONAL_STRIDE + 2 * t) = make_float2(x, y);
        }
        named_barrier_arrive(DIAGONAL_READY);
    }
    float* pairs = is_key ? smem.a : smem.p;
#pragma unroll
    for (int i = 0; i < THREAD_SUMS; i += 2) {
        // Entries right of the warp's rows are zero, and the diagonal blocks of A hold the inverses.
        if (i == 8 && warp % 2 == 0) break;
        const int row = i0 + i % 4 / 2 * 8, j = i / 4 * 8 + 2 * t;
        if (is_key && row / 8 == j / 8) continue;
        *(float4*)(pairs + row * PAIRS_STRIDE + 2 * j) = tf32_pairs(sums[i], sums[i + 1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_ATTRIBUTE
    gated_delta_wy_tree_sm90(const Step* step, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha,
                             const float* beta, u32 ld_beta, const float* window, u64 window_stride,
                             const float* weight, const float* a, const float* dt, const float* state, u64 state_stride,
                             float* factors, u64 factor_stride,
#if NORM
                             const float* z, u32 ld_z, const float* norm, float eps, RowOutput out
#else
                             float* o
#endif
    ) {
    extern __shared__ __align__(1024) u8 memory[];
    SharedStorage& smem = *(SharedStorage*)memory;
    const int tid = threadIdx.x, lane = tid % 32, warp = warp_index(), group = warp / 4;
    const BlockWork work = block_work();
    // Many blocks start only when a block of the previous kernel leaves their SM, so everything before the first load
    // of x is on the critical path. The step header, state and window are older than the previous kernel: no pdl_wait
    // is needed for them.
    const int trees = step->trees;
    const Tree tree = step->tree[0];
#if NORM
    pdl_launch();
#endif
    constexpr int COLUMNS_PER_WARP = COLUMNS / WARPS;  // state columns that a warp splits
    // Issued before it is known whether there is a tree at all.
    const float* s0 = slot_ptr(state, trees < 1 ? 0 : tree.slot, state_stride) +
                      ((u64)work.head * HEAD_DIM + work.first_column + warp * COLUMNS_PER_WARP) * HEAD_DIM + 4 * lane;
    float4 state_columns[COLUMNS_PER_WARP];
#pragma unroll
    for (int i = 0; i < COLUMNS_PER_WARP; i++) state_columns[i] = load_state_once(s0 + i * HEAD_DIM);
    if (trees < 1) {
        pdl_wait();
        return;
    }
    const int nodes = tree.nodes;
    ConvTasks tasks(warp, nodes);
    ConvTask task = tasks.task();
    load_conv_weights<BLOCK_CHANNELS, THREADS>(smem.weight, weight, work.key, work.v_channels);
    const u32 taps = step->conv_sources[tree.first + min(task.node, nodes - 1)];
    // Gate warp: the ancestors 1, 2, 4, 8 and 16 levels above the lane's node, negative if there is none.
    int jump_parents[5];
    float gate_a, gate_dt;
    if (warp == WARPS - 1) {
        jump_parents[0] = lane < nodes ? max(step->parent[tree.first + lane] - tree.first, -1) : -1;
        gate_a = a[work.head], gate_dt = dt[work.head];
    }
    if (tid < MAX_NODES) {
        smem.ancestors[tid] = tid < nodes ? step->ancestors[tree.first + tid] : 0;
        smem.taps[tid] = tid < nodes ? step->conv_sources[tree.first + tid] : 0;
    }
    if (tid == 0) {
        mbarrier_init(shared_address(&smem.qk_barrier), 1);
        mbarrier_init(shared_address(&smem.squares_barrier), 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(shared_address(&smem.qk_barrier), 2 * nodes * 512);
        mbarrier_arrive_expect_tx(shared_address(&smem.squares_barrier), 2 * SLICES * NODES * 4);
        smem.nonfinite = 0;
    }
    __syncwarp();
    // The mbarrier fence already covers what peers need; arrive.release would wait for all outstanding loads.
    cluster_arrive_relaxed();
    const float* slot_window = slot_ptr(window, tree.slot, window_stride);
    prefetch_window<BLOCK_CHANNELS, THREADS>(slot_window, work.key, work.v_channels);
    // Nodes that pad the bucket are zero.
#pragma unroll 1
    for (int i = nodes + warp; i < NODES; i += WARPS) {
#pragma unroll
        for (int part = 0; part < 4; part++)
            *(u64*)(smem.qk_rows + operand_offset(QK_ROWS, (part & 1) * MAX_NODES + i, lane) +
                    (part & 2 ? LOW_PLANE(QK_ROWS) : 0)) = 0;
#pragma unroll
        for (int v = 0; v < COLUMNS; v += 32) smem.v[i * COLUMNS + v + lane] = 0.0f;
    }
    u32 peer_offset[CLUSTER];  // from this block's shared memory to each peer's
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) peer_offset[r] = mapa(shared_address(memory), r) - shared_address(memory);
    if (warp == WARPS - 1) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int grandparent = __shfl_sync(WARP_ALL, jump_parents[i], max(jump_parents[i], 0));
            jump_parents[i + 1] = jump_parents[i] < 0 ? jump_parents[i] : grandparent;
        }
    }
    const ConvInput source = {x + (u64)tree.first * ld_x, slot_window + (TAPS - 1) * CHANNELS, ld_x};
    float* node_out = slot_ptr(factors, tree.slot, factor_stride);
    const float* from[TAPS];
    source.addresses(from, taps, task.channel(work));
#pragma unroll
    for (int i = 0; i < TAPS; i++) asm volatile("" : "+l"(from[i]));  // else computed after the wait
#if NORM
    // A thread of the last two warpgroups norms eight columns of a node: neighboring lanes have neighboring nodes, the
    // layout of A16 rows.
    const int norm_lane = tid % (2 * WARPGROUP_THREADS), norm_node = norm_lane / 64 * 8 + norm_lane % 8,
              norm_column = norm_lane % 64 / 8 * 8;
    float4 gate[2], norm_weight[2];
#pragma unroll
    for (int i = 0; i < 2; i++) norm_weight[i] = __ldg((const float4*)(norm + work.first_column + norm_column) + i);
#endif
    // The compiler does not move the code above past a branch.
    if (nodes > 0) pdl_wait();

    // The loads of the previous kernel's results are in flight while the state is split.
    float4 next[TAPS];
    float gate_inputs[2];
    if (warp == WARPS - 1) {
        const u64 at = tree.first + min(lane, nodes - 1);
        gate_inputs[0] = alpha[at * ld_alpha + work.head], gate_inputs[1] = beta[at * ld_beta + work.head];
    } else {
#pragma unroll
        for (int i = 0; i < TAPS; i++) next[i] = load_in_order(from[i]);
    }
#if NORM
    if (group >= 2) {
        const float* z_row = z + (u64)(tree.first + min(norm_node, nodes - 1)) * ld_z + work.head * HEAD_DIM +
                             work.first_column + norm_column;
#pragma unroll
        for (int i = 0; i < 2; i++) gate[i] = __ldcg((const float4*)z_row + i);
    }
#else
    pdl_launch();  // after the wait, for gated_norm.cu
#endif
    if (nodes > 0) {  // likewise
#pragma unroll
        for (int i = 0; i < COLUMNS_PER_WARP; i++)
            store_state_column<COLUMNS>(smem.state, smem.column_scale, warp * COLUMNS_PER_WARP + i, state_columns[i]);
    }
    cp_async_wait<0>();
    cluster_wait();
    __syncthreads();
    Weights w;
    const auto fetch_weights = [&]() {
#pragma unroll
        for (int c = 0; c < 4; c++) w.channel[c] = *(const float4*)&smem.weight[c][task.part * HEAD_DIM + task.within];
    };
    fetch_weights();

    if (warp == WARPS - 1) {
        float g = gate_inputs[0], rate = gate_inputs[1];
        g = lane < nodes ? log_decay(g, gate_a, gate_dt) : 0.0f;
        rate = lane < nodes ? __fdividef(1.0f, 1.0f + __expf(-rate)) : 0.0f;
        i64 sum = __float2ll_rn(fminf(fmaxf(g, -1e5f), 1e5f) * (LOG2_E * G_SCALE));
#pragma unroll
        for (int i = 0; i < 5; i++) {
            const i64 more = __shfl_sync(WARP_ALL, sum, max(jump_parents[i], 0));
            sum += jump_parents[i] < 0 ? 0 : more;
        }
        const float nearest = (float)sum, remainder = (float)(sum - __float2ll_rn(nearest));
        smem.log_decay_sum[lane] = make_float2(nearest * (1.0f / G_SCALE), remainder * (1.0f / G_SCALE));
        smem.gates[lane] = make_float2(exp2_approx(nearest * (1.0f / G_SCALE)), rate);
        named_barrier_arrive(GATES_READY);
        if (lane < nodes && work.slice == 0) node_out[(u64)lane * NODE_FLOATS + NODE_G + work.head] = g;
        if (lane < nodes && !(fabsf(g) < INF)) atomicOr(&smem.nonfinite, 1u << lane);
    } else {
        const bool writes_factors = BLOCKS_PER_K_HEAD <= CLUSTER || blockIdx.x % BLOCKS_PER_K_HEAD < CLUSTER;
        const u32 rows = shared_address(smem.qk_rows), qk_barrier = shared_address(&smem.qk_barrier);
#pragma unroll 1
        while (tasks.more()) {
            float4 in[TAPS];
#pragma unroll
            for (int i = 0; i < TAPS; i++) in[i] = next[i];
            const ConvTask finished = task;
            const float4 y = convolve(w, in[0], in[1], in[2], in[3]);
            tasks.next();
            if (tasks.more()) {
                task = tasks.task();
                source.addresses(from, smem.taps[min(task.node, nodes - 1)], task.channel(work));
#pragma unroll
                for (int i = 0; i < TAPS; i++) next[i] = *(const float4*)from[i];
                fetch_weights();
            }
            float* node_factors = node_out + (u64)finished.node * NODE_FLOATS;
            if (finished.part < 2) {
                const float4 unit = normalize_head(y, finished.part * K_HEADS);
                const uint4 h = split_f16(unit, finished.part ? K_SCALE : Q_SCALE);
                const u32 to =
                    rows + operand_offset(QK_ROWS, finished.part ? finished.node : MAX_NODES + finished.node, lane);
#pragma unroll
                for (int r = 0; r < CLUSTER; r++) {
                    st_async(to + peer_offset[r], h.x, h.y, qk_barrier + peer_offset[r]);
                    st_async(to + LOW_PLANE(QK_ROWS) + peer_offset[r], h.z, h.w, qk_barrier + peer_offset[r]);
                }
                if (writes_factors) {
                    *(float4*)(node_factors + NODE_X + finished.channel(work)) = in[3];
                    if (finished.part) *(float4*)(node_factors + work.key * HEAD_DIM + finished.within) = unit;
                }
            } else if (finished.node < nodes) {
                *(float4*)(smem.v + swizzled(finished.node, finished.within)) = y;
                *(float4*)(node_factors + NODE_X + finished.channel(work)) = in[3];
            }
        }
    }

    if (group < 2) {
        // A warp has 16 columns.
        const int column16 = warp % 4 * 16, column = column16 + lane / 4, first_node = lane % 4 * 2;
        float sums[THREAD_SUMS] = {};
        state_products(sums, smem, shared_address(smem.qk_rows) + group * (MAX_NODES * 128), column16);
        const float scale = 1.0f / (group == 0 ? K_SCALE : Q_SCALE);
        const float column_factor[2] = {smem.column_scale[column] * scale, smem.column_scale[column + 8] * scale};
        named_barrier_sync(CONV_DONE);
        if (group == 1) {
            store_o_from_state(sums, smem, column_factor);
            named_barrier_arrive(SYSTEM_READY);
            return;
        }
        make_rhs(sums, smem, column_factor, column);
        named_barrier_sync(SYSTEM_READY);
        AccumulatorTile u[TILES], o_tiles[TILES];
#pragma unroll
        for (int i = 0; i < THREAD_SUMS; i++) u[i / 4].x[i % 4] = sums[i];
#pragma unroll
        for (int jt = 0; jt < TILES; jt++) {
            const float4 c = smem.o_from_state[jt][tid];
            o_tiles[jt].x[0] = c.x, o_tiles[jt].x[1] = c.y, o_tiles[jt].x[2] = c.z, o_tiles[jt].x[3] = c.w;
        }
        solve(u, o_tiles, smem.a, smem.p);
        // Sum i of a thread is column `column + i % 4 / 2 * 8` of this node.
        const auto node_of = [&](int i) { return i / 4 * 8 + first_node + i % 2; };
        const u32 nonfinite = smem.nonfinite;
        if (nonfinite) {
#pragma unroll
            for (int i = 0; i < THREAD_SUMS; i++) {
                if ((u32)smem.ancestors[node_of(i)] & nonfinite) u[i / 4].x[i % 4] = o_tiles[i / 4].x[i % 4] = NAN_F;
            }
        }
#if NORM
#pragma unroll
        for (int i = 0; i < THREAD_SUMS; i++)
            smem.o[node_of(i) * O_STRIDE + column + i % 4 / 2 * 8] = o_tiles[i / 4].x[i % 4];
        named_barrier_arrive(O_READY);
#else
        float* o_out = o + (u64)tree.first * V_WIDTH + work.head * HEAD_DIM + work.first_column + column;
#pragma unroll
        for (int i = 0; i < THREAD_SUMS; i++)
            if (node_of(i) < nodes) o_out[(u64)node_of(i) * V_WIDTH + i % 4 / 2 * 8] = o_tiles[i / 4].x[i % 4];
#endif
        float* u_out = node_out + NODE_U + work.head * HEAD_DIM + work.first_column + column;
#pragma unroll
        for (int i = 0; i < THREAD_SUMS; i++)
            if (node_of(i) < nodes) u_out[(u64)node_of(i) * NODE_FLOATS + i % 4 / 2 * 8] = u[i / 4].x[i % 4];
        return;
    }
    named_barrier_arrive(CONV_DONE);
    if (group == 2) {
        qk_products(smem, warp);
        named_barrier_arrive(SYSTEM_READY);
    } else if (warp == QK_WARPS) {
        named_barrier_sync(DIAGONAL_READY);
        invert_diagonal_blocks(smem.a, smem.diagonal);
        named_barrier_arrive(SYSTEM_READY);
    }
#if NORM
#pragma unroll
    for (int i = 0; i < 2; i++) {
        gate[i].x = silu_approx(gate[i].x) * norm_weight[i].x, gate[i].y = silu_approx(gate[i].y) * norm_weight[i].y;
        gate[i].z = silu_approx(gate[i].z) * norm_weight[i].z, gate[i].w = silu_approx(gate[i].w) * norm_weight[i].w;
    }
    named_barrier_sync(O_READY);
    if (norm_node >= NODES) return;
    float4 y[2];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        y[i] = *(const float4*)(smem.o + norm_node * O_STRIDE + norm_column + 4 * i);
        sum = fmaf(y[i].x, y[i].x, fmaf(y[i].y, y[i].y, fmaf(y[i].z, y[i].z, fmaf(y[i].w, y[i].w, sum))));
    }
    sum += __shfl_xor_sync(WARP_ALL, sum, 8);
    sum += __shfl_xor_sync(WARP_ALL, sum, 16);
    // A warp has half of the block's columns of eight nodes and sends its sum of squares to both blocks of the head.
    if (lane < 16) {
        const int to = cluster_rank() / SLICES * SLICES + lane / 8;
        const float* square = &smem.squares[2 * work.slice + norm_lane % 64 / 32][norm_node];
        st_async(mapa(shared_address(square), to), sum, mapa(shared_address(&smem.squares_barrier), to));
    }
    mbarrier_wait_cluster(shared_address(&smem.squares_barrier));
    if (norm_node >= nodes) return;
    sum = (smem.squares[0][norm_node] + smem.squares[1][norm_node]) +
          (smem.squares[2][norm_node] + smem.squares[3][norm_node]);
    const float factor = rsqrtf(sum * (1.0f / HEAD_DIM) + eps);
    const float normed[8] = {y[0].x * factor * gate[0].x, y[0].y * factor * gate[0].y, y[0].z * factor * gate[0].z,
                             y[0].w * factor * gate[0].w, y[1].x * factor * gate[1].x, y[1].y * factor * gate[1].y,
                             y[1].z * factor * gate[1].z, y[1].w * factor * gate[1].w};
    store_row_8(out, tree.first + norm_node, work.head * HEAD_DIM + work.first_column + norm_column, normed);
#endif
}
