// The auxiliary warps of a fused layer: grid barrier, norm scales, clearing of consumed activations, reduction of
// stream-K tiles and f32 matrices. And the kernel's parameters.
//
// The including file defines F32_WARPS, f32_thread(), f32_warp(), f32_sync() and F32_MATRICES. Its shared memory
// (`Barriers`) has the mbarriers `phase_open` (1 arrival: the grid barrier of a phase is passed), `scales_ready` (all
// lanes of these warps) and `phase_done` (all warps that do a phase's work).
#pragma once
#include "gemm/f32_gemm_tf32.cuh"
#include "gemm/fused_layer_epilogue.cuh"

struct FusedLayerParams {
    Matrix matrices[MAX_MATRICES];
    Phase phases[MAX_PHASES];
    float4* scratch;
    u32* barrier;   // 256 bytes, and then two times MAX_ROWS published scales
    float* scales;  // last known inv_rms of the rows: read, and written after the last norm
    float eps;
    u16 n_phases, n_barrier_phases;  // n_barrier_phases: includes phases without GEMMs
    u32 x_chunk_stride, _pad;        // bytes from 64 values of the first phase's x to the next
#if F32_MATRICES
    F32Params f32;
#endif
};

// Partial tiles of a phase.
__device__ __forceinline__ float4* scratch_of(const FusedLayerParams& params, int phase_index) {
    return params.scratch + size_t(phase_index & 1) * gridDim.x * 2 * 16 * N8_TILES * 32;
}

// A warp arrives with every lane: racecheck follows that, and it costs less than one lane after a __syncwarp.
#define WARP_LANES 32

// Where blocks publish the norm scales of a phase's input, as ready flags: +0 before and after. Only phases 1 and 3
// have scales; phase 2 clears those of phase 1, phase 1 of the next layer those of phase 3.
#define MAX_ROWS 64
__device__ __forceinline__ float* published_scales(const FusedLayerParams& params, int phase_index) {
    return (float*)(params.barrier + 64) + phase_index / 2 * MAX_ROWS;
}

// Norm scales of the rows of a phase's input. A block sums the squares of a few rows and publishes the scales. With at
// most one row per auxiliary warp, every block computes all of them instead (LOCAL_SCALES).
#define LOCAL_SCALES (ROWS <= F32_WARPS)
__device__ __forceinline__ void set_scale(const FusedLayerParams& params, RowScales& rows, int row, float scale) {
    rows.correction[row] = scale / (rows.inv_rms[row] * HEADROOM);
    rows.inv_rms[row] = scale;
    if (blockIdx.x == 0) params.scales[row] = scale;
}
__device__ __forceinline__ void compute_scales(const FusedLayerParams& params, int phase_index, RowScales& rows) {
    const Phase& phase = params.phases[phase_index];
    static_assert(N8_TILES * 8 <= F32_WARPS * 32, "a thread for each row");
    const int f32_row = f32_thread(), warp = f32_warp(), lane = threadIdx.x % 32;
    if (phase.in_squares == nullptr) {
        if (f32_row < N8_TILES * 8) {
            if (phase_index == 0) rows.inv_rms[f32_row] = f32_row < ROWS ? __ldcg(params.scales + f32_row) : 0.0f;
            rows.correction[f32_row] = 1.0f;
        }
        return;
    }
    constexpr int LOADS = 3;
    const int quads = (phase.norm_width + 255) / 256 * 4;
    // The last blocks, which have no job of f32 matrices if there are few.
    const int first = LOCAL_SCALES ? warp : (gridDim.x - 1 - blockIdx.x) * F32_WARPS + warp;
#pragma unroll 1
    for (int row = first; row < ROWS; row += F32_WARPS * gridDim.x) {
        float sum = 0.0f;
#pragma unroll 1
        for (int i = lane; i < quads; i += 32 * LOADS) {
            float4 v[LOADS];
#pragma unroll
            for (int l = 0; l < LOADS; l++) {
                v[l] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i + 32 * l < quads)
                    v[l] = __ldcg((const float4*)phase.in_squares + size_t(row) * quads + i + 32 * l);
            }
#pragma unroll
            for (int l = 0; l < LOADS; l++) sum += (v[l].x + v[l].y) + (v[l].z + v[l].w);
        }
        sum = warp_sum(sum);
        const float scale = 1.0f / sqrtf(sum * (1.0f / phase.norm_width) + params.eps);
        if (lane == 0) {
            if (LOCAL_SCALES)
                set_scale(params, rows, row, scale);
            else
                flag_store(published_scales(params, phase_index) + row, scale);
        }
    }
}
__device__ __forceinline__ void collect_scales(const FusedLayerParams& params, int phase_index, RowScales& rows) {
    if (LOCAL_SCALES || params.phases[phase_index].in_squares == nullptr) return;
    const int f32_row = f32_thread();
    static_assert(F32_WARPS * 32 <= MAX_ROWS, "one scale per thread");
    float scale;
    do {
        scale = flag_load(published_scales(params, phase_index) + f32_row);
    } while (__any_sync(WARP_ALL, f32_row < ROWS && !is_ready(scale)));
    if (f32_row < ROWS) set_scale(params, rows, f32_row, scale);
}

// The auxiliary warps, from the first phase to the last.
#if F32_MATRICES
#define F32_SMEM_PARAM , F32Smem& f32_smem
#else
#define F32_SMEM_PARAM
#endif
template <typename Barriers>
__device__ __forceinline__ void aux_warps(const FusedLayerParams& params, Barriers& smem,
                                          RowScales& rows F32_SMEM_PARAM) {
    const u32 phase_open = shared_address(&smem.phase_open), scales_ready = shared_address(&smem.scales_ready),
              phase_done = shared_address(&smem.phase_done);
    const bool is_barrier_thread = f32_thread() == 0;
#if F32_MATRICES
    f32_prologue(params.f32, f32_smem);
#endif
    pdl_wait();
    u32 barrier_phase = 0;
    if (is_barrier_thread) barrier_phase = grid_barrier_phase(params.barrier);
    for (int phase_index = 0; phase_index < params.n_barrier_phases; phase_index++) {
        if (is_barrier_thread) {
            if (phase_index) {
                mbarrier_wait(phase_done, (phase_index - 1) & 1);
                fence_proxy_async_global();
                grid_barrier_arrive(params.barrier);
                while (grid_barrier_phase(params.barrier) == barrier_phase) {}
                barrier_phase ^= 0x80000000u;
                fence_proxy_async_global();
            }
            mbarrier_arrive(phase_open);
        }
        mbarrier_wait(phase_open, phase_index & 1);
        const Phase& phase = params.phases[phase_index];
        const bool has_gemm = phase_index < params.n_phases;
        if (has_gemm) compute_scales(params, phase_index, rows);
#if F32_MATRICES
        // While other blocks compute scales.
        if (!LOCAL_SCALES && phase_index + 1 == params.n_phases) f32_mainloop(params.f32, f32_smem);
#endif
        if (has_gemm) collect_scales(params, phase_index, rows);
        if (blockIdx.x == 0 && phase.out_f16)
            zero_fill_f16(params.matrices[phase.first], phase, f32_thread(), F32_WARPS * 32);
#pragma unroll 1
        for (int i = blockIdx.x * F32_WARPS * 32 + f32_thread(); i < phase.n_consumed; i += gridDim.x * F32_WARPS * 32)
            phase.consumed[i] = make_uint4(0, 0, 0, 0);
        if (blockIdx.x == 0 && (phase_index == 1 || phase_index == 2))
            published_scales(params, phase_index == 1 ? 3 : 1)[f32_thread()] = 0.0f;
        mbarrier_arrive(scales_ready);
        if (has_gemm && phase.data_parallel_tiles) {
            mbarrier_wait(scales_ready, phase_index & 1);
            reduce_stream_k_tiles(phase, params.matrices[phase.first], scratch_of(params, phase_index), f32_warp(),
                                  F32_WARPS, rows);
            f32_sync();
        }
    }
#if F32_MATRICES
    if (LOCAL_SCALES) f32_mainloop(params.f32, f32_smem);
    f32_sync();
    f32_epilogue(params.f32, f32_smem, [&](int row) { return rows.correction[row]; });
#endif
}
