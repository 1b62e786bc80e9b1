// Weights of a fused layer by cp.async: each math warp fills a ring of its own in shared memory.
//
// A warp reads only the m16 tiles w of both row blocks, so no other warp has to know when they land or are read: no
// barrier of the block, and no producer warp whose copies would all pass one scheduler. Entries have the size of their
// slice; one that would cross the end of the ring begins at its start. The ring runs ahead through the tiles and
// phases of the block as far as it has space: weights depend on no other block.
//
// The including file defines WARPS, M16_TILES (2) and WEIGHT_RING_BYTES (of a warp).
#pragma once
#include "common/sync.cuh"
#include "gemm/fused_layer_phases.cuh"

// Most slices in flight, each a group of cp.async.
#define MAX_IN_FLIGHT 4

// Moves a position of the ring to where an entry of `bytes` begins, and returns the bytes that are left out. Both ends
// pass the same positions.
__device__ __forceinline__ u32 ring_wrap(u32& at, u32 bytes) {
    if (at + bytes <= WEIGHT_RING_BYTES) return 0;
    const u32 skipped = WEIGHT_RING_BYTES - at;
    at = 0;
    return skipped;
}

struct WeightRing {
    const u8* from[M16_TILES];  // of this lane, in the next slice to load
    u32 base;                   // of the warp's ring
    u32 write, read, free;      // bytes
    int in_flight;              // slices loaded and not yet waited for
    int remaining;              // slices of the tile to load
    u32 bytes, other_bytes;     // of an m16 tile, in this slice and in the next
    int rows[M16_TILES];        // m16 tiles of the row blocks
    int phase_index;
    WorkRange* range;  // what follows the tile that is being loaded; of this warp

    __device__ __forceinline__ void init(u32 ring, WorkRange* ranges, int warp) {
        base = ring + warp * WEIGHT_RING_BYTES;
        write = read = 0;
        free = WEIGHT_RING_BYTES;
        in_flight = remaining = 0;
        phase_index = -1;
        range = ranges + warp;
        if (threadIdx.x % 32 == 0) range->units = 0;
        __syncwarp();
    }
    // To the next tile of the block; false behind the last.
    template <typename Params>
    __device__ __forceinline__ bool next_tile(const Params& params, const WorkRange* of_phases, int warp) {
        WorkRange next = *range;
        while (next.units == 0) {
            if (phase_index + 1 >= params.n_phases) return false;
            next = of_phases[++phase_index];
        }
        const int kind = params.phases[phase_index].epilogue_kind, n = next.run_length();
        const Matrix& s = params.matrices[next.begin.matrix];
        remaining = n * s.slices;
        bytes = s.first_slice_bytes;
        other_bytes = s.slices == 2 ? s.tile_bytes - s.first_slice_bytes : s.first_slice_bytes;
#pragma unroll
        for (int m = 0; m < M16_TILES; m++) {
            rows[m] = row_tiles(s, row_block(kind, next.begin.tile, m));
            from[m] = row_block_at(s, kind, next.begin.tile, m) + rows[m] * (64 + next.begin.unit * s.tile_bytes) +
                      warp * bytes + threadIdx.x % 32 * 16;
        }
        next.advance(params.matrices, kind, n);
        __syncwarp();
        if (threadIdx.x % 32 == 0) *range = next;
        __syncwarp();
        return true;
    }
    // Loads the next slices that the ring has space for.
    template <typename Params>
    __device__ __forceinline__ void fill(const Params& params, const WorkRange* of_phases, int warp) {
#pragma unroll 1
        while (in_flight < MAX_IN_FLIGHT) {
            if (remaining == 0 && !next_tile(params, of_phases, warp)) return;
            const u32 size = M16_TILES * bytes;
            u32 begin = write;
            const u32 taken = size + ring_wrap(begin, size);
            if (taken > free) return;
            free -= taken;
            const u32 at = threadIdx.x % 32 * 16, to = base + begin + at;
            // Tiles of a slice have 1024 to 2048 bytes.
            const bool has_third = at + 1024 < bytes, has_fourth = at + 1536 < bytes;
#pragma unroll
            for (int m = 0; m < M16_TILES; m++)
                if (warp < rows[m]) {
                    const u32 tile = to + m * bytes;
                    cp_async_16(tile, from[m]);
                    cp_async_16(tile + 512, from[m] + 512);
                    if (has_third) cp_async_16(tile + 1024, from[m] + 1024);
                    if (has_fourth) cp_async_16(tile + 1536, from[m] + 1536);
                }
            cp_async_commit();
            write = begin + size;
            in_flight++;
            remaining--;
#pragma unroll
            for (int m = 0; m < M16_TILES; m++)
                from[m] += int(rows[m] * bytes) + warp * (int(other_bytes) - int(bytes));
            const u32 swap = bytes;
            bytes = other_bytes;
            other_bytes = swap;
            // No slice is smaller. This test is shorter than another round.
            if (free < M16_TILES * 1024) return;
        }
    }
    // Waits for the next slice, of `size` bytes, and returns its address.
    __device__ __forceinline__ u32 wait(u32 size) {
        // Not a switch, which would be an indirect jump; the usual number first.
        in_flight--;
        if (in_flight == 2)
            cp_async_wait<2>();
        else if (in_flight == 1)
            cp_async_wait<1>();
        else if (in_flight == 0)
            cp_async_wait<0>();
        else
            cp_async_wait<MAX_IN_FLIGHT - 1>();
        __syncwarp();
        free += ring_wrap(read, size);
        const u32 at = base + read;
        read += size;
        return at;
    }
    // Frees a slice that all lanes have read, and loads others.
    template <typename Params>
    __device__ __forceinline__ void release(u32 size, const Params& params, const WorkRange* of_phases, int warp) {
        __syncwarp();
        free += size;
        fill(params, of_phases, warp);
    }
};
