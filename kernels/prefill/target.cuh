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

// *at = (onto ? *at : 0) + v, where it exists.
__device__ __forceinline__ void store_one(float *at, float v, bool there, bool onto) {
    if (there) { *at = onto ? __ldcg(at) + v : v; }
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
