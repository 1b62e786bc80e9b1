"""Writes fixtures/quant: rows that ggml quantises and random blocks that ggml dequantises."""

import argparse
import json
import pathlib
import struct

import numpy as np

from ggml_lib import BLOCKS, PLAIN, Ggml

N_COLS = 512


def rows(rng):
    """Name and 512 values of every row; each row reaches a certain branch of a quantiser."""
    n = rng.standard_normal
    u = rng.uniform
    outlier = n(N_COLS)
    outlier[[7, 300]] = [80.0, -55.0]
    half = n(N_COLS)
    half[rng.permutation(N_COLS)[: N_COLS // 2]] = 0.0
    zero_blocks = n(N_COLS)
    zero_blocks.reshape(-1, 32)[::3] = 0.0
    sparse = np.zeros(N_COLS)
    sparse[5::16] = n(N_COLS // 16)
    flat_blocks = np.repeat(n(N_COLS // 32), 32)
    mirrored = np.repeat(u(0.1, 2.0, N_COLS // 2), 2) * np.tile([1.0, -1.0], N_COLS // 2)
    return {
        "normal": n(N_COLS),
        "weights": 0.06 * n(N_COLS),
        "uniform": u(-1.0, 1.0, N_COLS),
        "tiny": 1e-6 * n(N_COLS),
        "minute": 1e-30 * n(N_COLS),
        "large": 2000.0 * n(N_COLS),
        "outlier": outlier,
        "all positive": u(0.5, 2.0, N_COLS),
        "all negative": -u(0.5, 2.0, N_COLS),
        "half zero": half,
        "zero blocks": zero_blocks,
        "one in sixteen": sparse,
        "all zero": np.zeros(N_COLS),
        "negative zero": np.full(N_COLS, -0.0),
        "constant": np.full(N_COLS, 0.37),
        "negative constant": np.full(N_COLS, -1.25),
        "constant blocks": flat_blocks,
        "denormal scale": 2e-5 * n(N_COLS),
        "scale near zero": 3e-7 * n(N_COLS),
        "integer grid": rng.integers(-15, 16, N_COLS).astype(float),
        "halves": rng.integers(-255, 256, N_COLS) / 2.0,
        "equal magnitudes": np.where(n(N_COLS) > 0, 1.0, -1.0),
        "mirrored pairs": mirrored,
        "ramp": np.linspace(-1.0, 1.0, N_COLS),
        "heavy tail": rng.standard_t(2, N_COLS),
    }


def random_blocks(name, n_blocks, rng):
    """Random bytes with finite scales; normal, subnormal, zero and negative scales all occur."""
    _, _, size, scale_offsets = BLOCKS[name]
    blocks = rng.integers(0, 256, (n_blocks, size), dtype=np.uint8)
    for offset in scale_offsets:
        bits = rng.integers(0, 1 << 16, n_blocks).astype(np.uint16)
        bits = np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits)
        bits[0], bits[1], bits[2] = 0x0000, 0x8000, 0x0001
        blocks[:, offset : offset + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    return blocks


def main():
    arg = argparse.ArgumentParser(description=__doc__)
    arg.add_argument("--ggml", required=True, help="libggml-base.so built with -ffp-contract=off")
    arg.add_argument("--out", required=True, type=pathlib.Path)
    arg = arg.parse_args()
    ggml = Ggml(arg.ggml)
    rng = np.random.default_rng(20260714)
    named = rows(rng)
    values = np.stack(list(named.values())).astype("<f4")
    (arg.out / "rows.json").write_text(json.dumps(list(named)) + "\n")
    for name, (type_id, elems, size, _) in (PLAIN | BLOCKS).items():
        out = ggml.quantize(name, values)
        head = struct.pack("<4I", *values.shape, type_id, out.shape[1])
        (arg.out / f"quantize_{name}.bin").write_bytes(head + values.tobytes() + out.tobytes())
    for name, (type_id, elems, size, _) in BLOCKS.items():
        blocks = random_blocks(name, 8192 // elems, rng)
        decoded = ggml.dequantize(name, blocks)
        assert np.isfinite(decoded).all(), name
        head = struct.pack("<4I", len(blocks), elems, size, type_id)
        (arg.out / f"dequantize_{name}.bin").write_bytes(
            head + blocks.tobytes() + decoded.astype("<f4").tobytes()
        )


if __name__ == "__main__":
    main()
