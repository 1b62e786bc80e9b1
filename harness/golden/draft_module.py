"""The published block draft as a PyTorch module in f32, built from transformers' Qwen3 layers.

Parameter names and operations are those of the DFlash module for the published safetensors files. Queries
come from the block; keys and values come from the context's features and from the block. Features have no
input norm, rope uses absolute positions, and the LM head is the target's.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half


def is_sliding(config, layer):
    return config.layer_types[layer] == "sliding_attention"


def is_causal(config, layer):
    """Whether attention within the block is causal.

    `is_causal` decides, else `dflash_config.causal`; by default, layers with a sliding window are causal.
    """
    nested = getattr(config, "dflash_config", None) or {}
    for setting in (getattr(config, "is_causal", None), nested.get("causal")):
        if setting is not None:
            return bool(setting)
    return is_sliding(config, layer)


def visible(config, layer, context, block):
    """Boolean attention mask [block, context + block]: the keys that each row of the block attends to."""
    row = context + torch.arange(block)[:, None]
    key = torch.arange(context + block)[None]
    mask = torch.ones(block, context + block, dtype=torch.bool)
    if is_causal(config, layer):
        mask &= key <= row
    if is_sliding(config, layer):
        mask &= row - key < config.sliding_window
    return mask


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)

    def forward(self, x, features, rope):
        """x [block, hidden], features [context, hidden], rope: cosines and sines of all positions."""
        config, dim = self.config, self.config.head_dim
        heads = lambda rows: rows.unflatten(-1, (-1, dim)).transpose(0, 1)
        both = lambda linear: torch.cat([linear(features), linear(x)])
        rotate = lambda rows, cos, sin: rows * cos + rotate_half(rows) * sin
        cos, sin = rope
        n = x.shape[0]
        q = rotate(self.q_norm(heads(self.q_proj(x))), cos[-n:], sin[-n:])
        k = rotate(self.k_norm(heads(both(self.k_proj))), cos, sin)
        v = heads(both(self.v_proj))
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (t.repeat_interleave(groups, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * dim**-0.5
        mask = visible(config, self.layer, features.shape[0], n)
        scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.o_proj((scores @ v).transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x, features, rope):
        x = x + self.self_attn(self.input_layernorm(x), features, rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        capture_layers = config.dflash_config["target_layer_ids"]
        self.fc = nn.Linear(len(capture_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def forward(self, embeddings, hidden):
        """embeddings: the block [block, hidden]; hidden: the context [context, capture_layers * hidden]."""
        features = self.hidden_norm(self.fc(hidden))
        positions = torch.arange(hidden.shape[0] + embeddings.shape[0])[None]
        rope = [t[0] for t in self.rotary_emb(embeddings, positions)]
        x = embeddings
        for layer in self.layers:
            x = layer(x, features, rope)
        return self.norm(x)


class HiddenStateCapture:
    """Captures the residual stream after chosen layers of a target with hooks.

    The hidden states that transformers returns would not do: the last one is after the final norm.
    """

    def __init__(self, target, layers):
        self.captured = {}
        capture = lambda layer: (
            lambda _module, _inputs, out: self.captured.__setitem__(
                layer, (out[0] if isinstance(out, tuple) else out)[0].detach()
            )
        )
        self.hooks = [target.model.layers[i].register_forward_hook(capture(i)) for i in layers]
        self.layers = layers

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        return torch.cat([self.captured[i] for i in self.layers], -1)


@torch.no_grad()
def logits(draft, target, ids, at):
    """f32 logits `[block - 1, vocab]` of the block with root `ids[at]` after the context `ids[:at]`."""
    config = draft.config
    capture = HiddenStateCapture(target, config.dflash_config["target_layer_ids"])
    target(torch.tensor([ids[:at]]))
    hidden = capture.stop()
    block = [ids[at]] + [config.dflash_config["mask_token_id"]] * (config.block_size - 1)
    rows = draft(F.embedding(torch.tensor(block), target.get_input_embeddings().weight), hidden)
    return target.lm_head(rows[1:]).numpy()
