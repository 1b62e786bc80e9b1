"""The multi-token-prediction head: one more attention block that reads a token and the hidden row before it.

Row p takes the embedding of token p and the hidden row of p - 1 (the target's, after its last norm; zeros before
the first token) and predicts token p + 1. Drafting goes on from the block's own row: step s stands at row P + s.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from target import Attention, Mlp, Norm, TargetConfig, rope_table


class MtpHead(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.c = c
        self.eh_proj = nn.Linear(2 * c.hidden, c.hidden, bias=False)
        self.enorm, self.hnorm = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.self_attn = Attention(c)
        self.mlp = Mlp(c.hidden, c.ffn)
        self.shared_head_norm = Norm(c.hidden, c.eps)

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

    def steps(self, ids, hidden, embed, count):
        """Rows after the last norm of `count` steps [B, T, H] each, on true tokens: ids [B, T], hidden [B, T, H].

        Row p of step s is what the head says at p when drafting began s rows before.
        """
        c, length = self.c, ids.shape[1]
        tokens = self.enorm(F.embedding(ids, embed).to(hidden.dtype))
        cos, sin = rope_table(torch.arange(length, device=ids.device)[None], c.rope_dims, c.rope_theta)
        before, keys, values, out = hidden, [], [], []
        for s in range(count):
            x = self.eh_proj(torch.cat([tokens, self.hnorm(shift(before, 1))], -1))
            y = self.input_layernorm(x)
            q, k, v, gate = self.self_attn.project(y, cos, sin)
            keys.append(k[:, :, 0])
            values.append(v[:, :, 0])
            mixed = self.attend(q, keys, values, s)
            x = x + self.self_attn.o_proj(mixed * torch.sigmoid(gate))
            x = x + self.mlp(self.post_attention_layernorm(x))
            before = self.shared_head_norm(x)
            out.append(before)
        return out

    def attend(self, q, keys, values, s):
        """q [B, T, NH, D] of step s: rows of the prompt up to p - s from step 0, then one row of each later step."""
        length = q.shape[1]
        scores = torch.einsum("bthd,bud->bhtu", q, keys[0]).float()
        at = torch.arange(length, device=q.device)
        scores = scores.masked_fill(at[None, :] > at[:, None] - s, float("-inf"))
        if s:
            scores = scores.masked_fill((at < s)[:, None] & (at == 0)[None, :], 0.0)  # rows before the first step: unused
        own = [torch.einsum("bthd,btd->bht", q, shift(keys[j], s - j)).float() for j in range(1, s + 1)]
        weights = (torch.cat([scores] + [o[..., None] for o in own], -1) * self.c.head_dim ** -0.5).softmax(-1).to(q.dtype)
        mixed = torch.einsum("bhtu,bud->bthd", weights[..., :length], values[0])
        for j in range(1, s + 1):
            mixed = mixed + weights[..., length + j - 1].transpose(1, 2)[..., None] * shift(values[j], s - j)[:, :, None]
        return mixed.flatten(-2)


def shift(x, n):
    """Row p becomes row p + n; zeros come in front."""
    return F.pad(x, (0, 0, n, 0))[:, :x.shape[1]] if n else x
