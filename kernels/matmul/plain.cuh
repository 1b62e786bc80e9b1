// f32 matrices beside the packed ones of a launch: out[row][n] (+)= sum over k of W[n][k] * x[row][k], all plain f32.
//
// For the few matrices that a file stores as f32 (gate projections of some files, 48 x 5120). A job is 8 rows of W and a
// slice of K, walked in chunks of 512 values whose weights are in shared memory; the first chunk is fetched before the
// dependency wait. Warp w takes rows w, w + PLAIN_WARPS, .. of x, a lane four values of every 128. Sums: a lane's products in order of
// k, the lanes 16, 8, 4, 2, 1 apart, then the slices in order. Where K is sliced there is one job a block at most; the block
// of a group's first slice takes the sums of all (scratch.cuh) when its own packed work is done, and waits for nobody.
// Slices are cut by shapes and card alone, so a row's bits depend on no other row. cols is a multiple of 4.
#pragma once
#include "matmul/scratch.cuh"

// Who does it: PLAIN_WARPS warps, whose threads plain_thread() counts and plain_sync() lets wait for each other.
#define PLAIN_CHUNK 512
#define PLAIN_R (ROWS > PLAIN_WARPS ? 2 : 1)  // rows of x that a warp takes at a time
#ifndef PLAIN_AHEAD
#define PLAIN_AHEAD 1  // times 128 values of them, asked for together
#endif

struct PlainSegment {
    const float* weights;  // [n_out][cols]
    float* out;            // [ROWS][stride]
    int n_out, stride;
    int add, first;        // first: the segment's first group of 8 rows
};
struct Plain {
    PlainSegment segments[SEGMENTS];
    const float* x;   // [ROWS][cols]
    float* partials;  // [groups][slices][ROWS][8], +0 before and after
    int n_segments, cols;
    int groups, slices;
    int slice, _pad;  // values of a slice, a multiple of PLAIN_CHUNK
};

struct PlainRoom {
    float4 weights[8][PLAIN_CHUNK / 4];
};

__device__ __forceinline__ const PlainSegment& plain_segment(const Plain& work, int group) {
    int which = 0;
    while (which + 1 < work.n_segments && group >= work.segments[which + 1].first) which++;
    return work.segments[which];
}

// Starts fetching 8 rows of W from value k0 on; zeros past K.
__device__ __forceinline__ void plain_fetch(const Plain& work, PlainRoom& room, int group, int k0) {
    const PlainSegment& s = plain_segment(work, group);
    for (int i = plain_thread(); i < 8 * PLAIN_CHUNK / 4; i += PLAIN_WARPS * 32) {
        const int n = i / (PLAIN_CHUNK / 4), quad = i % (PLAIN_CHUNK / 4), k = k0 + quad * 4;
        const int row = min((group - s.first) * 8 + n, s.n_out - 1);
        if (k < work.cols)
            cp_async_16(shared_address(&room.weights[n][quad]), s.weights + size_t(row) * work.cols + k);
        else
            room.weights[n][quad] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    cp_async_commit();
}

// Before the dependency wait: the first chunk of the block's first job.
__device__ __forceinline__ void plain_begin(const Plain& work, PlainRoom& room) {
    const int job = blockIdx.x;
    if (job < work.groups * work.slices) plain_fetch(work, room, job / work.slices, job % work.slices * work.slice);
}

// v[0..8] summed over the lanes: lane i gets the sum of v[i / 4].
__device__ __forceinline__ float sum_of_eight(const float (&v)[8]) {
    const int lane = threadIdx.x % 32;
    float a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool high = lane & 16;
        a[i] = (high ? v[i + 4] : v[i]) + __shfl_xor_sync(WARP_ALL, high ? v[i] : v[i + 4], 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool high = lane & 8;
        b[i] = (high ? a[i + 2] : a[i]) + __shfl_xor_sync(WARP_ALL, high ? a[i] : a[i + 2], 8);
    }
    const bool high = lane & 4;
    float c = (high ? b[1] : b[0]) + __shfl_xor_sync(WARP_ALL, high ? b[0] : b[1], 4);
    c += __shfl_xor_sync(WARP_ALL, c, 2);
    c += __shfl_xor_sync(WARP_ALL, c, 1);
    return c;
}

__device__ __forceinline__ void plain_store(const PlainSegment& s, int row, int n, float v) {
    if (n >= s.n_out) return;
    float* to = s.out + size_t(row) * s.stride + n;
    *to = s.add ? *to + v : v;
}

// After the dependency wait: all of a block's jobs. All threads that multiply come here. `factor(row)`: what a row's results are multiplied by.
template <typename Factor>
__device__ __forceinline__ void plain_jobs(const Plain& work, PlainRoom& room, const Factor& factor) {
    const int warp = plain_thread() / 32, lane = threadIdx.x % 32, cols = work.cols;
    const int jobs = work.groups * work.slices;
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int group = job / work.slices, slice = job % work.slices;
        const int begin = slice * work.slice, end = min(cols, begin + work.slice);
        const PlainSegment& s = plain_segment(work, group);
        for (int first = warp; first < (ROWS + PLAIN_WARPS - 1) / PLAIN_WARPS * PLAIN_WARPS; first += PLAIN_WARPS * PLAIN_R) {
            float sum[PLAIN_R][8];
#pragma unroll
            for (int r = 0; r < PLAIN_R; r++)
#pragma unroll
                for (int n = 0; n < 8; n++) sum[r][n] = 0.0f;
            for (int k0 = begin; k0 < end; k0 += PLAIN_CHUNK) {
                // What plain_begin fetched is there at first; a slice of one chunk stays for all rows.
                if (k0 != begin || (first != warp ? end - begin > PLAIN_CHUNK : job != int(blockIdx.x))) {
                    plain_sync();
                    plain_fetch(work, room, group, k0);
                }
                cp_async_wait<0>();
                plain_sync();
#pragma unroll
                for (int from = 0; from < PLAIN_CHUNK / 128; from += PLAIN_AHEAD) {
                    float4 x[PLAIN_AHEAD][PLAIN_R];
#pragma unroll
                    for (int turn = 0; turn < PLAIN_AHEAD; turn++)
#pragma unroll
                        for (int r = 0; r < PLAIN_R; r++) {
                            const int k = k0 + (from + turn) * 128 + lane * 4, row = min(first + r * PLAIN_WARPS, ROWS - 1);
                            x[turn][r] = k < cols ? __ldcg((const float4*)(work.x + size_t(row) * cols + k)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                        }
#pragma unroll
                    for (int turn = 0; turn < PLAIN_AHEAD; turn++)
#pragma unroll
                        for (int n = 0; n < 8; n++) {
                            const float4 w = room.weights[n][(from + turn) * 32 + lane];
#pragma unroll
                            for (int r = 0; r < PLAIN_R; r++) {
                                sum[r][n] = fmaf(w.x, x[turn][r].x, sum[r][n]);
                                sum[r][n] = fmaf(w.y, x[turn][r].y, sum[r][n]);
                                sum[r][n] = fmaf(w.z, x[turn][r].z, sum[r][n]);
                                sum[r][n] = fmaf(w.w, x[turn][r].w, sum[r][n]);
                            }
                        }
                }
            }
#pragma unroll
            for (int r = 0; r < PLAIN_R; r++) {
                const int row = first + r * PLAIN_WARPS;
                const float v = sum_of_eight(sum[r]);
                if (lane % 4 == 0 && row < ROWS) {
                    if (work.slices == 1)
                        plain_store(s, row, (group - s.first) * 8 + lane / 4, v * factor(row));
                    else
                        leave(work.partials + ((size_t(group) * work.slices + slice) * ROWS + row) * 8 + lane / 4, v);
                }
            }
        }
    }
}

// At the end of the block, all threads that multiply: where K is sliced, the block of the group's first slice adds all up.
template <typename Factor>
__device__ __forceinline__ void plain_end(const Plain& work, const Factor& factor) {
    if (work.slices == 1 || int(blockIdx.x) >= work.groups * work.slices || blockIdx.x % work.slices) return;
    const int group = blockIdx.x / work.slices;
    const PlainSegment& s = plain_segment(work, group);
    constexpr int FETCH = 12;
    for (int i = plain_thread(); i < ROWS * 8; i += PLAIN_WARPS * 32) {
        float* from = work.partials + size_t(group) * work.slices * ROWS * 8 + i;
        float v = 0.0f;
        for (int first = 0; first < work.slices; first += FETCH) {
            float part[FETCH];
#pragma unroll
            for (int f = 0; f < FETCH; f++) part[f] = peek(from + size_t(min(first + f, work.slices - 1)) * ROWS * 8);
#pragma unroll
            for (int f = 0; f < FETCH; f++) {
                if (first + f >= work.slices) break;
                v += take(from + size_t(first + f) * ROWS * 8, part[f]);
            }
        }
        plain_store(s, i / 8, (group - s.first) * 8 + i % 8, v * factor(i / 8));
    }
}
