// Triangular solve of the WY form, for a warp that has 16 columns of R in registers.
//
//   (I + A) U = R, A strictly lower;   o += U P^T, P lower: blocks of 8 nodes, diagonal blocks inverted beforehand
//
// Accumulators are those of m16n8k8: a tile has 16 state columns x 8 nodes; a lane has columns lane / 4 and lane / 4 +
// 8, nodes 2 (lane % 4) and the next. As the A operand of the next product a tile stays in place: the order of k is
// free as long as both operands agree, so a lane's first node is k = t and its second k = t + 4. B operands are in
// shared memory as "pairs" [node][PAIRS_STRIDE]: of two neighboring nodes both high parts, then both low ones. Products
// use tf32 pairs: 22 bits with the range of f32, because R may differ much in magnitude between nodes. Method: blocked
// forward substitution.
#pragma once

#define PAIRS_STRIDE 80  // 16 floats per tile and 16 more against bank conflicts
#define DIAGONAL_STRIDE 12

// f32 as the nearest tf32 and the remainder. A non-finite value stays non-finite in the high part: integer rounding
// would turn the canonical NaN (all ones) into zero.
__device__ __forceinline__ void split_tf32(float x, u32& high, u32& low) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
    low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u & 0xffffe000u;
}
__device__ __forceinline__ float4 tf32_pairs(float x, float y) {
    u32 a, b, c, d;
    split_tf32(x, a, c), split_tf32(y, b, d);
    return make_float4(__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d));
}

struct AccumulatorTile {
    float x[4];
};
// sums += x b: 16 columns x 8 nodes of x times 8 x 8 pairs b; low parts are accumulated separately in `small`.
__device__ __forceinline__ void mma_3xtf32(AccumulatorTile& sums, AccumulatorTile& small, const u32 (&high)[4],
                                           const u32 (&low)[4], const float* pairs) {
    const uint4 b = *(const uint4*)pairs;
    mma_tf32(sums.x, high[0], high[1], high[2], high[3], b.x, b.y);
    mma_tf32(small.x, high[0], high[1], high[2], high[3], b.z, b.w);
    mma_tf32(small.x, low[0], low[1], low[2], low[3], b.x, b.y);
}
// An accumulator tile as the A operand; the order of k is that of the pairs.
__device__ __forceinline__ void split_tile(const AccumulatorTile& x, u32 (&high)[4], u32 (&low)[4]) {
    split_tf32(x.x[0], high[0], low[0]), split_tf32(x.x[2], high[1], low[1]);
    split_tf32(x.x[1], high[2], low[2]), split_tf32(x.x[3], high[3], low[3]);
}
__device__ __forceinline__ void add_small_parts(AccumulatorTile& sums, AccumulatorTile& small) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums.x[i] += small.x[i], small.x[i] = 0.0f;
}

// U from R, and o += U P^T, 8 nodes at a time. `a` has pairs of -A below its diagonal blocks and the inverses of the
// diagonal blocks of I + A in place of those; `p` has P.
template <int TILES>
__device__ __forceinline__ void solve(AccumulatorTile (&u)[TILES], AccumulatorTile (&o)[TILES], const float* a,
                                      const float* p) {
    const int lane = threadIdx.x % 32, lane_offset = lane / 4 * PAIRS_STRIDE + lane % 4 * 4;
    AccumulatorTile u_low[TILES] = {}, o_low[TILES] = {};
    u32 high[4], low[4];
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        add_small_parts(u[k], u_low[k]);
        split_tile(u[k], high, low);
        u[k] = {};
        mma_3xtf32(u[k], u_low[k], high, low, a + lane_offset + k * (8 * PAIRS_STRIDE + 16));
        add_small_parts(u[k], u_low[k]);
        split_tile(u[k], high, low);
#pragma unroll
        for (int i = k + 1; i < TILES; i++)
            mma_3xtf32(u[i], u_low[i], high, low, a + lane_offset + i * 8 * PAIRS_STRIDE + k * 16);
#pragma unroll
        for (int i = k; i < TILES; i++)
            mma_3xtf32(o[i], o_low[i], high, low, p + lane_offset + i * 8 * PAIRS_STRIDE + k * 16);
    }
#pragma unroll
    for (int k = 0; k < TILES; k++) add_small_parts(o[k], o_low[k]);
}

// Inverts the four 8 x 8 diagonal blocks of I + A, by one warp, one column per lane. `diagonal` has the blocks of -A,
// [node][DIAGONAL_STRIDE].
__device__ __forceinline__ void invert_diagonal_blocks(float* a, const float* diagonal) {
    const int lane = threadIdx.x % 32, at = lane / 8 * 8, c = lane % 8;
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float* row = diagonal + (at + r) * DIAGONAL_STRIDE;
        const float4 w = *(const float4*)row, z = *(const float4*)(row + 4);
        const float entries[8] = {w.x, w.y, w.z, w.w, z.x, z.y, z.z, z.w};
        x[r] = r == c ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < r; k++) x[r] = fmaf(entries[k], x[k], x[r]);
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        u32 high, low;
        split_tf32(x[r], high, low);
        float* to = a + (at + r) * PAIRS_STRIDE + at * 2 + c / 2 * 4 + c % 2;
        to[0] = __uint_as_float(high), to[2] = __uint_as_float(low);
    }
}
