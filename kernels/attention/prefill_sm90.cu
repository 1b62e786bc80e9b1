// Prefill attention on Hopper for f16 caches: causal, warp-specialized wgmma.
//
//   out[i][h] = sum_j softmax_j(scale * q[i][h] · k[j][h / GROUP]) v[j][h / GROUP] (* sigmoid(gate[i][h])),  j <=
//   committed + i
//
// in, out as prefill.cu
// grid (HEADS, tiles of 128 rows of the largest chunk) x 384 threads, longest tile first. Two consumer warpgroups own
//      64 rows each. Half of the third warpgroup produces K, half produces V, in two pipeline stages each. Q K^T of the
//      next tile is issued together with P V of this one, and the softmax overlaps with P V. Key tiles start at
//      absolute multiples of 64, so a row's bits do not depend on the chunking of the prompt.
// smem Q 64 KB, K 2 x 32 KB, V 2 x 32 KB, mbarriers
// define HEAD_DIM (256), HEADS, KV_HEADS, GATED, PANELS_OUT, F32_OUT (0 or 1), K_FORMAT, V_FORMAT (F16, Q8_0, Q4_0)
// arch sm_90a     ref cpu::reference::attention::attend     test prefill_attention::prefill_attention_matches_reference
#define QUERIES 128
#define PRODUCER_THREADS 64
#define THREADS 384
#ifndef KEYS_PER_FETCH
// what fits the registers of the producers
#define KEYS_PER_FETCH (K_FORMAT == KV_Q8_0 || V_FORMAT == KV_Q8_0 ? 16 : 32)
#endif
#define PANEL_LAYOUT 1
#include "attention/kv_cache.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/prefill_epilogue.cuh"
#include "attention/prefill_kv_tiles.cuh"
#include "common/wgmma_sm90.cuh"
#include "common/sync.cuh"

#if HEAD_DIM != 256
#error "attention/prefill_sm90.cu needs HEAD_DIM 256"
#endif
// Registers of a producer and of a consumer thread: 2 * consumer + producer = 504.
#define QUANTIZED_KV (K_FORMAT != KV_F16 || V_FORMAT != KV_F16)
#define LOWEST_SCORE (-1e30f)
#define STAGES 2
#define TILE_BYTES (KV_TILE * 2 * HEAD_DIM)
#define Q_BYTES (QUERIES * 2 * HEAD_DIM)

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Producer side of the pipeline of K or of V.
struct ProducerPipeline {
    u32 smem;
    Pipeline<STAGES> pipeline;
    PipelineState<STAGES> state;

    __device__ __forceinline__ void producer_acquire() const { pipeline.producer_acquire(state.stage, state.parity); }
    __device__ __forceinline__ u32 at(int key) const { return smem + state.stage * TILE_BYTES + key * 128; }
    __device__ __forceinline__ void producer_commit() {
        fence_proxy_async();
        mbarrier_arrive(pipeline.full_barrier(state.stage));
        state.advance();
    }
};

// Cache rows of one sequence and KV head.
struct KvSource {
    Plane plane;
    PageTable pages;
    int slot, kv_head, end;

    // A layer has far fewer than 2^32 rows.
    __device__ __forceinline__ u32 row(int position) const {
        return (u32)kv_row(pages, slot, position, KV_HEADS, kv_head);
    }
};

template <int FORMAT>
__device__ __forceinline__ void produce_tiles(const KvSource& from, ProducerPipeline to) {
    const int thread = threadIdx.x % PRODUCER_THREADS;
    if (KvTileFetcher<FORMAT>::WRITES_AT_BEGIN) {
        for (int begin = 0; begin < from.end; begin += KV_TILE) {
            const u32 row = from.row(begin);
            to.producer_acquire();
#pragma unroll 1
            for (int key = 0; key < KV_TILE; key += KEYS_PER_FETCH) {
                KvTileFetcher<FORMAT>().begin(from.plane, row + key, from.end - begin - key, to.at(key), thread);
            }
            cp_async_wait<0>();
            to.producer_commit();
        }
        return;
    }
    // Double buffering in registers: one part is dequantized while the other is in flight.
    KvTileFetcher<FORMAT> even, odd;
    u32 row = from.row(0);
    even.begin(from.plane, row, from.end, 0, thread);
    for (int begin = 0; begin < from.end; begin += KV_TILE) {
        const bool more = begin + KV_TILE < from.end;
        const u32 next = from.row(more ? begin + KV_TILE : begin);
        const int valid = from.end - begin;
#pragma unroll
        for (int key = 0; key < KV_TILE; key += 2 * KEYS_PER_FETCH) {
            odd.begin(from.plane, row + key + KEYS_PER_FETCH, valid - key - KEYS_PER_FETCH, 0, thread);
            if (key == 0) {
                to.producer_acquire();
            }
            even.finish(to.at(key), thread);
            if (key + 2 * KEYS_PER_FETCH < KV_TILE) {
                even.begin(from.plane, row + key + 2 * KEYS_PER_FETCH, valid - key - 2 * KEYS_PER_FETCH, 0, thread);
            } else if (more) {
                even.begin(from.plane, next, valid - KV_TILE, 0, thread);
            }
            odd.finish(to.at(key + KEYS_PER_FETCH), thread);
        }
        to.producer_commit();
        row = next;
    }
}

// Q of the block as f16; rows past `rows` are zero. All threads take part.
__device__ __forceinline__ void load_queries(const float* q, int q_stride, int first, int rows, u32 to) {
    for (int unit = threadIdx.x; unit < QUERIES * HEAD_DIM / 8; unit += THREADS) {
        const int row = unit / (HEAD_DIM / 8), chunk = unit % (HEAD_DIM / 8);
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
        if (first + row < rows) {
            const float4* from = (const float4*)(q + (u64)(first + row) * q_stride + chunk * 8);
            a = from[0];
            b = from[1];
        }
        const u32 low[2] = {panel_f16x2(a.x, a.y), panel_f16x2(a.z, a.w)};
        const u32 new_max[2] = {panel_f16x2(b.x, b.y), panel_f16x2(b.z, b.w)};
        store_chunk(to + tile_chunk(row, chunk, QUERIES), low[0], low[1], new_max[0], new_max[1]);
    }
    fence_proxy_async();
}

// Issues scores[64][64] = Q K^T.
__device__ __forceinline__ void issue_qk(float (&scores)[32], u32 q, u32 k) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        const u64 a = wgmma_desc(q + i / 4 * (QUERIES * 128)) + i % 4 * 2,
                  b = wgmma_desc(k + i / 4 * (KV_TILE * 128)) + i % 4 * 2;
        wgmma_m64n64(scores, a, b, i > 0);
    }
    wgmma_commit();
}

// Issues sums[64][256] += P V.
__device__ __forceinline__ void issue_pv(float (&sums)[128], const u32 (&p)[4][4], u32 v) {
#pragma unroll
    for (int i = 0; i < KV_TILE / 16; i++) {
        wgmma_m64n256_a_regs(sums, p[i], wgmma_desc_transposed(v + i * 16 * 128, KV_TILE * 128));
    }
    wgmma_commit();
}

// Online softmax of the two rows of a thread.
struct Softmax {
    float row_max[2], row_sum[2], factor;

    // Scores become P; `rescale` is the factor on earlier sums. `limit`: the first row's last visible key, relative to
    // the tile.
    __device__ __forceinline__ void online_softmax(float (&scores)[32], int limit, float (&rescale)[2]) {
        const int lane = threadIdx.x % 32;
        float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (limit < KV_TILE && j * 8 + lane % 4 * 2 + i % 2 > limit + i / 2 * 8) {
                    scores[4 * j + i] = -INF;
                }
                new_max[i / 2] = fmaxf(new_max[i / 2], scores[4 * j + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(WARP_ALL, new_max[i], 1));
            new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(WARP_ALL, new_max[i], 2));
            rescale[i] = exp2_approx((row_max[i] - new_max[i]) * factor);
            row_max[i] = new_max[i];
            row_sum[i] *= rescale[i];
            const float below = -new_max[i] * factor;
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    // A NaN score gets zero weight.
                    const float weight = fmaxf(exp2_approx(fmaf(scores[4 * j + 2 * i + c], factor, below)), 0.0f);
                    scores[4 * j + 2 * i + c] = weight;
                    row_sum[i] += weight;
                }
            }
        }
    }
};

__device__ __forceinline__ void pack_p(const float (&scores)[32], u32 (&p)[4][4]) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            p[j / 2][j % 2 * 2 + i] = f32x2_to_f16x2(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]);
        }
    }
}

// Consumer side of the pipeline of K or of V.
struct ConsumerPipeline {
    u32 tiles;
    Pipeline<STAGES> pipeline;
    PipelineState<STAGES> state;

    __device__ __forceinline__ u32 consumer_wait() const {
        pipeline.consumer_wait(state.stage, state.parity);
        return tiles + state.stage * TILE_BYTES;
    }
    __device__ __forceinline__ void consumer_release() {
        if (threadIdx.x % 128 == 0) {
            pipeline.consumer_release(state.stage);
        }
        state.advance();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attn_prefill(const float* q, int q_stride, const PrefillChunk* chunk, PageTable pages, Plane keys, Plane values,
                 float scale, char* panels, int rows_cap, float* y) {
    extern __shared__ __align__(1024) char memory[];
    const int rows = chunk->rows, committed = chunk->committed;
    const int tiles = (rows + QUERIES - 1) / QUERIES;
    if (blockIdx.y >= tiles) {
        return;
    }
    const int first = (tiles - 1 - blockIdx.y) * QUERIES, head = blockIdx.x, group = threadIdx.x / 128;
    const u32 smem_q = shared_address(memory), smem_k = smem_q + Q_BYTES, smem_v = smem_k + STAGES * TILE_BYTES;
    const u32 mbarriers = smem_v + STAGES * TILE_BYTES;
    const Pipeline<STAGES> k_barriers = {mbarriers, mbarriers + 16}, v_barriers = {mbarriers + 32, mbarriers + 48};
    const int end = committed + min(first + QUERIES, rows);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(k_barriers.full_barrier(i), PRODUCER_THREADS);
            mbarrier_init(k_barriers.empty_barrier(i), 2);
            mbarrier_init(v_barriers.full_barrier(i), PRODUCER_THREADS);
            mbarrier_init(v_barriers.empty_barrier(i), 2);
        }
        fence_mbarrier_init();
    }
    load_queries(q + head * HEAD_STRIDE, q_stride, first, rows, smem_q);
    __syncthreads();
    if (group >= 2) {
#if QUANTIZED_KV
        setmaxnreg_dec<88>();
#else
        setmaxnreg_dec<56>();
#endif
        const int kv_head = head / (HEADS / KV_HEADS);
        const bool is_key_producer = threadIdx.x % 128 < PRODUCER_THREADS;
        const KvSource from = {
            is_key_producer ? keys : values, {pages.table, pages.max_pages, 0}, chunk->slot, kv_head, end};
        const ProducerPipeline to = {
            is_key_producer ? smem_k : smem_v,
            {is_key_producer ? mbarriers : mbarriers + 32, is_key_producer ? mbarriers + 16 : mbarriers + 48},
            {0, 1}};
#if K_FORMAT == V_FORMAT
        produce_tiles<K_FORMAT>(from, to);
#else
        if (is_key_producer) {
            produce_tiles<K_FORMAT>(from, to);
        } else {
            produce_tiles<V_FORMAT>(from, to);
        }
#endif
    } else {
#if QUANTIZED_KV
        setmaxnreg_inc<208>();
#else
        setmaxnreg_inc<224>();
#endif
        const int lane = threadIdx.x % 32, row_of_lane = first + group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
        const u32 smem_q_of_group = smem_q + group * 64 * 128;
        ConsumerPipeline k_pipeline = {smem_k, k_barriers, {0, 0}}, v_pipeline = {smem_v, v_barriers, {0, 0}};
        Softmax softmax = {{LOWEST_SCORE, LOWEST_SCORE}, {0.0f, 0.0f}, scale * 1.4426950408889634f};
        float sums[128], scores[32], rescale[2];
        u32 p[4][4];
#pragma unroll
        for (int i = 0; i < 128; i++) {
            sums[i] = 0.0f;
        }
        // Keys that any row of this warpgroup sees; later tiles are for the other warpgroup.
        const int visible_end = min(end, committed + first + group * 64 + 64);
        const u32 first_k = k_pipeline.consumer_wait();
        wgmma_fence();
        issue_qk(scores, smem_q_of_group, first_k);
        wgmma_wait<0>();
        k_pipeline.consumer_release();
        softmax.online_softmax(scores, committed + row_of_lane, rescale);
        pack_p(scores, p);
        for (int begin = KV_TILE; begin < visible_end; begin += KV_TILE) {
            const u32 k = k_pipeline.consumer_wait(), v = v_pipeline.consumer_wait();
            wgmma_fence();
            issue_qk(scores, smem_q_of_group, k);
            issue_pv(sums, p, v);
            wgmma_wait<1>();
            k_pipeline.consumer_release();
            softmax.online_softmax(scores, committed + row_of_lane - begin, rescale);
            wgmma_wait<0>();
            v_pipeline.consumer_release();
            pack_p(scores, p);
#pragma unroll
            for (int i = 0; i < 128; i++) {
                sums[i] *= rescale[i / 2 % 2];
            }
        }
        const u32 last_v = v_pipeline.consumer_wait();
        wgmma_fence();
        issue_pv(sums, p, last_v);
        wgmma_wait<0>();
        v_pipeline.consumer_release();
        for (int begin = (visible_end + KV_TILE - 1) / KV_TILE * KV_TILE; begin < end; begin += KV_TILE) {
            k_pipeline.consumer_wait();
            k_pipeline.consumer_release();
            v_pipeline.consumer_wait();
            v_pipeline.consumer_release();
        }
        if (kv_rotated(V_FORMAT)) {
            hadamard_inverse_rows<HEAD_DIM>(sums);
        }
        const auto at = [&](int j, int half, int c) { return sums[4 * j + 2 * half + c]; };
        store_head_rows({q, q_stride, rows, panels, rows_cap, y}, row_of_lane - lane / 4, head, softmax.row_sum, at);
    }
}
