// The gated delta rule over a tree, node by node with the state in registers, from the projections to every node's u and
// output: convolution, norms and gates of all nodes at once, then the nodes in an order in which few states must wait.
//
//   y, g, beta as in ssm/conv.cuh;  u = beta (v - e^g S^T k);  o = e^g S^T q + u (q . k);  S <- e^g S + k u^T
//
// Every node has the bits that delta/row gives for it alone after delta/commit has brought the state past its ancestors,
// all at once or one by one: the sums are those of delta/rule.cuh, the fold that of delta/fold.cuh.
//
// The host gives the order (crates/cuda/src/launch/delta/order.rs). Leaves, which change no state, come first, and the state
// of a node is kept only while a subtree of at most half of its size is walked: of 64 nodes, four states at once. A thread
// keeps its own values, in shared memory while there is room and in the scratch behind that.
//
// in:  x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [NV],
//      state [slot][NV][128 v][128 k]
// out: o [rows][VALUES]; k, u, g and x of each node into the factors
// work: kept [tree][SAVES - SHARED_SAVES][NV][128][128]
// grid (8 NK * NV / NK / HEADS, 1, trees), 32 WARPS threads: a block has 16 value columns of each of HEADS heads of a key
// head; a warp that walks has four columns of each of TURNS of them, and all prepare. Where the architecture has clusters,
// CLUSTER blocks convolve for their key head together: one queries, one keys, which each writes into the memory of both.
// shared memory: `Room`, all of it dynamic; crates/cuda/src/launch/delta/walk.rs knows its size
// arch: sm_80. reference: cpu::reference::{conv, delta}::tree; test: tree_*
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"
#include "delta/rule.cuh"
#include "ssm/conv.cuh"
#include "delta/nodes.cuh"

#define SLICES 8
#define WIDE (DIM / SLICES)           // columns that a block has of a head
#define COLUMNS (WIDE * HEADS)
#define THREADS (WARPS * 32)
#define SETS (HEADS / TURNS)          // of heads: a warp that walks has four columns of each of TURNS heads
#define WALKERS (SETS * WIDE / 4 * 32)  // threads that walk
#define GROUPS (NV / NK / HEADS)      // of heads that share a key head
#define OWN_KEYS (2 / CLUSTER)        // of q and k, how many a block convolves
#define PIECES (COLUMNS / 4)          // of a node's v, four channels each

// What a block has of a node.
struct Own {
    float q[DIM], k[DIM];
    float v[COLUMNS];
    float2 gates[HEADS];              // e^g, beta
    float qk;                         // q . k
    float unused[3 - 2 * HEADS % 4];  // to whole 16 bytes
};

struct Room {
    alignas(16) Own own[NODES];
    float weight[4][COLUMNS];         // of channel c of v: [c % 4][c / 4] in units of 4 taps
    int4 lines[NODES];                // the taps' sources, oldest first
    u64 full;                         // barrier: what the cluster's blocks give each other has come
    u32 visits[NODES + 1];
#if SHARED_SAVES
    alignas(16) float4 saved[SHARED_SAVES][4 * TURNS][WALKERS];
#endif
};

// Four values to the same place in every block of the cluster, counted on its barrier.
__device__ __forceinline__ void put_all(float* to, float4 v, u64* barrier) {
#if CLUSTER > 1
    const u32 at = shared_address(to), counter = shared_address(barrier);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
        u32 there, counts;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(r));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counts) : "r"(counter), "r"(r));
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
            "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(counts)
            : "memory");
    }
#else
    *(float4*)to = v;
#endif
}

// A value head of the key head.
__device__ __forceinline__ int head_of(int key, int turn) {
#if GROUPED
    return key * (NV / NK) + turn;
#else
    return turn * NK + key;
#endif
}

// The channel of v that a block has at place i.
__device__ __forceinline__ int channel_of(int key, int group, int slice, int i) {
    return 2 * KEYS + head_of(key, group * HEADS + i / WIDE) * DIM + slice * WIDE + i % WIDE;
}

// This thread's values of a waiting state.
struct Waiting {
#if SHARED_SAVES
    float4* shared;
#endif
    float4* behind;
    __device__ __forceinline__ void save(u32 slot, const float4 (&s)[TURNS][4]) const {
#if SHARED_SAVES
        if (SAVES == SHARED_SAVES || slot < SHARED_SAVES) {
#pragma unroll
            for (int i = 0; i < 4 * TURNS; i++) shared[(slot * 4 * TURNS + i) * WALKERS] = s[i / 4][i % 4];
            return;
        }
#endif
        float4* to = behind + (u64)(slot - SHARED_SAVES) * (NV * DIM * DIM / 4);
#pragma unroll
        for (int i = 0; i < 4 * TURNS; i++) to[i * WALKERS] = s[i / 4][i % 4];
    }
    __device__ __forceinline__ void restore(u32 slot, float4 (&s)[TURNS][4]) const {
#if SHARED_SAVES
        if (SAVES == SHARED_SAVES || slot < SHARED_SAVES) {
#pragma unroll
            for (int i = 0; i < 4 * TURNS; i++) s[i / 4][i % 4] = shared[(slot * 4 * TURNS + i) * WALKERS];
            return;
        }
#endif
        const float4* from = behind + (u64)(slot - SHARED_SAVES) * (NV * DIM * DIM / 4);
#pragma unroll
        for (int i = 0; i < 4 * TURNS; i++) s[i / 4][i % 4] = from[i * WALKERS];
    }
};

// What a node has of its own, for the four columns of a warp in every head.
struct Node {
    float4 k[4], q[4];
    float2 gates[TURNS];
    float v[TURNS];
    float qk;
    __device__ __forceinline__ void fetch_q(const Own& own) {
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = *(const float4*)(own.q + 32 * i + 4 * lane_part());
    }
    __device__ __forceinline__ void fetch_others(const Own& own, int first, int column) {
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] = *(const float4*)(own.k + 32 * i + 4 * lane_part());
#pragma unroll
        for (int c = 0; c < TURNS; c++) {
            gates[c] = own.gates[first + c];
            v[c] = own.v[(first + c) * WIDE + column];
        }
        qk = own.qk;
    }
};

// Where a thread writes: of a column's lanes the first has u and the second o.
struct Outlet {
    u64 to;
    u32 apart;
    __device__ __forceinline__ Outlet(float* u, float* o) {
        to = (u64)(lane_part() == 0 ? u : o), apart = lane_part() == 0 ? 4 * NODE_FLOATS : 4 * VALUES;
    }
    __device__ __forceinline__ void write(int node, const float (&x)[TURNS]) const {
        if (lane_part() >= 2) return;
        u64 at;
        asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(node), "r"(apart), "l"(to));
#pragma unroll
        for (int c = 0; c < TURNS; c++)
            asm volatile("st.global.f32 [%0], %1;" ::"l"(at + c * 4 * DIM * (GROUPED ? 1 : NK)), "f"(x[c]) : "memory");
    }
};

// u and o of a node, and, where it FOLDS, the state brought past it. Leaves the next node's values in `n`, fetched as soon as
// their place is free.
template <bool FOLDS>
__device__ __forceinline__ void visit(float4 (&s)[TURNS][4], Node& n, const Own& next, int first, int column, int node,
                                      const Outlet& outlet) {
    float seen[TURNS], read[TURNS], out[TURNS];
#pragma unroll
    for (int c = 0; c < TURNS; c++) seen[c] = part_dot(n.k, s[c]);
#pragma unroll
    for (int c = 0; c < TURNS; c++) seen[c] += __shfl_xor_sync(WARP_ALL, seen[c], 16);
#pragma unroll
    for (int c = 0; c < TURNS; c++) read[c] = part_dot(n.q, s[c]);
#pragma unroll
    for (int gap = 8; gap >= 4; gap >>= 1) {
#pragma unroll
        for (int c = 0; c < TURNS; c++) seen[c] += __shfl_xor_sync(WARP_ALL, seen[c], gap);
    }
    if (FOLDS) {
#pragma unroll
        for (int c = 0; c < TURNS; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float decay = n.gates[c].x;
                s[c][i].x *= decay, s[c][i].y *= decay, s[c][i].z *= decay, s[c][i].w *= decay;
            }
        }
    }
    n.fetch_q(next);
#pragma unroll
    for (int gap = 16; gap >= 4; gap >>= 1) {
#pragma unroll
        for (int c = 0; c < TURNS; c++) read[c] += __shfl_xor_sync(WARP_ALL, read[c], gap);
    }
#pragma unroll
    for (int c = 0; c < TURNS; c++) {
        const float u = node_u(n.gates[c].y, n.gates[c].x, n.v[c], seen[c]);
        const float o = node_o(n.gates[c].x, read[c], u, n.qk);
        out[c] = lane_part() == 0 ? u : o;
        if (FOLDS) {
#pragma unroll
            for (int i = 0; i < 4; i++) add(s[c][i], n.k[i], u);
        }
    }
    n.fetch_others(next, first, column);
    outlet.write(node, out);
}

// A block of one tree leaves registers for those of the launch behind it.
extern "C" __global__ void __launch_bounds__(BLOCKS == 1 && THREADS < 512 ? 512 : THREADS, BLOCKS) IN_CLUSTERS
walk(const Step* step, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha, const float* beta, u32 ld_beta,
     const float* window, u64 window_stride, const float* weight, const float* a, const float* dt, const float* state,
     u64 state_stride, float* factors, u64 factor_stride, float* o, float4* kept) {
    extern __shared__ __align__(128) u8 memory[];
    Room& room = *(Room*)memory;
    const int tid = threadIdx.x, warp = __shfl_sync(WARP_ALL, tid / 32, 0), lane = tid % 32;
    const int key = blockIdx.x / SLICES / GROUPS, group = blockIdx.x / SLICES % GROUPS, slice = blockIdx.x % SLICES;
#if CLUSTER > 1
    if (tid == 0) {
        mbarrier_init(shared_address(&room.full), 1);
        mbarrier_init_fence();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    // The step, the state and the window are older than the kernel before this one, which has waited for them. Nothing here
    // waits for a load that does not need what it brings.
    const int trees = step->trees;
    const Tree tree = step->tree[blockIdx.z];
    u32 word = 0;
    if (tid < 2 * STEP_ROWS) word = tid < STEP_ROWS ? step->taps[tid] : step->visits[tid - STEP_ROWS];
    const int rank = cluster_rank();
    // A warp convolves q or k of some nodes.
    const int part = OWN_KEYS == 1 ? rank : warp % OWN_KEYS, own_channel = part * KEYS + key * DIM + 4 * lane;
#pragma unroll 1
    for (int i = tid; i < COLUMNS; i += THREADS)
        cp_async_16(shared_address(&room.weight[i % 4][i & ~3]), weight + (u64)channel_of(key, group, slice, i) * TAPS);
    cp_async_commit();
    const Weights own_weights = load_weights(weight, own_channel);
    if ((int)blockIdx.z >= trees) {
#if CLUSTER > 1
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        cp_async_wait<0>();
        pdl_wait();
        return;
    }
    const int nodes = tree.nodes;
    // A warp that walks has these heads and columns of what the block has.
    const int first = warp / (WIDE / 4) * TURNS, column = warp % (WIDE / 4) * 4 + lane_column();
    const bool walks = warp < WALKERS / 32;
    const int at_head = head_of(key, group * HEADS + first) * DIM + slice * WIDE + column;
    float4 s[TURNS][4] = {};
    const auto fetch_state = [&]() {
        const float* own = of_slot(state, tree.slot, state_stride) + (u64)at_head * DIM + 4 * lane_part();
#pragma unroll
        for (int i = 0; i < 4 * TURNS; i++)
            s[i / 4][i % 4] = *(const float4*)(own + i / 4 * DIM * DIM * (GROUPED ? 1 : NK) + i % 4 * 32);
    };
#if BLOCKS == 1
    if (walks) fetch_state();
#else
    // Registers are few: the state comes to L2 now.
#pragma unroll 1
    for (int i = tid; i < COLUMNS * (DIM / 32); i += THREADS) {
        const int of = i / (DIM / 32);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(
            of_slot(state, tree.slot, state_stride) +
            ((u64)head_of(key, group * HEADS + of / WIDE) * DIM + slice * WIDE + of % WIDE) * DIM + i % (DIM / 32) * 32));
    }
#endif
    const float* own_window = of_slot(window, tree.slot, window_stride);
    if (tid < (TAPS - 1) * 8) {
        const float* row = own_window + tid / 8 * CHANNELS;
        const int at = tid % 8;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + (at < 4 ? rank * KEYS + key * DIM + 32 * at
                                                                    : channel_of(key, group, slice, (at - 4) % HEADS * WIDE))));
    }
    const Source source = {x + (u64)tree.first * ld_x, own_window + (TAPS - 1) * CHANNELS, ld_x};
    if (tid < 2 * STEP_ROWS) {
        const int at = tid % STEP_ROWS - tree.first;
        if (at >= 0 && at < nodes) {
            if (tid >= STEP_ROWS)
                room.visits[at] = word;
            else
                room.lines[at] = make_int4((i8)word, (i8)(word >> 8), (i8)(word >> 16), (i8)(word >> 24));
        }
    }
    if (tid == 0) room.visits[nodes] = 0;
#if CLUSTER > 1
    if (tid == 0) mbarrier_expect(shared_address(&room.full), nodes * 2 * DIM * 4);
#endif
    const Waiting waiting = {
#if SHARED_SAVES
        &room.saved[0][0][tid % WALKERS],
#endif
        kept + ((u64)blockIdx.z * (SAVES - SHARED_SAVES) * (NV * DIM * DIM / 4) + (u64)blockIdx.x * 4 * TURNS * WALKERS +
                tid % WALKERS)};
    float* node_out = of_slot(factors, tree.slot, factor_stride);
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    cp_async_wait<0>();
    __syncthreads();
    pdl_wait();
    // Now, so that what comes behind may read what stood before this kernel.
    pdl_launch();

    // The last threads have the gates. What a thread needs first is on its way before it works on anything.
    const int gate = THREADS - 1 - tid;
    float4 in_gate, in_v[TAPS];
    const auto fetch_gate = [&](int i) {
        const int head = head_of(key, group * HEADS + i % HEADS);
        const u64 row = tree.first + i / HEADS;
        in_gate = make_float4(alpha[row * ld_alpha + head], beta[row * ld_beta + head], a[head], dt[head]);
    };
    const auto fetch_v = [&](int i) {
        source.fetch(in_v, room.lines[i / PIECES], channel_of(key, group, slice, i % PIECES * 4));
    };
    const int pieces = nodes * PIECES, gates = nodes * HEADS;
    // Blocks of a key head share the work of writing what it leaves.
    const int sharers = SLICES / CLUSTER, share = slice / CLUSTER;
#pragma unroll 1
    for (int at = warp / OWN_KEYS; at < nodes; at += 2 * WARPS / OWN_KEYS) {
        // Two rows at once.
        const int both[2] = {at, min(at + WARPS / OWN_KEYS, nodes - 1)};
        float4 in[2][TAPS], y[2];
#pragma unroll
        for (int e = 0; e < 2; e++) source.fetch(in[e], room.lines[both[e]], own_channel);
        if (BLOCKS == 1 && at == warp / OWN_KEYS) {
            if (tid < pieces) fetch_v(tid);
            if (gate < gates) fetch_gate(gate);
        }
#pragma unroll
        for (int e = 0; e < 2; e++)
            y[e] = unit(convolve(own_weights, in[e][0], in[e][1], in[e][2], in[e][3]), part ? 1.0f : QUERY_LENGTH);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (e && at + WARPS / OWN_KEYS >= nodes) break;
            put_all((part ? room.own[both[e]].k : room.own[both[e]].q) + 4 * lane, y[e], &room.full);
            if (group == 0 && both[e] % sharers == share) {
                float* to = node_out + (u64)both[e] * NODE_FLOATS;
                if (part) *(float4*)(to + key * DIM + 4 * lane) = y[e];
                *(float4*)(to + NODE_X + own_channel) = in[e][TAPS - 1];
            }
        }
    }
    if (BLOCKS > 1 || warp / OWN_KEYS >= nodes) {
        if (tid < pieces) fetch_v(tid);
        if (gate < gates) fetch_gate(gate);
    }
#pragma unroll 1
    for (int i = tid; i < pieces; i += THREADS) {
        if (i != tid) fetch_v(i);
        const int at = i / PIECES, within = i % PIECES * 4;
        *(float4*)&room.own[at].v[within] = mix(room.weight, in_v, within);
        *(float4*)(node_out + (u64)at * NODE_FLOATS + NODE_X + channel_of(key, group, slice, within)) = in_v[TAPS - 1];
    }
#pragma unroll 1
    for (int i = gate; i < gates; i += THREADS) {
        if (i != gate) fetch_gate(i);
        const int at = i / HEADS, turn = i % HEADS;
        const float g = gate_g(in_gate.x, in_gate.z, in_gate.w);
        room.own[at].gates[turn] = make_float2(expf(g), 1.0f / (1.0f + expf(-in_gate.y)));
        if (slice == 0) node_out[(u64)at * NODE_FLOATS + NODE_G + head_of(key, group * HEADS + turn)] = g;
    }
#if BLOCKS > 1
    if (walks) fetch_state();
#endif
#if CLUSTER > 1
    mbarrier_wait(shared_address(&room.full), 0);
#else
    __syncthreads();
#endif
#pragma unroll 1
    for (int i = warp; i < nodes; i += 2 * WARPS) {
        const int both[2] = {i, min(i + WARPS, nodes - 1)};
        float dots[2];
#pragma unroll
        for (int e = 0; e < 2; e++)
            dots[e] = row_dot(*(const float4*)(room.own[both[e]].q + 4 * lane), *(const float4*)(room.own[both[e]].k + 4 * lane));
        if (lane == 0) room.own[both[0]].qk = dots[0];
        if (lane == 0 && i + WARPS < nodes) room.own[both[1]].qk = dots[1];
    }
    __syncthreads();
    if (!walks) return;
    const u32* visits = room.visits;
    u32 now = *visits;
    if (now == 0) return;
    float *to_u = node_out + NODE_U + at_head, *to_o = o + (u64)tree.first * VALUES + at_head;
    const Outlet outlet(to_u, to_o);
    Node n;
    n.fetch_q(room.own[now & VISIT_NODE]), n.fetch_others(room.own[now & VISIT_NODE], first, column);
#pragma unroll 1
    while (true) {
        // What the next node needs is fetched as soon as its place is free; behind the last stands something else.
        const u32 next = *++visits;
        const int node = now & VISIT_NODE;
        const Own& following = room.own[now >> VISIT_NEXT & VISIT_NODE];
        if (now & VISIT_FOLDS)
            visit<true>(s, n, following, first, column, node, outlet);
        else
            visit<false>(s, n, following, first, column, node, outlet);
        if (now & (VISIT_LAST | VISIT_MOVES)) {
            if (now & VISIT_LAST) break;
            if (now >> VISIT_KEEP & 15) waiting.save((now >> VISIT_KEEP & 15) - 1, s);
            if (now >> VISIT_RESTORE & 15) waiting.restore((now >> VISIT_RESTORE & 15) - 1, s);
        }
        now = next;
    }
}
