// The triangular system of a tree in factor form and what follows from it, for a warp that has 16 columns of R in registers.
//
//   (I + A) U = R, A strictly lower;   o += U P^T, P lower: nodes in blocks of 8, whose own inverses are made beforehand
//
// Sums are those of m16n8k8: a tile has 16 columns of the state times 8 nodes, of which a lane has columns lane / 4 and
// lane / 4 + 8 and nodes 2 (lane % 4) and its neighbour. As the left operand of the next product it stays where it is: the
// order of k is free as long as both operands have the same, so a lane's first node is k = t and its second k = t + 4.
// The right operands lie in shared memory as "pairs" [node][LD_PAIRS]: of two neighbours both high parts, then both low ones.
// Products run in pairs of tf32: 22 bits, and the range of f32, since R of one node may be much smaller than of another.
// Source: blocked forward substitution; pairs as in gated_delta/split_f16.cuh.
#pragma once

#define PAIRS_STRIDE 80     // 16 floats a tile and 16 more, so that lanes of four rows meet no bank twice
#define DIAGONAL_STRIDE 12

// f32 as the nearest tf32 and what that leaves, to the bits that a product takes. What is not finite stays so in the high part:
// a sum of bits alone would carry the NaN that arithmetic makes, all ones, round to a zero.
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
// sums += x b: 16 columns times 8 nodes x, pairs b of 8 nodes times 8 at the lane's place; small parts apart.
__device__ __forceinline__ void mma_3xtf32(AccumulatorTile& sums, AccumulatorTile& small, const u32 (&high)[4], const u32 (&low)[4], const float* pairs) {
    const uint4 b = *(const uint4*)pairs;
    mma_tf32(sums.x, high[0], high[1], high[2], high[3], b.x, b.y);
    mma_tf32(small.x, high[0], high[1], high[2], high[3], b.z, b.w);
    mma_tf32(small.x, low[0], low[1], low[2], low[3], b.x, b.y);
}
// A tile of sums as the left operand; which of its columns is which of k is as pairs are laid out.
__device__ __forceinline__ void split_tile(const AccumulatorTile& x, u32 (&high)[4], u32 (&low)[4]) {
    split_tf32(x.x[0], high[0], low[0]), split_tf32(x.x[2], high[1], low[1]);
    split_tf32(x.x[1], high[2], low[2]), split_tf32(x.x[3], high[3], low[3]);
}
__device__ __forceinline__ void add_small_parts(AccumulatorTile& sums, AccumulatorTile& small) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums.x[i] += small.x[i], small.x[i] = 0.0f;
}

// Makes u of R and adds to o what u gives, 8 nodes after the other. `a` has pairs of -A below its diagonal blocks and the
// inverses of blocks of I + A in their places, `p` those of P.
template <int TILES>
__device__ __forceinline__ void solve(AccumulatorTile (&u)[TILES], AccumulatorTile (&o)[TILES], const float* a, const float* p) {
    const int lane = threadIdx.x % 32, own = lane / 4 * PAIRS_STRIDE + lane % 4 * 4;
    AccumulatorTile of_u[TILES] = {}, of_o[TILES] = {};
    u32 high[4], low[4];
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        add_small_parts(u[k], of_u[k]);
        split_tile(u[k], high, low);
        u[k] = {};
        mma_3xtf32(u[k], of_u[k], high, low, a + own + k * (8 * PAIRS_STRIDE + 16));
        add_small_parts(u[k], of_u[k]);
        split_tile(u[k], high, low);
#pragma unroll
        for (int i = k + 1; i < TILES; i++) mma_3xtf32(u[i], of_u[i], high, low, a + own + i * 8 * PAIRS_STRIDE + k * 16);
#pragma unroll
        for (int i = k; i < TILES; i++) mma_3xtf32(o[i], of_o[i], high, low, p + own + i * 8 * PAIRS_STRIDE + k * 16);
    }
#pragma unroll
    for (int k = 0; k < TILES; k++) add_small_parts(o[k], of_o[k]);
}

// The inverses of blocks of 8 nodes of I + A, four of them, by one warp: a lane has a column of one.
// `diagonal` has the blocks of -A, [node][LD_DIAGONAL].
__device__ __forceinline__ void invert_diagonal_blocks(float* a, const float* diagonal) {
    const int lane = threadIdx.x % 32, at = lane / 8 * 8, c = lane % 8;
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float* row = diagonal + (at + r) * DIAGONAL_STRIDE;
        const float4 w = *(const float4*)row, z = *(const float4*)(row + 4);
        const float of[8] = {w.x, w.y, w.z, w.w, z.x, z.y, z.z, z.w};
        x[r] = r == c ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < r; k++) x[r] = fmaf(of[k], x[k], x[r]);
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        u32 high, low;
        split_tf32(x[r], high, low);
        float* to = a + (at + r) * PAIRS_STRIDE + at * 2 + c / 2 * 4 + c % 2;
        to[0] = __uint_as_float(high), to[2] = __uint_as_float(low);
    }
}
