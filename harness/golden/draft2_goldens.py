"""Writes fixtures/drafts2: results of random DFlash2 and DSpark drafts for the tiny dense model.

    draft2_goldens.py --fixtures F                       writes F/drafts2
    draft2_goldens.py --fixtures F --hearth H --work W   compares a built hearth with the module

`draft2_module.py` computes them in f64. The drafts are not stored: a tensor's values follow from its name,
and `conformance::drafts2` writes the same files. Each known mistake must be far from the truth.
"""

import argparse
import json
import pathlib
import subprocess

import gguf
import numpy as np
from gguf.quants import dequantize

from draft2_module import VARIANTS, Dense, Draft2

TARGET = "dense_f16"
POSITIONS = [3, 40, 90]
TOLERANCE = 1e-3


def case(name, kind, **more):
    base = dict(
        name=name,
        kind=kind,
        sliding=[True, True],
        window=24,
        causal=False,
        block=8,
        rows=8,
        first_row=1,
        mask=511,
        capture=[0, 1],
        theta=1e7,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=192,
        eps=1e-6,
        rank=16,
        taps=2,
        group=16,
        top_k=16,
        logit_scale=1.0,
        softcap=0.0,
        d2t=None,
        own=[],
        without=[],
    )
    return base | more


CASES = [
    case("pairs", "pairs"),
    case(
        "pairs_full",
        "pairs",
        sliding=[False, True, False],
        causal=True,
        block=6,
        rows=10,
        taps=3,
        group=64,
        rank=8,
        top_k=5,
        logit_scale=0.75,
        softcap=6.0,
        capture=[1],
        own=["embedding", "head", "sinks", "post norms"],
        without=["blk.1.attn_v.weight"],
    ),
    case(
        "markov",
        "markov",
        sliding=[False, False],
        window=None,
        block=7,
        rows=7,
        first_row=0,
        own=["confidence"],
    ),
    case(
        "markov_part",
        "markov",
        block=5,
        rows=5,
        sliding=[True, False],
        rank=8,
        d2t=[(7 * i + 3) % 512 for i in range(300)],
        own=["head", "sinks", "confidence"],
        without=["conf_proj.bias"],
    ),
]


def splitmix(state, n):
    """The top bytes of the first `n` outputs of SplitMix64."""
    word = np.uint64
    with np.errstate(over="ignore"):
        z = word(state) + np.arange(1, n + 1, dtype=word) * word(0x9E3779B97F4A7C15)
        z = (z ^ (z >> word(30))) * word(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> word(27))) * word(0x94D049BB133111EB)
        return ((z ^ (z >> word(31))) >> word(56)).astype(np.int64)


# Divisor of a matrix's eight-bit values, where 2048 would make its part too weak or too strong.
DIVISORS = {
    "conv_base": 256,
    "conv_proj": 4096,
    "markov_w1": 64,
    "markov_w2": 256,
    "selector_predecessor": 64,
    "selector_successor": 256,
    "selector_hidden": 512,
    "attn_sinks": 64,
    "conf_proj": 2048,
}


def divisor(tensor):
    """The divisor of a matrix's values; None for a norm."""
    if tensor.endswith("norm.weight"):
        return None
    return next((d for part, d in DIVISORS.items() if part in tensor), 2048)


def values(case_name, tensor, shape):
    """The tensor of a name: eight-bit integers times a power of two, exact in bf16, f16 and f32."""
    seed = 0xCBF29CE484222325
    for byte in f"{case_name}/{tensor}".encode():  # FNV-1a
        seed = ((seed ^ byte) * 0x100000001B3) % 2**64
    top = splitmix(seed, int(np.prod(shape)))
    if divisor(tensor) is None:
        return ((64 + top // 2) / 128).reshape(shape)
    drawn = (2 * top - 255) / divisor(tensor)
    if tensor.endswith("conv_base"):
        # The row itself weighs most, as in a trained draft.
        drawn = drawn.reshape(shape)
        drawn[:, 0] += 1
    return drawn.reshape(shape)


def shapes(c, hidden, vocab):
    """Names and shapes [outputs, inputs] of a draft's tensors."""
    q, kv = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    part = len(c["d2t"]) if c["d2t"] else vocab
    all = {
        "fc.weight": (hidden, len(c["capture"]) * hidden),
        "enc.output_norm.weight": (hidden,),
        "output_norm.weight": (hidden,),
    }
    for i in range(len(c["sliding"])):
        layer = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "attn_q_norm": (c["head_dim"],),
            "attn_k_norm": (c["head_dim"],),
            "ffn_gate": (c["ffn"], hidden),
            "ffn_up": (c["ffn"], hidden),
            "ffn_down": (hidden, c["ffn"]),
        }
        if "sinks" in c["own"]:
            layer["attn_sinks"] = (c["heads"],)
        if "post norms" in c["own"]:
            layer |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
        if c["kind"] == "pairs":
            projected = 2 * c["taps"] * (hidden // c["group"])
            layer |= {"attn_conv_proj": (projected, hidden), "ffn_conv_proj": (projected, hidden)}
            for side in ("attn", "ffn"):
                all[f"blk.{i}.{side}_conv_base"] = (2, c["taps"], hidden)
        all |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    if "embedding" in c["own"]:
        all["token_embd.weight"] = (vocab, hidden)
    if "head" in c["own"]:
        all["output.weight"] = (part, hidden)
    if c["kind"] == "pairs":
        all["selector_hidden.weight"] = (c["rank"], hidden)
        all["selector_predecessor.weight"] = all["selector_successor.weight"] = (vocab, c["rank"])
    else:
        all["markov_w1.weight"], all["markov_w2.weight"] = (vocab, c["rank"]), (part, c["rank"])
        if "confidence" in c["own"]:
            all["conf_proj.weight"], all["conf_proj.bias"] = (1, hidden + c["rank"]), (1,)
    return {name: shape for name, shape in all.items() if name not in c["without"]}


def keys_of(c):
    """The metadata as converters to the `dflash` architecture write it: (type, key, values)."""
    count = len(c["sliding"])
    keys = [
        ("u32", "dflash.block_count", count),
        ("u32", "dflash.context_length", 4096),
        ("u32", "dflash.embedding_length", 256),
        ("u32", "dflash.feed_forward_length", c["ffn"]),
        ("u32", "dflash.attention.head_count", c["heads"]),
        ("u32", "dflash.attention.head_count_kv", c["kv_heads"]),
        ("u32", "dflash.attention.key_length", c["head_dim"]),
        ("u32", "dflash.attention.value_length", c["head_dim"]),
        ("f32", "dflash.attention.layer_norm_rms_epsilon", c["eps"]),
        ("f32", "dflash.rope.freq_base", c["theta"]),
        ("u32", "dflash.block_size", c["block"]),
        ("i32s", "dflash.target_layers", [layer + 1 for layer in c["capture"]]),
        ("u32", "tokenizer.ggml.mask_token_id", c["mask"]),
        ("bool", "dflash.attention.causal", c["causal"]),
    ]
    if c["window"]:
        keys.append(("u32", "dflash.attention.sliding_window", c["window"]))
        keys.append(("bools", "dflash.attention.sliding_window_pattern", c["sliding"]))
    if c["kind"] == "pairs":
        keys.append(("u32", "dflash.conv_kernel_size", c["taps"]))
        keys.append(("u32", "dflash.conv_group_size", c["group"]))
        keys.append(("u32", "dflash.selector_rank", c["rank"]))
        keys.append(("u32", "dflash.selector_top_k", c["top_k"]))
        if c["logit_scale"] != 1:
            keys.append(("f32", "dflash.logit_scale", c["logit_scale"]))
        if c["softcap"]:
            keys.append(("f32", "dflash.final_logit_softcapping", c["softcap"]))
    else:
        keys.append(("bool", "dflash.sample_from_anchor", c["first_row"] == 0))
    return keys


def write_gguf(path, c, tensors):
    w = gguf.GGUFWriter(path, "dflash")
    array = lambda key, values, kind: w.add_key_value(key, values, gguf.GGUFValueType.ARRAY, sub_type=kind)
    add = {
        "u32": w.add_uint32,
        "f32": w.add_float32,
        "bool": w.add_bool,
        "i32s": lambda key, values: array(key, values, gguf.GGUFValueType.INT32),
        "bools": lambda key, values: array(key, values, gguf.GGUFValueType.BOOL),
    }
    for kind, key, value in keys_of(c):
        add[kind](key, value)
    for name, x in tensors.items():
        w.add_tensor(name, x.astype(np.float32))
    if c["d2t"]:
        w.add_tensor("d2t", np.array(c["d2t"], dtype=np.int64))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def description(c, tensors, expected):
    """The case and its results as lines of words, which `conformance::drafts2` reads."""
    words = lambda value: " ".join(str(v) for v in (value if isinstance(value, list) else [value]))
    yield f"rows {c['rows']}"
    for kind, key, value in keys_of(c):
        yield f"key {key} {kind} {words(value).lower()}"
    for name, x in tensors.items():
        yield f"tensor {name} {divisor(name) or 'norm'} {words(list(x.shape))}"
    if c["d2t"]:
        yield f"d2t {words(c['d2t'])}"
    for at, (_, chain, lists) in expected.items():
        yield f"at {at}"
        yield f"chain {words(chain)}"
        for row in lists:
            if "confidence" in row:
                yield f"confidence {row['confidence']:.6f}"
            yield f"ids {words(row['ids'])}"
            yield "log_probs " + " ".join(f"{v:.6f}" for v in row["log_probs"])


def target_of(fixtures):
    reader = gguf.GGUFReader(fixtures / "models" / f"{TARGET}.gguf")
    key = lambda name: reader.fields[f"qwen3.{name}"].contents()
    tensors = {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    sizes = dict(
        layers=key("block_count"),
        dim=key("attention.key_length"),
        theta=key("rope.freq_base"),
        eps=key("attention.layer_norm_rms_epsilon"),
    )
    return Dense(tensors, sizes)


def hearth_error(arg, c, tensors, ids, expected):
    """The largest logit error of a built hearth with this draft, and whether its chain agrees."""
    work = arg.work / c["name"]
    work.mkdir(parents=True, exist_ok=True)
    write_gguf(work / "draft.gguf", c, tensors)
    (work / "ids.json").write_text(json.dumps(ids))
    worst = 0.0
    for at, (logits, chain, _) in expected.items():
        command = [arg.hearth, "eval", arg.fixtures / "models" / f"{TARGET}.gguf", "--cpu-reference"]
        command += ["--draft", work / "draft.gguf", "--ids", work / "ids.json", "--at", str(at)]
        command += ["--draft-width", str(c["rows"])] if c["rows"] != c["block"] else []
        command += ["--draft-logits", work / "out.npy", "--draft-chain", work / "chain.json"]
        subprocess.run(command, check=True, capture_output=True)
        found = np.load(work / "out.npy")
        finite = np.isfinite(logits)
        assert (np.isfinite(found) == finite).all()
        worst = max(worst, float(np.abs(found[finite] - logits[finite]).max()))
        assert json.loads((work / "chain.json").read_text()) == chain, (c["name"], at)
    return worst


def check_mistakes(c, tensors, target, streams, ids, expected):
    """The mean distance of every known mistake that applies to the case."""
    far = {}
    for variant, kind in VARIANTS.items():
        applies = kind in (c["kind"], "both")
        applies &= variant != "window off by one" or any(c["sliding"])
        applies &= variant != "no sinks" or "sinks" in c["own"]
        if not applies:
            continue
        at = POSITIONS[-1]
        features = np.concatenate([streams[i][:at] for i in c["capture"]], -1)
        wrong = Draft2(tensors, c, variant).draft(target.t, features, ids[at])[0]
        right = expected[at][0]
        finite = np.isfinite(right)
        far[variant] = float(np.abs(wrong[finite] - right[finite]).mean())
        assert far[variant] > 10 * TOLERANCE, (c["name"], variant, far[variant])
    return far


def main():
    arg = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arg.add_argument("--fixtures", required=True, type=pathlib.Path)
    arg.add_argument("--hearth", type=pathlib.Path, help="compare this executable; write no fixtures")
    arg.add_argument("--work", type=pathlib.Path, help="scratch folder, with --hearth")
    arg = arg.parse_args()
    target = target_of(arg.fixtures)
    ids = json.loads((arg.fixtures / "models" / f"{TARGET}.json").read_text())["ids"]
    streams, logits = target.run(ids)
    at = json.loads((arg.fixtures / "models" / f"{TARGET}.json").read_text())["logit_positions"]
    off = np.abs(np.load(arg.fixtures / "models" / f"{TARGET}.logits.npy") - logits[at]).max()
    assert off < 1e-4, f"the target is {off} off the published modules"
    vocab, hidden = target.t["token_embd.weight"].shape
    for c in CASES:
        tensors = {name: values(c["name"], name, shape) for name, shape in shapes(c, hidden, vocab).items()}
        draft, expected = Draft2(tensors, c), {}
        for at in POSITIONS:
            features = np.concatenate([streams[i][:at] for i in c["capture"]], -1)
            expected[at] = draft.draft(target.t, features, ids[at])
        far = check_mistakes(c, tensors, target, streams, ids, expected)
        rows = expected[POSITIONS[0]][0]
        spread = rows[np.isfinite(rows)].std()
        print(c["name"], f"std {spread:.2f}", {k: round(v, 3) for k, v in far.items()})
        if arg.hearth:
            worst = hearth_error(arg, c, tensors, ids, expected)
            print(c["name"], f"{worst:.1e}", flush=True)
            assert worst < TOLERANCE, worst
            continue
        folder = arg.fixtures / "drafts2"
        folder.mkdir(exist_ok=True)
        rows = np.stack([expected[at][0] for at in POSITIONS])
        np.save(folder / f"{c['name']}.npy", np.ascontiguousarray(rows, dtype="<f4"))
        lines = "".join(line + "\n" for line in description(c, tensors, expected))
        (folder / f"{c['name']}.txt").write_text(lines)


if __name__ == "__main__":
    main()
