"""Checks of the delta rule and the target against slower truths. Run: python test_delta.py [cuda]

With TRITON_INTERPRET=1 the Triton kernels themselves run on the CPU.
"""
import sys

import torch

import delta
from target import Target, TargetConfig

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def inputs(batch, length, kind, seed=0):
    gen = torch.Generator().manual_seed(seed)
    unit = lambda *s: torch.nn.functional.normalize(torch.randn(*s, generator=gen, dtype=torch.float64), dim=-1)
    q, k = unit(batch, length, 2, 128) * 128 ** -0.5, unit(batch, length, 2, 128)
    k[:, length // 2:] = k[:, length // 2:length // 2 + 1]  # repeated keys: the hard case of the solve
    v = torch.randn(batch, length, 6, 128, generator=gen, dtype=torch.float64)
    g = -torch.rand(batch, length, 6, generator=gen, dtype=torch.float64) * 0.2
    beta = torch.rand(batch, length, 6, generator=gen, dtype=torch.float64)
    return [x.to(DEVICE, kind).requires_grad_() for x in (q, k, v, g, beta)]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def trained(q, k, v, g, beta):
    a, p, c = delta.intra(q, k, g, beta, 3)
    w, u, kd, qe, dec = delta.inputs_of_scan(delta.TriInverse.apply(a), k, v, c, beta, q, 3)
    vn, s = delta.Scan.apply(w, u, kd, dec)
    return delta.outputs_of_scan(qe, s, p, vn)


def chunks_equal_the_recurrence():
    for kind, bound in ((torch.float64, 1e-5), (torch.float32, 2e-3)):
        if kind is torch.float64 and (DEVICE == "cuda" or delta.INTERPRETED):
            continue
        x = inputs(2, 192, kind)
        truth = inputs(2, 192, torch.float64)
        want, last = delta.recurrent(*truth)
        got = trained(*x)
        weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(DEVICE)
        (want * weight).sum().backward()
        (got * weight.to(got.dtype)).sum().backward()
        errors = [relative(got, want)] + [relative(a.grad, b.grad) for a, b in zip(x, truth)]
        print(kind, "o, dq, dk, dv, dg, dbeta:", *(f"{e:.1e}" for e in errors))
        assert max(errors) < bound, errors
        for cut in (64, 100):
            with torch.no_grad():
                part, state = delta.chunked(*(t[:, :cut] for t in x))
                rest, state = delta.chunked(*(t[:, cut:] for t in x), state=state)
            assert relative(torch.cat([part, rest], 1), want) < bound
            assert relative(state, last) < bound


def the_target_equals_transformers():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from export import hf_config
    c = TargetConfig(vocab=512, layers=4, ffn=256)
    ours = Target(c).initialise(1).double()
    with torch.no_grad():
        gen = torch.Generator().manual_seed(3)
        for p in ours.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p))
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hf_config(c))).float().eval()
    missing = theirs.load_state_dict({k: v.float() for k, v in ours.state_dict().items()}, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys, missing
    ids = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        out = theirs(ids, output_hidden_states=True)
        hidden, taps = ours.float()(ids, taps=(0, 1, 2))
    worst = (ours.head(hidden) - out.logits).abs().max().item()
    tap = max((t - h).abs().max().item() for t, h in zip(taps, out.hidden_states[1:4]))
    print(f"against transformers: logits {worst:.1e} (std {out.logits.std():.2f}), taps {tap:.1e}")
    assert worst < 1e-4 and tap < 1e-4


if __name__ == "__main__":
    delta.KERNELS = DEVICE == "cuda"
    chunks_equal_the_recurrence()
    if DEVICE == "cpu" and not delta.INTERPRETED:
        the_target_equals_transformers()
