// Embedding rows of the tokens of a step or chunk, decoded from the file's own blocks.
//
//   out[row] = decode(table[token[row]]) * scale, the factor only with SCALED
//
// in   header (norm/source_rows.cuh)     table: [vocab] rows of ROW_BYTES bytes in format TYPE (the GGUF id)
// out  out f32 [rows][WIDTH]
// grid (ceil(WIDTH / 1024), rows) x 256, four neighbouring values per thread
// arch sm_80 and up     reference contract::quant::dequantize_row     test crates/cuda/tests/rows.rs
//
// The values are those of the codec, bit for bit. The table of a large model stays in host memory: a block fetches its
// bytes in one trip over PCIe and decodes them from shared memory. Blocks of some formats lie at odd multiples of two
// bytes, so those are copied two bytes at a time.
#include "common/prelude.cuh"
#include "norm/source_rows.cuh"
#include "embedding/decode_value.cuh"

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

extern "C" __global__ void __launch_bounds__(256)
    embedding_gather(const Header* header, const u8* __restrict__ table, float* out
#if defined(SCALED) && SCALED
                     ,
                     float scale
#endif
    ) {
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
    for (int i = 0; i < 4; i++) v[i] = at + i < WIDTH ? decode_value<TYPE>(bytes, offset + i) : 0.0f;
#if defined(SCALED) && SCALED
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] *= scale;
#endif
    float* dst = out + (size_t)row * WIDTH + at;
    if (WIDTH % 4 == 0) {
        *(float4*)dst = make_float4(v[0], v[1], v[2], v[3]);
    } else {
        for (int i = 0; i < 4 && at + i < WIDTH; i++) dst[i] = v[i];
    }
}
