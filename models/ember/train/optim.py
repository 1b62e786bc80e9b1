"""Muon for the matrices of the layers, fused AdamW for everything else."""
import torch


def newton_schulz(g, steps=5):
    """Orthogonalises a stack of matrices [n, r, c] by a quintic iteration in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.transpose(-1, -2)
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.transpose(-1, -2) if wide else x)


class Muon:
    """Momentum, then orthogonalised updates; parameters of one shape are handled as one stack."""

    def __init__(self, params, lr, momentum=0.95, decay=0.0):
        self.lr, self.momentum, self.decay = lr, momentum, decay
        shapes = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *s, device=ps[0].device)) for s, ps in shapes.items()]

    @torch.no_grad()
    def step(self, scale):
        for params, buffer in self.groups:
            g = torch.stack([p.grad for p in params])
            buffer.lerp_(g, 1 - self.momentum)
            update = newton_schulz(g.lerp(buffer, self.momentum)).float()
            lr = self.lr * scale * max(1.0, buffer.shape[1] / buffer.shape[2]) ** 0.5
            if self.decay:
                torch._foreach_mul_(params, 1 - self.lr * scale * self.decay)
            torch._foreach_add_(params, list((update * -lr).unbind(0)))

    def state_dict(self):
        return [b for _, b in self.groups]

    def load_state_dict(self, buffers):
        for (_, b), saved in zip(self.groups, buffers):
            b.copy_(saved)


class Optimiser:
    """Both of them under one schedule factor."""

    def __init__(self, model, muon_lr, adam_lr, embed_lr, decay=0.01):
        matrices, small, embed = [], [], []
        for name, p in model.named_parameters():
            if "embed" in name:
                embed.append(p)
            elif p.ndim == 2 and min(p.shape) >= 64:
                matrices.append(p)
            else:
                small.append(p)
        self.muon = Muon(matrices, muon_lr, decay=decay)
        groups = [{"params": g, "lr": lr, "base": lr} for g, lr in ((embed, embed_lr), (small, adam_lr)) if g]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=embed[0].is_cuda if embed else small[0].is_cuda)
        self.others = embed + small

    def step(self, scale):
        torch.nn.utils.clip_grad_norm_(self.others, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * scale
        self.muon.step(scale)
        self.adam.step()

    def zero_grad(self):
        for params, _ in self.muon.groups:
            for p in params:
                p.grad = None
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self):
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state):
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
