// wgmma (warpgroup MMA) of sm_90a, matrix descriptors, fences and waits.
//
// d[64][N] (+)= a[64][16] b[16][N], f32 accumulators. Each warp of the warpgroup has 16 rows of d, and of a if that
// lies in registers, laid out as in mma.m16n8k16: d[4j .. 4j+3] are columns 8j + 2 (lane % 4) + {0, 1} of rows lane / 4
// and lane / 4 + 8. b is a descriptor: `wgmma_desc` if it is K-major, `wgmma_desc_transposed` for the forms with a
// transposed b. Source: PTX ISA 8.x, wgmma.
#pragma once
#include "common/prelude.cuh"

// Descriptor of a K-major operand of 128-byte rows in the 128-byte swizzle; `address` is a multiple of 1024. 16 values
// along K add 2.
__device__ __forceinline__ u64 wgmma_desc(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Descriptor of a transposed (MN-major) operand: [column / 64][k][64 columns], 128-byte rows in the 128-byte swizzle,
// `panel` bytes from one run of 64 columns to the next. 16 values along K add 2048 bytes.
__device__ __forceinline__ u64 wgmma_desc_transposed(u32 address, u32 panel) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(panel >> 4) << 16 | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Accumulators as operands of inline assembly, and their operand numbers in its text.
#define ACC_8(d, i)                                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define ACC_32(d, i) ACC_8(d, i), ACC_8(d, i + 8), ACC_8(d, i + 16), ACC_8(d, i + 24)
#define ACC_64(d, i) ACC_32(d, i), ACC_32(d, i + 32)
#define ACC_128(d) ACC_64(d, 0), ACC_64(d, 64)
#define OPERANDS_32                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OPERANDS_64                                                                    \
    OPERANDS_32                                                                        \
    ", "                                                                               \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OPERANDS_128                                                                               \
    OPERANDS_64                                                                                    \
    ", "                                                                                           \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d = (add ? d : 0) + a b: f16 operands in shared memory.
__device__ __forceinline__ void wgmma_m64n256(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" OPERANDS_128
        "}, %128, %129, p, 1, 1, 0, 0;\n}\n"
        : ACC_128(d)
        : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_m64n64(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" OPERANDS_32
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        : ACC_32(d, 0)
        : "l"(a), "l"(b), "r"(add));
}
// d += a b: f16, a in registers, b transposed.
__device__ __forceinline__ void wgmma_m64n256_a_regs(float (&d)[128], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" OPERANDS_128
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
                 : ACC_128(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d += a b: bf16, a in registers; b K-major, and (128 columns) transposed.
__device__ __forceinline__ void wgmma_m64n64_bf16_a_regs(float* d, const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" OPERANDS_32
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
        : ACC_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_m64n128_bf16_a_regs(float* d, const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" OPERANDS_64
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
        : ACC_64(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
