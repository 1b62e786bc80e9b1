// Prefill attention on Hopper for quantized and bf16 caches: causal, with swapped operands (swapped_operands_sm90.cuh),
// so that codes are dequantized once for 8 N8_TILES rows and go straight into registers.
//
//   out[i][h] = sum_j softmax_j(scale * q[i][h] · k[j][h / GROUP]) v[j][h / GROUP] (* sigmoid(gate[i][h])),  j <=
//   committed + i
//
// in, out as prefill.cu
// grid (HEADS, tiles of 8 N8_TILES rows of the largest chunk) x 256 threads, longest tile first. KV blocks of 128 start
//      at absolute multiples of 128, so a row's bits do not depend on the chunking of the prompt.
// smem see swapped_operands_sm90.cuh; the epilogue reuses it as f32 [8 N8_TILES][260]
// define HEAD_DIM (256), HEADS, KV_HEADS, GATED, PANELS_OUT, F32_OUT (0 or 1), K_FORMAT, V_FORMAT (any except F32),
//      N8_TILES, STAGES
// arch sm_90a     ref cpu::reference::attention::attend     test prefill_attention::prefill_attention_matches_reference
#include "attention/swapped_operands_sm90.cuh"
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "gemm/panel_layout.cuh"

#define HEAD_STRIDE (GATED ? 2 * HEAD_DIM : HEAD_DIM)
#define KV_TILE 64
#define OUT_STRIDE 260  // floats between rows in the epilogue

// Pair i of query_words, from f32.
__device__ __forceinline__ u32 query_pair(const float* query, int b, int t, int i) {
    const float* from = query + 32 * b;
    if (K_FORMAT <= KV_Q8_0) {
        const float2 v = *(const float2*)(from + 8 * t + 2 * i);
        return panel_f16x2(v.x, v.y);
    }
    if (K_FORMAT == KV_TQ3_0) {
        const float2 v = *(const float2*)(from + 8 * i + 2 * t);
        return panel_f16x2(v.x, v.y);
    }
    from += i / 2 * 16 + 4 * t + i % 2;
    return panel_f16x2(from[0], from[2]);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    attn_prefill(const float* q, int q_stride, const PrefillChunk* chunk, PageTable pages, Plane keys, Plane values,
                 float scale, char* panels, int rows_cap, float* y) {
    extern __shared__ __align__(1024) u8 memory[];
    const int rows = chunk->rows, committed = chunk->committed, slot = chunk->slot;
    const int tiles = (rows + QUERY_COLUMNS - 1) / QUERY_COLUMNS;
    if (blockIdx.y >= tiles) {
        return;
    }
    pages.ring_pages = 0;
    const int first = (tiles - 1 - blockIdx.y) * QUERY_COLUMNS, head = blockIdx.x, kv_head = head / (HEADS / KV_HEADS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = warp / 4;
    const u32 smem_q = shared_address(memory), smem_p = smem_q + 4 * PANEL_BYTES, smem_kv = smem_p + 2 * PANEL_BYTES;
    SoftmaxStorage& softmax = *(SoftmaxStorage*)(memory + 6 * PANEL_BYTES + STAGES * STAGE_BYTES);
    const int end = committed + min(first + QUERY_COLUMNS, rows), passes = (end + BLOCK_KV - 1) / BLOCK_KV;

    // Starts load h: K of KV block h / 2 if h is even, V if h is odd. `row` is the cache row of its KV block; after V
    // it advances to the next block, because the page table lookup has a long latency.
    u32 row = (u32)kv_row(pages, slot, 0, KV_HEADS, kv_head);
    const auto load_stage = [&](int h) {
        if (h < 2 * passes) {
            const int position = h / 2 * BLOCK_KV;
            const u32 to = smem_kv + h % STAGES * STAGE_BYTES;
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const int high = end - position - tile * KV_TILE;
                if (h % 2 == 0) {
                    tile_load<K_FORMAT, K_STRIDE>(to + tile * K_TILE_BYTES, keys, row + tile * KV_TILE, 0, high);
                } else {
                    tile_load<V_FORMAT, V_STRIDE>(to + tile * V_TILE_BYTES, values, row + tile * KV_TILE, 0, high);
                }
            }
            if (h % 2 && position + BLOCK_KV < end) {
                row = (u32)kv_row(pages, slot, position + BLOCK_KV, KV_HEADS, kv_head);
            }
        }
        cp_async_commit();
    };
#pragma unroll 1
    for (int h = 0; h < STAGES - 1; h++) {
        load_stage(h);
    }
    // A warp takes rows warp, warp + 8, ..; a lane takes one 16-byte part of each, several loads in flight.
#pragma unroll 4
    for (int i = 0; i < N8_TILES; i++) {
        const int column = warp + 8 * i;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (first + column < rows) {
            const float* query = q + (u64)(first + column) * q_stride + head * HEAD_STRIDE;
            words = make_uint4(query_pair(query, g, t, 0), query_pair(query, g, t, 1), query_pair(query, g, t, 2),
                               query_pair(query, g, t, 3));
        }
        store_query_words(smem_q, column, g, t, words);
    }
    fence_proxy_async();
    if (threadIdx.x < QUERY_COLUMNS) {
        softmax.running_max[threadIdx.x] = -INF, softmax.row_sum[threadIdx.x] = 0.0f;
    }

    float sums[2][4 * N8_TILES], scores[4 * N8_TILES];
#pragma unroll
    for (int i = 0; i < 4 * N8_TILES; i++) {
        sums[0][i] = sums[1][i] = 0.0f;
    }
    const float log2_scale = scale * 1.4426950408889634f;
#pragma unroll 1
    for (int j = 0; j < passes; j++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load_stage(2 * j + STAGES - 1);
        qk_mma(scores, smem_kv + 2 * j % STAGES * STAGE_BYTES + group * K_TILE_BYTES, smem_q);
        // The last key that column 0 sees, relative to this thread's first key.
        const int limit = committed + first - (j * BLOCK_KV + group * KV_TILE + warp % 4 * 16 + g);
        if (limit < KV_TILE) {
#pragma unroll
            for (int n = 0; n < N8_TILES; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int last = limit + 8 * n + 2 * t + e;
                    if (last < 0) {
                        scores[4 * n + e] = -INF;
                    }
                    if (last < 8) {
                        scores[4 * n + 2 + e] = -INF;
                    }
                }
            }
        }
        online_softmax(scores, sums, softmax, smem_p, log2_scale, [&] { load_stage(2 * j + STAGES); });
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        accumulate_row_sums(softmax);
        pv_mma(sums, smem_kv + (2 * j + 1) % STAGES * STAGE_BYTES, warp, smem_p);
    }
    cp_async_wait<0>();
    __syncthreads();

    // Epilogue: transpose through shared memory, of which only the row sums are still live.
    float* out = (float*)memory;
#pragma unroll
    for (int n = 0; n < N8_TILES; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = 8 * n + 2 * t + e;
            const float row_sum = softmax.row_sum[column];
            // No visible key: 0. A NaN sum stays NaN.
            const float factor = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
            const float four_dims[4] = {sums[0][4 * n + e] * factor, sums[0][4 * n + 2 + e] * factor,
                                        sums[1][4 * n + e] * factor, sums[1][4 * n + 2 + e] * factor};
            store_four_dims<V_FORMAT>(out + column * OUT_STRIDE + warp * 32, g, four_dims);
        }
    }
    __syncthreads();
    for (int column = warp; column < QUERY_COLUMNS && first + column < rows; column += 8) {
        const int row = first + column;
        float *from = out + column * OUT_STRIDE, x[DIM_BLOCKS];
#pragma unroll
        for (int b = 0; b < DIM_BLOCKS; b++) {
            x[b] = from[32 * b + lane];
        }
        if (kv_rotated(V_FORMAT)) {
            hadamard_head<true>(x);
        }
        const float* gate = q + (u64)row * q_stride + head * HEAD_STRIDE + HEAD_DIM + lane;
#pragma unroll
        for (int b = 0; b < DIM_BLOCKS; b++) {
            if (GATED) {
                x[b] = __fdividef(x[b], 1.0f + __expf(-__ldg(gate + 32 * b)));
            }
            if (F32_OUT) {
                y[(u64)row * (HEADS * HEAD_DIM) + head * HEAD_DIM + 32 * b + lane] = x[b];
            }
        }
        if (PANELS_OUT) {
            __syncwarp();
#pragma unroll
            for (int b = 0; b < DIM_BLOCKS; b++) {
                from[32 * b + lane] = x[b];
            }
            __syncwarp();
            const float4 low = ((const float4*)from)[2 * lane], high = ((const float4*)from)[2 * lane + 1];
            *(uint4*)(panels + panel_chunk(rows_cap, row, head * (HEAD_DIM / 8) + lane)) =
                make_uint4(panel_f16x2(low.x, low.y), panel_f16x2(low.z, low.w), panel_f16x2(high.x, high.y),
                           panel_f16x2(high.z, high.w));
        }
    }
}
