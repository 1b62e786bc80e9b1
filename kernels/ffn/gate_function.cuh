// The function of a feed-forward's gate: silu, or gelu by its tanh formula with GELU (0 if absent).
// references cpu::reference::activation::{silu, gelu}
#pragma once
#include "common/prelude.cuh"

__device__ __forceinline__ float gate_function(float x) {
#if defined(GELU) && GELU
    return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
#else
    return silu(x);
#endif
}
