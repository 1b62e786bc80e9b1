// The gated delta rule over a tree in factor form, from the projections to every node's u and output: convolution,
// norms and gates, then all nodes at once from one read of the state, which stays as it is.
//
// Convolution and gates: see ssm/conv_tree, which has the same for the sequential form. Then, with G_i the sum of g
// over the path root..i, anc(i) the strict ancestors and S0 the committed state:
//   A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j in anc(i);   R_i = beta_i (v_i - e^(G_i) S0^T k_i)
//   (I + A) U = R;   o_i = e^(G_i) S0^T q_i + sum_(j in anc(i) or j = i) e^(G_i - G_j) (q_i . k_j) u_j
//
// in:  x [rows][ld_x], alpha, beta [rows][ld], window [slot][3][CHANNELS], weight [CHANNELS][4], a, dt [NV],
//      state [slot][NV][128 v][128 k]
// out: o [rows][VALUES]; k, u, g and x of each node into the factors
// grid (128 / COLUMNS, NV, trees), 8 COLUMNS threads: a block has COLUMNS value columns of one head of one tree
// shared memory: 4 * (128 * (2 * NODES + COLUMNS) + NODES * COLUMNS) bytes
//
// Products [K; Q] . [K | S0]^T run on the tensor cores in tf32 with both operands split in two (3 products), which
// keeps 21 bits. A 16-row tile is 8 rows of K over the same 8 rows of Q, so tiles exist only as far as nodes do, and a
// node's sums do not depend on how many nodes there are. The triangular solve takes 8 nodes at a time: the inverse of
// the tile's own 8x8 block, then what the tile gives to all later ones. Only ancestors are ever multiplied in: a NaN in
// a sibling stays there. G is kept as a sum of two floats, since differences of long sums matter.
// arch: sm_80. reference: cpu::reference::{conv, delta}::tree; test: tree_*
// hot
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"
#include "delta/sums.cuh"
#include "ssm/conv.cuh"

#define TILES (NODES / 8)
#define S_TILES (COLUMNS / 8)
#define WARPS (COLUMNS / 4)
#define THREADS (WARPS * 32)
// Column tiles of one task: they share the rows.
#define PAIR (NODES > 8 ? 2 : 1)
#define TASKS_OF(t) ((S_TILES + (t) + 1 + PAIR - 1) / PAIR)

// Row `row`, 16-byte piece `piece` (0..31) of an operand of 128 columns: 64-byte pieces are exchanged in odd rows so
// that the eight lanes of a phase (2 rows x 64 bytes) touch all banks.
__device__ __forceinline__ int place(int row, int piece) { return row * DIM + ((piece ^ ((row & 1) << 2)) << 2); }

__device__ __forceinline__ void split(float x, u32& high, u32& low) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

struct Task {
    int tile;    // rows 8 * tile .. of K and of Q
    int column;  // first column tile: 0 .. S_TILES are of the state, then keys
};

__device__ __forceinline__ Task task_of(int index) {
    Task task = {0, index};
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        if (task.tile == t && task.column >= TASKS_OF(t)) {
            task.column -= TASKS_OF(t);
            task.tile++;
        }
    }
    task.column *= PAIR;
    return task;
}

constexpr int all_tasks() {
    int n = 0;
    for (int t = 0; t < TILES; t++) n += TASKS_OF(t);
    return n;
}
constexpr int ROUNDS = (all_tasks() + WARPS - 1) / WARPS;

// Where the taps of a node come from: nodes of the tree, or -1 .. -3 for the newest to the oldest row of the window.
struct Source {
    const float* x;       // of the tree's first node
    u32 ld;
    const float* window;  // of the tree's slot
    __device__ __forceinline__ float4 at(int tap, int channel) const {
        return *(const float4*)(tap >= 0 ? x + (u64)tap * ld + channel : window + (tap + TAPS - 1) * CHANNELS + channel);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
tree(const Step* step, const float* x, u32 ld_x, const float* alpha, u32 ld_alpha, const float* beta, u32 ld_beta,
     const float* window, u64 window_stride, const float* weight, const float* a, const float* dt, const float* state,
     u64 state_stride, float* factors, u64 factor_stride, float* o) {
    pdl_launch();
    extern __shared__ float room[];
    float* keys = room;                       // [NODES][128], swizzled
    float* queries = keys + NODES * DIM;      // [NODES][128], swizzled
    float* columns = queries + NODES * DIM;   // [COLUMNS][128], swizzled: rows of the transposed state
    float* values = columns + COLUMNS * DIM;  // [NODES][COLUMNS]
    // Once the products are in registers, keys and queries make room for:
    float2* weights = (float2*)room;           // [NODES][NODES]: A and the decayed q k products
    float* right = room + 2 * NODES * NODES;   // [NODES][COLUMNS]: R, then U
    float* carried = right + NODES * COLUMNS;  // [NODES][COLUMNS]: what S0 gives to o
    // And the state for the rows of a tile before its own inverse is applied.
    float* staged = columns;                   // [2][8][COLUMNS]
    __shared__ float2 sums[NODES];             // G
    __shared__ float own_g[NODES];
    __shared__ float betas[NODES];
    __shared__ int4 lines[NODES];              // the taps' sources, oldest first
    __shared__ u64 ancestors[NODES];
    __shared__ int parents[NODES];
    __shared__ float4 inverse[TILES][8][2];

    const int tid = threadIdx.x;
    const int warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, key = key_head(head);
    const int first_column = blockIdx.x * COLUMNS;
    // The step and the state are older than the kernel before this one, which has waited for them.
    const int trees = step->trees;
    const Tree tree = step->tree[blockIdx.z];
    if ((int)blockIdx.z >= trees) return;
    const int nodes = tree.nodes;
    const int tiles = (nodes + 7) / 8;
    const float* s0 = of_slot(state, tree.slot, state_stride) + ((u64)head * DIM + first_column) * DIM;
#pragma unroll
    for (int i = tid; i < COLUMNS * 32; i += THREADS) {
        const int row = i / 32, piece = i % 32;
        cp_async_16(shared_address(columns + place(row, piece)), s0 + row * DIM + piece * 4);
    }
    cp_async_commit();
    if (tid < NODES) {
        const int row = tree.first + tid;
        ancestors[tid] = tid < nodes ? step->ancestors[row] : 0;
        parents[tid] = tid < nodes ? max(step->parent[row] - tree.first, -1) : -1;
    }
    // Even warps convolve queries, odd ones keys, all of them values.
    const int is_key = warp & 1;
    const int qk_head = is_key * NK + key, qk_channel = qk_head * DIM + 4 * lane;
    constexpr int ACROSS = COLUMNS / 4, TOGETHER = 32 / ACROSS;  // lanes and rows of a warp in the values
    const int v_place = lane % ACROSS * 4;
    const int v_channel = 2 * KEYS + head * DIM + first_column + v_place;
    const Weights qk_weights = load_weights(weight, qk_channel), v_weights = load_weights(weight, v_channel);
    const float own_a = a[head], own_dt = dt[head];
    __syncthreads();
    if (tid < nodes) {
        int taps[TAPS] = {-3, -2, -1, tid};
        int parent = tid;
#pragma unroll
        for (int tap = TAPS - 2; tap >= 0; tap--) {
            parent = parents[parent];
            if (parent < 0) break;
            // The window moves up by one for every node that stands before it.
#pragma unroll
            for (int i = 0; i < TAPS - 1; i++)
                if (i < tap) taps[i]++;
            taps[tap] = parent;
        }
        lines[tid] = make_int4(taps[0], taps[1], taps[2], taps[3]);
    }
    __syncthreads();
    pdl_wait();
    const Source source = {x + (u64)tree.first * ld_x, ld_x, of_slot(window, tree.slot, window_stride)};
    float* node_out = of_slot(factors, tree.slot, factor_stride);
#if GROUPED
    const bool keeps_keys = blockIdx.x == 0 && head % (NV / NK) == 0;
#else
    const bool keeps_keys = blockIdx.x == 0 && head < NK;
#endif
    if (tid < NODES) {
        float own = 0.0f, rate = 0.0f;
        if (tid < nodes) {
            const u64 row = tree.first + tid;
            own = gate_g(alpha[row * ld_alpha + head], own_a, own_dt);
            rate = 1.0f / (1.0f + expf(-beta[row * ld_beta + head]));
            if (blockIdx.x == 0) node_out[(u64)tid * NODE_FLOATS + NODE_G + head] = own;
        }
        own_g[tid] = own;
        betas[tid] = rate;
    }
    constexpr int BATCH = NODES > 8 ? 3 : 2;
    constexpr int APART = WARPS / 2;  // nodes of a batch
    for (int first = warp / 2; first < nodes; first += APART * BATCH) {
        float4 in[BATCH][TAPS];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int4 line = lines[min(first + APART * b, nodes - 1)];
            in[b][0] = source.at(line.x, qk_channel), in[b][1] = source.at(line.y, qk_channel);
            in[b][2] = source.at(line.z, qk_channel), in[b][3] = source.at(line.w, qk_channel);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int node = first + APART * b;
            if (node >= nodes) break;
            const float4 y = normalise(convolve(qk_weights, in[b][0], in[b][1], in[b][2], in[b][3]), qk_head);
            *(float4*)((is_key ? keys : queries) + place(node, lane)) = y;
            if (keeps_keys) {
                float* to = node_out + (u64)node * NODE_FLOATS;
                *(float4*)(to + NODE_X + qk_channel) = in[b][3];
                if (is_key) *(float4*)(to + key * DIM + 4 * lane) = y;
            }
        }
    }
    for (int first = warp * TOGETHER + lane / ACROSS; first < nodes; first += 2 * WARPS * TOGETHER) {
        float4 in[2][TAPS];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const int4 line = lines[min(first + b * WARPS * TOGETHER, nodes - 1)];
            in[b][0] = source.at(line.x, v_channel), in[b][1] = source.at(line.y, v_channel);
            in[b][2] = source.at(line.z, v_channel), in[b][3] = source.at(line.w, v_channel);
        }
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const int node = first + b * WARPS * TOGETHER;
            if (node >= nodes) break;
            *(float4*)(values + node * COLUMNS + v_place) = convolve(v_weights, in[b][0], in[b][1], in[b][2], in[b][3]);
            *(float4*)(node_out + (u64)node * NODE_FLOATS + NODE_X + v_channel) = in[b][3];
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    // G: a warp per node, two possible ancestors a lane; zeros change nothing.
    for (int i = warp; i < nodes; i += WARPS) {
        const u64 mine = ancestors[i];
        float2 sum = make_float2(0.0f, 0.0f);
        if (lane < NODES && mine >> lane & 1) sum.x = own_g[lane];
        if (NODES > 32 && mine >> (32 + lane) & 1) two_sum(sum, make_float2(own_g[(32 + lane) % NODES], 0.0f));
#pragma unroll
        for (int gap = NODES > 16 ? 16 : NODES > 8 ? 8 : 4; gap; gap >>= 1) {
            float2 other;
            other.x = __shfl_xor_sync(WARP_ALL, sum.x, gap);
            other.y = __shfl_xor_sync(WARP_ALL, sum.y, gap);
            two_sum(sum, other);
        }
        if (lane == 0) sums[i] = sum;
    }

    // Products of 8 nodes (their K rows, then their Q rows) with PAIR tiles of 8 columns.
    float product[ROUNDS][PAIR][4];
    int n_tasks = 0;
#pragma unroll
    for (int i = 0; i < TILES; i++) n_tasks += i < tiles ? TASKS_OF(i) : 0;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int index = warp + round * WARPS;
        if (index >= n_tasks) break;
        const Task task = task_of(index);
        const int flip = (g & 1) << 2;
        const float* k_row = keys + (task.tile * 8 + g) * DIM;
        const float* q_row = queries + (task.tile * 8 + g) * DIM;
        const float* b_row[PAIR];
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
            const int column = min(task.column + p, S_TILES + task.tile);
            b_row[p] = (column < S_TILES ? columns + column * 8 * DIM : keys + (column - S_TILES) * 8 * DIM) + g * DIM;
        }
        float main[PAIR][4] = {}, rest[PAIR][4] = {}, last[PAIR][4] = {};
#pragma unroll 4
        for (int k = 0; k < 8; k++) {
            const int at = ((4 * k + t) ^ flip) << 2;
            const float4 a_k = *(const float4*)(k_row + at), a_q = *(const float4*)(q_row + at);
            u32 high[8], low[8];
            split(a_k.x, high[0], low[0]), split(a_q.x, high[1], low[1]);
            split(a_k.y, high[2], low[2]), split(a_q.y, high[3], low[3]);
            split(a_k.z, high[4], low[4]), split(a_q.z, high[5], low[5]);
            split(a_k.w, high[6], low[6]), split(a_q.w, high[7], low[7]);
#pragma unroll
            for (int p = 0; p < PAIR; p++) {
                const float4 b = *(const float4*)(b_row[p] + at);
                u32 b_high[4], b_low[4];
                split(b.x, b_high[0], b_low[0]), split(b.y, b_high[1], b_low[1]);
                split(b.z, b_high[2], b_low[2]), split(b.w, b_high[3], b_low[3]);
                mma_tf32(main[p], high[0], high[1], high[2], high[3], b_high[0], b_high[1]);
                mma_tf32(rest[p], high[0], high[1], high[2], high[3], b_low[0], b_low[1]);
                mma_tf32(last[p], low[0], low[1], low[2], low[3], b_high[0], b_high[1]);
                mma_tf32(main[p], high[4], high[5], high[6], high[7], b_high[2], b_high[3]);
                mma_tf32(rest[p], high[4], high[5], high[6], high[7], b_low[2], b_low[3]);
                mma_tf32(last[p], low[4], low[5], low[6], low[7], b_high[2], b_high[3]);
            }
        }
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
#pragma unroll
            for (int i = 0; i < 4; i++) product[round][p][i] = main[p][i] + (rest[p][i] + last[p][i]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int index = warp + round * WARPS;
        if (index >= n_tasks) break;
        const Task task = task_of(index);
        const int i = task.tile * 8 + g;
        const float2 sum = sums[i];
        const float rate = betas[i];
        const u64 mine = ancestors[i];
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
            const int column = task.column + p;
            if (column > S_TILES + task.tile) break;
            const float* c = product[round][p];
            if (column < S_TILES) {
                const int v = column * 8 + 2 * t;
                const float decay = expf(sum.x + sum.y);
                const float2 value = *(const float2*)(values + i * COLUMNS + v);
                *(float2*)(right + i * COLUMNS + v) =
                    make_float2(rate * (value.x - decay * c[0]), rate * (value.y - decay * c[1]));
                *(float2*)(carried + i * COLUMNS + v) = make_float2(decay * c[2], decay * c[3]);
            } else {
                const int j = (column - S_TILES) * 8 + 2 * t;
                float2 pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float2 past = sums[j + e];
                    const bool seen = mine >> (j + e) & 1;
                    const float decay = seen ? expf((sum.x - past.x) + (sum.y - past.y)) : 0.0f;
                    pair[e] = make_float2(seen && j + e != i ? rate * decay * c[e] : 0.0f,
                                          seen ? decay * c[2 + e] : 0.0f);
                }
                *(float4*)(weights + i * NODES + j) = make_float4(pair[0].x, pair[0].y, pair[1].x, pair[1].y);
            }
        }
    }
    __syncthreads();
    // A warp has a row of every tile and 32 columns of it.
    const int own_row = warp % 8, own_column = warp / 8 * 32 + lane;
    float u[TILES], out[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        if (tile >= tiles) break;
        const int at = (tile * 8 + own_row) * COLUMNS + own_column;
        u[tile] = right[at];
        out[tile] = carried[at];
        if (tile == 0) staged[own_row * COLUMNS + own_column] = u[0];
    }
    // Inverses of the 8x8 blocks (I + A) on the diagonal, a thread per column.
    if (tid < 8 * tiles) {
        const int tile = tid / 8, column = tid % 8;
        const float2* block = weights + tile * 8 * NODES + tile * 8;
        float x[8];
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const u32 mine = u32(ancestors[tile * 8 + r] >> (8 * tile));
            float sum = r == column ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < r; j++) sum -= mine >> j & 1 ? block[r * NODES + j].x * x[j] : 0.0f;
            x[r] = sum;
            ((float*)inverse[tile][r])[column] = sum;
        }
    }
    __syncthreads();
    float* u_out = node_out + NODE_U + head * DIM + first_column + own_column;
    float* o_out = o + (u64)tree.first * VALUES + head * DIM + first_column + own_column;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        if (tile >= tiles) break;
        const int own = tile * 8 + own_row;
        const u32 within = ((const u8*)ancestors)[own * 8 + tile];
        const float* before = staged + tile % 2 * 8 * COLUMNS + own_column;
        const float4 low = inverse[tile][own_row][0], high = inverse[tile][own_row][1];
        const float factor[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float solved = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float x = before[j * COLUMNS];
            solved = fmaf(factor[j], within >> j & 1 ? x : 0.0f, solved);
        }
        right[own * COLUMNS + own_column] = solved;
        if (own < nodes) u_out[(u64)own * NODE_FLOATS] = solved;
        __syncthreads();
        float past[8];
#pragma unroll
        for (int j = 0; j < 8; j++) past[j] = right[(tile * 8 + j) * COLUMNS + own_column];
        // What this tile gives to the rows of later ones, and to its own outputs.
#pragma unroll
        for (int turn = 1; turn <= TILES - tile; turn++) {
            const int later = turn == TILES - tile ? tile : tile + turn;
            if (later >= tiles) continue;
            const int row = later * 8 + own_row;
            const u32 seen = ((const u8*)ancestors)[row * 8 + tile];
            const float4* given = (const float4*)(weights + row * NODES + tile * 8);
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const float4 w = given[j / 2];
                const float x = seen >> j & 1 ? past[j] : 0.0f, y = seen >> (j + 1) & 1 ? past[j + 1] : 0.0f;
                if (later > tile) u[later] = fmaf(-w.z, y, fmaf(-w.x, x, u[later]));
                out[later] = fmaf(w.w, y, fmaf(w.y, x, out[later]));
            }
            if (later == tile + 1) staged[((tile + 1) % 2 * 8 + own_row) * COLUMNS + own_column] = u[later];
        }
        if (own < nodes) o_out[(u64)own * VALUES] = out[tile];
        __syncthreads();
    }
}
