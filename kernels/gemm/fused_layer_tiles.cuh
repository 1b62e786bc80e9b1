// The math warps of a fused layer: the block's tiles of each phase, their products and epilogues.
//
// `begin_tile(phase, s, tile, is_stream_k)` is called before the products of a tile; `multiply(s, shape, n, acc)` adds
// those of its next `n` work units to acc. `wait_for_operands(phase, s, tile)` returns the operands of the epilogue,
// and `release_operands()` follows it; neither is called for stream-K tiles, which the auxiliary warps reduce.
#pragma once
#include "gemm/fused_layer_aux.cuh"

template <typename Barriers, typename BeginTile, typename Multiply, typename WaitForOperands, typename ReleaseOperands>
__device__ __forceinline__ void math_warps(const FusedLayerParams& params, Barriers& smem, const RowScales& rows,
                                           int warp, const BeginTile& begin_tile, const Multiply& multiply,
                                           const WaitForOperands& wait_for_operands,
                                           const ReleaseOperands& release_operands) {
    const u32 scales_ready = shared_address(&smem.scales_ready), phase_done = shared_address(&smem.phase_done);
#pragma unroll 1
    for (int phase_index = 0; phase_index < params.n_phases; phase_index++) {
        const Phase& phase = params.phases[phase_index];
        float4* scratch = scratch_of(params, phase_index);
        bool has_scales = false;
        const auto wait_for_scales = [&]() {
            if (!has_scales) mbarrier_wait(scales_ready, phase_index & 1);
            has_scales = true;
        };
        WorkRange range = smem.ranges[phase_index];
        const WorkPosition& unit = range.begin;
#pragma unroll 1
        while (range.units) {
            const Matrix& s = params.matrices[unit.matrix];
            const bool is_stream_k = range.next >= 0;
            const int n = range.run_length();
            begin_tile(phase, s, unit.tile, is_stream_k);
            float acc[M16_TILES][N8_TILES][4];
#pragma unroll
            for (int m = 0; m < M16_TILES; m++)
#pragma unroll
                for (int i = 0; i < N8_TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[m][i][e] = 0.0f;
            multiply(s, range.shape, n, acc);
            if (is_stream_k) {
                publish_partial_tile(phase, s, scratch, unit.tile, stream_k_first_block(phase, s, unit.tile), warp,
                                     acc);
            } else {
                const EpilogueSmem& operands = wait_for_operands(phase, s, unit.tile);
                epilogue(phase, s, scratch, unit.tile, warp, rows, operands, wait_for_scales, acc);
                release_operands();
            }
            range.advance(params.matrices, phase.epilogue_kind, n);
        }
        wait_for_scales();
        mbarrier_arrive(phase_done);
    }
}
