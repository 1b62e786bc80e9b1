"""The two later block drafts: DFlash2 (dynamic convolutions, a selector of pairs) and DSpark (a bias by the token before).

Both stand on the block draft of `draft.py`. Parameter names are those of the published safetensors files.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from draft import Draft, DraftConfig
from target import rope_table


@dataclass(frozen=True)
class Draft2Config(DraftConfig):
    layers: int = 2
    heads: int = 4
    block: int = 8
    conv_taps: int = 2
    conv_group: int = 16
    rank: int = 32             # of the selector, or of the bias
    top: int = 16              # candidates of a row that the selector looks at


class Convolution(nn.Module):
    """A short causal convolution over the block's rows whose weights depend on the row: side 0 before, side 1 behind."""

    def __init__(self, c: Draft2Config):
        super().__init__()
        self.c = c
        self.base = nn.Parameter(torch.zeros(c.hidden, c.conv_taps, 2))
        self.proj = nn.Linear(c.hidden, 2 * c.conv_taps * (c.hidden // c.conv_group), bias=False)

    def weights(self, y):
        """[.., rows, side, tap, channel] from the sublayer's normed input y [.., rows, H]."""
        dynamic = self.proj(y).unflatten(-1, (2, self.c.conv_taps, self.c.hidden // self.c.conv_group))
        return self.base.permute(2, 1, 0).to(y.dtype) + dynamic.repeat_interleave(self.c.conv_group, -1)

    def apply_side(self, weights, side, x):
        """x [.., rows, H]; rows before the block are zeros."""
        out = weights[..., side, 0, :] * x
        for tap in range(1, self.c.conv_taps):
            out = out + weights[..., side, tap, :] * F.pad(x, (0, 0, tap, 0))[..., :x.shape[-2], :]
        return out


class Dflash2(Draft):
    """The block draft with convolutions around both sublayers, and the factors of the selector."""

    def __init__(self, c: Draft2Config):
        super().__init__(c)
        self.attn_conv = nn.ModuleList(Convolution(c) for _ in range(c.layers))
        self.ffn_conv = nn.ModuleList(Convolution(c) for _ in range(c.layers))
        self.selector_hidden = nn.Linear(c.hidden, c.rank, bias=False)
        self.selector_predecessor = nn.Embedding(c.vocab, c.rank)
        self.selector_successor = nn.Embedding(c.vocab, c.rank)

    @torch.no_grad()
    def initialise(self, seed):
        super().initialise(seed)
        for conv in (*self.attn_conv, *self.ffn_conv):
            conv.proj.weight.zero_()
            conv.base.zero_()
            conv.base[:, 0] = 1.0
        gen = torch.Generator().manual_seed(seed + 1)
        self.selector_predecessor.weight.normal_(0, 0.2, generator=gen)
        self.selector_successor.weight.normal_(0, 0.02, generator=gen)
        return self

    def forward(self, features, block_ids, anchors, embed):
        c, n = self.c, anchors.shape[1]
        f = self.hidden_norm(self.fc(features))
        x = F.embedding(block_ids, embed).flatten(1, 2).to(f.dtype)
        positions = (anchors[..., None] + torch.arange(c.block, device=features.device)).flatten(1)
        block_rope = rope_table(positions, c.head_dim, c.rope_theta)
        context_rope = rope_table(torch.arange(features.shape[1], device=features.device)[None], c.head_dim, c.rope_theta)
        mask = self.mask(anchors, positions, features.shape[1], False)
        rows = lambda t: t.unflatten(1, (n, c.block))
        for i, layer in enumerate(self.layers):
            y = layer.input_layernorm(x)
            w = self.attn_conv[i].weights(rows(y))
            mixed = layer.self_attn(self.attn_conv[i].apply_side(w, 0, rows(y)).flatten(1, 2), f, mask, block_rope, context_rope)
            x = x + self.attn_conv[i].apply_side(w, 1, rows(mixed)).flatten(1, 2)
            y = layer.post_attention_layernorm(x)
            w = self.ffn_conv[i].weights(rows(y))
            fed = layer.mlp(self.ffn_conv[i].apply_side(w, 0, rows(y)).flatten(1, 2))
            x = x + self.ffn_conv[i].apply_side(w, 1, rows(fed)).flatten(1, 2)
        return rows(self.norm(x))

    def bias(self, hidden, before):
        """What the selector adds to all logits [.., V] of rows [.., H] behind the tokens `before` [..]."""
        g = self.selector_hidden(hidden)
        return (self.selector_predecessor(before).to(g.dtype) * g) @ self.selector_successor.weight.to(g.dtype).T


class Dspark(Draft):
    """The block draft with a bias by the token before, and a confidence; row 0 predicts the first drafted token."""

    def __init__(self, c: Draft2Config):
        super().__init__(c)
        self.markov_w1 = nn.Embedding(c.vocab, c.rank)
        self.markov_w2 = nn.Linear(c.rank, c.vocab, bias=False)
        self.conf_proj = nn.Linear(c.hidden + c.rank, 1)

    @torch.no_grad()
    def initialise(self, seed):
        super().initialise(seed)
        gen = torch.Generator().manual_seed(seed + 1)
        self.markov_w1.weight.normal_(0, 0.2, generator=gen)
        self.markov_w2.weight.normal_(0, 0.02, generator=gen)
        self.conf_proj.weight.zero_()
        self.conf_proj.bias.zero_()
        return self

    def bias(self, hidden, before):
        return self.markov_w2(self.markov_w1(before).to(hidden.dtype))

    def confidence(self, hidden, before):
        """Logit of the chance that the row's token is right."""
        return self.conf_proj(torch.cat([hidden, self.markov_w1(before).to(hidden.dtype)], -1))[..., 0]
