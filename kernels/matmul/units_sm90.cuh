// units.cuh's Q4K and Q5K for a warpgroup of sm_90a: the same sums, with B read from shared memory by the tensor cores.
// Whole numbers are exact, so the bits are those of units.cuh. All four warps of a warpgroup must come here together.
#pragma once
#include "matmul/units.cuh"
#include "matmul/wgmma_sm90.cuh"

template <int KIND, int M, int N>
__device__ __forceinline__ void unit_k45_sm90(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    constexpr bool FIVE = KIND == KIND_Q5K;
    constexpr int HEADERS = FIVE ? 2560 : 2048;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 x_address = shared_address(x);
#pragma unroll
    for (int m = 0; m < M; m++) {
        int part[2][2][N][4];  // [turn][half]
        u32 a[2][2][4];
        int sum[N][4];
        const Header head[2] = {header_of(w[m] + HEADERS + g * 16), header_of(w[m] + HEADERS + g * 16 + 128)};
        uint4 fifth;
        if (FIVE) fifth = shared16(w[m] + 2048 + lane * 16);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0;
#pragma unroll
        for (int p = 0; p <= 4; p++) {
            if (p < 4) {
                const uint4 codes = shared16(w[m] + p * 512 + lane * 16);
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        u32 v = word(codes, j) >> (4 * half) & 0x0f0f0f0fu;
                        if (FIVE) {
                            const int bit = 4 * half + j;
                            const u32 f = word(fifth, p);
                            v |= (bit < 4 ? f << (4 - bit) : f >> (bit - 4)) & 0x10101010u;
                        }
                        a[p & 1][half][j] = v;
                    }
                wgmma_fence();
#pragma unroll
                for (int half = 0; half < 2; half++)
                    wgmma_s8(part[p & 1][half], a[p & 1][half], wgmma_operand(x_address + p * 512 + half * 256, A8_TILE));
                wgmma_commit();
            }
            if (p > 0) {
                if (p < 4)
                    wgmma_wait<1>();
                else
                    wgmma_wait<0>();
                const int q = p - 1;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int s0 = int(byte_of(head[0].scale[q / 2], q % 2 * 2 + half)), s1 = int(byte_of(head[1].scale[q / 2], q % 2 * 2 + half));
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) sum[n][i] += part[q & 1][half][n][i] * (i < 2 ? s0 : s1);
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
        int part[2][2][N][4];  // [turn][run of 16]
        u32 a[2][2][4];
        int sum[N][4];
        const uint4 scale[2] = {shared16(w[m] + 3072 + g * 16), shared16(w[m] + 3072 + g * 16 + 128)};
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0;
#pragma unroll
        for (int s = 0; s <= 8; s++) {  // runs of 32; k = 32 products see one run of 16, the other being zero
            if (s < 8) {
                const int p = s / 2, half = s % 2;
                const uint4 codes = shared16(w[m] + p * 512 + lane * 16);
                const u32 top = *(const u32*)(w[m] + 2048 + p / 2 * 512 + lane * 16 + s % 4 * 4);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 v = ((half ? word(codes, j) >> 2 : word(codes, j) << 2) & 0x3c3c3c3cu) | (top << (6 - 2 * j) & 0xc0c0c0c0u);
                    a[s & 1][j / 2][j] = v;
                    a[s & 1][1 - j / 2][j] = 0;
                }
                wgmma_fence();
#pragma unroll
                for (int run = 0; run < 2; run++) wgmma_s8(part[s & 1][run], a[s & 1][run], wgmma_operand(x_address + s * 256, A8_TILE));
                wgmma_commit();
            }
            if (s > 0) {
                if (s < 8)
                    wgmma_wait<1>();
                else
                    wgmma_wait<0>();
                const int q = s - 1;
#pragma unroll
                for (int run = 0; run < 2; run++) {
                    const int at = q % 2 * 2 + run;
                    const int s0 = signed_byte_of(word(scale[0], q / 2), at), s1 = signed_byte_of(word(scale[1], q / 2), at);
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) sum[n][i] += part[q & 1][run][n][i] * (i < 2 ? s0 : s1);
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
