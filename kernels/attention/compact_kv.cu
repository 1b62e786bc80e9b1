// Compacts the KV cache after acceptance: moves the rows of accepted nodes together, bytes unchanged, for all layers of
// a group in one launch.
//
//   position committed + i  <-  position committed + node[i]        i = 1 .. length, per path, layer, plane and head
//
// Sources rise and are never before their destinations, so eight rows are read before eight are written.
// in   commit    planes: base addresses of K codes, K scales, V codes, V scales (scales may be null); layer strides in
//      bytes
// grid (layers, 4 * KV_HEADS, paths) x 128 threads; the threads divide the bytes of a row: 16-byte words of codes,
//      4-byte words of scales
// smem none
// arch sm_80 and up     reference: a plain copy     test attention::compact_kv_moves_bytes_verbatim
#include "common/prelude.cuh"
#include "common/step.cuh"
#include "attention/kv_cache.cuh"

struct Planes {
    u64 base[4];
    u64 layer_stride[4];
};

template <typename Word>
__device__ __forceinline__ void move_rows(const Path& path, const PageTable& pages, u8* plane, int head,
                                          int row_bytes) {
    for (int i = threadIdx.x; i < row_bytes / (int)sizeof(Word); i += 128) {
        for (int from = 1; from < path.length; from += 8) {
            Word moving[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (from + j < path.length) {
                    const size_t row = kv_row(pages, path.slot, path.committed + path.node[from + j], KV_HEADS, head);
                    moving[j] = ((const Word*)(plane + row * row_bytes))[i];
                }
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (from + j < path.length && path.node[from + j] != from + j) {
                    const size_t row = kv_row(pages, path.slot, path.committed + from + j, KV_HEADS, head);
                    ((Word*)(plane + row * row_bytes))[i] = moving[j];
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    attn_compact_kv(const Commit* commit, Planes planes, PageTable pages) {
    pdl_launch();
    const int layer = blockIdx.x, which = blockIdx.y / KV_HEADS, head = blockIdx.y % KV_HEADS;
    pdl_wait();
    const u64 base = which == 0   ? planes.base[0]
                     : which == 1 ? planes.base[1]
                     : which == 2 ? planes.base[2]
                                  : planes.base[3];
    const u64 stride = which == 0   ? planes.layer_stride[0]
                       : which == 1 ? planes.layer_stride[1]
                       : which == 2 ? planes.layer_stride[2]
                                    : planes.layer_stride[3];
    if ((int)blockIdx.z >= commit->paths || base == 0) return;
    const Path& path = commit->path[blockIdx.z];
    if (path.node[path.length - 1] == path.length - 1) return;  // the path is already contiguous
    u8* plane = (u8*)base + layer * stride;
    if (which == 0) move_rows<uint4>(path, pages, plane, head, kv_row_bytes(K_FORMAT, HEAD_DIM));
    if (which == 2) move_rows<uint4>(path, pages, plane, head, kv_row_bytes(V_FORMAT, HEAD_DIM));
    if (which == 1) move_rows<u32>(path, pages, plane, head, kv_scale_bytes(K_FORMAT, HEAD_DIM));
    if (which == 3) move_rows<u32>(path, pages, plane, head, kv_scale_bytes(V_FORMAT, HEAD_DIM));
}
