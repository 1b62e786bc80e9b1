"""Compares a built `hearth` with the fixtures and with llama.cpp's quantiser; exits 1 on any failure.

    check_hearth.py --hearth BINARY --fixtures DIR [--llama SOURCE --bin DIR --work DIR]

The last three options add the checks that need llama.cpp. They compare token ids of the full vocabularies,
and files that both programs quantise from the same F32 model.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np

REFERENCE_MAX, DEFAULT_MEAN = 1e-4, 0.06
RECIPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}


class Report:
    def __init__(self):
        self.failures = 0

    def line(self, passed, text):
        self.failures += not passed
        print("ok  " if passed else "FAIL", text, flush=True)


def hearth(arg, *arguments, text=None):
    done = subprocess.run([arg.hearth, *map(str, arguments)], input=text, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"hearth {arguments}: {done.stderr.decode(errors='replace')[-800:]}")
    return done.stdout


def evaluate(arg, stem, folder, report):
    """Checks logits and greedy ids of one model, with the reference and with the default CPU path."""
    models = arg.fixtures / "models"
    manifest = json.loads((models / f"{stem}.json").read_text())
    expected = np.load(models / f"{stem}.logits.npy")
    (folder / "ids.json").write_text(json.dumps(manifest["ids"]))
    for path, flags in (("reference", ["--cpu-reference"]), ("default", [])):
        try:
            hearth(
                arg,
                "eval",
                models / f"{stem}.gguf",
                "--device",
                "cpu",
                *flags,
                "--ids",
                folder / "ids.json",
                "--logits",
                folder / "l.npy",
                "--greedy",
                24,
                "--out-ids",
                folder / "g.json",
            )
        except RuntimeError as e:
            report.line(False, f"{stem} {path}: {e}")
            continue
        got = np.load(folder / "l.npy")[manifest["logit_positions"]]
        error = np.abs(got - expected)
        report.line(
            error.max() <= REFERENCE_MAX if path == "reference" else error.mean() <= DEFAULT_MEAN,
            f"{stem} {path}: max {error.max():.2e} mean {error.mean():.2e} "
            f"argmax {(got.argmax(1) == expected.argmax(1)).mean():.3f}",
        )
        greedy = json.loads((folder / "g.json").read_text())
        steps = reliable_steps(manifest["greedy_margins"], 10 * float(error.mean()))
        report.line(
            greedy[:steps] == manifest["greedy_ids"][:steps], f"{stem} {path}: {steps} greedy steps compared"
        )


def reliable_steps(margins, least):
    """The number of leading greedy steps with a margin above `least`, the numerical noise."""
    weak = [i for i, m in enumerate(margins) if m <= least]
    return weak[0] if weak else len(margins)


def tokens(arg, model, vectors, report, name):
    """Checks `hearth tokenize` on every text, with and without matching control strings."""
    wrong = []
    for row in vectors:
        for key, flags in (("ids", []), ("ids_without_special", ["--no-special"])):
            try:
                got = json.loads(hearth(arg, "tokenize", model, *flags, text=row["text"].encode()))
            except RuntimeError as e:
                got = str(e)
            if got != row[key]:
                wrong.append((row["name"], key))
    report.line(not wrong, f"{name}: {len(vectors)} texts in two modes, wrong: {wrong[:8]}")


def quantised(arg, report):
    """Compares names, types and bytes of the same F32 models from both quantisers."""
    for source in sorted(arg.work.glob("*_f32.gguf")):
        for recipe, ftype in RECIPES.items():
            theirs, ours = arg.work / "theirs.gguf", arg.work / "ours.gguf"
            subprocess.run(
                [arg.bin / "llama_quantize", source, theirs, str(ftype)], check=True, capture_output=True
            )
            try:
                hearth(arg, "quantize", source, ours, recipe, "--force")
            except RuntimeError as e:
                report.line(False, f"{source.name} {recipe}: {e}")
                continue
            a, b = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (theirs, ours))
            types = [n for n in a if n not in b or a[n].tensor_type != b[n].tensor_type]
            data = [n for n in a if n not in types and not np.array_equal(a[n].data, b[n].data)]
            report.line(
                a.keys() == b.keys() and not types and not data,
                f"{source.name} {recipe}: {len(a)} tensors, other type {types[:5]}, other bytes {data[:5]}",
            )


def main():
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("--hearth", required=True, help="the executable")
    arg.add_argument("--fixtures", required=True, type=pathlib.Path)
    arg.add_argument("--llama", type=pathlib.Path, help="llama.cpp source tree")
    arg.add_argument("--bin", type=pathlib.Path, help="folder of llama_quantize")
    arg.add_argument("--work", type=pathlib.Path, help="the --work folder of golden_models.py")
    arg = arg.parse_args()
    report = Report()
    vectors = lambda name: json.loads((arg.fixtures / "tokenizer" / f"{name}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted((arg.fixtures / "models").glob("*.json")):
            evaluate(arg, path.stem, pathlib.Path(folder), report)
    tokens(arg, arg.fixtures / "models/hybrid_r3_q4_k_m.gguf", vectors("tiny_qwen35"), report, "tiny qwen35")
    tokens(arg, arg.fixtures / "models/dense_f16.gguf", vectors("tiny_qwen2"), report, "tiny qwen2")
    if arg.llama:
        for pre in ("qwen35", "qwen2"):
            tokens(
                arg,
                arg.llama / f"models/ggml-vocab-{pre}.gguf",
                vectors(f"full_{pre}"),
                report,
                f"full {pre}",
            )
    if arg.bin and arg.work:
        quantised(arg, report)
    sys.exit(report.failures > 0)


if __name__ == "__main__":
    main()
