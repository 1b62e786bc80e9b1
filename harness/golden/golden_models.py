"""Writes fixtures/models and fixtures/recipe: tiny GGUFs and reference results for them."""

import argparse
import json
import pathlib
import subprocess
import sys

import gguf
import numpy as np
import torch

import dequantised
import reference
import tiny_models
import tiny_tokenizer

HERE = pathlib.Path(__file__).parent
Q4_K_M = 15
RECIPES = {"f32": 0, "f16": 1, "bf16": 32, "q4_0": 2, "q8_0": 7, "q4_k_m": Q4_K_M, "q5_k_m": 17, "q6_k": 18}
INT8_MEAN = 0.06  # largest mean error of eight-bit activations, for logits with standard deviation one
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Each weight type occurs at least once. Patterns are searched in the tensor name.
MIXED = {
    r"^token_embd\.weight$": "Q3_K",
    r"^output\.weight$": "Q5_1",
    r"blk\.0\.attn_qkv\.weight": "IQ4_XS",
    r"blk\.0\.attn_gate\.weight": "Q4_0",
    r"blk\.0\.ssm_beta\.weight": "F32",
    r"blk\.0\.ssm_alpha\.weight": "BF16",
    r"blk\.0\.ssm_out\.weight": "Q5_K",
    r"blk\.0\.ffn_gate\.weight": "Q4_1",
    r"blk\.0\.ffn_up\.weight": "Q5_0",
    r"blk\.0\.ffn_down\.weight": "IQ4_NL",
    r"blk\.1\.attn_qkv\.weight": "Q2_K",
    r"blk\.1\.attn_gate\.weight": "Q6_K",
    r"blk\.1\.ssm_beta\.weight": "Q8_0",
    r"blk\.1\.ssm_alpha\.weight": "F16",
    r"blk\.1\.ssm_out\.weight": "IQ4_NL",
    r"blk\.1\.ffn_gate\.weight": "Q3_K",
    r"blk\.1\.ffn_up\.weight": "BF16",
    r"blk\.1\.ffn_down\.weight": "Q5_1",
    r"blk\.2\.attn_q\.weight": "Q4_K",
    r"blk\.2\.attn_k\.weight": "F16",
    r"blk\.2\.attn_v\.weight": "Q8_0",
    r"blk\.2\.attn_output\.weight": "IQ4_XS",
    r"blk\.2\.ffn_gate\.weight": "Q2_K",
    r"blk\.2\.ffn_up\.weight": "Q4_1",
    r"blk\.2\.ffn_down\.weight": "Q6_K",
}
ALL_TYPES = {
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
}


class Tools:
    """The llama.cpp programs and the folder for their output."""

    def __init__(self, arg):
        self.source, self.bin, self.work = arg.llama, arg.bin, arg.work
        self.work.mkdir(parents=True, exist_ok=True)

    def table(self, pre):
        return tiny_tokenizer.reduced(f"{self.source}/models/ggml-vocab-{pre}.gguf", tiny_models.VOCAB, pre)

    def convert(self, name, config, pre, seed, outtype, interval=None, mtp_seed=None):
        """Writes a random checkpoint and its GGUF; returns the model and the file."""
        model = tiny_models.empty(config)
        tiny_models.randomise(model, seed)
        folder, out = self.work / name, self.work / f"{name}_{outtype}.gguf"
        tiny_models.save(model, folder, self.table(pre), interval, mtp_seed, TEMPLATE)
        extra = ["--no-mtp"] if pre == "qwen35" and mtp_seed is None else []
        subprocess.run(
            [
                sys.executable,
                HERE / "convert_tiny.py",
                self.source,
                pre,
                folder,
                "--outtype",
                outtype,
                "--outfile",
                out,
                *extra,
            ],
            check=True,
            capture_output=True,
        )
        return model, out

    def quantise(self, source, out, ftype, overrides=()):
        types = [f"{pattern}={int(gguf.GGMLQuantizationType[t])}" for pattern, t in overrides]
        subprocess.run(
            [self.bin / "llama_quantize", source, out, str(ftype), *types], check=True, capture_output=True
        )
        return out

    def runtime_logits(self, path, ids, vocab):
        np.array(ids, dtype="<i4").tofile(self.work / "ids.i32")
        subprocess.run(
            [self.bin / "llama_logits", path, self.work / "ids.i32", self.work / "out.f32"], check=True
        )
        return np.fromfile(self.work / "out.f32", dtype="<f4").reshape(len(ids), vocab)


def compare(a, b):
    """Largest and mean difference, and the share of rows with the same argmax."""
    return {
        "max_abs": float(np.abs(a - b).max()),
        "mean_abs": float(np.abs(a - b).mean()),
        "argmax_equal": float((a.argmax(1) == b.argmax(1)).mean()),
    }


def fixture(tools, stem, path, config, ids, out):
    """Computes the reference results of one GGUF and writes its fixture files."""
    model = tiny_models.empty(config)
    types = dequantised.load(path, model)
    expected = reference.compute(model, ids)
    assert expected["step_difference"] < 5e-5, expected["step_difference"]
    runtime = compare(tools.runtime_logits(path, ids, config.vocab_size), expected["logits"])
    assert runtime["max_abs"] <= 1.0 and runtime["mean_abs"] <= INT8_MEAN, (stem, runtime)
    positions = reference.LOGIT_POSITIONS
    arrays = {"logits": expected["logits"][positions], "hidden": expected["hidden"]}
    arrays |= {k: expected[k] for k in ("delta", "conv") if k in expected}
    for kind, value in arrays.items():
        np.save(out / f"{stem}.{kind}.npy", np.ascontiguousarray(value, dtype="<f4"))
    layer_types = getattr(config, "layer_types", None) or []
    manifest = {
        "ids": ids,
        "logit_positions": positions,
        "hidden_positions": reference.HIDDEN_POSITIONS,
        "greedy_ids": expected["greedy_ids"],
        "greedy_margins": expected["greedy_margins"],
        "n_layers": config.num_hidden_layers,
        "recurrent_layers": [i for i, t in enumerate(layer_types) if t == "linear_attention"],
        "types": types,
        "runtime": runtime,
    }
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in manifest.items())
    (out / f"{stem}.json").write_text("{\n" + lines + "\n}\n")
    (out / f"{stem}.gguf").write_bytes(pathlib.Path(path).read_bytes())
    print(
        stem,
        f"std {expected['logits'].std():.3f}",
        f"step {expected['step_difference']:.1e}",
        runtime,
        types,
        f"margin {min(expected['greedy_margins']):.3f}",
        flush=True,
    )
    return types


def check_unquantised(tools, name, path, config, model, ids):
    """Asserts that the F32 file, the checkpoint and the runtime agree before quantisation."""
    again = tiny_models.empty(config)
    dequantised.load(path, again)
    with torch.no_grad():
        first, second = (m(torch.tensor([ids])).logits[0].numpy() for m in (model, again))
    assert np.abs(first - second).max() < 2e-5, compare(first, second)
    runtime = compare(tools.runtime_logits(path, ids, config.vocab_size), first)
    assert runtime["max_abs"] < 1e-4, runtime
    print(name, "f32:", runtime, flush=True)


def models(tools, out):
    rng = np.random.default_rng(35)
    ids = [int(i) for i in rng.integers(0, tiny_models.VOCAB, 200)]
    plans = [
        ("hybrid_r3", tiny_models.hybrid_config(3, 3, 2, 6, False), "qwen35", 3, 3, None),
        ("hybrid_r1", tiny_models.hybrid_config(2, 2, 2, 2, True), "qwen35", 5, 2, None),
        ("hybrid_mtp", tiny_models.hybrid_config(4, 4, 2, 2, True), "qwen35", 7, 4, 71),
        ("dense", tiny_models.dense_config(2), "qwen2", 11, None, None),
    ]
    f32 = {}
    for name, config, pre, seed, interval, mtp in plans:
        model, f32[name] = tools.convert(name, config, pre, seed, "f32", interval, mtp)
        check_unquantised(tools, name, f32[name], config, model, ids)
    config = {name: c for name, c, *_ in plans}
    write = lambda stem, path, name: fixture(tools, stem, path, config[name], ids, out)
    work = tools.work
    write("hybrid_r3_q4_k_m", tools.quantise(f32["hybrid_r3"], work / "r3_q4.gguf", Q4_K_M), "hybrid_r3")
    types = write(
        "hybrid_r3_mixed",
        tools.quantise(f32["hybrid_r3"], work / "r3_mixed.gguf", Q4_K_M, MIXED.items()),
        "hybrid_r3",
    )
    assert set(types) == ALL_TYPES, ALL_TYPES ^ set(types)
    _, bf16 = tools.convert("hybrid_r1", config["hybrid_r1"], "qwen35", 5, "bf16", 2)
    write("hybrid_r1_bf16", bf16, "hybrid_r1")
    write("hybrid_mtp_q4_k_m", tools.quantise(f32["hybrid_mtp"], work / "mtp_q4.gguf", Q4_K_M), "hybrid_mtp")
    _, f16 = tools.convert("dense", config["dense"], "qwen2", 11, "f16")
    write("dense_f16", f16, "dense")


def recipes(tools, out):
    plans = [
        ("qwen35_tied_8", tiny_models.hybrid_config(8, 4, 2, 2, True), "qwen35", 4, None),
        ("qwen35_untied_16", tiny_models.hybrid_config(16, 4, 2, 2, False), "qwen35", 4, None),
        ("qwen35_tied_8_mtp", tiny_models.hybrid_config(8, 4, 2, 2, True), "qwen35", 4, 1),
        ("qwen3_tied_12", tiny_models.dense_config(12), "qwen2", None, None),
        ("qwen3_untied_9_odd_ffn", tiny_models.dense_config(9, ffn=160, tied=False), "qwen2", None, None),
    ]
    for name, config, pre, interval, mtp in plans:
        _, source = tools.convert(name, config, pre, 1, "bf16", interval, mtp)
        for recipe, ftype in RECIPES.items():
            path = tools.quantise(source, tools.work / f"{name}_as_{recipe}.gguf", ftype)
            reader = gguf.GGUFReader(path)
            block_count = reader.fields[f"{pre.replace('qwen2', 'qwen3')}.block_count"].contents()
            head = {
                "architecture": pre.replace("qwen2", "qwen3"),
                "block_count": int(block_count),
                "tied": config.tie_word_embeddings,
                "recipe": recipe,
            }
            rows = [
                {"name": t.name, "dims": [int(d) for d in t.shape], "type": t.tensor_type.name}
                for t in reader.tensors
            ]
            text = json.dumps(head)[:-1] + ', "tensors": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"
            (out / f"{name}.{recipe}.json").write_text(text)
            print(name, recipe, len(rows), flush=True)


def main():
    arg = argparse.ArgumentParser(description=__doc__)
    arg.add_argument("--llama", required=True, help="llama.cpp source tree")
    arg.add_argument("--bin", required=True, type=pathlib.Path, help="llama_quantize and llama_logits")
    arg.add_argument("--work", required=True, type=pathlib.Path, help="scratch folder")
    arg.add_argument("--out", required=True, type=pathlib.Path, help="the fixtures folder")
    arg.add_argument("--only", choices=["models", "recipes"])
    arg = arg.parse_args()
    torch.set_num_threads(2)
    tools = Tools(arg)
    if arg.only != "recipes":
        models(tools, arg.out / "models")
    if arg.only != "models":
        recipes(tools, arg.out / "recipe")


if __name__ == "__main__":
    main()
