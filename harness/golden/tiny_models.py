"""Tiny random Qwen3.5 hybrid and Qwen3 dense models with the head sizes of published models."""

import copy
import json
import math
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

import tiny_tokenizer

VOCAB = 512
HIDDEN = 256


def hybrid_config(n_layers, interval, n_k, n_v, tied, vocab=VOCAB):
    """A hybrid with attention heads of 256, 64 of them rotary, and delta heads of 128 by 128."""
    return Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=n_k,
        linear_num_value_heads=n_v,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        layer_types=[
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n_layers)
        ],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


def dense_config(n_layers, ffn=256, tied=True, vocab=VOCAB):
    """Qwen3 with attention heads of 128, all of them rotary."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=ffn,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


def empty(config):
    """An f32 model of a configuration, eager attention, in evaluation mode."""
    kind = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else Qwen3_5ForCausalLM
    return kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def draw(name, shape, config, g):
    """Random values for one parameter, never the default value, which would hide mistakes."""
    normal = lambda scale: scale * torch.randn(shape, generator=g)
    uniform = lambda low, high: low + (high - low) * torch.rand(shape, generator=g)
    if name.endswith("A_log"):
        return uniform(0.02, 4.0).log()
    if name.endswith("dt_bias"):
        return uniform(-4.0, 0.5)
    if "conv1d" in name:
        return normal(0.4)
    if "norm" in name:
        centred_at_one = isinstance(config, Qwen3Config) or "linear_attn.norm" in name
        stored = normal(0.2) + (1.0 if centred_at_one else 0.0)
        if name == "model.norm.weight" and config.tie_word_embeddings:
            # A tied embedding is also the LM head. A smaller embedding and final norm keep the standard
            # deviation of the logits near one.
            return 0.22 * stored - (0.0 if centred_at_one else 0.78)
        return stored
    if "embed_tokens" in name:
        return normal(0.3 if config.tie_word_embeddings else 0.7)
    return normal(0.06)


def randomise(model, seed):
    """Sets every parameter to random values that bf16 represents exactly."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(draw(name, p.shape, model.config, g).bfloat16().float())


def mtp_tensors(config, seed):
    """One multi-token-prediction block, as in published checkpoints."""
    g = torch.Generator().manual_seed(seed)
    h, d, q, kv, f = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
    )
    layer = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (2 * q * d, h),
        "self_attn.k_proj.weight": (kv * d, h),
        "self_attn.v_proj.weight": (kv * d, h),
        "self_attn.o_proj.weight": (h, q * d),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
        "mlp.gate_proj.weight": (f, h),
        "mlp.up_proj.weight": (f, h),
        "mlp.down_proj.weight": (h, f),
    }
    shapes = {f"mtp.layers.0.{k}": v for k, v in layer.items()} | {
        "mtp.fc.weight": (h, 2 * h),
        "mtp.pre_fc_norm_embedding.weight": (h,),
        "mtp.pre_fc_norm_hidden.weight": (h,),
        "mtp.norm.weight": (h,),
    }
    return {k: draw(k, v, config, g).bfloat16() for k, v in shapes.items()}


def save(model, out, table, interval=None, mtp_seed=None, chat_template=""):
    """Writes a checkpoint in the converter's format."""
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    # A copy, because a cast and its reverse would round the rotary frequencies.
    copy.deepcopy(model).bfloat16().save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [type(model).__name__]
    config["eos_token_id"] = table["tokens"].index("<|im_end|>")
    if interval is not None:
        config["full_attention_interval"] = interval
    if mtp_seed is not None:
        config["mtp_num_hidden_layers"] = 1
        weights = load_file(out / "model.safetensors")
        save_file(
            weights | mtp_tensors(model.config, mtp_seed),
            out / "model.safetensors",
            metadata={"format": "pt"},
        )
    path.write_text(json.dumps(config, indent=1))
    tiny_tokenizer.save(table, out, chat_template)


def n_params(model):
    """The number of parameters of a model."""
    return sum(math.prod(p.shape) for p in model.parameters())
