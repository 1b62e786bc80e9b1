// Compensated sums of two floats: decays are e^(difference of two sums), and a difference keeps only the absolute error
// of its sums.
#pragma once

__device__ __forceinline__ void two_sum(float2& sum, float2 x) {
    float s = sum.x + x.x, back = s - sum.x;
    sum.y += (sum.x - (s - back)) + (x.x - back) + x.y;
    sum.x = s;
}
