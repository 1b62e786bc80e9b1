// Chunked prefill: bf16 pairs, chunk bounds, and the layout of the intra-chunk terms.
//
// An f32 as two bf16, the nearest and the nearest to the remainder, keeps 17 bits. A product of two such numbers
// without its smallest part (3 of 4 partial products) is accurate to about 2^-17.
#pragma once

// Two values at once, x in the low halves.
__device__ __forceinline__ void split_bf16(float x, float y, u32& high, u32& low) {
    high = f32x2_to_bf16x2(x, y);
    low = f32x2_to_bf16x2(x - bf16x2_lo(high), y - bf16x2_hi(high));
}

// Rows of a chunk of 64 positions; chunks start at absolute multiples of 64.
struct ChunkRows {
    int first;
    int rows;
};
__device__ __forceinline__ ChunkRows chunk_rows(const PrefillChunk* chunk, int index) {
    const int off = chunk->committed % 64;
    const int first = max(0, 64 * index - off);
    return {first, min(chunk->rows, 64 * (index + 1) - off) - first};
}
__device__ __forceinline__ int num_chunks(const PrefillChunk* chunk) {
    return (chunk->committed % 64 + chunk->rows + 63) / 64;
}

// Output of prefill_chunk_prepare.cu per chunk and value head: high then low bf16 parts, [64][64] each, then two
// vectors:
//   inverse: (I + A)^-1 diag(beta)   qk: e^(G_i - G_j) q_i . k_j, j <= i   decay: e^(G_i)   tail: e^(G_64 - G_i)
// 16 x 16 blocks above the diagonal are not written.
#define INTRA_QK (2 * 64 * 64 * 2)
#define INTRA_DECAY (4 * 64 * 64 * 2)
#define INTRA_TAIL (INTRA_DECAY + 256)
#define INTRA_BYTES (INTRA_DECAY + 512)

// Swizzled byte offset of 16-byte piece `piece` of a row in shared memory: rows of 256 bytes (keys) and 128 bytes
// (intra).
__device__ __forceinline__ u32 k_tile_offset(int row, int piece) { return row * 256 + ((piece ^ (row & 7)) << 4); }
__device__ __forceinline__ u32 intra_tile_offset(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
