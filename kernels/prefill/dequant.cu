// One packed weight matrix to f16 panels, for the prefill products.
//
// in   w       [n_out][K] of kind PACKED as matmul/layout.cuh packs it (not F32)
// out  panels  panels of panel_rows rows; row r of the matrix goes to row first + r / 8 * step + r % 8, so that two
//              matrices can stand interleaved by eights (step 16, first 0 and 8); step 8 keeps them together
// grid (units of K, row blocks of 128), a warp per tile of 16 rows; a value is rounded to f16 once
// define PACKED (a KIND_ of layout.cuh);  arch sm_80 and up
// ref  cpu::reference (gguf codecs);  test prefill::dequantised_panels_match_the_codec
// hot
#include "common/prelude.cuh"
#include "matmul/layout.cuh"
#include "matmul/units.cuh"
#include "prefill/panel.cuh"

// Four neighbouring values of a row.
struct Four {
    float at[4];
};

// byte i of `codes` minus `bias`, times scale, plus offset; codes below 256.
__device__ __forceinline__ Four scaled(u32 codes, float bias, float scale, float offset) {
    Four v;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float code = __uint_as_float(prmt(codes, 0x4b000000u, 0x7440 + i)) - (8388608.0f + bias);
        v.at[i] = fmaf(code, scale, offset);
    }
    return v;
}

// The values of one lane of a tile. Per 64 values of K: word j of its 16 bytes belongs to row lane / 4 + 8 * (j % 2);
// of half n (k / 32 % 2) it holds k = 32 n + 16 * (j / 2) + 4 * (lane % 4) + 0..3.
template <int PACKED_AS> struct Tile;

template <> struct Tile<KIND_Q4K> {
    uint4 codes[4];
    Header header[2];
    float d[2], least[2];

    __device__ __forceinline__ Tile(const u8 *at, int lane, int headers = 2048) {
#pragma unroll
        for (int i = 0; i < 4; i++) { codes[i] = load_once(at + i * 512 + lane * 16); }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            header[i] = header_of(at + headers + (lane / 4 + 8 * i) * 16);
            d[i] = f16x2_lo(header[i].halves);
            least[i] = f16x2_hi(header[i].halves);
        }
    }
    __device__ __forceinline__ u32 nibbles(int quarter, int half, int j) const {
        return word(codes[quarter], j) >> (4 * half) & 0x0f0f0f0fu;
    }
    __device__ __forceinline__ Four scale(u32 code, int run, int row) const {
        const float sc = (float)byte_of(header[row].scale[run / 4], run % 4);
        const float m = (float)byte_of(header[row].min[run / 4], run % 4);
        return scaled(code, 0.0f, d[row] * sc, -(least[row] * m));
    }
    __device__ __forceinline__ Four values(int quarter, int half, int j) const {
        return scale(nibbles(quarter, half, j), quarter * 2 + half, j % 2);
    }
};

template <> struct Tile<KIND_Q5K> : Tile<KIND_Q4K> {
    uint4 fifth;

    __device__ __forceinline__ Tile(const u8 *at, int lane) : Tile<KIND_Q4K>(at, lane, 2560) {
        fifth = load_once(at + 2048 + lane * 16);
    }
    __device__ __forceinline__ Four values(int quarter, int half, int j) const {
        const u32 top = word(fifth, quarter) >> (4 * half + j) & 0x01010101u;
        return scale(nibbles(quarter, half, j) | top << 4, quarter * 2 + half, j % 2);
    }
};

template <> struct Tile<KIND_Q6K> {
    uint4 codes[4], top[2], scales[2];
    float d[2];

    __device__ __forceinline__ Tile(const u8 *at, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) { codes[i] = load_once(at + i * 512 + lane * 16); }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = lane / 4 + 8 * i;
            top[i] = load_once(at + 2048 + i * 512 + lane * 16);
            scales[i] = *(const uint4 *)(at + 3072 + row * 16);
            d[i] = f16_to_f32(*(const u16 *)(at + 3328 + row * 2));
        }
    }
    __device__ __forceinline__ Four values(int quarter, int half, int j) const {
        const u32 low = word(codes[quarter], j) >> (4 * half) & 0x0f0f0f0fu;
        const u32 high = word(top[quarter / 2], quarter % 2 * 2 + half) >> (2 * j) & 0x03030303u;
        const int run = quarter * 4 + half * 2 + j / 2;
        const float sc = (float)signed_byte_of(word(scales[j % 2], run / 4), run % 4);
        return scaled((low | high << 4) ^ 0x20202020u, 32.0f, d[j % 2] * sc, 0.0f);
    }
};

template <> struct Tile<KIND_Q8> {
    uint4 codes[8], scales[2];

    __device__ __forceinline__ Tile(const u8 *at, int lane) {
#pragma unroll
        for (int i = 0; i < 8; i++) { codes[i] = load_once(at + i * 512 + lane * 16); }
#pragma unroll
        for (int i = 0; i < 2; i++) { scales[i] = *(const uint4 *)(at + 4096 + (lane / 4 + 8 * i) * 16); }
    }
    __device__ __forceinline__ Four values(int quarter, int half, int j) const {
        const u32 pair = word(scales[j % 2], quarter);
        const float d = half ? f16x2_hi(pair) : f16x2_lo(pair);
        return scaled(word(codes[quarter * 2 + half], j) ^ 0x80808080u, 128.0f, d, 0.0f);
    }
};

template <> struct Tile<KIND_WIDE> {
    uint4 codes[8];
    const float *scales, *offsets;

    __device__ __forceinline__ Tile(const u8 *at, int lane) {
#pragma unroll
        for (int i = 0; i < 8; i++) { codes[i] = load_once(at + i * 512 + lane * 16); }
        scales = (const float *)(at + 4096) + lane / 4 * 16;
        offsets = (const float *)(at + 5120) + lane / 4 * 16;
    }
    __device__ __forceinline__ Four values(int quarter, int half, int j) const {
        const int run = j % 2 * 128 + quarter * 4 + half * 2 + j / 2;
        return scaled(word(codes[quarter * 2 + half], j) ^ 0x80808080u, 128.0f, scales[run], offsets[run]);
    }
};

__device__ __forceinline__ void put(char *panels, int panel_rows, int row, int chunk, u32 a, u32 b, u32 c, u32 d) {
    *(uint4 *)(panels + panel_chunk(panel_rows, row, chunk)) = make_uint4(a, b, c, d);
}

// A unit of 256 values of a tile of block formats: neighbouring lanes swap halves, so that each writes whole chunks.
template <int PACKED_AS>
__device__ __forceinline__ void expand(const u8 *at, char *panels, int panel_rows, const int (&row)[2], int unit, int k_blocks) {
    const int lane = threadIdx.x % 32, odd = lane & 1;
    const Tile<PACKED_AS> tile(at, lane);
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        const int block = unit * 4 + quarter;
        if (block >= k_blocks) { break; }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Four early = tile.values(quarter, half, i), late = tile.values(quarter, half, i + 2);
                const u32 e0 = panel_pair(early.at[0], early.at[1]), e1 = panel_pair(early.at[2], early.at[3]);
                const u32 l0 = panel_pair(late.at[0], late.at[1]), l1 = panel_pair(late.at[2], late.at[3]);
                const u32 r0 = __shfl_xor_sync(WARP_ALL, odd ? e0 : l0, 1), r1 = __shfl_xor_sync(WARP_ALL, odd ? e1 : l1, 1);
                const int chunk = block * 8 + half * 4 + odd * 2 + lane % 4 / 2;
                if (odd) {
                    put(panels, panel_rows, row[i], chunk, r0, r1, l0, l1);
                } else {
                    put(panels, panel_rows, row[i], chunk, e0, e1, r0, r1);
                }
            }
        }
    }
}

// A unit of 64 values of a tile of a 16-bit format: word j of 16 bytes holds row lane / 4 + 8 * (j % 2), values
// 16 i + 8 * (j / 2) + 2 * (lane % 4) + 0, 1 of slice i.
__device__ __forceinline__ void expand_wide(const u8 *at, char *panels, int panel_rows, const int (&row)[2], int unit, bool bf16) {
    const int lane = threadIdx.x % 32;
    uint4 raw[4];
#pragma unroll
    for (int i = 0; i < 4; i++) { raw[i] = load_once(at + i * 512 + lane * 16); }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 4) {
            u32 v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = word(raw[(chunk + j) / 2], i + (chunk + j) % 2 * 2);
                if (bf16) { v[j] = panel_pair(bf16x2_lo(v[j]), bf16x2_hi(v[j])); }
            }
            quad_transpose(v);
            put(panels, panel_rows, row[i], unit * 8 + chunk + lane % 4, v[0], v[1], v[2], v[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    dequant(const u8 *w, int n_out, int units, int k_blocks, char *panels, int panel_rows, int first, int step) {
    const int unit = blockIdx.x, block = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = min(8, (n_out - block * 128 + 15) / 16);
    if (warp >= tiles) { return; }
    const u8 *at = w + ((u64)block * 8 * units + (u64)unit * tiles + warp) * tile_bytes(PACKED);
    const int r = block * 128 + warp * 16 + lane / 4;
    const int row[2] = {first + r / 8 * step + r % 8, first + (r / 8 + 1) * step + r % 8};
#if PACKED < 5
    expand<PACKED>(at, panels, panel_rows, row, unit, k_blocks);
#else
    if (unit < k_blocks) { expand_wide(at, panels, panel_rows, row, unit, PACKED == KIND_BF16); }
#endif
}
