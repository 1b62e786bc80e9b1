// Memory bandwidth of the GPU: the reference for the bytes per second of all other kernels.
//
//   bandwidth_read   each warp sums its part of `in` and keeps one word, so that no load can be eliminated
//   bandwidth_copy   out = in
//
// in   in   [n] uint4; n a multiple of 8 * grid * block is fastest, any n is correct
// out  out  [n] uint4 (copy), sums [grid] u32 (read: the wrapping sum of each block's words)
// grid any number of blocks of any number of whole warps up to 1024 threads, grid-stride, 8 loads in flight
// smem 32 words     arch sm_75 and up
// min_arch sm_75
// reference a wrapping sum on the host     test crates/cuda/tests/driver.rs

static __device__ __forceinline__ uint4 load_streaming(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

extern "C" __global__ void bandwidth_read(const uint4* in, unsigned int* sums, unsigned long long n) {
    __shared__ unsigned int warp_sums[32];
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int sum = 0;
    for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = load_streaming(in + i + j * stride);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    for (; i < n; i += stride) {
        const uint4 v = load_streaming(in + i);
        sum += v.x + v.y + v.z + v.w;
    }
    for (int lane = 16; lane > 0; lane >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int total = 0;
        for (int w = 0; w < (int)blockDim.x / 32; w++) total += warp_sums[w];
        sums[blockIdx.x] = total;
    }
}

extern "C" __global__ void bandwidth_copy(const uint4* in, uint4* out, unsigned long long n) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = load_streaming(in + i + j * stride);
#pragma unroll
        for (int j = 0; j < 4; j++) out[i + j * stride] = v[j];
    }
    for (; i < n; i += stride) out[i] = load_streaming(in + i);
}
