// Logits reduction, second of two passes: the best tokens of each row and both log-sum-exps.
//
//   ids     the K largest edited logits, best first, ties to the lower id
//   lse     ln sum e^x of the edited row and of the raw row
//
// The K-th largest group maximum bounds the K-th largest logit from below, so only groups that reach it are read again.
// If more than MAX_CANDIDATES logits reach it, bisection over those groups raises the bound to the K-th largest logit
// itself, and logits equal to it are taken in id order.
//
// in   as logits_reduce_chunks, and its scratch
// out  out [rows][4 + 3 * K] words: lse f32, raw lse f32, n i32, 0, ids i32 [K], logits f32 [K], raw f32 [K]
// grid rows x 1024
// arch sm_80 and up     reference cpu::reference::rows::row     test crates/cuda/tests/rows.rs
#include "common/prelude.cuh"
#include "logits/edits.cuh"

#define THREADS 1024
#define MAX_CANDIDATES 2048
#define N (K < VOCAB ? K : VOCAB)

#define WARPS (THREADS / 32)
// Warps that read listed groups; the last warp computes the log-sum-exps.
#define READER_WARPS (WARPS - 1)
// Listed groups per warp whose logits are loaded together: all of them if the bound is tight.
#define BATCH_GROUPS 3
// Lanes that compute the rank of a candidate together.
#define LANES_PER_CANDIDATE 8

struct Shared {
    u64 candidates[MAX_CANDIDATES];   // see pack_candidate()
    float value[MAX_CANDIDATES];      // their logits: the key does not distinguish zeros
    float2 chunk_stats[2][N_CHUNKS];  // (max, sum) of the edited row's chunks, then of the raw row's
    unsigned short groups[N_GROUPS];
    int n_groups, n_found, n_at_least;
};

// A candidate as one number: the larger is better. Ties go to the lower id.
__device__ __forceinline__ u64 pack_candidate(unsigned key, int id) { return (u64)key << 32 | (unsigned)~id; }

// ln of the sum over chunks of (max, sum) pairs, by one warp.
__device__ float log_sum_exp(const float2* chunk_stats) {
    const int lane = threadIdx.x & 31;
    float max_value = __int_as_float(0xff800000);
    for (int r = lane; r < N_CHUNKS; r += 32) max_value = fmaxf(max_value, chunk_stats[r].x);
    max_value = warp_max(max_value);
    if (max_value - max_value != 0.0f) return max_value;  // an infinity
    double sum = 0.0;
    for (int r = lane; r < N_CHUNKS; r += 32) {
        const float2 chunk = chunk_stats[r];
        if (chunk.x - chunk.x == 0.0f) sum += (double)(chunk.y * __expf(chunk.x - max_value));
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(WARP_ALL, sum, offset);
    // Between 1 and N_CHUNKS: f32 is enough from here.
    return max_value + logf((float)sum);
}

// Appends every logit of the listed groups whose key is at least `bound`, in any order: a warp per group. A warp
// allocates entries for all its hits at once and reads these few again: unrolled code for each of its BATCH_GROUPS *
// GROUP_SIZE / 32 values would take longer to fetch than to run.
__device__ void collect_candidates(const float* values, unsigned bound, Shared& s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, per_lane = GROUP_SIZE / 32;
    if (warp >= READER_WARPS) return;
    for (int first = warp; first < s.n_groups; first += BATCH_GROUPS * READER_WARPS) {
        float x[BATCH_GROUPS][per_lane];
        int begin[BATCH_GROUPS];
#pragma unroll
        for (int b = 0; b < BATCH_GROUPS; b++) {
            const int index = first + b * READER_WARPS;
            begin[b] = index < s.n_groups ? s.groups[index] * GROUP_SIZE + lane : VOCAB;
#pragma unroll
            for (int i = 0; i < per_lane; i++) x[b][i] = begin[b] + 32 * i < VOCAB ? values[begin[b] + 32 * i] : 0.0f;
        }
        unsigned hits = 0;  // bit b * per_lane + i: value i of group b
#pragma unroll
        for (int b = 0; b < BATCH_GROUPS; b++) {
#pragma unroll
            for (int i = 0; i < per_lane; i++)
                if (begin[b] + 32 * i < VOCAB && sort_key(x[b][i]) >= bound) hits |= 1u << (b * per_lane + i);
        }
        const int key = __popc(hits);
        int at = key;  // of lanes up to this one
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(WARP_ALL, at, offset);
            at += lane >= offset ? other : 0;
        }
        int base = 0;
        if (lane == 31 && at) base = atomicAdd(&s.n_found, at);
        at += __shfl_sync(WARP_ALL, base, 31) - key;
#pragma unroll 1
        for (; hits; hits &= hits - 1, at++) {
            const int which = __ffs(hits) - 1;
            const int id =
                s.groups[first + which / per_lane * READER_WARPS] * GROUP_SIZE + lane + which % per_lane * 32;
            const float value = values[id];
            if (at < MAX_CANDIDATES)
                s.candidates[at] = pack_candidate(sort_key(value), id), s.value[at] = nan_to_neg_inf(value);
        }
    }
}

// As in logits_reduce_chunks, header and edits are not __restrict__, so that they are read before the wait.
extern "C" __global__ void __launch_bounds__(THREADS)
    logits_top_k(const int* header, const float* __restrict__ logits, const float* __restrict__ edited,
                 const LogitEditsHeader* edits, const float* __restrict__ scratch, int* __restrict__ out) {
    pdl_launch();
    __shared__ Shared s;
    const int row = blockIdx.x;
    const bool is_active = row < header[N_LOGITS_ROWS_AT];
    const bool has_edits = edit_of(edits, row) >= 0;
    pdl_wait();
    if (!is_active) return;
    const float* raw = logits + (size_t)row * STRIDE;
    const float* values = has_edits ? edited + (size_t)row * STRIDE : raw;
    const float* group_max = scratch + (size_t)row * ROW_SCRATCH;
    out += (size_t)row * (4 + 3 * K);

    // Loaded before the chunk sums are needed. These loops run once or twice, and their code is not cached yet.
    const float largest = threadIdx.x < N_GROUPS ? group_max[threadIdx.x] : 0.0f;
#pragma unroll 1
    for (int r = threadIdx.x; r < N_CHUNKS; r += THREADS) {
        const float* pairs = group_max + N_GROUPS + 2 * r;
        s.chunk_stats[0][r] = make_float2(pairs[0], pairs[1]);
        if (has_edits) s.chunk_stats[1][r] = make_float2(pairs[2 * N_CHUNKS], pairs[2 * N_CHUNKS + 1]);
    }
    if (threadIdx.x == 0) s.n_groups = s.n_found = s.n_at_least = 0;

    // A bound that at least N groups reach and, if found early, not many more.
    unsigned bound = 0;
    const unsigned key = threadIdx.x < N_GROUPS ? sort_key(largest) : 0;
    if (N_GROUPS > N) {
        for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
            const unsigned trial_bound = bound | bit;
            int n = __syncthreads_count(key >= trial_bound);
#pragma unroll 1
            for (int g = threadIdx.x + THREADS; g - threadIdx.x < N_GROUPS; g += THREADS)
                n += __syncthreads_count(g < N_GROUPS && sort_key(group_max[g]) >= trial_bound);
            if (n >= N) bound = trial_bound;
            if (n >= N && n <= N + N / 4) break;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int g = threadIdx.x; g < N_GROUPS; g += THREADS)
        if ((g == threadIdx.x ? key : sort_key(group_max[g])) >= bound)
            s.groups[atomicAdd(&s.n_groups, 1)] = (unsigned short)g;
    __syncthreads();
    collect_candidates(values, bound, s);
    if (threadIdx.x / 32 == READER_WARPS) {
        const float lse = log_sum_exp(s.chunk_stats[0]);
        const float raw_lse = has_edits ? log_sum_exp(s.chunk_stats[1]) : lse;
        if (threadIdx.x % 32 == 0) {
            out[0] = __float_as_int(lse);
            out[1] = __float_as_int(raw_lse);
            out[2] = N;
            out[3] = 0;
        }
    }
    __syncthreads();

    if (s.n_found > MAX_CANDIDATES) {
        // The N-th largest logit itself.
        bound = 0;
        for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
            const unsigned trial_bound = bound | bit;
            int n = 0;
            for (int i = threadIdx.x; i < s.n_groups * GROUP_SIZE; i += THREADS) {
                const int id = s.groups[i / GROUP_SIZE] * GROUP_SIZE + i % GROUP_SIZE;
                n += id < VOCAB && sort_key(values[id]) >= trial_bound;
            }
            __syncthreads();
            if (threadIdx.x == 0) s.n_at_least = 0;
            __syncthreads();
            n = __reduce_add_sync(~0u, n);
            if ((threadIdx.x & 31) == 0 && n) atomicAdd(&s.n_at_least, n);
            __syncthreads();
            if (s.n_at_least >= N) bound = trial_bound;
        }
        __syncthreads();
        if (threadIdx.x == 0) s.n_found = 0;
        __syncthreads();
        if (bound != ~0u) collect_candidates(values, bound + 1, s);
        __syncthreads();
        // Fewer than N are above it. The rest equal it, the lowest ids first.
        if (threadIdx.x < 32) {
            int n_found = s.n_found;
            for (int g = 0; g < N_GROUPS && n_found < N; g++) {
                if (sort_key(group_max[g]) < bound) continue;
                for (int i = threadIdx.x; i - (int)threadIdx.x < GROUP_SIZE && n_found < N; i += 32) {
                    const int id = g * GROUP_SIZE + i;
                    const bool hit = id < VOCAB && sort_key(values[id]) == bound;
                    const unsigned hits = __ballot_sync(~0u, hit);
                    const int at = n_found + __popc(hits & ((1u << threadIdx.x) - 1));
                    if (hit && at < N)
                        s.candidates[at] = pack_candidate(bound, id), s.value[at] = nan_to_neg_inf(values[id]);
                    n_found += __popc(hits);
                }
            }
            if (threadIdx.x == 0) s.n_found = n_found < N ? n_found : N;
        }
        __syncthreads();
    }

    const int n_found = s.n_found, part = threadIdx.x % LANES_PER_CANDIDATE;
    for (int first = 0; first < n_found; first += THREADS / LANES_PER_CANDIDATE) {
        const int i = first + threadIdx.x / LANES_PER_CANDIDATE;
        const u64 key = i < n_found ? s.candidates[i] : 0;
        int rank = 0;
#pragma unroll 4
        for (int j = part; j < n_found; j += LANES_PER_CANDIDATE) rank += s.candidates[j] > key;
#pragma unroll
        for (int offset = LANES_PER_CANDIDATE / 2; offset; offset >>= 1)
            rank += __shfl_xor_sync(WARP_ALL, rank, offset);
        if (i < n_found && part == 0 && rank < N) {
            const int id = (int)~(unsigned)key;
            const float x = s.value[i];
            out[4 + rank] = id;
            out[4 + K + rank] = __float_as_int(x);
            out[4 + 2 * K + rank] = __float_as_int(has_edits ? nan_to_neg_inf(raw[id]) : x);
        }
    }
}
