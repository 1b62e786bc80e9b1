// Where the time of a launch goes: cycles of the first consumer warp of each block in each phase; one launch prints
// them.
//
// Compiled with CLOCKS only. Phases are numbered as the launches of the plan.
#pragma once
#include "one_launch/task.cuh"

#if CLOCKS
extern "C" __device__ int printf(const char*, ...);
#define CLOCK_PHASES 256
#define CLOCK_BLOCKS 256
// Cycles of a task: until its input was there, until it was in shared memory, of products without and of waits for
// weights, until all warps had their products, of the rest.
#define CLOCK_PARTS 6
__device__ u32 clock_cycles[CLOCK_PHASES][CLOCK_BLOCKS][CLOCK_PARTS];
__device__ u32 clock_kinds[CLOCK_PHASES];
__device__ int clock_launches;

struct Clocks {
    i64 begin_at, landed_at, ready_at, multiplied_at, together_at, asked_at;
    u32 weights;
    __device__ __forceinline__ void begin() {
        begin_at = landed_at = ready_at = multiplied_at = together_at = clock64();
        weights = 0;
    }
    __device__ __forceinline__ void landed() { landed_at = clock64(); }
    __device__ __forceinline__ void ready() { ready_at = multiplied_at = together_at = clock64(); }
    __device__ __forceinline__ void ask_weights() { asked_at = clock64(); }
    __device__ __forceinline__ void have_weights() { weights += u32(clock64() - asked_at); }
    __device__ __forceinline__ void multiplied() { multiplied_at = clock64(); }
    __device__ __forceinline__ void together() { together_at = clock64(); }
    __device__ __forceinline__ void end(const Task& task, int) {
        if (threadIdx.x || (task.flags >> 16) >= CLOCK_PHASES) return;
        const i64 now = clock64();
        u32* cycles = clock_cycles[task.flags >> 16][blockIdx.x];
        clock_kinds[task.flags >> 16] = task.kind | (task.flags & 0xff) << 8;
        cycles[0] += u32(landed_at - begin_at), cycles[1] += u32(ready_at - landed_at);
        cycles[2] += u32(multiplied_at - ready_at) - weights, cycles[3] += weights;
        cycles[4] += u32(together_at - multiplied_at), cycles[5] += u32(now - together_at);
    }
};

// By one thread, when all blocks are done: means over the blocks that have a task of the phase, and the most.
__device__ __noinline__ void print_clocks() {
    const int launch = ++clock_launches;
    if (launch == 4)
        for (int phase = 0; phase < CLOCK_PHASES; phase++) {
            u32 sum[CLOCK_PARTS] = {}, most[CLOCK_PARTS] = {}, least = ~0u, n = 0;
            for (int block = 0; block < gridDim.x; block++) {
                const u32* c = clock_cycles[phase][block];
                u32 all = 0;
                for (int i = 0; i < CLOCK_PARTS; i++) all |= c[i];
                if (!all) continue;
                n++;
                for (int i = 0; i < CLOCK_PARTS; i++) sum[i] += c[i], most[i] = max(most[i], c[i]);
                least = min(least, c[0]);
            }
            if (!n) continue;
            printf("phase %3d kind %x blocks %3d wait %5u (%5u-%5u)", phase, clock_kinds[phase], n, sum[0] / n, least,
                   most[0]);
            printf(" input %5u (%5u) products %5u (%5u) weights %5u (%5u)", sum[1] / n, most[1], sum[2] / n, most[2],
                   sum[3] / n, most[3]);
            printf(" barrier %5u (%5u) rest %5u (%5u)\n", sum[4] / n, most[4], sum[5] / n, most[5]);
        }
    for (int phase = 0; phase < CLOCK_PHASES; phase++)
        for (int block = 0; block < gridDim.x; block++)
            for (int i = 0; i < CLOCK_PARTS; i++) clock_cycles[phase][block][i] = 0;
}
#else
struct Clocks {
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void landed() {}
    __device__ __forceinline__ void ready() {}
    __device__ __forceinline__ void ask_weights() {}
    __device__ __forceinline__ void have_weights() {}
    __device__ __forceinline__ void multiplied() {}
    __device__ __forceinline__ void together() {}
    __device__ __forceinline__ void end(const Task&, int) {}
};
__device__ __forceinline__ void print_clocks() {}
#endif
