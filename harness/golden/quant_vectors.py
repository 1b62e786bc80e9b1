"""Writes fixtures/quant: rows that ggml quantises and random blocks that ggml dequantises."""

import argparse
import json
import pathlib
import struct

import numpy as np

from ggml_lib import ALL, BLOCKS, LATER, PLAIN, POINT_SETS, Ggml

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
    _, _, size, scale_offsets = ALL[name]
    blocks = rng.integers(0, 256, (n_blocks, size), dtype=np.uint8)
    for offset in scale_offsets:
        bits = rng.integers(0, 1 << 16, n_blocks).astype(np.uint16)
        bits = np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits)
        bits[0], bits[1], bits[2] = 0x0000, 0x8000, 0x0001
        blocks[:, offset : offset + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    if name == "mxfp4":
        # The largest exponents overflow with the largest codes.
        blocks[:, 0] = np.minimum(blocks[:, 0], 250)
        blocks[:3, 0] = [0, 1, 2]
    if name == "iq1_m":
        # The top nibble of the scale, whose exponent must not be all ones.
        blocks[:, 55] &= 0xBF
    return blocks


def hash_of_generated(ggml, name):
    """FNV-1a of the values of 512 blocks of a linear congruential generator's top bytes."""
    _, _, size, _ = ALL[name]
    state, out = 0, bytearray()
    for _ in range(512 * size):
        state = (state * 6364136223846793005 + 1) % (1 << 64)
        out.append(state >> 56)
    blocks = np.frombuffer(bytes(out), dtype=np.uint8).reshape(512, size)
    values = ggml.dequantize(name, blocks).ravel()
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    return fnv(bits.tolist())


def write_dequantize(ggml, name, blocks, out):
    _, elems, size, _ = ALL[name]
    decoded = ggml.dequantize(name, blocks)
    assert np.isfinite(decoded).all(), name
    head = struct.pack("<4I", len(blocks), elems, size, ALL[name][0])
    (out / f"dequantize_{name}.bin").write_bytes(
        head + blocks.tobytes() + decoded.astype("<f4").tobytes()
    )


def write_quantize(ggml, name, values, out):
    stored = ggml.quantize(name, values)
    head = struct.pack("<4I", *values.shape, ALL[name][0], stored.shape[1])
    (out / f"quantize_{name}.bin").write_bytes(head + values.tobytes() + stored.tobytes())


def write_points(ggml, values, out):
    """Hashes of what the formats of points become, by row: with importance, and without if allowed."""
    importance = np.random.default_rng(3).uniform(0.1, 4.0, N_COLS).astype("<f4")
    head = struct.pack("<4I", *values.shape, 0, 0)
    (out / "points_values.bin").write_bytes(head + values.tobytes() + importance.tobytes())
    lines = []
    for name in POINT_SETS:
        for weights in (importance, None):
            if weights is None and name in ("iq2_xxs", "iq2_xs", "iq1_s"):
                continue
            for row, stored in enumerate(ggml.quantize(name, values, weights)):
                zero_runs = (values[row].reshape(-1, 32) == 0).all(axis=1)
                if name == "iq3_s" and zero_runs.any() and not zero_runs.all():
                    # ggml writes the points and signs after a run of zeros one run too early.
                    continue
                kind = "plain" if weights is None else "weighted"
                lines.append(f"{name} {kind} {row} {fnv(stored.tolist())}\n")
    (out / "points_hashes.txt").write_text("".join(lines))


def fnv(words):
    state = 0xCBF29CE484222325
    for word in words:
        state = ((state ^ word) * 0x100000001B3) % (1 << 64)
    return f"{state:016x}"


def write_later(ggml, out):
    """The formats that came later: few blocks each, and hashes of many."""
    rng = np.random.default_rng(20261126)
    values = np.stack(list(rows(rng).values())).astype("<f4")
    for name in LATER:
        write_quantize(ggml, name, values, out)
    write_points(ggml, values, out)
    for name, (_, elems, _, _) in (LATER | POINT_SETS).items():
        write_dequantize(ggml, name, random_blocks(name, 2048 // elems, rng), out)
    hashes = [f"{name} {hash_of_generated(ggml, name)}\n" for name in LATER | POINT_SETS]
    (out / "dequantize_hashes.txt").write_text("".join(hashes))


def main():
    arg = argparse.ArgumentParser(description=__doc__)
    arg.add_argument("--ggml", required=True, help="libggml-base.so built with -ffp-contract=off")
    arg.add_argument("--out", required=True, type=pathlib.Path)
    arg.add_argument("--later-only", action="store_true", help="only the formats of 2024 and later")
    arg = arg.parse_args()
    ggml = Ggml(arg.ggml)
    write_later(ggml, arg.out)
    if arg.later_only:
        return
    rng = np.random.default_rng(20260714)
    named = rows(rng)
    values = np.stack(list(named.values())).astype("<f4")
    (arg.out / "rows.json").write_text(json.dumps(list(named)) + "\n")
    for name in PLAIN | BLOCKS:
        write_quantize(ggml, name, values, arg.out)
    for name, (_, elems, _, _) in BLOCKS.items():
        write_dequantize(ggml, name, random_blocks(name, 8192 // elems, rng), arg.out)


if __name__ == "__main__":
    main()
