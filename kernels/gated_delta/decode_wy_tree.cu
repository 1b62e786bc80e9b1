// Gated delta rule, decode of draft trees in WY form: convolution, norms and gates, then u and o of all nodes at once
// from one read of the state, which is not modified.
//
// Convolution and gates: see conv.cuh. With G_i the sum of g over the path root..i, anc(i) the strict ancestors and S0
// the committed state:
//   A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j in anc(i);   R_i = beta_i (v_i - e^(G_i) S0^T k_i)
//   (I + A) U = R;   o_i = e^(G_i) S0^T q_i + sum_(j in anc(i) or j = i) P_ij u_j, P_ij = e^(G_i - G_j) (q_i . k_j)
//
// in   x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [V_HEADS],
//      state [slot][V_HEADS][128 v][128 k]
// out  o [rows][V_WIDTH]; k, u, g and x of each node in the factors
// grid (V_HEADS * 128 / COLUMNS, 1, trees) x 32 WARPS threads: a block has COLUMNS value columns of one head of one
//      tree. Blocks of one key head are neighbors. On sm_90 and up, CLUSTER of them form a cluster that convolves q and
//      k together: each block has a part of the rows and writes it to the shared memory of all.
// smem SharedStorage, all dynamic
// arch sm_80 and up     reference cpu::reference::{conv, delta}::tree     test gated_delta::delta_tree_*
//
// Products use f16 pairs on the tensor cores (split_f16.cuh), 22 bits: keys and queries are unit vectors times a power
// of two, state columns have a scale each. Both are split once, when they are stored to shared memory; the state before
// pdl_wait. A node's sums do not depend on the number of nodes. The triangular system is solved in blocks of 32 nodes,
// one thread per column. A node with a non-finite value is excluded, and it and its descendants get NaN; nothing else
// changes. G is in fixed point (2^-40), so sums along paths are exact in any order.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/split_f16.cuh"
#include "gated_delta/conv.cuh"
#include "gated_delta/tree_conv.cuh"

#define THREADS (WARPS * 32)
#define TILES (NODES / 8)
#define SLICES (HEAD_DIM / COLUMNS)
#define BLOCKS_PER_K_HEAD (V_HEADS / K_HEADS * SLICES)
#define BLOCK_CHANNELS (2 * HEAD_DIM + COLUMNS)  // channels of a block: q, k, v
#define LANES_PER_V_ROW (COLUMNS / 4)
#define V_ROWS_PER_WARP (32 / LANES_PER_V_ROW)  // rows of v that a warp convolves at once
#define CONV_WARPS (WARPS - 1)                  // the last warp computes the gates
#define QK_ROWS (2 * NODES)                     // keys, then queries
#define LD (NODES + 4)
#define NODES_PER_LANE ((NODES + 31) / 32)
#define K_SCALE 256.0f
#define Q_SCALE 2048.0f
#define G_SCALE 1099511627776.0f  // 2^40

// A node's columns are at `swizzled`. crates/cuda/src/launch/gated_delta/decode.rs computes the size.
struct SharedStorage {
    union {
        u8 rows[QK_ROWS * 512];           // keys, then queries
        float u_solved[NODES * COLUMNS];  // U
    };
    union {
        struct {
            u8 state[COLUMNS * 512];
            float weight[4][BLOCK_CHANNELS];  // of channel c: [c % 4][c / 4] in units of 4 taps
            int4 taps[NODES];                 // conv input rows, oldest first
        };
        struct {
            float o_from_state[NODES * COLUMNS];  // S0^T q part of o
            // row i up to the diagonal: P_ij; right of it, row j: A_ij of later nodes i
            float pair_terms[NODES * LD];
        };
    };
    float rhs[NODES * COLUMNS];  // v, then R
    i64 log_decay_sum[NODES];    // G
    u64 ancestors[NODES];
    float2 gates[NODES];  // e^G, beta
    int parents[NODES];
    float column_scale[COLUMNS];
    u32 nonfinite[2];  // bit mask of nodes
};

__device__ __forceinline__ int swizzled(int node, int column) {
    return node * COLUMNS + (column ^ ((node >> 1 & 3) << 3));
}

// Cluster barrier arrive. With `wrote`, this thread's writes to peer shared memory are visible after their wait; that
// costs a GPU-wide fence, which also waits for its writes to global memory.
__device__ __forceinline__ void arrive_at_peers(bool wrote) {
#if CLUSTER > 1
    if (wrote)
        cluster_arrive_release();
    else
        cluster_arrive_relaxed();
#endif
}
__device__ __forceinline__ void wait_for_peers() {
#if CLUSTER > 1
    cluster_wait();
#endif
}

// Stores both parts of four values at the same offset in every block of the cluster.
__device__ __forceinline__ void store_to_cluster(u32 to, uint4 v) {
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
        u32 peer = to;
#if CLUSTER > 1
        peer = mapa(to, r);
        asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(peer), "r"(v.x), "r"(v.y) : "memory");
        asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(peer + LOW_PLANE(QK_ROWS)), "r"(v.z), "r"(v.w)
                     : "memory");
#else
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(peer), "r"(v.x), "r"(v.y) : "memory");
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(peer + LOW_PLANE(QK_ROWS)), "r"(v.z), "r"(v.w)
                     : "memory");
#endif
    }
}

// A non-finite value becomes zero and marks its node.
__device__ __forceinline__ void zero_if_nonfinite(float& x, SharedStorage& smem, int node) {
    if (fabsf(x) < INF) return;
    atomicOr(&smem.nonfinite[node / 32], 1u << node % 32);
    x = 0.0f;
}

// Stores R and the S0^T q part of o from products x, y of column v with nodes i and i + 1. Returns non-zero if one of
// them is not finite.
__device__ __forceinline__ float store_state_products(SharedStorage& smem, bool is_key, int i, int v, float scale,
                                                      float x, float y) {
    const float4 gate = *(const float4*)&smem.gates[i];
    float* to = (is_key ? smem.rhs : smem.o_from_state) + swizzled(i, v);
    scale *= is_key ? 1.0f / K_SCALE : 1.0f / Q_SCALE;
    x *= gate.x * scale, y *= gate.z * scale;
    if (is_key) x = gate.y * (to[0] - x), y = gate.w * (to[COLUMNS] - y);
    to[0] = x, to[COLUMNS] = y;
    return fmaf(y, 0.0f, x * 0.0f);
}
// Zeroes the non-finite ones among these of `count` nodes.
__device__ __forceinline__ void zero_nonfinite_state(SharedStorage& smem, bool is_key, int first, int count, int v) {
#pragma unroll 1
    for (int i = first; i < first + count; i++)
        zero_if_nonfinite((is_key ? smem.rhs : smem.o_from_state)[swizzled(i, v)], smem, i);
}

// e^(G_i - G_j); zero if j is not on the path of i.
__device__ __forceinline__ float decay_between(const SharedStorage& smem, u64 path, i64 sum, int j) {
    return path >> j & 1 ? expf((float)(sum - smem.log_decay_sum[j]) * (1.0f / G_SCALE)) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_ATTRIBUTE
    gated_delta_wy_tree(const Step* step, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha, const float* beta,
                        u32 ld_beta, const float* window, u64 window_stride, const float* weight, const float* a,
                        const float* dt, const float* state, u64 state_stride, float* factors, u64 factor_stride,
                        float* o) {
    extern __shared__ __align__(1024) u8 memory[];
    SharedStorage& smem = *(SharedStorage*)memory;
    const int tid = threadIdx.x;
    const int warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int key = blockIdx.x / BLOCKS_PER_K_HEAD, head_of_key = blockIdx.x % BLOCKS_PER_K_HEAD / SLICES,
              slice = blockIdx.x % SLICES;
#if GROUPED
    const int head = key * (V_HEADS / K_HEADS) + head_of_key;
#else
    const int head = head_of_key * K_HEADS + key;
#endif
    const int first_column = slice * COLUMNS, v_channels = 2 * K_WIDTH + head * HEAD_DIM + first_column;
    // The step header, state and window are older than the previous kernel, which has waited for them, so no pdl_wait
    // here.
    if ((int)blockIdx.z >= step->trees) {
        pdl_wait();
        return;
    }
    arrive_at_peers(false);
    const Tree tree = step->tree[blockIdx.z];
    const int nodes = tree.nodes, tiles = (nodes + 7) / 8;
    constexpr int COLUMNS_PER_WARP = COLUMNS / WARPS;  // state columns that a warp splits
    const float* s0 = slot_ptr(state, tree.slot, state_stride) +
                      ((u64)head * HEAD_DIM + first_column + warp * COLUMNS_PER_WARP) * HEAD_DIM + 4 * lane;
    float4 state_columns[COLUMNS_PER_WARP];
#pragma unroll
    for (int i = 0; i < COLUMNS_PER_WARP; i++) state_columns[i] = load_state_once(s0 + i * HEAD_DIM);
    const float* slot_window = slot_ptr(window, tree.slot, window_stride);
    load_conv_weights<BLOCK_CHANNELS, THREADS>(smem.weight, weight, key, v_channels);
    prefetch_window<BLOCK_CHANNELS, THREADS>(slot_window, key, v_channels);
    if (tid < NODES) {
        const int row = tree.first + tid;
        smem.ancestors[tid] = tid < nodes ? step->ancestors[row] : 0;
        smem.parents[tid] = tid < nodes ? max(step->parent[row] - tree.first, -1) : -1;
    }
    // Nodes that pad the last tile are zero.
#pragma unroll 1
    for (int i = nodes + warp; i < 8 * tiles; i += WARPS) {
#pragma unroll
        for (int part = 0; part < 4; part++)
            *(u64*)(smem.rows + operand_offset(QK_ROWS, (part & 1) * NODES + i, lane) +
                    (part & 2 ? LOW_PLANE(QK_ROWS) : 0)) = 0;
#pragma unroll
        for (int v = 0; v < COLUMNS; v += 32) smem.rhs[i * COLUMNS + v + lane] = 0.0f;
    }
    if (tid < 2) smem.nonfinite[tid] = 0;
    const float own_a = a[head], own_dt = dt[head];
#pragma unroll
    for (int i = 0; i < COLUMNS_PER_WARP; i++)
        store_state_column<COLUMNS>(smem.state, smem.column_scale, warp * COLUMNS_PER_WARP + i, state_columns[i]);
    __syncthreads();
    if (tid < nodes) {
        int taps[TAPS];
        tap_rows(taps, smem.parents, tid);
        smem.taps[tid] = make_int4(taps[0], taps[1], taps[2], taps[3]);
    }
    cp_async_wait<0>();
    __syncthreads();
    const ConvInput source = {x + (u64)tree.first * ld_x, slot_window + (TAPS - 1) * CHANNELS, ld_x};
    float* node_out = slot_ptr(factors, tree.slot, factor_stride);
    wait_for_peers();
    pdl_wait();
    pdl_launch();  // after the wait, for gated_norm.cu

    if (warp == WARPS - 1) {
        arrive_at_peers(false);
        float own[NODES_PER_LANE], rate[NODES_PER_LANE];
#pragma unroll
        for (int h = 0; h < NODES_PER_LANE; h++) {
            const u64 at = tree.first + min(lane + 32 * h, nodes - 1);
            own[h] = alpha[at * ld_alpha + head], rate[h] = beta[at * ld_beta + head];
        }
#pragma unroll
        for (int h = 0; h < NODES_PER_LANE; h++) {
            const int i = lane + 32 * h;
            own[h] = i < nodes ? log_decay(own[h], own_a, own_dt) : 0.0f;
            rate[h] = i < nodes ? 1.0f / (1.0f + expf(-rate[h])) : 0.0f;
            if (i < NODES) smem.log_decay_sum[i] = __float2ll_rn(fminf(fmaxf(own[h], -1e5f), 1e5f) * G_SCALE);
        }
        __syncwarp();
        i64 sum[NODES_PER_LANE] = {};
        u64 path[NODES_PER_LANE];
#pragma unroll
        for (int h = 0; h < NODES_PER_LANE; h++) path[h] = smem.ancestors[min(lane + 32 * h, NODES - 1)];
#pragma unroll 4
        for (int j = 0; j < NODES; j++) {
            const i64 g_j = smem.log_decay_sum[j];
#pragma unroll
            for (int h = 0; h < NODES_PER_LANE; h++) sum[h] += path[h] >> j & 1 ? g_j : 0;
        }
        __syncwarp();
#pragma unroll
        for (int h = 0; h < NODES_PER_LANE; h++) {
            const int i = lane + 32 * h;
            if (i < NODES) {
                smem.log_decay_sum[i] = sum[h];
                smem.gates[i] = make_float2(expf((float)sum[h] * (1.0f / G_SCALE)), rate[h]);
            }
            if (i < nodes && slice == 0) node_out[(u64)i * NODE_FLOATS + NODE_G + head] = own[h];
            if (i < nodes && own[h] != own[h]) zero_if_nonfinite(own[h], smem, i);
        }
    } else {
        // The first warps have rows of q and k, which the cluster waits for, the others rows of v. If there are many
        // rows, all warps have both.
        const bool writes_factors = BLOCKS_PER_K_HEAD <= CLUSTER || blockIdx.x % BLOCKS_PER_K_HEAD < CLUSTER;
        const int rank = cluster_rank(), qk_tasks = (2 * nodes - rank + CLUSTER - 1) / CLUSTER;
        const int tasks = qk_tasks + (nodes + V_ROWS_PER_WARP - 1) / V_ROWS_PER_WARP;
        const bool split_roles = 2 * qk_tasks <= CONV_WARPS + 1;
        const bool has_qk_rows = warp < qk_tasks;
        const int stride = !split_roles ? CONV_WARPS : has_qk_rows ? tasks : CONV_WARPS - qk_tasks;
        float4 next[TAPS];
        int node = 0, part = 0, within = 0, channel = 0;
        const auto begin = [&](int task) {
            part = task < qk_tasks ? rank + CLUSTER * task & 1 : 2;
            node = task < qk_tasks ? rank + CLUSTER * task >> 1
                                   : (task - qk_tasks) * V_ROWS_PER_WARP + lane / LANES_PER_V_ROW;
            within = task < qk_tasks ? 4 * lane : lane % LANES_PER_V_ROW * 4;
            channel = (part == 2 ? v_channels : part * K_WIDTH + key * HEAD_DIM) + within;
            source.fetch(next, smem.taps[min(node, nodes - 1)], channel);
        };
        bool arrived = false;
        if (warp < tasks) begin(warp);
#pragma unroll 1
        for (int task = warp; task < tasks; task += stride) {
            float4 in[TAPS];
#pragma unroll
            for (int i = 0; i < TAPS; i++) in[i] = next[i];
            float* to = node_out + (u64)node * NODE_FLOATS;
            float* to_x = to + NODE_X + channel;
            const int done_node = node, done_part = part, own = within;
            if (task + stride < tasks) begin(task + stride);
            const float4 y = conv_silu(smem.weight, in, done_part * HEAD_DIM + own);
            if (done_part == 2) {
                if (!arrived) arrive_at_peers(false), arrived = true;
                if (done_node < nodes) {
                    *(float4*)(smem.rhs + swizzled(done_node, own)) = y;
                    *(float4*)to_x = in[3];
                }
            } else {
                const float4 unit = normalize_head(y, done_part * K_HEADS);
                store_to_cluster(shared_address(smem.rows) +
                                     operand_offset(QK_ROWS, done_part ? done_node : NODES + done_node, lane),
                                 split_f16(unit, done_part ? K_SCALE : Q_SCALE));
                // Arrive before the global stores, because the arrival waits for this thread's earlier writes.
                if (task + stride >= qk_tasks) arrive_at_peers(true), arrived = true;
                if (writes_factors) {
                    *(float4*)to_x = in[3];
                    if (done_part) *(float4*)(to + key * HEAD_DIM + 4 * lane) = unit;
                }
            }
        }
        if (!arrived) arrive_at_peers(false);
    }
    const u32 rows_at = shared_address(smem.rows), columns_at = shared_address(smem.state);
    // A warp has 16 state columns in registers and some tiles of 8 keys or queries.
    constexpr int COLUMN_TILES = COLUMNS / 16, ROW_WARPS = WARPS / COLUMN_TILES;
    const int own16 = warp % COLUMN_TILES * 16;
    u32 high[8][4], low[8][4];
#pragma unroll
    for (int s = 0; s < 8; s++) {
        load_a_fragment(high[s], columns_at, COLUMNS, own16, own16 + 8, s);
        load_a_fragment(low[s], columns_at + LOW_PLANE(COLUMNS), COLUMNS, own16, own16 + 8, s);
    }
    wait_for_peers();
    __syncthreads();
#pragma unroll 1
    for (int index = warp / COLUMN_TILES; index < 2 * tiles; index += ROW_WARPS) {
        const bool is_key = index & 1;
        const int first_row = is_key ? index / 2 * 8 : NODES + index / 2 * 8;
        float acc_high[4] = {}, acc_cross[4] = {}, acc_low[4] = {};
#pragma unroll
        for (int s = 0; s < 8; s += 2) {
            u32 b[4], c[4];
            load_b_fragments(b, rows_at, QK_ROWS, first_row, s / 2);
            load_b_fragments(c, rows_at + LOW_PLANE(QK_ROWS), QK_ROWS, first_row, s / 2);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const u32(&h)[4] = high[s + e];
                const u32(&l)[4] = low[s + e];
                mma_f16(acc_high, h[0], h[1], h[2], h[3], b[2 * e], b[2 * e + 1]);
                mma_f16(acc_cross, h[0], h[1], h[2], h[3], c[2 * e], c[2 * e + 1]);
                mma_f16(acc_low, l[0], l[1], l[2], l[3], b[2 * e], b[2 * e + 1]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int v = own16 + g + 8 * h;
            const float product_x = acc_high[2 * h] + (acc_cross[2 * h] + acc_low[2 * h]);
            const float product_y = acc_high[2 * h + 1] + (acc_cross[2 * h + 1] + acc_low[2 * h + 1]);
            float check = store_state_products(smem, is_key, index / 2 * 8 + 2 * t, v, smem.column_scale[v], product_x,
                                               product_y);
            check += __shfl_xor_sync(WARP_ALL, check, 1);
            check += __shfl_xor_sync(WARP_ALL, check, 2);
            __syncwarp();  // one lane fixes what four lanes have stored
            if (check != 0.0f && t == 0) zero_nonfinite_state(smem, is_key, index / 2 * 8, 8, v);
        }
    }
    // 8 keys and the same 8 queries times 8 earlier keys, from the last warp on.
    int it = 0, jt = WARPS - 1 - warp;
#pragma unroll 1
    while (true) {
        while (jt > it) jt -= ++it;
        if (it >= tiles) break;
        float acc_high[4] = {}, acc_cross[4] = {}, acc_low[4] = {};
#pragma unroll
        for (int s = 0; s < 8; s += 2) {
            u32 b[4], c[4];
            load_b_fragments(b, rows_at, QK_ROWS, jt * 8, s / 2);
            load_b_fragments(c, rows_at + LOW_PLANE(QK_ROWS), QK_ROWS, jt * 8, s / 2);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 h[4], l[4];
                load_a_fragment(h, rows_at, QK_ROWS, it * 8, NODES + it * 8, s + e);
                load_a_fragment(l, rows_at + LOW_PLANE(QK_ROWS), QK_ROWS, it * 8, NODES + it * 8, s + e);
                mma_f16(acc_high, h[0], h[1], h[2], h[3], b[2 * e], b[2 * e + 1]);
                mma_f16(acc_cross, h[0], h[1], h[2], h[3], c[2 * e], c[2 * e + 1]);
                mma_f16(acc_low, l[0], l[1], l[2], l[3], b[2 * e], b[2 * e + 1]);
            }
        }
        const int i = it * 8 + g;
        const u64 path = smem.ancestors[i];
        const float rate = smem.gates[i].y * (1.0f / (K_SCALE * K_SCALE));
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int j = jt * 8 + 2 * t + e;
            const float decay = decay_between(smem, path, smem.log_decay_sum[i], j);
            const float kk = acc_high[e] + (acc_cross[e] + acc_low[e]),
                        qk = acc_high[2 + e] + (acc_cross[2 + e] + acc_low[2 + e]);
            const bool visible = path >> j & 1;
            float p = visible ? decay * (1.0f / (K_SCALE * Q_SCALE)) * qk : 0.0f,
                  w = visible ? rate * decay * kk : 0.0f;
            zero_if_nonfinite(p, smem, i), zero_if_nonfinite(w, smem, i);
            if (j <= i) smem.pair_terms[i * LD + j] = p;
            if (j < i) smem.pair_terms[j * LD + i] = w;
        }
        jt += WARPS;
    }
    __syncthreads();

    // A lane has a column, a warp groups of four rows. The first warps solve the system one block of rows at a time.
    constexpr int GROUPS = WARPS / (COLUMNS / 32);
    const int thread_column = warp / GROUPS * 32 + lane, first_row_of_warp = warp % GROUPS * 4;
    float* u_solved = smem.u_solved;
#pragma unroll 1
    for (int begin = 0; begin < 8 * tiles; begin += 32) {
#if NODES > 32
        if (begin) {
            // Contribution of the first block of nodes to R of the second.
#pragma unroll 1
            for (int i = begin + first_row_of_warp; i < 8 * tiles; i += 4 * GROUPS) {
                float r[4];
#pragma unroll
                for (int e = 0; e < 4; e++) r[e] = smem.rhs[swizzled(i + e, thread_column)];
#pragma unroll 8
                for (int j = 0; j < 32; j++) {
                    const float4 w = *(const float4*)(smem.pair_terms + j * LD + i);
                    const float u = u_solved[j * COLUMNS + thread_column];
                    r[0] = fmaf(-w.x, u, r[0]), r[1] = fmaf(-w.y, u, r[1]);
                    r[2] = fmaf(-w.z, u, r[2]), r[3] = fmaf(-w.w, u, r[3]);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) smem.rhs[swizzled(i + e, thread_column)] = r[e];
            }
            __syncthreads();
        }
#endif
        if (tid < COLUMNS) {
#pragma unroll 1
            for (int tile = begin; tile < min(begin + 32, 8 * tiles); tile += 8) {
                float u[8];
#pragma unroll
                for (int k = 0; k < 8; k++) u[k] = smem.rhs[swizzled(tile + k, tid)];
                const float* later = smem.pair_terms + begin * LD + tile;
#pragma unroll 8
                for (int j = begin; j < tile; j++, later += LD) {
                    const float4 w = *(const float4*)later, z = *(const float4*)(later + 4);
                    const float past = u_solved[j * COLUMNS + tid];
                    u[0] = fmaf(-w.x, past, u[0]), u[1] = fmaf(-w.y, past, u[1]);
                    u[2] = fmaf(-w.z, past, u[2]), u[3] = fmaf(-w.w, past, u[3]);
                    u[4] = fmaf(-z.x, past, u[4]), u[5] = fmaf(-z.y, past, u[5]);
                    u[6] = fmaf(-z.z, past, u[6]), u[7] = fmaf(-z.w, past, u[7]);
                }
#pragma unroll
                for (int k = 0; k < 7; k++) {
                    const float4 w = *(const float4*)(later + k * LD), z = *(const float4*)(later + k * LD + 4);
                    const float of[8] = {w.x, w.y, w.z, w.w, z.x, z.y, z.z, z.w};
#pragma unroll
                    for (int r = k + 1; r < 8; r++) u[r] = fmaf(-of[r], u[k], u[r]);
                }
#pragma unroll
                for (int k = 0; k < 8; k++) u_solved[(tile + k) * COLUMNS + tid] = u[k];
            }
        }
        __syncthreads();
    }
    const u64 nonfinite = (u64)smem.nonfinite[1] << 32 | smem.nonfinite[0];
    float* u_out = node_out + NODE_U + head * HEAD_DIM + first_column + thread_column;
    float* o_out = o + (u64)tree.first * V_WIDTH + head * HEAD_DIM + first_column + thread_column;
#pragma unroll 1
    for (int i = first_row_of_warp; i < 8 * tiles; i += 4 * GROUPS) {
        float out[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            out[e] = smem.o_from_state[swizzled(i + e, thread_column)];
        }
#pragma unroll 2
        for (int j = 0; j < i; j += 4) {
            float u[4];
#pragma unroll
            for (int f = 0; f < 4; f++) u[f] = u_solved[(j + f) * COLUMNS + thread_column];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float4 p = *(const float4*)(smem.pair_terms + (i + e) * LD + j);
                out[e] = fmaf(p.w, u[3], fmaf(p.z, u[2], fmaf(p.y, u[1], fmaf(p.x, u[0], out[e]))));
            }
        }
        float u[4];
#pragma unroll
        for (int f = 0; f < 4; f++) {
            u[f] = u_solved[(i + f) * COLUMNS + thread_column];
#pragma unroll
            for (int e = f; e < 4; e++) out[e] = fmaf(smem.pair_terms[(i + e) * LD + i + f], u[f], out[e]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (i + e >= nodes) break;
            const bool poisoned = smem.ancestors[i + e] & nonfinite;
            u_out[(u64)(i + e) * NODE_FLOATS] = poisoned ? NAN_F : u[e];
            o_out[(u64)(i + e) * V_WIDTH] = poisoned ? NAN_F : out[e];
        }
    }
}
