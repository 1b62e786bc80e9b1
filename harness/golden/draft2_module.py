"""DFlash2 and DSpark drafts, and a dense target, in numpy with f64, written from their formulas.

    y = rms(x, final_norm) of a block [root, mask, ...]; the context comes from captured hidden states
    DFlash2: dynamic convolutions around each sublayer; S(a, b) = logit(b) + sum_r A[a, r] g[r] B[b, r]
    DSpark:  logits += w2 . w1[token before]; confidence = sigmoid(c . [y; w1[token before]] + bias)

`variant` computes one known mistake instead; the goldens measure how far each is from the truth.
"""

import numpy as np

VARIANTS = {
    "taps swapped": "pairs",
    "groups interleaved": "pairs",
    "no dynamic part": "pairs",
    "dynamic part from the output": "pairs",
    "sides swapped": "pairs",
    "context through the input norm": "both",
    "context convolved": "pairs",
    "wrong causality": "both",
    "window off by one": "both",
    "no sinks": "both",
    "bias by the root": "markov",
    "rows off by one": "markov",
}


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(heads, positions, theta):
    """Rotates `[n, heads, dim]` in halves."""
    dim = heads.shape[-1]
    angles = positions[:, None] / theta ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = heads[..., : dim // 2], heads[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmax_attend(q, k, v, mask, sinks=None):
    """q [n, heads, dim], k and v [m, kv_heads, dim], mask [n, m]; returns [n, heads * dim]."""
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores = np.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    scores = np.where(mask[None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    extra = 0.0
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
        extra = np.exp(sinks[:, None, None] - top)
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True) + extra
    return np.einsum("hnm,mhd->nhd", weights, v).reshape(len(q), -1)


def feed_forward(y, gate, up, down):
    g = y @ gate.T
    return (g / (1 + np.exp(-g)) * (y @ up.T)) @ down.T


class Dense:
    """A dense target from a GGUF's tensors and sizes."""

    def __init__(self, tensors, sizes):
        self.t, self.s = tensors, sizes

    def run(self, ids):
        """The residual stream after each layer `[layers, n, hidden]`, and logits `[n, vocab]`."""
        t, s = self.t, self.s
        x = t["token_embd.weight"][ids]
        n = len(ids)
        positions, mask = np.arange(n), np.tril(np.ones((n, n), bool))
        streams = []
        for i in range(s["layers"]):
            w = lambda part: t[f"blk.{i}.{part}.weight"]
            y = rms(x, w("attn_norm"), s["eps"])
            heads = lambda part: (y @ w(part).T).reshape(n, -1, s["dim"])
            q = rope(rms(heads("attn_q"), w("attn_q_norm"), s["eps"]), positions, s["theta"])
            k = rope(rms(heads("attn_k"), w("attn_k_norm"), s["eps"]), positions, s["theta"])
            x = x + softmax_attend(q, k, heads("attn_v"), mask) @ w("attn_output").T
            y = rms(x, w("ffn_norm"), s["eps"])
            x = x + feed_forward(y, w("ffn_gate"), w("ffn_up"), w("ffn_down"))
            streams.append(x)
        head = t.get("output.weight", t["token_embd.weight"])
        return streams, rms(x, t["output_norm.weight"], s["eps"]) @ head.T


class Draft2:
    """`w` has the tensors by their GGUF names; `c` is the case."""

    def __init__(self, w, c, variant=None):
        self.w, self.c, self.variant = w, c, variant

    def is_(self, variant):
        return self.variant == variant

    def weights_of(self, y, part):
        """The weights of a convolution, [rows, side, tap, channel], from the sublayer's input."""
        c = self.c
        groups = y.shape[1] // c["group"]
        d = (y @ self.w[f"{part}_conv_proj.weight"].T).reshape(len(y), 2, c["taps"], groups)
        if self.is_("groups interleaved"):
            d = np.tile(d, c["group"])
        else:
            d = np.repeat(d, c["group"], -1)
        if self.is_("no dynamic part"):
            d = d * 0
        out = self.w[f"{part}_conv_base"][None] + d
        if self.is_("taps swapped"):
            out = out[:, :, ::-1]
        return out[:, ::-1] if self.is_("sides swapped") else out

    def convolve(self, weights, side, x):
        out = weights[:, side, 0] * x
        for tap in range(1, self.c["taps"]):
            before = np.concatenate([np.zeros((tap, x.shape[1])), x])[: len(x)]
            out = out + weights[:, side, tap] * before
        return out

    def around(self, part, y, sublayer):
        """A sublayer with its convolutions, if the draft has them."""
        if self.c["kind"] != "pairs":
            return sublayer(y)
        weights = self.weights_of(y, part)
        out = sublayer(self.convolve(weights, 0, y))
        if self.is_("dynamic part from the output"):
            weights = self.weights_of(out, part)
        return self.convolve(weights, 1, out)

    def mask(self, sliding, at, rows):
        c = self.c
        row, key = at + np.arange(rows)[:, None], np.arange(at + rows)[None]
        mask = np.ones((rows, at + rows), bool)
        if c["causal"] != self.is_("wrong causality"):
            mask &= key <= row
        if sliding:
            window = c["window"] + (1 if self.is_("window off by one") else 0)
            mask &= row - key < window
        return mask

    def block(self, embedding, features, root):
        """The rows of a block after the final norm; `features` are captured rows `[at, width]`."""
        c, w, at = self.c, self.w, len(features)
        f = rms(features @ w["fc.weight"].T, w["enc.output_norm.weight"], c["eps"])
        rows = c["rows"]
        x = embedding[[root] + [c["mask"]] * (rows - 1)]
        positions = np.arange(at + rows)
        dim = c["head_dim"]
        for i, sliding in enumerate(c["sliding"]):
            layer = lambda part: w[f"blk.{i}.{part}.weight"]
            optional = lambda part: w.get(f"blk.{i}.{part}.weight")
            heads = lambda x, part: (x @ layer(part).T).reshape(len(x), -1, dim)
            context = f
            if self.is_("context through the input norm"):
                context = rms(f, layer("attn_norm"), c["eps"])
            if self.is_("context convolved"):
                context = self.convolve(self.weights_of(f, f"blk.{i}.attn"), 0, f)

            def attention(h):
                q = rope(rms(heads(h, "attn_q"), layer("attn_q_norm"), c["eps"]), positions[at:], c["theta"])
                raw = np.concatenate([heads(context, "attn_k"), heads(h, "attn_k")])
                k = rope(rms(raw, layer("attn_k_norm"), c["eps"]), positions, c["theta"])
                if f"blk.{i}.attn_v.weight" in w:
                    v = np.concatenate([heads(context, "attn_v"), heads(h, "attn_v")])
                else:
                    v = rms(raw, 1.0, c["eps"])
                sinks = None if self.is_("no sinks") else optional("attn_sinks")
                return softmax_attend(q, k, v, self.mask(sliding, at, rows), sinks) @ layer("attn_output").T

            def ffn(h):
                return feed_forward(h, layer("ffn_gate"), layer("ffn_up"), layer("ffn_down"))

            for part, norm, post, sublayer in [
                ("attn", "attn_norm", "post_attention_norm", attention),
                ("ffn", "ffn_norm", "post_ffw_norm", ffn),
            ]:
                out = self.around(f"blk.{i}.{part}", rms(x, layer(norm), c["eps"]), sublayer)
                if optional(post) is not None:
                    out = rms(out, optional(post), c["eps"])
                x = x + out
        return rms(x, w["output_norm.weight"], c["eps"])

    def draft(self, target, features, root):
        """Logits `[depth, vocab]`, the greedy chain, and what the chain's rows know beside logits."""
        c, w = self.c, self.w
        embedding = w.get("token_embd.weight", target["token_embd.weight"])
        head = w.get("output.weight", target["token_embd.weight"])
        y = self.block(embedding, features, root)
        first = c["first_row"] - (1 if self.is_("rows off by one") else 0)
        y = y[first:] if first >= 0 else np.roll(y, 1, 0)
        y = y[: c["rows"] - c["first_row"]]
        logits = y @ head.T
        return self.pairs(logits, y, root) if c["kind"] == "pairs" else self.chain(logits, y, root, target)

    def pairs(self, logits, y, root):
        c, w = self.c, self.w
        logits = logits * c["logit_scale"]
        if c["softcap"]:
            logits = c["softcap"] * np.tanh(logits / c["softcap"])
        gates = y @ w["selector_hidden.weight"].T
        chain, lists, before = [], [], root
        for row, gate in zip(logits, gates):
            ids = np.argsort(-row, kind="stable")[: c["top_k"]]
            successors, predecessor = w["selector_successor.weight"], w["selector_predecessor.weight"][before]
            scores = row[ids] + (successors[ids] * gate) @ predecessor
            order = np.argsort(-scores, kind="stable")
            log_probs = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
            lists.append({"ids": ids[order].tolist(), "log_probs": log_probs[order].tolist()})
            before = int(ids[order[0]])
            chain.append(before)
        return logits, chain, lists

    def chain(self, logits, y, root, target):
        c, w = self.c, self.w
        n = len(target["token_embd.weight"])
        ids = np.array(c["d2t"]) if c["d2t"] else np.arange(n)
        full = np.full((len(logits), n), -np.inf)
        chain, lists, before = [], [], root
        for i, row in enumerate(logits):
            table = w["markov_w1.weight"][root if self.is_("bias by the root") else before]
            row = row + w["markov_w2.weight"] @ table
            full[i, ids] = row
            order = np.argsort(-row, kind="stable")[:8]
            log_probs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            known = {"ids": ids[order].tolist(), "log_probs": log_probs[order].tolist()}
            if "conf_proj.weight" in w:
                at = w["conf_proj.weight"][0] @ np.concatenate([y[i], table])
                at += w.get("conf_proj.bias", [0.0])[0]
                known["confidence"] = float(1 / (1 + np.exp(-at)))
            lists.append(known)
            before = int(ids[order[0]])
            chain.append(before)
        return full, chain, lists
