// The gated delta rule over one tree of up to 32 nodes in factor form on Hopper, from the projections to every node's u and
// output, and with NORM on to the output norm: what delta/tree and delta/gated_norm do, in one launch by four warpgroups.
//
// Convolution and gates: see ssm/conv.cuh. Then, with G_i the sum of g
// over the path root..i, anc(i) the strict ancestors and S0 the committed state:
//   A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j in anc(i);   R_i = beta_i (v_i - e^(G_i) S0^T k_i)
//   U = (I + A)^-1 R;   o_i = e^(G_i) S0^T q_i + sum_(j in anc(i) or j = i) P_ij u_j, P_ij = e^(G_i - G_j) (q_i . k_j)
//   NORM: y_i = rms(o_i) * norm * silu(z_i), head by head
//
// in:  x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [NV],
//      state [slot][NV][128 v][128 k]; with NORM z [rows][ld_z], norm [128]
// out: k, u, g and x of each node into the factors; o [rows][VALUES], or with NORM y in the forms of norm/emit.cuh
// grid (NV * 2), 512 threads: a block has 64 value columns of one head. Blocks of one key head stand side by side, and
// CLUSTER of them convolve its q and k together: each a share of the rows, which it writes into the memory of all
// shared memory: `Room`, all of it dynamic
//
// Four warpgroups. Three convolve q and k, the second and the fourth v; a warp has the gates. Then the first warpgroup has R, U
// and o, the second what the state gives to o, the third A and P, a warp of the fourth the inverses; the last two norm o. Blocks
// send each other their rows of q and k, and sums of squares of o, by stores that count themselves on a barrier of the reader.
// Products of the state and of keys run in pairs of halves (delta/products.cuh), the triangular system in pairs of tf32
// (delta/solve_sm90.cuh).
// A node's sums do not depend on how many nodes there are, but they are not those of delta/tree. A node whose key, value or
// gate is not finite is taken out, and it and its descendants give NaN: nothing else is touched. What overflows only in the solver
// is not finite either, and may take with it what other nodes have in the same value column. G is kept in fixed point (2^-40), so
// sums along paths are exact and their order does not matter.
// arch: sm_90a. reference: cpu::reference::{conv, delta}::tree, norm::gated_rms; test: tree_*, verify_*
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "common/wgmma_sm90.cuh"
#include "delta/shape.cuh"
#include "delta/products.cuh"
#include "ssm/conv.cuh"
#include "delta/nodes.cuh"
#include "delta/solve_sm90.cuh"
#include "delta/room_sm90.cuh"
#if NORM
#include "norm/emit.cuh"
#endif

// What a block has to do with.
struct Share {
    int key, head, slice;
    int first_column;  // of its head
    int v_channels;    // where its channels of v begin
};
__device__ __forceinline__ Share share_of_block() {
    Share own;
    own.key = blockIdx.x / SHARING, own.slice = blockIdx.x % SLICES;
    const int turn = blockIdx.x % SHARING / SLICES;
    own.head = GROUPED ? own.key * (NV / NK) + turn : turn * NK + own.key;
    own.first_column = own.slice * COLUMNS;
    own.v_channels = 2 * KEYS + own.head * DIM + own.first_column;
    return own;
}

// What a lane convolves: four channels of q (part 0), k (1) or v (2) of a node.
struct Task {
    int node, part, within;
    __device__ __forceinline__ int channel(const Share& own) const {
        return (part == 2 ? own.v_channels : part * KEYS + own.key * DIM) + within;
    }
};
// A warp's tasks: rows of the block's share of q and k, then pairs of rows of v.
struct Tasks {
    int row, of_rows, pair, of_pairs, stride;
    __device__ __forceinline__ Tasks(int warp, int nodes) {
        of_rows = (2 * nodes - cluster_rank() + CLUSTER - 1) / CLUSTER;
        row = warp < KEEPERS ? warp : of_rows;
        // Pairs are for the last warpgroup, but for its last warp, and what is more than three turns of it for the second.
        const bool last = warp >= KEEPERS, second = warp / 4 == 1;
        stride = last ? 3 : 4;
        pair = last ? warp - KEEPERS : second ? 9 + warp - 4 : MOST;
        of_pairs = min((nodes + TOGETHER - 1) / TOGETHER, last ? 9 : MOST / TOGETHER);
    }
    __device__ __forceinline__ bool more() const { return row < of_rows || pair < of_pairs; }
    __device__ __forceinline__ void next() {
        if (row < of_rows)
            row += KEEPERS;
        else
            pair += stride;
    }
    __device__ __forceinline__ Task task() const {
        const int of_key = cluster_rank() + CLUSTER * row, lane = threadIdx.x % 32;
        if (row < of_rows) return {of_key >> 1, of_key & 1, 4 * lane};
        return {pair * TOGETHER + lane / ACROSS, 2, lane % ACROSS * 4};
    }
};

// In the order of the text, unlike loads that the compiler may move.
__device__ __forceinline__ float4 fetched(const float* from) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}

// What the state gives to a node's value columns, keys' or queries' as `rows` says: sums of a warp's 16 columns and all nodes.
__device__ __forceinline__ void state_products(float (&sums)[SUMS], Room& room, u32 rows, int own16) {
    const u32 state = shared_address(room.state);
    u32 high[8][4], low[8][4];
#pragma unroll
    for (int s = 0; s < 8; s++) {
        left(high[s], state, COLUMNS, own16, own16 + 8, s);
        left(low[s], state + LOW(COLUMNS), COLUMNS, own16, own16 + 8, s);
    }
    float rest[SUMS] = {};
    wait_sent(room.rows_in);
    publish();
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 8; s++) {
        product(sums, high[s], step_of(rows, ROWS, s));
        product(rest, high[s], step_of(rows + LOW(ROWS), ROWS, s));
        product(rest, low[s], step_of(rows, ROWS, s));
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] += rest[i];
}

// R of what the state gives to keys; what is not finite becomes zero and its node bad, or it would reach all nodes.
__device__ __forceinline__ void make_r(float (&x)[SUMS], Room& room, const float (&of_column)[2], int column) {
    const int t = threadIdx.x % 4;
    float check = 0.0f;
#pragma unroll
    for (int jt = 0; jt < TILES; jt++) {
        const int i = 8 * jt + 2 * t;
        const float4 gate = *(const float4*)&room.gates[i];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float* v = room.v + swizzled(i, column + 8 * h);
            float(&own)[2] = *(float(*)[2])(x + 4 * jt + 2 * h);
            own[0] = gate.y * (v[0] - own[0] * (gate.x * of_column[h]));
            own[1] = gate.w * (v[COLUMNS] - own[1] * (gate.z * of_column[h]));
            check = fmaf(own[0], 0.0f, fmaf(own[1], 0.0f, check));
        }
    }
    if (check == 0.0f) return;
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const bool fine = fabsf(x[i]) < INF;
        bad |= fine ? 0 : 1u << i / 4 * 8 + i % 2;
        x[i] = fine ? x[i] : 0.0f;
    }
    if (bad) atomicOr(&room.bad, bad << 2 * t);
}

// By the second warpgroup, for the first.
__device__ __forceinline__ void carry(const float (&x)[SUMS], Room& room, const float (&of_column)[2]) {
#pragma unroll
    for (int jt = 0; jt < TILES; jt++) {
        const float4 gate = *(const float4*)&room.gates[8 * jt + threadIdx.x % 4 * 2];
        room.carried[jt][threadIdx.x % GROUP] = make_float4(x[4 * jt] * (gate.x * of_column[0]), x[4 * jt + 1] * (gate.z * of_column[0]),
                                                            x[4 * jt + 2] * (gate.x * of_column[1]), x[4 * jt + 3] * (gate.z * of_column[1]));
    }
}

// e^(G_i - G_j) times what pairs are scaled by, -beta with it for A, zero where j is not on the path of i; of 16 nodes i of a warp.
__device__ __forceinline__ void make_decays(float (&decay)[SUMS], const Room& room, bool is_key, int i0) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = i0 + 8 * h;
        const u32 path = ((u32)room.ancestors[i] & (is_key ? ~(1u << i) : WARP_ALL)) >> 2 * t;
        const float2 sum = room.sums[i];
        const float scale = is_key ? room.gates[i].y * (-1.0f / (K_SCALE * K_SCALE)) : 1.0f / (K_SCALE * Q_SCALE);
#pragma unroll
        for (int jt = 0; jt < TILES; jt++) {
            const float4 of = *(const float4*)&room.sums[8 * jt + 2 * t];
            const float x = scale * exp2_of((sum.x - of.x) + (sum.y - of.y)), y = scale * exp2_of((sum.x - of.z) + (sum.y - of.w));
            decay[4 * jt + 2 * h] = path >> 8 * jt & 1 ? x : 0.0f;
            decay[4 * jt + 2 * h + 1] = path >> 8 * jt + 1 & 1 ? y : 0.0f;
        }
    }
}

// A and P by the third warpgroup: keys in two warps, queries in the others, 16 nodes each, times all keys.
__device__ __forceinline__ void make_pairs(Room& room, int warp) {
    const bool is_key = warp % 4 < 2;
    const int t = threadIdx.x % 4, i0 = warp % 2 * 16 + threadIdx.x % 32 / 4;
    const u32 rows = shared_address(room.rows);
    float decay[SUMS], sums[SUMS] = {}, rest[SUMS] = {};
    meet(GATES_THERE);
    make_decays(decay, room, is_key, i0);
    wait_sent(room.rows_in);
    publish();
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 8; s++) {
        const u64 high = step_of(rows, ROWS, s), low = step_of(rows + LOW(ROWS), ROWS, s);
        product(sums, high, high);
        product(rest, high, low);
        product(rest, low, high);
    }
    wgmma_commit();
    wgmma_wait<0>();
    float check = 0.0f;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        // A pair that does not see each other may hold anything.
        sums[i] = decay[i] == 0.0f ? 0.0f : (sums[i] + rest[i]) * decay[i];
        check = fmaf(sums[i], 0.0f, check);
    }
    // In A what is not finite would reach all nodes, in P its own alone.
    if (is_key && check != 0.0f) {
        u32 bad = 0;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const bool fine = fabsf(sums[i]) < INF;
            bad |= fine ? 0 : 1u << i % 4 / 2 * 8;
            sums[i] = fine ? sums[i] : 0.0f;
        }
        if (bad) atomicOr(&room.bad, bad << i0);
    }
    if (is_key) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = warp % 2 ? sums[(8 + 6 * h) % SUMS] : sums[6 * h], y = warp % 2 ? sums[(9 + 6 * h) % SUMS] : sums[6 * h + 1];
            *(float2*)(room.diagonal + (i0 + 8 * h) * LD_DIAGONAL + 2 * t) = make_float2(x, y);
        }
        arrive(DIAGONAL_THERE);
    }
    float* pairs = is_key ? room.a : room.p;
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        // Behind the warp's rows there is nothing, and on the diagonal of A stand inverses.
        if (i == 8 && warp % 2 == 0) break;
        const int row = i0 + i % 4 / 2 * 8, j = i / 4 * 8 + 2 * t;
        if (is_key && row / 8 == j / 8) continue;
        *(float4*)(pairs + row * LD_PAIRS + 2 * j) = pairs_of(sums[i], sums[i + 1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) IN_CLUSTERS
tree_sm90(const Step* step, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha, const float* beta, u32 ld_beta,
          const float* window, u64 window_stride, const float* weight, const float* a, const float* dt, const float* state,
          u64 state_stride, float* factors, u64 factor_stride,
#if NORM
          const float* z, u32 ld_z, const float* norm, float eps, RowOutput out
#else
          float* o
#endif
) {
    extern __shared__ __align__(1024) u8 memory[];
    Room& room = *(Room*)memory;
    const int tid = threadIdx.x, lane = tid % 32, warp = warp_index(), group = warp / 4;
    const Share own = share_of_block();
    // Many blocks begin only when one of the kernel before has left their multiprocessor, so all that comes before the first load of x
    // is paid. The step, the state and the window are older than the kernel before this one, which has waited for them.
    const int trees = step->trees;
    const Tree tree = step->tree[0];
#if NORM
    pdl_launch();
#endif
    constexpr int MINE = COLUMNS / WARPS;  // columns of the state that a warp splits
    // Asked for before it is known whether there is a tree at all.
    const float* s0 = of_slot(state, trees < 1 ? 0 : tree.slot, state_stride) + ((u64)own.head * DIM + own.first_column + warp * MINE) * DIM + 4 * lane;
    float4 own_state[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) own_state[i] = state_at(s0 + i * DIM);
    if (trees < 1) {
        pdl_wait();
        return;
    }
    const int nodes = tree.nodes;
    Tasks tasks(warp, nodes);
    Task task = tasks.task();
    bring_weights<LOCAL, THREADS>(room.weight, weight, own.key, own.v_channels);
    const u32 taps = step->conv_sources[tree.first + min(task.node, nodes - 1)];
    // Of the warp that has gates: nodes 1, 2, 4, 8 and 16 before the lane's own on its path, below 0 where there is none.
    int before[5];
    float own_a, own_dt;
    if (warp == WARPS - 1) {
        before[0] = lane < nodes ? max(step->parent[tree.first + lane] - tree.first, -1) : -1;
        own_a = a[own.head], own_dt = dt[own.head];
    }
    if (tid < MOST) {
        room.ancestors[tid] = tid < nodes ? step->ancestors[tree.first + tid] : 0;
        room.taps[tid] = tid < nodes ? step->conv_sources[tree.first + tid] : 0;
    }
    if (tid == 0) {
        mbarrier_init(shared_address(&room.rows_in), 1);
        mbarrier_init(shared_address(&room.squares_in), 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(shared_address(&room.rows_in), 2 * nodes * 512);
        mbarrier_arrive_expect_tx(shared_address(&room.squares_in), 2 * SLICES * NODES * 4);
        room.bad = 0;
    }
    __syncwarp();
    // The fence has told the others what they need; an arrival that releases would wait here for all loads.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const float* own_window = of_slot(window, tree.slot, window_stride);
    prefetch_window<LOCAL, THREADS>(own_window, own.key, own.v_channels);
    // Nodes that fill the bucket up are zero.
#pragma unroll 1
    for (int i = nodes + warp; i < NODES; i += WARPS) {
#pragma unroll
        for (int part = 0; part < 4; part++)
            *(u64*)(room.rows + place(ROWS, (part & 1) * MOST + i, lane) + (part & 2 ? LOW(ROWS) : 0)) = 0;
#pragma unroll
        for (int v = 0; v < COLUMNS; v += 32) room.v[i * COLUMNS + v + lane] = 0.0f;
    }
    u32 far[CLUSTER];  // from this block's memory to that of each
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) far[r] = in_block(shared_address(memory), r) - shared_address(memory);
    if (warp == WARPS - 1) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int further = __shfl_sync(WARP_ALL, before[i], max(before[i], 0));
            before[i + 1] = before[i] < 0 ? before[i] : further;
        }
    }
    const Source source = {x + (u64)tree.first * ld_x, own_window + (TAPS - 1) * CHANNELS, ld_x};
    float* node_out = of_slot(factors, tree.slot, factor_stride);
    const float* from[TAPS];
    source.places(from, taps, task.channel(own));
#pragma unroll
    for (int i = 0; i < TAPS; i++) asm volatile("" : "+l"(from[i]));  // else made behind the wait
#if NORM
    // A thread of the last two warpgroups has eight columns of a node for the norm: neighbouring lanes have neighbouring nodes,
    // as a16 has them.
    const int seat = tid % (2 * GROUP), seat_node = seat / 64 * 8 + seat % 8, seat_column = seat % 64 / 8 * 8;
    float4 gate[2], of_norm[2];
#pragma unroll
    for (int i = 0; i < 2; i++) of_norm[i] = __ldg((const float4*)(norm + own.first_column + seat_column) + i);
#endif
    // A branch, over which the compiler does not put off what comes before.
    if (nodes > 0) pdl_wait();

    // What the kernel before made is on its way while the state is split.
    float4 next[TAPS];
    float of_gate[2];
    if (warp == WARPS - 1) {
        const u64 at = tree.first + min(lane, nodes - 1);
        of_gate[0] = alpha[at * ld_alpha + own.head], of_gate[1] = beta[at * ld_beta + own.head];
    } else {
#pragma unroll
        for (int i = 0; i < TAPS; i++) next[i] = fetched(from[i]);
    }
#if NORM
    if (group >= 2) {
        const float* of_z = z + (u64)(tree.first + min(seat_node, nodes - 1)) * ld_z + own.head * DIM + own.first_column + seat_column;
#pragma unroll
        for (int i = 0; i < 2; i++) gate[i] = __ldcg((const float4*)of_z + i);
    }
#else
    pdl_launch();  // behind the wait, for delta/gated_norm
#endif
    if (nodes > 0) {  // likewise
#pragma unroll
        for (int i = 0; i < MINE; i++) keep_column<COLUMNS>(room.state, room.unscale, warp * MINE + i, own_state[i]);
    }
    cp_async_wait<0>();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    __syncthreads();
    Weights w;
    const auto fetch_weights = [&]() {
#pragma unroll
        for (int c = 0; c < 4; c++) w.channel[c] = *(const float4*)&room.weight[c][task.part * DIM + task.within];
    };
    fetch_weights();

    if (warp == WARPS - 1) {
        float g = of_gate[0], rate = of_gate[1];
        g = lane < nodes ? gate_g(g, own_a, own_dt) : 0.0f;
        rate = lane < nodes ? __fdividef(1.0f, 1.0f + __expf(-rate)) : 0.0f;
        i64 sum = __float2ll_rn(fminf(fmaxf(g, -1e5f), 1e5f) * (LOG2_E * G_SCALE));
#pragma unroll
        for (int i = 0; i < 5; i++) {
            const i64 more = __shfl_sync(WARP_ALL, sum, max(before[i], 0));
            sum += before[i] < 0 ? 0 : more;
        }
        const float near = (float)sum, rest = (float)(sum - __float2ll_rn(near));
        room.sums[lane] = make_float2(near * (1.0f / G_SCALE), rest * (1.0f / G_SCALE));
        room.gates[lane] = make_float2(exp2_of(near * (1.0f / G_SCALE)), rate);
        arrive(GATES_THERE);
        if (lane < nodes && own.slice == 0) node_out[(u64)lane * NODE_FLOATS + NODE_G + own.head] = g;
        if (lane < nodes && !(fabsf(g) < INF)) atomicOr(&room.bad, 1u << lane);
    } else {
        const bool keeps = SHARING <= CLUSTER || blockIdx.x % SHARING < CLUSTER;
        const u32 rows = shared_address(room.rows), rows_in = shared_address(&room.rows_in);
#pragma unroll 1
        while (tasks.more()) {
            float4 in[TAPS];
#pragma unroll
            for (int i = 0; i < TAPS; i++) in[i] = next[i];
            const Task done = task;
            const float4 y = convolve(w, in[0], in[1], in[2], in[3]);
            tasks.next();
            if (tasks.more()) {
                task = tasks.task();
                source.places(from, room.taps[min(task.node, nodes - 1)], task.channel(own));
#pragma unroll
                for (int i = 0; i < TAPS; i++) next[i] = *(const float4*)from[i];
                fetch_weights();
            }
            float* kept = node_out + (u64)done.node * NODE_FLOATS;
            if (done.part < 2) {
                const float4 unit = normalise(y, done.part * NK);
                const uint4 h = halved(unit, done.part ? K_SCALE : Q_SCALE);
                const u32 to = rows + place(ROWS, done.part ? done.node : MOST + done.node, lane);
#pragma unroll
                for (int r = 0; r < CLUSTER; r++) {
                    send(to + far[r], h.x, h.y, rows_in + far[r]);
                    send(to + LOW(ROWS) + far[r], h.z, h.w, rows_in + far[r]);
                }
                if (keeps) {
                    *(float4*)(kept + NODE_X + done.channel(own)) = in[3];
                    if (done.part) *(float4*)(kept + own.key * DIM + done.within) = unit;
                }
            } else if (done.node < nodes) {
                *(float4*)(room.v + swizzled(done.node, done.within)) = y;
                *(float4*)(kept + NODE_X + done.channel(own)) = in[3];
            }
        }
    }

    if (group < 2) {
        // A warp has 16 columns.
        const int own16 = warp % 4 * 16, column = own16 + lane / 4, first_node = lane % 4 * 2;
        float sums[SUMS] = {};
        state_products(sums, room, shared_address(room.rows) + group * (MOST * 128), own16);
        const float scale = 1.0f / (group == 0 ? K_SCALE : Q_SCALE);
        const float of_column[2] = {room.unscale[column] * scale, room.unscale[column + 8] * scale};
        meet(CONVOLVED);
        if (group == 1) {
            carry(sums, room, of_column);
            arrive(ALL_THERE);
            return;
        }
        make_r(sums, room, of_column, column);
        meet(ALL_THERE);
        Tile u[TILES], of_o[TILES];
#pragma unroll
        for (int i = 0; i < SUMS; i++) u[i / 4].x[i % 4] = sums[i];
#pragma unroll
        for (int jt = 0; jt < TILES; jt++) {
            const float4 c = room.carried[jt][tid];
            of_o[jt].x[0] = c.x, of_o[jt].x[1] = c.y, of_o[jt].x[2] = c.z, of_o[jt].x[3] = c.w;
        }
        solve(u, of_o, room.a, room.p);
        // Sum i of a thread is of column `column + i % 4 / 2 * 8` and this node.
        const auto node_of = [&](int i) { return i / 4 * 8 + first_node + i % 2; };
        const u32 bad = room.bad;
        if (bad) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                if ((u32)room.ancestors[node_of(i)] & bad) u[i / 4].x[i % 4] = of_o[i / 4].x[i % 4] = NAN_F;
            }
        }
#if NORM
#pragma unroll
        for (int i = 0; i < SUMS; i++) room.o[node_of(i) * LD_O + column + i % 4 / 2 * 8] = of_o[i / 4].x[i % 4];
        arrive(O_THERE);
#else
        float* o_out = o + (u64)tree.first * VALUES + own.head * DIM + own.first_column + column;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (node_of(i) < nodes) o_out[(u64)node_of(i) * VALUES + i % 4 / 2 * 8] = of_o[i / 4].x[i % 4];
#endif
        float* u_out = node_out + NODE_U + own.head * DIM + own.first_column + column;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (node_of(i) < nodes) u_out[(u64)node_of(i) * NODE_FLOATS + i % 4 / 2 * 8] = u[i / 4].x[i % 4];
        return;
    }
    arrive(CONVOLVED);
    if (group == 2) {
        make_pairs(room, warp);
        arrive(ALL_THERE);
    } else if (warp == KEEPERS) {
        meet(DIAGONAL_THERE);
        invert(room.a, room.diagonal);
        arrive(ALL_THERE);
    }
#if NORM
#pragma unroll
    for (int i = 0; i < 2; i++) {
        gate[i].x = quick_silu(gate[i].x) * of_norm[i].x, gate[i].y = quick_silu(gate[i].y) * of_norm[i].y;
        gate[i].z = quick_silu(gate[i].z) * of_norm[i].z, gate[i].w = quick_silu(gate[i].w) * of_norm[i].w;
    }
    meet(O_THERE);
    if (seat_node >= NODES) return;
    float4 y[2];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        y[i] = *(const float4*)(room.o + seat_node * LD_O + seat_column + 4 * i);
        sum = fmaf(y[i].x, y[i].x, fmaf(y[i].y, y[i].y, fmaf(y[i].z, y[i].z, fmaf(y[i].w, y[i].w, sum))));
    }
    sum += __shfl_xor_sync(WARP_ALL, sum, 8);
    sum += __shfl_xor_sync(WARP_ALL, sum, 16);
    // A warp has half of the block's columns of eight nodes, and tells both blocks of the head.
    if (lane < 16) {
        const int to = cluster_rank() / SLICES * SLICES + lane / 8;
        const float* place = &room.squares[2 * own.slice + seat % 64 / 32][seat_node];
        send(in_block(shared_address(place), to), sum, in_block(shared_address(&room.squares_in), to));
    }
    wait_sent(room.squares_in);
    if (seat_node >= nodes) return;
    sum = (room.squares[0][seat_node] + room.squares[1][seat_node]) + (room.squares[2][seat_node] + room.squares[3][seat_node]);
    const float factor = rsqrtf(sum * (1.0f / DIM) + eps);
    const float normed[8] = {y[0].x * factor * gate[0].x, y[0].y * factor * gate[0].y, y[0].z * factor * gate[0].z,
                             y[0].w * factor * gate[0].w, y[1].x * factor * gate[1].x, y[1].y * factor * gate[1].y,
                             y[1].z * factor * gate[1].z, y[1].w * factor * gate[1].w};
    store_row_8(out, tree.first + seat_node, own.head * DIM + own.first_column + seat_column, normed);
#endif
}
