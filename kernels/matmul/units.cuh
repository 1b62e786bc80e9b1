// One unit of a small-batch product: 16 * M rows of weights times 8 * N rows of activations over 256 values of K (64 for
// the 16-bit kinds), added to f32 accumulators. Everything is in shared memory, laid out as layout.cuh and a8.cuh say.
//
// Whole-number arithmetic as far as scales allow: with c = sum of 32 codes * activations (i32, tensor core),
//   Q4K, Q5K:  I = sum over 8 runs of sc * c (i32, exact);  M = sum over 16 runs of m * sum(activations) (whole f32, exact)
//              acc += d8 * fma(d, I, -(dmin * M))
//   Q6K:       I = sum over 16 runs of sc * c * 4;                        acc += d8 * (d/4 * I)
//   Q8:        T = fma over 8 runs (c, d_run, T), c exact in f32;         acc += d8 * T
//   WIDE:      T = fma over 16 runs (scale, c), (offset, activation sum); acc += d8 * T
// so a result is the same bits whatever N is and whichever tile column the row of activations has.
// w[m]: the warp's tile of each of its M row blocks; x: the unit's activations. acc as the C fragment.
#pragma once
#include "matmul/a8.cuh"
#include "matmul/layout.cuh"

#define MAGIC 0x4B400000  // as f32: 12582912; adding |i| < 2^22 to the integer adds i to the float

__device__ __forceinline__ uint4 shared16(const u8* p) { return *(const uint4*)p; }
// The B operands of 64 values (signed bytes) or 32 (16-bit) for 8 rows: x, y of the first half, z, w of the second.
__device__ __forceinline__ uint4 operands(const u8* x) {
    u32 r[4];
    ldmatrix_x4(r, shared_address(x) + threadIdx.x % 32 * 16);
    return make_uint4(r[0], r[1], r[2], r[3]);
}
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ u32 byte_of(u32 v, int i) { return prmt(v, 0u, 0x4440u | u32(i)); }
__device__ __forceinline__ int signed_byte_of(u32 v, int i) { return int(prmt(v, 0u, 0x8880u + 0x1111u * u32(i))); }

// c = a * b + start, start in all four elements.
__device__ __forceinline__ void mma_s8_from(int (&c)[4], int start, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
}
__device__ __forceinline__ void mma_s8_k16_from(int (&c)[4], int start, u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(start));
}
__device__ __forceinline__ float unmagic(int c) { return __int_as_float(c) - 12582912.0f; }

// The eight 6-bit scales and minimums of a GGUF K-quant header, a byte each, and d, dmin.
struct Header {
    u32 scale[2], min[2], halves;
};
__device__ __forceinline__ Header header_of(const u8* p) {
    const uint4 h = shared16(p);
    Header r;
    r.halves = h.x;
    r.scale[0] = h.y & 0x3f3f3f3fu;
    r.scale[1] = (h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u);
    r.min[0] = h.z & 0x3f3f3f3fu;
    r.min[1] = (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u);
    return r;
}
// Byte `t` of v twice, as f16: 0x6400 | m is 1024 + m.
__device__ __forceinline__ u32 min_pair(u32 v, int t) { return f16x2_add(prmt(v, 0x64u, 0x4040u + 0x0101u * u32(t)), 0xe400e400u); }

template <int KIND, int M, int N>
__device__ __forceinline__ void unit_k45(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    constexpr bool FIVE = KIND == KIND_Q5K;
    constexpr int HEADERS = FIVE ? 2560 : 2048;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int sum[M][N][4];
    Header head[M][2];
    uint4 fifth[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
        head[m][0] = header_of(w[m] + HEADERS + g * 16);
        head[m][1] = header_of(w[m] + HEADERS + g * 16 + 128);
        if (FIVE) fifth[m] = shared16(w[m] + 2048 + lane * 16);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = 0;
    }
#pragma unroll
    for (int p = 0; p < 4; p++) {
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = operands(x + n * A8_TILE + p * 512);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint4 codes = shared16(w[m] + p * 512 + lane * 16);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 a[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    a[j] = word(codes, j) >> (4 * half) & 0x0f0f0f0fu;
                    if (FIVE) {
                        const int bit = 4 * half + j;
                        const u32 f = word(fifth[m], p);
                        a[j] |= (bit < 4 ? f << (4 - bit) : f >> (bit - 4)) & 0x10101010u;
                    }
                }
                const int s0 = int(byte_of(head[m][0].scale[p / 2], p % 2 * 2 + half));
                const int s1 = int(byte_of(head[m][1].scale[p / 2], p % 2 * 2 + half));
#pragma unroll
                for (int n = 0; n < N; n++) {
                    int c[4];
                    mma_s8_from(c, 0, a, half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
                    sum[m][n][0] += c[0] * s0;
                    sum[m][n][1] += c[1] * s0;
                    sum[m][n][2] += c[2] * s1;
                    sum[m][n][3] += c[3] * s1;
                }
            }
        }
    }
    u32 a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) a[m][j] = min_pair(head[m][j % 2].min[j / 2], t);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint2 b = *(const uint2*)(x + n * A8_TILE + 2048 + lane * 8);
        const float2 d8 = *(const float2*)(x + n * A8_TILE + 2304 + t * 8);
#pragma unroll
        for (int m = 0; m < M; m++) {
            float mins[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_f16(mins, a[m][0], a[m][1], a[m][2], a[m][3], b.x, b.y);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float d = f16x2_lo(head[m][i / 2].halves), dmin = f16x2_hi(head[m][i / 2].halves);
                const float v = fmaf(d, float(sum[m][n][i]), -(dmin * mins[i]));
                acc[m][n][i] = fmaf(i % 2 ? d8.y : d8.x, v, acc[m][n][i]);
            }
        }
    }
}

template <int M, int N>
__device__ __forceinline__ void unit_q6k(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int sum[M][N][4];
    uint4 scale[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        scale[m][0] = shared16(w[m] + 3072 + g * 16);
        scale[m][1] = shared16(w[m] + 3072 + g * 16 + 128);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = 0;
    }
#pragma unroll
    for (int p = 0; p < 4; p++) {
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = operands(x + n * A8_TILE + p * 512);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint4 codes = shared16(w[m] + p * 512 + lane * 16);
            const uint2 pairs = *(const uint2*)(w[m] + 2048 + p / 2 * 512 + lane * 16 + p % 2 * 8);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 top = half ? pairs.y : pairs.x;
                u32 a[4];  // 4 * (code - 32)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    a[j] = ((half ? word(codes, j) >> 2 : word(codes, j) << 2) & 0x3c3c3c3cu) | (top << (6 - 2 * j) & 0xc0c0c0c0u);
#pragma unroll
                for (int run = 0; run < 2; run++) {
                    const int at = half * 2 + run;
                    const int s0 = signed_byte_of(word(scale[m][0], p), at), s1 = signed_byte_of(word(scale[m][1], p), at);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        int c[4];
                        mma_s8_k16_from(c, 0, a[2 * run], a[2 * run + 1], word(b[n], at));
                        sum[m][n][0] += c[0] * s0;
                        sum[m][n][1] += c[1] * s0;
                        sum[m][n][2] += c[2] * s1;
                        sum[m][n][3] += c[3] * s1;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        const float d0 = 0.25f * f16_to_f32(*(const u16*)(w[m] + 3328 + g * 2));
        const float d1 = 0.25f * f16_to_f32(*(const u16*)(w[m] + 3328 + g * 2 + 16));
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 d8 = *(const float2*)(x + n * A8_TILE + 2304 + t * 8);
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[m][n][i] = fmaf(i % 2 ? d8.y : d8.x, (i < 2 ? d0 : d1) * float(sum[m][n][i]), acc[m][n][i]);
        }
    }
}

template <int KIND, int M, int N>
__device__ __forceinline__ void unit_bytes(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    constexpr bool WIDE = KIND == KIND_WIDE;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float part[M][N][4];
    uint4 scale[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        if (!WIDE) {
            scale[m][0] = shared16(w[m] + 4096 + g * 16);
            scale[m][1] = shared16(w[m] + 4096 + g * 16 + 128);
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[m][n][i] = 0.0f;
    }
#pragma unroll
    for (int p = 0; p < 4; p++) {
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = operands(x + n * A8_TILE + p * 512);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int s = 2 * p + half;
                const uint4 codes = shared16(w[m] + s * 512 + lane * 16);
                const u32 a[4] = {codes.x, codes.y, codes.z, codes.w};
                if (!WIDE) {
                    const u32 p0 = word(scale[m][0], p), p1 = word(scale[m][1], p);
                    const float d0 = half ? f16x2_hi(p0) : f16x2_lo(p0), d1 = half ? f16x2_hi(p1) : f16x2_lo(p1);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        int c[4];
                        mma_s8_from(c, MAGIC, a, half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
#pragma unroll
                        for (int i = 0; i < 4; i++) part[m][n][i] = fmaf(unmagic(c[i]), i < 2 ? d0 : d1, part[m][n][i]);
                    }
                } else {
#pragma unroll
                    for (int run = 0; run < 2; run++) {
                        const int at = 2 * s + run;
                        const u8* row = w[m] + 4096 + g * 64 + at * 4;
                        const float d0 = *(const float*)row, d1 = *(const float*)(row + 512);
                        const float o0 = *(const float*)(row + 1024), o1 = *(const float*)(row + 1536);
#pragma unroll
                        for (int n = 0; n < N; n++) {
                            // The sums of rows 2t and 2t + 1 of this run.
                            const u8* at_x = x + n * A8_TILE + 2048 + at % 8 / 2 * 8 + at / 8 * 4 + at % 2 * 2;
                            const float u0 = f16_to_f32(*(const u16*)(at_x + 2 * t * 32)), u1 = f16_to_f32(*(const u16*)(at_x + 2 * t * 32 + 32));
                            int c[4];
                            mma_s8_k16_from(c, MAGIC, a[2 * run], a[2 * run + 1], word(b[n], half * 2 + run));
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                part[m][n][i] = fmaf(unmagic(c[i]), i < 2 ? d0 : d1, part[m][n][i]);
                                part[m][n][i] = fmaf(i % 2 ? u1 : u0, i < 2 ? o0 : o1, part[m][n][i]);
                            }
                        }
                    }
                }
            }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 d8 = *(const float2*)(x + n * A8_TILE + 2304 + t * 8);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = fmaf(i % 2 ? d8.y : d8.x, part[m][n][i], acc[m][n][i]);
    }
}

template <int KIND, int M, int N>
__device__ __forceinline__ void unit_16(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < 2; p++) {
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = operands(x + n * A16_TILE + p * 512);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 a = shared16(w[m] + (2 * p + half) * 512 + lane * 16);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const u32 b0 = half ? b[n].z : b[n].x, b1 = half ? b[n].w : b[n].y;
                    if (KIND == KIND_F16)
                        mma_f16(acc[m][n], a.x, a.y, a.z, a.w, b0, b1);
                    else
                        mma_bf16(acc[m][n], a.x, a.y, a.z, a.w, b0, b1);
                }
            }
    }
}

template <int KIND, int M, int N>
__device__ __forceinline__ void unit(const u8* const (&w)[M], const u8* x, float (&acc)[M][N][4]) {
    if constexpr (KIND == KIND_Q4K || KIND == KIND_Q5K)
        unit_k45<KIND, M, N>(w, x, acc);
    else if constexpr (KIND == KIND_Q6K)
        unit_q6k<M, N>(w, x, acc);
    else if constexpr (KIND == KIND_Q8 || KIND == KIND_WIDE)
        unit_bytes<KIND, M, N>(w, x, acc);
    else
        unit_16<KIND, M, N>(w, x, acc);
}
