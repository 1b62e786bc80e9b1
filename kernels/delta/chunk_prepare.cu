// What a chunk of 64 positions needs that does not depend on the state, for all chunks at once.
//
//   A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j < i;   inverse = (I + A)^-1 diag(beta)
//   read_ij = e^(G_i - G_j) (q_i . k_j), j <= i;   decay_i = e^(G_i);   tail_i = e^(G_64 - G_i)
// with G_i the sum of g within the chunk up to i. Positions a chunk does not have count as g = beta = 0, k = q = 0.
//
// in:  mixed (q and k as pairs of bf16), gates     out: inner [chunk][NV][INNER_BYTES], see delta/halves.cuh
// grid (chunks, NK), 256 threads: a block has one key head of one chunk and, one by one, the value heads that use it
// shared memory: 72 KB. arch: sm_80. reference: cpu::reference::delta::chunk; test: chunk_*
//
// Products run on the tensor cores in three partial products of bf16. The inverse is taken in f32: 16 x 16 blocks on
// the diagonal by substitution, a thread per column; then T_ij = -T_ii (sum_k A_ik T_kj), block diagonal by block
// diagonal. G is a sum of two floats, since differences of long sums matter.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "delta/shape.cuh"
#include "delta/halves.cuh"

#define SHARE (NV / NK)
#define LD 68
#define WARPS 8

// Blocks (i, j) of 16 x 16 with j <= i, in rows.
__device__ __forceinline__ void block_of(int index, int& i, int& j) {
    i = index >= 6 ? 3 : index >= 3 ? 2 : index >= 1 ? 1 : 0;
    j = index - i * (i + 1) / 2;
}

__device__ __forceinline__ void two_sum(float2& sum, float2 x) {
    float s = sum.x + x.x, back = s - sum.x;
    sum.y += (sum.x - (s - back)) + (x.x - back) + x.y;
    sum.x = s;
}

extern "C" __global__ void __launch_bounds__(256)
chunk_prepare(const Chunk* chunk, const float* mixed, const float* gates, char* inner) {
    extern __shared__ float4 room[];
    char* tiles = (char*)room;            // k high, k low, q high, q low: [64][128] bf16 each
    float* dots = (float*)room;           // then k . k and q . k: [64][LD] each
    float* a = dots + 2 * 64 * LD;        // A of one value head
    float* inverse = a + 64 * LD;         // and (I + A)^-1
    __shared__ float2 sums[SHARE][64];
    __shared__ float betas[SHARE][64];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const int key = blockIdx.y;
    pdl_wait();
    pdl_launch();
    if ((int)blockIdx.x >= spans_of(chunk)) return;
    const Span span = span_of(chunk, blockIdx.x);
    const float* rows = mixed + (u64)span.first * CHANNELS;
    for (int i = tid; i < 64 * 64; i += 256) {
        const int row = i / 64, part = i % 64 / 16, piece = i % 16;  // part: k high, k low, q high, q low
        const bool there = row < span.rows;
        const char* from = (const char*)(rows + (u64)(there ? row : 0) * CHANNELS + (part < 2 ? KEYS : 0) + key * DIM);
        const u32 to = shared_address(tiles) + part * 16384 + wide_place(row, piece);
        cp_async_16_or_zero(to, from + part % 2 * 256 + piece * 16, there);
    }
    cp_async_commit();
    for (int r = warp; r < SHARE; r += WARPS) {
#if GROUPED
        const int head = key * SHARE + r;
#else
        const int head = key + r * NK;
#endif
        const float* gate = gates + (u64)span.first * 2 * NV + head;
        // Each lane has two neighbours; sums over lanes before it by doubling.
        const int i = 2 * lane;
        const float g0 = i < span.rows ? gate[(u64)i * 2 * NV] : 0.0f;
        const float g1 = i + 1 < span.rows ? gate[(u64)(i + 1) * 2 * NV] : 0.0f;
        betas[r][i] = i < span.rows ? gate[(u64)i * 2 * NV + NV] : 0.0f;
        betas[r][i + 1] = i + 1 < span.rows ? gate[(u64)(i + 1) * 2 * NV + NV] : 0.0f;
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
    // 20 blocks of 16 x 16: k . k, then q . k.
    float product[3][8];
#pragma unroll
    for (int round = 0; round < 3; round++) {
        const int task = warp + round * WARPS;
        if (task >= 20) break;
        int block_i, block_j;
        block_of(task % 10, block_i, block_j);
        const u32 base = shared_address(tiles);
        const u32 a_base = base + (task >= 10 ? 32768 : 0);
        float c0[4] = {}, c1[4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 a_high[4], a_low[4], b_high[4], b_low[4];
            const u32 a_at = wide_place(block_i * 16 + lane % 16, 2 * k + lane / 16);
            const u32 b_at = wide_place(block_j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
            ldmatrix_x4(a_high, a_base + a_at);
            ldmatrix_x4(a_low, a_base + 16384 + a_at);
            ldmatrix_x4(b_high, base + b_at);
            ldmatrix_x4(b_low, base + 16384 + b_at);
            mma_bf16(c0, a_high[0], a_high[1], a_high[2], a_high[3], b_high[0], b_high[1]);
            mma_bf16(c1, a_high[0], a_high[1], a_high[2], a_high[3], b_high[2], b_high[3]);
            mma_bf16(c0, a_high[0], a_high[1], a_high[2], a_high[3], b_low[0], b_low[1]);
            mma_bf16(c1, a_high[0], a_high[1], a_high[2], a_high[3], b_low[2], b_low[3]);
            mma_bf16(c0, a_low[0], a_low[1], a_low[2], a_low[3], b_high[0], b_high[1]);
            mma_bf16(c1, a_low[0], a_low[1], a_low[2], a_low[3], b_high[2], b_high[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) product[round][i] = c0[i], product[round][4 + i] = c1[i];
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < 3; round++) {
        const int task = warp + round * WARPS;
        if (task >= 20) break;
        int block_i, block_j;
        block_of(task % 10, block_i, block_j);
        float* to = dots + (task >= 10 ? 64 * LD : 0) + (block_i * 16 + g) * LD + block_j * 16 + 2 * t;
        const float* c = product[round];
        *(float2*)to = make_float2(c[0], c[1]);
        *(float2*)(to + 8 * LD) = make_float2(c[2], c[3]);
        *(float2*)(to + 8) = make_float2(c[4], c[5]);
        *(float2*)(to + 8 * LD + 8) = make_float2(c[6], c[7]);
    }
    for (int r = 0; r < SHARE; r++) {
#if GROUPED
        const int head = key * SHARE + r;
#else
        const int head = key + r * NK;
#endif
        char* out = inner + ((u64)blockIdx.x * NV + head) * INNER_BYTES;
        __syncthreads();
        // A thread has 16 columns of a row: A to shared memory, what q reads to the result.
        const int i = tid / 4, block = tid % 4;
        const float2 mine = sums[r][i];
        if (block <= i / 16) {
            const float beta = betas[r][i];
            u32 high[8], low[8];
#pragma unroll
            for (int e = 0; e < 16; e += 2) {
                float read[2];
#pragma unroll
                for (int f = 0; f < 2; f++) {
                    const int j = block * 16 + e + f;
                    const float2 past = sums[r][j];
                    const float decay = j <= i ? expf((mine.x - past.x) + (mine.y - past.y)) : 0.0f;
                    a[i * LD + j] = j < i ? beta * decay * dots[i * LD + j] : 0.0f;
                    read[f] = j <= i ? decay * dots[(64 + i) * LD + j] : 0.0f;
                }
                halves(read[0], read[1], high[e / 2], low[e / 2]);
            }
            uint4* to = (uint4*)(out + INNER_READ + i * 128 + block * 32);
            to[0] = make_uint4(high[0], high[1], high[2], high[3]);
            to[1] = make_uint4(high[4], high[5], high[6], high[7]);
            to[512] = make_uint4(low[0], low[1], low[2], low[3]);
            to[513] = make_uint4(low[4], low[5], low[6], low[7]);
        }
        if (block == 3) {
            const float2 all = sums[r][63];
            ((float*)(out + INNER_DECAY))[i] = expf(mine.x + mine.y);
            ((float*)(out + INNER_TAIL))[i] = expf((all.x - mine.x) + (all.y - mine.y));
        }
        __syncthreads();
        if (tid < 64) {
            const int column = tid % 16, corner = tid / 16 * 16;
            const float* own = a + corner * LD + corner;
            float x[16];
#pragma unroll
            for (int row = 0; row < 16; row++) {
                float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
                for (int j = 0; j < row; j++) sum = fmaf(-own[row * LD + j], x[j], sum);
                x[row] = sum;
                inverse[(corner + row) * LD + corner + column] = sum;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int distance = 1; distance < 4; distance++) {
            // 64 threads per block (i, j) of this distance, four columns each.
            const int index = tid / 64, row = tid % 64 / 4, column = tid % 4 * 4;
            const bool active = index < 4 - distance;
            const int block_i = index + distance, block_j = index;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (active) {
                const float* left = a + (block_i * 16 + row) * LD;
                const float* right = inverse + block_j * 16 + column;
#pragma unroll 16
                for (int k = block_j * 16; k < block_i * 16; k++) {
                    const float w = left[k];
                    const float4 x = *(const float4*)(right + k * LD);
                    sum.x = fmaf(w, x.x, sum.x), sum.y = fmaf(w, x.y, sum.y);
                    sum.z = fmaf(w, x.z, sum.z), sum.w = fmaf(w, x.w, sum.w);
                }
                // The mirrored block of A is above the diagonal and unused: it holds the sum.
                *(float4*)(a + (block_j * 16 + row) * LD + block_i * 16 + column) = sum;
            }
            __syncthreads();
            if (active) {
                const float* left = inverse + (block_i * 16 + row) * LD + block_i * 16;
                const float* right = a + block_j * 16 * LD + block_i * 16 + column;
                float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int k = 0; k < 16; k++) {
                    const float w = left[k];
                    const float4 y = *(const float4*)(right + k * LD);
                    x.x = fmaf(-w, y.x, x.x), x.y = fmaf(-w, y.y, x.y);
                    x.z = fmaf(-w, y.z, x.z), x.w = fmaf(-w, y.w, x.w);
                }
                *(float4*)(inverse + (block_i * 16 + row) * LD + block_j * 16 + column) = x;
            }
            __syncthreads();
        }
        if (block <= i / 16) {
            u32 high[8], low[8];
#pragma unroll
            for (int e = 0; e < 16; e += 2) {
                const int j = block * 16 + e;
                // Above the diagonal a block on the diagonal has exact zeros.
                halves(inverse[i * LD + j] * betas[r][j], inverse[i * LD + j + 1] * betas[r][j + 1], high[e / 2],
                       low[e / 2]);
            }
            uint4* to = (uint4*)(out + i * 128 + block * 32);
            to[0] = make_uint4(high[0], high[1], high[2], high[3]);
            to[1] = make_uint4(high[4], high[5], high[6], high[7]);
            to[512] = make_uint4(low[0], low[1], low[2], low[3]);
            to[513] = make_uint4(low[4], low[5], low[6], low[7]);
        }
    }
}
