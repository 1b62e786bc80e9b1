// Gated delta rule, batch-invariant decode of draft trees in recurrent form: convolution, norms and gates of all nodes
// at once, then the recurrence node by node with the state in registers, in a DFS order that spills few states.
//
//   y, g, beta as in conv.cuh;  u = beta (v - e^g S^T k);  o = e^g S^T q + u (q . k);  S <- e^g S + k u^T
//
// Every node has the bits that decode_row_fused.cu gives for it alone, after commit.cu has advanced the state past its
// ancestors at once or one by one. The sums are those of recurrence.cuh, the state update that of state_update.cuh.
//
// The host computes the DFS schedule (crates/cuda/src/launch/gated_delta/dfs_schedule.rs). Leaves, which do not change
// the state, come first, and a node's state is spilled only while a subtree of at most half of its size is processed:
// at most four states for 64 nodes. A thread spills its own values: the first state to registers if the block has an SM
// to itself, the others to shared memory as far as it fits, the rest to global scratch.
//
// in   x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [V_HEADS],
//      state [slot][V_HEADS][128 v][128 k]
// out  o [rows][V_WIDTH]; k, u, g and x of each node in the factors
// work spill_buffer [tree][SPILLED_STATES - SHARED_SPILLS][V_HEADS][128][128]
// grid (8 V_HEADS / HEADS_PER_BLOCK, 1, trees) x 32 WARPS threads: a block has 16 value columns of each of
//      HEADS_PER_BLOCK heads of a key head. A warp with state has four columns of each of HEADS_PER_WARP of them; all
//      warps convolve. On sm_90 and up, CLUSTER blocks convolve for their key head together: one queries, one keys,
//      each for all.
// smem SharedStorage, all dynamic; crates/cuda/src/launch/gated_delta/recurrent.rs computes the size
// arch sm_80 and up     reference cpu::reference::{conv, delta}::tree
// test gated_delta_row::delta_tree_*, gated_delta::delta_tree_*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/recurrence.cuh"
#include "gated_delta/conv.cuh"
#include "gated_delta/tree_conv.cuh"

#define SLICES 8
#define SLICE_COLUMNS (HEAD_DIM / SLICES)  // columns of a block per head
#define COLUMNS (SLICE_COLUMNS * HEADS_PER_BLOCK)
#define THREADS (WARPS * 32)
// a warp with state has four columns of each of HEADS_PER_WARP heads
#define HEAD_SETS (HEADS_PER_BLOCK / HEADS_PER_WARP)
#define STATE_THREADS (HEAD_SETS * SLICE_COLUMNS / 4 * 32)  // threads that hold state
static_assert(STATE_THREADS <= THREADS, "the warps of a block hold all of its state");
#define HEAD_GROUPS (V_HEADS / K_HEADS / HEADS_PER_BLOCK)  // of heads that share a key head
#define QK_PER_BLOCK (2 / CLUSTER)                         // of q and k, how many a block convolves
#define V_PIECES (COLUMNS / 4)                             // of a node's v, four channels each
#define REGISTER_STATES (BLOCKS_PER_SM == 1)  // spilled states in registers; SPILLED_STATES counts the others
// there are registers for addresses before the wait
#define ADDRESSES_BEFORE_WAIT (BLOCKS_PER_SM == 1 && HEADS_PER_WARP == 1)
#define QK_ROW_STRIDE (WARPS / QK_PER_BLOCK)  // from a row of q or k that a warp convolves to its next
// Rows that a warp convolves at once: all of them if they are at most three and registers suffice.
#define QK_ROWS_AT_ONCE \
    (BLOCKS_PER_SM > 1 || NODES > 3 * QK_ROW_STRIDE ? 2 : (NODES + QK_ROW_STRIDE - 1) / QK_ROW_STRIDE)
// Partial products q . k that a thread adds up before the shuffles.
#define SHARES_PER_THREAD \
    (32 * NODES <= THREADS || BLOCKS_PER_SM > 2 ? 1 : 16 * NODES <= THREADS || BLOCKS_PER_SM > 1 ? 2 : 4)

// Inputs of the recurrence for one node.
struct NodeInputs {
    float q[HEAD_DIM], k[HEAD_DIM];
    float v[COLUMNS];
    float2 gates[HEADS_PER_BLOCK];              // e^g, beta
    float qk;                                   // q . k
    float unused[3 - 2 * HEADS_PER_BLOCK % 4];  // pads to 16 bytes
};

struct SharedStorage {
    alignas(16) NodeInputs inputs[NODES];
    float weight[4][COLUMNS];  // of channel c of v: [c % 4][c / 4] in units of 4 taps
    int4 taps[NODES];          // conv input rows, oldest first
    u64 qk_full;               // mbarrier: rows of q and k from the cluster have landed
    u32 visits[NODES + 1];
#if SHARED_SPILLS
    alignas(16) float4 spilled[SHARED_SPILLS][4 * HEADS_PER_WARP][STATE_THREADS];
#endif
};

// Stores four values at the same offset in every block of the cluster; counted on the receiver's mbarrier.
__device__ __forceinline__ void store_to_cluster(float* to, float4 v, u64* barrier) {
#if CLUSTER > 1
    const u32 at = shared_address(to), counter = shared_address(barrier);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) st_async(mapa(at, r), v, mapa(counter, r));
#else
    *(float4*)to = v;
#endif
}

__device__ __forceinline__ void store_global(float* to, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}

// Value head of a key head.
__device__ __forceinline__ int value_head(int key, int head_in_block) {
#if GROUPED
    return key * (V_HEADS / K_HEADS) + head_in_block;
#else
    return head_in_block * K_HEADS + key;
#endif
}

// Channel of v at index i of the block.
__device__ __forceinline__ int v_channel(int key, int group, int slice, int i) {
    return 2 * K_WIDTH + value_head(key, group * HEADS_PER_BLOCK + i / SLICE_COLUMNS) * HEAD_DIM +
           slice * SLICE_COLUMNS + i % SLICE_COLUMNS;
}

// Loads from addresses that are computed before pdl_wait, kept in program order.
__device__ __forceinline__ float load_global(u64 at) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void load_global(float4 (&in)[TAPS], const u64 (&at)[TAPS]) {
#pragma unroll
    for (int i = 0; i < TAPS; i++)
        asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(in[i].x), "=f"(in[i].y), "=f"(in[i].z), "=f"(in[i].w)
                     : "l"(at[i])
                     : "memory");
}

// Copies by operations with a zero that the compiler does not know: if it recognized copies, it would make them at
// every node.
__device__ __forceinline__ float4 opaque_copy(const float4& x, u32 zero) {
    const auto same = [&](float v) { return __uint_as_float(__float_as_uint(v) ^ zero); };
    return make_float4(same(x.x), same(x.y), same(x.z), same(x.w));
}

// This thread's values of the spilled states, by spill slot from 1.
struct SpilledStates {
#if REGISTER_STATES
    float4 in_registers[4 * HEADS_PER_WARP];
#endif
#if SHARED_SPILLS
    float4* shared;
#endif
    float4* in_global;
    __device__ __forceinline__ void spill(u32 spill_slot, const float4 (&s)[HEADS_PER_WARP][4], u32 zero) {
#if REGISTER_STATES
        if (spill_slot == 1) {
#pragma unroll
            for (int i = 0; i < 4 * HEADS_PER_WARP; i++) in_registers[i] = opaque_copy(s[i / 4][i % 4], zero);
            return;
        }
#endif
        if (SPILLED_STATES == 0) return;
        const u32 slot = spill_slot - 1 - REGISTER_STATES;
#if SHARED_SPILLS
        if (SPILLED_STATES == SHARED_SPILLS || slot < SHARED_SPILLS) {
#pragma unroll
            for (int i = 0; i < 4 * HEADS_PER_WARP; i++)
                shared[(slot * 4 * HEADS_PER_WARP + i) * STATE_THREADS] = s[i / 4][i % 4];
            return;
        }
#endif
        float4* to = in_global + (u64)(slot - SHARED_SPILLS) * (V_HEADS * HEAD_DIM * HEAD_DIM / 4);
#pragma unroll
        for (int i = 0; i < 4 * HEADS_PER_WARP; i++) to[i * STATE_THREADS] = s[i / 4][i % 4];
    }
    __device__ __forceinline__ void reload(u32 spill_slot, float4 (&s)[HEADS_PER_WARP][4], u32 zero) const {
#if REGISTER_STATES
        if (spill_slot == 1) {
#pragma unroll
            for (int i = 0; i < 4 * HEADS_PER_WARP; i++) s[i / 4][i % 4] = opaque_copy(in_registers[i], zero);
            return;
        }
#endif
        if (SPILLED_STATES == 0) return;
        const u32 slot = spill_slot - 1 - REGISTER_STATES;
#if SHARED_SPILLS
        if (SPILLED_STATES == SHARED_SPILLS || slot < SHARED_SPILLS) {
#pragma unroll
            for (int i = 0; i < 4 * HEADS_PER_WARP; i++)
                s[i / 4][i % 4] = shared[(slot * 4 * HEADS_PER_WARP + i) * STATE_THREADS];
            return;
        }
#endif
        const float4* from = in_global + (u64)(slot - SHARED_SPILLS) * (V_HEADS * HEAD_DIM * HEAD_DIM / 4);
#pragma unroll
        for (int i = 0; i < 4 * HEADS_PER_WARP; i++) s[i / 4][i % 4] = from[i * STATE_THREADS];
    }
};

// A node's inputs in registers, for the four columns of a warp in every head.
struct NodeRegisters {
    float4 k[4], q[4];
    float2 gates[HEADS_PER_WARP];
    float v[HEADS_PER_WARP];
    float qk;
    __device__ __forceinline__ void fetch_q(const NodeInputs& inputs) {
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = *(const float4*)(inputs.q + 32 * i + 4 * lane_part());
    }
    __device__ __forceinline__ void fetch_k(const NodeInputs& inputs) {
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] = *(const float4*)(inputs.k + 32 * i + 4 * lane_part());
    }
    __device__ __forceinline__ void fetch_scalars(const NodeInputs& inputs, int first, int column) {
#pragma unroll
        for (int c = 0; c < HEADS_PER_WARP; c++) {
            gates[c] = inputs.gates[first + c];
            v[c] = inputs.v[(first + c) * SLICE_COLUMNS + column];
        }
        qk = inputs.qk;
    }
};

// Output pointer: of a column's lanes, the first stores u and the second o.
struct OutputWriter {
    u64 to;
    u32 node_stride;
    __device__ __forceinline__ OutputWriter(float* u, float* o) {
        to = (u64)(lane_part() == 0 ? u : o), node_stride = lane_part() == 0 ? 4 * NODE_FLOATS : 4 * V_WIDTH;
    }
    __device__ __forceinline__ void write(int node, const float (&x)[HEADS_PER_WARP]) const {
        if (lane_part() >= 2) return;
        u64 at;
        asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(node), "r"(node_stride), "l"(to));
#pragma unroll
        for (int c = 0; c < HEADS_PER_WARP; c++)
            asm volatile("st.global.f32 [%0], %1;" ::"l"(at + c * 4 * HEAD_DIM * (GROUPED ? 1 : K_HEADS)), "f"(x[c])
                         : "memory");
    }
};

// Computes u in every lane of its column, and the value that this lane stores. Leaves the next node's query in `n`.
__device__ __forceinline__ void read_out(const float4 (&s)[HEADS_PER_WARP][4], NodeRegisters& n, const NodeInputs& next,
                                         float (&u)[HEADS_PER_WARP], float (&out)[HEADS_PER_WARP]) {
    float state_k[HEADS_PER_WARP], state_q[HEADS_PER_WARP];
#pragma unroll
    for (int c = 0; c < HEADS_PER_WARP; c++) state_k[c] = partial_dot(n.k, s[c]);
#pragma unroll
    for (int c = 0; c < HEADS_PER_WARP; c++) state_q[c] = partial_dot(n.q, s[c]);
    n.fetch_q(next);
#pragma unroll
    for (int gap = 16; gap >= 4; gap >>= 1) {
#pragma unroll
        for (int c = 0; c < HEADS_PER_WARP; c++) {
            state_k[c] += __shfl_xor_sync(WARP_ALL, state_k[c], gap);
            state_q[c] += __shfl_xor_sync(WARP_ALL, state_q[c], gap);
        }
    }
#pragma unroll
    for (int c = 0; c < HEADS_PER_WARP; c++) {
        u[c] = delta_u(n.gates[c].y, n.gates[c].x, n.v[c], state_k[c]);
        out[c] = lane_part() == 0 ? u[c] : delta_o(n.gates[c].x, state_q[c], u[c], n.qk);
    }
}

// With one tree, a block leaves registers for the blocks of the next launch.
KERNEL(BLOCKS_PER_SM == 1 && THREADS < 512 ? 512 : THREADS, BLOCKS_PER_SM)
CLUSTER_ATTRIBUTE gated_delta_recurrent_tree(const Step* step, const float* x, u32 ld_x, const float* alpha,
                                             u32 ld_alpha, const float* beta, u32 ld_beta, const float* window,
                                             u64 window_stride, const float* weight, const float* a, const float* dt,
                                             const float* state, u64 state_stride, float* factors, u64 factor_stride,
                                             float* o, float4* spill_buffer) {
    extern __shared__ __align__(128) u8 memory[];
    SharedStorage& smem = *(SharedStorage*)memory;
    const int tid = threadIdx.x, warp = __shfl_sync(WARP_ALL, tid / 32, 0), lane = tid % 32;
    const int key = blockIdx.x / SLICES / HEAD_GROUPS, group = blockIdx.x / SLICES % HEAD_GROUPS,
              slice = blockIdx.x % SLICES;
#if CLUSTER > 1
    if (tid == 0) {
        mbarrier_init(shared_address(&smem.qk_full), 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    // The mbarrier fence is enough; arrive.release would wait for all outstanding loads.
    cluster_arrive_relaxed();
#endif
    // The step header, state and window are older than the previous kernel, which has waited for them. No instruction
    // below waits for a load whose result it does not need.
    const int trees = step->trees;
    const Tree tree = step->tree[blockIdx.z];
    u32 schedule_word = 0;
    if (tid < 2 * STEP_ROWS)
        schedule_word = tid < STEP_ROWS ? step->conv_sources[tid] : step->dfs_schedule[tid - STEP_ROWS];
    const int rank = cluster_rank();
    // A warp convolves q or k of some nodes.
    const int part = QK_PER_BLOCK == 1 ? rank : warp % QK_PER_BLOCK,
              block_channel = part * K_WIDTH + key * HEAD_DIM + 4 * lane;
#pragma unroll 1
    for (int i = tid; i < COLUMNS; i += THREADS)
        cp_async_16(shared_address(&smem.weight[i % 4][i & ~3]), weight + (u64)v_channel(key, group, slice, i) * TAPS);
    cp_async_commit();
    const Weights qk_weights = load_weights(weight, block_channel);
    if ((int)blockIdx.z >= trees || tree.nodes < 1) {
#if CLUSTER > 1
        cluster_wait();
#endif
        cp_async_wait<0>();
        pdl_wait();
        return;
    }
    const int nodes = tree.nodes;
    // Before the state is loaded, or these words would wait for it.
    if (tid < 2 * STEP_ROWS) {
        const int at = tid % STEP_ROWS - tree.first;
        if (at >= 0 && at < nodes) {
            if (tid >= STEP_ROWS)
                smem.visits[at] = schedule_word;
            else
                smem.taps[at] = make_int4((i8)schedule_word, (i8)(schedule_word >> 8), (i8)(schedule_word >> 16),
                                          (i8)(schedule_word >> 24));
        }
    }
    if (tid == 0) smem.visits[nodes] = 0;
    // Heads and columns of a warp that holds state.
    const int first = warp / (SLICE_COLUMNS / 4) * HEADS_PER_WARP,
              column = warp % (SLICE_COLUMNS / 4) * 4 + lane_column();
    const bool owns_state = warp < STATE_THREADS / 32;
    const int head_offset =
        value_head(key, group * HEADS_PER_BLOCK + first) * HEAD_DIM + slice * SLICE_COLUMNS + column;
    float4 s[HEADS_PER_WARP][4] = {};
    const auto fetch_state = [&]() {
        const float* state_ptr =
            slot_ptr(state, tree.slot, state_stride) + (u64)head_offset * HEAD_DIM + 4 * lane_part();
#pragma unroll
        for (int i = 0; i < 4 * HEADS_PER_WARP; i++)
            s[i / 4][i % 4] =
                load_state_once(state_ptr + i / 4 * HEAD_DIM * HEAD_DIM * (GROUPED ? 1 : K_HEADS) + i % 4 * 32);
    };
#if BLOCKS_PER_SM == 1
    if (owns_state) fetch_state();
#else
    // Registers are short here, so the state is only prefetched into L2.
#pragma unroll 1
    for (int i = tid; i < COLUMNS * (HEAD_DIM / 32); i += THREADS) {
        const int of = i / (HEAD_DIM / 32);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(
            slot_ptr(state, tree.slot, state_stride) +
            ((u64)value_head(key, group * HEADS_PER_BLOCK + of / SLICE_COLUMNS) * HEAD_DIM + slice * SLICE_COLUMNS +
             of % SLICE_COLUMNS) *
                HEAD_DIM +
            i % (HEAD_DIM / 32) * 32));
    }
#endif
    const float* slot_window = slot_ptr(window, tree.slot, window_stride);
    if (tid < (TAPS - 1) * 8) {
        const float* row = slot_window + tid / 8 * CHANNELS;
        const int at = tid % 8;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(
            row + (at < 4 ? rank * K_WIDTH + key * HEAD_DIM + 32 * at
                          : v_channel(key, group, slice, (at - 4) % HEADS_PER_BLOCK * SLICE_COLUMNS))));
    }
    const ConvInput source = {x + (u64)tree.first * ld_x, slot_window + (TAPS - 1) * CHANNELS, ld_x};
#if CLUSTER > 1
    if (tid == 0) mbarrier_arrive_expect_tx(shared_address(&smem.qk_full), nodes * 2 * HEAD_DIM * 4);
#endif
    SpilledStates spilled = {
#if REGISTER_STATES
        {},
#endif
#if SHARED_SPILLS
        &smem.spilled[0][0][tid % STATE_THREADS],
#endif
        spill_buffer + ((u64)blockIdx.z * (SPILLED_STATES - SHARED_SPILLS) * (V_HEADS * HEAD_DIM * HEAD_DIM / 4) +
                        (u64)blockIdx.x * 4 * HEADS_PER_WARP * STATE_THREADS + tid % STATE_THREADS)};
    float* node_out = slot_ptr(factors, tree.slot, factor_stride);
#if CLUSTER > 1
    cluster_wait();
#endif
    cp_async_wait<0>();
    __syncthreads();

    // The last threads compute the gates. The first loads of a thread are issued before any math, and addresses are
    // computed before the wait.
    const int gate = THREADS - 1 - tid, n_v_pieces = nodes * V_PIECES, gates = nodes * HEADS_PER_BLOCK;
    int at = warp / QK_PER_BLOCK;
    u64 qk_addresses[QK_ROWS_AT_ONCE][TAPS], v_addresses[TAPS], alpha_address, beta_address;
    float4 in[QK_ROWS_AT_ONCE][TAPS], in_v[TAPS], in_gate;
    const auto find_taps = [&](u64(&from)[TAPS], int node, int channel) {
        const int4 rows_of_taps = smem.taps[min(node, nodes - 1)];
        const int taps[TAPS] = {rows_of_taps.x, rows_of_taps.y, rows_of_taps.z, rows_of_taps.w};
#pragma unroll
        for (int i = 0; i < TAPS; i++) from[i] = __cvta_generic_to_global(source.at(taps[i], channel));
    };
    const auto find_rows = [&]() {
#pragma unroll
        for (int e = 0; e < QK_ROWS_AT_ONCE; e++) find_taps(qk_addresses[e], at + e * QK_ROW_STRIDE, block_channel);
    };
    const auto find_v = [&](int i) {
        find_taps(v_addresses, i / V_PIECES, v_channel(key, group, slice, i % V_PIECES * 4));
    };
    const auto find_gate = [&](int i) {
        const int head = value_head(key, group * HEADS_PER_BLOCK + i % HEADS_PER_BLOCK);
        const u64 row = tree.first + min(i / HEADS_PER_BLOCK, nodes - 1);
        alpha_address = __cvta_generic_to_global(alpha + row * ld_alpha + head);
        beta_address = __cvta_generic_to_global(beta + row * ld_beta + head);
        in_gate.z = a[head], in_gate.w = dt[head];
    };
    const auto load_gate = [&]() { in_gate.x = load_global(alpha_address), in_gate.y = load_global(beta_address); };
#if ADDRESSES_BEFORE_WAIT
    find_rows(), find_v(tid), find_gate(gate);
#pragma unroll
    for (int i = 0; i < TAPS; i++) {
#pragma unroll
        for (int e = 0; e < QK_ROWS_AT_ONCE; e++) asm volatile("" : "+l"(qk_addresses[e][i]));
        asm volatile("" : "+l"(v_addresses[i]));
    }
    asm volatile("" : "+l"(alpha_address), "+l"(beta_address));
    // A branch that is always taken: the compiler would sink the address computation, but not past a branch.
    if (tree.slot >= 0) pdl_wait();
#else
    pdl_wait();
    find_rows();
#endif
    // Triggered here, after the wait, so that the next kernel may read what earlier kernels wrote.
    pdl_launch();
    // Blocks of a key head divide the stores of its factors.
    const int writers = SLICES / CLUSTER, writer = slice / CLUSTER;
#pragma unroll
    for (int e = 0; e < QK_ROWS_AT_ONCE; e++) load_global(in[e], qk_addresses[e]);
    if (ADDRESSES_BEFORE_WAIT) load_global(in_v, v_addresses), load_gate();
#pragma unroll 1
    while (at < nodes) {
        float4 y[QK_ROWS_AT_ONCE];
#pragma unroll
        for (int e = 0; e < QK_ROWS_AT_ONCE; e++)
            y[e] =
                l2_normalize(convolve(qk_weights, in[e][0], in[e][1], in[e][2], in[e][3]), part ? 1.0f : QUERY_LENGTH);
#pragma unroll
        for (int e = 0; e < QK_ROWS_AT_ONCE; e++) {
            const int node = at + e * QK_ROW_STRIDE;
            if (e && node >= nodes) break;
            store_to_cluster((part ? smem.inputs[node].k : smem.inputs[node].q) + 4 * lane, y[e], &smem.qk_full);
            if (group == 0 && node % writers == writer) {
                float* to = node_out + (u64)node * NODE_FLOATS;
                if (part) store_global(to + key * HEAD_DIM + 4 * lane, y[e]);
                store_global(to + NODE_X + block_channel, in[e][TAPS - 1]);
            }
        }
        if (NODES <= QK_ROWS_AT_ONCE * QK_ROW_STRIDE) break;
        at += QK_ROWS_AT_ONCE * QK_ROW_STRIDE;
        find_rows();
#pragma unroll
        for (int e = 0; e < QK_ROWS_AT_ONCE; e++) load_global(in[e], qk_addresses[e]);
    }
    if (!ADDRESSES_BEFORE_WAIT) find_v(tid), load_global(in_v, v_addresses), find_gate(gate), load_gate();
#pragma unroll 1
    for (int i = tid; i < n_v_pieces; i += THREADS) {
        if (i != tid) find_v(i), load_global(in_v, v_addresses);
        const int at = i / V_PIECES, within = i % V_PIECES * 4;
        *(float4*)&smem.inputs[at].v[within] = conv_silu(smem.weight, in_v, within);
        *(float4*)(node_out + (u64)at * NODE_FLOATS + NODE_X + v_channel(key, group, slice, within)) = in_v[TAPS - 1];
        if (NODES * V_PIECES <= THREADS) break;
    }
#pragma unroll 1
    for (int i = gate; i < gates; i += THREADS) {
        if (i != gate) find_gate(i), load_gate();
        const int at = i / HEADS_PER_BLOCK, head_in_block = i % HEADS_PER_BLOCK;
        const float g = log_decay(in_gate.x, in_gate.z, in_gate.w);
        smem.inputs[at].gates[head_in_block] = make_float2(expf(g), 1.0f / (1.0f + expf(-in_gate.y)));
        if (slice == 0)
            node_out[(u64)at * NODE_FLOATS + NODE_G + value_head(key, group * HEADS_PER_BLOCK + head_in_block)] = g;
        if (NODES * HEADS_PER_BLOCK <= THREADS) break;
    }
#if BLOCKS_PER_SM > 1
    if (owns_state) fetch_state();
#endif
    // Set up the recurrence before waiting for the other warps.
    u32 now = smem.visits[0];
    OutputWriter output(node_out + NODE_U + head_offset, o + (u64)tree.first * V_WIDTH + head_offset);
    if (BLOCKS_PER_SM == 1) asm volatile("" : "+l"(output.to), "+r"(output.node_stride), "+r"(now));
#if CLUSTER > 1
    mbarrier_wait(shared_address(&smem.qk_full), 0);
#else
    __syncthreads();
#endif
    const NodeInputs& root = smem.inputs[now & DFS_NODE_MASK];
    NodeRegisters n;
    if (BLOCKS_PER_SM == 1) n.fetch_q(root), n.fetch_k(root);
    // q . k in the order of warp_dot, several partial products per thread.
#pragma unroll 1
    for (int i = warp * SHARES_PER_THREAD; i < nodes; i += WARPS * SHARES_PER_THREAD) {
        NodeInputs& inputs = smem.inputs[min(i + lane / (32 / SHARES_PER_THREAD), nodes - 1)];
        const int within = lane % (32 / SHARES_PER_THREAD) * 4;
        float sums[SHARES_PER_THREAD];
#pragma unroll
        for (int e = 0; e < SHARES_PER_THREAD; e++) {
            const int keys = within + 128 / SHARES_PER_THREAD * e;
            sums[e] = dot4(*(const float4*)(inputs.q + keys), *(const float4*)(inputs.k + keys));
        }
#pragma unroll
        for (int gap = SHARES_PER_THREAD / 2; gap; gap >>= 1) {
#pragma unroll
            for (int e = 0; e < gap; e++) sums[e] += sums[e + gap];
        }
#pragma unroll
        for (int gap = 16 / SHARES_PER_THREAD; gap; gap >>= 1) sums[0] += __shfl_xor_sync(WARP_ALL, sums[0], gap);
        if (within == 0) inputs.qk = sums[0];
        if (NODES <= WARPS * SHARES_PER_THREAD) break;
    }
    __syncthreads();
    if (!owns_state) return;
    if (BLOCKS_PER_SM > 1) n.fetch_q(root), n.fetch_k(root);
    n.fetch_scalars(root, first, column);
    const u32* visits = smem.visits;
#pragma unroll 1
    while (true) {
        // The next node's inputs are loaded as soon as their registers are free; after the last node they are unused.
        const u32 next = *++visits;
        const NodeInputs& next_inputs = smem.inputs[now >> DFS_NEXT_SHIFT & DFS_NODE_MASK];
        float u[HEADS_PER_WARP], out[HEADS_PER_WARP];
        read_out(s, n, next_inputs, u, out);
        output.write(now & DFS_NODE_MASK, out);
        if (now & DFS_UPDATES_STATE) {
#pragma unroll
            for (int c = 0; c < HEADS_PER_WARP; c++) {
#pragma unroll
                for (int i = 0; i < 4; i++) update_state(s[c][i], n.k[i], u[c], n.gates[c].x);
            }
            n.fetch_k(next_inputs), n.fetch_scalars(next_inputs, first, column);
            const u32 spill_slot = now >> DFS_SPILL_SHIFT & 15;
            if (spill_slot) spilled.spill(spill_slot, s, now >> DFS_ZERO_SHIFT);
        } else {
            n.fetch_k(next_inputs), n.fetch_scalars(next_inputs, first, column);
            if (now & (DFS_IS_LAST | DFS_SPILL_OR_RELOAD)) {
                if (now & DFS_IS_LAST) break;
                spilled.reload(now >> DFS_RELOAD_SHIFT & 15, s, now >> DFS_ZERO_SHIFT);
            }
        }
        now = next;
    }
}
