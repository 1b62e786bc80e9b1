// The triangular system of a tree in factor form and what follows from it, for a warp that has 16 columns of R in registers.
//
//   (I + A) U = R, A strictly lower;   o += U P^T, P lower: nodes in blocks of 8, whose own inverses are made beforehand
//
// Sums are those of m16n8k8: a tile has 16 columns of the state times 8 nodes, of which a lane has columns lane / 4 and
// lane / 4 + 8 and nodes 2 (lane % 4) and its neighbour. As the left operand of the next product it stays where it is: the
// order of k is free as long as both operands have the same, so a lane's first node is k = t and its second k = t + 4.
// The right operands lie in shared memory as "pairs" [node][LD_PAIRS]: of two neighbours both high parts, then both low ones.
// Products run in pairs of tf32: 22 bits, and the range of f32, since R of one node may be much smaller than of another.
// Source: blocked forward substitution; pairs as in delta/products.cuh.
#pragma once

#define LD_PAIRS 80     // 16 floats a tile and 16 more, so that lanes of four rows meet no bank twice
#define LD_DIAGONAL 12

// f32 as the nearest tf32 and what that leaves, to the bits that a product takes. What is not finite stays so in the high part:
// a sum of bits alone would carry the NaN that arithmetic makes, all ones, round to a zero.
__device__ __forceinline__ void tf32_pair(float x, u32& high, u32& low) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
    low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u & 0xffffe000u;
}
__device__ __forceinline__ float4 pairs_of(float x, float y) {
    u32 a, b, c, d;
    tf32_pair(x, a, c), tf32_pair(y, b, d);
    return make_float4(__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d));
}

struct Tile {
    float x[4];
};
// sums += x b: 16 columns times 8 nodes x, pairs b of 8 nodes times 8 at the lane's place; small parts apart.
__device__ __forceinline__ void times(Tile& sums, Tile& small, const u32 (&high)[4], const u32 (&low)[4], const float* pairs) {
    const uint4 b = *(const uint4*)pairs;
    mma_tf32(sums.x, high[0], high[1], high[2], high[3], b.x, b.y);
    mma_tf32(small.x, high[0], high[1], high[2], high[3], b.z, b.w);
    mma_tf32(small.x, low[0], low[1], low[2], low[3], b.x, b.y);
}
// A tile of sums as the left operand; which of its columns is which of k is as pairs are laid out.
__device__ __forceinline__ void split(const Tile& x, u32 (&high)[4], u32 (&low)[4]) {
    tf32_pair(x.x[0], high[0], low[0]), tf32_pair(x.x[2], high[1], low[1]);
    tf32_pair(x.x[1], high[2], low[2]), tf32_pair(x.x[3], high[3], low[3]);
}
__device__ __forceinline__ void settle(Tile& sums, Tile& small) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums.x[i] += small.x[i], small.x[i] = 0.0f;
}

// Makes u of R and adds to o what u gives, 8 nodes after the other. `a` has pairs of -A below its diagonal blocks and the
// inverses of blocks of I + A in their places, `p` those of P.
template <int TILES>
__device__ __forceinline__ void solve(Tile (&u)[TILES], Tile (&o)[TILES], const float* a, const float* p) {
    const int lane = threadIdx.x % 32, own = lane / 4 * LD_PAIRS + lane % 4 * 4;
    Tile of_u[TILES] = {}, of_o[TILES] = {};
    u32 high[4], low[4];
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        settle(u[k], of_u[k]);
        split(u[k], high, low);
        u[k] = {};
        times(u[k], of_u[k], high, low, a + own + k * (8 * LD_PAIRS + 16));
        settle(u[k], of_u[k]);
        split(u[k], high, low);
#pragma unroll
        for (int i = k + 1; i < TILES; i++) times(u[i], of_u[i], high, low, a + own + i * 8 * LD_PAIRS + k * 16);
#pragma unroll
        for (int i = k; i < TILES; i++) times(o[i], of_o[i], high, low, p + own + i * 8 * LD_PAIRS + k * 16);
    }
#pragma unroll
    for (int k = 0; k < TILES; k++) settle(o[k], of_o[k]);
}

// The inverses of blocks of 8 nodes of I + A, four of them, by one warp: a lane has a column of one.
// `diagonal` has the blocks of -A, [node][LD_DIAGONAL].
__device__ __forceinline__ void invert(float* a, const float* diagonal) {
    const int lane = threadIdx.x % 32, at = lane / 8 * 8, c = lane % 8;
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float* row = diagonal + (at + r) * LD_DIAGONAL;
        const float4 w = *(const float4*)row, z = *(const float4*)(row + 4);
        const float of[8] = {w.x, w.y, w.z, w.w, z.x, z.y, z.z, z.w};
        x[r] = r == c ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < r; k++) x[r] = fmaf(of[k], x[k], x[r]);
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        u32 high, low;
        tf32_pair(x[r], high, low);
        float* to = a + (at + r) * LD_PAIRS + at * 2 + c / 2 * 4 + c % 2;
        to[0] = __uint_as_float(high), to[2] = __uint_as_float(low);
    }
}
