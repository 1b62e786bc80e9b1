"""The target: a Qwen3.5-shaped hybrid whose parameter names are those of the Hugging Face checkpoint."""
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import delta


@dataclass(frozen=True)
class TargetConfig:
    vocab: int = 8192
    hidden: int = 256
    layers: int = 12
    ffn: int = 768
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 256
    rope_dims: int = 64
    rope_theta: float = 1e7
    key_heads: int = 2
    value_heads: int = 6
    delta_dim: int = 128
    taps: int = 4
    interval: int = 4
    eps: float = 1e-6
    context: int = 131072

    def is_linear(self, layer: int) -> bool:
        return (layer + 1) % self.interval != 0

    def as_dict(self):
        return asdict(self)


def rms(x, weight, eps):
    """RMS norm in f32 with the weight as multiplied; the result has the precision of x."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


class Norm(nn.Module):
    """RMS norm that stores its weight minus one, as these checkpoints do."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        return rms(x, 1.0 + self.weight, self.eps)


class PlainNorm(nn.Module):
    """RMS norm that stores its weight as it is."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return rms(x, self.weight, self.eps)


def rope_table(positions, dims, theta):
    """cos and sin [..., dims / 2] in f32; the angle is formed in f64."""
    inverse = theta ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=positions.device) / dims)
    angle = positions.double()[..., None] * inverse
    return angle.cos().float(), angle.sin().float()


def apply_rope(x, cos, sin):
    """Rotates the first 2 * cos.shape[-1] dims of x [..., D] in halves; the rest passes through."""
    half = cos.shape[-1]
    u, w, rest = x[..., :half].float(), x[..., half:2 * half].float(), x[..., 2 * half:]
    return torch.cat([(u * cos - w * sin).to(x.dtype), (w * cos + u * sin).to(x.dtype), rest], -1)


class Attention(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden, 2 * c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm = Norm(c.head_dim, c.eps)
        self.k_norm = Norm(c.head_dim, c.eps)

    def project(self, y, cos, sin):
        """q [B, T, NH, D], k and v [B, T, NKV, D], gate [B, T, NH * D]; cos and sin [B or 1, T, 32]."""
        c = self.c
        q, gate = self.q_proj(y).unflatten(-1, (c.heads, 2 * c.head_dim)).split(c.head_dim, -1)
        k = self.k_proj(y).unflatten(-1, (c.kv_heads, c.head_dim))
        v = self.v_proj(y).unflatten(-1, (c.kv_heads, c.head_dim))
        cos, sin = cos[..., None, :], sin[..., None, :]
        q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        return q, k, v, gate.flatten(-2)

    def forward(self, y, cos, sin):
        q, k, v, gate = self.project(y, cos, sin)
        reps = self.c.heads // self.c.kv_heads
        k, v = (x.transpose(1, 2).repeat_interleave(reps, 1) for x in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))


class GatedDelta(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.c = c
        self.key_dim, self.value_dim = c.key_heads * c.delta_dim, c.value_heads * c.delta_dim
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(c.hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(c.hidden, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(c.hidden, c.value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden, c.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, c.taps, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(c.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(c.value_heads))
        self.norm = PlainNorm(c.delta_dim, c.eps)
        self.out_proj = nn.Linear(self.value_dim, c.hidden, bias=False)

    def conv(self, u):
        """u [B, taps - 1 + T, channels], the window before the first token in front. SiLU included."""
        w = self.conv1d.weight[:, 0].to(u.dtype)
        length = u.shape[1] - self.c.taps + 1
        y = sum(u[:, j:j + length] * w[:, j] for j in range(self.c.taps))
        return F.silu(y)

    def heads(self, u, a, b):
        """Normalised q and k in f32, v as it is, and the gates in f32."""
        c = self.c
        q, k, v = u.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q = q.unflatten(-1, (c.key_heads, c.delta_dim)).float()
        k = k.unflatten(-1, (c.key_heads, c.delta_dim)).float()
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * c.delta_dim ** -0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        v = v.unflatten(-1, (c.value_heads, c.delta_dim))
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        return q, k, v, g, torch.sigmoid(b.float())

    def before(self, y):
        """Everything up to the triangular solve; compiled as one piece."""
        u = F.pad(self.in_proj_qkv(y), (0, 0, self.c.taps - 1, 0))
        q, k, v, g, beta = self.heads(self.conv(u), self.in_proj_a(y), self.in_proj_b(y))
        with torch.autocast(y.device.type, enabled=False):
            a, p, cum = delta.intra(q, k, g, beta, self.c.value_heads // self.c.key_heads)
        return q, k, v, beta, a, p.to(v.dtype), cum

    def between(self, t, k, v, cum, beta, q):
        with torch.autocast(k.device.type, enabled=False):
            return delta.inputs_of_scan(t, k, v, cum, beta, q, self.c.value_heads // self.c.key_heads)

    def after(self, qe, s, p, vn, y):
        with torch.autocast(y.device.type, enabled=False):
            o = delta.outputs_of_scan(qe, s, p, vn)
        z = self.in_proj_z(y).unflatten(-1, (self.c.value_heads, self.c.delta_dim))
        o = self.norm(o) * F.silu(z)
        return self.out_proj(o.flatten(-2))

    def forward(self, y):
        """y [B, T, H] with T a multiple of the chunk, from an empty state."""
        q, k, v, beta, a, p, cum = self.before(y)
        w, u, kd, qe, dec = self.between(delta.TriInverse.apply(a), k, v, cum, beta, q)
        vn, s = delta.Scan.apply(w, u, kd, dec)
        return self.after(qe, s, p, vn, y)


class Mlp(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: TargetConfig, index: int):
        super().__init__()
        self.linear = c.is_linear(index)
        if self.linear:
            self.linear_attn = GatedDelta(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = Mlp(c.hidden, c.ffn)
        self.input_layernorm = Norm(c.hidden, c.eps)
        self.post_attention_layernorm = Norm(c.hidden, c.eps)

    def feed(self, x, mixed):
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))

    def enter(self, x):
        y = self.input_layernorm(x)
        return (y, *self.linear_attn.before(y))

    def leave(self, x, qe, s, p, vn, y):
        return self.feed(x, self.linear_attn.after(qe, s, p, vn, y))

    def attend(self, x, cos, sin):
        return self.feed(x, self.self_attn(self.input_layernorm(x), cos, sin))

    def forward(self, x, cos, sin):
        if not self.linear:
            return self.attend(x, cos, sin)
        y, q, k, v, beta, a, p, cum = self.enter(x)
        w, u, kd, qe, dec = self.linear_attn.between(delta.TriInverse.apply(a), k, v, cum, beta, q)
        vn, s = delta.Scan.apply(w, u, kd, dec)
        return self.leave(x, qe, s, p, vn, y)


class Trunk(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = Norm(c.hidden, c.eps)


class Target(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.c = c
        self.model = Trunk(c)

    def embed(self, ids):
        return F.embedding(ids, self.model.embed_tokens.weight)

    def forward(self, ids, taps=()):
        """ids [B, T] -> last hidden state after the final norm, and the residual stream after each tap layer."""
        x = self.embed(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        cos, sin = rope_table(torch.arange(ids.shape[1], device=ids.device)[None], self.c.rope_dims, self.c.rope_theta)
        kept = {}
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if i in taps:
                kept[i] = x
        return self.model.norm(x), [kept[i] for i in taps]

    def head(self, hidden):
        return hidden @ self.model.embed_tokens.weight.to(hidden.dtype).T

    def compile(self):
        """Compiles the pieces of a layer; the solve and the scan stay eager between them."""
        for layer in self.model.layers:
            if layer.linear:
                layer.enter, layer.leave = torch.compile(layer.enter), torch.compile(layer.leave)
                layer.linear_attn.between = torch.compile(layer.linear_attn.between)
            else:
                layer.attend = torch.compile(layer.attend)
        return self

    @torch.no_grad()
    def initialise(self, seed: int):
        """Small matrices, zero output projections, decays spread from ten to a thousand tokens."""
        gen = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty(p.shape).uniform_(1, 8, generator=gen).log())
            elif name.endswith("dt_bias"):
                dt = torch.empty(p.shape).uniform_(-6.9, -2.3, generator=gen).exp()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif name.endswith("conv1d.weight"):
                p.copy_(torch.empty(p.shape).uniform_(-0.5, 0.5, generator=gen))
            elif p.ndim == 2:
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    p.zero_()
                else:
                    std = 0.04 if "embed" in name else 0.7 * p.shape[1] ** -0.5
                    p.copy_(torch.empty(p.shape).normal_(0, std, generator=gen))
        return self
