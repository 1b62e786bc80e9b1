"""Writes a DFlash2 or DSpark draft as GGUF of arch dflash: matrices in Q8_0, norms, convolution bases and biases in F32.

Usage: python export_draft2.py dflash2|dspark DATA_DIR WORK_DIR OUT.gguf
"""
import json
import os
import sys

import gguf
from tokenizers import Tokenizer

from draft2 import Draft2Config
from export import about, add_tensors, add_tokenizer, draft_tensors, write
from parts import load_parts

OWN = {"selector_hidden.weight": "selector_hidden.weight", "selector_predecessor.weight": "selector_predecessor.weight",
       "selector_successor.weight": "selector_successor.weight", "markov_w1.weight": "markov_w1.weight",
       "markov_w2.weight": "markov_w2.weight", "conf_proj.weight": "conf_proj.weight", "conf_proj.bias": "conf_proj.bias"}


def tensors_of(state):
    """GGUF name -> f32 tensor."""
    out = draft_tensors({k: v for k, v in state.items() if "_conv." not in k and k not in OWN}, "C")
    out.update({OWN[k]: v for k, v in state.items() if k in OWN})
    for name, x in state.items():
        if "_conv." in name:
            sort, i, part = name.split(".", 2)
            # attn_conv_base [H, taps, 2] in the order of the format, without an ending; attn_conv_proj.weight
            out[f"blk.{i}.{sort}_{part}"] = x.permute(2, 1, 0).contiguous() if part == "base" else x
    return out


def main():
    kind, data, work, path = sys.argv[1:]
    with open(os.path.join(work, f"{kind}.json")) as file:
        c = json.load(file)
    c = Draft2Config(**{**c, "taps": tuple(c["taps"])})
    state = {k: v.float() for k, v in load_parts(os.path.join(work, f"{kind}-bf16")).items()}
    tokenizer = Tokenizer.from_file(os.path.join(data, "tokenizer.json"))
    writer = gguf.GGUFWriter(path, "dflash")
    about(writer, f"ember-{kind}", "a block draft of ember; needs ember as its target")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(c.layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_rope_dimension_sections([c.head_dim // 2, 0, 0, 0])
    writer.add_uint32("dflash.block_size", c.block)
    writer.add_key_value("dflash.target_layers", [t + 1 for t in c.taps], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.INT32)
    if kind == "dflash2":
        writer.add_uint32("dflash.conv_kernel_size", c.conv_taps)
        writer.add_uint32("dflash.conv_group_size", c.conv_group)
        writer.add_uint32("dflash.selector_rank", c.rank)
        writer.add_uint32("dflash.selector_top_k", c.top)
    else:
        writer.add_bool("dflash.sample_from_anchor", True)
    writer.add_bool("dflash.attention.causal", False)
    add_tokenizer(writer, tokenizer, mask=True)
    small = {k: v for k, v in tensors_of(state).items() if v.shape[-1] % 32 or k.endswith("_base") or k.startswith("conf_proj")}
    add_tensors(writer, small, "f32")
    add_tensors(writer, {k: v for k, v in tensors_of(state).items() if k not in small}, "q8_0")
    write(writer)
    print(f"{path}: {os.path.getsize(path):,d} bytes")


if __name__ == "__main__":
    main()
