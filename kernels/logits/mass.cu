// Mass of logits rows, and the token at a share of it, with the bits of contract::mass.
//
//   mass(x) = exp((x - max) / divisor)          max: the best logit of the row, which logits/top_k.cu has written
//   logits_block_masses  per block of 512 ids: eight sums, sum j of ids j, j + 8, .., then these in order
//   logits_pick_share    the sum of all blocks in order; the first id at which the cumulative mass passes share * sum
//
// in   header: number of logits rows at int N_LOGITS_ROWS_AT     logits f32 [logits rows][STRIDE]
//      edited f32 [logits rows][STRIDE], read for rows that have edits; edits: LogitEditsHeader or null
//      queries RowQuery [rows]     reduced: what logits/top_k.cu wrote for its K
// out  masses f64 [rows][N_BLOCKS]     results RowMass [rows]
// grid logits_block_masses: (ceil(N_BLOCKS / 32), rows) x 256, eight threads per block of ids; pick_share: rows x
//      512
// smem the sums of a row's blocks and of one block's ids
// arch sm_80 and up     reference contract::mass     test crates/cuda/tests/mass.rs
// Every product and sum is rounded alone, as the reference does it. NaN counts as minus infinity. One thread adds a row
// of sums in order, so all threads can look for the share in it.
#include "common/prelude.cuh"
#include "logits/edits.cuh"

#define MASS_BLOCK 512
#define MASS_LANES 8
#define N_BLOCKS ((VOCAB + MASS_BLOCK - 1) / MASS_BLOCK)
// Logits of a thread that are loaded together.
#define LOADS 16

struct RowQuery {
    float divisor;  // 0: the row has no query
    int picks;      // whether the token at `share` is wanted
    double share;
};

struct RowMass {
    double total;  // 0: none was computed
    int id;        // the token at the share; -1 if it was not found here
    float logit, raw;
    int _pad;
};

__device__ __forceinline__ float mass_exp(float x) {
    const float lowest = -87.0f, rounding = 12582912.0f;
    const float clamped = fmaxf(x, lowest);
    const float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), rounding);
    const float whole = __fsub_rn(shifted, rounding);
    const float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(whole, 0.6933594f)), __fmul_rn(whole, -2.1219444e-4f));
    float series = 1.0f / 5040.0f;
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 720.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 120.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 24.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 6.0f);
    series = __fadd_rn(__fmul_rn(series, r), 0.5f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f);
    const u32 exponent = (__float_as_uint(shifted) - __float_as_uint(rounding) + 127u) << 23;
    return x < lowest ? 0.0f : __fmul_rn(series, __uint_as_float(exponent));
}

struct QueriedRow {
    RowQuery query;
    float max;
    const float* values;  // edited
    const float* raw;
    bool is_active;
};

// Row `row` after the dependency wait: `reduced` and the logits are complete.
__device__ __forceinline__ QueriedRow queried_row(int row, const float* logits, const float* edited,
                                                  const LogitEditsHeader* edits, const RowQuery* queries,
                                                  const int* reduced) {
    QueriedRow found;
    found.query = queries[row];
    found.raw = logits + (size_t)row * STRIDE;
    found.values = edit_of(edits, row) >= 0 ? edited + (size_t)row * STRIDE : found.raw;
    found.max = __int_as_float(reduced[(size_t)row * (4 + 3 * K) + 4 + K]);
    found.is_active = found.query.divisor > 0.0f && fabsf(found.max) < INF;
    return found;
}

__device__ __forceinline__ float mass_of(const QueriedRow& row, float x) {
    return mass_exp(__fdiv_rn(__fsub_rn(nan_to_neg_inf(x), row.max), row.query.divisor));
}

extern "C" __global__ void __launch_bounds__(256)
    logits_block_masses(const int* header, const float* logits, const float* edited, const LogitEditsHeader* edits,
                        const RowQuery* queries, const int* reduced, double* masses) {
    pdl_launch();
    const int row = blockIdx.y, block = blockIdx.x * 32 + threadIdx.x / MASS_LANES, lane = threadIdx.x % MASS_LANES;
    const bool has_row = row < header[N_LOGITS_ROWS_AT];
    pdl_wait();
    if (!has_row) return;
    const QueriedRow queried = queried_row(row, logits, edited, edits, queries, reduced);
    if (!queried.is_active) return;
    double sum = 0.0;
    for (int begin = 0; begin < MASS_BLOCK; begin += LOADS * MASS_LANES) {
        float x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int id = block * MASS_BLOCK + begin + i * MASS_LANES + lane;
            x[i] = id < VOCAB ? queried.values[id] : -INF;
        }
        // Ids past the end have no mass, and adding zero changes no bit.
#pragma unroll
        for (int i = 0; i < LOADS; i++) sum += (double)mass_of(queried, x[i]);
    }
    double total = 0.0;
#pragma unroll
    for (int j = 0; j < MASS_LANES; j++) total += __shfl_sync(WARP_ALL, sum, j, MASS_LANES);
    if (lane == 0 && block < N_BLOCKS) masses[(size_t)row * N_BLOCKS + block] = total;
}

// sums[i] = before + sums[0] + .. + sums[i], added in this order by one thread.
template <int N>
__device__ __forceinline__ void add_up(double* sums, double before) {
    double reached = before;
#pragma unroll 8
    for (int i = 0; i < N; i++) {
        reached += sums[i];
        sums[i] = reached;
    }
}

// Whether sums[i] is the first that passes `target`, which `before` does not. Sums do not fall.
__device__ __forceinline__ bool passes_first(const double* sums, int i, double before, double target) {
    return sums[i] > target && (i > 0 ? sums[i - 1] : before) <= target;
}

extern "C" __global__ void __launch_bounds__(MASS_BLOCK)
    logits_pick_share(const int* header, const float* logits, const float* edited, const LogitEditsHeader* edits,
                      const RowQuery* queries, const int* reduced, const double* masses, RowMass* results) {
    pdl_launch();
    __shared__ double block_sums[N_BLOCKS];
    __shared__ double token_sums[MASS_BLOCK];
    __shared__ int found_block, last_token;
    const int row = blockIdx.x;
    const bool has_row = row < header[N_LOGITS_ROWS_AT];
    pdl_wait();
    if (!has_row) return;
    const QueriedRow queried = queried_row(row, logits, edited, edits, queries, reduced);
    RowMass result = {0.0, -1, 0.0f, 0.0f, 0};
    if (!queried.is_active) {
        if (threadIdx.x == 0) results[row] = result;
        return;
    }
    for (int i = threadIdx.x; i < N_BLOCKS; i += MASS_BLOCK) block_sums[i] = masses[(size_t)row * N_BLOCKS + i];
    if (threadIdx.x == 0) found_block = last_token = -1;
    __syncthreads();
    if (threadIdx.x == 0) add_up<N_BLOCKS>(block_sums, 0.0);
    __syncthreads();
    result.total = block_sums[N_BLOCKS - 1];
    const double target = __dmul_rn(queried.query.share, result.total);
    if (queried.query.picks) {
        for (int i = threadIdx.x; i < N_BLOCKS; i += MASS_BLOCK)
            if (passes_first(block_sums, i, 0.0, target)) found_block = i;
    }
    __syncthreads();
    if (found_block < 0) {
        if (threadIdx.x == 0) results[row] = result;
        return;
    }
    const int id = found_block * MASS_BLOCK + threadIdx.x;
    const double before = found_block > 0 ? block_sums[found_block - 1] : 0.0;
    const float mass = id < VOCAB ? mass_of(queried, queried.values[id]) : 0.0f;
    token_sums[threadIdx.x] = mass;
    __syncthreads();
    if (threadIdx.x == 0) add_up<MASS_BLOCK>(token_sums, before);
    __syncthreads();
    bool is_found = passes_first(token_sums, threadIdx.x, before, target);
    if (!(token_sums[MASS_BLOCK - 1] > target)) {
        // The lanes' sum and this one differ in the last digit, and the share is between: the last id with any mass.
        if (mass > 0.0f) atomicMax(&last_token, (int)threadIdx.x);
        __syncthreads();
        is_found = threadIdx.x == last_token;
    }
    if (is_found) {
        result.id = id;
        result.logit = nan_to_neg_inf(queried.values[id]);
        result.raw = nan_to_neg_inf(queried.raw[id]);
        results[row] = result;
    }
}
