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

#define WARPS (THREADS / 32)
// Warps that read listed groups; the last one adds up the runs meanwhile.
#define READERS (WARPS - 1)
// Listed groups of a warp whose logits are on their way together: all of them where the bound is close.
#define BATCH 3
// Threads that rank a candidate together.
#define JUDGES 8

struct Shared {
    u64 best[CAP];            // candidates, see ranked()
    float value[CAP];         // their logits: the order does not tell zeros apart
    float2 runs[2][RUNS];     // (max, sum) of the row's runs, then of the raw row's
    unsigned short groups[GROUPS];
    int listed, found, taken;
};

// A candidate as one number: of two, the better is the larger. Ties go to the lower id.
__device__ __forceinline__ u64 ranked(unsigned key, int id) { return (u64)key << 32 | (unsigned)~id; }

// ln of the sum over runs of (max, sum) pairs, by one warp.
__device__ float log_sum_exp(const float2* runs) {
    const int lane = threadIdx.x & 31;
    float most = __int_as_float(0xff800000);
    for (int r = lane; r < RUNS; r += 32) most = fmaxf(most, runs[r].x);
    most = warp_max(most);
    if (most - most != 0.0f) return most;  // an infinity
    double sum = 0.0;
    for (int r = lane; r < RUNS; r += 32) {
        const float2 run = runs[r];
        if (run.x - run.x == 0.0f) sum += (double)(run.y * __expf(run.x - most));
    }
#pragma unroll
    for (int gap = 16; gap; gap >>= 1) sum += __shfl_xor_sync(WARP_ALL, sum, gap);
    // Between 1 and RUNS, so f32 is enough from here.
    return most + logf((float)sum);
}

// Puts every logit of the listed groups whose order is at least `bound` behind the others: a warp per group, of READERS.
// A warp takes places for all it found at once and reads again the few it puts there: the code for each of its BATCH * GROUP / 32
// values by itself would take longer to come than to run. In which order they stand does not matter.
__device__ void gather(const float* values, unsigned bound, Shared& s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, each = GROUP / 32;
    if (warp >= READERS) return;
    for (int first = warp; first < s.listed; first += BATCH * READERS) {
        float x[BATCH][each];
        int begin[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int index = first + b * READERS;
            begin[b] = index < s.listed ? s.groups[index] * GROUP + lane : VOCAB;
#pragma unroll
            for (int i = 0; i < each; i++) x[b][i] = begin[b] + 32 * i < VOCAB ? values[begin[b] + 32 * i] : 0.0f;
        }
        unsigned hits = 0;  // bit b * each + i: value i of group b
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
#pragma unroll
            for (int i = 0; i < each; i++)
                if (begin[b] + 32 * i < VOCAB && order_of(x[b][i]) >= bound) hits |= 1u << (b * each + i);
        }
        const int own = __popc(hits);
        int at = own;  // of lanes up to this one
#pragma unroll
        for (int gap = 1; gap < 32; gap *= 2) {
            const int other = __shfl_up_sync(WARP_ALL, at, gap);
            at += lane >= gap ? other : 0;
        }
        int place = 0;
        if (lane == 31 && at) place = atomicAdd(&s.found, at);
        at += __shfl_sync(WARP_ALL, place, 31) - own;
#pragma unroll 1
        for (; hits; hits &= hits - 1, at++) {
            const int which = __ffs(hits) - 1;
            const int id = s.groups[first + which / each * READERS] * GROUP + lane + which % each * 32;
            const float value = values[id];
            if (at < CAP) s.best[at] = ranked(order_of(value), id), s.value[at] = clean(value);
        }
    }
}

// As in rows_scan, the header and edits are not __restrict__ so that they are read before the wait.
extern "C" __global__ void __launch_bounds__(THREADS) rows_select(
    const int* header, const float* __restrict__ logits, const float* __restrict__ edited, const EditHead* edits,
    const float* __restrict__ scratch, int* __restrict__ out) {
    pdl_launch();
    __shared__ Shared s;
    const int row = blockIdx.x;
    const bool real = row < header[ASKED_AT];
    const bool has_edits = edit_of(edits, row) >= 0;
    pdl_wait();
    if (!real) return;
    const float* raw = logits + (size_t)row * STRIDE;
    const float* values = has_edits ? edited + (size_t)row * STRIDE : raw;
    const float* maxima = scratch + (size_t)row * ROW_SCRATCH;
    out += (size_t)row * (4 + 3 * K);

    // Asked for before what the runs wait for. These loops run once or twice, with code that is not there yet.
    const float largest = threadIdx.x < GROUPS ? maxima[threadIdx.x] : 0.0f;
#pragma unroll 1
    for (int r = threadIdx.x; r < RUNS; r += THREADS) {
        const float* pairs = maxima + GROUPS + 2 * r;
        s.runs[0][r] = make_float2(pairs[0], pairs[1]);
        if (has_edits) s.runs[1][r] = make_float2(pairs[2 * RUNS], pairs[2 * RUNS + 1]);
    }
    if (threadIdx.x == 0) s.listed = s.found = s.taken = 0;

    // A bound that at least N groups reach, and if it can be had soon, not many more.
    unsigned bound = 0;
    const unsigned own = threadIdx.x < GROUPS ? order_of(largest) : 0;
    if (GROUPS > N) {
        for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
            const unsigned trial = bound | bit;
            int n = __syncthreads_count(own >= trial);
#pragma unroll 1
            for (int g = threadIdx.x + THREADS; g - threadIdx.x < GROUPS; g += THREADS)
                n += __syncthreads_count(g < GROUPS && order_of(maxima[g]) >= trial);
            if (n >= N) bound = trial;
            if (n >= N && n <= N + N / 4) break;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int g = threadIdx.x; g < GROUPS; g += THREADS)
        if ((g == threadIdx.x ? own : order_of(maxima[g])) >= bound) s.groups[atomicAdd(&s.listed, 1)] = (unsigned short)g;
    __syncthreads();
    gather(values, bound, s);
    if (threadIdx.x / 32 == READERS) {
        const float lse = log_sum_exp(s.runs[0]);
        const float raw_lse = has_edits ? log_sum_exp(s.runs[1]) : lse;
        if (threadIdx.x % 32 == 0) {
            out[0] = __float_as_int(lse);
            out[1] = __float_as_int(raw_lse);
            out[2] = N;
            out[3] = 0;
        }
    }
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
                    if (hit && at < N) s.best[at] = ranked(bound, id), s.value[at] = clean(values[id]);
                    found += __popc(hits);
                }
            }
            if (threadIdx.x == 0) s.found = found < N ? found : N;
        }
        __syncthreads();
    }

    const int found = s.found, judge = threadIdx.x % JUDGES;
    for (int first = 0; first < found; first += THREADS / JUDGES) {
        const int i = first + threadIdx.x / JUDGES;
        const u64 own = i < found ? s.best[i] : 0;
        int rank = 0;
#pragma unroll 4
        for (int j = judge; j < found; j += JUDGES) rank += s.best[j] > own;
#pragma unroll
        for (int gap = JUDGES / 2; gap; gap >>= 1) rank += __shfl_xor_sync(WARP_ALL, rank, gap);
        if (i < found && judge == 0 && rank < N) {
            const int id = (int)~(unsigned)own;
            const float x = s.value[i];
            out[4 + rank] = id;
            out[4 + K + rank] = __float_as_int(x);
            out[4 + 2 * K + rank] = __float_as_int(has_edits ? clean(raw[id]) : x);
        }
    }
}
