"""Writes the mixtures of experts of fixtures/models: tiny random models, with results by another program.

    moe_goldens.py --fixtures F

`moe_module.py` computes the values in f64 on the stored weights. Every part must matter: each model is
computed again without it, and has to differ by far more than the tests allow. No row of a model may be so
near to other experts that f32 could choose them. Needs only `numpy` and `gguf`.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from moe_module import Moe

VOCAB = 512
N_IDS = 72
POSITIONS = [0, 1, 5, 11, 20, 29, 40, 47, 52, 58, 63, 64, 71]
HIDDEN_POSITIONS = [0, 50, 71]
GREEDY = 8
TOLERANCE = 1e-4
# Gaps of the router, in log-probabilities, below which sums of f32 might choose otherwise.
LEAST_GAP = 2e-4
TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}


def shape(stem, arch, ty, **more):
    hybrid = arch == "qwen35moe"
    base = dict(
        stem=stem,
        arch=arch,
        ty=ty,
        layers=2,
        # The kernels of the GPU take heads of 64, delta heads of 128 and widths of multiples of 128.
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=64,
        rope_dims=16 if hybrid else 64,
        theta=1e7 if hybrid else 1e6,
        eps=1e-6,
        gated=hybrid,
        ffn_norm="post_attention_norm" if hybrid else "ffn_norm",
        recurrent=[],
        k_heads=1,
        v_heads=2,
        state=128,
        experts=6,
        used=[3, 3, 3],
        widths=[128, 128, 128],
        shared_width=0,
        shared_gate=True,
        fused=False,
        swapped=False,
        scale=1.0,
        scale_key=None,
        renormalised=True,
        mtp=False,
        tied=True,
    )
    return base | more


SHAPES = [
    # Counts and widths by layer, a factor on the experts' weights.
    shape("qwen3moe_q8_0", "qwen3moe", "q8_0", experts=4, used=[1, 2], widths=[128, 256], scale=1.5, scale_key=1.5),
    # Fused gate and up, a shared expert of another width, a head of its own.
    shape(
        "qwen35moe_fused_q5_0",
        "qwen35moe",
        "q5_0",
        recurrent=[0],
        shared_width=256,
        fused=True,
        tied=False,
    ),
    # A prediction head, whose layer has experts too; a scale of 0 means none.
    shape(
        "qwen35moe_mtp_q4_1",
        "qwen35moe",
        "q4_1",
        recurrent=[0],
        shared_width=128,
        used=[4, 4, 4],
        scale_key=0.0,
        mtp=True,
    ),
]

MISTAKES = {
    "qwen3moe_q8_0": [dict(used=[2, 2]), dict(used=[1, 1]), dict(scale=1.0), dict(renormalised=False)],
    "qwen35moe_fused_q5_0": [
        dict(swapped=True),
        dict(shared_gate=False),
        dict(shared_width=0),
        dict(renormalised=False),
        dict(used=[2, 3, 3]),
    ],
    "qwen35moe_mtp_q4_1": [dict(shared_width=0), dict(used=[4, 3, 4]), dict(shared_gate=False)],
}


def tensors(s, rng):
    """Names to f32 arrays; matrices keep the scale of what goes through."""
    h, d, n = s["hidden"], s["head_dim"], s["experts"]
    q, kv = s["heads"] * d, s["kv_heads"] * d
    matrix = lambda rows, cols, gain=1.0: gain * rng.standard_normal((rows, cols)) / np.sqrt(cols)
    stack = lambda rows, cols, gain=1.0: gain * rng.standard_normal((n, rows, cols)) / np.sqrt(cols)
    norm = lambda size, mean=1.0: mean + 0.2 * rng.standard_normal(size)
    out = {"token_embd.weight": matrix(VOCAB, h, np.sqrt(h))}
    for i in range(s["layers"] + s["mtp"]):
        b, f = f"blk.{i}.", s["widths"][i]
        out[b + "attn_norm.weight"] = norm(h)
        out[b + s["ffn_norm"] + ".weight"] = norm(h)
        if i in s["recurrent"]:
            n_k, n_v, state = s["k_heads"], s["v_heads"], s["state"]
            channels = (2 * n_k + n_v) * state
            out[b + "attn_qkv.weight"] = matrix(channels, h)
            out[b + "attn_gate.weight"] = matrix(n_v * state, h)
            out[b + "ssm_beta.weight"] = matrix(n_v, h)
            out[b + "ssm_alpha.weight"] = matrix(n_v, h)
            out[b + "ssm_a"] = -np.exp(rng.uniform(-4.0, 1.4, n_v))
            out[b + "ssm_dt.bias"] = rng.uniform(-4.0, 0.5, n_v)
            out[b + "ssm_conv1d.weight"] = 0.4 * rng.standard_normal((channels, 4))
            out[b + "ssm_norm.weight"] = norm(state)
            out[b + "ssm_out.weight"] = matrix(h, n_v * state)
        else:
            out[b + "attn_q.weight"] = matrix(q * (1 + s["gated"]), h, 1.5)
            out[b + "attn_k.weight"] = matrix(kv, h, 1.5)
            out[b + "attn_v.weight"] = matrix(kv, h)
            out[b + "attn_output.weight"] = matrix(h, q)
            out[b + "attn_q_norm.weight"] = norm(d, 1.5)
            out[b + "attn_k_norm.weight"] = norm(d, 1.5)
        out[b + "ffn_gate_inp.weight"] = matrix(n, h)
        if s["fused"]:
            out[b + "ffn_gate_up_exps.weight"] = stack(2 * f, h, 1.5)
        else:
            out[b + "ffn_gate_exps.weight"] = stack(f, h, 2.0)
            out[b + "ffn_up_exps.weight"] = stack(f, h)
        out[b + "ffn_down_exps.weight"] = stack(h, f)
        if s["shared_width"]:
            f = s["shared_width"]
            out[b + "ffn_gate_inp_shexp.weight"] = rng.standard_normal(h) / np.sqrt(h)
            out[b + "ffn_gate_shexp.weight"] = matrix(f, h, 2.0)
            out[b + "ffn_up_shexp.weight"] = matrix(f, h)
            out[b + "ffn_down_shexp.weight"] = matrix(h, f)
    if s["mtp"]:
        b = f"blk.{s['layers']}.nextn."
        out[b + "eh_proj.weight"] = matrix(h, 2 * h)
        for name in ["enorm", "hnorm", "shared_head_norm"]:
            out[f"{b}{name}.weight"] = norm(h)
    # Logits of about one unit: the embedding's rows are wider than those of a head.
    out["output_norm.weight"] = norm(h) * (0.12 if s["tied"] else 1.0)
    if not s["tied"]:
        out["output.weight"] = matrix(VOCAB, h)
    return {name: value.astype(np.float32) for name, value in out.items()}


def vocabulary(writer, s):
    letters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [chr(b) for b in letters] + [chr(0x100 + i) for i in range(256 - len(letters))]
    tokens += ["ab", "cd"]
    kinds = [1] * len(tokens)
    tokens += [f"<|special {i}|>" for i in range(VOCAB - len(tokens))]
    kinds += [3] * (VOCAB - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if s["arch"] == "qwen35moe" else "qwen2")
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def by_layer(values, blocks):
    """One number where all blocks have the same."""
    values = values[:blocks]
    return values[0] if len(set(values)) == 1 else values


def write(path, s, weights):
    """Writes the file; returns the stored weights in f64."""
    writer, arch = gguf.GGUFWriter(str(path), s["arch"]), s["arch"]
    blocks = s["layers"] + s["mtp"]
    writer.add_name(s["stem"])
    writer.add_block_count(blocks)
    writer.add_context_length(512)
    writer.add_embedding_length(s["hidden"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv_heads"])
    writer.add_key_length(s["head_dim"])
    writer.add_value_length(s["head_dim"])
    writer.add_layer_norm_rms_eps(s["eps"])
    writer.add_rope_freq_base(s["theta"])
    writer.add_uint32(f"{arch}.expert_count", s["experts"])
    for key, values in [("expert_used_count", s["used"]), ("expert_feed_forward_length", s["widths"])]:
        value = by_layer(values, blocks)
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{arch}.{key}", value)
    if s["shared_width"]:
        writer.add_uint32(f"{arch}.expert_shared_feed_forward_length", s["shared_width"])
    if s["scale_key"] is not None:
        writer.add_float32(f"{arch}.expert_weights_scale", s["scale_key"])
    if s["mtp"]:
        writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    if arch == "qwen35moe":
        writer.add_uint32(f"{arch}.rope.dimension_count", s["rope_dims"])
        writer.add_array(f"{arch}.attention.recurrent_layers", [i in s["recurrent"] for i in range(blocks)])
        writer.add_uint32(f"{arch}.ssm.conv_kernel", 4)
        writer.add_uint32(f"{arch}.ssm.state_size", s["state"])
        writer.add_uint32(f"{arch}.ssm.group_count", s["k_heads"])
        writer.add_uint32(f"{arch}.ssm.time_step_rank", s["v_heads"])
        writer.add_uint32(f"{arch}.ssm.inner_size", s["v_heads"] * s["state"])
    vocabulary(writer, s)
    stored = {}
    for name, value in weights.items():
        # As llama.cpp's quantiser: routers, taps and vectors stay f32.
        if value.ndim == 1 or "ssm_conv1d" in name or "ffn_gate_inp" in name:
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
    ids, picked, margins, least = list(ids), [], [], np.inf
    for _ in range(GREEDY):
        row = model.run(np.array(ids))[1][-1]
        least = min(least, np.min(model.gaps))
        second, first = np.argsort(row)[-2:]
        picked.append(int(first))
        margins.append(float(row[first] - row[second]))
        ids.append(picked[-1])
    return picked, margins, least


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixtures", type=pathlib.Path, required=True)
    folder = parser.parse_args().fixtures / "models"
    for seed, s in enumerate(SHAPES):
        rng = np.random.default_rng(200 + seed)
        weights = write(folder / f"{s['stem']}.gguf", s, tensors(s, rng))
        model = Moe(s, weights)
        while True:
            ids = rng.integers(0, VOCAB, N_IDS)
            hidden, logits = model.run(ids)
            gaps, states = np.stack(model.gaps), model.states
            picked, margins, least = greedy(model, ids)
            if least > LEAST_GAP:
                break
        for mistake in MISTAKES[s["stem"]]:
            off = np.abs(Moe(s | mistake, weights).run(ids)[1] - logits).max()
            assert off > 10 * TOLERANCE, (s["stem"], mistake, off)
        save = lambda kept, value: np.save(folder / f"{s['stem']}.{kept}.npy", value.astype("<f4"))
        save("logits", logits[POSITIONS])
        save("hidden", hidden[:, HIDDEN_POSITIONS])
        if 0 in states:
            save("delta", states[0][0])
            save("conv", states[0][1])
        manifest = dict(
            ids=ids.tolist(),
            logit_positions=POSITIONS,
            hidden_positions=HIDDEN_POSITIONS,
            greedy_ids=picked,
            greedy_margins=margins,
            recurrent_layers=s["recurrent"],
            router_gaps=gaps.min(0)[POSITIONS].round(5).tolist(),
        )
        (folder / f"{s['stem']}.json").write_text(json.dumps(manifest) + "\n")
        near = (gaps.min(0) < 0.05).mean()
        print(s["stem"], "logits", logits.std().round(2), "gap", least, "near", near, "margin", min(margins))


if __name__ == "__main__":
    main()
