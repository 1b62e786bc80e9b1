// Where a prefill product goes: the unit order of its tiles, and what is done with a pair of neighbouring columns.
//
// The columns of a product are those of up to four matrices that share one input ("segments"), each padded to a
// multiple of 256; a tile lies in one segment. `turns` orders the partial sums of a tile whose K is cut in `splits`
// equal parts: part 0 is written first, part s is added after part s - 1, so a sum has one fixed order, and the cut
// depends on the matrix alone. It holds one zero per tile and is left zero.
#pragma once
#include "common/prelude.cuh"

struct Segment {
    float *out; // [rows][stride]
    int width;  // true columns
    int stride;
};

struct Segments {
    Segment at[4];
};

// The segment of padded column `column`, which becomes relative to it.
__device__ __forceinline__ Segment segment_of(const Segments &segments, int &column) {
    Segment found = segments.at[0];
#pragma unroll
    for (int i = 1; i < 4; i++) {
        const int padded = (found.width + 255) & ~255;
        if (column >= padded && segments.at[i].width > 0) {
            column -= padded;
            found = segments.at[i];
        } else {
            break;
        }
    }
    return found;
}

// out[row][column, column + 1] = (add ? what is there : 0) + (a, b), where the columns exist.
__device__ __forceinline__ void store_pair(const Segment &to, int row, int column, float a, float b, bool add) {
    float *at = to.out + (u64)row * to.stride + column;
    if (column + 1 < to.width && !(to.stride & 1)) {
        if (add) {
            const float2 old = __ldcg((const float2 *)at);
            a += old.x;
            b += old.y;
        }
        *(float2 *)at = make_float2(a, b);
        return;
    }
    if (column < to.width) { at[0] = (add ? __ldcg(at) : 0.0f) + a; }
    if (column + 1 < to.width) { at[1] = (add ? __ldcg(at + 1) : 0.0f) + b; }
}

// Waits until `turn` parts of tile `tile` have been added.
__device__ __forceinline__ void await_turn(const int *turns, int tile, int turn) {
    int seen;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turns + tile) : "memory");
    } while (seen != turn);
}

// Lets the part after `turn` go, or clears the count after the last.
__device__ __forceinline__ void pass_turn(int *turns, int tile, int turn, int splits) {
    const int next = turn + 1 == splits ? 0 : turn + 1;
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turns + tile), "r"(next) : "memory");
}
