"""The target as it ships: weights of the training run, rounded as the Q4_K_M file rounds them."""
import json
import os

import torch

import kquant
from parts import load_parts
from target import Target, TargetConfig


def head_order(config):
    """GGUF value head p holds Hugging Face head order[p]."""
    ratio = config.value_heads // config.key_heads
    return [(p % config.key_heads) * ratio + p // config.key_heads for p in range(config.value_heads)]


def rounded(name, weight, kind, config):
    """Rounds one weight in the layout of the file: out_proj has its columns in GGUF head order."""
    if not name.endswith("out_proj.weight"):
        return kquant.fake(weight, kind)
    order = torch.tensor(head_order(config), device=weight.device)
    columns = (order[:, None] * config.delta_dim + torch.arange(config.delta_dim, device=weight.device)).flatten()
    back = torch.empty_like(columns)
    back[columns] = torch.arange(len(columns), device=weight.device)
    return kquant.fake(weight[:, columns].contiguous(), kind)[:, back]


def load_config(work):
    with open(os.path.join(work, "target.json")) as file:
        return TargetConfig(**json.load(file))


def load_target(work, weights, device):
    """weights: "bf16" as trained, "q4_k_m" as shipped."""
    config = load_config(work)
    state = {k: v.float().to(device) for k, v in load_parts(os.path.join(work, "target-bf16")).items()}
    if weights == "q4_k_m":
        for name, kind in kquant.kinds_q4_k_m(state, config.layers).items():
            state[name] = rounded(name, state[name], kind, config)
    model = Target(config).to(device)
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
