// Clock counters of the GPU at one moment: cycles of each multiprocessor, and nanoseconds that all share. The
// difference of two readings on the same multiprocessor is the cycles between them, at any clock rate.
//
// out  out [count] {cycles, nanoseconds}, by multiprocessor; entries without a block stay unchanged
// grid one block of 1024 threads per multiprocessor, so that blocks spread over all
// smem none     arch sm_75 and up
// min_arch sm_75
// reference the host's clock     test crates/cuda/tests/driver.rs

extern "C" __global__ void __launch_bounds__(1024) clocks_read(ulonglong2* out, unsigned int count) {
    if (threadIdx.x) return;
    unsigned int multiprocessor;
    ulonglong2 now;
    asm volatile("mov.u32 %0, %%smid;\n\tmov.u64 %1, %%clock64;\n\tmov.u64 %2, %%globaltimer;"
                 : "=r"(multiprocessor), "=l"(now.x), "=l"(now.y));
    if (multiprocessor < count) out[multiprocessor] = now;
}
