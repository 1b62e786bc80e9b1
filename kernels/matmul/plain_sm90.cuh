// f32 matrices beside the packed ones of a chain: out[row][n] = sum over k of W[n][k] * x[row][k] * factor(row), all plain f32.
//
// For the few matrices that a file stores as f32 (gate projections of some files, 48 x 5120). A job is 16 rows of W and a slice of K,
// walked in chunks of 256 values whose weights are in shared memory; the first chunk is fetched before the dependency wait. Two warps
// take half a chunk each, for all rows of x at once, so x is waited for a few times in all.
//
// Products are those of mma.m16n8k8 in tf32, which takes the upper 19 bits of a number: w x = w_hi x_hi + w_hi x_lo + w_lo x_hi, where
// hi is what it takes and lo the rest, leaves out 2^-21 of a product. A row is a column of these products: its bits depend on no other.
// Slots t and t + 4 of step e of 16 values are values 4 t + 2 e and 4 t + 2 e + 1: a lane reads 16 bytes at a time.
//
// Blocks leave the sums of their jobs (scratch.cuh), and each block of a group adds a share of them up, in the order of slices, when it
// has left its own: only then the rows' factors are wanted. Slices are cut by shapes and card alone. cols is a multiple of 4.
#pragma once
#include "matmul/scratch.cuh"

// Who does it: PLAIN_WARPS warps, which plain_warp() and whose threads plain_thread() counts; plain_sync() lets them wait for each other.
#define PLAIN_ROWS 16
#define PLAIN_CHUNK 256

struct PlainSegment {
    const float* weights;  // [n_out][cols]
    float* out;            // [ROWS][stride]
    int n_out, stride;
    int _pad, first;       // first: the segment's first group of 16 rows
};
struct Plain {
    PlainSegment segments[SEGMENTS];
    const float* x;    // [ROWS][cols]
    float4* partials;  // [groups][slices][NT][32]: C fragments; +0 before and after
    int n_segments, cols;
    int groups, slices;
    int slice, _pad;   // values of a slice, a multiple of PLAIN_CHUNK
};

// Quads of odd rows lie 4 away, so that lanes of two rows read different banks.
struct PlainRoom {
    float4 weights[PLAIN_ROWS][PLAIN_CHUNK / 4];
};

__device__ __forceinline__ const PlainSegment& plain_segment(const Plain& work, int group) {
    int which = 0;
    while (which + 1 < work.n_segments && group >= work.segments[which + 1].first) which++;
    return work.segments[which];
}

// A job is a group of 16 rows and a slice of K. They are few: to count down is less code than to divide.
struct PlainJob {
    int group, slice;

    __device__ __forceinline__ PlainJob(const Plain& work, int job) : group(0), slice(job) {
#pragma unroll 1
        for (; slice >= work.slices; slice -= work.slices) group++;
    }
};

// Starts fetching 16 rows of W from value k0 on; zeros past K. A thread has the same quad of all rows.
__device__ __forceinline__ void plain_fetch(const Plain& work, PlainRoom& room, int group, int k0) {
    static_assert(PLAIN_WARPS * 32 == PLAIN_CHUNK / 4, "a quad of a row for each thread");
    const PlainSegment& s = plain_segment(work, group);
    const int quad = plain_thread(), k = k0 + quad * 4, first = (group - s.first) * PLAIN_ROWS, bytes = k < work.cols ? 16 : 0;
    const float* from = s.weights + size_t(first) * work.cols + min(k, work.cols - 4);
#pragma unroll 1
    for (int n = 0; n < PLAIN_ROWS; n++) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(&room.weights[n][quad ^ (n & 1) << 2])), "l"(from), "r"(bytes) : "memory");
        if (first + n + 1 < s.n_out) from += work.cols;
    }
    cp_async_commit();
}

// Before the dependency wait: the first chunk of the block's first job.
__device__ __forceinline__ void plain_begin(const Plain& work, PlainRoom& room) {
    if (int(blockIdx.x) >= work.groups * work.slices) return;
    const PlainJob job(work, blockIdx.x);
    plain_fetch(work, room, job.group, job.slice * work.slice);
}

// What tf32 leaves out of a number.
__device__ __forceinline__ u32 tf32_rest(float v) { return __float_as_uint(v - __uint_as_float(__float_as_uint(v) & 0xffffe000u)); }
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float part(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Blocks of 16 values whose x a warp has asked for at a time: what registers allow.
#define PLAIN_AHEAD (NT > 6 ? 1 : NT >= 2 ? 2 : 4)

// Adds the products of 128 values from k on, `quad` of the room.
__device__ __forceinline__ void plain_products(const Plain& work, const PlainRoom& room, int k, int quad, float (&acc)[NT][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr int BLOCKS = PLAIN_CHUNK / 2 / 16;
    float4 x[PLAIN_AHEAD][NT];
    // Past K any values: their weights are zeros.
    const auto fetch = [&](float4 (&to)[NT], int block) {
        const float* from = work.x + min(k + block * 16 + t * 4, work.cols - 4);
#pragma unroll
        for (int n = 0; n < NT; n++) to[n] = __ldcg((const float4*)(from + size_t(min(n * 8 + g, ROWS - 1)) * work.cols));
    };
#pragma unroll
    for (int i = 0; i < PLAIN_AHEAD; i++) fetch(x[i], i);
    static_assert(BLOCKS % PLAIN_AHEAD == 0, "whole turns");
#pragma unroll 1
    for (int first = 0; first < BLOCKS; first += PLAIN_AHEAD)
#pragma unroll
    for (int i = 0; i < PLAIN_AHEAD; i++) {
        const int block = first + i;
        float4 w[2];  // rows g and g + 8
#pragma unroll
        for (int r = 0; r < 2; r++) w[r] = room.weights[g + 8 * r][(quad + block * 4 + t) ^ (g & 1) << 2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            u32 high[4], rest[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float v = part(w[j % 2], 2 * e + j / 2);
                high[j] = __float_as_uint(v);
                rest[j] = tf32_rest(v);
            }
            // Products of the same sums wait for each other: others stand between them.
#pragma unroll
            for (int term = 0; term < 3; term++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float b0 = part(x[i][n], 2 * e), b1 = part(x[i][n], 2 * e + 1);
                    if (term == 1)
                        mma_tf32(acc[n], high, tf32_rest(b0), tf32_rest(b1));
                    else
                        mma_tf32(acc[n], term ? high : rest, __float_as_uint(b0), __float_as_uint(b1));
                }
        }
        // Past the chunk in the last turn, and not used.
        fetch(x[i], min(block + PLAIN_AHEAD, BLOCKS - 1));
    }
}

// After the dependency wait, when x is there: leaves the sums of all of a block's jobs. All of the warps come here.
__device__ __forceinline__ void plain_jobs(const Plain& work, PlainRoom& room) {
    const int warp = plain_warp(), lane = threadIdx.x % 32, jobs = work.groups * work.slices;
#pragma unroll 1
    for (int number = blockIdx.x; number < jobs; number += gridDim.x) {
        const PlainJob job(work, number);
        const int begin = job.slice * work.slice, end = min(work.cols, begin + work.slice);
        float acc[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
#pragma unroll 1
        for (int k0 = begin; k0 < end; k0 += PLAIN_CHUNK) {
            // What plain_begin fetched is there at first.
            if (k0 != begin || number != int(blockIdx.x)) {
                plain_sync();
                plain_fetch(work, room, job.group, k0);
            }
            cp_async_wait<0>();
            plain_sync();
            plain_products(work, room, k0 + warp * 128, warp * 32, acc);
        }
        // Both halves of K, where the weights were.
        float4* half = &room.weights[0][0];
        plain_sync();
#pragma unroll
        for (int n = 0; n < NT; n++) half[(warp * NT + n) * 32 + lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
        plain_sync();
#pragma unroll 1
        for (int i = plain_thread(); i < NT * 32; i += PLAIN_WARPS * 32) {
            const float4 a = half[i], b = half[NT * 32 + i];
            leave(work.partials + size_t(number) * NT * 32 + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
        }
    }
}

// At the end of the block: its share of the sums of the groups that it had jobs of, all quads of them that come `slices` behind each
// other. All parts of these are copied and looked at until they are there. All of the warps come here.
template <typename Factor>
__device__ __forceinline__ void plain_end(const Plain& work, PlainRoom& room, const Factor& factor) {
    const int jobs = work.groups * work.slices, thread = plain_thread(), warp = plain_warp();
    float4* here = &room.weights[0][0];  // [quad][slice]
    static_assert(2 * NT * 32 <= PLAIN_ROWS * PLAIN_CHUNK / 4, "room for both halves of K");
#pragma unroll 1
    for (int number = blockIdx.x; number < jobs; number += gridDim.x) {
        const PlainJob job(work, number);
        const PlainSegment& s = plain_segment(work, job.group);
        float4* const from = work.partials + size_t(job.group) * work.slices * (NT * 32) + job.slice;
        const int quads = NT * 32 - job.slice, slices = work.slices;  // own ones: 0, slices, .. below `quads`
        plain_sync();
        bool waiting;
        do {
#pragma unroll 1
            for (int q = warp * slices; q < quads; q += PLAIN_WARPS * slices)
#pragma unroll 1
                for (int f = thread % 32; f < slices; f += 32) cp_async_16(shared_address(here + q + f), from + size_t(f) * (NT * 32) + q);
            cp_async_commit();
            cp_async_wait<0>();
            waiting = false;
#pragma unroll 1
            for (int q = warp * slices; q < quads; q += PLAIN_WARPS * slices)
#pragma unroll 1
                for (int f = thread % 32; f < slices; f += 32) waiting |= !has_arrived(here[q + f]);
        } while (__any_sync(WARP_ALL, waiting));
        plain_sync();
        // Eight lanes have a quad: parts 8 apart in order, then the lanes 4, 2, 1 apart.
#pragma unroll 1
        for (int first = 0; first * slices < quads; first += PLAIN_WARPS * 4) {
            const int q = (first + thread / 8) * slices, within = thread % 8;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (int f = within; f < slices && q < quads; f += 8) {
                const float4 v = here[q + f];
                from[size_t(f) * (NT * 32) + q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
            }
#pragma unroll
            for (int gap = 4; gap; gap >>= 1) {
                sum.x += __shfl_xor_sync(WARP_ALL, sum.x, gap), sum.y += __shfl_xor_sync(WARP_ALL, sum.y, gap);
                sum.z += __shfl_xor_sync(WARP_ALL, sum.z, gap), sum.w += __shfl_xor_sync(WARP_ALL, sum.w, gap);
            }
            // A row of x and one of W of quad `at` of the fragments, for each of four lanes.
            const int at = job.slice + q, row = at / 32 * 8 + at % 4 * 2 + within % 2;
            const int n = (job.group - s.first) * PLAIN_ROWS + at / 4 % 8 + within / 2 * 8;
            if (within < 4 && q < quads && row < ROWS && n < s.n_out) s.out[size_t(row) * s.stride + n] = part(sum, within) * factor(row);
        }
    }
}
