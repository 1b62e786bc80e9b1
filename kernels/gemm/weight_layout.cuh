// Packed weights in device memory. The host packs them: crates/cuda/src/pack.
//
// A matrix [n_out][K] is cut into row blocks of 128 rows (the last may have fewer; rows are padded to 16 with zeros). A
// row block of n m16 tiles is n * 16 f32 row factors, then its units along K. A unit has one slice or, for K-quants,
// two of 128 values each; a slice is n tiles. K is padded with zeros to a multiple of 256.
//     [row block][row factors | unit [slice [m16 tile]]]
// A weight is its row factor (a power of two) times the value below, which fits f16: factors are chosen per row so that
// nothing overflows and little is lost below the smallest normal number.
//
// Within a tile, for row r (0..15) and value k of the slice, in the order of the A fragments of mma.m16n8k16 (two k per
// register):
//     lane = (r % 8) * 4 + k % 8 / 2,  word j = r / 8 + 2 * (k % 16 / 8),  half h = k % 2,  step s = k / 16 % 2,
//     run b = k / 32 % 2
// "at bit B" means from bit B % 32 on of a u32, wrapping around. Masked codes are small f16 numbers (subnormal or of
// the lowest exponent: bit i of a half is worth 2^(i - 24)); for s = 1 after rotating the word right by 8.
//
// Q4K   1280 + 1024 bytes
//       codes: 4 bits at bit 2 + 4 b + 8 s + 16 h of the u32 at k/64 * 512 + lane * 16 + j * 4
//       first slice: headers at 1024 + r * 16: f16 d * 2^22, f16 dmin, three u32. With 6-bit scales c and minimums m of
//       the eight runs of 32 in the unit: byte i of word 0 is 4 c(i) + m(4 + i) % 4, of word 1 4 m(i) + m(4 + i) / 4 %
//       4, of word 2 4 c(4 + i) + m(4 + i) / 16;   value = d * c * code - dmin * m
// Q5K   1536 + 1280 bytes
//       five words for each 64 values, 0 to 3 as those of Q4K and 4 the u32 at 1024 + lane * 8 + k/64 * 4, with 5 bits
//       at bit 1 + 16 h, 6 + 16 h and 11 + 16 h of each, and the remaining bit 16 h
//       codes of s = 0: word j, bit 1 + 5 b
//       codes of s = 1, for j = 0 to 3: b = 0 word 1 bit 11, 2 bit 11, 0 bit 11, 4 bit 1; b = 1 word 4 bit 11, 3 bit
//       11, then bit i of the code in the remaining bit of word i, the halves h exchanged, and word 4 bit 6 (words are
//       rotated right by 10, 9, 8, 7, 6)
//       headers as Q4K, at 1280 + r * 16, with d * 2^23
// Q6K   1696 + 1664 bytes
//       six words for each 64 values, 0 to 3 where those of Q4K are, 4 and 5 the u32s at 1024 + lane * 16 + k/64 * 8;
//       in each, for both halves h: a code A at bit 1 + 16 h, four bits R at bit 7 + 16 h, a code B at bit 11 + 16 h
//       with i = r / 8 and u = k % 16 / 8, so j = i + 2 u: s = 0 b = 0 is A of word j; s = 0 b = 1 is A of word 4 + u
//       for i = 0, B of word u for i = 1; s = 1 b = 0 is B of word 2 + j; s = 1 b = 1 has R of word j below, and bits
//       2 i and 2 i + 1 of R of word 4 + u above (for B, and all of s = 1, words are rotated right by 6)
//       scales c of runs of 16, plus 128, at 1536 + r * 8 + k/16
//       first slice: f16 d * 2^23 at 1664 + r * 2;   value = d * c * (code - 32)
// Q8    1088 bytes, 64 values
//       codes plus 128: 8 bits at bit 2 + 8 s + 16 h of the u32 at b * 512 + lane * 16 + j * 4
//       f16 scale * 2^22 at 1024 + r * 4 + b * 2;   value = scale * code
// WIDE  1280 bytes, 64 values
//       unsigned codes as Q8; f16 scale * 2^22 and f16 offset at 1024 + r * 16 + k/16 * 4
//       value = scale * code + offset
// F16   2048 bytes, 64 values: at k/16 * 512 + lane * 16 + j * 4 + h * 2
// F32   plain f32 [n_out][K], no padding, no factors
#pragma once
#include "common/prelude.cuh"

#define KIND_Q4K 0
#define KIND_Q5K 1
#define KIND_Q6K 2
#define KIND_Q8 3
#define KIND_U8_AFFINE 4
#define KIND_F16 5
#define KIND_F32 6
#define KINDS_PACKED 6

// Slices of a unit.
__device__ constexpr int unit_slices(int kind) { return kind <= KIND_Q6K ? 2 : 1; }
// Bytes of an m16 tile in a slice.
__device__ constexpr int slice_tile_bytes(int kind, int slice) {
    return kind == KIND_Q4K         ? slice ? 1024 : 1280
           : kind == KIND_Q5K       ? slice ? 1280 : 1536
           : kind == KIND_Q6K       ? slice ? 1664 : 1696
           : kind == KIND_Q8        ? 1088
           : kind == KIND_U8_AFFINE ? 1280
                                    : 2048;
}
// Bytes of an m16 tile in a unit.
__device__ constexpr int unit_tile_bytes(int kind) {
    return slice_tile_bytes(kind, 0) + (unit_slices(kind) == 2 ? slice_tile_bytes(kind, 1) : 0);
}
// Chunks of 64 values in a slice.
__device__ constexpr int slice_chunks(int kind) { return unit_slices(kind); }
