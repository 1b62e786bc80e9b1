"""The DFlash draft: one non-causal pass over a block of masks, fed by hidden states of the target.

Section 1.3 of the drafting notes. Parameter names are those of the published safetensors files.
Block row j stands at position anchor + j and predicts the token there; row 0 holds the known token.
"""
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from target import Mlp, PlainNorm, apply_rope, rope_table


@dataclass(frozen=True)
class DraftConfig:
    hidden: int = 256
    layers: int = 4
    ffn: int = 768
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 1e7
    eps: float = 1e-6
    block: int = 16
    taps: tuple = (1, 3, 5, 7, 10)
    mask_token: int = 8191
    vocab: int = 8192
    window: int = 0            # 0: all layers see everything; else all but the last slide and are causal in the block
    target_layers: int = 12

    def sliding(self, layer):
        return self.window > 0 and layer < self.layers - 1

    def as_dict(self):
        return {**asdict(self), "taps": list(self.taps)}


class DraftAttention(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm = PlainNorm(c.head_dim, c.eps)
        self.k_norm = PlainNorm(c.head_dim, c.eps)

    def forward(self, x, f, mask, block_rope, context_rope):
        """x [B, R, H] block rows; f [B, T, H] context features; mask [B, 1, R, T + R] additive or boolean."""
        c = self.c
        cos, sin = (t[..., None, :] for t in block_rope)
        ccos, csin = (t[..., None, :] for t in context_rope)
        q = apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (c.heads, c.head_dim))), cos, sin)
        k_block = apply_rope(self.k_norm(self.k_proj(x).unflatten(-1, (c.kv_heads, c.head_dim))), cos, sin)
        k_context = apply_rope(self.k_norm(self.k_proj(f).unflatten(-1, (c.kv_heads, c.head_dim))), ccos, csin)
        k = torch.cat([k_context, k_block], 1)
        v = torch.cat([self.v_proj(f), self.v_proj(x)], 1).unflatten(-1, (c.kv_heads, c.head_dim))
        reps = c.heads // c.kv_heads
        k, v = (t.transpose(1, 2).repeat_interleave(reps, 1) for t in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.self_attn = DraftAttention(c)
        self.mlp = Mlp(c.hidden, c.ffn)
        self.input_layernorm = PlainNorm(c.hidden, c.eps)
        self.post_attention_layernorm = PlainNorm(c.hidden, c.eps)

    def forward(self, x, f, mask, block_rope, context_rope):
        x = x + self.self_attn(self.input_layernorm(x), f, mask, block_rope, context_rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.c = c
        self.fc = nn.Linear(len(c.taps) * c.hidden, c.hidden, bias=False)
        self.hidden_norm = PlainNorm(c.hidden, c.eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.layers))
        self.norm = PlainNorm(c.hidden, c.eps)

    @torch.no_grad()
    def initialise(self, seed):
        gen = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    p.zero_()
                else:
                    p.copy_(torch.empty(p.shape).normal_(0, 0.7 * p.shape[1] ** -0.5, generator=gen))
        return self

    def forward(self, features, block_ids, anchors, embed):
        """features [B, T, taps * H]; block_ids [B, A, block]; anchors [B, A] absolute positions of row 0.

        Context keys are positions strictly before the anchor. Returns hidden rows [B, A, block, H] after the norm.
        """
        c = self.c
        batch, length = features.shape[:2]
        n = anchors.shape[1]
        f = self.hidden_norm(self.fc(features))
        x = F.embedding(block_ids, embed).flatten(1, 2).to(f.dtype)
        offset = torch.arange(c.block, device=features.device)
        positions = (anchors[..., None] + offset).flatten(1)
        block_rope = rope_table(positions, c.head_dim, c.rope_theta)
        context_rope = rope_table(torch.arange(length, device=features.device)[None], c.head_dim, c.rope_theta)
        masks = {s: self.mask(anchors, positions, length, s) for s in {c.sliding(i) for i in range(c.layers)}}
        for i, layer in enumerate(self.layers):
            x = layer(x, f, masks[c.sliding(i)], block_rope, context_rope)
        return self.norm(x).unflatten(1, (n, c.block))

    def mask(self, anchors, positions, length, sliding):
        """Boolean [B, 1, R, T + R]: what each block row may see."""
        c = self.c
        rows = positions.shape[1]
        keys = torch.arange(length, device=anchors.device)
        owner = torch.arange(rows, device=anchors.device) // c.block
        context = keys[None, None] < anchors.repeat_interleave(c.block, 1)[..., None]
        block = (owner[:, None] == owner[None]).expand(anchors.shape[0], -1, -1)
        if sliding:
            context = context & (positions[..., None] - keys[None, None] < c.window)
            block = block & (positions[:, :, None] >= positions[:, None, :])
        return torch.cat([context, block], -1)[:, None]
