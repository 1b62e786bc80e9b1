"""Reference results of a model in Hugging Face: logits, hidden states, recurrent states, greedy ids."""

import numpy as np
import torch

from dequantised import hf_to_gguf_heads

HIDDEN_POSITIONS = [0, 63, 64, 199]
GREEDY = 24
# The start, each multiple of the chunk length 64 with its neighbours, some others, and the end.
LOGIT_POSITIONS = sorted(
    set(
        list(range(0, 8))
        + [15, 16, 17, 31, 32, 33, 47, 48]
        + list(range(60, 70))
        + [80, 95, 96, 97, 111, 112]
        + list(range(124, 133))
        + [143, 144, 159, 160, 161, 175, 176]
        + list(range(189, 200))
    )
)


class HiddenStateCapture:
    """Captures the residual stream after the embedding and after every layer of one forward call."""

    def __init__(self, model):
        self.captured = []
        blocks = [model.model.embed_tokens, *model.model.layers]
        self.hooks = [b.register_forward_hook(self._capture) for b in blocks]

    def _capture(self, _module, _inputs, output):
        self.captured.append((output[0] if isinstance(output, tuple) else output)[0].detach().clone())

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        return torch.stack(self.captured).numpy()


@torch.no_grad()
def compute(model, ids):
    """All reference results of one model for one sequence of token ids, as numpy arrays and lists."""
    tokens = torch.tensor([ids])
    capture = HiddenStateCapture(model)
    output = model(tokens, use_cache=True)
    hidden = capture.stop()
    logits, cache = output.logits[0].numpy(), output.past_key_values
    result = {"logits": logits, "hidden": hidden[:, HIDDEN_POSITIONS]}
    assert hidden.shape[0] == model.config.num_hidden_layers + 1
    types = getattr(model.config, "layer_types", None) or []
    if types and types[0] == "linear_attention":
        result |= first_layer_state(model.config, cache)
    result |= greedy(model, cache, logits[-1])
    result["step_difference"] = one_by_one(model, tokens, logits)
    return result


def first_layer_state(config, cache):
    """Gated-delta state and conv state of layer 0, with value heads in GGUF order."""
    n_k, n_v = config.linear_num_key_heads, config.linear_num_value_heads
    heads = hf_to_gguf_heads(n_k, n_v)
    delta = cache.get_recurrent_state(0, state_idx=0)[0].numpy()[heads]
    conv = cache.get_conv_state(0, state_idx=0)[0].numpy()[:, -3:]
    split = 2 * n_k * config.linear_key_head_dim
    values = conv[split:].reshape(n_v, config.linear_value_head_dim, 3)[heads].reshape(-1, 3)
    return {"delta": delta, "conv": np.concatenate([conv[:split], values]).T}


def greedy(model, cache, last):
    """Greedy continuation with the cache, and the logit margin of every token."""
    ids, margins = [], []
    for _ in range(GREEDY):
        best = np.argsort(last)[::-1][:2]
        ids.append(int(best[0]))
        margins.append(float(last[best[0]] - last[best[1]]))
        out = model(torch.tensor([[ids[-1]]]), past_key_values=cache, use_cache=True)
        cache, last = out.past_key_values, out.logits[0, -1].numpy()
    return {"greedy_ids": ids, "greedy_margins": margins}


def one_by_one(model, tokens, logits):
    """Largest difference between one call over all tokens and one call per token."""
    cache, worst = None, 0.0
    for i in range(tokens.shape[1]):
        out = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        worst = max(worst, float(np.abs(out.logits[0, 0].numpy() - logits[i]).max()))
    return worst
