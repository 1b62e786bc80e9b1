// Rotary embedding: sine and cosine of position * frequency, accurate at any position.
//
// The angle is reduced in f64 to at most an eighth of a turn from a multiple of a quarter turn; two short f32 series
// then give both functions to about 1 ulp. reference cpu::reference::rope::angles
#pragma once
#include "common/prelude.cuh"

__device__ __forceinline__ void sin_cos(int position, double frequency, float& sine, float& cosine) {
    const double angle = (double)position * frequency;
    const double quarters = rint(angle * 0.63661977236758134308);
    const double rest = fma(quarters, -1.57079632679489661923, angle);
    const float r = (float)fma(quarters, -6.123233995736766e-17, rest);
    const float z = r * r;
    const float s =
        r + r * z * (-1.6666666667e-1f + z * (8.3333333333e-3f + z * (-1.9841269841e-4f + z * 2.7557319224e-6f)));
    const float c = 1.0f + z * (-0.5f + z * (4.1666666667e-2f + z * (-1.3888888889e-3f + z * 2.4801587302e-5f)));
    const int quarter = (int)(i64)quarters & 3;
    sine = quarter & 1 ? c : s;
    cosine = quarter & 1 ? s : c;
    if (quarter & 2) sine = -sine;
    if (quarter == 1 || quarter == 2) cosine = -cosine;
}
