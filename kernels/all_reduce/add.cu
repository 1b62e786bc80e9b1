// The products of all devices of a tensor split, summed and added to the residual stream: a one-shot all-reduce.
//
//   x += ((p_0 + p_1) + p_2) + ..     p_d: the partial sums of device d, so every device gets the same bits
//   x  = the same                     with STORE, where a norm stands between a block and the residual stream
//
// Each block writes its values into the memory of every peer, sets a flag there, waits for the peers' flags and adds.
// Flags hold the number of the launch (its epoch), which only grows, so nothing is reset. Rows of odd and even epochs
// have buffers of their own: a device begins epoch e + 2 behind its epoch e + 1, whose flags a peer sets behind its
// own epoch e, which has then read all rows of e. A peer that stops answering for watchdog_ms ends the launch with a
// trap, which the host sees as a lost device.
//
// in   header (source_rows.cuh)     partial f32 [rows][WIDTH], of this device
// out  x f32 [rows][WIDTH], in place; with STORE it may be partial
//      exchange: pointers, epochs, flags and rows of this device (struct Exchange); peers write flags and rows
// grid at most MAX_BLOCKS blocks x 256, alike on all devices and all resident at once; block b works on every
//      gridDim-th run of 1024 values
// smem none
// arch sm_80 and up     reference f32 sums in device order     test crates/cuda/tests/norm.rs
#include "common/prelude.cuh"
#include "norm/source_rows.cuh"

#define MAX_DEVICES 8
#define MAX_BLOCKS 256

struct Exchange {
    int rank;
    u32 watchdog_ms;
    u32* flags[MAX_DEVICES];    // of each device, [sender][MAX_BLOCKS]
    float4* rows[MAX_DEVICES];  // of each device, [epoch % 2][sender, itself left out][CAPACITY / 4]
    u32 padding[30];
    u32 epoch[MAX_BLOCKS];
};

__device__ __forceinline__ u64 global_timer() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

__device__ __forceinline__ void flag_release_system(u32* flag, u32 epoch) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

// Waits until the flag has reached `epoch`, so long at most.
__device__ __forceinline__ void flag_acquire_system(const u32* flag, u32 epoch, u32 watchdog_ms) {
    u64 begun = 0;
    for (u32 spins = 1;; spins++) {
        u32 seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        if ((int)(seen - epoch) >= 0) return;
        if (spins % 4096 == 0) {
            const u64 now = global_timer();
            if (begun == 0) begun = now;
            if (now - begun > watchdog_ms * 1000000ull) asm volatile("trap;");
        }
    }
}

// Where `owner` has the rows of `sender` in an epoch.
__device__ __forceinline__ float4* rows_of(const Exchange* exchange, int owner, int sender, u32 epoch) {
    const int slot = sender < owner ? sender : sender - 1;
    return exchange->rows[owner] + ((epoch % 2) * (N_DEVICES - 1) + slot) * (size_t)(CAPACITY / 4);
}

extern "C" __global__ void __launch_bounds__(256)
    all_reduce_add(const Header* header, float4* x, const float4* partial, Exchange* exchange) {
    pdl_launch();
    const int n = n_source_rows(header) * (WIDTH / 4);
    const int first = blockIdx.x * 256 + threadIdx.x, stride = gridDim.x * 256;
    pdl_wait();
    const int rank = exchange->rank;
    const u32 epoch = exchange->epoch[blockIdx.x] + 1;
    for (int i = first; i < n; i += stride) {
        const float4 v = partial[i];
#pragma unroll
        for (int d = 0; d < N_DEVICES; d++)
            if (d != rank) rows_of(exchange, d, rank, epoch)[i] = v;
    }
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < N_DEVICES && peer != rank) {
        flag_release_system(exchange->flags[peer] + rank * MAX_BLOCKS + blockIdx.x, epoch);
        flag_acquire_system(exchange->flags[rank] + peer * MAX_BLOCKS + blockIdx.x, epoch, exchange->watchdog_ms);
    }
    __syncthreads();
    for (int i = first; i < n; i += stride) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int d = 0; d < N_DEVICES; d++) {
            const float4 v = d == rank ? partial[i] : __ldcg(rows_of(exchange, rank, d, epoch) + i);
            sum = d == 0 ? v : make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
#ifdef STORE
        x[i] = sum;
#else
        const float4 to = x[i];
        x[i] = make_float4(to.x + sum.x, to.y + sum.y, to.z + sum.z, to.w + sum.w);
#endif
    }
    // Epochs count launches, those that a block had no part in included.
    for (int b = blockIdx.x + threadIdx.x * gridDim.x; b < MAX_BLOCKS; b += stride) exchange->epoch[b] = epoch;
}
