// Causal attention of a chunk of a prompt over the paged cache, on Hopper, for caches that are not plain f16: as
// attention.cu, by warpgroup products that take keys and values from registers (attn/across_sm90.cuh), so that codes are
// expanded once for 8 NT rows and never pass through memory again.
//
//   out[i][h] = sum_j softmax_j(scale * q[i][h] · k[j][h / GROUP]) v[j][h / GROUP] (* sigmoid(gate[i][h])),  j <= committed + i
//
// in, out as attention.cu
// grid (HEADS, tiles of 8 NT rows of the largest chunk) x 256, the longest first. Keys are taken in passes of 128 at
//      absolute positions, so a row's bits do not depend on how the prompt was cut into chunks.
// smem see attn/across_sm90.cuh; rows leave through it as f32 [8 NT][260]
// define DIM (256), HEADS, KV_HEADS, GATED, PANELS_OUT, F32_OUT (0 or 1), K_FORMAT, V_FORMAT (any but F32), NT, RING;
// arch sm_90a
// ref  cpu::reference::attention::attend;  test prefill_attention::attention_matches_reference
// hot
#include "attn/across_sm90.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "prefill/panel.cuh"

#define HEAD_STRIDE (GATED ? 2 * DIM : DIM)
#define TILE 64
#define OUT_STRIDE 260 // floats between rows on their way out

// Pair `i` of query_words, from f32.
__device__ __forceinline__ u32 query_pair(const float *query, int b, int t, int i) {
    const float *from = query + 32 * b;
    if (K_FORMAT <= KV_Q8_0) {
        const float2 v = *(const float2 *)(from + 8 * t + 2 * i);
        return panel_f16x2(v.x, v.y);
    }
    if (K_FORMAT == KV_TQ3_0) {
        const float2 v = *(const float2 *)(from + 8 * i + 2 * t);
        return panel_f16x2(v.x, v.y);
    }
    from += i / 2 * 16 + 4 * t + i % 2;
    return panel_f16x2(from[0], from[2]);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    prefill_attention(const float *q, int q_stride, const Chunk *chunk, Pages pages, Plane keys, Plane values,
                      float scale, char *panels, int rows_cap, float *y) {
    extern __shared__ __align__(1024) u8 memory[];
    const int rows = chunk->rows, committed = chunk->committed, slot = chunk->slot;
    const int tiles = (rows + COLUMNS - 1) / COLUMNS;
    if (blockIdx.y >= tiles) { return; }
    pages.ring = 0;
    const int first = (tiles - 1 - blockIdx.y) * COLUMNS, head = blockIdx.x, kv_head = head / (HEADS / KV_HEADS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = warp / 4;
    const u32 queries = shared_address(memory), weights = queries + 4 * PANEL_BYTES, ring = weights + 2 * PANEL_BYTES;
    Stats &stats = *(Stats *)(memory + 6 * PANEL_BYTES + RING * SLOT_BYTES);
    const int end = committed + min(first + COLUMNS, rows), passes = (end + PASS - 1) / PASS;

    // Half `h` of the work is pass h / 2 of the keys, or of the values when h is odd. `row` is that of its pass, and then
    // of the next: looked up early, since the lookup takes a while.
    u32 row = (u32)kv_row(pages, slot, 0, KV_HEADS, kv_head);
    const auto load = [&](int h) {
        if (h < 2 * passes) {
            const int position = h / 2 * PASS;
            const u32 to = ring + h % RING * SLOT_BYTES;
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const int high = end - position - tile * TILE;
                if (h % 2 == 0) {
                    tile_load<K_FORMAT, K_STRIDE>(to + tile * K_TILE_BYTES, keys, row + tile * TILE, 0, high);
                } else {
                    tile_load<V_FORMAT, V_STRIDE>(to + tile * V_TILE_BYTES, values, row + tile * TILE, 0, high);
                }
            }
            if (h % 2 && position + PASS < end) { row = (u32)kv_row(pages, slot, position + PASS, KV_HEADS, kv_head); }
        }
        cp_async_commit();
    };
#pragma unroll 1
    for (int h = 0; h < RING - 1; h++) { load(h); }
    // A warp takes rows warp, warp + 8, ..; a lane one part of one block of each, several on their way at once.
#pragma unroll 4
    for (int i = 0; i < NT; i++) {
        const int column = warp + 8 * i;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (first + column < rows) {
            const float *query = q + (u64)(first + column) * q_stride + head * HEAD_STRIDE;
            words = make_uint4(query_pair(query, g, t, 0), query_pair(query, g, t, 1), query_pair(query, g, t, 2), query_pair(query, g, t, 3));
        }
        store_query(queries, column, g, t, words);
    }
    publish();
    if (threadIdx.x < COLUMNS) { stats.running[threadIdx.x] = -INF, stats.total[threadIdx.x] = 0.0f; }

    float sums[2][4 * NT], scores[4 * NT];
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) { sums[0][i] = sums[1][i] = 0.0f; }
    const float log2_scale = scale * 1.4426950408889634f;
#pragma unroll 1
    for (int j = 0; j < passes; j++) {
        cp_async_wait<RING - 2>();
        __syncthreads();
        load(2 * j + RING - 1);
        score_tile(scores, ring + 2 * j % RING * SLOT_BYTES + group * K_TILE_BYTES, queries);
        // The last key that column 0 sees, from this thread's first one on.
        const int limit = committed + first - (j * PASS + group * TILE + warp % 4 * 16 + g);
        if (limit < TILE) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int last = limit + 8 * n + 2 * t + e;
                    if (last < 0) { scores[4 * n + e] = -INF; }
                    if (last < 8) { scores[4 * n + 2 + e] = -INF; }
                }
            }
        }
        weigh(scores, sums, stats, weights, log2_scale, [&] { load(2 * j + RING); });
        cp_async_wait<RING - 1>();
        __syncthreads();
        count_weights(stats);
        add_values(sums, ring + (2 * j + 1) % RING * SLOT_BYTES, warp, weights);
    }
    cp_async_wait<0>();
    __syncthreads();

    // Through shared memory to rows; nothing else is needed any more but the sums of weights.
    float *out = (float *)memory;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = 8 * n + 2 * t + e;
            const float sum = stats.total[column];
            // No key had a weight: 0. A sum that is NaN stays.
            const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
            const float four[4] = {sums[0][4 * n + e] * factor, sums[0][4 * n + 2 + e] * factor,
                                   sums[1][4 * n + e] * factor, sums[1][4 * n + 2 + e] * factor};
            store_four<V_FORMAT>(out + column * OUT_STRIDE + warp * 32, g, four);
        }
    }
    __syncthreads();
    for (int column = warp; column < COLUMNS && first + column < rows; column += 8) {
        const int row = first + column;
        float *from = out + column * OUT_STRIDE, x[BLOCKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) { x[b] = from[32 * b + lane]; }
        if (kv_turned(V_FORMAT)) { turn_head<true>(x); }
        const float *gate = q + (u64)row * q_stride + head * HEAD_STRIDE + DIM + lane;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (GATED) { x[b] = __fdividef(x[b], 1.0f + __expf(-__ldg(gate + 32 * b))); }
            if (F32_OUT) { y[(u64)row * (HEADS * DIM) + head * DIM + 32 * b + lane] = x[b]; }
        }
        if (PANELS_OUT) {
            __syncwarp();
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) { from[32 * b + lane] = x[b]; }
            __syncwarp();
            const float4 low = ((const float4 *)from)[2 * lane], high = ((const float4 *)from)[2 * lane + 1];
            *(uint4 *)(panels + panel_chunk(rows_cap, row, head * (DIM / 8) + lane)) =
                make_uint4(panel_f16x2(low.x, low.y), panel_f16x2(low.z, low.w), panel_f16x2(high.x, high.y), panel_f16x2(high.z, high.w));
        }
    }
}
