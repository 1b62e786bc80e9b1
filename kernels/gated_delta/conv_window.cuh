// Slides the convolution window past a chunk: the last 3 of (window, rows of x), four channels per thread.
#pragma once

__device__ __forceinline__ void slide_conv_window(const PrefillChunk* chunk, const float* x, u32 ld_x, float* window,
                                                  int thread, int threads) {
    for (int channel = thread * 4; channel < CHANNELS; channel += threads * 4) {
        float4 newest[TAPS - 1];
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) {
            const int row = chunk->rows + i - (TAPS - 1);
            newest[i] = *(const float4*)(row >= 0 ? x + (u64)row * ld_x + channel
                                                  : window + (row + TAPS - 1) * CHANNELS + channel);
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) *(float4*)(window + i * CHANNELS + channel) = newest[i];
    }
}
