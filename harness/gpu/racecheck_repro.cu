// Minimal reproduction of a racecheck limitation: a correct program, and the same program with a planted race.
//
// Four producer warps fill a tile in shared memory and four consumer warps read it, repeatedly. HANDOVER selects the
// synchronisation, each as the kernels use it:
//   0  bar.arrive by the signalling side, bar.sync by the waiting side (attention/prefill.cu,
//      attention/warp_specialized_sm90.cuh)
//   1  mbarriers with test_wait: all lanes write or read, __syncwarp, one lane arrives per warp
//      (gemm/fused_layer_sm90.cu)
//   2  bar.sync by both sides
//   3  mbarriers, every lane arrives
//   4  a bulk copy fills the tile; consumers arrive as in 1 (gemm/fused_layer_sm90.cu)
//   5  a bulk copy fills the tile; consumers arrive as in 3
//   6  as 0, but the tile is one word that one thread writes
//   7  as 5, with try_wait
// Each orders every write after all earlier reads, and every read after its write. With PLANT 1 the producer writes
// before it waits for the consumers, which a tool that follows the order reports. benches/README.md has the results.
// nvcc -arch=sm_90a -DHANDOVER=0 racecheck_repro.cu -o repro && compute-sanitizer --tool racecheck ./repro
#include <cstdint>
#include <cstdio>

#ifndef PLANT
#define PLANT 0
#endif
#define WORDS (HANDOVER == 6 ? 1 : 2048)
#define COPIED (HANDOVER == 4 || HANDOVER == 5 || HANDOVER == 7)
#define PHASES (HANDOVER == 1 || HANDOVER == 3 || COPIED)
#define ONE_LANE (HANDOVER == 1 || HANDOVER == 4)
#if HANDOVER == 7
#define WAIT "try_wait"
#else
#define WAIT "test_wait"
#endif

enum Event { FULL = 1, FREE };
__shared__ alignas(128) unsigned tile[2048];
__shared__ uint64_t bars[3];

__device__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void signal(Event e) {
    if (HANDOVER == 0 || HANDOVER == 6) asm volatile("bar.arrive %0, 256;" ::"r"((int)e) : "memory");
    if (HANDOVER == 2) asm volatile("bar.sync %0, 256;" ::"r"((int)e) : "memory");
    if (PHASES) {
        if (ONE_LANE) __syncwarp();
        if (!ONE_LANE || threadIdx.x % 32 == 0)
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(bars + e)) : "memory");
    }
}

__device__ void await(Event e, int phase) {
    if (PHASES) {
        asm volatile("{\n.reg .pred done;\nagain: mbarrier." WAIT
                     ".parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(address(bars + e)),
                     "r"(phase & 1)
                     : "memory");
    } else {
        asm volatile("bar.sync %0, 256;" ::"r"((int)e) : "memory");
    }
}

__device__ void expect() {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(bars + FULL)), "r"(8192) : "memory");
}

__device__ void copy(const unsigned* in) {
    const uint32_t full = address(bars + FULL);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(tile)),
        "l"(in), "r"(8192), "r"(full)
        : "memory");
}

__global__ void exchange(const unsigned* in, unsigned* out, int n) {
    if (PHASES) {
        if (threadIdx.x == 0) {
            for (int e = FULL; e <= FREE; e++) {
                const int count = COPIED && e == FULL ? 1 : ONE_LANE ? 4 : 128;
                asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(bars + e)), "r"(count));
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
    }
    const int lane = threadIdx.x % 128;
    unsigned sum = 0;
    for (int phase = 0; phase < n; phase++) {
        if (threadIdx.x >= 128) {
            if (phase > 0 && !PLANT) await(FREE, phase - 1);
            if (COPIED && !PLANT && lane == 0) expect();
            if (COPIED) {
                if (lane == 0) copy(in + phase * 2048);
            } else {
                for (int i = lane; i < WORDS; i += 128) tile[i] = in[phase * 2048 + i];
            }
            if (phase > 0 && PLANT) await(FREE, phase - 1);
            if (COPIED && PLANT && lane == 0) expect();
            if (!COPIED) signal(FULL);
        } else {
            await(FULL, phase);
            for (int i = lane; i < 2048; i += 128) sum += tile[WORDS == 1 ? 0 : 2047 - i];
            if (phase + 1 < n) signal(FREE);
        }
    }
    if (threadIdx.x < 128) out[lane] = sum;
}

int main() {
    static unsigned host[6 * 2048], sums[128];
    for (unsigned i = 0; i < 6 * 2048; i++) host[i] = i * 2654435761u;
    unsigned *in, *out;
    cudaMalloc(&in, sizeof host);
    cudaMalloc(&out, sizeof sums);
    cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
    exchange<<<1, 256>>>(in, out, 6);
    cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (int lane = 0; lane < 128; lane++) {
        unsigned sum = 0;
        for (int phase = 0; phase < 6; phase++) {
            for (int i = lane; i < 2048; i += 128) sum += host[phase * 2048 + (WORDS == 1 ? 0 : 2047 - i)];
        }
        wrong += sum != sums[lane];
    }
    printf("%d sums of 128 wrong: %s\n", wrong, cudaGetErrorString(cudaGetLastError()));
    return 0;
}
