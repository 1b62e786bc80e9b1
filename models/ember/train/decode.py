"""Greedy decoding of the target in batches: chunked prefill of padded prompts, then one token per step."""
import torch
import torch.nn.functional as F

import delta
from target import apply_rope, rope_table


class State:
    """Per layer: conv window [B, taps - 1, channels] and delta state, or keys and values [B, L, NKV, D]."""

    def __init__(self, config, batch, room, device, kind):
        self.length = torch.zeros(batch, dtype=torch.long, device=device)
        self.layers = []
        channels = 2 * config.key_heads * config.delta_dim + config.value_heads * config.delta_dim
        for i in range(config.layers):
            if config.is_linear(i):
                self.layers.append([torch.zeros(batch, config.taps - 1, channels, device=device, dtype=kind),
                                    torch.zeros(batch, config.value_heads, config.delta_dim, config.delta_dim, device=device)])
            else:
                self.layers.append([torch.zeros(batch, room, config.kv_heads, config.head_dim, device=device, dtype=kind)
                                    for _ in range(2)])


def _delta_prefill(mixer, y, mask, slot):
    c = mixer.c
    u = mixer.in_proj_qkv(y) * mask[..., None]
    padded = F.pad(u, (0, 0, c.taps - 1, 0))
    q, k, v, g, beta = mixer.heads(mixer.conv(padded), mixer.in_proj_a(y), mixer.in_proj_b(y))
    with torch.autocast(y.device.type, enabled=False):
        o, last = delta.chunked(q, k, v, g * mask[..., None], beta * mask[..., None])
    ends = mask.sum(1).long()
    at = ends[:, None] + torch.arange(c.taps - 1, device=y.device)  # last taps - 1 inputs, shifted by the padding
    slot[0].copy_(padded.gather(1, at[..., None].expand(-1, -1, padded.shape[-1])))
    slot[1].copy_(last)
    z = mixer.in_proj_z(y).unflatten(-1, (c.value_heads, c.delta_dim))
    return mixer.out_proj((mixer.norm(o.to(y.dtype)) * F.silu(z)).flatten(-2))


def _attention_prefill(mixer, y, cos, sin, slot):
    q, k, v, gate = mixer.project(y, cos, sin)
    slot[0][:, :k.shape[1]], slot[1][:, :v.shape[1]] = k.to(slot[0].dtype), v.to(slot[1].dtype)
    reps = mixer.c.heads // mixer.c.kv_heads
    k, v = (x.transpose(1, 2).repeat_interleave(reps, 1) for x in (k, v))
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.to(q.dtype), v.to(q.dtype), is_causal=True)
    return mixer.o_proj(o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))


@torch.no_grad()
def prefill(model, ids, lengths, state):
    """ids [B, T] padded on the right. Fills the state; returns the last hidden row of each sequence [B, H]."""
    c = model.c
    mask = (torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]).float()
    x = model.embed(ids).to(state.layers[0][0].dtype)
    cos, sin = rope_table(torch.arange(ids.shape[1], device=ids.device)[None], c.rope_dims, c.rope_theta)
    for layer, slot in zip(model.model.layers, state.layers):
        y = layer.input_layernorm(x)
        mixed = _delta_prefill(layer.linear_attn, y, mask, slot) if layer.linear else \
            _attention_prefill(layer.self_attn, y, cos, sin, slot)
        x = layer.feed(x, mixed)
    state.length.copy_(lengths)
    last = x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]
    return model.model.norm(last)


def _delta_step(mixer, y, slot):
    c = mixer.c
    u = mixer.in_proj_qkv(y)[:, None].to(slot[0].dtype)
    window = torch.cat([slot[0], u], 1)
    slot[0].copy_(window[:, 1:])
    q, k, v, g, beta = mixer.heads(mixer.conv(window), mixer.in_proj_a(y)[:, None], mixer.in_proj_b(y)[:, None])
    reps = c.value_heads // c.key_heads
    with torch.autocast(y.device.type, enabled=False):
        o, s = delta.step(q[:, 0].repeat_interleave(reps, 1), k[:, 0].repeat_interleave(reps, 1), v[:, 0].float(),
                          g[:, 0], beta[:, 0], slot[1])
    slot[1].copy_(s)
    z = mixer.in_proj_z(y).unflatten(-1, (c.value_heads, c.delta_dim))
    return mixer.out_proj((mixer.norm(o.to(y.dtype)) * F.silu(z)).flatten(-2))


def _attention_step(mixer, y, cos, sin, slot, length, room):
    c = mixer.c
    q, k, v, gate = mixer.project(y[:, None], cos, sin)
    row = torch.arange(y.shape[0], device=y.device)
    slot[0][row, length], slot[1][row, length] = k[:, 0].to(slot[0].dtype), v[:, 0].to(slot[1].dtype)
    keys, values = slot[0][:, :room], slot[1][:, :room]
    q = q[:, 0].unflatten(1, (c.kv_heads, -1))
    scores = torch.einsum("bgrd,blgd->bgrl", q.float(), keys.float()) * c.head_dim ** -0.5
    seen = torch.arange(room, device=y.device)[None] <= length[:, None]
    p = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    o = torch.einsum("bgrl,blgd->bgrd", p, values.float()).flatten(1).to(y.dtype)
    return mixer.o_proj(o * torch.sigmoid(gate[:, 0]))


@torch.no_grad()
def step(model, ids, state, room):
    """One token per sequence: ids [B]. `room`: keys to look at, at least the longest length + 1."""
    c = model.c
    x = model.embed(ids).to(state.layers[0][0].dtype)
    cos, sin = rope_table(state.length[:, None], c.rope_dims, c.rope_theta)
    for layer, slot in zip(model.model.layers, state.layers):
        y = layer.input_layernorm(x)
        mixed = _delta_step(layer.linear_attn, y, slot) if layer.linear else \
            _attention_step(layer.self_attn, y, cos, sin, slot, state.length, room)
        x = layer.feed(x, mixed)
    state.length += 1
    return model.model.norm(x)


@torch.no_grad()
def generate(model, prompts, new, stops, batch=512, budget=1_000_000, kind=None):
    """Greedy continuations (lists of ids, the stop id included) of prompts of any length, longest first.

    `kind`: type of activations and keys, bf16 on a card unless told; `budget`: tokens of a batch.
    """
    device = next(model.parameters()).device
    kind = kind or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    stop = torch.tensor(sorted(stops), device=device)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    out = [None] * len(prompts)
    at = 0
    while at < len(order):
        longest = len(prompts[order[at]])
        size = max(1, min(batch, budget // (longest + new)))
        mine = order[at:at + size]
        at += size
        width = -(-longest // 64) * 64
        ids = torch.zeros(len(mine), width, dtype=torch.long)
        for r, i in enumerate(mine):
            ids[r, :len(prompts[i])] = torch.tensor(prompts[i])
        lengths = torch.tensor([len(prompts[i]) for i in mine], device=device)
        state = State(model.c, len(mine), width + new, device, kind)
        with torch.autocast(device.type, kind, enabled=kind != torch.float32):
            hidden = prefill(model, ids.to(device), lengths, state)
            tokens, ended = [], torch.zeros(len(mine), dtype=torch.bool, device=device)
            for n in range(new):
                token = model.head(hidden).float().argmax(-1)
                tokens.append(token)
                ended |= torch.isin(token, stop)
                if n + 1 == new or (n % 16 == 15 and bool(ended.all())):
                    break
                hidden = step(model, token, state, longest + n + 1)
        rows = torch.stack(tokens, 1).tolist()
        for r, i in enumerate(mine):
            row = rows[r]
            end = next((j for j, t in enumerate(row) if t in stops), len(row) - 1)
            out[i] = row[:end + 1]
    return out
