// Gated delta rule, chunked prefill, inter-chunk scan: 64 tokens per step, the state in registers.
//
//   U = inverse (V - diag(decay) K S);   O = diag(decay) Q S + qk U;   S <- e^(G_64) S + K^T diag(tail) U
// with inverse, qk, decay and tail of prefill_chunk_prepare.cu.
//
// in   mixed_qkv (q and k as bf16 pairs, v f32), intra, x [rows][ld_x] (convolution inputs)
// out  o [rows][V_WIDTH]
// i/o  state [slot][V_HEADS][128 v][128 k], window [slot][3][CHANNELS]
// grid (128 / COLUMNS, V_HEADS + 1) x 2 COLUMNS threads: a warp has 16 value columns of one head for the whole prompt;
//      the last row of blocks slides the convolution window
// smem 97 KB: k, q (bf16 pairs [64][128]), inverse, qk (pairs [64][64]), decay and tail twice
// arch sm_80 and up     reference cpu::reference::delta::chunked     test gated_delta_chunk::*
//
// A warp holds its slice of S^T in registers in accumulator layout, which is also the A fragment layout of the next
// product: state, right-hand side and U never leave the registers. Products are three bf16 partial products with f32
// accumulators. Each buffer is refilled for the next chunk as soon as all warps have consumed it. Missing positions are
// 0.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/chunk_layout.cuh"
#include "gated_delta/conv_window.cuh"

#define THREADS (2 * COLUMNS)
#define K_OFFSET 0
#define Q_OFFSET 32768
#define INVERSE_OFFSET 65536
#define QK_OFFSET 81920
#define DECAY_OFFSET 98304

struct AFragment {
    u32 high[4];
    u32 low[4];
};

// A fragment (16 value columns x 16 of k) from two accumulator tiles of 8 columns.
__device__ __forceinline__ AFragment a_from_accumulator(const float (&c0)[4], const float (&c1)[4]) {
    AFragment p;
    split_bf16(c0[0], c0[1], p.high[0], p.low[0]);
    split_bf16(c0[2], c0[3], p.high[1], p.low[1]);
    split_bf16(c1[0], c1[1], p.high[2], p.low[2]);
    split_bf16(c1[2], c1[3], p.high[3], p.low[3]);
    return p;
}

// B fragments of 16 x 16, both parts; the low part is `low` bytes further on.
struct BFragment {
    u32 high[4];
    u32 low[4];
};
template <bool TRANSPOSED>
__device__ __forceinline__ BFragment load_b(u32 at, u32 low) {
    BFragment b;
    if (TRANSPOSED) {
        ldmatrix_x4_trans(b.high, at);
        ldmatrix_x4_trans(b.low, at + low);
    } else {
        ldmatrix_x4(b.high, at);
        ldmatrix_x4(b.low, at + low);
    }
    return b;
}

__device__ __forceinline__ void mma_step(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Four accumulator tiles of 8 columns from one A and two B fragments, interleaved because the partial products of one
// tile depend on each other.
__device__ __forceinline__ void multiply(float (*c)[4], const AFragment& a, const BFragment& b, const BFragment& d) {
    mma_step(c[0], a.high, b.high[0], b.high[1]), mma_step(c[1], a.high, b.high[2], b.high[3]);
    mma_step(c[2], a.high, d.high[0], d.high[1]), mma_step(c[3], a.high, d.high[2], d.high[3]);
    mma_step(c[0], a.high, b.low[0], b.low[1]), mma_step(c[1], a.high, b.low[2], b.low[3]);
    mma_step(c[2], a.high, d.low[0], d.low[1]), mma_step(c[3], a.high, d.low[2], d.low[3]);
    mma_step(c[0], a.low, b.high[0], b.high[1]), mma_step(c[1], a.low, b.high[2], b.high[3]);
    mma_step(c[2], a.low, d.high[0], d.high[1]), mma_step(c[3], a.low, d.high[2], d.high[3]);
}
// The same with the second B fragment only.
__device__ __forceinline__ void multiply_half(float (*c)[4], const AFragment& a, const BFragment& b) {
    mma_step(c[0], a.high, b.high[0], b.high[1]), mma_step(c[1], a.high, b.high[2], b.high[3]);
    mma_step(c[0], a.high, b.low[0], b.low[1]), mma_step(c[1], a.high, b.low[2], b.low[3]);
    mma_step(c[0], a.low, b.high[0], b.high[1]), mma_step(c[1], a.low, b.high[2], b.high[3]);
}

__device__ __forceinline__ void load_k_tile(u32 to, const float* rows, ChunkRows rows_of_chunk, int part) {
#pragma unroll 2
    for (int i = threadIdx.x; i < 64 * 32; i += THREADS) {
        const int row = i / 32, half = i / 16 % 2, piece = i % 16;
        const bool valid = row < rows_of_chunk.rows;
        const char* from = (const char*)(rows + (u64)(rows_of_chunk.first + (valid ? row : 0)) * CHANNELS + part);
        cp_async_16_zfill(to + half * 16384 + k_tile_offset(row, piece), from + half * 256 + piece * 16,
                          valid ? 16 : 0);
    }
}

// The blocks on and below the diagonal: pieces 0 .. 2 * (row / 16) + 1 of a row.
__device__ __forceinline__ void load_intra(u32 to, const char* from) {
#pragma unroll 2
    for (int i = threadIdx.x; i < 64 * 16; i += THREADS) {
        const int half = i / 512, row = i / 8 % 64, piece = i % 8;
        if (piece / 2 <= row / 16)
            cp_async_16(to + half * 8192 + intra_tile_offset(row, piece), from + half * 8192 + row * 128 + piece * 16);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_delta_chunk_scan(const PrefillChunk* chunk, const float* mixed_qkv, const char* intra, float* state,
                           u64 state_stride, float* o, const float* x, u32 ld_x, float* window, u64 window_stride) {
    extern __shared__ float4 smem[];
    const u32 base = shared_address(smem);
    const float* vectors = (const float*)((const char*)smem + DECAY_OFFSET);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    pdl_wait();
    pdl_launch();
    const int slot = chunk->slot;
    if (blockIdx.y == V_HEADS) {
        slide_conv_window(chunk, x, ld_x, slot_ptr(window, slot, window_stride), blockIdx.x * THREADS + threadIdx.x,
                          gridDim.x * THREADS);
        return;
    }
    const int head = blockIdx.y, key = key_head(head);
    const int column = blockIdx.x * COLUMNS + warp * 16 + g;  // and column + 8
    const int chunks = num_chunks(chunk);
    const char* own = intra + (u64)head * INTRA_BYTES;
    auto load_queries = [&](int c) {
        if (c < chunks) {
            load_k_tile(base + Q_OFFSET, mixed_qkv, chunk_rows(chunk, c), key * HEAD_DIM);
            const char* from = own + (u64)c * V_HEADS * INTRA_BYTES + INTRA_DECAY;
            if (threadIdx.x < 32)
                cp_async_16(base + DECAY_OFFSET + c % 2 * 512 + threadIdx.x * 16, from + threadIdx.x * 16);
        }
        cp_async_commit();
    };
    auto load_inverse = [&](int c) {
        if (c < chunks) {
            const char* from = own + (u64)c * V_HEADS * INTRA_BYTES;
            load_intra(base + INVERSE_OFFSET, from);
            load_intra(base + QK_OFFSET, from + INTRA_QK);
        }
        cp_async_commit();
    };
    auto load_keys = [&](int c) {
        if (c < chunks) load_k_tile(base + K_OFFSET, mixed_qkv, chunk_rows(chunk, c), K_WIDTH + key * HEAD_DIM);
        cp_async_commit();
    };
    load_queries(0);
    load_inverse(0);
    load_keys(0);
    // s[n][..]: value columns g, g + 8; k = 8 n + 2 t and k + 1.
    float* state_ptr = slot_ptr(state, slot, state_stride) + ((u64)head * HEAD_DIM + column) * HEAD_DIM + 2 * t;
    float s[16][4];
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const float2 top = *(const float2*)(state_ptr + 8 * n),
                     low = *(const float2*)(state_ptr + 8 * HEAD_DIM + 8 * n);
        s[n][0] = top.x, s[n][1] = top.y, s[n][2] = low.x, s[n][3] = low.y;
    }
    // A lane's row of the first 16 x 16 B fragment, K-major (keys, intra) or transposed (keys). K-step k is 32 bytes
    // further on, which the swizzle turns into an exclusive or.
    const u32 k_major_offset = k_tile_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const u32 intra_offset = intra_tile_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const u32 transposed_offset = k_tile_offset(lane % 16, lane / 16);

    for (int c = 0; c < chunks; c++) {
        const ChunkRows rows_of_chunk = chunk_rows(chunk, c);
        const float* decay = vectors + c % 2 * 128;
        const float* tail = decay + 64;
        cp_async_wait<2>();
        __syncthreads();
        float out[8][4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const AFragment a = a_from_accumulator(s[2 * k], s[2 * k + 1]);
            const u32 at = base + Q_OFFSET + (k_major_offset ^ (k << 5));
#pragma unroll
            for (int n = 0; n < 4; n += 2)
                multiply(out + 2 * n, a, load_b<false>(at + n * 4096, 16384),
                         load_b<false>(at + n * 4096 + 4096, 16384));
        }
        cp_async_wait<0>();
        __syncthreads();
        load_queries(c + 1);
        // w holds V, then the right-hand side, then U, transposed: value columns g, g + 8; positions 8 n + 2 t and the
        // next.
        float w[8][4];
        const float* values = mixed_qkv + (u64)rows_of_chunk.first * CHANNELS + 2 * K_WIDTH + head * HEAD_DIM + column;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int i = 8 * n + 2 * t;
            const float* v = values + (u64)i * CHANNELS;
            w[n][0] = i < rows_of_chunk.rows ? v[0] : 0.0f;
            w[n][2] = i < rows_of_chunk.rows ? v[8] : 0.0f;
            w[n][1] = i + 1 < rows_of_chunk.rows ? v[CHANNELS] : 0.0f;
            w[n][3] = i + 1 < rows_of_chunk.rows ? v[CHANNELS + 8] : 0.0f;
        }
        float state_k[8][4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const AFragment a = a_from_accumulator(s[2 * k], s[2 * k + 1]);
            const u32 at = base + K_OFFSET + (k_major_offset ^ (k << 5));
#pragma unroll
            for (int n = 0; n < 4; n += 2)
                multiply(state_k + 2 * n, a, load_b<false>(at + n * 4096, 16384),
                         load_b<false>(at + n * 4096 + 4096, 16384));
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 d = *(const float2*)(decay + 8 * n + 2 * t);
            w[n][0] = fmaf(-d.x, state_k[n][0], w[n][0]), w[n][1] = fmaf(-d.y, state_k[n][1], w[n][1]);
            w[n][2] = fmaf(-d.x, state_k[n][2], w[n][2]), w[n][3] = fmaf(-d.y, state_k[n][3], w[n][3]);
            out[n][0] *= d.x, out[n][1] *= d.y, out[n][2] *= d.x, out[n][3] *= d.y;
        }
        float u[8][4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const AFragment a = a_from_accumulator(w[2 * k], w[2 * k + 1]);
            const u32 at = base + INVERSE_OFFSET + (intra_offset ^ (k << 5));
            if (k % 2) multiply_half(u + 2 * k, a, load_b<false>(at + k * 2048, 8192));
#pragma unroll
            for (int n = (k + 1) / 2 * 2; n < 4; n += 2)
                multiply(u + 2 * n, a, load_b<false>(at + n * 2048, 8192), load_b<false>(at + n * 2048 + 2048, 8192));
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const AFragment a = a_from_accumulator(u[2 * k], u[2 * k + 1]);
            const u32 at = base + QK_OFFSET + (intra_offset ^ (k << 5));
            if (k % 2) multiply_half(out + 2 * k, a, load_b<false>(at + k * 2048, 8192));
#pragma unroll
            for (int n = (k + 1) / 2 * 2; n < 4; n += 2)
                multiply(out + 2 * n, a, load_b<false>(at + n * 2048, 8192), load_b<false>(at + n * 2048 + 2048, 8192));
        }
        __syncthreads();
        load_inverse(c + 1);
        float* to = o + (u64)rows_of_chunk.first * V_WIDTH + head * HEAD_DIM + column;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int i = 8 * n + 2 * t;
            float* row = to + (u64)i * V_WIDTH;
            if (i < rows_of_chunk.rows) row[0] = out[n][0], row[8] = out[n][2];
            if (i + 1 < rows_of_chunk.rows) row[V_WIDTH] = out[n][1], row[V_WIDTH + 8] = out[n][3];
        }
        const float chunk_decay = decay[63];
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] *= chunk_decay;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int n = 2 * k; n < 2 * k + 2; n++) {
                const float2 d = *(const float2*)(tail + 8 * n + 2 * t);
                u[n][0] *= d.x, u[n][1] *= d.y, u[n][2] *= d.x, u[n][3] *= d.y;
            }
            const AFragment a = a_from_accumulator(u[2 * k], u[2 * k + 1]);
            const u32 at = base + K_OFFSET + k * 4096;
#pragma unroll
            for (int n = 0; n < 8; n += 2)
                multiply(s + 2 * n, a, load_b<true>(at + (transposed_offset ^ (n << 5)), 16384),
                         load_b<true>(at + (transposed_offset ^ (n + 1 << 5)), 16384));
        }
        __syncthreads();
        load_keys(c + 1);
    }
#pragma unroll
    for (int n = 0; n < 16; n++) {
        *(float2*)(state_ptr + 8 * n) = make_float2(s[n][0], s[n][1]);
        *(float2*)(state_ptr + 8 * HEAD_DIM + 8 * n) = make_float2(s[n][2], s[n][3]);
    }
}
