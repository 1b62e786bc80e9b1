"""Q4_K, Q6_K and Q8_0 rounding of weights in PyTorch, and the Q4_K_M choice of type per tensor.

`fake(weights, kind)` gives what a reader of the quantised file would see. With `trials` it follows the search of
the reference quantiser (format notes 4.1); without, a plain minimum and maximum fit, fast enough for every
training step. Rows are split into blocks of 256 along the input dimension.
"""
import torch


def _round(x):
    return torch.round(x)  # half to even, as the reference does


def q4_k(x, trials=21):
    """x [n, 256] f32 -> the values after Q4_K."""
    x = x.view(-1, 8, 32)
    weight = x.pow(2).mean(-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(-1, keepdim=True).clamp_max(0.0)
    high = x.amax(-1, keepdim=True)
    span = (high - low).clamp_min(1e-30)
    scale = span / 15.0
    level = _round((x - low) / scale).clamp(0, 15)
    if trials:
        best = (weight * (scale * level + low - x).pow(2)).sum(-1, keepdim=True)
        sw, sx, sx2 = weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True), None
        for s in range(trials):
            inverse = (14.0 + 0.1 * s) / (high - low).clamp_min(1e-30)
            l = _round(inverse * (x - low)).clamp(0, 15)
            sl, sll = (weight * l).sum(-1, keepdim=True), (weight * l * l).sum(-1, keepdim=True)
            sxl = (weight * l * x).sum(-1, keepdim=True)
            d = sw * sll - sl * sl
            this_scale = (sw * sxl - sx * sl) / d.clamp_min(1e-30)
            this_min = (sll * sx - sl * sxl) / d.clamp_min(1e-30)
            above = this_min > 0
            this_scale = torch.where(above, sxl / sll.clamp_min(1e-30), this_scale)
            this_min = this_min.clamp_max(0.0)
            error = (weight * (this_scale * l + this_min - x).pow(2)).sum(-1, keepdim=True)
            keep = (d > 0) & (error < best)
            best = torch.where(keep, error, best)
            scale, low = torch.where(keep, this_scale, scale), torch.where(keep, this_min, low)
            level = torch.where(keep, l, level)
    return _finish_q4(x, scale, -low).view(-1, 256)


def _finish_q4(x, scale, least):
    """Six-bit scales and minima under f16 super-scales, then the levels once more."""
    d = scale.amax(1, keepdim=True).clamp_min(0)
    m = least.amax(1, keepdim=True).clamp_min(0)
    ls = _round(torch.where(d > 0, 63.0 / d, 0.0) * scale).clamp(0, 63)
    lm = _round(torch.where(m > 0, 63.0 / m, 0.0) * least).clamp(0, 63)
    ds, ms = (d / 63.0).half().float() * ls, (m / 63.0).half().float() * lm
    level = _round((x + ms) / ds.clamp_min(1e-30)).clamp(0, 15)
    return ds * level - ms


def q6_k(x, trials=18):
    """x [n, 256] f32 -> the values after Q6_K."""
    x = x.view(-1, 16, 16)
    at = x.abs().argmax(-1, keepdim=True)
    m = x.gather(-1, at)
    safe = torch.where(m.abs() < 1e-15, torch.ones_like(m), m)
    w = x * x

    def fit(inverse):
        l = _round(inverse * x).clamp(-32, 31)
        return l, (w * x * l).sum(-1, keepdim=True), (w * l * l).sum(-1, keepdim=True)

    l, sx, sl = fit(-32.0 / safe)
    scale = sx / sl.clamp_min(1e-30)
    best = scale * sx
    if trials:
        for s in list(range(-9, 0)) + list(range(1, 10)):
            l, sx, sl = fit(-(32.0 + 0.1 * s) / safe)
            keep = (sl > 0) & (sx * sx > best * sl)
            scale = torch.where(keep, sx / sl.clamp_min(1e-30), scale)
            best = torch.where(keep, scale * sx, best)
    scale = torch.where(m.abs() < 1e-15, torch.zeros_like(scale), scale)
    top = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    inverse = torch.where(top != 0, -128.0 / top, torch.zeros_like(top))
    d = torch.where(top != 0, 1.0 / inverse, torch.zeros_like(top)).half().float()
    step = d * _round(inverse * scale).clamp(-128, 127)
    level = _round(x / torch.where(step == 0, torch.ones_like(step), step)).clamp(-32, 31)
    return (step * level).view(-1, 256)


def q8_0(x):
    x = x.view(-1, 8, 32)
    d = x.abs().amax(-1, keepdim=True) / 127.0
    level = _round(x / d.clamp_min(1e-30))
    return (level * d.half().float()).view(-1, 256)


def fake(x, kind, trials=True):
    """The same tensor as a reader of the quantised file would see it."""
    flat = x.float().reshape(-1, 256)
    out = {"Q4_K": lambda: q4_k(flat, 21 if trials else 0), "Q6_K": lambda: q6_k(flat, 18 if trials else 0),
           "Q8_0": lambda: q8_0(flat)}[kind]()
    return out.view(x.shape).to(x.dtype)


def more_bits(i, n):
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def kinds_q4_k_m(names, layers):
    """Hugging Face name -> Q4_K or Q6_K; names left out stay F32."""
    out = {}
    for name in names:
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if "conv1d" in name or "norm" in name or not name.endswith(".weight"):
            continue
        if "embed_tokens" in name:
            out[name] = "Q6_K"
        elif name.endswith(("down_proj.weight", "v_proj.weight", "in_proj_qkv.weight")):
            out[name] = "Q6_K" if more_bits(layer, layers) else "Q4_K"
        else:
            out[name] = "Q4_K"
    return out


class QuantInTheLoop:
    """Puts rounded weights in place for a forward and backward pass, and the real ones back for the update."""

    def __init__(self, model, layers):
        params = dict(model.named_parameters())
        kinds = kinds_q4_k_m(params, layers)
        self.groups = [(k, [params[n] for n in kinds if kinds[n] == k]) for k in ("Q4_K", "Q6_K")]
        self.kept = None

    @torch.no_grad()
    def enter(self):
        self.kept = []
        for kind, params in self.groups:
            flat = torch.cat([p.reshape(-1) for p in params])
            rounded = fake(flat.view(-1, 256), kind, trials=False).view(-1).split([p.numel() for p in params])
            self.kept.append(flat.split([p.numel() for p in params]))
            torch._foreach_copy_([p.view(-1) for p in params], list(rounded))

    @torch.no_grad()
    def leave(self):
        for (_, params), kept in zip(self.groups, self.kept):
            torch._foreach_copy_([p.view(-1) for p in params], list(kept))
        self.kept = None
