// One call of a scorer: what varies between prompts. crates/cuda/src/scorer/call.rs mirrors the layout.
#pragma once
#include "common/prelude.cuh"

struct ScoreCall {
    int tokens;             // of the prompt
    int tail;               // last tokens, whose queries rate all tokens up to them
    int rotated;            // whether tail queries and keys are rotated
    int sink_blocks;        // first key blocks that every query block keeps
    int window_blocks;      // key blocks up to the query's own that it keeps
    int dense_last_blocks;  // last query blocks, which keep every key block
    float log_alpha;        // ln of the share of the best block's weight; minus infinity keeps all
    int reach;              // of the moving average to either side, in tokens
    int chunk;              // tokens of a chunk
    int _pad;
};

// The call has tail query t at this position.
__device__ __forceinline__ int tail_position(const ScoreCall& call, int t) { return call.tokens - call.tail + t; }
