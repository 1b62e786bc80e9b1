// Feature tap: a copy of the residual stream behind a layer, beside the taps of other layers.
//
//   out[place(row)][OFFSET + i] = x[row][i]      place(row) = row, or with PLACED: features of the row's tree + its node
//
// in   header rows at int 0 (with PLACED a Step);  x [rows][WIDTH] f32          out  rows of STRIDE f32
// grid (ceil(WIDTH / 1024), rows) x 256, four values a thread; WIDTH, OFFSET and STRIDE are multiples of 4
// arch sm_80 and up     reference a copy     test rows::a_tap_lands_beside_the_others
#include "common/prelude.cuh"
#include "common/step.cuh"

extern "C" __global__ void __launch_bounds__(256) rows_tap(
    const int* header, const float* x, float* out) {
    pdl_launch();
    const int row = blockIdx.y, at = (blockIdx.x * 256 + threadIdx.x) * 4;
    const bool real = row < header[0] && at < WIDTH;
    size_t place = row;
#if PLACED
    const Step* step = (const Step*)header;
    if (real) {
        const int tree = step->tree_of[row];
        place = step->features[tree] + row - step->tree[tree].first;
    }
#endif
    pdl_wait();
    if (!real) return;
    *(float4*)(out + place * STRIDE + OFFSET + at) = *(const float4*)(x + (size_t)row * WIDTH + at);
}
