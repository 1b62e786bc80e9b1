// f32 matrices beside the packed ones of a fused layer: out[row][n] = sum over k of W[n][k] * x[row][k] * factor(row).
//
// For the few matrices that a file stores as f32 (gate projections, 48 x 5120). A job is 16 rows of W and a K-slice, in
// chunks of F32_CHUNK values whose weights are in shared memory; the first chunk is loaded before the dependency wait.
// Two warps take half a chunk each, for all rows of x at once.
//
// 3xTF32: mma.m16n8k8 reads the upper 19 bits of a number, hi; lo is the rest. w x = w_hi x_hi + w_hi x_lo + w_lo x_hi
// leaves out 2^-21 of a product. A row of x is a column of these products: its bits depend on no other row. Slots t and
// t + 4 of step e of 16 values are values 4 t + 2 e and 4 t + 2 e + 1, so that a lane reads 16 bytes at a time.
//
// Blocks publish the sums of their jobs (ready flags, common/sync.cuh); after that each block reduces some of its
// groups' sums, in the order of K-slices. Only then the factors of rows are needed. K-slices depend on shapes and GPU
// only. cols is a multiple of 4.
//
// The including file defines F32_WARPS, f32_warp(), f32_thread() (0 .. F32_WARPS * 32) and f32_sync() (a barrier of
// those threads).
#pragma once
#include "common/sync.cuh"
#include "gemm/f32_params.cuh"

#define F32_TILE_ROWS 16
#ifndef F32_CHUNK
#define F32_CHUNK 256
#endif

// [row_groups][k_slices][N8_TILES][32]: C fragments.
__device__ __forceinline__ float4* f32_partials(const F32Params& params) { return (float4*)params.partials; }

// Quads of odd rows are swizzled by 4, so that lanes of two rows read different banks.
struct F32Smem {
    float4 weights[F32_TILE_ROWS][F32_CHUNK / 4];
};

// A row group of 16 rows and a K-slice. There are few: a countdown is less code than a division.
struct F32Job {
    int row_group, k_slice;

    __device__ __forceinline__ F32Job(const F32Params& params, int job) : row_group(0), k_slice(job) {
#pragma unroll 1
        for (; k_slice >= params.k_slices; k_slice -= params.k_slices) row_group++;
    }
};

// Starts loading 16 rows of W from value k0 on; zeros past K. A thread has the same quad of all rows, or of every
// second.
__device__ __forceinline__ void f32_load(const F32Params& params, F32Smem& smem, int row_group, int k0) {
    constexpr int QUADS = F32_CHUNK / 4, STEP = F32_WARPS * 32 / QUADS;  // rows that are loaded together
    static_assert(F32_WARPS * 32 % QUADS == 0, "a quad of a row for each thread");
    const F32Matrix& s = f32_matrix(params, row_group);
    const int quad = f32_thread() % QUADS, k = k0 + quad * 4,
              first_row = (row_group - s.first_row_group) * F32_TILE_ROWS, bytes = k < params.cols ? 16 : 0;
    const float* from = s.weights + min(k, params.cols - 4);
#pragma unroll 1
    for (int n = f32_thread() / QUADS; n < F32_TILE_ROWS; n += STEP)
        cp_async_16_zfill(shared_address(&smem.weights[n][quad ^ (n & 1) << 2]),
                          from + size_t(min(first_row + n, s.n_out - 1)) * params.cols, bytes);
    cp_async_commit();
}

// Before the dependency wait: the first chunk of the block's first job.
__device__ __forceinline__ void f32_prologue(const F32Params& params, F32Smem& smem) {
    if (int(blockIdx.x) >= params.row_groups * params.k_slices) return;
    const F32Job job(params, blockIdx.x);
    f32_load(params, smem, job.row_group, job.k_slice * params.k_slice);
}

// The bits that tf32 drops.
__device__ __forceinline__ u32 tf32_low(float v) {
    return __float_as_uint(v - __uint_as_float(__float_as_uint(v) & 0xffffe000u));
}
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float component(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Blocks of 16 values of x in flight per warp; registers limit them.
#define F32_PREFETCH (N8_TILES > 6 ? 1 : N8_TILES >= 2 ? 2 : 4)

// Adds the products of half a chunk from k on, `quad` in shared memory.
__device__ __forceinline__ void f32_mma(const F32Params& params, const F32Smem& smem, int k, int quad,
                                        float (&acc)[N8_TILES][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr int BLOCKS = F32_CHUNK / 2 / 16;
    float4 x[F32_PREFETCH][N8_TILES];
    // Past K any values: their weights are zeros.
    const auto fetch = [&](float4(&to)[N8_TILES], int block) {
        const float* from = params.x + min(k + block * 16 + t * 4, params.cols - 4);
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
            to[n] = __ldcg((const float4*)(from + size_t(min(n * 8 + g, ROWS - 1)) * params.cols));
    };
#pragma unroll
    for (int i = 0; i < F32_PREFETCH; i++) fetch(x[i], i);
    static_assert(BLOCKS % F32_PREFETCH == 0, "whole turns");
#pragma unroll 1
    for (int first_block = 0; first_block < BLOCKS; first_block += F32_PREFETCH)
#pragma unroll
        for (int i = 0; i < F32_PREFETCH; i++) {
            const int block = first_block + i;
            float4 w[2];  // rows g and g + 8
#pragma unroll
            for (int r = 0; r < 2; r++) w[r] = smem.weights[g + 8 * r][(quad + block * 4 + t) ^ (g & 1) << 2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 high[4], low[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float v = component(w[j % 2], 2 * e + j / 2);
                    high[j] = __float_as_uint(v);
                    low[j] = tf32_low(v);
                }
            // MMAs of the same accumulator depend on each other: interleaved.
#pragma unroll
                for (int term = 0; term < 3; term++)
#pragma unroll
                    for (int n = 0; n < N8_TILES; n++) {
                        const float b0 = component(x[i][n], 2 * e), b1 = component(x[i][n], 2 * e + 1);
                        if (term == 1)
                            mma_tf32(acc[n], high, tf32_low(b0), tf32_low(b1));
                        else
                            mma_tf32(acc[n], term ? high : low, __float_as_uint(b0), __float_as_uint(b1));
                    }
            }
            // Past the chunk in the last step, and not used.
            fetch(x[i], min(block + F32_PREFETCH, BLOCKS - 1));
        }
}

// After the dependency wait, once x is there, by all f32 warps: publishes the sums of all jobs of the block.
__device__ __forceinline__ void f32_mainloop(const F32Params& params, F32Smem& smem) {
    const int warp = f32_warp(), lane = threadIdx.x % 32, jobs = params.row_groups * params.k_slices;
#pragma unroll 1
    for (int number = blockIdx.x; number < jobs; number += gridDim.x) {
        const F32Job job(params, number);
        const int k_begin = job.k_slice * params.k_slice, k_end = min(params.cols, k_begin + params.k_slice);
        float acc[N8_TILES][4];
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
#pragma unroll 1
        for (int k0 = k_begin; k0 < k_end; k0 += F32_CHUNK) {
            // f32_prologue has loaded the first chunk.
            if (k0 != k_begin || number != int(blockIdx.x)) {
                f32_sync();
                f32_load(params, smem, job.row_group, k0);
            }
            cp_async_wait<0>();
            f32_sync();
            f32_mma(params, smem, k0 + warp * (F32_CHUNK / 2), warp * (F32_CHUNK / 8), acc);
        }
        // Both halves of K, in the space of the weights.
        float4* half = &smem.weights[0][0];
        f32_sync();
#pragma unroll
        for (int n = 0; n < N8_TILES; n++)
            half[(warp * N8_TILES + n) * 32 + lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
        f32_sync();
#pragma unroll 1
        for (int i = f32_thread(); i < N8_TILES * 32; i += F32_WARPS * 32) {
            const float4 a = half[i], b = half[N8_TILES * 32 + i];
            flag_store(f32_partials(params) + size_t(number) * N8_TILES * 32 + i,
                       make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
        }
    }
}

// At the end of the block, by all f32 warps: reduces some sums of the row groups it had jobs of, every k_slices-th
// quad. All parts are copied to shared memory and polled until they are ready.
template <typename Factor>
__device__ __forceinline__ void f32_epilogue(const F32Params& params, F32Smem& smem, const Factor& factor) {
    const int jobs = params.row_groups * params.k_slices, thread = f32_thread(), warp = f32_warp();
    float4* parts = &smem.weights[0][0];  // [quad][k_slice]
    static_assert(2 * N8_TILES * 32 <= F32_TILE_ROWS * F32_CHUNK / 4, "smem for both halves of K");
#pragma unroll 1
    for (int number = blockIdx.x; number < jobs; number += gridDim.x) {
        const F32Job job(params, number);
        const F32Matrix& s = f32_matrix(params, job.row_group);
        float4* const from =
            f32_partials(params) + size_t(job.row_group) * params.k_slices * (N8_TILES * 32) + job.k_slice;
        // quads of this block: 0, k_slices, .. below `quads`
        const int quads = N8_TILES * 32 - job.k_slice, k_slices = params.k_slices;
        f32_sync();
        bool waiting;
        do {
#pragma unroll 1
            for (int q = warp * k_slices; q < quads; q += F32_WARPS * k_slices)
#pragma unroll 1
                for (int f = thread % 32; f < k_slices; f += 32)
                    cp_async_16(shared_address(parts + q + f), from + size_t(f) * (N8_TILES * 32) + q);
            cp_async_commit();
            cp_async_wait<0>();
            waiting = false;
#pragma unroll 1
            for (int q = warp * k_slices; q < quads; q += F32_WARPS * k_slices)
#pragma unroll 1
                for (int f = thread % 32; f < k_slices; f += 32) waiting |= !is_ready(parts[q + f]);
        } while (__any_sync(WARP_ALL, waiting));
        f32_sync();
        // Eight lanes share a quad: parts 8 apart in order, then lanes 4, 2, 1 apart.
#pragma unroll 1
        for (int first_quad = 0; first_quad * k_slices < quads; first_quad += F32_WARPS * 4) {
            const int q = (first_quad + thread / 8) * k_slices, within = thread % 8;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (int f = within; f < k_slices && q < quads; f += 8) {
                const float4 v = parts[q + f];
                from[size_t(f) * (N8_TILES * 32) + q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
            }
#pragma unroll
            for (int offset = 4; offset; offset >>= 1) {
                sum.x += __shfl_xor_sync(WARP_ALL, sum.x, offset), sum.y += __shfl_xor_sync(WARP_ALL, sum.y, offset);
                sum.z += __shfl_xor_sync(WARP_ALL, sum.z, offset), sum.w += __shfl_xor_sync(WARP_ALL, sum.w, offset);
            }
            // Row of x and row of W of quad `at` of the fragments, for each of four lanes.
            const int at = job.k_slice + q, row = at / 32 * 8 + at % 4 * 2 + within % 2;
            const int n = (job.row_group - s.first_row_group) * F32_TILE_ROWS + at / 4 % 8 + within / 2 * 8;
            if (within < 4 && q < quads && row < ROWS && n < s.n_out)
                s.out[size_t(row) * s.stride + n] = component(sum, within) * factor(row);
        }
    }
}
