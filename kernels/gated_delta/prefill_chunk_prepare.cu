// Gated delta rule, chunked prefill, intra-chunk part: everything of a 64-token chunk that does not depend on the
// state.
//
//   A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j < i;   inverse = (I + A)^-1 diag(beta)
//   qk_ij = e^(G_i - G_j) (q_i . k_j), j <= i;   decay_i = e^(G_i);   tail_i = e^(G_64 - G_i)
// with G_i the sum of g within the chunk up to i. Missing positions count as g = beta = 0, k = q = 0.
//
// in   mixed_qkv (q and k as bf16 pairs), gates
// out  intra [chunk][V_HEADS][INTRA_BYTES], see chunk_layout.cuh
// grid (chunks, K_HEADS) x 256 threads: a block has one key head of one chunk and its value heads, up to three at a
//      time
// smem 64 KB
// arch sm_80 and up     reference cpu::reference::delta::chunked     test gated_delta_chunk::*
//
// Products use three bf16 partial products on the tensor cores and stay in registers for all value heads. The inverse T
// is computed in f32: 16 x 16 diagonal blocks by forward substitution, one thread per column; then T_ij = -T_ii (sum_k
// A_ik T_kj), block diagonal by block diagonal, 64 threads per block. T below the diagonal is stored transposed
// blockwise above it, because A is needed until the end. G is a sum of two floats, because differences of long sums are
// taken.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/chunk_layout.cuh"
#include "gated_delta/two_sum.cuh"

#define V_HEADS_PER_K_HEAD (V_HEADS / K_HEADS)
#define LD 68
#define WARPS 8

// Value heads per pass, one [64][LD] matrix each.
#define HEADS_PER_PASS (V_HEADS_PER_K_HEAD < 3 ? V_HEADS_PER_K_HEAD : 3)

// Blocks (i, j) of 16 x 16 with j <= i, row by row.
__device__ __forceinline__ void block_indices(int index, int& i, int& j) {
    i = index >= 6 ? 3 : index >= 3 ? 2 : index >= 1 ? 1 : 0;
    j = index - i * (i + 1) / 2;
}

// The r-th value head of a key head.
__device__ __forceinline__ int value_head(int key, int r) {
#if GROUPED
    return key * V_HEADS_PER_K_HEAD + r;
#else
    return key + r * K_HEADS;
#endif
}

extern "C" __global__ void __launch_bounds__(256)
    gated_delta_chunk_prepare(const PrefillChunk* chunk, const float* mixed_qkv, const float* gates, char* intra) {
    extern __shared__ float4 smem[];
    char* tiles = (char*)smem;       // k high, k low, q high, q low: [64][128] bf16 each
    float* matrices = (float*)smem;  // then [HEADS_PER_PASS][64][LD]: A below the diagonal, T on it and mirrored above
    float* block_sums = matrices + HEADS_PER_PASS * 64 * LD;  // [4][16][20]
    __shared__ float2 sums[V_HEADS_PER_K_HEAD][64];
    __shared__ float betas[V_HEADS_PER_K_HEAD][64];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const int key = blockIdx.y;
    pdl_wait();
    pdl_launch();
    if ((int)blockIdx.x >= num_chunks(chunk)) return;
    const ChunkRows rows_of_chunk = chunk_rows(chunk, blockIdx.x);
    const float* rows = mixed_qkv + (u64)rows_of_chunk.first * CHANNELS;
    for (int i = tid; i < 64 * 64; i += 256) {
        const int row = i / 64, part = i % 64 / 16, piece = i % 16;  // part: k high, k low, q high, q low
        const bool valid = row < rows_of_chunk.rows;
        const char* from =
            (const char*)(rows + (u64)(valid ? row : 0) * CHANNELS + (part < 2 ? K_WIDTH : 0) + key * HEAD_DIM);
        const u32 to = shared_address(tiles) + part * 16384 + k_tile_offset(row, piece);
        cp_async_16_zfill(to, from + part % 2 * 256 + piece * 16, valid ? 16 : 0);
    }
    cp_async_commit();
    for (int r = warp; r < V_HEADS_PER_K_HEAD; r += WARPS) {
        const float* gate = gates + (u64)rows_of_chunk.first * 2 * V_HEADS + value_head(key, r);
        // Each lane has two positions; prefix sums over the lanes by doubling.
        const int i = 2 * lane;
        const float g0 = i < rows_of_chunk.rows ? gate[(u64)i * 2 * V_HEADS] : 0.0f;
        const float g1 = i + 1 < rows_of_chunk.rows ? gate[(u64)(i + 1) * 2 * V_HEADS] : 0.0f;
        betas[r][i] = i < rows_of_chunk.rows ? gate[(u64)i * 2 * V_HEADS + V_HEADS] : 0.0f;
        betas[r][i + 1] = i + 1 < rows_of_chunk.rows ? gate[(u64)(i + 1) * 2 * V_HEADS + V_HEADS] : 0.0f;
        float2 sum = make_float2(g0, 0.0f);
        two_sum(sum, make_float2(g1, 0.0f));
#pragma unroll
        for (int gap = 1; gap < 32; gap *= 2) {
            float2 other;
            other.x = __shfl_up_sync(WARP_ALL, sum.x, gap);
            other.y = __shfl_up_sync(WARP_ALL, sum.y, gap);
            if (lane >= gap) two_sum(sum, other);
        }
        float2 before;
        before.x = __shfl_up_sync(WARP_ALL, sum.x, 1);
        before.y = __shfl_up_sync(WARP_ALL, sum.y, 1);
        if (lane == 0) before = make_float2(0.0f, 0.0f);
        two_sum(before, make_float2(g0, 0.0f));
        sums[r][i] = before;
        sums[r][i + 1] = sum;
    }
    cp_async_wait<0>();
    __syncthreads();
    // 20 blocks of 16 x 16: k . k, then q . k. product[..][4 p + 2 h + e]: row g + 8 h, column 8 p + 2 t + e.
    float product[3][8];
#pragma unroll
    for (int task_round = 0; task_round < 3; task_round++) {
        const int task = warp + task_round * WARPS;
        if (task >= 20) break;
        int block_i, block_j;
        block_indices(task % 10, block_i, block_j);
        const u32 base = shared_address(tiles);
        const u32 a_base = base + (task >= 10 ? 32768 : 0);
        float c0[4] = {}, c1[4] = {}, d0[4] = {}, d1[4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 a_high[4], a_low[4], b_high[4], b_low[4];
            const u32 a_offset = k_tile_offset(block_i * 16 + lane % 16, 2 * k + lane / 16);
            const u32 b_offset = k_tile_offset(block_j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
            ldmatrix_x4(a_high, a_base + a_offset);
            ldmatrix_x4(a_low, a_base + 16384 + a_offset);
            ldmatrix_x4(b_high, base + b_offset);
            ldmatrix_x4(b_low, base + 16384 + b_offset);
            mma_bf16(c0, a_high[0], a_high[1], a_high[2], a_high[3], b_high[0], b_high[1]);
            mma_bf16(c1, a_high[0], a_high[1], a_high[2], a_high[3], b_high[2], b_high[3]);
            mma_bf16(d0, a_high[0], a_high[1], a_high[2], a_high[3], b_low[0], b_low[1]);
            mma_bf16(d1, a_high[0], a_high[1], a_high[2], a_high[3], b_low[2], b_low[3]);
            mma_bf16(d0, a_low[0], a_low[1], a_low[2], a_low[3], b_high[0], b_high[1]);
            mma_bf16(d1, a_low[0], a_low[1], a_low[2], a_low[3], b_high[2], b_high[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) product[task_round][i] = c0[i] + d0[i], product[task_round][4 + i] = c1[i] + d1[i];
    }
#pragma unroll 1
    for (int first = 0; first < V_HEADS_PER_K_HEAD; first += HEADS_PER_PASS) {
        const int count = min(V_HEADS_PER_K_HEAD - first, HEADS_PER_PASS);
        __syncthreads();
#pragma unroll 1
        for (int r = 0; r < count; r++) {
            const int head = value_head(key, first + r);
            char* out = intra + ((u64)blockIdx.x * V_HEADS + head) * INTRA_BYTES;
            const float2* sum = sums[first + r];
            float* a = matrices + r * 64 * LD;
#pragma unroll
            for (int task_round = 0; task_round < 3; task_round++) {
                const int task = warp + task_round * WARPS;
                if (task >= 20) break;
                int block_i, block_j;
                block_indices(task % 10, block_i, block_j);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int i = block_i * 16 + g + 8 * h;
                    const float2 sum_i = sum[i];
                    const float beta = betas[first + r][i];
#pragma unroll
                    for (int p = 0; p < 2; p++) {
                        const int j = block_j * 16 + 8 * p + 2 * t;
                        float x[2];
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const float2 sum_j = sum[j + e];
                            const float decay = j + e <= i ? expf((sum_i.x - sum_j.x) + (sum_i.y - sum_j.y)) : 0.0f;
                            x[e] = j + e <= i ? decay * product[task_round][4 * p + 2 * h + e] : 0.0f;
                        }
                        if (task < 10) {
                            *(float2*)(a + i * LD + j) =
                                make_float2(j < i ? beta * x[0] : 0.0f, j + 1 < i ? beta * x[1] : 0.0f);
                        } else {
                            u32 high, low;
                            split_bf16(x[0], x[1], high, low);
                            u32* to = (u32*)(out + INTRA_QK + i * 128 + j * 2);
                            to[0] = high, to[2048] = low;
                        }
                    }
                }
            }
            if (tid < 64) {
                const float2 sum_i = sum[tid], all = sum[63];
                ((float*)(out + INTRA_DECAY))[tid] = expf(sum_i.x + sum_i.y);
                ((float*)(out + INTRA_TAIL))[tid] = expf((all.x - sum_i.x) + (all.y - sum_i.y));
            }
        }
        __syncthreads();
        if (tid < 64 * count) {
            const int column = tid % 16, corner = tid / 16 % 4 * 16;
            float* diagonal_block = matrices + tid / 64 * 64 * LD + corner * LD + corner;
            float x[16];
#pragma unroll
            for (int row = 0; row < 16; row++) {
                float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
                for (int j = 0; j < row; j++) sum = fmaf(-diagonal_block[row * LD + j], x[j], sum);
                x[row] = sum;
            }
            __syncwarp();
            // The 16 threads of a block are in one warp, so A's block has been read completely.
#pragma unroll
            for (int row = 0; row < 16; row++) diagonal_block[row * LD + column] = x[row];
        }
        __syncthreads();
#pragma unroll 1
        for (int distance = 1; distance < 4; distance++) {
            const int blocks = (4 - distance) * count;
#pragma unroll 1
            for (int pass = 0; pass < blocks; pass += 4) {
                const int item = pass + tid / 64, row = tid % 64 / 4, column = tid % 4 * 4;
                const int block_j = item % (4 - distance), block_i = block_j + distance;
                float* m = matrices + item / (4 - distance) * 64 * LD;
                float* block_sum = block_sums + tid / 64 * 320;
                if (item < blocks) {
                    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    const float* a_row = m + (block_i * 16 + row) * LD;
#pragma unroll 1
                    for (int block = block_j; block < block_i; block++) {
                        const float* t_block = m + block_j * 16 * LD + block * 16 + column;
#pragma unroll
                        for (int k = 0; k < 16; k++) {
                            const float w = a_row[block * 16 + k];
                            const float4 x = *(const float4*)(t_block + k * LD);
                            sum.x = fmaf(w, x.x, sum.x), sum.y = fmaf(w, x.y, sum.y);
                            sum.z = fmaf(w, x.z, sum.z), sum.w = fmaf(w, x.w, sum.w);
                        }
                    }
                    *(float4*)(block_sum + row * 20 + column) = sum;
                }
                __syncthreads();
                if (item < blocks) {
                    const float* a_row = m + (block_i * 16 + row) * LD + block_i * 16;
                    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                    for (int k = 0; k < 16; k++) {
                        const float w = a_row[k];
                        const float4 y = *(const float4*)(block_sum + k * 20 + column);
                        x.x = fmaf(-w, y.x, x.x), x.y = fmaf(-w, y.y, x.y);
                        x.z = fmaf(-w, y.z, x.z), x.w = fmaf(-w, y.w, x.w);
                    }
                    *(float4*)(m + (block_j * 16 + row) * LD + block_i * 16 + column) = x;
                }
                __syncthreads();
            }
        }
        // A thread has 16 columns of a row.
        const int i = tid / 4, block = tid % 4;
        if (block > i / 16) continue;
#pragma unroll 1
        for (int r = 0; r < count; r++) {
            const float* from = matrices + r * 64 * LD + (block * 16 + i % 16) * LD + i / 16 * 16;
            const float* beta = betas[first + r] + block * 16;
            u32 high[8], low[8];
#pragma unroll
            for (int e = 0; e < 16; e += 2)
                split_bf16(from[e] * beta[e], from[e + 1] * beta[e + 1], high[e / 2], low[e / 2]);
            uint4* to = (uint4*)(intra + ((u64)blockIdx.x * V_HEADS + value_head(key, first + r)) * INTRA_BYTES +
                                 i * 128 + block * 32);
            to[0] = make_uint4(high[0], high[1], high[2], high[3]);
            to[1] = make_uint4(high[4], high[5], high[6], high[7]);
            to[512] = make_uint4(low[0], low[1], low[2], low[3]);
            to[513] = make_uint4(low[4], low[5], low[6], low[7]);
        }
    }
}
