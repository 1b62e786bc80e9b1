// Edits of logits as they are uploaded, and where the parts of a blob and of the scratch are.
//
// The host writes one blob per step (crates/cuda/src/launch/rows.rs): an LogitEditsHeader, its edits, then their bias
// entries, counts and masks. Offsets are in 8-byte words from the begin of the blob.
#pragma once

#define EDIT_ROWS 64

// Changes to one row, applied in the order: mask, bias, repetition, frequency and presence.
struct LogitEdit {
    int bias, biases;      // first BiasEntry, how many
    int count, counts;     // first CountEntry, how many
    int mask;              // first word of the bit set of allowed tokens; -1: all are
    float repetition, frequency, presence;
};

struct LogitEditsHeader {
    int of[EDIT_ROWS];     // which edit an asked row has; -1 for neg_inf
    LogitEdit edit[EDIT_ROWS];
};

struct BiasEntry {
    int token;
    float bias;
};

struct CountEntry {
    unsigned token_seen;   // the token, its highest bit set when it stands in the repetition window
    unsigned generated;
};

// Logits that one warp reduces, and the smallest unit whose maximum is kept.
#define CHUNK_SIZE 1024
#ifndef GROUP_SIZE
#define GROUP_SIZE 256
#endif
#define N_CHUNKS ((VOCAB + CHUNK_SIZE - 1) / CHUNK_SIZE)
#define N_GROUPS ((VOCAB + GROUP_SIZE - 1) / GROUP_SIZE)
// Floats of scratch per row: group group_max, then (max, sum) of every chunk of the values, then of the raw row.
#define ROW_SCRATCH (N_GROUPS + 4 * N_CHUNKS)

// A float as an unsigned number of the same order. Both zeros are one number, NaN is minus infinity.
__device__ __forceinline__ unsigned sort_key(float x) {
    x = x != x ? __int_as_float(0xff800000) : x + 0.0f;
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The larger of a NaN and a number is the number.
__device__ __forceinline__ float nan_to_neg_inf(float x) { return fmaxf(x, __int_as_float(0xff800000)); }

// Which edit the asked row `i` has; -1 for neg_inf.
__device__ __forceinline__ int edit_of(const LogitEditsHeader* head, int i) {
    return head ? head->of[i] : -1;
}
