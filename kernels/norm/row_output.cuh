// Result rows in the formats that GEMMs read: f32 rows, A16 (gemm/a16_layout.cuh), or both.
//
// Defines OUT_F32 and OUT_F16 (0 or 1) select them; WIDTH is the width of a row, N8_TILES the n8 tiles of rows of A16.
#pragma once
#include "common/prelude.cuh"
#include "gemm/a16_layout.cuh"

struct RowOutput {
    float* f32;  // [rows][WIDTH]
    void* f16;
};

#define ROW_GROUPS ((WIDTH + 255) / 256)

// By a whole warp: writes values 256 * group + 8 * lane .. of a row. Values past WIDTH must be zero.
__device__ __forceinline__ void store_row_group(const RowOutput& out, int row, int group, const float (&v)[8]) {
#if OUT_F32
    const int column = group * 256 + threadIdx.x % 32 * 8;
#if WIDTH % 8 == 0
    if (column < WIDTH) {
        float4* dst = (float4*)(out.f32 + (size_t)row * WIDTH + column);
        dst[0] = make_float4(v[0], v[1], v[2], v[3]);
        dst[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
#else
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (column + i < WIDTH) out.f32[(size_t)row * WIDTH + column + i] = v[i];
#endif
#endif
#if OUT_F16
    a16_store(out.f16, N8_TILES, row, group, v);
#endif
}

// Writes values column .. column + 7 of a row; `column` is a multiple of 8, WIDTH of 256.
__device__ __forceinline__ void store_row_8(const RowOutput& out, int row, int column, const float (&v)[8]) {
#if OUT_F32
    float4* dst = (float4*)(out.f32 + (size_t)row * WIDTH + column);
    dst[0] = make_float4(v[0], v[1], v[2], v[3]);
    dst[1] = make_float4(v[4], v[5], v[6], v[7]);
#endif
#if OUT_F16
    a16_store_8(out.f16, N8_TILES, row, column, v);
#endif
}

// Reads values 256 * group + 8 * lane .. of a row of `width` values; zeros past its end.
template <int width>
__device__ __forceinline__ void load_row_group(const float* row, int group, float (&v)[8]) {
    const int column = group * 256 + threadIdx.x % 32 * 8;
    if (width % 8 == 0) {
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
        if (column < width) a = ((const float4*)(row + column))[0], b = ((const float4*)(row + column))[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = column + i < width ? row[column + i] : 0.0f;
    }
}
