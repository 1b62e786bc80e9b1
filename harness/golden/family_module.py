"""Dense decoder families in numpy, f64, from their formulas: llama, qwen2 and gemma3.

Nothing here is shared with the repository's own arithmetic. A shape is a dict as in `family_goldens.py`.
"""

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1.0 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x, theta, scale, factors, adjacent):
    """`x` [n, heads, dim]: each pair turned by position * scale * theta^(-2j / dim) / factor."""
    n, _, dim = x.shape
    frequencies = theta ** (-2.0 * np.arange(dim // 2) / dim) * scale
    if factors is not None:
        frequencies = frequencies / factors
    turn = np.exp(1j * np.arange(n)[:, None] * frequencies)[:, None, :]
    out = np.empty_like(x)
    if adjacent:
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
    else:
        half = dim // 2
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        out[..., :half], out[..., half:] = z.real, z.imag
    return out


class Family:
    """`weights` maps GGUF names to f64 arrays, matrices as [out, in]."""

    def __init__(self, shape, weights):
        self.shape = shape
        self.weights = weights

    def get(self, name):
        return self.weights.get(name)

    def linear(self, name, x):
        y = x @ self.weights[name + ".weight"].T
        bias = self.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, name, x):
        return rms(x, self.weights[name + ".weight"], self.shape["eps"])

    def attention(self, i, x):
        s = self.shape
        n, heads, kv_heads, dim = len(x), s["heads"], s["kv_heads"], s["head_dim"]
        q = self.linear(f"blk.{i}.attn_q", x).reshape(n, heads, dim)
        k = self.linear(f"blk.{i}.attn_k", x).reshape(n, kv_heads, dim)
        v = self.linear(f"blk.{i}.attn_v", x).reshape(n, kv_heads, dim)
        if s["head_norms"]:
            q = self.norm(f"blk.{i}.attn_q_norm", q)
            k = self.norm(f"blk.{i}.attn_k_norm", k)
        local = s["window"] and (i + 1) % s["pattern"] != 0
        theta, scale = (s["local_theta"], 1.0) if local else (s["theta"], s["rope_scale"])
        factors = self.get("rope_freqs.weight")
        q = rotate(q, theta, scale, factors, s["adjacent"])
        k = rotate(k, theta, scale, factors, s["adjacent"])
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        hidden = distance < 0
        if local:
            hidden |= distance >= s["window"]
        out = np.empty_like(q)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(dim)
            out[:, head] = softmax(np.where(hidden, -np.inf, scores)) @ v[:, group]
        return self.linear(f"blk.{i}.attn_output", out.reshape(n, heads * dim))

    def feed_forward(self, i, x):
        act = gelu_tanh if self.shape["gelu"] else silu
        gate = act(self.linear(f"blk.{i}.ffn_gate", x))
        return self.linear(f"blk.{i}.ffn_down", gate * self.linear(f"blk.{i}.ffn_up", x))

    def run(self, ids):
        """The residual stream before and after each layer, [layers + 1, n, hidden], and the logits."""
        s = self.shape
        embedding = self.weights["token_embd.weight"]
        x = embedding[ids] * (np.sqrt(s["hidden"]) if s["scaled"] else 1.0)
        seen = [x]
        for i in range(s["layers"]):
            y = self.attention(i, self.norm(f"blk.{i}.attn_norm", x))
            x = x + (self.norm(f"blk.{i}.post_attention_norm", y) if s["post_norms"] else y)
            y = self.feed_forward(i, self.norm(f"blk.{i}.ffn_norm", x))
            x = x + (self.norm(f"blk.{i}.post_ffw_norm", y) if s["post_norms"] else y)
            seen.append(x)
        head = self.get("output.weight")
        logits = self.norm("output_norm", x) @ (embedding if head is None else head).T
        return np.stack(seen), logits
