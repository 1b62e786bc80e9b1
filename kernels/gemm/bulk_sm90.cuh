// Hopper only: bulk copies and vector additions in device memory.
//
// Source: PTX ISA 8.x, sections cp.async.bulk and red. Shared addresses are 32-bit window addresses.
#pragma once
#include "common/prelude.cuh"

// Copies `bytes` (a multiple of 16) dst shared memory of this block and counts them on `barrier`.
__device__ __forceinline__ void cp_async_bulk(u32 dst, const void *src, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Adds four floats dst neighbouring ones in device memory, without waiting.
__device__ __forceinline__ void red_add_v4(float *at, const float4 &v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}
