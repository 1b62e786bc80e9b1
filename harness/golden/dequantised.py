"""Loads a GGUF's weights into a Hugging Face model and reverses the conversion."""

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def gguf_to_hf_heads(n_k, n_v):
    """The GGUF head index of every HF value head."""
    r = n_v // n_k
    return np.array([(i % r) * n_k + i // r for i in range(n_v)])


def hf_to_gguf_heads(n_k, n_v):
    """The HF head index of every GGUF value head."""
    return np.argsort(gguf_to_hf_heads(n_k, n_v))


def _unpermute(x, axis, start, heads, width):
    """Reorders the head blocks of `axis` that begin at `start`."""
    x = np.moveaxis(x, axis, 0)
    head, tail = x[:start], x[start:]
    tail = tail.reshape(len(heads), width, *tail.shape[1:])[heads].reshape(tail.shape)
    return np.moveaxis(np.concatenate([head, tail]), 0, axis)


def load(path, model):
    """Loads the file's weights into `model` in f32. Returns type name -> tensor count."""
    config = model.config
    hybrid = hasattr(config, "linear_num_key_heads")
    if hybrid:
        n_k, n_v = config.linear_num_key_heads, config.linear_num_value_heads
        heads, key_dim = gguf_to_hf_heads(n_k, n_v), n_k * config.linear_key_head_dim
        permuted = {  # name -> (axis, first index, rows per head)
            "attn_qkv.weight": (0, 2 * key_dim, 128),
            "attn_gate.weight": (0, 0, 128),
            "ssm_beta.weight": (0, 0, 1),
            "ssm_alpha.weight": (0, 0, 1),
            "ssm_a": (0, 0, 1),
            "ssm_dt.bias": (0, 0, 1),
            "ssm_conv1d.weight": (0, 2 * key_dim, 128),
            "ssm_out.weight": (1, 0, 128),
        }
    params = dict(model.named_parameters())
    missing, types = set(params), {}
    for tensor in gguf.GGUFReader(path).tensors:
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + 1
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name
        if name in GLOBAL:
            target, short = GLOBAL[name], name
        else:
            _, index, short = name.split(".", 2)
            if int(index) >= config.num_hidden_layers:
                continue  # a prediction block
            target = f"model.layers.{index}.{LAYER[short]}"
        if hybrid:
            if short in permuted:
                axis, start, width = permuted[short]
                value = _unpermute(value, axis, start, heads, width)
            if short.endswith("norm.weight") and short != "ssm_norm.weight":
                value = value - np.float32(1.0)
            if short == "ssm_a":
                value = np.log(-value.astype(np.float64)).astype(np.float32)
            if short == "ssm_conv1d.weight":
                value = value[:, None, :]
        with torch.no_grad():
            params[target].copy_(torch.from_numpy(np.ascontiguousarray(value)))
        missing.discard(target)
    assert not missing, missing
    return types
