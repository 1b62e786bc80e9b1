"""Writes the dense families of fixtures/models: tiny random models, with results by another program.

    family_goldens.py --fixtures F

`family_module.py` computes the values in f64 on the stored weights. Every part of a family must matter:
each model is computed again without it, and has to differ by far more than the tests allow.
Needs only `numpy` and `gguf`.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from family_module import Family

VOCAB = 512
N_IDS = 96
POSITIONS = [0, 1, 20, 40, 63, 64, 95]
HIDDEN_POSITIONS = [0, 50, 95]
GREEDY = 12
TOLERANCE = 1e-4
TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "f16": gguf.GGMLQuantizationType.F16,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}


def shape(stem, arch, ty, **more):
    base = dict(
        stem=stem,
        arch=arch,
        ty=ty,
        layers=2,
        hidden=96,
        ffn=160,
        heads=6,
        kv_heads=2,
        head_dim=32,
        theta=10000.0,
        local_theta=10000.0,
        rope_scale=1.0,
        eps=1e-5,
        adjacent=False,
        head_norms=False,
        post_norms=False,
        scaled=False,
        gelu=False,
        window=0,
        pattern=6,
        biases=[],
        factors=False,
        tied=True,
    )
    return base | more


SHAPES = [
    shape("llama_q8_0", "llama", "q8_0", adjacent=True, theta=1e5),
    shape(
        "llama3_f16",
        "llama",
        "f16",
        adjacent=True,
        theta=5e5,
        factors=True,
        biases=["q", "k", "v", "output"],
        tied=False,
    ),
    shape("qwen2_f16", "qwen2", "f16", theta=1e6, eps=1e-6, biases=["q", "k", "v"]),
    shape(
        "gemma3_q4_1",
        "gemma3",
        "q4_1",
        layers=3,
        heads=4,
        kv_heads=1,
        head_dim=64,
        theta=1e6,
        rope_scale=0.125,
        eps=1e-6,
        head_norms=True,
        post_norms=True,
        scaled=True,
        gelu=True,
        window=20,
        pattern=2,
    ),
]

# What each family has, and the shape without it.
MISTAKES = {
    "llama_q8_0": [dict(adjacent=False), dict(theta=10000.0)],
    "llama3_f16": [dict(adjacent=False)],
    "qwen2_f16": [dict(adjacent=True)],
    "gemma3_q4_1": [
        dict(window=0),
        dict(window=21),
        dict(window=19),
        dict(pattern=3),
        dict(rope_scale=1.0),
        dict(local_theta=1e6),
        dict(gelu=False),
        dict(scaled=False),
        dict(post_norms=False),
        dict(head_norms=False),
    ],
}


def tensors(s, rng):
    """Names to f32 arrays; matrices keep the scale of what goes through."""
    h, f, d = s["hidden"], s["ffn"], s["head_dim"]
    q, kv = s["heads"] * d, s["kv_heads"] * d
    matrix = lambda rows, cols, gain=1.0: gain * rng.standard_normal((rows, cols)) / np.sqrt(cols)
    norm = lambda n, mean=1.0: mean + 0.2 * rng.standard_normal(n)
    out = {"token_embd.weight": matrix(VOCAB, h, 1.0 if s["scaled"] else np.sqrt(h))}
    if s["factors"]:
        out["rope_freqs.weight"] = np.linspace(1.0, 8.0, d // 2)
    for i in range(s["layers"]):
        b = f"blk.{i}."
        out[b + "attn_norm.weight"] = norm(h)
        for name, rows, cols in [("q", q, h), ("k", kv, h), ("v", kv, h), ("output", h, q)]:
            gain = 1.5 if name in "qk" else 1.0
            out[f"{b}attn_{name}.weight"] = matrix(rows, cols, gain)
            if name in s["biases"]:
                out[f"{b}attn_{name}.bias"] = 0.5 * rng.standard_normal(rows)
        if s["head_norms"]:
            out[b + "attn_q_norm.weight"] = norm(d, 1.5)
            out[b + "attn_k_norm.weight"] = norm(d, 1.5)
        out[b + "ffn_norm.weight"] = norm(h)
        if s["post_norms"]:
            out[b + "post_attention_norm.weight"] = norm(h, 0.8)
            out[b + "post_ffw_norm.weight"] = norm(h, 0.8)
        out[b + "ffn_gate.weight"] = matrix(f, h, 2.0)
        out[b + "ffn_up.weight"] = matrix(f, h)
        out[b + "ffn_down.weight"] = matrix(h, f)
    out["output_norm.weight"] = norm(h, 2.0 if not s["tied"] or s["scaled"] else 0.3)
    if not s["tied"]:
        out["output.weight"] = matrix(VOCAB, h)
    return {name: value.astype(np.float32) for name, value in out.items()}


def vocabulary(writer, s):
    """A byte-level vocabulary, or a SentencePiece one for gemma3: loading needs one."""
    if s["arch"] == "gemma3":
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{b:02X}>" for b in range(256)]
        kinds = [3, 3, 3, 2] + [6] * 256
        tokens += ["\u2581"] + [chr(c) for c in range(0x21, 0x21 + VOCAB - len(tokens) - 1)]
        kinds += [1] * (VOCAB - len(kinds))
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(VOCAB)])
        writer.add_add_space_prefix(False)
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)
    else:
        letters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        tokens = [chr(b) for b in letters] + [chr(0x100 + i) for i in range(256 - len(letters))]
        tokens += ["ab", "cd"]
        kinds = [1] * len(tokens)
        tokens += [f"<|special {i}|>" for i in range(VOCAB - len(tokens))]
        kinds += [3] * (VOCAB - len(kinds))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre({"llama": "smollm", "qwen2": "qwen2"}[s["arch"]])
        writer.add_token_merges(["a b", "c d"])
        writer.add_eos_token_id(VOCAB - 1)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def write(path, s, weights):
    """Writes the file; returns the stored weights in f64."""
    writer = gguf.GGUFWriter(str(path), s["arch"])
    writer.add_name(s["stem"])
    writer.add_block_count(s["layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(s["hidden"])
    writer.add_feed_forward_length(s["ffn"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv_heads"])
    writer.add_layer_norm_rms_eps(s["eps"])
    writer.add_rope_freq_base(s["theta"])
    if s["head_dim"] * s["heads"] != s["hidden"]:
        writer.add_key_length(s["head_dim"])
        writer.add_value_length(s["head_dim"])
    if s["rope_scale"] != 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(1.0 / s["rope_scale"])
    if s["window"]:
        writer.add_sliding_window(s["window"])
        writer.add_uint32(f"{s['arch']}.attention.sliding_window_pattern", s["pattern"])
    vocabulary(writer, s)
    stored = {}
    for name, value in weights.items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
            stored[name] = value.astype(np.float64)
            continue
        ty = TYPES[s["ty"]]
        data = quantize(value, ty)
        writer.add_tensor(name, data, raw_dtype=ty)
        stored[name] = dequantize(data, ty).astype(np.float64).reshape(value.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def greedy(model, ids):
    ids, picked, margins = list(ids), [], []
    for _ in range(GREEDY):
        row = model.run(np.array(ids))[1][-1]
        second, first = np.argsort(row)[-2:]
        picked.append(int(first))
        margins.append(float(row[first] - row[second]))
        ids.append(picked[-1])
    return picked, margins


def check_mistakes(s, weights, ids, logits):
    wrong = [Family(s | mistake, weights) for mistake in MISTAKES[s["stem"]]]
    for name in weights:
        # The layers of a windowed model that see everything are covered by `pattern`.
        if name.endswith(".bias") or name == "rope_freqs.weight":
            wrong.append(Family(s, {n: w for n, w in weights.items() if n != name}))
    for model in wrong:
        off = np.abs(model.run(ids)[1] - logits).max()
        assert off > 10 * TOLERANCE, (s["stem"], off)
    return len(wrong)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixtures", type=pathlib.Path, required=True)
    folder = parser.parse_args().fixtures / "models"
    for seed, s in enumerate(SHAPES):
        rng = np.random.default_rng(100 + seed)
        weights = write(folder / f"{s['stem']}.gguf", s, tensors(s, rng))
        model = Family(s, weights)
        ids = rng.integers(0, VOCAB, N_IDS)
        hidden, logits = model.run(ids)
        n_wrong = check_mistakes(s, weights, ids, logits)
        picked, margins = greedy(model, ids)
        save = lambda kept, value: np.save(folder / f"{s['stem']}.{kept}.npy", value.astype("<f4"))
        save("logits", logits[POSITIONS])
        save("hidden", hidden[:, HIDDEN_POSITIONS])
        manifest = dict(
            ids=ids.tolist(),
            logit_positions=POSITIONS,
            hidden_positions=HIDDEN_POSITIONS,
            greedy_ids=picked,
            greedy_margins=margins,
            recurrent_layers=[],
        )
        (folder / f"{s['stem']}.json").write_text(json.dumps(manifest) + "\n")
        print(s["stem"], "logits", logits.std().round(2), "mistakes", n_wrong, "margin", min(margins))


if __name__ == "__main__":
    main()
