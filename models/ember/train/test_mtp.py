"""Checks of the multi-token-prediction head against a draft made row by row. Run: python test_mtp.py"""
import torch
import torch.nn.functional as F

from mtp import MtpHead
from target import TargetConfig, apply_rope, rope_table

ROWS, DEPTH = 9, 4


def drafted(head, embed, ids, hidden, begin, depth):
    """What the head says at rows begin, begin + 1, ... when it drafts there: true rows before, its own rows from then on."""
    c, keys, values, out = head.c, [], [], []
    for row in range(begin + depth):
        before = torch.zeros(c.hidden) if row == 0 else hidden[row - 1] if row <= begin else out[-1]
        x = head.eh_proj(torch.cat([head.enorm(embed[ids[row]]), head.hnorm(before)]))
        y = head.input_layernorm(x)
        cos, sin = rope_table(torch.tensor([row]), c.rope_dims, c.rope_theta)
        q, gate = head.self_attn.q_proj(y).view(c.heads, 2 * c.head_dim).split(c.head_dim, -1)
        keys.append(apply_rope(head.self_attn.k_norm(head.self_attn.k_proj(y))[None], cos, sin)[0])
        values.append(head.self_attn.v_proj(y))
        q = apply_rope(head.self_attn.q_norm(q), cos, sin)
        weights = (q @ torch.stack(keys).T * c.head_dim ** -0.5).softmax(-1)
        mixed = (weights @ torch.stack(values)).flatten() * torch.sigmoid(gate.flatten())
        x = x + head.self_attn.o_proj(mixed)
        x = x + head.mlp(head.post_attention_layernorm(x))
        if row >= begin:
            out.append(head.shared_head_norm(x))
    return out


@torch.no_grad()
def unrolled_steps_equal_a_draft():
    head = MtpHead(TargetConfig(vocab=64)).initialise(1)
    gen = torch.Generator().manual_seed(2)
    for p in head.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=gen))
    embed, hidden = torch.randn(64, 256, generator=gen), torch.randn(1, ROWS, 256, generator=gen)
    ids = torch.randint(0, 64, (1, ROWS), generator=gen)
    steps = head.steps(ids, hidden, embed, DEPTH)
    worst = 0.0
    for begin in range(1, ROWS - DEPTH + 1):
        for s, want in enumerate(drafted(head, embed, ids[0], hidden[0], begin, DEPTH)):
            worst = max(worst, (steps[s][0, begin + s] - want).abs().max().item())
    print(f"unrolled steps against a draft row by row: {worst:.1e}")
    assert worst < 1e-4 and F.mse_loss(steps[0], steps[1]) > 1e-3


if __name__ == "__main__":
    unrolled_steps_equal_a_draft()
