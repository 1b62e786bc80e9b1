// The gated delta rule over a tree in factor form: every node's u and output from one read of the state, which stays.
//
// With G_i the sum of g over the path root..i, anc(i) the strict ancestors and S0 the committed state:
//   A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j in anc(i);   R_i = beta_i (v_i - e^(G_i) S0^T k_i)
//   (I + A) U = R;   o_i = e^(G_i) S0^T q_i + sum_(j in anc(i) or j = i) e^(G_i - G_j) (q_i . k_j) u_j
//
// in:  mixed [rows][CHANNELS], gates [rows][2][NV], state [slot][NV][128 v][128 k]
// out: o [rows][VALUES]; u of each node into the factors (k, g and x are there already)
// grid (128 / COLUMNS, NV, trees), 256 threads: a block has COLUMNS value columns of one head of one tree
// shared memory: 4 * (128 * (2 * NODES + COLUMNS) + NODES * COLUMNS) bytes
//
// Products [K; Q] . [K | S0]^T run on the tensor cores in tf32 with both operands split in two (3 products), which
// keeps 21 bits. A 16-row tile is 8 rows of K over the same 8 rows of Q, so tiles exist only as far as nodes do, and a
// node's sums do not depend on how many nodes there are. The triangular solve takes 8 nodes at a time: what earlier
// tiles give, then the inverse of the tile's own 8x8 block. Only ancestors are ever multiplied in: a NaN in a
// sibling stays there. G is kept as a sum of two floats, since differences of long sums matter.
// arch: sm_80. reference: cpu::reference::delta::tree; test: tree_*
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"

#define TILES (NODES / 8)
#define S_TILES (COLUMNS / 8)
#define WARPS 8
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

extern "C" __global__ void __launch_bounds__(256)
tree(const Step* step, const float* mixed, const float* gates, const float* state, u64 state_stride, float* factors,
     u64 factor_stride, float* o) {
    extern __shared__ float room[];
    float* keys = room;                       // [NODES][128], swizzled
    float* queries = keys + NODES * DIM;      // [NODES][128], swizzled
    float* columns = queries + NODES * DIM;   // [COLUMNS][128], swizzled: rows of the transposed state
    float* values = columns + COLUMNS * DIM;  // [NODES][COLUMNS]
    // Once the products are in registers, keys and queries make room for:
    float2* weights = (float2*)room;                 // [NODES][NODES]: A and the decayed q k products
    float* right = room + 2 * NODES * NODES;         // [NODES][COLUMNS]: R
    float* carried = right + NODES * COLUMNS;        // [NODES][COLUMNS]: what S0 gives to o
    __shared__ float2 sums[NODES];                   // G
    __shared__ float own_g[NODES];
    __shared__ float betas[NODES];
    __shared__ int parents[NODES];
    __shared__ u64 ancestors[NODES];
    __shared__ float inverse[TILES][8][8];

    const int tid = threadIdx.x;
    const int warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y;
    const int first_column = blockIdx.x * COLUMNS;
    // The step and the state are older than the kernel before this one, which has waited for them.
    const int trees = step->trees;
    if ((int)blockIdx.z >= trees) return;
    const Tree tree = step->tree[blockIdx.z];
    const int nodes = tree.nodes;
    const int tiles = (nodes + 7) / 8;
    const float* s0 = of_slot(state, tree.slot, state_stride) + ((u64)head * DIM + first_column) * DIM;
    for (int i = tid; i < COLUMNS * 32; i += 256) {
        int row = i / 32, piece = i % 32;
        cp_async_16(shared_address(columns + place(row, piece)), s0 + row * DIM + piece * 4);
    }
    pdl_wait();
    pdl_launch();
    const float* rows = mixed + (u64)tree.first * CHANNELS;
    const int key = key_head(head);
    for (int i = tid; i < nodes * 64; i += 256) {
        int node = i / 64, piece = i % 32, is_key = i / 32 % 2;
        const float* from = rows + (u64)node * CHANNELS + is_key * KEYS + key * DIM + piece * 4;
        cp_async_16(shared_address((is_key ? keys : queries) + place(node, piece)), from);
    }
    for (int i = tid; i < nodes * (COLUMNS / 4); i += 256) {
        int node = i / (COLUMNS / 4), piece = i % (COLUMNS / 4);
        const float* from = rows + (u64)node * CHANNELS + 2 * KEYS + head * DIM + first_column + piece * 4;
        cp_async_16(shared_address(values + node * COLUMNS + piece * 4), from);
    }
    cp_async_commit();
    if (tid < NODES) {
        int row = tree.first + tid;
        bool there = tid < nodes;
        own_g[tid] = there ? gates[(u64)row * 2 * NV + head] : 0.0f;
        betas[tid] = there ? gates[(u64)row * 2 * NV + NV + head] : 0.0f;
        parents[tid] = there && step->parent[row] >= 0 ? step->parent[row] - tree.first : -1;
        ancestors[tid] = there ? step->ancestors[row] : 0;
    }
    __syncthreads();
    if (tid < NODES) {
        float high = 0.0f, low = 0.0f;
        for (int at = tid; at >= 0; at = parents[at]) {
            float x = own_g[at], sum = high + x, back = sum - high;
            low += (high - (sum - back)) + (x - back);
            high = sum;
        }
        sums[tid] = make_float2(high, low);
    }
    cp_async_wait<0>();
    __syncthreads();

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
            int column = min(task.column + p, S_TILES + task.tile);
            b_row[p] = (column < S_TILES ? columns + column * 8 * DIM : keys + (column - S_TILES) * 8 * DIM) + g * DIM;
        }
        float main[PAIR][4] = {}, rest[PAIR][4] = {};
#pragma unroll 4
        for (int k = 0; k < 8; k++) {
            const int at = ((4 * k + t) ^ flip) << 2;
            float4 a_k = *(const float4*)(k_row + at), a_q = *(const float4*)(q_row + at);
            u32 high[8], low[8];
            split(a_k.x, high[0], low[0]), split(a_q.x, high[1], low[1]);
            split(a_k.y, high[2], low[2]), split(a_q.y, high[3], low[3]);
            split(a_k.z, high[4], low[4]), split(a_q.z, high[5], low[5]);
            split(a_k.w, high[6], low[6]), split(a_q.w, high[7], low[7]);
#pragma unroll
            for (int p = 0; p < PAIR; p++) {
                float4 b = *(const float4*)(b_row[p] + at);
                u32 b_high[4], b_low[4];
                split(b.x, b_high[0], b_low[0]), split(b.y, b_high[1], b_low[1]);
                split(b.z, b_high[2], b_low[2]), split(b.w, b_high[3], b_low[3]);
                mma_tf32(main[p], high[0], high[1], high[2], high[3], b_high[0], b_high[1]);
                mma_tf32(rest[p], high[0], high[1], high[2], high[3], b_low[0], b_low[1]);
                mma_tf32(rest[p], low[0], low[1], low[2], low[3], b_high[0], b_high[1]);
                mma_tf32(main[p], high[4], high[5], high[6], high[7], b_high[2], b_high[3]);
                mma_tf32(rest[p], high[4], high[5], high[6], high[7], b_low[2], b_low[3]);
                mma_tf32(rest[p], low[4], low[5], low[6], low[7], b_high[2], b_high[3]);
            }
        }
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
#pragma unroll
            for (int i = 0; i < 4; i++) product[round][p][i] = main[p][i] + rest[p][i];
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
        const float beta = betas[i];
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
                    make_float2(beta * (value.x - decay * c[0]), beta * (value.y - decay * c[1]));
                *(float2*)(carried + i * COLUMNS + v) = make_float2(decay * c[2], decay * c[3]);
            } else {
                const int j = (column - S_TILES) * 8 + 2 * t;
                float2 pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float2 past = sums[j + e];
                    const bool seen = mine >> (j + e) & 1;
                    const float decay = seen ? expf((sum.x - past.x) + (sum.y - past.y)) : 0.0f;
                    pair[e] = make_float2(seen && j + e != i ? beta * decay * c[e] : 0.0f,
                                          seen ? decay * c[2 + e] : 0.0f);
                }
                *(float4*)(weights + i * NODES + j) = make_float4(pair[0].x, pair[0].y, pair[1].x, pair[1].y);
            }
        }
    }
    __syncthreads();
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
            inverse[tile][r][column] = sum;
        }
    }
    float* u_out = of_slot(factors, tree.slot, factor_stride) + NODE_U + head * DIM + first_column;
    float* o_out = o + (u64)tree.first * VALUES + head * DIM + first_column;
    constexpr int WIDE = COLUMNS / 32;
    for (int tile = 0; tile < tiles; tile++) {
        // A warp per row of the tile, a lane per column (or two).
        const int i = tile * 8 + warp;
        const u64 mine = ancestors[i];
        float u[WIDE], sum_o[WIDE];
#pragma unroll
        for (int e = 0; e < WIDE; e++) {
            u[e] = right[i * COLUMNS + e * 32 + lane];
            sum_o[e] = carried[i * COLUMNS + e * 32 + lane];
        }
        const u64 earlier = mine & ((1ull << (8 * tile)) - 1);
        for (int j = 0; j < 8 * tile; j++) {
            if (!(earlier >> j & 1)) continue;
            const float2 weight = weights[i * NODES + j];
#pragma unroll
            for (int e = 0; e < WIDE; e++) {
                const float past = right[j * COLUMNS + e * 32 + lane];
                u[e] = fmaf(-weight.x, past, u[e]);
                sum_o[e] = fmaf(weight.y, past, sum_o[e]);
            }
        }
#pragma unroll
        for (int e = 0; e < WIDE; e++) right[i * COLUMNS + e * 32 + lane] = u[e];
        __syncthreads();
        const u32 within = u32(mine >> (8 * tile)) & 0xff;
#pragma unroll
        for (int e = 0; e < WIDE; e++) u[e] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (within >> j & 1) {
                const float weight = inverse[tile][warp][j];
#pragma unroll
                for (int e = 0; e < WIDE; e++)
                    u[e] = fmaf(weight, right[(tile * 8 + j) * COLUMNS + e * 32 + lane], u[e]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < WIDE; e++) right[i * COLUMNS + e * 32 + lane] = u[e];
        __syncthreads();
        if (i < nodes) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (within >> j & 1) {
                    const float weight = weights[i * NODES + tile * 8 + j].y;
#pragma unroll
                    for (int e = 0; e < WIDE; e++)
                        sum_o[e] = fmaf(weight, right[(tile * 8 + j) * COLUMNS + e * 32 + lane], sum_o[e]);
                }
            }
#pragma unroll
            for (int e = 0; e < WIDE; e++) {
                u_out[(u64)i * NODE_FLOATS + e * 32 + lane] = u[e];
                o_out[(u64)i * VALUES + e * 32 + lane] = sum_o[e];
            }
        }
    }
}
