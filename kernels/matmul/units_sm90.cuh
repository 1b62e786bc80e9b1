// units.cuh's Q4K, Q5K and Q6K for a warpgroup of sm_90a: the same sums, with B read from shared memory by the tensor
// cores, so that 64 rows share what units.cuh reads for 16. Whole numbers are exact: the bits are those of units.cuh.
// All four warps of a warpgroup must come here together. Products go AHEAD at a time, two such groups in flight: while one is
// computed, the sums of the one before are scaled.
#pragma once
#include "matmul/units.cuh"
#include "matmul/wgmma_sm90.cuh"

#ifndef AHEAD
#define AHEAD 1
#endif

template <int KIND, int M, int N>
__device__ __forceinline__ void unit_k45_sm90(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    constexpr bool FIVE = KIND == KIND_Q5K;
    constexpr int HEADERS = FIVE ? 2560 : 2048;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 x_address = shared_address(x);
#pragma unroll
    for (int m = 0; m < M; m++) {
        int part[2][AHEAD][N][4];
        u32 a[2][AHEAD][4];
        int sum[N][4];
        const Header head[2] = {header_of(w[m] + HEADERS + g * 16), header_of(w[m] + HEADERS + g * 16 + 128)};
        uint4 fifth, codes;
        if (FIVE) fifth = shared16(w[m] + 2048 + lane * 16);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0;
#pragma unroll
        for (int step = 0; step <= 8 / AHEAD; step++) {
            if (step < 8 / AHEAD) {
#pragma unroll
                for (int e = 0; e < AHEAD; e++) {
                    const int run = step * AHEAD + e, p = run / 2, half = run % 2;
                    if (half == 0) codes = shared16(w[m] + p * 512 + lane * 16);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        u32 v = word(codes, j) >> (4 * half) & 0x0f0f0f0fu;
                        if (FIVE) {
                            const int bit = 4 * half + j;
                            const u32 f = word(fifth, p);
                            v |= (bit < 4 ? f << (4 - bit) : f >> (bit - 4)) & 0x10101010u;
                        }
                        a[step & 1][e][j] = v;
                    }
                }
                wgmma_fence();
#pragma unroll
                for (int e = 0; e < AHEAD; e++)
                    wgmma_s8(part[step & 1][e], a[step & 1][e], wgmma_operand(x_address + (step * AHEAD + e) * 256, A8_TILE));
                wgmma_commit();
            }
            if (step > 0) {
                if (step < 8 / AHEAD)
                    wgmma_wait<1>();
                else
                    wgmma_wait<0>();
#pragma unroll
                for (int e = 0; e < AHEAD; e++) wgmma_done(part[(step - 1) & 1][e]);
#pragma unroll
                for (int e = 0; e < AHEAD; e++) {
                    const int run = (step - 1) * AHEAD + e;
                    const int s0 = int(byte_of(head[0].scale[run / 4], run % 4)), s1 = int(byte_of(head[1].scale[run / 4], run % 4));
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) sum[n][i] += part[(step - 1) & 1][e][n][i] * (i < 2 ? s0 : s1);
                }
            }
        }
        u32 mins_a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) mins_a[j] = min_pair(head[j % 2].min[j / 2], t);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint2 b = *(const uint2*)(x + n * A8_TILE + 2048 + lane * 8);
            const float2 d8 = *(const float2*)(x + n * A8_TILE + 2304 + t * 8);
            float mins[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_f16(mins, mins_a[0], mins_a[1], mins_a[2], mins_a[3], b.x, b.y);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float d = f16x2_lo(head[i / 2].halves), dmin = f16x2_hi(head[i / 2].halves);
                const float v = fmaf(d, float(sum[n][i]), -(dmin * mins[i]));
                acc[m][n][i] = fmaf(i % 2 ? d8.y : d8.x, v, acc[m][n][i]);
            }
        }
    }
}

template <int M, int N>
__device__ __forceinline__ void unit_q6k_sm90(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 x_address = shared_address(x);
#pragma unroll
    for (int m = 0; m < M; m++) {
        int part[2][AHEAD][N][4];
        u32 a[2][AHEAD][4];
        int sum[N][4];
        const uint4 scale[2] = {shared16(w[m] + 3072 + g * 16), shared16(w[m] + 3072 + g * 16 + 128)};
        uint4 codes;
        u32 top;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0;
#pragma unroll
        for (int step = 0; step <= 16 / AHEAD; step++) {
            if (step < 16 / AHEAD) {
#pragma unroll
                for (int e = 0; e < AHEAD; e++) {
                    // A product of 32 sees one run of 16, the other being zero.
                    const int run = step * AHEAD + e, s = run / 2, half = s % 2;
                    if (run % 4 == 0) codes = shared16(w[m] + s / 2 * 512 + lane * 16);
                    if (run % 2 == 0) top = *(const u32*)(w[m] + 2048 + s / 4 * 512 + lane * 16 + s % 4 * 4);
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        a[step & 1][e][j] = j / 2 != run % 2 ? 0
                                            : ((half ? word(codes, j) >> 2 : word(codes, j) << 2) & 0x3c3c3c3cu) | (top << (6 - 2 * j) & 0xc0c0c0c0u);
                }
                wgmma_fence();
#pragma unroll
                for (int e = 0; e < AHEAD; e++)
                    wgmma_s8(part[step & 1][e], a[step & 1][e], wgmma_operand(x_address + (step * AHEAD + e) / 2 * 256, A8_TILE));
                wgmma_commit();
            }
            if (step > 0) {
                if (step < 16 / AHEAD)
                    wgmma_wait<1>();
                else
                    wgmma_wait<0>();
#pragma unroll
                for (int e = 0; e < AHEAD; e++) wgmma_done(part[(step - 1) & 1][e]);
#pragma unroll
                for (int e = 0; e < AHEAD; e++) {
                    const int run = (step - 1) * AHEAD + e;
                    const int s0 = signed_byte_of(word(scale[0], run / 4), run % 4), s1 = signed_byte_of(word(scale[1], run / 4), run % 4);
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) sum[n][i] += part[(step - 1) & 1][e][n][i] * (i < 2 ? s0 : s1);
                }
            }
        }
        const float d0 = 0.25f * f16_to_f32(*(const u16*)(w[m] + 3328 + g * 2));
        const float d1 = 0.25f * f16_to_f32(*(const u16*)(w[m] + 3328 + g * 2 + 16));
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 d8 = *(const float2*)(x + n * A8_TILE + 2304 + t * 8);
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[m][n][i] = fmaf(i % 2 ? d8.y : d8.x, (i < 2 ? d0 : d1) * float(sum[n][i]), acc[m][n][i]);
        }
    }
}
