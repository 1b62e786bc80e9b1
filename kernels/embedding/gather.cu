// Embedding rows of the tokens of a step or chunk, decoded from the file's own blocks.
//
//   out[row] = decode(table[token[row]])
//
// in   header (norm/source_rows.cuh)     table: [vocab] rows of ROW_BYTES bytes in format TYPE (the GGUF id)
// out  out f32 [rows][WIDTH]
// grid (ceil(WIDTH / 1024), rows) x 256, four neighbouring values per thread
// arch sm_80 and up     reference contract::quant::dequantize_row     test crates/cuda/tests/rows.rs
//
// Products and sums are rounded one by one, as the codec does, so the values are equal bit for bit. The table of a
// large model stays in host memory: a block fetches its bytes in one trip over PCIe and decodes them from shared
// memory. Blocks of some formats lie at odd multiples of two bytes, so those are copied two bytes at a time.
#include "common/prelude.cuh"
#include "norm/source_rows.cuh"

#define TYPE_F32 0
#define TYPE_F16 1
#define TYPE_Q4_0 2
#define TYPE_Q4_1 3
#define TYPE_Q5_0 6
#define TYPE_Q5_1 7
#define TYPE_Q8_0 8
#define TYPE_Q2_K 10
#define TYPE_Q3_K 11
#define TYPE_Q4_K 12
#define TYPE_Q5_K 13
#define TYPE_Q6_K 14
#define TYPE_IQ4_NL 20
#define TYPE_IQ4_XS 23
#define TYPE_BF16 30

#if TYPE == TYPE_F32
#define BITS 32
#elif TYPE == TYPE_F16 || TYPE == TYPE_BF16
#define BITS 16
#elif TYPE == TYPE_Q4_0 || TYPE == TYPE_IQ4_NL
#define BITS 4.5
#elif TYPE == TYPE_Q4_1
#define BITS 5
#elif TYPE == TYPE_Q5_0
#define BITS 5.5
#elif TYPE == TYPE_Q5_1
#define BITS 6
#elif TYPE == TYPE_Q8_0
#define BITS 8.5
#elif TYPE == TYPE_Q2_K
#define BITS 2.625
#elif TYPE == TYPE_Q3_K
#define BITS 3.4375
#elif TYPE == TYPE_Q4_K
#define BITS 4.5
#elif TYPE == TYPE_Q5_K
#define BITS 5.5
#elif TYPE == TYPE_Q6_K
#define BITS 6.5625
#elif TYPE == TYPE_IQ4_XS
#define BITS 4.25
#endif
// Values per thread block, whole blocks of any format, and their bytes.
#define VALUES 1024
constexpr int BYTES = int(BITS * VALUES / 8);

template <typename Word>
__device__ __forceinline__ void copy_to_shared(u8* dst, const u8* src, int bytes) {
#pragma unroll
    for (int i = 0; i < (BYTES / (int)sizeof(Word) + 255) / 256; i++) {
        const int at = i * 256 + threadIdx.x;
        if (at < bytes / (int)sizeof(Word)) ((Word*)dst)[at] = ((const Word*)src)[at];
    }
}

__device__ __forceinline__ float half_at(const u8* b) { return f16_to_f32(*(const u16*)b); }

__device__ __forceinline__ float scale_and_offset(float q, float d, float m) { return __fadd_rn(__fmul_rn(q, d), m); }

// Levels of the nonlinear 4-bit formats.
__device__ const i8 levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Six-bit scale and minimum `j` of the eight that are packed in twelve bytes (Q4_K, Q5_K).
__device__ __forceinline__ void scale_and_min(const u8* p, int j, float& scale, float& min) {
    if (j < 4) {
        scale = p[j] & 63;
        min = p[j + 4] & 63;
    } else {
        scale = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4;
        min = (p[j + 4] >> 4) | (p[j] >> 6) << 4;
    }
}

// Value `i` of a row.
__device__ __forceinline__ float decode(const u8* row, int i) {
#if TYPE == TYPE_F32
    return ((const float*)row)[i];
#elif TYPE == TYPE_F16
    return f16_to_f32(((const u16*)row)[i]);
#elif TYPE == TYPE_BF16
    return bf16_to_f32(((const u16*)row)[i]);
#elif TYPE == TYPE_Q8_0
    const u8* b = row + i / 32 * 34;
    return __fmul_rn((float)(i8)b[2 + i % 32], half_at(b));
#elif TYPE == TYPE_Q4_0
    const u8* b = row + i / 32 * 18;
    return __fmul_rn((float)(b[2 + i % 16] >> (i % 32 / 16 * 4) & 15) - 8.0f, half_at(b));
#elif TYPE == TYPE_Q4_1
    const u8* b = row + i / 32 * 20;
    return scale_and_offset((float)(b[4 + i % 16] >> (i % 32 / 16 * 4) & 15), half_at(b), half_at(b + 2));
#elif TYPE == TYPE_Q5_0
    const u8* b = row + i / 32 * 22;
    const int high = b[2 + i % 32 / 8] >> (i % 8) & 1;
    return __fmul_rn((float)((b[6 + i % 16] >> (i % 32 / 16 * 4) & 15) | high << 4) - 16.0f, half_at(b));
#elif TYPE == TYPE_Q5_1
    const u8* b = row + i / 32 * 24;
    const int high = b[4 + i % 32 / 8] >> (i % 8) & 1;
    return scale_and_offset((float)((b[8 + i % 16] >> (i % 32 / 16 * 4) & 15) | high << 4), half_at(b), half_at(b + 2));
#elif TYPE == TYPE_IQ4_NL
    const u8* b = row + i / 32 * 18;
    return __fmul_rn(half_at(b), (float)levels[b[2 + i % 16] >> (i % 32 / 16 * 4) & 15]);
#elif TYPE == TYPE_IQ4_XS
    const u8* b = row + i / 256 * 136;
    const int s = i % 256 / 32;
    const int code = (b[4 + s / 2] >> (s % 2 * 4) & 15) | (*(const u16*)(b + 2) >> (2 * s) & 3) << 4;
    const float d = __fmul_rn(half_at(b), (float)(code - 32));
    return __fmul_rn(d, (float)levels[b[8 + 16 * s + i % 16] >> (i % 32 / 16 * 4) & 15]);
#elif TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K
    const bool is_q5 = TYPE == TYPE_Q5_K;
    const u8* b = row + i / 256 * (is_q5 ? 176 : 144);
    const int j = i % 256 / 32, l = i % 32;
    float scale, min;
    scale_and_min(b + 4, j, scale, min);
    int q = b[(is_q5 ? 48 : 16) + j / 2 * 32 + l] >> (j % 2 * 4) & 15;
    if (is_q5) q |= (b[16 + l] >> j & 1) << 4;
    return __fsub_rn(__fmul_rn(__fmul_rn(half_at(b), scale), (float)q), __fmul_rn(half_at(b + 2), min));
#elif TYPE == TYPE_Q6_K
    const u8* b = row + i / 256 * 210;
    const int half = i % 256 / 128, q = i % 128 / 32, l = i % 32;
    const int low = b[64 * half + l + 32 * (q % 2)] >> (q / 2 * 4) & 15;
    const int code = low | (b[128 + 32 * half + l] >> (2 * q) & 3) << 4;
    const float scale = (float)(i8)b[192 + 8 * half + 2 * q + l / 16];
    return __fmul_rn(__fmul_rn(half_at(b + 208), scale), (float)code - 32.0f);
#elif TYPE == TYPE_Q2_K
    const u8* b = row + i / 256 * 84;
    const int s = i % 256 / 16;
    const int q = b[16 + i % 256 / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    const float d = __fmul_rn(half_at(b + 80), (float)(b[s] & 15)), m = __fmul_rn(half_at(b + 82), (float)(b[s] >> 4));
    return __fsub_rn(__fmul_rn(d, (float)q), m);
#elif TYPE == TYPE_Q3_K
    const u8* b = row + i / 256 * 110;
    const int s = i % 256 / 16;
    const int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4;
    const int scale = (low | (b[104 + s % 4] >> (s / 4 * 2) & 3) << 4) - 32;
    const int two = b[32 + i % 256 / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    const int q = two - (b[i % 32] >> (i % 256 / 32) & 1 ? 0 : 4);
    return __fmul_rn(__fmul_rn(half_at(b + 108), (float)scale), (float)q);
#endif
}

extern "C" __global__ void __launch_bounds__(256)
    embedding_gather(const Header* header, const u8* __restrict__ table, float* out) {
    pdl_launch();
    __shared__ __align__(16) u8 bytes[BYTES];
    const int row = blockIdx.y, offset = threadIdx.x * 4, at = blockIdx.x * VALUES + offset;
    const bool is_active = row < n_source_rows(header);
    if (is_active) {
        const size_t begin = (size_t)blockIdx.x * BYTES;
        const u8* src = table + (size_t)header->token[row] * ROW_BYTES + begin;
        const int n_bytes = min((size_t)BYTES, ROW_BYTES - begin);
        if (ROW_BYTES % 16 == 0 && BYTES % 16 == 0)
            copy_to_shared<uint4>(bytes, src, n_bytes);
        else
            copy_to_shared<u16>(bytes, src, n_bytes);
    }
    __syncthreads();
    pdl_wait();
    if (!is_active || at >= WIDTH) return;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = at + i < WIDTH ? decode(bytes, offset + i) : 0.0f;
    float* dst = out + (size_t)row * WIDTH + at;
    if (WIDTH % 4 == 0) {
        *(float4*)dst = make_float4(v[0], v[1], v[2], v[3]);
    } else {
        for (int i = 0; i < 4 && at + i < WIDTH; i++) dst[i] = v[i];
    }
}
