"""Mixtures of experts in numpy, f64, from their formulas: qwen3moe and qwen35moe.

Nothing here is shared with the repository's own arithmetic. A shape is a dict as in `moe_goldens.py`.
"""

import numpy as np

from family_module import Family, rms, rotate, silu, softmax


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


class Moe(Family):
    """`weights` maps GGUF names to f64 arrays; those of experts are [experts, out, in].

    `gaps` collects by layer how far the last chosen expert leads the first other one, in log-probabilities
    of every row: rounded activations may choose otherwise where it is small.
    """

    def run(self, ids):
        s = self.shape
        self.gaps, self.states = [], {}
        x = self.weights["token_embd.weight"][ids]
        seen = [x]
        for i in range(s["layers"]):
            y = self.norm(f"blk.{i}.attn_norm", x)
            x = x + (self.delta(i, y) if i in s["recurrent"] else self.attention(i, y))
            x = x + self.experts(i, self.norm(f"blk.{i}.{s['ffn_norm']}", x))
            seen.append(x)
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return np.stack(seen), self.norm("output_norm", x) @ head.T

    def attention(self, i, x):
        s = self.shape
        n, heads, kv_heads, dim = len(x), s["heads"], s["kv_heads"], s["head_dim"]
        q = self.linear(f"blk.{i}.attn_q", x)
        gate = None
        if s["gated"]:
            q, gate = np.split(q.reshape(n, heads, 2 * dim), 2, -1)
        q = self.norm(f"blk.{i}.attn_q_norm", q.reshape(n, heads, dim))
        k = self.linear(f"blk.{i}.attn_k", x).reshape(n, kv_heads, dim)
        k = self.norm(f"blk.{i}.attn_k_norm", k)
        v = self.linear(f"blk.{i}.attn_v", x).reshape(n, kv_heads, dim)
        turned = s["rope_dims"]
        q, k = [
            np.concatenate([rotate(y[..., :turned], s["theta"], 1.0, None, False), y[..., turned:]], -1)
            for y in (q, k)
        ]
        later = np.arange(n)[:, None] < np.arange(n)[None, :]
        out = np.empty_like(q)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(dim)
            out[:, head] = softmax(np.where(later, -np.inf, scores)) @ v[:, group]
        if gate is not None:
            out = out * sigmoid(gate)
        return self.linear(f"blk.{i}.attn_output", out.reshape(n, heads * dim))

    def delta(self, i, x):
        s = self.shape
        n, n_k, n_v, dim = len(x), s["k_heads"], s["v_heads"], s["state"]
        get = lambda name: self.weights[f"blk.{i}.{name}"]
        u = self.linear(f"blk.{i}.attn_qkv", x)
        z = self.linear(f"blk.{i}.attn_gate", x).reshape(n, n_v, dim)
        beta = sigmoid(self.linear(f"blk.{i}.ssm_beta", x))
        alpha = self.linear(f"blk.{i}.ssm_alpha", x)
        decay = np.exp(get("ssm_a") * np.logaddexp(0.0, alpha + get("ssm_dt.bias")))
        taps = get("ssm_conv1d.weight")
        before = np.concatenate([np.zeros((taps.shape[1] - 1, u.shape[1])), u])
        c = silu(sum(before[j : j + n] * taps[:, j] for j in range(taps.shape[1])))
        q, k, v = np.split(c, [n_k * dim, 2 * n_k * dim], -1)
        q = unit(q.reshape(n, n_k, dim)) / np.sqrt(dim)
        k = unit(k.reshape(n, n_k, dim))
        v = v.reshape(n, n_v, dim)
        out = np.empty((n, n_v, dim))
        states = np.zeros((n_v, dim, dim))
        for head in range(n_v):
            key_head = head % n_k
            for t in range(n):
                key = k[t, key_head]
                state = decay[t, head] * states[head]
                state = state + np.outer(key, beta[t, head] * (v[t, head] - key @ state))
                out[t, head] = q[t, key_head] @ state
                states[head] = state
        self.states[i] = (states, before[-(taps.shape[1] - 1) :])
        out = rms(out, get("ssm_norm.weight"), s["eps"]) * silu(z)
        return self.linear(f"blk.{i}.ssm_out", out.reshape(n, n_v * dim))

    def experts(self, i, x):
        s = self.shape
        used = s["used"][i]
        logits = self.linear(f"blk.{i}.ffn_gate_inp", x)
        order = np.argsort(-logits, axis=-1, kind="stable")
        ranked = np.take_along_axis(logits, order, -1)
        if used < logits.shape[1]:
            self.gaps.append(ranked[:, used - 1] - ranked[:, used])
        p = softmax(logits)
        out = np.zeros_like(x)
        for row in range(len(x)):
            chosen = order[row, :used]
            weights = p[row, chosen]
            if s["renormalised"]:
                weights = weights / max(weights.sum(), 6.103515625e-5)
            weights = weights * s["scale"]
            for expert, weight in zip(chosen, weights):
                out[row] += weight * self.expert(i, expert, x[row])
        if s["shared_width"]:
            y = silu(self.linear(f"blk.{i}.ffn_gate_shexp", x)) * self.linear(f"blk.{i}.ffn_up_shexp", x)
            y = self.linear(f"blk.{i}.ffn_down_shexp", y)
            factor = x @ self.weights[f"blk.{i}.ffn_gate_inp_shexp.weight"]
            out += (sigmoid(factor)[:, None] if s["shared_gate"] else 1.0) * y
        return out

    def expert(self, i, expert, x):
        of = lambda name: self.weights[f"blk.{i}.ffn_{name}_exps.weight"][expert]
        if self.shape["fused"]:
            both = of("gate_up")
            first, second = np.split(both, 2)
            gate, up = (second, first) if self.shape["swapped"] else (first, second)
        else:
            gate, up = of("gate"), of("up")
        return of("down") @ (silu(gate @ x) * (up @ x))
