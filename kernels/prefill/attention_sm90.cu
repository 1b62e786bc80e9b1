// Causal attention of a chunk of a prompt over the paged cache, on Hopper: as attention.cu, by warpgroup products.
//
//   out[i][h] = sum_j softmax_j(scale * q[i][h] · k[j][h / GROUP]) v[j][h / GROUP] (* sigmoid(gate[i][h])),  j <= committed + i
//
// in, out as attention.cu
// grid (HEADS, tiles of 128 rows of the largest chunk), the longest first. Two warpgroups own 64 rows each; half of a third brings
//      keys in as f16 and half values, in two stages each. While a tile's values are summed, the next tile's scores
//      are made: products with keys and values run side by side, softmax beside the latter. Keys are taken in tiles of 64
//      at absolute positions, so a row's bits do not depend on how the prompt was cut into chunks.
// smem 64 KB of queries, 2 x 32 KB of keys, 2 x 32 KB of values, barriers
// define DIM (256), HEADS, KV_HEADS, GATED, PANELS_OUT, F32_OUT (0 or 1), K_FORMAT, V_FORMAT (F16, Q8_0, Q4_0);  arch sm_90a
// ref  cpu::reference::attention::attend;  test prefill_attention::attention_matches_reference
#define QUERIES 128
#define LOADERS 64
#define THREADS 384
#ifndef FETCHED
#define FETCHED (K_FORMAT == KV_Q8_0 || V_FORMAT == KV_Q8_0 ? 16 : 32) // what fits the registers of the loading warps
#endif
#define PANELS 1
#include "attn/kv.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "prefill/heads.cuh"
#include "prefill/tile.cuh"
#include "common/wgmma_sm90.cuh"
#include "prefill/bulk_sm90.cuh"

#if DIM != 256
#error "attention_sm90.cu is for heads of 256 values"
#endif
// Registers of loading and of computing threads: 2 * computing + loading = 504.
#define QUANTISED (K_FORMAT != KV_F16 || V_FORMAT != KV_F16)
#define LOWEST (-1e30f)
#define STAGES 2
#define TILE_BYTES (KEYS * 2 * DIM)
#define Q_BYTES (QUERIES * 2 * DIM)

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What was written to shared memory by this thread may now be read by products.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where a loading warp writes, and how it tells.
struct Sink {
    u32 ring, full, empty;
    int stage;
    u32 parity;

    __device__ __forceinline__ void await() const { mbarrier_wait(empty + stage * 8, parity); }
    __device__ __forceinline__ u32 at(int key) const { return ring + stage * TILE_BYTES + key * 128; }
    __device__ __forceinline__ void pass_on() {
        publish();
        mbarrier_arrive(full + stage * 8);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Where a sequence's rows of one key head are.
struct Source {
    Plane plane;
    Pages pages;
    int slot, kv_head, end;

    // Rows of a layer are far below 2^32.
    __device__ __forceinline__ u32 row(int position) const { return (u32)kv_row(pages, slot, position, KV_HEADS, kv_head); }
};

template <int FORMAT> __device__ __forceinline__ void load(const Source &from, Sink to) {
    const int thread = threadIdx.x % LOADERS;
    if (Fetch<FORMAT>::TOUCHES_EARLY) {
        for (int begin = 0; begin < from.end; begin += KEYS) {
            const u32 row = from.row(begin);
            to.await();
#pragma unroll 1
            for (int key = 0; key < KEYS; key += FETCHED) {
                Fetch<FORMAT>().begin(from.plane, row + key, from.end - begin - key, to.at(key), thread);
            }
            cp_async_wait<0>();
            to.pass_on();
        }
        return;
    }
    // Two pieces take turns: while one is expanded, the other is on its way.
    Fetch<FORMAT> even, odd;
    u32 row = from.row(0);
    even.begin(from.plane, row, from.end, 0, thread);
    for (int begin = 0; begin < from.end; begin += KEYS) {
        const bool more = begin + KEYS < from.end;
        const u32 next = from.row(more ? begin + KEYS : begin);
        const int valid = from.end - begin;
#pragma unroll
        for (int key = 0; key < KEYS; key += 2 * FETCHED) {
            odd.begin(from.plane, row + key + FETCHED, valid - key - FETCHED, 0, thread);
            if (key == 0) { to.await(); }
            even.finish(to.at(key), thread);
            if (key + 2 * FETCHED < KEYS) {
                even.begin(from.plane, row + key + 2 * FETCHED, valid - key - 2 * FETCHED, 0, thread);
            } else if (more) {
                even.begin(from.plane, next, valid - KEYS, 0, thread);
            }
            odd.finish(to.at(key + FETCHED), thread);
        }
        to.pass_on();
        row = next;
    }
}

// The 128 queries of the block as f16, rows beyond `rows` zero; all threads take part.
__device__ __forceinline__ void load_queries(const float *q, int q_stride, int first, int rows, u32 to) {
    for (int unit = threadIdx.x; unit < QUERIES * DIM / 8; unit += THREADS) {
        const int row = unit / (DIM / 8), chunk = unit % (DIM / 8);
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
        if (first + row < rows) {
            const float4 *from = (const float4 *)(q + (u64)(first + row) * q_stride + chunk * 8);
            a = from[0];
            b = from[1];
        }
        const u32 low[2] = {panel_f16x2(a.x, a.y), panel_f16x2(a.z, a.w)};
        const u32 high[2] = {panel_f16x2(b.x, b.y), panel_f16x2(b.z, b.w)};
        store_chunk(to + tile_chunk(row, chunk, QUERIES), low[0], low[1], high[0], high[1]);
    }
    publish();
}

// scores[64][64] = queries · keys, begun.
__device__ __forceinline__ void begin_scores(float (&scores)[32], u32 q, u32 k) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        const u64 a = wgmma_desc(q + i / 4 * (QUERIES * 128)) + i % 4 * 2, b = wgmma_desc(k + i / 4 * (KEYS * 128)) + i % 4 * 2;
        wgmma_m64n64(scores, a, b, i > 0);
    }
    wgmma_commit();
}

// sums[64][256] += weights · values, begun.
__device__ __forceinline__ void begin_sums(float (&sums)[128], const u32 (&weights)[4][4], u32 v) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        wgmma_m64n256_a_regs(sums, weights[i], wgmma_desc_transposed(v + i * 16 * 128, KEYS * 128));
    }
    wgmma_commit();
}

// Running softmax of the two rows a thread has part in.
struct Softmax {
    float top[2], total[2], factor;

    // scores become weights; gives what earlier sums fade by. `limit`: first row's last visible key, from the tile's first.
    __device__ __forceinline__ void absorb(float (&scores)[32], int limit, float (&fade)[2]) {
        const int lane = threadIdx.x % 32;
        float high[2] = {top[0], top[1]};
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (limit < KEYS && j * 8 + lane % 4 * 2 + i % 2 > limit + i / 2 * 8) { scores[4 * j + i] = -INF; }
                high[i / 2] = fmaxf(high[i / 2], scores[4 * j + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            high[i] = fmaxf(high[i], __shfl_xor_sync(WARP_ALL, high[i], 1));
            high[i] = fmaxf(high[i], __shfl_xor_sync(WARP_ALL, high[i], 2));
            fade[i] = exp2_fast((top[i] - high[i]) * factor);
            top[i] = high[i];
            total[i] *= fade[i];
            const float below = -high[i] * factor;
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    // A score that is NaN has no weight.
                    const float weight = fmaxf(exp2_fast(fmaf(scores[4 * j + 2 * i + c], factor, below)), 0.0f);
                    scores[4 * j + 2 * i + c] = weight;
                    total[i] += weight;
                }
            }
        }
    }
};

__device__ __forceinline__ void pack_weights(const float (&scores)[32], u32 (&weights)[4][4]) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            weights[j / 2][j % 2 * 2 + i] = f32x2_to_f16x2(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]);
        }
    }
}

struct Ring {
    u32 tiles, full, empty;
    int stage;
    u32 parity;

    __device__ __forceinline__ u32 await() const {
        mbarrier_wait(full + stage * 8, parity);
        return tiles + stage * TILE_BYTES;
    }
    __device__ __forceinline__ void release() {
        if (threadIdx.x % 128 == 0) { mbarrier_arrive(empty + stage * 8); }
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_attention(const float *q, int q_stride, const Chunk *chunk, Pages pages, Plane keys, Plane values,
                      float scale, char *panels, int rows_cap, float *y) {
    extern __shared__ __align__(1024) char memory[];
    const int rows = chunk->rows, committed = chunk->committed;
    const int tiles = (rows + QUERIES - 1) / QUERIES;
    if (blockIdx.y >= tiles) { return; }
    const int first = (tiles - 1 - blockIdx.y) * QUERIES, head = blockIdx.x, group = threadIdx.x / 128;
    const u32 q_at = shared_address(memory), k_at = q_at + Q_BYTES, v_at = k_at + STAGES * TILE_BYTES;
    const u32 bars = v_at + STAGES * TILE_BYTES;
    const int end = committed + min(first + QUERIES, rows);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(bars + i * 8, LOADERS);
            mbarrier_init(bars + 16 + i * 8, 2);
            mbarrier_init(bars + 32 + i * 8, LOADERS);
            mbarrier_init(bars + 48 + i * 8, 2);
        }
        fence_mbarrier_init();
    }
    load_queries(q + head * HEAD_STRIDE, q_stride, first, rows, q_at);
    __syncthreads();
    if (group >= 2) {
#if QUANTISED
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
#else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
        const int kv_head = head / (HEADS / KV_HEADS);
        const bool of_keys = threadIdx.x % 128 < LOADERS;
        const Source from = {of_keys ? keys : values, {pages.table, pages.max_pages, 0}, chunk->slot, kv_head, end};
        const Sink to = {of_keys ? k_at : v_at, of_keys ? bars : bars + 32, of_keys ? bars + 16 : bars + 48, 0, 1};
#if K_FORMAT == V_FORMAT
        load<K_FORMAT>(from, to);
#else
        if (of_keys) {
            load<K_FORMAT>(from, to);
        } else {
            load<V_FORMAT>(from, to);
        }
#endif
    } else {
#if QUANTISED
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
#else
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
        const int lane = threadIdx.x % 32, my_row = first + group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
        const u32 my_q = q_at + group * 64 * 128;
        Ring of_keys = {k_at, bars, bars + 16, 0, 0}, of_values = {v_at, bars + 32, bars + 48, 0, 0};
        Softmax softmax = {{LOWEST, LOWEST}, {0.0f, 0.0f}, scale * 1.4426950408889634f};
        float sums[128], scores[32], fade[2];
        u32 weights[4][4];
#pragma unroll
        for (int i = 0; i < 128; i++) { sums[i] = 0.0f; }
        // Tiles that a row of this warpgroup sees any key of; the rest are for the other one.
        const int seen = min(end, committed + first + group * 64 + 64);
        const u32 first_k = of_keys.await();
        wgmma_fence();
        begin_scores(scores, my_q, first_k);
        wgmma_wait<0>();
        of_keys.release();
        softmax.absorb(scores, committed + my_row, fade);
        pack_weights(scores, weights);
        for (int begin = KEYS; begin < seen; begin += KEYS) {
            const u32 k = of_keys.await(), v = of_values.await();
            wgmma_fence();
            begin_scores(scores, my_q, k);
            begin_sums(sums, weights, v);
            wgmma_wait<1>();
            of_keys.release();
            softmax.absorb(scores, committed + my_row - begin, fade);
            wgmma_wait<0>();
            of_values.release();
            pack_weights(scores, weights);
#pragma unroll
            for (int i = 0; i < 128; i++) { sums[i] *= fade[i / 2 % 2]; }
        }
        const u32 last_v = of_values.await();
        wgmma_fence();
        begin_sums(sums, weights, last_v);
        wgmma_wait<0>();
        of_values.release();
        for (int begin = (seen + KEYS - 1) / KEYS * KEYS; begin < end; begin += KEYS) {
            of_keys.await();
            of_keys.release();
            of_values.await();
            of_values.release();
        }
        if (kv_turned(V_FORMAT)) { turn_back_rows<DIM>(sums); }
        const auto at = [&](int j, int half, int c) { return sums[4 * j + 2 * half + c]; };
        store_head({q, q_stride, rows, panels, rows_cap, y}, my_row - lane / 4, head, softmax.total, at);
    }
}
