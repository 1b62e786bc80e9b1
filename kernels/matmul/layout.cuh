// How weights lie in device memory for the matmuls. Host twin: crates/cuda/src/pack (it writes what is described here).
//
// A matrix [n_out][K] is cut into row blocks of 128 rows (the last may have fewer; rows are padded to 16 with zeros), a row
// block into units along K (256 values; 64 for the 16-bit kinds; K is padded with zeros to whole units, 16-bit kinds to 256),
// a unit into tiles of 16 rows:  [row block][unit][tile of 16 rows][tile bytes].  Byte offset of the tile of row R and unit U,
// with full = R / 128, tiles(b) = number of 16-row tiles of row block b (8, or less in the last one), units = units along K:
//     full * 128/16 * units * TILE + (U * tiles(full) + R % 128 / 16) * TILE
// Within a tile, for row r (0..15) and value k of the unit; kk = k % 32, lane = (r % 8) * 4 + kk % 16 / 4, word j = r / 8 + 2 * (kk / 16):
// the A fragments of mma.m16n8k32, so that 16 bytes at lane * 16 are the registers a0..a3 of one lane.
//
// Q4K   2304 bytes  codes: nibble (k / 32) % 2 (0 = low) of byte  k/64 * 512 + lane * 16 + j * 4 + kk % 4
//                   headers: the 16 bytes of the GGUF block (d f16, dmin f16, 12 bytes of 6-bit scales and mins) at 2048 + r * 16
//                   value = d * sc(k/32) * code - dmin * m(k/32)
// Q5K   2816 bytes  low nibbles as Q4K; fifth bits: bit 8 * (kk % 4) + (k / 32 % 2) * 4 + j of the u32 at 2048 + lane * 16 + k/64 * 4
//                   headers at 2560 + r * 16
// Q6K   3360 bytes  low nibbles as Q4K; top pairs, the upper of the two bits inverted (so that the six bits are code - 32 in
//                   two's complement): bits 8 * (kk % 4) + 2 * j .. of the u32 at 2048 + k/128 * 512 + lane * 16 + k/32 % 4 * 4
//                   scales i8 of runs of 16 at 3072 + r * 16 + k/16, d f16 at 3328 + r * 2;   value = d * sc(k/16) * (code - 32)
// Q8    4352 bytes  codes i8 at k/32 * 512 + lane * 16 + j * 4 + kk % 4; scales f16 at 4096 + r * 16 + k/32 * 2
// WIDE  6144 bytes  codes as Q8; scales f32 of runs of 16 at 4096 + r * 64 + k/16 * 4, offsets f32 at 5120 + r * 64 + k/16 * 4
//                   value = scale(k/16) * code + offset(k/16)
// F16, BF16  2048 bytes, 64 values: at k/16 * 512 + ((r % 8) * 4 + k % 8 / 2) * 16 + (r / 8 + 2 * (k % 16 / 8)) * 4 + k % 2 * 2
// F32   plain [n_out][K], no padding.
#pragma once
#include "common/prelude.cuh"

#define KIND_Q4K 0
#define KIND_Q5K 1
#define KIND_Q6K 2
#define KIND_Q8 3
#define KIND_WIDE 4
#define KIND_F16 5
#define KIND_BF16 6
#define KIND_F32 7

// Bytes of a tile of 16 rows.
__device__ constexpr int tile_bytes(int kind) {
    return kind == KIND_Q4K ? 2304 : kind == KIND_Q5K ? 2816 : kind == KIND_Q6K ? 3360 : kind == KIND_Q8 ? 4352 : kind == KIND_WIDE ? 6144 : 2048;
}
// Values of K in a unit.
__device__ constexpr int unit_values(int kind) { return kind < KIND_F16 ? 256 : 64; }
// Bytes of activations that 8 rows have for one unit.
__device__ constexpr int unit_x_bytes(int kind) { return kind < KIND_F16 ? 2336 : 1024; }
