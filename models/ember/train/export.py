"""Writes the trained pair as GGUF and as Hugging Face folders, by the names and changes of the public converter.

  target.bf16.gguf          arch qwen35; norms + 1, value heads in tiled order, ssm_a = -exp(A_log), BF16 matrices;
                            with WORK_DIR/mtp-bf16-* also the multi-token-prediction head
  draft.<type>.gguf         dialect A, B or C of the drafting notes, f32, bf16 or q8_0; --window adds the sliding variant
  hf-target/, hf-draft/     config.json, model.safetensors (bf16), tokenizer

`hearth quantize target.bf16.gguf ember.gguf q4_k_m` makes the shipped file from the first.
Usage: python export.py DATA_DIR WORK_DIR OUT_DIR [--draft-type q8_0] [--dialect B] [--window N] [--no-hf]
"""
import argparse
import json
import os

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import render
from draft import DraftConfig
from parts import load_parts
from shipped import head_order, load_config

HERE = os.path.dirname(os.path.abspath(__file__))
TYPES = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
ARCH = {"A": "qwen35-dflash-draft", "B": "dflash-draft", "C": "dflash"}


def hf_config(c):
    """config.json of the text-only Qwen3.5 class."""
    return dict(
        architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", vocab_size=c.vocab, hidden_size=c.hidden,
        intermediate_size=c.ffn, num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, linear_conv_kernel_dim=c.taps, linear_key_head_dim=c.delta_dim,
        linear_value_head_dim=c.delta_dim, linear_num_key_heads=c.key_heads, linear_num_value_heads=c.value_heads,
        rms_norm_eps=c.eps, max_position_embeddings=c.context, tie_word_embeddings=True, hidden_act="silu",
        attention_bias=False, attention_dropout=0.0, full_attention_interval=c.interval,
        layer_types=["linear_attention" if c.is_linear(i) else "full_attention" for i in range(c.layers)],
        rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta, partial_rotary_factor=c.rope_dims / c.head_dim,
                             mrope_section=[11, 11, 10], mrope_interleaved=True))


def tile(x, config, unit):
    """Puts the leading value heads (rows of `unit`) of x into the order of the file."""
    order = torch.tensor(head_order(config))
    return x.view(config.value_heads, unit, -1)[order].reshape(x.shape)


def target_tensors(state, c):
    """GGUF name -> f32 tensor, from Hugging Face names."""
    out = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"] + 1}
    for i in range(c.layers):
        get = lambda name: state[f"model.layers.{i}.{name}"]
        put = lambda name, x: out.__setitem__(f"blk.{i}.{name}", x)
        put("attn_norm.weight", get("input_layernorm.weight") + 1)
        put("post_attention_norm.weight", get("post_attention_layernorm.weight") + 1)
        for name in ("gate", "up", "down"):
            put(f"ffn_{name}.weight", get(f"mlp.{name}_proj.weight"))
        if not c.is_linear(i):
            for ours, theirs in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")):
                put(f"{ours}.weight", get(f"self_attn.{theirs}.weight"))
            put("attn_q_norm.weight", get("self_attn.q_norm.weight") + 1)
            put("attn_k_norm.weight", get("self_attn.k_norm.weight") + 1)
            continue
        keys = 2 * c.key_heads * c.delta_dim
        mixed = lambda x: torch.cat([x[:keys], tile(x[keys:], c, c.delta_dim)])
        put("attn_qkv.weight", mixed(get("linear_attn.in_proj_qkv.weight")))
        put("attn_gate.weight", tile(get("linear_attn.in_proj_z.weight"), c, c.delta_dim))
        put("ssm_beta.weight", tile(get("linear_attn.in_proj_b.weight"), c, 1))
        put("ssm_alpha.weight", tile(get("linear_attn.in_proj_a.weight"), c, 1))
        put("ssm_a", -tile(get("linear_attn.A_log"), c, 1).exp())
        put("ssm_dt.bias", tile(get("linear_attn.dt_bias"), c, 1))
        put("ssm_conv1d.weight", mixed(get("linear_attn.conv1d.weight")[:, 0]))
        put("ssm_norm.weight", get("linear_attn.norm.weight"))
        put("ssm_out.weight", tile(get("linear_attn.out_proj.weight").T.contiguous(), c, c.delta_dim).T.contiguous())
    return out


def stays_f32(name, x):
    return x.ndim == 1 or "_norm.weight" in name or "hidden_norm" in name or "ssm_conv1d" in name


def add_tensors(writer, tensors, kind):
    for name, x in tensors.items():
        x = x.float().contiguous().numpy()
        if stays_f32(name, x) or kind == "f32":
            writer.add_tensor(name, x)
        else:
            writer.add_tensor(name, gguf.quants.quantize(x, TYPES[kind]), raw_dtype=TYPES[kind])


def add_tokenizer(writer, tokenizer, mask=False):
    table = json.loads(tokenizer.to_str())
    vocab = sorted(table["model"]["vocab"].items(), key=lambda item: item[1])
    assert [i for _, i in vocab] == list(range(len(vocab)))
    kinds = [gguf.TokenType.USER_DEFINED if t in render.USER_DEFINED else gguf.TokenType.CONTROL if t in render.SPECIALS
             else gguf.TokenType.NORMAL for t, _ in vocab]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([t for t, _ in vocab])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in table["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    if mask:
        writer.add_mask_token_id(tokenizer.token_to_id("<|draft_mask|>"))


def write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def about(writer, name, description):
    writer.add_name(name)
    writer.add_description(description)
    writer.add_license("apache-2.0")
    writer.add_quantization_version(2)


def mtp_tensors(state, c):
    """GGUF name -> f32 tensor of the multi-token-prediction head, in the block behind the trunk."""
    names = {"eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "shared_head_norm": "nextn.shared_head_norm",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    out = {}
    for name, x in state.items():
        name = name.removesuffix(".weight")
        out[f"blk.{c.layers}.{names[name]}.weight"] = x + 1 if "norm" in name else x
    return out


def write_target(path, state, c, tokenizer, template, mtp=None):
    """`mtp`: weights of the head that drafts several tokens; the block count leaves it out."""
    writer = gguf.GGUFWriter(path, "qwen35")
    about(writer, "ember", "a small target for trying Hearth out; trained from scratch, see models/README.md")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(c.layers)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_rope_dimension_count(c.rope_dims)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_uint32("qwen35.full_attention_interval", c.interval)
    writer.add_ssm_conv_kernel(c.taps)
    writer.add_ssm_state_size(c.delta_dim)
    writer.add_ssm_group_count(c.key_heads)
    writer.add_ssm_time_step_rank(c.value_heads)
    writer.add_ssm_inner_size(c.value_heads * c.delta_dim)
    add_tokenizer(writer, tokenizer)
    writer.add_chat_template(template)
    tensors = target_tensors(state, c)
    if mtp:
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        tensors.update(mtp_tensors(mtp, c))
    add_tensors(writer, tensors, "bf16")
    write(writer)


def draft_tensors(state, dialect):
    fc, hidden = {"C": ("fc.weight", "enc.output_norm.weight")}.get(dialect, ("dflash.fc.weight", "dflash.hidden_norm.weight"))
    out = {fc: state["fc.weight"], hidden: state["hidden_norm.weight"], "output_norm.weight": state["norm.weight"]}
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    for name, x in state.items():
        if name.startswith("layers."):
            _, i, rest = name.split(".", 2)
            out[f"blk.{i}.{names[rest.removesuffix('.weight')]}.weight"] = x
    return out


def write_draft(path, state, c, tokenizer, dialect, kind, context):
    arch = ARCH[dialect]
    writer = gguf.GGUFWriter(path, arch)
    about(writer, "ember-draft", "the block draft of ember; needs ember as its target")
    writer.add_file_type({"f32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16,
                          "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[kind])
    writer.add_block_count(c.layers)
    writer.add_context_length(context)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_rope_freq_base(c.rope_theta)
    taps = list(c.taps)
    array = lambda key, values, t: writer.add_key_value(key, values, gguf.GGUFValueType.ARRAY, sub_type=t)
    writer.add_uint32(f"{arch}.dflash.block_size" if dialect != "C" else "dflash.block_size", c.block)
    if dialect == "C":
        array("dflash.target_layers", [t + 1 for t in taps], gguf.GGUFValueType.INT32)
        writer.add_rope_dimension_sections([c.head_dim // 2, 0, 0, 0])
        add_tokenizer(writer, tokenizer, mask=True)
    else:
        array(f"{arch}.dflash.target_layer_ids", taps, gguf.GGUFValueType.INT32)
        writer.add_uint32(f"{arch}.dflash.mask_token_id", c.mask_token)
        writer.add_uint32(f"{arch}.vocab_size", c.vocab)
        if dialect == "A":
            writer.add_uint32(f"{arch}.dflash.n_target_layers", len(taps))
        else:
            writer.add_uint32(f"{arch}.dflash.n_target_features", len(taps) * c.hidden)
    if c.window and dialect != "A":
        writer.add_uint32(f"{arch}.attention.sliding_window", c.window)
        array(f"{arch}.attention.sliding_window_pattern", [c.sliding(i) for i in range(c.layers)], gguf.GGUFValueType.BOOL)
    add_tensors(writer, draft_tensors(state, dialect), kind)
    write(writer)


def write_hf(folder, state, config, tokenizer, template=None):
    os.makedirs(folder, exist_ok=True)
    save_file({k: v.to(torch.bfloat16).contiguous() for k, v in state.items()}, os.path.join(folder, "model.safetensors"),
              metadata={"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
    if template:
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
            json.dump({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                       "chat_template": template}, file, indent=1)


def draft_config(c):
    return dict(architectures=["DFlashDraftModel"], model_type="qwen3", hidden_size=c.hidden, num_hidden_layers=c.layers,
                num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, intermediate_size=c.ffn,
                vocab_size=c.vocab, rms_norm_eps=c.eps, rope_theta=c.rope_theta, block_size=c.block,
                num_target_layers=c.target_layers, use_sliding_window=c.window > 0, sliding_window=c.window or None,
                layer_types=["sliding_attention" if c.sliding(i) else "full_attention" for i in range(c.layers)],
                dflash_config=dict(mask_token_id=c.mask_token, target_layer_ids=list(c.taps)))


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("data")
    args.add_argument("work")
    args.add_argument("out")
    args.add_argument("--draft-type", default="q8_0", choices=TYPES)
    args.add_argument("--dialect", default="B", choices=ARCH)
    args.add_argument("--window", type=int, default=0)
    args.add_argument("--no-hf", action="store_true")
    args = args.parse_args()
    os.makedirs(args.out, exist_ok=True)
    tokenizer = Tokenizer.from_file(os.path.join(args.data, "tokenizer.json"))
    with open(os.path.join(HERE, "..", "chat_template.jinja"), encoding="utf-8") as file:
        template = file.read()
    c = load_config(args.work)
    state = {k: v.float() for k, v in load_parts(os.path.join(args.work, "target-bf16")).items()}
    with open(os.path.join(args.work, "draft.json")) as file:
        d = json.load(file)
    d = DraftConfig(**{**d, "taps": tuple(d["taps"]), "window": args.window})
    draft = {k: v.float() for k, v in load_parts(os.path.join(args.work, "draft-bf16")).items()}
    has_head = os.path.exists(os.path.join(args.work, "mtp-bf16-0.safetensors"))
    mtp = {k: v.float() for k, v in load_parts(os.path.join(args.work, "mtp-bf16")).items()} if has_head else None
    write_target(os.path.join(args.out, "target.bf16.gguf"), state, c, tokenizer, template, mtp)
    write_draft(os.path.join(args.out, f"draft.{args.draft_type}.gguf"), draft, d, tokenizer, args.dialect, args.draft_type, c.context)
    if not args.no_hf:
        write_hf(os.path.join(args.out, "hf-target"), state, hf_config(c), tokenizer, template)
        write_hf(os.path.join(args.out, "hf-draft"), draft, draft_config(d), tokenizer)
    for name in sorted(os.listdir(args.out)):
        path = os.path.join(args.out, name)
        if os.path.isfile(path):
            print(f"{name:24s} {os.path.getsize(path):>12,d} bytes")


if __name__ == "__main__":
    main()
