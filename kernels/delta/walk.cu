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
// keeps its own values: those of the first place in registers where a block has a multiprocessor for itself, others in shared
// memory while there is room and in the scratch behind that.
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
#define HELD (BLOCKS == 1)            // states that wait in registers; SAVES are the places besides
#define FORESEES (BLOCKS == 1 && TURNS == 1)  // has registers for addresses before the wait
#define APART (WARPS / OWN_KEYS)      // from a row of q or k that a warp convolves to its next
// Rows that a warp convolves at once: all of them, if they are three at most and it has registers for them.
#define AT_ONCE (BLOCKS > 1 || NODES > 3 * APART ? 2 : (NODES + APART - 1) / APART)
// Lanes' shares of a product q . k that a thread adds up before threads do.
#define SHARES (32 * NODES <= THREADS || BLOCKS > 2 ? 1 : 16 * NODES <= THREADS || BLOCKS > 1 ? 2 : 4)

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

__device__ __forceinline__ void store(float* to, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
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

// Loads by addresses that are known before what stands there may be read.
__device__ __forceinline__ float load(u64 at) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void load(float4 (&in)[TAPS], const u64 (&at)[TAPS]) {
#pragma unroll
    for (int i = 0; i < TAPS; i++)
        asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(in[i].x), "=f"(in[i].y), "=f"(in[i].z), "=f"(in[i].w)
                     : "l"(at[i])
                     : "memory");
}

// Values in other registers, by operations on a 0 that the compiler does not know: where it can tell that they are copies,
// it makes them in every visit.
__device__ __forceinline__ float4 copy(const float4& x, u32 zero) {
    const auto same = [&](float v) { return __uint_as_float(__float_as_uint(v) ^ zero); };
    return make_float4(same(x.x), same(x.y), same(x.z), same(x.w));
}

// This thread's values of the states that wait, by their places from 1 on.
struct Waiting {
#if HELD
    float4 held[4 * TURNS];
#endif
#if SHARED_SAVES
    float4* shared;
#endif
    float4* behind;
    __device__ __forceinline__ void save(u32 place, const float4 (&s)[TURNS][4], u32 zero) {
#if HELD
        if (place == 1) {
#pragma unroll
            for (int i = 0; i < 4 * TURNS; i++) held[i] = copy(s[i / 4][i % 4], zero);
            return;
        }
#endif
        if (SAVES == 0) return;
        const u32 slot = place - 1 - HELD;
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
    __device__ __forceinline__ void restore(u32 place, float4 (&s)[TURNS][4], u32 zero) const {
#if HELD
        if (place == 1) {
#pragma unroll
            for (int i = 0; i < 4 * TURNS; i++) s[i / 4][i % 4] = copy(held[i], zero);
            return;
        }
#endif
        if (SAVES == 0) return;
        const u32 slot = place - 1 - HELD;
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
    __device__ __forceinline__ void fetch_k(const Own& own) {
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] = *(const float4*)(own.k + 32 * i + 4 * lane_part());
    }
    __device__ __forceinline__ void fetch_others(const Own& own, int first, int column) {
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

// u of a node in every lane of its column, and what this lane writes. Leaves the next node's queries in `n`.
__device__ __forceinline__ void look(const float4 (&s)[TURNS][4], Node& n, const Own& next, float (&u)[TURNS],
                                     float (&out)[TURNS]) {
    float seen[TURNS], read[TURNS];
#pragma unroll
    for (int c = 0; c < TURNS; c++) seen[c] = part_dot(n.k, s[c]);
#pragma unroll
    for (int c = 0; c < TURNS; c++) read[c] = part_dot(n.q, s[c]);
    n.fetch_q(next);
#pragma unroll
    for (int gap = 16; gap >= 4; gap >>= 1) {
#pragma unroll
        for (int c = 0; c < TURNS; c++) {
            seen[c] += __shfl_xor_sync(WARP_ALL, seen[c], gap);
            read[c] += __shfl_xor_sync(WARP_ALL, read[c], gap);
        }
    }
#pragma unroll
    for (int c = 0; c < TURNS; c++) {
        u[c] = node_u(n.gates[c].y, n.gates[c].x, n.v[c], seen[c]);
        out[c] = lane_part() == 0 ? u[c] : node_o(n.gates[c].x, read[c], u[c], n.qk);
    }
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
        fence_mbarrier_init();
    }
    __syncwarp();
    // The fence has released all there is; otherwise the block would wait here for memory.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    // The step, the state and the window are older than the kernel before this one, which has waited for them. Nothing here
    // waits for a load that does not need what it brings.
    const int trees = step->trees;
    const Tree tree = step->tree[blockIdx.z];
    u32 word = 0;
    if (tid < 2 * STEP_ROWS) word = tid < STEP_ROWS ? step->conv_sources[tid] : step->dfs_schedule[tid - STEP_ROWS];
    const int rank = cluster_rank();
    // A warp convolves q or k of some nodes.
    const int part = OWN_KEYS == 1 ? rank : warp % OWN_KEYS, own_channel = part * KEYS + key * DIM + 4 * lane;
#pragma unroll 1
    for (int i = tid; i < COLUMNS; i += THREADS)
        cp_async_16(shared_address(&room.weight[i % 4][i & ~3]), weight + (u64)channel_of(key, group, slice, i) * TAPS);
    cp_async_commit();
    const Weights own_weights = load_weights(weight, own_channel);
    if ((int)blockIdx.z >= trees || tree.nodes < 1) {
#if CLUSTER > 1
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        cp_async_wait<0>();
        pdl_wait();
        return;
    }
    const int nodes = tree.nodes;
    // Before the state is asked for, or these words wait for it.
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
    // A warp that walks has these heads and columns of what the block has.
    const int first = warp / (WIDE / 4) * TURNS, column = warp % (WIDE / 4) * 4 + lane_column();
    const bool walks = warp < WALKERS / 32;
    const int at_head = head_of(key, group * HEADS + first) * DIM + slice * WIDE + column;
    float4 s[TURNS][4] = {};
    const auto fetch_state = [&]() {
        const float* own = of_slot(state, tree.slot, state_stride) + (u64)at_head * DIM + 4 * lane_part();
#pragma unroll
        for (int i = 0; i < 4 * TURNS; i++)
            s[i / 4][i % 4] = state_at(own + i / 4 * DIM * DIM * (GROUPED ? 1 : NK) + i % 4 * 32);
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
#if CLUSTER > 1
    if (tid == 0) mbarrier_arrive_expect_tx(shared_address(&room.full), nodes * 2 * DIM * 4);
#endif
    Waiting waiting = {
#if HELD
        {},
#endif
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

    // The last threads have the gates. What a thread needs first is on its way before it works on anything, and what can be
    // known of it is known before the wait.
    const int gate = THREADS - 1 - tid, pieces = nodes * PIECES, gates = nodes * HEADS;
    int at = warp / OWN_KEYS;
    u64 rows_at[AT_ONCE][TAPS], v_at[TAPS], alpha_at, beta_at;
    float4 in[AT_ONCE][TAPS], in_v[TAPS], in_gate;
    const auto find = [&](u64 (&from)[TAPS], int node, int channel) {
        const int4 line = room.lines[min(node, nodes - 1)];
        const int taps[TAPS] = {line.x, line.y, line.z, line.w};
#pragma unroll
        for (int i = 0; i < TAPS; i++) from[i] = __cvta_generic_to_global(source.at(taps[i], channel));
    };
    const auto find_rows = [&]() {
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) find(rows_at[e], at + e * APART, own_channel);
    };
    const auto find_v = [&](int i) { find(v_at, i / PIECES, channel_of(key, group, slice, i % PIECES * 4)); };
    const auto find_gate = [&](int i) {
        const int head = head_of(key, group * HEADS + i % HEADS);
        const u64 row = tree.first + min(i / HEADS, nodes - 1);
        alpha_at = __cvta_generic_to_global(alpha + row * ld_alpha + head);
        beta_at = __cvta_generic_to_global(beta + row * ld_beta + head);
        in_gate.z = a[head], in_gate.w = dt[head];
    };
    const auto load_gate = [&]() { in_gate.x = load(alpha_at), in_gate.y = load(beta_at); };
#if FORESEES
    find_rows(), find_v(tid), find_gate(gate);
#pragma unroll
    for (int i = 0; i < TAPS; i++) {
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) asm volatile("" : "+l"(rows_at[e][i]));
        asm volatile("" : "+l"(v_at[i]));
    }
    asm volatile("" : "+l"(alpha_at), "+l"(beta_at));
    // A branch that is always taken: the compiler would put off the addresses until they are used, but not over a branch.
    if (tree.slot >= 0) pdl_wait();
#else
    pdl_wait();
    find_rows();
#endif
    // Now, so that what comes behind may read what stood before this kernel.
    pdl_launch();
    // Blocks of a key head share the work of writing what it leaves.
    const int sharers = SLICES / CLUSTER, share = slice / CLUSTER;
#pragma unroll
    for (int e = 0; e < AT_ONCE; e++) load(in[e], rows_at[e]);
    if (FORESEES) load(in_v, v_at), load_gate();
#pragma unroll 1
    while (at < nodes) {
        float4 y[AT_ONCE];
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++)
            y[e] = unit(convolve(own_weights, in[e][0], in[e][1], in[e][2], in[e][3]), part ? 1.0f : QUERY_LENGTH);
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) {
            const int node = at + e * APART;
            if (e && node >= nodes) break;
            put_all((part ? room.own[node].k : room.own[node].q) + 4 * lane, y[e], &room.full);
            if (group == 0 && node % sharers == share) {
                float* to = node_out + (u64)node * NODE_FLOATS;
                if (part) store(to + key * DIM + 4 * lane, y[e]);
                store(to + NODE_X + own_channel, in[e][TAPS - 1]);
            }
        }
        if (NODES <= AT_ONCE * APART) break;
        at += AT_ONCE * APART;
        find_rows();
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) load(in[e], rows_at[e]);
    }
    if (!FORESEES) find_v(tid), load(in_v, v_at), find_gate(gate), load_gate();
#pragma unroll 1
    for (int i = tid; i < pieces; i += THREADS) {
        if (i != tid) find_v(i), load(in_v, v_at);
        const int at = i / PIECES, within = i % PIECES * 4;
        *(float4*)&room.own[at].v[within] = mix(room.weight, in_v, within);
        *(float4*)(node_out + (u64)at * NODE_FLOATS + NODE_X + channel_of(key, group, slice, within)) = in_v[TAPS - 1];
        if (NODES * PIECES <= THREADS) break;
    }
#pragma unroll 1
    for (int i = gate; i < gates; i += THREADS) {
        if (i != gate) find_gate(i), load_gate();
        const int at = i / HEADS, turn = i % HEADS;
        const float g = gate_g(in_gate.x, in_gate.z, in_gate.w);
        room.own[at].gates[turn] = make_float2(expf(g), 1.0f / (1.0f + expf(-in_gate.y)));
        if (slice == 0) node_out[(u64)at * NODE_FLOATS + NODE_G + head_of(key, group * HEADS + turn)] = g;
        if (NODES * HEADS <= THREADS) break;
    }
#if BLOCKS > 1
    if (walks) fetch_state();
#endif
    // What the walk begins with, before others are waited for.
    u32 now = room.visits[0];
    Outlet outlet(node_out + NODE_U + at_head, o + (u64)tree.first * VALUES + at_head);
    if (BLOCKS == 1) asm volatile("" : "+l"(outlet.to), "+r"(outlet.apart), "+r"(now));
#if CLUSTER > 1
    mbarrier_wait(shared_address(&room.full), 0);
#else
    __syncthreads();
#endif
    const Own& root = room.own[now & DFS_NODE_MASK];
    Node n;
    if (BLOCKS == 1) n.fetch_q(root), n.fetch_k(root);
    // q . k as row_dot has it, some of its lanes' shares in a thread.
#pragma unroll 1
    for (int i = warp * SHARES; i < nodes; i += WARPS * SHARES) {
        Own& own = room.own[min(i + lane / (32 / SHARES), nodes - 1)];
        const int within = lane % (32 / SHARES) * 4;
        float sums[SHARES];
#pragma unroll
        for (int e = 0; e < SHARES; e++) {
            const int keys = within + 128 / SHARES * e;
            sums[e] = dot4(*(const float4*)(own.q + keys), *(const float4*)(own.k + keys));
        }
#pragma unroll
        for (int gap = SHARES / 2; gap; gap >>= 1) {
#pragma unroll
            for (int e = 0; e < gap; e++) sums[e] += sums[e + gap];
        }
#pragma unroll
        for (int gap = 16 / SHARES; gap; gap >>= 1) sums[0] += __shfl_xor_sync(WARP_ALL, sums[0], gap);
        if (within == 0) own.qk = sums[0];
        if (NODES <= WARPS * SHARES) break;
    }
    __syncthreads();
    if (!walks) return;
    if (BLOCKS > 1) n.fetch_q(root), n.fetch_k(root);
    n.fetch_others(root, first, column);
    const u32* visits = room.visits;
#pragma unroll 1
    while (true) {
        // What the next node needs is fetched as soon as its place is free; behind the last stands something else.
        const u32 next = *++visits;
        const Own& following = room.own[now >> DFS_NEXT_SHIFT & DFS_NODE_MASK];
        float u[TURNS], out[TURNS];
        look(s, n, following, u, out);
        outlet.write(now & DFS_NODE_MASK, out);
        if (now & DFS_UPDATES_STATE) {
#pragma unroll
            for (int c = 0; c < TURNS; c++) {
#pragma unroll
                for (int i = 0; i < 4; i++) fold(s[c][i], n.k[i], u[c], n.gates[c].x);
            }
            n.fetch_k(following), n.fetch_others(following, first, column);
            const u32 place = now >> DFS_SPILL_SHIFT & 15;
            if (place) waiting.save(place, s, now >> DFS_ZERO_SHIFT);
        } else {
            n.fetch_k(following), n.fetch_others(following, first, column);
            if (now & (DFS_IS_LAST | DFS_SPILL_OR_RELOAD)) {
                if (now & DFS_IS_LAST) break;
                waiting.restore(now >> DFS_RELOAD_SHIFT & 15, s, now >> DFS_ZERO_SHIFT);
            }
        }
        now = next;
    }
}
