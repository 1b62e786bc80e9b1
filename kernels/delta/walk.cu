// The gated delta rule over a tree, node by node with the state in registers, from the projections to every node's u and
// output: convolution, norms and gates of all nodes at once, then the nodes in an order in which few states must wait.
//
//   y, g, beta as in ssm/conv.cuh;  u = beta (v - e^g S^T k);  o = e^g S^T q + u (q . k);  S <- e^g S + k u^T
//
// Every node has the bits that delta/row gives for it alone after delta/commit has brought the state past its ancestors,
// all at once or one by one: the sums are those of delta/rule.cuh, the fold that of delta/fold.cuh.
//
// Children stand in the order of their subtrees' sizes, so leaves, which change no state, come first, and the state of a
// node is kept only while a subtree of at most half of its size is walked: of 64 nodes, four states at once. A thread
// keeps its own values, in shared memory while there is room and in the scratch behind that.
//
// in:  x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [NV],
//      state [slot][NV][128 v][128 k]
// out: o [rows][VALUES]; k, u, g and x of each node into the factors
// work: kept [tree][SAVES - SHARED_SAVES][NV][128][128]
// grid (8 NK * NV / NK / HEADS, 1, trees), 32 WARPS threads: a block has 16 value columns of each of HEADS heads of a key
// head; its first four warps walk, four columns of every head each, and all prepare. Where the architecture has clusters,
// CLUSTER blocks convolve the rows of their key head together: each some nodes, which it writes into the memory of all.
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
#define WALKERS (WIDE / 4 * 32)       // threads that walk: a warp has four columns of every head
#define GROUPS (NV / NK / HEADS)      // of heads that share a key head
#define LOCAL (2 * DIM + COLUMNS)     // channels that a block has to do with: q, k, v
#define PIECES (COLUMNS / 4)          // of a node's v, four channels each
// A place of the walk: the node and what is done with the state behind it.
#define NODE_MASK 0xffu
#define FOLD 0x100u                   // the node has children
#define KEEP(slot) ((slot) + 1 << 16)  // its state waits there
#define KEEP_AT(word) ((word) >> 16)  // and one, 0 for nowhere

// What nodes have of their own stands in the order of the walk, what says how they hang together in that of the step.
struct Room {
    float keys[NODES][2][DIM];        // k, then q
    float2 gates[NODES][HEADS];       // e^g, beta
    float v[NODES][COLUMNS];
    float weight[4][LOCAL];           // of channel c: [c % 4][c / 4] in units of 4 taps
    int4 lines[NODES];                // the taps' sources, oldest first
    u64 ancestors[NODES];
    u64 full;                         // barrier: what the cluster's blocks give each other has come
    float qk[NODES];                  // q . k
    int parents[NODES];
    int sizes[NODES];                 // of subtrees
    u32 steps[NODES];                 // a subtree's way: nodes before it within its parent's, and one; its level
    u32 kept[NODES];                  // not 0 where a node's state must wait
    uint2 order[NODES];               // see above; where the next node's parent waits, and one
    u32 root_kept;                    // the state before the tree must wait
    u32 unused[3];
#if SHARED_SAVES
    float4 saved[SHARED_SAVES][4 * HEADS][WALKERS];
#endif
};

// Over four neighbouring lanes.
__device__ __forceinline__ u32 quad_sum(u32 x) {
    x += __shfl_xor_sync(WARP_ALL, x, 1);
    return x + __shfl_xor_sync(WARP_ALL, x, 2);
}

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
__device__ __forceinline__ void put_all(float* to, float v, u64* barrier) {
#if CLUSTER > 1
    const u32 at = shared_address(to), counter = shared_address(barrier);
    const int r = threadIdx.x % 32;
    if (r < CLUSTER) {
        u32 there, counts;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(r));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counts) : "r"(counter), "r"(r));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there), "f"(v),
                     "r"(counts)
                     : "memory");
    }
#else
    if (threadIdx.x % 32 == 0) *to = v;
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

// The channel of the convolution that a block has at place i of its own: q, k, then v of every head.
__device__ __forceinline__ int channel_of(int key, int group, int slice, int i) {
    if (i < 2 * DIM) return (i < DIM ? 0 : KEYS - DIM) + key * DIM + i;
    const int of = i - 2 * DIM;
    return 2 * KEYS + head_of(key, group * HEADS + of / WIDE) * DIM + slice * WIDE + of % WIDE;
}

// This thread's values of a waiting state.
struct Waiting {
#if SHARED_SAVES
    float4* shared;
#endif
    float4* behind;
    __device__ __forceinline__ void save(u32 slot, const float4 (&s)[HEADS][4]) const {
#if SHARED_SAVES
        if (SAVES == SHARED_SAVES || slot < SHARED_SAVES) {
#pragma unroll
            for (int i = 0; i < 4 * HEADS; i++) shared[(slot * 4 * HEADS + i) * WALKERS] = s[i / 4][i % 4];
            return;
        }
#endif
        float4* to = behind + (u64)(slot - SHARED_SAVES) * (NV * DIM * DIM / 4);
#pragma unroll
        for (int i = 0; i < 4 * HEADS; i++) to[i * WALKERS] = s[i / 4][i % 4];
    }
    __device__ __forceinline__ void restore(u32 slot, float4 (&s)[HEADS][4]) const {
#if SHARED_SAVES
        if (SAVES == SHARED_SAVES || slot < SHARED_SAVES) {
#pragma unroll
            for (int i = 0; i < 4 * HEADS; i++) s[i / 4][i % 4] = shared[(slot * 4 * HEADS + i) * WALKERS];
            return;
        }
#endif
        const float4* from = behind + (u64)(slot - SHARED_SAVES) * (NV * DIM * DIM / 4);
#pragma unroll
        for (int i = 0; i < 4 * HEADS; i++) s[i / 4][i % 4] = from[i * WALKERS];
    }
};

// What a node has of its own, for the four columns of a warp in every head.
struct Node {
    float4 k[4], q[4];
    float2 gates[HEADS];
    float v[HEADS];
    float qk;
    __device__ __forceinline__ void fetch_q(const float* row) {
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = *(const float4*)(row + DIM + 32 * i);
    }
    __device__ __forceinline__ void fetch_others(const Room& room, int at, const float* row) {
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] = *(const float4*)(row + 32 * i);
#pragma unroll
        for (int c = 0; c < HEADS; c++) {
            gates[c] = room.gates[at][c];
            v[c] = room.v[at][c * WIDE + threadIdx.x / 32 * 4 + lane_column()];
        }
        qk = room.qk[at];
    }
};

// Where a thread writes: of a column's lanes the first has u and the second o.
struct Ways {
    u64 to;
    u32 apart;
    __device__ __forceinline__ void write(int node, const float (&x)[HEADS]) const {
        if (lane_part() >= 2) return;
        u64 at;
        asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(node), "r"(apart), "l"(to));
#pragma unroll
        for (int c = 0; c < HEADS; c++)
            asm volatile("st.global.f32 [%0], %1;" ::"l"(at + c * 4 * DIM * (GROUPED ? 1 : NK)), "f"(x[c]) : "memory");
    }
};

// u and o of a node, and, for one with children, the state brought past it. Leaves the next node's values in `n`.
template <bool INNER>
__device__ __forceinline__ void visit(float4 (&s)[HEADS][4], Node& n, const Room& room, int next, const float* row, int node,
                                      const Ways& ways) {
    float seen[HEADS], read[HEADS], out[HEADS];
#pragma unroll
    for (int c = 0; c < HEADS; c++) seen[c] = part_dot(n.k, s[c]);
#pragma unroll
    for (int c = 0; c < HEADS; c++) seen[c] += __shfl_xor_sync(WARP_ALL, seen[c], 16);
#pragma unroll
    for (int c = 0; c < HEADS; c++) read[c] = part_dot(n.q, s[c]);
#pragma unroll
    for (int gap = 8; gap >= 4; gap >>= 1) {
#pragma unroll
        for (int c = 0; c < HEADS; c++) seen[c] += __shfl_xor_sync(WARP_ALL, seen[c], gap);
    }
    if (INNER) {
#pragma unroll
        for (int c = 0; c < HEADS; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float decay = n.gates[c].x;
                s[c][i].x *= decay, s[c][i].y *= decay, s[c][i].z *= decay, s[c][i].w *= decay;
            }
        }
    }
    n.fetch_q(row);
#pragma unroll
    for (int gap = 16; gap >= 4; gap >>= 1) {
#pragma unroll
        for (int c = 0; c < HEADS; c++) read[c] += __shfl_xor_sync(WARP_ALL, read[c], gap);
    }
#pragma unroll
    for (int c = 0; c < HEADS; c++) {
        const float u = node_u(n.gates[c].y, n.gates[c].x, n.v[c], seen[c]);
        const float o = node_o(n.gates[c].x, read[c], u, n.qk);
        out[c] = lane_part() == 0 ? u : o;
        if (INNER) {
#pragma unroll
            for (int i = 0; i < 4; i++) add(s[c][i], n.k[i], u);
        }
    }
    n.fetch_others(room, next, row);
    ways.write(node, out);
}

// Told of 16 warps where a block stands alone, the compiler takes 128 registers a thread and leaves room for blocks of the
// launch behind this one.
extern "C" __global__ void __launch_bounds__(BLOCKS == 1 && HEADS < 4 ? 512 : THREADS, BLOCKS) IN_CLUSTERS
walk(const Step* step, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha, const float* beta, u32 ld_beta,
     const float* window, u64 window_stride, const float* weight, const float* a, const float* dt, const float* state,
     u64 state_stride, float* factors, u64 factor_stride, float* o, float4* kept) {
    pdl_launch();
    extern __shared__ __align__(128) u8 memory[];
    Room& room = *(Room*)memory;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int key = blockIdx.x / SLICES / GROUPS, group = blockIdx.x / SLICES % GROUPS, slice = blockIdx.x % SLICES;
    // The step, the state and the window are older than the kernel before this one, which has waited for them. Nothing here
    // waits for a load that does not need what it brings.
#pragma unroll 1
    for (int i = tid; i < LOCAL; i += THREADS)
        cp_async_16(shared_address(&room.weight[i % 4][i & ~3]), weight + (u64)channel_of(key, group, slice, i) * TAPS);
    cp_async_commit();
    u64 ancestors = 0;
    int above = 0;
    if (tid < STEP_ROWS) ancestors = step->ancestors[tid], above = step->parent[tid];
    const int trees = step->trees;
    const Tree tree = step->tree[blockIdx.z];
    if ((int)blockIdx.z >= trees) {
        cp_async_wait<0>();
        pdl_wait();
        return;
    }
    const int nodes = tree.nodes;
    const int own_head = head_of(key, group * HEADS), own_column = slice * WIDE + warp * 4 + lane_column();
    const bool walks = tid < WALKERS;
    float4 s[HEADS][4] = {};
    if (walks) {
        const float* s0 =
            of_slot(state, tree.slot, state_stride) + ((u64)own_head * DIM + own_column) * DIM + 4 * lane_part();
#pragma unroll
        for (int i = 0; i < 4 * HEADS; i++)
            s[i / 4][i % 4] = *(const float4*)(s0 + i / 4 * DIM * DIM * (GROUPED ? 1 : NK) + i % 4 * 32);
    }
#if CLUSTER > 1
    if (tid == 0) {
        mbarrier_init(shared_address(&room.full), 1);
        mbarrier_init_fence();
        mbarrier_expect(shared_address(&room.full), nodes * (2 * DIM + 1) * 4);
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    const float* own_window = of_slot(window, tree.slot, window_stride);
#pragma unroll 1
    for (int i = 16 * tid; i < LOCAL; i += 16 * THREADS) {
#pragma unroll
        for (int row = 0; row < TAPS - 1; row++)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(own_window + row * CHANNELS + channel_of(key, group, slice, i)));
    }
    if (tid - tree.first >= 0 && tid - tree.first < nodes) {
        const int node = tid - tree.first;
        room.ancestors[node] = ancestors;
        room.parents[node] = max(above - tree.first, -1);
        room.kept[node] = 0;
    }
    if (tid == 0) room.root_kept = 0, room.order[nodes - 1].y = 0;
    __syncthreads();
    // Four lanes a node look at every fourth of the others.
    const int own = tid / 4, quarter = tid % 4;
    const bool orders = warp < NODES / 8, real = own < nodes;
    int size = 0, parent = -1;
    if (orders) {
#pragma unroll 4
        for (int j = quarter; j < nodes; j += 4) size += (int)(room.ancestors[j] >> own & 1);
        size = quad_sum(size);
    }
    if (orders && real) {
        parent = room.parents[own];
        int taps[TAPS];
        taps_of(taps, room.parents, own);
        if (quarter == 0) room.sizes[own] = size, room.lines[own] = make_int4(taps[0], taps[1], taps[2], taps[3]);
    }
    __syncthreads();
    bool returns = false, waits = false;
    if (orders) {
        // Nodes of subtrees before it; in the bytes above how many of these are larger than one, and how many come behind.
        u32 siblings = 0;
#pragma unroll 4
        for (int j = quarter; j < nodes; j += 4) {
            const int other = room.sizes[j];
            const bool earlier = other < size || (other == size && j < own);
            const u32 counts = earlier ? (u32)other + (other > 1 ? 1u << 16 : 0) : j == own ? 0 : 1u << 24;
            siblings += room.parents[j] == parent ? counts : 0;
        }
        siblings = quad_sum(siblings);
        returns = siblings >> 16 & 0xff;
        waits = siblings >> 24 && size > 1;
        if (real && quarter == 0) {
            room.steps[own] = (siblings & 0xffff) + 1 | (waits ? 1u << 16 : 0u);
            if (waits) (parent < 0 ? room.root_kept : room.kept[parent]) = 1;
        }
    }
    __syncthreads();
    if (orders) {
        const u64 path = real ? room.ancestors[own] : 0;
        u32 sum = 0;
#pragma unroll 4
        for (int j = quarter; j < nodes; j += 4) sum += path >> j & 1 ? room.steps[j] : 0;
        sum = quad_sum(sum);
        const u32 level = sum >> 16;
        const int at = (int)(sum & 0xffff) - 1;
        if (real && quarter == 0) {
            room.order[at].x = own | (size > 1 ? FOLD : 0) | (room.kept[own] ? KEEP(level) : 0);
            if (at) room.order[at - 1].y = returns ? level - waits + 1 : 0;
        }
    }
    const Waiting waiting = {
#if SHARED_SAVES
        &room.saved[0][0][tid % WALKERS],
#endif
        kept + ((u64)blockIdx.z * (SAVES - SHARED_SAVES) * (NV * DIM * DIM / 4) + (u64)blockIdx.x * 4 * HEADS * WALKERS + tid)};
    if (room.root_kept && walks) waiting.save(0, s);
    const Source source = {x + (u64)tree.first * ld_x, own_window + (TAPS - 1) * CHANNELS, ld_x};
    float* node_out = of_slot(factors, tree.slot, factor_stride);
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    cp_async_wait<0>();
    __syncthreads();
    pdl_wait();

    const int rank = cluster_rank();
    const bool keeps = group == 0 && (CLUSTER > 1 || slice == 0);
    // Warps that have the fewest rows of q and k begin with v; gates come last. What a thread needs for its first piece is
    // on its way while it works on rows, and for the next one while it works on a piece.
    const int pieces = nodes * (PIECES + HEADS), rows_of_each = (nodes + CLUSTER - 1) / CLUSTER;
    int piece = (warp + WARPS - rows_of_each % WARPS) % WARPS * 32 + lane;
    float4 in[TAPS];
    const auto begin = [&](int i) {
        if (i < nodes * PIECES) {
            const int at = i / PIECES, within = i % PIECES * 4;
            source.fetch(in, room.lines[room.order[at].x & NODE_MASK], channel_of(key, group, slice, 2 * DIM + within));
        } else if (i < pieces) {
            const int index = i - nodes * PIECES, head = head_of(key, group * HEADS + index % HEADS);
            const u64 row = tree.first + (room.order[index / HEADS].x & NODE_MASK);
            in[0] = make_float4(alpha[row * ld_alpha + head], beta[row * ld_beta + head], a[head], dt[head]);
        }
    };
    begin(piece);
#pragma unroll 1
    for (int at = rank + CLUSTER * warp; at < nodes; at += CLUSTER * WARPS) {
        const int node = room.order[at].x & NODE_MASK;
        const int4 line = room.lines[node];
        const int channel = key * DIM + 4 * lane;
        float4 of_q[TAPS], of_k[TAPS];
        source.fetch(of_q, line, channel), source.fetch(of_k, line, KEYS + channel);
        const float4 q = normalise(mix(room.weight, of_q, 4 * lane), 0);
        const float4 k = normalise(mix(room.weight, of_k, DIM + 4 * lane), NK);
        put_all(&room.keys[at][0][4 * lane], k, &room.full);
        put_all(&room.keys[at][1][4 * lane], q, &room.full);
        put_all(&room.qk[at], row_dot(q, k), &room.full);
        if (keeps) {
            float* to = node_out + (u64)node * NODE_FLOATS;
            *(float4*)(to + channel) = k;
            *(float4*)(to + NODE_X + channel) = of_q[TAPS - 1];
            *(float4*)(to + NODE_X + KEYS + channel) = of_k[TAPS - 1];
        }
    }
#pragma unroll 1
    for (; piece < pieces; piece += THREADS) {
        if (piece < nodes * PIECES) {
            const int at = piece / PIECES, within = piece % PIECES * 4;
            float* to = node_out + (u64)(room.order[at].x & NODE_MASK) * NODE_FLOATS + NODE_X;
            *(float4*)(to + channel_of(key, group, slice, 2 * DIM + within)) = in[TAPS - 1];
            const float4 y = mix(room.weight, in, 2 * DIM + within);
            begin(piece + THREADS);
            *(float4*)&room.v[at][within] = y;
        } else {
            const int index = piece - nodes * PIECES, at = index / HEADS, turn = index % HEADS;
            const float4 own = in[0];
            begin(piece + THREADS);
            const float g = gate_g(own.x, own.z, own.w);
            room.gates[at][turn] = make_float2(expf(g), 1.0f / (1.0f + expf(-own.y)));
            const int node = room.order[at].x & NODE_MASK, head = head_of(key, group * HEADS + turn);
            if (slice == 0) node_out[(u64)node * NODE_FLOATS + NODE_G + head] = g;
        }
    }
    __syncthreads();
#if CLUSTER > 1
    mbarrier_wait(shared_address(&room.full), 0);
#endif

    if (!walks) return;
    const int at_head = own_head * DIM + own_column;
    const float* own_out = lane_part() == 0 ? node_out + NODE_U + at_head : o + (u64)tree.first * VALUES + at_head;
    const Ways ways = {(u64)own_out, u32(lane_part() == 0 ? 4 * NODE_FLOATS : 4 * VALUES)};
    const float* row = &room.keys[0][0][4 * lane_part()];
    Node n;
    n.fetch_q(row), n.fetch_others(room, 0, row);
    uint2 word = room.order[0];
#pragma unroll 1
    for (int i = 1; i <= nodes; i++) {
        // What the next node needs is fetched as soon as its place is free; behind the last stands something else.
        row += 2 * DIM;
        const uint2 next = room.order[i];
        if (word.x & FOLD)
            visit<true>(s, n, room, i, row, word.x & NODE_MASK, ways);
        else
            visit<false>(s, n, room, i, row, word.x & NODE_MASK, ways);
        if (KEEP_AT(word.x) | word.y) {
            if (KEEP_AT(word.x)) waiting.save(KEEP_AT(word.x) - 1, s);
            if (word.y) waiting.restore(word.y - 1, s);
        }
        word = next;
    }
}
