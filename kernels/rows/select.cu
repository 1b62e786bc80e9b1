// Row reduction, second of two: the best tokens of each row and both log-sum-exps.
//
//   ids     the K largest edited logits, best first, ties to the lower id
//   lse     ln sum e^x of the edited row and of the raw row
//
// The K-th largest group maximum bounds the K-th largest logit from below, so only groups that reach it are
// read again. When more than CAP logits reach it, the bound is raised to the K-th largest logit itself by
// bisection over those groups, and what equals it is taken in id order.
//
// in   as rows_scan, and its scratch
// out  out [rows][4 + 3 * K] words: lse f32, raw lse f32, n i32, 0, ids i32 [K], logits f32 [K], raw f32 [K]
// grid rows, one block of 1024 threads each
// arch sm_80 and up     reference cpu::reference::rows::row     test rows::reduction_equals_the_reference
// hot
#include "common/prelude.cuh"
#include "rows/edits.cuh"

#define THREADS 1024
#define CAP 2048
#define N (K < VOCAB ? K : VOCAB)

struct Shared {
    unsigned keys[CAP];
    int ids[CAP];
    unsigned short groups[GROUPS];
    double sums[THREADS / 32];
    float maxima[THREADS / 32];
    int listed, found, taken;
};

// ln of the sum over runs of (max, sum) pairs. All threads get the same value.
__device__ float log_sum_exp(const float* pairs, Shared& s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float most = __int_as_float(0xff800000);
    for (int r = threadIdx.x; r < RUNS; r += THREADS) most = fmaxf(most, pairs[2 * r]);
#pragma unroll
    for (int off = 16; off; off >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, off));
    __syncthreads();
    if (lane == 0) s.maxima[warp] = most;
    __syncthreads();
    most = s.maxima[lane];
#pragma unroll
    for (int off = 16; off; off >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, off));
    if (most - most != 0.0f) return most;  // an infinity
    double sum = 0.0;
    for (int r = threadIdx.x; r < RUNS; r += THREADS) {
        const float m = pairs[2 * r];
        if (m - m == 0.0f) sum += (double)(pairs[2 * r + 1] * __expf(m - most));
    }
#pragma unroll
    for (int off = 16; off; off >>= 1) sum += __shfl_xor_sync(~0u, sum, off);
    if (lane == 0) s.sums[warp] = sum;
    __syncthreads();
    sum = s.sums[lane];
#pragma unroll
    for (int off = 16; off; off >>= 1) sum += __shfl_xor_sync(~0u, sum, off);
    return most + (float)log(sum);
}

// Puts every logit of the listed groups whose order is at least `bound` behind the others.
__device__ void gather(const float* values, unsigned bound, Shared& s) {
    for (int i = threadIdx.x; i < s.listed * GROUP; i += THREADS) {
        const int id = s.groups[i / GROUP] * GROUP + i % GROUP;
        if (id >= VOCAB) continue;
        const unsigned key = order_of(values[id]);
        if (key >= bound) {
            const int at = atomicAdd(&s.found, 1);
            if (at < CAP) s.keys[at] = key, s.ids[at] = id;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rows_select(
    const int* __restrict__ header, const float* __restrict__ logits, const float* __restrict__ edited,
    const EditHead* __restrict__ edits, const float* __restrict__ scratch, int* __restrict__ out) {
    pdl_launch();
    __shared__ Shared s;
    const int row = blockIdx.x;
    pdl_wait();
    if (row >= header[ASKED_AT]) return;
    const bool has_edits = edit_of(edits, row) >= 0;
    const float* raw = logits + (size_t)row * STRIDE;
    const float* values = has_edits ? edited + (size_t)row * STRIDE : raw;
    const float* maxima = scratch + (size_t)row * ROW_SCRATCH;
    out += (size_t)row * (4 + 3 * K);

    const float lse = log_sum_exp(maxima + GROUPS, s);
    float raw_lse = lse;
    if (has_edits) {
        __syncthreads();
        raw_lse = log_sum_exp(maxima + GROUPS + 2 * RUNS, s);
    }
    if (threadIdx.x == 0) {
        out[0] = __float_as_int(lse);
        out[1] = __float_as_int(raw_lse);
        out[2] = N;
        out[3] = 0;
        s.listed = s.found = s.taken = 0;
    }

    // A bound that at least N groups reach, and if it can be had soon, not many more.
    unsigned bound = 0;
    if (GROUPS > N) {
        const unsigned own = threadIdx.x < GROUPS ? order_of(maxima[threadIdx.x]) : 0;
        for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
            const unsigned trial = bound | bit;
            int n = __syncthreads_count(own >= trial);
            for (int g = threadIdx.x + THREADS; g - threadIdx.x < GROUPS; g += THREADS)
                n += __syncthreads_count(g < GROUPS && order_of(maxima[g]) >= trial);
            if (n >= N) bound = trial;
            if (n >= N && n <= N + N / 4) break;
        }
    }
    __syncthreads();
    for (int g = threadIdx.x; g < GROUPS; g += THREADS)
        if (order_of(maxima[g]) >= bound) s.groups[atomicAdd(&s.listed, 1)] = (unsigned short)g;
    __syncthreads();
    gather(values, bound, s);
    __syncthreads();

    if (s.found > CAP) {
        // The N-th largest logit itself.
        bound = 0;
        for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
            const unsigned trial = bound | bit;
            int n = 0;
            for (int i = threadIdx.x; i < s.listed * GROUP; i += THREADS) {
                const int id = s.groups[i / GROUP] * GROUP + i % GROUP;
                n += id < VOCAB && order_of(values[id]) >= trial;
            }
            __syncthreads();
            if (threadIdx.x == 0) s.taken = 0;
            __syncthreads();
            n = __reduce_add_sync(~0u, n);
            if ((threadIdx.x & 31) == 0 && n) atomicAdd(&s.taken, n);
            __syncthreads();
            if (s.taken >= N) bound = trial;
        }
        __syncthreads();
        if (threadIdx.x == 0) s.found = 0;
        __syncthreads();
        if (bound != ~0u) gather(values, bound + 1, s);
        __syncthreads();
        // Fewer than N are above it. The rest equal it, the lowest ids first.
        if (threadIdx.x < 32) {
            int found = s.found;
            for (int g = 0; g < GROUPS && found < N; g++) {
                if (order_of(maxima[g]) < bound) continue;
                for (int i = threadIdx.x; i - (int)threadIdx.x < GROUP && found < N; i += 32) {
                    const int id = g * GROUP + i;
                    const bool hit = id < VOCAB && order_of(values[id]) == bound;
                    const unsigned hits = __ballot_sync(~0u, hit);
                    const int at = found + __popc(hits & ((1u << threadIdx.x) - 1));
                    if (hit && at < N) s.keys[at] = bound, s.ids[at] = id;
                    found += __popc(hits);
                }
            }
            if (threadIdx.x == 0) s.found = found < N ? found : N;
        }
        __syncthreads();
    }

    const int found = s.found;
    for (int i = threadIdx.x; i < found; i += THREADS) {
        const unsigned key = s.keys[i];
        const int id = s.ids[i];
        int rank = 0;
        for (int j = 0; j < found; j++)
            rank += s.keys[j] > key || (s.keys[j] == key && s.ids[j] < id);
        if (rank < N) {
            out[4 + rank] = id;
            out[4 + K + rank] = __float_as_int(clean(values[id]));
            out[4 + 2 * K + rank] = __float_as_int(clean(raw[id]));
        }
    }
}
