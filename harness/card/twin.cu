// A right program that racecheck of compute-sanitizer 2025.3 calls wrong: why card.sh leaves out one kernel's reports.
//
// Four warps fill a tile in shared memory and four read it, in turns, ordered as kernels/prefill/attention.cu orders its
// tiles of keys and values. MEET 0: bar.arrive by who is done, bar.sync by who waits (the producer and consumer of the PTX
// manual). MEET 1: mbarriers, test_wait. MEET 2: both sides wait (bar.sync). All three order every write after every
// read before it and the other way round; racecheck reports hazards for 0 and 1, and none for 2: it knows barriers at
// which all wait, and no others.
// nvcc -arch=native -DMEET=0 twin.cu -o twin && compute-sanitizer --tool racecheck ./twin
#include <cstdint>
#include <cstdio>

enum Event { FULL = 1, FREE };
__shared__ unsigned tile[2048];
__shared__ uint64_t bars[3];

__device__ void signal(Event e) {
    if (MEET == 0) asm volatile("bar.arrive %0, 256;" ::"r"((int)e) : "memory");
    if (MEET == 2) asm volatile("bar.sync %0, 256;" ::"r"((int)e) : "memory");
    if (MEET == 1) {
        __syncwarp();
        const uint32_t at = (uint32_t)__cvta_generic_to_shared(bars + e);
        if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
    }
}

__device__ void await(Event e, int turn) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bars + e);
    if (MEET == 1) {
        asm volatile("{\n.reg .pred done;\nagain: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(at),
                     "r"(turn & 1)
                     : "memory");
    } else {
        asm volatile("bar.sync %0, 256;" ::"r"((int)e) : "memory");
    }
}

__global__ void turns(const unsigned *in, unsigned *out, int n) {
    if (MEET == 1) {
        if (threadIdx.x == 0) {
            for (int e = FULL; e <= FREE; e++) {
                asm volatile("mbarrier.init.shared.b64 [%0], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(bars + e)));
            }
        }
        __syncthreads();
    }
    const int lane = threadIdx.x % 128;
    unsigned sum = 0;
    for (int turn = 0; turn < n; turn++) {
        if (threadIdx.x >= 128) {
            if (turn > 0) await(FREE, turn - 1);
            for (int i = lane; i < 2048; i += 128) tile[i] = in[turn * 2048 + i];
            signal(FULL);
        } else {
            await(FULL, turn);
            for (int i = lane; i < 2048; i += 128) sum += tile[2047 - i];
            if (turn + 1 < n) signal(FREE);
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
    turns<<<1, 256>>>(in, out, 6);
    cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (int lane = 0; lane < 128; lane++) {
        unsigned sum = 0;
        for (int turn = 0; turn < 6; turn++) {
            for (int i = lane; i < 2048; i += 128) sum += host[turn * 2048 + 2047 - i];
        }
        wrong += sum != sums[lane];
    }
    printf("%d sums of 128 wrong\n", wrong);
    return wrong != 0;
}
