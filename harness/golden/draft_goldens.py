"""Writes fixtures/drafts: logits of the published draft module with random drafts for the tiny models.

    draft_goldens.py --fixtures F                       writes F/drafts/*.npy
    draft_goldens.py --fixtures F --hearth H --work W   compares a built hearth with the module

With --hearth, the official libraries write every draft to W, as safetensors and as GGUF in three dialects.
`hearth eval --draft-logits` reads each file. The drafts are not stored: `values` computes a tensor from its
name, and `conformance::drafts` does the same.
"""

import argparse
import json
import pathlib
import subprocess

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

import dequantised
import draft_module
import tiny_models

# The configurations of the target models.
TARGETS = {
    "hybrid_r1_bf16": lambda: tiny_models.hybrid_config(2, 2, 2, 2, True),
    "hybrid_r3_q4_k_m": lambda: tiny_models.hybrid_config(3, 3, 2, 6, False),
    "hybrid_mtp_q4_k_m": lambda: tiny_models.hybrid_config(4, 4, 2, 2, True),
    "dense_f16": lambda: tiny_models.dense_config(2),
}
F, S = "full_attention", "sliding_attention"


def case(name, target, at, kinds, **more):
    base = dict(
        name=name,
        target=target,
        at=at,
        kinds=kinds,
        window=None,
        causal=None,
        block=16,
        mask=511,
        capture=[0, 1],
        theta=1e7,
        heads=4,
        kv_heads=2,
        head_dim=128,
        ffn=320,
        eps=1e-6,
    )
    return base | more


CASES = [
    case("full", "hybrid_r1_bf16", 61, [F, F]),
    case("sliding", "hybrid_mtp_q4_k_m", 90, [S, S, S, F], window=24, capture=[0, 2, 3], ffn=256),
    case("sliding_seen_whole", "dense_f16", 70, [S, F], window=40, causal=False, block=8, theta=1e6, mask=7),
    case("causal", "hybrid_r1_bf16", 33, [F, F, F], causal=True, block=4, capture=[1], heads=2, kv_heads=2),
    case(
        "one_layer",
        "hybrid_r3_q4_k_m",
        47,
        [F],
        block=12,
        capture=[1],
        heads=6,
        kv_heads=3,
        head_dim=64,
        eps=1e-5,
    ),
    case("irregular", "dense_f16", 100, [F, S, F, S, S], window=20, block=20, theta=5e5, kv_heads=1, ffn=192),
    case("short", "hybrid_r3_q4_k_m", 1, [S, F], window=64, capture=[0, 1, 2], block=16),
]


def splitmix(state, n):
    """The top bytes of the first `n` outputs of SplitMix64."""
    word = np.uint64
    with np.errstate(over="ignore"):
        z = word(state) + np.arange(1, n + 1, dtype=word) * word(0x9E3779B97F4A7C15)
        z = (z ^ (z >> word(30))) * word(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> word(27))) * word(0x94D049BB133111EB)
        return ((z ^ (z >> word(31))) >> word(56)).astype(np.int64)


def values(case_name, tensor, shape):
    """The tensor of a name: eight-bit integers times a power of two, exact in bf16, f16 and f32."""
    seed = 0xCBF29CE484222325
    for byte in f"{case_name}/{tensor}".encode():  # FNV-1a
        seed = ((seed ^ byte) * 0x100000001B3) % 2**64
    top = splitmix(seed, int(np.prod(shape)))
    drawn = (64 + top // 2) / 128 if len(shape) == 1 else (2 * top - 255) / 2048
    return torch.from_numpy(drawn.astype(np.float32).reshape(shape))


def config_of(c, target):
    nested = {"mask_token_id": c["mask"], "target_layer_ids": c["capture"]}
    config = Qwen3Config(
        vocab_size=tiny_models.VOCAB,
        hidden_size=tiny_models.HIDDEN,
        intermediate_size=c["ffn"],
        num_hidden_layers=len(c["kinds"]),
        num_attention_heads=c["heads"],
        num_key_value_heads=c["kv_heads"],
        head_dim=c["head_dim"],
        rms_norm_eps=c["eps"],
        layer_types=c["kinds"],
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": c["theta"]},
        tie_word_embeddings=False,
    )
    config.sliding_window = c["window"]
    config.block_size, config.dflash_config = c["block"], nested
    config.num_target_layers = target.num_hidden_layers
    if c["causal"] is not None:
        config.is_causal = c["causal"]
    return config


def random_draft(c, target):
    draft = draft_module.Draft(config_of(c, target)).eval()
    with torch.no_grad():
        for name, p in draft.named_parameters():
            p.copy_(values(c["name"], name, tuple(p.shape)))
    return draft


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCH = {"A": "qwen35-dflash-draft", "B": "dflash-draft", "C": "dflash"}


def gguf_name(name, dialect):
    outer = {
        "fc": "fc" if dialect == "C" else "dflash.fc",
        "norm": "output_norm",
        "hidden_norm": "enc.output_norm" if dialect == "C" else "dflash.hidden_norm",
    }
    short = name.removesuffix(".weight")
    if short in outer:
        return outer[short] + ".weight"
    _, layer, part = short.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def window_flags(c):
    """The flags for a file in dialect A, or None: its layers all use the window except the last."""
    if c["window"] is None:
        return []
    usual = [S] * (len(c["kinds"]) - 1) + [F]
    return ["--draft-swa", str(c["window"])] if c["kinds"] == usual else None


def is_expressible(c, dialect, target):
    ruled = c["causal"] is None or all((kind == S) == c["causal"] for kind in c["kinds"])
    if dialect == "A":
        return ruled and window_flags(c) is not None and c["theta"] == target.rope_parameters["rope_theta"]
    return ruled or dialect == "C"


def write_gguf(path, draft, c, dialect):
    """Writes a dialect as its converters do: the default rope base in A, capture layers plus one in C."""
    arch, config = ARCH[dialect], draft.config
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(len(c["kinds"]))
    w.add_context_length(4096)
    w.add_embedding_length(config.hidden_size)
    w.add_feed_forward_length(c["ffn"])
    w.add_head_count(c["heads"])
    w.add_head_count_kv(c["kv_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["eps"])
    w.add_rope_freq_base(1e4 if dialect == "A" else c["theta"])
    array = lambda key, values, kind: w.add_key_value(key, values, gguf.GGUFValueType.ARRAY, sub_type=kind)
    inner = "dflash." if dialect == "C" else f"{arch}.dflash."
    w.add_uint32(inner + "block_size", c["block"])
    if dialect == "C":
        array("dflash.target_layers", [layer + 1 for layer in c["capture"]], gguf.GGUFValueType.INT32)
        w.add_rope_dimension_sections([c["head_dim"] // 2, 0, 0, 0])
        w.add_uint32("tokenizer.ggml.mask_token_id", c["mask"])
        if c["causal"] is not None:
            w.add_bool("dflash.attention.causal", c["causal"])
    else:
        array(inner + "target_layer_ids", c["capture"], gguf.GGUFValueType.INT32)
        w.add_uint32(inner + "mask_token_id", c["mask"])
        w.add_uint32(f"{arch}.vocab_size", config.vocab_size)
        w.add_uint32(inner + "n_target_layers", 64)
    if c["window"] is not None and dialect != "A":
        w.add_uint32(f"{arch}.attention.sliding_window", c["window"])
        array(
            f"{arch}.attention.sliding_window_pattern",
            [kind == S for kind in c["kinds"]],
            gguf.GGUFValueType.BOOL,
        )
    for name, p in draft.named_parameters():
        w.add_tensor(gguf_name(name, dialect), p.detach().numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_hf(folder, draft, c):
    """Writes the published form: bf16, a nested rope base, `use_sliding_window` as in transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().bfloat16().contiguous() for name, p in draft.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = draft.config
    keep = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "layer_types",
        "sliding_window",
        "rope_parameters",
        "dflash_config",
        "num_target_layers",
        "block_size",
    ]
    text = {key: getattr(config, key) for key in keep} | {
        "architectures": ["DFlashDraftModel"],
        "use_sliding_window": False,
    }
    if c["causal"] is not None:
        text["is_causal"] = c["causal"]
    (folder / "config.json").write_text(json.dumps(text, indent=1))


def largest_error(c, draft, target, expected, arg):
    """The largest logit error of a built hearth with this draft over all file forms that can express it."""
    work = arg.work / c["name"]
    write_hf(work / "hf", draft, c)
    forms = [("safetensors", work / "hf", [])]
    for dialect in ARCH:
        if is_expressible(c, dialect, target):
            write_gguf(work / f"{dialect}.gguf", draft, c, dialect)
            forms.append((dialect, work / f"{dialect}.gguf", window_flags(c) if dialect == "A" else []))
    model = arg.fixtures / "models" / f"{c['target']}.gguf"
    ids = json.loads((arg.fixtures / "models" / f"{c['target']}.json").read_text())["ids"]
    (work / "ids.json").write_text(json.dumps(ids))
    worst = 0.0
    for form, path, flags in forms:
        errors = {}
        for device in ("--cpu-reference", "--device cpu"):
            out = work / "out.npy"
            subprocess.run(
                [
                    arg.hearth,
                    "eval",
                    model,
                    *device.split(),
                    "--draft",
                    path,
                    *flags,
                    "--ids",
                    work / "ids.json",
                    "--at",
                    str(c["at"]),
                    "--draft-logits",
                    out,
                ],
                check=True,
                capture_output=True,
            )
            errors[device] = float(np.abs(np.load(out) - expected).max())
        print(f"{c['name']:<20} {form:<12}", {k: f"{v:.1e}" for k, v in errors.items()}, flush=True)
        worst = max(worst, errors["--cpu-reference"])
    return worst


def main():
    arg = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arg.add_argument("--fixtures", required=True, type=pathlib.Path)
    arg.add_argument(
        "--hearth", type=pathlib.Path, help="compare this executable with the module; write no fixtures"
    )
    arg.add_argument("--work", type=pathlib.Path, help="scratch folder, with --hearth")
    arg = arg.parse_args()
    torch.set_num_threads(2)
    worst = 0.0
    for c in CASES:
        config = TARGETS[c["target"]]()
        target = tiny_models.empty(config)
        dequantised.load(arg.fixtures / "models" / f"{c['target']}.gguf", target)
        ids = json.loads((arg.fixtures / "models" / f"{c['target']}.json").read_text())["ids"]
        draft = random_draft(c, config)
        expected = draft_module.logits(draft, target, ids, c["at"])
        if arg.hearth:
            worst = max(worst, largest_error(c, draft, config, expected, arg))
        else:
            np.save(arg.fixtures / "drafts" / f"{c['name']}.npy", np.ascontiguousarray(expected, dtype="<f4"))
            print(c["name"], expected.shape, f"std {expected.std():.2f}", flush=True)
    assert worst <= 1e-4, worst


if __name__ == "__main__":
    main()
