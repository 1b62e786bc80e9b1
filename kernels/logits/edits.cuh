// Uploaded logits processors, and the layout of the scratch of reduce_chunks.cu and top_k.cu.
//
// The host writes one blob per step (crates/cuda/src/launch): a LogitEditsHeader, then bias entries, counts and masks.
// Offsets are in 8-byte words from the start of the blob.
#pragma once

#define EDIT_ROWS 64

// Edits of one row, in the order: mask, bias, repetition, frequency and presence.
struct LogitEdit {
    int bias, biases;   // first BiasEntry, number
    int count, counts;  // first CountEntry, number
    int mask;           // first word of the bit set of allowed tokens; -1: all
    float repetition, frequency, presence;
};

struct LogitEditsHeader {
    int of[EDIT_ROWS];  // edit of a logits row; -1 for none
    LogitEdit edit[EDIT_ROWS];
};

struct BiasEntry {
    int token;
    float bias;
};

struct CountEntry {
    unsigned token_seen;  // the token; top bit: it occurs in the repetition window
    unsigned generated;
};

// Logits per warp, and per group whose maximum is kept.
#define CHUNK_SIZE 1024
#ifndef GROUP_SIZE
#define GROUP_SIZE 256
#endif
#define N_CHUNKS ((VOCAB + CHUNK_SIZE - 1) / CHUNK_SIZE)
#define N_GROUPS ((VOCAB + GROUP_SIZE - 1) / GROUP_SIZE)
// Floats of scratch per row: group maxima, then (max, sum) of every chunk of the edited row, then of the raw row.
#define ROW_SCRATCH (N_GROUPS + 4 * N_CHUNKS)

// A float as an unsigned number of the same order. Both zeros are one number, NaN is minus infinity.
__device__ __forceinline__ unsigned sort_key(float x) {
    x = x != x ? __int_as_float(0xff800000) : x + 0.0f;
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// NaN becomes -inf: fmaxf returns the number.
__device__ __forceinline__ float nan_to_neg_inf(float x) { return fmaxf(x, __int_as_float(0xff800000)); }

// The edit of logits row `i`; -1 for none.
__device__ __forceinline__ int edit_of(const LogitEditsHeader* head, int i) { return head ? head->of[i] : -1; }
