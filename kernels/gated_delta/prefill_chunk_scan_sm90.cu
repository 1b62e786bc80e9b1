// Gated delta rule, chunked prefill, inter-chunk scan on Hopper: as prefill_chunk_scan.cu, with wgmma.
//
//   U = inverse (V - diag(decay) K S);   O = diag(decay) Q S + qk U;   S <- e^(G_64) S + K^T diag(tail) U
// with inverse, qk, decay and tail of prefill_chunk_prepare.cu.
//
// in   mixed_qkv (q and k as bf16 pairs, v f32), intra, x [rows][ld_x] (convolution inputs)
// out  o [rows][V_WIDTH]
// i/o  state [slot][V_HEADS][128 v][128 k], window [slot][3][CHANNELS]
// grid (2, V_HEADS + 1) x 128 threads: a warpgroup has 64 value columns of one head for the whole prompt; the last row
//      of blocks slides the convolution window
// smem 227 KB: two stages of k and q (bf16 pairs in panels [2][64][64]), inverse and qk (pairs [64][64]), v [64][64]
//      f32; decay and tail twice
// arch sm_90a     reference cpu::reference::delta::chunked     test gated_delta_chunk::*
//
// S^T stays in registers as an accumulator and becomes the A operand there; B operands come from shared memory in the
// 128-byte swizzle. A chunk is loaded while the previous one is computed. Blocks of inverse and qk above the diagonal
// are zeroed: accumulators of fewer than 64 columns would be parts of register arrays, which makes the compiler wait
// after every wgmma. Products are three bf16 partial products.
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gated_delta/layout.cuh"
#include "gated_delta/chunk_layout.cuh"
#include "gated_delta/conv_window.cuh"
#include "common/wgmma_sm90.cuh"

#define THREADS 128
#define COLUMNS 64
#define K_OFFSET 0
#define Q_OFFSET 32768
#define INVERSE_OFFSET 65536
#define QK_OFFSET 81920
#define V_OFFSET 98304
#define V_LD 68
#define STAGE_BYTES (V_OFFSET + 64 * V_LD * 4)
#define DECAY_OFFSET (2 * STAGE_BYTES)

struct AFragment {
    u32 high[4];
    u32 low[4];
};

// A fragment (16 value columns x 16 of k) from two accumulator tiles of 8 columns.
__device__ __forceinline__ AFragment a_from_accumulator(const float* c) {
    AFragment p;
    split_bf16(c[0], c[1], p.high[0], p.low[0]);
    split_bf16(c[2], c[3], p.high[1], p.low[1]);
    split_bf16(c[4], c[5], p.high[2], p.low[2]);
    split_bf16(c[6], c[7], p.high[3], p.low[3]);
    return p;
}

// 64 rows of a head, 256 bytes of high and 256 of low parts, as [part][panel of 64][row].
__device__ __forceinline__ void load_head(u32 to, const float* from, int rows) {
#pragma unroll 4
    for (int i = threadIdx.x; i < 64 * 32; i += THREADS) {
        const int row = i / 32, part = i / 8 % 4, piece = i % 8;
        const bool valid = row < rows;
        cp_async_16_zfill(to + part * 8192 + intra_tile_offset(row, piece),
                          (const char*)(from + (u64)(valid ? row : 0) * CHANNELS) + part * 128 + piece * 16,
                          valid ? 16 : 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gated_delta_chunk_scan_sm90(const PrefillChunk* chunk, const float* mixed_qkv, const char* intra, float* state,
                                u64 state_stride, float* o, const float* x, u32 ld_x, float* window,
                                u64 window_stride) {
    extern __shared__ __align__(1024) char smem[];
    const u32 base = shared_address(smem);
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
    const int own = warp * 16 + g;  // value column within the block, and own + 8
    const int chunks = num_chunks(chunk);
    const char* factors = intra + (u64)head * INTRA_BYTES;
    const float* values = mixed_qkv + 2 * K_WIDTH + head * HEAD_DIM + blockIdx.x * COLUMNS;
    auto load = [&](int c) {
        if (c >= chunks) return;
        const ChunkRows rows_of_chunk = chunk_rows(chunk, c);
        const u32 to = base + c % 2 * STAGE_BYTES;
        const float* rows = mixed_qkv + (u64)rows_of_chunk.first * CHANNELS + key * HEAD_DIM;
        load_head(to + Q_OFFSET, rows, rows_of_chunk.rows);
        load_head(to + K_OFFSET, rows + K_WIDTH, rows_of_chunk.rows);
        const char* from = factors + (u64)c * V_HEADS * INTRA_BYTES;
#pragma unroll 4
        for (int i = threadIdx.x; i < 64 * 32; i += THREADS) {
            const int part = i / 512, row = i / 8 % 64, piece = i % 8;  // inverse high, low, qk high, low
            cp_async_16_zfill(to + INVERSE_OFFSET + part * 8192 + intra_tile_offset(row, piece),
                              from + part * 8192 + row * 128 + piece * 16, piece / 2 <= row / 16 ? 16 : 0);
        }
#pragma unroll 4
        for (int i = threadIdx.x; i < 64 * 16; i += THREADS) {
            const int row = i / 16, piece = i % 16;
            const bool valid = row < rows_of_chunk.rows;
            cp_async_16_zfill(to + V_OFFSET + row * V_LD * 4 + piece * 16,
                              values + (u64)(rows_of_chunk.first + (valid ? row : 0)) * CHANNELS + piece * 4,
                              valid ? 16 : 0);
        }
        if (threadIdx.x < 32)
            cp_async_16(base + DECAY_OFFSET + c % 2 * 512 + threadIdx.x * 16, from + INTRA_DECAY + threadIdx.x * 16);
    };
    load(0);
    cp_async_commit();
    // s[4 n ..]: value columns g, g + 8; k = 8 n + 2 t and k + 1.
    float* state_ptr =
        slot_ptr(state, slot, state_stride) + ((u64)head * HEAD_DIM + blockIdx.x * COLUMNS + own) * HEAD_DIM + 2 * t;
    float s[64];
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const float2 top = *(const float2*)(state_ptr + 8 * n),
                     low = *(const float2*)(state_ptr + 8 * HEAD_DIM + 8 * n);
        s[4 * n] = top.x, s[4 * n + 1] = top.y, s[4 * n + 2] = low.x, s[4 * n + 3] = low.y;
    }
    for (int c = 0; c < chunks; c++) {
        const u32 at = base + c % 2 * STAGE_BYTES;
        const char* stage = smem + c % 2 * STAGE_BYTES;
        const float* decay = (const float*)(smem + DECAY_OFFSET + c % 2 * 512);
        const float* tail = decay + 64;
        // cp.async writes must be visible to wgmma, and all warps must have consumed the other stage.
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();
        float out[32], u[32];
#pragma unroll
        for (int i = 0; i < 32; i++) out[i] = 0.0f, u[i] = 0.0f;
        // Half of the state at a time: A fragments must stay in registers until their wgmma completes.
#pragma unroll
        for (int part = 0; part < 2; part++) {
            AFragment a[4];
#pragma unroll
            for (int k = 0; k < 4; k++) a[k] = a_from_accumulator(s + 32 * part + 8 * k);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u64 high = wgmma_desc(at + K_OFFSET + part * 8192) + k * 2, low = high + (16384 >> 4);
                wgmma_m64n64_bf16_a_regs(u, a[k].high, high);
                wgmma_m64n64_bf16_a_regs(u, a[k].high, low);
                wgmma_m64n64_bf16_a_regs(u, a[k].low, high);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u64 high = wgmma_desc(at + Q_OFFSET + part * 8192) + k * 2, low = high + (16384 >> 4);
                wgmma_m64n64_bf16_a_regs(out, a[k].high, high);
                wgmma_m64n64_bf16_a_regs(out, a[k].high, low);
                wgmma_m64n64_bf16_a_regs(out, a[k].low, high);
            }
            wgmma_commit();
            if (part == 0) {
                load(c + 1);
                cp_async_commit();
            }
            wgmma_wait<0>();
        }
        AFragment w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int n = 2 * k; n < 2 * k + 2; n++) {
                const int i = 8 * n + 2 * t;
                const float2 d = *(const float2*)(decay + i);
                const float* v = (const float*)(stage + V_OFFSET) + i * V_LD + own;
                u[4 * n] = fmaf(-d.x, u[4 * n], v[0]), u[4 * n + 1] = fmaf(-d.y, u[4 * n + 1], v[V_LD]);
                u[4 * n + 2] = fmaf(-d.x, u[4 * n + 2], v[8]), u[4 * n + 3] = fmaf(-d.y, u[4 * n + 3], v[V_LD + 8]);
                out[4 * n] *= d.x, out[4 * n + 1] *= d.y, out[4 * n + 2] *= d.x, out[4 * n + 3] *= d.y;
            }
            w[k] = a_from_accumulator(u + 8 * k);
        }
#pragma unroll
        for (int i = 0; i < 32; i++) u[i] = 0.0f;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u64 high = wgmma_desc(at + INVERSE_OFFSET) + k * 2, low = high + (8192 >> 4);
            wgmma_m64n64_bf16_a_regs(u, w[k].high, high);
            wgmma_m64n64_bf16_a_regs(u, w[k].high, low);
            wgmma_m64n64_bf16_a_regs(u, w[k].low, high);
        }
        wgmma_commit();
        const float chunk_decay = decay[63];
        wgmma_wait<0>();
        AFragment tail_u[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            w[k] = a_from_accumulator(u + 8 * k);
#pragma unroll
            for (int n = 2 * k; n < 2 * k + 2; n++) {
                const float2 d = *(const float2*)(tail + 8 * n + 2 * t);
                u[4 * n] *= d.x, u[4 * n + 1] *= d.y, u[4 * n + 2] *= d.x, u[4 * n + 3] *= d.y;
            }
            tail_u[k] = a_from_accumulator(u + 8 * k);
        }
#pragma unroll
        for (int i = 0; i < 64; i++) s[i] *= chunk_decay;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u64 high = wgmma_desc(at + QK_OFFSET) + k * 2, low = high + (8192 >> 4);
            wgmma_m64n64_bf16_a_regs(out, w[k].high, high);
            wgmma_m64n64_bf16_a_regs(out, w[k].high, low);
            wgmma_m64n64_bf16_a_regs(out, w[k].low, high);
        }
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u64 high = wgmma_desc_transposed(at + K_OFFSET + k * 2048, 8192), low = high + (16384 >> 4);
            wgmma_m64n128_bf16_a_regs(s, tail_u[k].high, high);
            wgmma_m64n128_bf16_a_regs(s, tail_u[k].high, low);
            wgmma_m64n128_bf16_a_regs(s, tail_u[k].low, high);
        }
        wgmma_commit();
        wgmma_wait<1>();
        const ChunkRows rows_of_chunk = chunk_rows(chunk, c);
        float* to = o + (u64)rows_of_chunk.first * V_WIDTH + head * HEAD_DIM + blockIdx.x * COLUMNS + own;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int i = 8 * n + 2 * t;
            float* row = to + (u64)i * V_WIDTH;
            if (i < rows_of_chunk.rows) row[0] = out[4 * n], row[8] = out[4 * n + 2];
            if (i + 1 < rows_of_chunk.rows) row[V_WIDTH] = out[4 * n + 1], row[V_WIDTH + 8] = out[4 * n + 3];
        }
        wgmma_wait<0>();
    }
#pragma unroll
    for (int n = 0; n < 16; n++) {
        *(float2*)(state_ptr + 8 * n) = make_float2(s[4 * n], s[4 * n + 1]);
        *(float2*)(state_ptr + 8 * HEAD_DIM + 8 * n) = make_float2(s[4 * n + 2], s[4 * n + 3]);
    }
}
