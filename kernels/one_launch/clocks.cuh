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
// Cycles of a task: until its input was there, until it was in shared memory, of products, of the rest.
__device__ u32 clock_cycles[CLOCK_PHASES][CLOCK_BLOCKS][4];
__device__ u32 clock_kinds[CLOCK_PHASES];
__device__ int clock_launches;

struct Clocks {
    i64 begin_at, landed_at, ready_at, multiplied_at;
    __device__ __forceinline__ void begin() { begin_at = landed_at = ready_at = multiplied_at = clock64(); }
    __device__ __forceinline__ void landed() { landed_at = clock64(); }
    __device__ __forceinline__ void ready() { ready_at = multiplied_at = clock64(); }
    __device__ __forceinline__ void multiplied() { multiplied_at = clock64(); }
    __device__ __forceinline__ void end(const Task& task, int) {
        if (threadIdx.x || (task.flags >> 16) >= CLOCK_PHASES) return;
        const i64 now = clock64();
        u32* cycles = clock_cycles[task.flags >> 16][blockIdx.x];
        clock_kinds[task.flags >> 16] = task.kind | (task.flags & 0xff) << 8;
        cycles[0] += u32(landed_at - begin_at), cycles[1] += u32(ready_at - landed_at);
        cycles[2] += u32(multiplied_at - ready_at), cycles[3] += u32(now - multiplied_at);
    }
};

// By one thread, when all blocks are done: means over the blocks that have a task of the phase, and the most.
__device__ __noinline__ void print_clocks() {
    const int launch = ++clock_launches;
    if (launch == 40)
        for (int phase = 0; phase < CLOCK_PHASES; phase++) {
            u32 sum[4] = {}, most[4] = {}, least = ~0u, n = 0;
            for (int block = 0; block < gridDim.x; block++) {
                const u32* c = clock_cycles[phase][block];
                if (!(c[0] | c[1] | c[2] | c[3])) continue;
                n++;
                for (int i = 0; i < 4; i++) sum[i] += c[i], most[i] = max(most[i], c[i]);
                least = min(least, c[0]);
            }
            if (n)
                printf(
                    "phase %3d kind %x blocks %3d wait %5u (%5u-%5u) input %5u (%5u) products %5u (%5u) rest %5u "
                    "(%5u)\n",
                    phase, clock_kinds[phase], n, sum[0] / n, least, most[0], sum[1] / n, most[1], sum[2] / n, most[2],
                    sum[3] / n, most[3]);
        }
    for (int phase = 0; phase < CLOCK_PHASES; phase++)
        for (int block = 0; block < gridDim.x; block++)
            for (int i = 0; i < 4; i++) clock_cycles[phase][block][i] = 0;
}
#else
struct Clocks {
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void landed() {}
    __device__ __forceinline__ void ready() {}
    __device__ __forceinline__ void multiplied() {}
    __device__ __forceinline__ void end(const Task&, int) {}
};
__device__ __forceinline__ void print_clocks() {}
#endif
