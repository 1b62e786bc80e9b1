// What racecheck of compute-sanitizer follows, shown on a program that is right and on the same with a planted race.
//
// Four warps fill a tile in shared memory and four read it, in turns. MEET says how they hand it over, each way as kernels here do:
//   0  bar.arrive by who is done, bar.sync by who waits (attention/prefill.cu, attention/warp_specialized_sm90.cuh)
//   1  mbarriers, test_wait: all lanes write or read, __syncwarp, one lane arrives for the warp (gemm/fused_layer_sm90.cu)
//   2  bar.sync by both
//   3  mbarriers, every lane arrives
//   4  a bulk copy fills the tile; who read it arrives as in 1 (gemm/fused_layer_sm90.cu)
//   5  a bulk copy fills the tile; who read it arrives as in 3
//   6  as 0, but the tile is a word that one thread writes
//   7  as 5, waited for with try_wait
// All order every write after every read before it and the other way round. With PLANT 1 a tile is written before its readers are
// waited for: who follows the order finds that. What was found stands in benches/README.md.
// nvcc -arch=sm_90a -DMEET=0 twin.cu -o twin && compute-sanitizer --tool racecheck ./twin
#include <cstdint>
#include <cstdio>

#ifndef PLANT
#define PLANT 0
#endif
#define WORDS (MEET == 6 ? 1 : 2048)
#define COPIED (MEET == 4 || MEET == 5 || MEET == 7)
#define PHASES (MEET == 1 || MEET == 3 || COPIED)
#define ONE_LANE (MEET == 1 || MEET == 4)
#if MEET == 7
#define WAIT "try_wait"
#else
#define WAIT "test_wait"
#endif

enum Event { FULL = 1, FREE };
__shared__ alignas(128) unsigned tile[2048];
__shared__ uint64_t bars[3];

__device__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void signal(Event e) {
    if (MEET == 0 || MEET == 6) asm volatile("bar.arrive %0, 256;" ::"r"((int)e) : "memory");
    if (MEET == 2) asm volatile("bar.sync %0, 256;" ::"r"((int)e) : "memory");
    if (PHASES) {
        if (ONE_LANE) __syncwarp();
        if (!ONE_LANE || threadIdx.x % 32 == 0)
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(bars + e)) : "memory");
    }
}

__device__ void await(Event e, int turn) {
    if (PHASES) {
        asm volatile("{\n.reg .pred done;\nagain: mbarrier." WAIT
                     ".parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(address(bars + e)),
                     "r"(turn & 1)
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

__global__ void turns(const unsigned* in, unsigned* out, int n) {
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
    for (int turn = 0; turn < n; turn++) {
        if (threadIdx.x >= 128) {
            if (turn > 0 && !PLANT) await(FREE, turn - 1);
            if (COPIED && !PLANT && lane == 0) expect();
            if (COPIED) {
                if (lane == 0) copy(in + turn * 2048);
            } else {
                for (int i = lane; i < WORDS; i += 128) tile[i] = in[turn * 2048 + i];
            }
            if (turn > 0 && PLANT) await(FREE, turn - 1);
            if (COPIED && PLANT && lane == 0) expect();
            if (!COPIED) signal(FULL);
        } else {
            await(FULL, turn);
            for (int i = lane; i < 2048; i += 128) sum += tile[WORDS == 1 ? 0 : 2047 - i];
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
            for (int i = lane; i < 2048; i += 128) sum += host[turn * 2048 + (WORDS == 1 ? 0 : 2047 - i)];
        }
        wrong += sum != sums[lane];
    }
    printf("%d sums of 128 wrong: %s\n", wrong, cudaGetErrorString(cudaGetLastError()));
    return 0;
}
