"""Reads the shipped GGUF pair back into the PyTorch modules, dequantised, undoing the changes of `export.py`."""
import gguf
import numpy as np
import torch

from draft import Draft, DraftConfig
from export import ARCH, draft_tensors
from shipped import head_order
from target import Target, TargetConfig


def tensors(path):
    """Name -> f32 tensor, and the reader for metadata."""
    reader = gguf.GGUFReader(path)
    out = {}
    for t in reader.tensors:
        x = gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in reversed(t.shape)])
        out[t.name] = torch.from_numpy(np.array(x, dtype=np.float32))
    return out, reader


def untile(x, c, unit):
    order = torch.tensor(head_order(c))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return x.view(c.value_heads, unit, -1)[back].reshape(x.shape)


def target_state(g, c):
    """Hugging Face names -> f32, from GGUF names."""
    out = {"model.embed_tokens.weight": g["token_embd.weight"], "model.norm.weight": g["output_norm.weight"] - 1}
    for i in range(c.layers):
        get = lambda name: g[f"blk.{i}.{name}"]
        put = lambda name, x: out.__setitem__(f"model.layers.{i}.{name}", x.contiguous())
        put("input_layernorm.weight", get("attn_norm.weight") - 1)
        put("post_attention_layernorm.weight", get("post_attention_norm.weight") - 1)
        for name in ("gate", "up", "down"):
            put(f"mlp.{name}_proj.weight", get(f"ffn_{name}.weight"))
        if not c.is_linear(i):
            for ours, theirs in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")):
                put(f"self_attn.{theirs}.weight", get(f"{ours}.weight"))
            put("self_attn.q_norm.weight", get("attn_q_norm.weight") - 1)
            put("self_attn.k_norm.weight", get("attn_k_norm.weight") - 1)
            continue
        keys = 2 * c.key_heads * c.delta_dim
        mixed = lambda x: torch.cat([x[:keys], untile(x[keys:], c, c.delta_dim)])
        put("linear_attn.in_proj_qkv.weight", mixed(get("attn_qkv.weight")))
        put("linear_attn.in_proj_z.weight", untile(get("attn_gate.weight"), c, c.delta_dim))
        put("linear_attn.in_proj_b.weight", untile(get("ssm_beta.weight"), c, 1))
        put("linear_attn.in_proj_a.weight", untile(get("ssm_alpha.weight"), c, 1))
        put("linear_attn.A_log", untile((-get("ssm_a")).log(), c, 1))
        put("linear_attn.dt_bias", untile(get("ssm_dt.bias"), c, 1))
        put("linear_attn.conv1d.weight", mixed(get("ssm_conv1d.weight"))[:, None])
        put("linear_attn.norm.weight", get("ssm_norm.weight"))
        put("linear_attn.out_proj.weight", untile(get("ssm_out.weight").T.contiguous(), c, c.delta_dim).T)
    return out


def load_draft(path, window=0):
    """The draft in f32 on the CPU, from dialect B."""
    g, reader = tensors(path)
    field = lambda key: reader.get_field(f"{ARCH['B']}.{key}").contents()
    d = DraftConfig(taps=tuple(field("dflash.target_layer_ids")), mask_token=field("dflash.mask_token_id"),
                    block=field("dflash.block_size"), layers=field("block_count"), window=window)
    draft = Draft(d)
    names = {v: k for k, v in draft_names(draft).items()}
    draft.load_state_dict({names[n]: x for n, x in g.items()})
    return draft.eval().requires_grad_(False)


def load_pair(target_path, draft_path, window=0):
    """(Target, Draft) in f32 on the CPU; the draft in dialect B."""
    c = TargetConfig()
    target = Target(c)
    target.load_state_dict(target_state(tensors(target_path)[0], c))
    return target.eval().requires_grad_(False), load_draft(draft_path, window)


def draft_names(draft):
    """safetensors name -> GGUF name of dialect B."""
    state = draft.state_dict()
    renamed = draft_tensors({k: k for k in state}, "B")
    return {v: k for k, v in renamed.items()}
