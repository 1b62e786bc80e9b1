"""ggml's codecs through ctypes, from a build without multiply-add contraction."""

import ctypes

import numpy as np

# name -> (ggml type id, elements per block, bytes per block, offsets of f16 scale fields)
BLOCKS = {
    "q4_0": (2, 32, 18, (0,)),
    "q4_1": (3, 32, 20, (0, 2)),
    "q5_0": (6, 32, 22, (0,)),
    "q5_1": (7, 32, 24, (0, 2)),
    "q8_0": (8, 32, 34, (0,)),
    "q2_k": (10, 256, 84, (80, 82)),
    "q3_k": (11, 256, 110, (108,)),
    "q4_k": (12, 256, 144, (0, 2)),
    "q5_k": (13, 256, 176, (0, 2)),
    "q6_k": (14, 256, 210, (208,)),
    "iq4_nl": (20, 32, 18, (0,)),
    "iq4_xs": (23, 256, 136, (0,)),
}
# Formats that came later; fields that are not halves have no offset.
LATER = {
    "tq1_0": (34, 256, 54, (52,)),
    "tq2_0": (35, 256, 66, (64,)),
    "mxfp4": (39, 32, 17, ()),
    "nvfp4": (40, 64, 36, ()),
}
POINT_SETS = {
    "iq2_xxs": (16, 256, 66, (0,)),
    "iq2_xs": (17, 256, 74, (0,)),
    "iq3_xxs": (18, 256, 98, (0,)),
    "iq1_s": (19, 256, 50, (0,)),
    "iq3_s": (21, 256, 110, (0,)),
    "iq2_s": (22, 256, 82, (0,)),
    "iq1_m": (29, 256, 56, ()),
}
PLAIN = {"f16": (1, 1, 2, ()), "bf16": (30, 1, 2, ())}
ALL = BLOCKS | PLAIN | LATER | POINT_SETS


class Ggml:
    """The functions of libggml-base that our codecs are compared with."""

    def __init__(self, library):
        self.lib = ctypes.CDLL(library)
        self.lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.lib.ggml_quantize_chunk.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]

    def quantize(self, name, rows, importance=None):
        """f32 [n_rows, n_cols] -> u8 [n_rows, row_bytes], as when quantising a file.

        `importance` [n_cols] f32 counts for every row.
        """
        type_id, elems, size, _ = ALL[name]
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        n_rows, n_cols = rows.shape
        out = np.zeros((n_rows, n_cols // elems * size), dtype=np.uint8)
        written = self.lib.ggml_quantize_chunk(
            type_id,
            rows.ctypes.data,
            out.ctypes.data,
            0,
            n_rows,
            n_cols,
            None if importance is None else importance.ctypes.data,
        )
        assert written == out.size, (name, written, out.size)
        return out

    def dequantize(self, name, blocks):
        """u8 [n_blocks, block_bytes] -> f32 [n_blocks, block_elems] with the scalar code."""
        _, elems, size, _ = ALL[name]
        symbol = name.replace("_k", "_K") if name.endswith("_k") else name
        read = getattr(self.lib, f"dequantize_row_{symbol}")
        read.restype, read.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        blocks = np.ascontiguousarray(blocks, dtype=np.uint8)
        assert blocks.shape[1] == size
        out = np.zeros((blocks.shape[0], elems), dtype=np.float32)
        read(blocks.ctypes.data, out.ctypes.data, out.size)
        return out
