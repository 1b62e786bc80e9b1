"""Tensors in several safetensors files, each small enough to travel."""
import glob
import os

from safetensors.torch import load_file, save_file

LIMIT = 15_000_000


def save_parts(tensors, stem):
    """Writes stem-0.safetensors, stem-1.safetensors, ..."""
    for old in glob.glob(stem + "-*.safetensors"):
        os.remove(old)
    part, size, n = {}, 0, 0
    for name, t in tensors.items():
        nbytes = t.numel() * t.element_size()
        if part and size + nbytes > LIMIT:
            save_file(part, f"{stem}-{n}.safetensors")
            part, size, n = {}, 0, n + 1
        part[name] = t.detach().cpu().contiguous()
        size += nbytes
    save_file(part, f"{stem}-{n}.safetensors")


def load_parts(stem):
    out = {}
    for path in sorted(glob.glob(stem + "-*.safetensors")):
        out.update(load_file(path))
    if not out:
        raise FileNotFoundError(f"no parts {stem}-*.safetensors")
    return out
