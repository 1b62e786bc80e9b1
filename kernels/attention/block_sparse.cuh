// Key blocks that a block of queries keeps (contract::BlockSparsity), for prefill attention.
//
// Masks [query block of the chunk][query head][words], bit n % 32 of word n / 32 for key block n. They are written by
// score/kept_blocks; the query block's own bit is set, later ones are not. Without BLOCK_SPARSE all keys are attended
// to.
#pragma once
#include "common/prelude.cuh"

#ifndef BLOCK_SPARSE
#define BLOCK_SPARSE 0
#endif
#define SPARSE_BLOCK 128

#if BLOCK_SPARSE
#define KEPT_BLOCKS_PARAMETERS , const u32 *kept_masks, int kept_words
#define KEPT_BLOCKS(heads, head, first) \
    KeptBlocks { kept_masks + ((first) / SPARSE_BLOCK * (heads) + (head)) * kept_words }
#else
#define KEPT_BLOCKS_PARAMETERS
#define KEPT_BLOCKS(heads, head, first) \
    KeptBlocks { nullptr }
#endif

struct KeptBlocks {
    const u32* words;

    // The first position of a kept block from `position` on, `end` if there is none. A position within a block belongs
    // to a kept one, since its beginning has been asked for before.
    __device__ __forceinline__ int next(int position, int end) const {
#if BLOCK_SPARSE
        if (position % SPARSE_BLOCK) {
            return position;
        }
        for (int block = position / SPARSE_BLOCK; block * SPARSE_BLOCK < end; block = (block / 32 + 1) * 32) {
            const u32 kept = words[block / 32] >> block % 32;
            if (kept) {
                return min((block + __ffs(kept) - 1) * SPARSE_BLOCK, end);
            }
        }
        return end;
#else
        return position;
#endif
    }
};
