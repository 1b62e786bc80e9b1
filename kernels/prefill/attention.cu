// Causal attention of a chunk of a prompt over the paged cache, f16 operands, f32 sums.
//
//   out[i][h] = sum_j softmax_j(scale * q[i][h] · k[j][h / GROUP]) v[j][h / GROUP] (* sigmoid(gate[i][h])),  j <= committed + i
//
// in   q       f32 [rows][q_stride], head h at h * HEAD_STRIDE, its gate (HEAD_STRIDE = 2 * DIM) behind it
//      cache   K and V, the chunk's own included, in any format but F32 (attn/kv.cuh); queries come turned where keys are
// out  panels  f16, rows_cap rows, K = HEADS * DIM; 0 where not wanted
//      y       f32 [rows][HEADS * DIM]; 0 where not wanted
// grid (HEADS, tiles of 64 rows of the largest chunk), the longest first. Four warps own 16 rows each, four more bring
//      keys and values in as f16, each tile of keys while the values before it are summed and the other way round.
//      Keys are taken in tiles of 64 at absolute positions, so a row's bits do not depend on how the prompt was cut
//      into chunks. A key whose score is NaN has no weight.
// smem 3 * 64 * 2 * DIM bytes
// define DIM (a multiple of 64), HEADS, KV_HEADS, GATED, PANELS_OUT, F32_OUT (0 or 1), K_FORMAT, V_FORMAT;  arch sm_80 and up
// ref  cpu::reference::attention::attend;  test prefill::attention_matches_reference
// hot
#define QUERIES 64
#define LOADERS 128
#define THREADS 256
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attn/kv.cuh"
#include "prefill/heads.cuh"
#include "prefill/tile.cuh"

#define LOWEST (-1e30f)

// The queries of the block as f16, rows beyond `rows` zero.
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
        store_chunk(to + tile_chunk(row, chunk), low[0], low[1], high[0], high[1]);
    }
}

// Four sums that a product adds to.
__device__ __forceinline__ float (&part(float (&sums)[DIM / 2], int j))[4] { return *(float(*)[4])(sums + 4 * j); }

// Named barriers between the loading and the computing warps.
enum Event { KEYS_FULL = 1, KEYS_FREE, VALUES_FULL, VALUES_FREE };
__device__ __forceinline__ void await(Event e) { asm volatile("bar.sync %0, %1;" ::"r"((int)e), "n"(THREADS) : "memory"); }
__device__ __forceinline__ void signal(Event e) {
    asm volatile("bar.arrive %0, %1;" ::"r"((int)e), "n"(THREADS) : "memory");
}

template <class Tile>
__device__ __forceinline__ void load(Tile &tile, const Plane &cache, u64 row, int valid, u32 to, Event free, bool wait,
                                     Event full) {
    const int thread = threadIdx.x - (THREADS - LOADERS);
    if (!Tile::TOUCHES_EARLY) { tile.begin(cache, row, valid, to, thread); }
    if (wait) { await(free); }
    if (Tile::TOUCHES_EARLY) { tile.begin(cache, row, valid, to, thread); }
    tile.finish(to, thread);
    signal(full);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_attention(const float *q, int q_stride, const Chunk *chunk, Pages pages,
                      Plane keys, Plane values, float scale, char *panels, int rows_cap, float *y) {
    extern __shared__ __align__(128) char memory[];
    const int rows = chunk->rows, committed = chunk->committed;
    const int tiles = (rows + QUERIES - 1) / QUERIES;
    if (blockIdx.y >= tiles) { return; }
    const int first = (tiles - 1 - blockIdx.y) * QUERIES, head = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 q_at = shared_address(memory), k_at = q_at + QUERIES * 2 * DIM, v_at = k_at + KEYS * 2 * DIM;
    const int end = committed + min(first + QUERIES, rows);
    load_queries(q + head * HEAD_STRIDE, q_stride, first, rows, q_at);
    __syncthreads();
    if (threadIdx.x >= THREADS - LOADERS) {
        const int slot = chunk->slot, kv_head = head / (HEADS / KV_HEADS);
        pages.ring = 0;
        for (int begin = 0; begin < end; begin += KEYS) {
            const u64 row = kv_row(pages, slot, begin, KV_HEADS, kv_head);
            const int valid = min(end - begin, KEYS);
            Fetch<K_FORMAT> tile_of_keys;
            load(tile_of_keys, keys, row, valid, k_at, KEYS_FREE, begin > 0, KEYS_FULL);
            Fetch<V_FORMAT> tile_of_values;
            load(tile_of_values, values, row, valid, v_at, VALUES_FREE, begin > 0, VALUES_FULL);
        }
        return;
    }

    // Chunk 2k + c of a row stands at (2k) ^ (c ^ row & 7): a lane's address is one base, flipped by 32 * (k % 4).
    const u32 q_lane = q_at + (warp * 16 + lane % 16) * (2 * DIM) + ((lane / 16 ^ lane & 7) << 4);
    const u32 k_lane = k_at + (lane / 16 * 8 + lane % 8) * (2 * DIM) + ((lane / 8 % 2 ^ lane & 7) << 4);
    const u32 v_lane = v_at + (lane % 16) * (2 * DIM) + ((lane / 16 ^ lane & 7) << 4);
    float sums[DIM / 2] = {};
    float top[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};
    const int my_position = committed + first + warp * 16 + lane / 4;
    const float log2_scale = scale * 1.4426950408889634f;
    for (int begin = 0; begin < end; begin += KEYS) {
        await(KEYS_FULL);
        float scores[KEYS / 8][4] = {};
#pragma unroll 4
        for (int k = 0; k < DIM / 16; k++) {
            u32 a[4];
            ldmatrix_x4(a, (q_lane ^ k % 4 * 32) + k / 4 * 128);
#pragma unroll
            for (int j = 0; j < KEYS / 16; j++) {
                u32 b[4];
                ldmatrix_x4(b, (k_lane ^ k % 4 * 32) + k / 4 * 128 + j * 16 * (2 * DIM));
                mma_f16(scores[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_f16(scores[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
        if (begin + KEYS < end) { signal(KEYS_FREE); }

        const bool ragged = begin + KEYS > committed + first;
        float high[2] = {top[0], top[1]};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float s = scores[j][i] * log2_scale;
                if (ragged && begin + j * 8 + lane % 4 * 2 + i % 2 > my_position + i / 2 * 8) { s = -INF; }
                scores[j][i] = fmaxf(s, -INF);  // NaN becomes -inf
                high[i / 2] = fmaxf(high[i / 2], scores[j][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            high[i] = fmaxf(high[i], __shfl_xor_sync(WARP_ALL, high[i], 1));
            high[i] = fmaxf(high[i], __shfl_xor_sync(WARP_ALL, high[i], 2));
            const float fade = exp2f(top[i] - high[i]);
            top[i] = high[i];
            total[i] *= fade;
#pragma unroll
            for (int j = 0; j < DIM / 8; j++) {
                sums[4 * j + 2 * i] *= fade;
                sums[4 * j + 2 * i + 1] *= fade;
            }
        }
        u32 weights[KEYS / 16][4];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float a = exp2f(scores[j][2 * i] - top[i]), b = exp2f(scores[j][2 * i + 1] - top[i]);
                total[i] += a + b;
                weights[j / 2][j % 2 * 2 + i] = f32x2_to_f16x2(a, b);
            }
        }
        await(VALUES_FULL);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) {
                u32 b[4];
                ldmatrix_x4_trans(b, (v_lane ^ j % 4 * 32) + j / 4 * 128 + k * 16 * (2 * DIM));
                mma_f16(part(sums, 2 * j), weights[k][0], weights[k][1], weights[k][2], weights[k][3], b[0], b[1]);
                mma_f16(part(sums, 2 * j + 1), weights[k][0], weights[k][1], weights[k][2], weights[k][3], b[2], b[3]);
            }
        }
        if (begin + KEYS < end) { signal(VALUES_FREE); }
    }

    if (kv_turned(V_FORMAT)) { turn_back_rows<DIM>(sums); }
    const auto at = [&](int j, int half, int c) { return sums[4 * j + 2 * half + c]; };
    store_head({q, q_stride, rows, panels, rows_cap, y}, first + warp * 16, head, total, at);
}
