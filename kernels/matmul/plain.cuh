// f32 matrices beside the packed ones of a launch: out[row][n] (+)= sum over k of W[n][k] * x[row][k], all plain f32.
//
// For the few matrices that a file stores as f32 (gate projections of some files, 48 x 5120). A job is 8 rows of W and a
// slice of K; block b takes jobs b, b + grid, ...; a warp takes rows w, w + 8, .. of x, up to four at once, a lane four
// values of every 128. Sums: a lane's products in order of k, the lanes by halves, then the slices in order, by the warp
// that arrives last. Slices are cut by shapes and grid alone, so a row's bits depend on no other row.
#pragma once
#include "common/prelude.cuh"

struct PlainSegment {
    const float* weights;  // [n_out][cols]
    float* out;            // [ROWS][stride]
    int n_out, stride;
    int add, first;        // first: the segment's first group of 8 rows
};
struct Plain {
    PlainSegment segments[SEGMENTS];
    const float* x;   // [ROWS][cols]
    float* partials;  // [groups][slices][ROWS][8]
    u32* counters;    // [groups][8], zero before and after
    int n_segments, cols;
    int groups, slices;
    int slice, _pad;  // values of a slice, a multiple of 128
};

__device__ __forceinline__ float4 load_four(const float* row, int k, int cols) {
    if (cols % 4 == 0) return *(const float4*)(row + k);
    return make_float4(row[k], k + 1 < cols ? row[k + 1] : 0.0f, k + 2 < cols ? row[k + 2] : 0.0f, k + 3 < cols ? row[k + 3] : 0.0f);
}

template <int AT_ONCE>
__device__ void plain_job(const Plain& work, const PlainSegment& s, int group, int slice, int row0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, cols = work.cols;
    const int n0 = (group - s.first) * 8;
    float sum[AT_ONCE][8];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
        for (int n = 0; n < 8; n++) sum[r][n] = 0.0f;
    const int end = min(cols, (slice + 1) * work.slice);
    for (int k = slice * work.slice + lane * 4; k < end; k += 128) {
        float4 x[AT_ONCE];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) x[r] = load_four(work.x + size_t(min(row0 + r * 8, ROWS - 1)) * cols, k, cols);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 w = load_four(s.weights + size_t(min(n0 + n, s.n_out - 1)) * cols, k, cols);
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                sum[r][n] = fmaf(w.x, x[r].x, sum[r][n]);
                sum[r][n] = fmaf(w.y, x[r].y, sum[r][n]);
                sum[r][n] = fmaf(w.z, x[r].z, sum[r][n]);
                sum[r][n] = fmaf(w.w, x[r].w, sum[r][n]);
            }
        }
    }
    // Lane n keeps the sum of row n0 + n.
    float mine[AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        mine[r] = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float v = warp_sum(sum[r][n]);
            mine[r] = lane == n ? v : mine[r];
        }
    }
    if (work.slices > 1) {
        float* partials = work.partials + size_t(group) * work.slices * ROWS * 8;
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
            if (lane < 8 && row0 + r * 8 < ROWS) __stcg(partials + (size_t(slice) * ROWS + row0 + r * 8) * 8 + lane, mine[r]);
        __threadfence();
        __syncwarp();
        // The counter counts whole turns of AT_ONCE rows; every slice makes the same ones in the same order.
        u32* counter = work.counters + group * 8 + warp;
        const int turn = row0 / (AT_ONCE * 8);
        u32 before = 0;
        if (lane == 0) before = atomicAdd(counter, 1u << (8 * turn));
        before = __shfl_sync(WARP_ALL, before, 0) >> (8 * turn) & 255;
        if (before != u32(work.slices - 1)) return;
        __threadfence();
        if (lane == 0) atomicSub(counter, u32(work.slices) << (8 * turn));
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            mine[r] = 0.0f;
            if (lane < 8 && row0 + r * 8 < ROWS)
                for (int i = 0; i < work.slices; i++) mine[r] += __ldcg(partials + (size_t(i) * ROWS + row0 + r * 8) * 8 + lane);
        }
    }
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        const int row = row0 + r * 8;
        if (lane < 8 && n0 + lane < s.n_out && row < ROWS) {
            float* to = s.out + size_t(row) * s.stride + n0 + lane;
            *to = s.add ? *to + mine[r] : mine[r];
        }
    }
}

// All of a block's jobs; called by all 8 warps, after the dependency wait.
__device__ __forceinline__ void plain_jobs(const Plain& work) {
    constexpr int AT_ONCE = ROWS > 24 ? 4 : (ROWS + 7) / 8;
    const int jobs = work.groups * work.slices;
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int group = job / work.slices, slice = job % work.slices;
        int which = 0;
        while (which + 1 < work.n_segments && group >= work.segments[which + 1].first) which++;
        for (int row0 = threadIdx.x / 32; row0 < ROWS; row0 += AT_ONCE * 8) plain_job<AT_ONCE>(work, work.segments[which], group, slice, row0);
    }
}
