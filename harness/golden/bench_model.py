"""Writes a GGUF with the exact shapes of Qwen3.5-0.8B in Q4_K_M and random weights, for speed only.

Rows come from a pool that ggml quantised, so writing takes seconds; the model's output is meaningless.
"""

import argparse

import gguf
import numpy as np

import tiny_tokenizer
from ggml_lib import Ggml

HIDDEN, FFN, LAYERS, INTERVAL, VOCAB = 1024, 3584, 24, 4, 248320
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 256
N_K, N_V, STATE, CONV_WIDTH = 16, 16, 128, 4
KEY_DIM, VALUE_DIM = N_K * STATE, N_V * STATE
POOL = 512


class Rows:
    """Pools of quantised random rows by type and length."""

    def __init__(self, library, rng):
        self.ggml, self.rng, self.pools = Ggml(library), rng, {}

    def matrix(self, kind, n_in, n_out):
        if (kind, n_in) not in self.pools:
            rows = self.rng.standard_normal((POOL, n_in), dtype=np.float32) / np.sqrt(n_in)
            self.pools[kind, n_in] = self.ggml.quantize(kind, rows)
        return self.pools[kind, n_in][self.rng.integers(0, POOL, n_out)]


def has_six_bits(i, n):
    """Whether the Q4_K_M recipe gives this block's sensitive matrices six bits."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def blocks(i, attention):
    """(name, n_in, n_out, type) of each matrix of block i."""
    six = "q6_k" if has_six_bits(i, LAYERS) else "q4_k"
    yield from [
        ("ffn_gate.weight", HIDDEN, FFN, "q4_k"),
        ("ffn_up.weight", HIDDEN, FFN, "q4_k"),
        ("ffn_down.weight", FFN, HIDDEN, six),
    ]
    if attention:
        yield from [
            ("attn_q.weight", HIDDEN, 2 * HEADS * HEAD_DIM, "q4_k"),
            ("attn_k.weight", HIDDEN, KV_HEADS * HEAD_DIM, "q4_k"),
            ("attn_v.weight", HIDDEN, KV_HEADS * HEAD_DIM, six),
            ("attn_output.weight", HEADS * HEAD_DIM, HIDDEN, "q4_k"),
        ]
    else:
        yield from [
            ("attn_qkv.weight", HIDDEN, 2 * KEY_DIM + VALUE_DIM, six),
            ("attn_gate.weight", HIDDEN, VALUE_DIM, "q4_k"),
            ("ssm_beta.weight", HIDDEN, N_V, "q4_k"),
            ("ssm_alpha.weight", HIDDEN, N_V, "q4_k"),
            ("ssm_out.weight", VALUE_DIM, HIDDEN, "q4_k"),
        ]


def metadata(w, vocabulary):
    a = "qwen35"
    for key, value in {
        "block_count": LAYERS,
        "context_length": 262144,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": 64,
        "full_attention_interval": INTERVAL,
        "ssm.conv_kernel": CONV_WIDTH,
        "ssm.state_size": STATE,
        "ssm.group_count": N_K,
        "ssm.time_step_rank": N_V,
        "ssm.inner_size": VALUE_DIM,
    }.items():
        w.add_uint32(f"{a}.{key}", value)
    w.add_float32(f"{a}.attention.layer_norm_rms_epsilon", 1e-6)
    w.add_float32(f"{a}.rope.freq_base", 1e7)
    w.add_array(f"{a}.rope.dimension_sections", [11, 11, 10, 0])
    w.add_file_type(15)
    w.add_quantization_version(2)
    tokens, types, merges = tiny_tokenizer.published(vocabulary)
    end = tokens.index("<|im_end|>")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens + [f"[PAD{i}]" for i in range(len(tokens), VOCAB)])
    w.add_token_types(list(types) + [5] * (VOCAB - len(tokens)))
    w.add_token_merges(merges)
    w.add_eos_token_id(end)
    w.add_bool("tokenizer.ggml.add_bos_token", False)


def main():
    arg = argparse.ArgumentParser(description=__doc__)
    arg.add_argument("--llama", required=True, help="llama.cpp source tree, for the vocabulary")
    arg.add_argument("--ggml", required=True, help="libggml-base.so")
    arg.add_argument("--out", required=True)
    arg = arg.parse_args()
    rng = np.random.default_rng(8)
    rows = Rows(arg.ggml, rng)
    w = gguf.GGUFWriter(arg.out, "qwen35")
    metadata(w, f"{arg.llama}/models/ggml-vocab-qwen35.gguf")

    def add(name, n_in, n_out, kind):
        w.add_tensor(name, rows.matrix(kind, n_in, n_out), raw_dtype=gguf.GGMLQuantizationType[kind.upper()])

    def plain(name, values):
        w.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    ones = lambda n: 1.0 + 0.1 * rng.standard_normal(n)
    add("token_embd.weight", HIDDEN, VOCAB, "q6_k")
    plain("output_norm.weight", ones(HIDDEN))
    for i in range(LAYERS):
        attention = (i + 1) % INTERVAL == 0
        for name, n_in, n_out, kind in blocks(i, attention):
            add(f"blk.{i}.{name}", n_in, n_out, kind)
        plain(f"blk.{i}.attn_norm.weight", ones(HIDDEN))
        plain(f"blk.{i}.post_attention_norm.weight", ones(HIDDEN))
        if attention:
            plain(f"blk.{i}.attn_q_norm.weight", ones(HEAD_DIM))
            plain(f"blk.{i}.attn_k_norm.weight", ones(HEAD_DIM))
        else:
            plain(f"blk.{i}.ssm_a", -rng.uniform(0.02, 4.0, N_V))
            plain(f"blk.{i}.ssm_dt.bias", rng.uniform(-4.0, 0.5, N_V))
            convolution = rng.standard_normal((2 * KEY_DIM + VALUE_DIM, CONV_WIDTH))
            plain(f"blk.{i}.ssm_conv1d.weight", 0.4 * convolution)
            plain(f"blk.{i}.ssm_norm.weight", ones(STATE))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
