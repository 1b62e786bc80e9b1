// The card's clocks at one moment: what a multiprocessor has counted, and nanoseconds that all of them share. A second reading less a first
// one of the same multiprocessor tells how many of its clocks what stood between them has taken, whatever the clock was.
//
// out  out [count] {clocks, nanoseconds}, by multiprocessor; one that no block came to keeps what it had
// grid one block of 1024 threads a multiprocessor, so that blocks spread over all
// smem none     arch sm_75 and up
// floor sm_75
// reference: the host's clock     test crates/cuda/tests/driver.rs

extern "C" __global__ void __launch_bounds__(1024) clocks_read(ulonglong2* out, unsigned int count) {
    if (threadIdx.x) return;
    unsigned int multiprocessor;
    ulonglong2 now;
    asm volatile("mov.u32 %0, %%smid;\n\tmov.u64 %1, %%clock64;\n\tmov.u64 %2, %%globaltimer;" : "=r"(multiprocessor), "=l"(now.x), "=l"(now.y));
    if (multiprocessor < count) out[multiprocessor] = now;
}
