"""Writes the golden files from the shipped GGUF pair: see models/ember/README.md for their contents.

The target is transformers' Qwen3.5 class in f32 on the dequantised weights; the draft is our own module.
Usage: python golden.py DATA_DIR ember.gguf draft.gguf OUT_DIR
"""
import hashlib
import json
import os
import sys

import jinja2
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import accept
import gen_tools
import render
from export import hf_config
from from_gguf import load_pair
from target import TargetConfig
from words import World

NEW = 96
FULL_LOGITS = 8     # positions with all logits
TAP_ROWS = 48       # positions with hidden states of the taps
WINDOW = 64         # of the sliding variant
HERE = os.path.dirname(os.path.abspath(__file__))


def conversations():
    """A few fixed conversations: (name, messages, tools, enable_thinking)."""
    u = lambda text: {"role": "user", "content": text}
    w = World("golden", "heldout")
    tools = [t["schema"] for t in gen_tools.toolset(w, 3, lambda w, parts: "_".join(parts))]
    name = tools[1]["function"]["name"].split("_")
    wish = f"Please {name[0]} the {' '.join(name[1:])}"
    args = []
    for key, entry in tools[1]["function"]["parameters"]["properties"].items():
        args.append(f"{key.replace('_', ' ')} " + {"string": (entry.get("enum") or ["amber"])[0], "integer": "27",
                                                    "number": "3.5", "boolean": "true"}.get(entry["type"], "amber"))
    wish += (" with " + " and ".join(args) if args else "") + "."
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": tools[1]["function"]["name"], "arguments": {"id": "A-1", "deep": True, "tags": ["x", "y"]}}}]}
    return [
        ("chat", [u("What is the capital of Norway?")], None, None),
        ("story", [u("Write a short story about a brave lamp named Otto in Bergen with a coin.")], None, False),
        ("code", [u("Write a Rust function count_silver_tickets that counts how often each entry of tickets occurs.")], None, False),
        ("sum", [{"role": "system", "content": "You are a helpful assistant."}, u("What is 58 + 67?")], None, True),
        ("json", [u("Return only JSON. Use the keys name, city: name Nora Quellen, city Bremen.")], None, False),
        ("tool", [u(wish)], tools, True),
        ("result", [u("Hello!"), {"role": "assistant", "content": "Hi.", "reasoning_content": "old"}, u(wish), call,
                    {"role": "tool", "content": "{\"status\": \"ok\"}"}, {"role": "tool", "content": "second"}], tools, False),
    ]


def template_of(path):
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)

    def stop(message):
        raise jinja2.TemplateError(message)
    env.globals["raise_exception"] = stop
    with open(path, encoding="utf-8") as file:
        return env.from_string(file.read())


def hf_model(target):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    config = {k: v for k, v in hf_config(TargetConfig()).items() if k not in ("architectures", "model_type")}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config, attn_implementation="eager")).float().eval()
    report = model.load_state_dict(target.state_dict(), strict=False)
    assert not report.unexpected_keys and report.missing_keys in ([], ["lm_head.weight"]), report
    model.tie_weights()
    return model


@torch.no_grad()
def greedy(model, ids, new, stops):
    """Greedy continuation by whole forward passes (no cache: one code path less to trust), with margins."""
    out, margins = [], []
    cache = None
    step = torch.tensor([ids])
    for _ in range(new):
        result = model(step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        top = result.logits[0, -1].topk(2)
        out.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 5))
        if out[-1] in stops:
            break
        step = torch.tensor([[out[-1]]])
    return out, margins


@torch.no_grad()
def main():
    data, target_path, draft_path, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    tokenizer = Tokenizer.from_file(os.path.join(data, "tokenizer.json"))
    template = template_of(os.path.join(HERE, "..", "chat_template.jinja"))
    target, draft = load_pair(target_path, draft_path)
    _, sliding = load_pair(target_path, draft_path, WINDOW)
    model = hf_model(target)
    stops = {tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    taps = draft.c.taps
    cases, arrays = [], {}
    for name, messages, tools, thinking in conversations():
        extra = {} if thinking is None else {"enable_thinking": thinking}
        text = template.render(messages=messages, tools=tools, add_generation_prompt=True, **extra)
        plain = [dict(m, tool_calls=[c["function"] for c in m["tool_calls"]]) if m.get("tool_calls") else m for m in messages]
        assert text == render.text(plain, tools, thinking, generate=True), (name, text)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        new, margins = greedy(model, prompt, NEW, stops)
        whole = prompt + new
        result = model(torch.tensor([whole]), output_hidden_states=True)
        logits = result.logits[0]
        assert logits[len(prompt) - 1:len(whole) - 1].argmax(-1).tolist() == new, name
        top = logits.topk(8, -1)
        arrays[f"{name}.top_ids"] = top.indices.to(torch.int32)
        arrays[f"{name}.top_logits"] = top.values.float()
        arrays[f"{name}.log_sum_exp"] = logits.logsumexp(-1).float()
        case = {"name": name, "messages": messages, "tools": tools, "enable_thinking": thinking, "prompt": text, "prompt_ids": prompt,
                "greedy_ids": new, "greedy_text": tokenizer.decode(new, skip_special_tokens=False), "margins": margins}
        if name == "chat":
            at = torch.linspace(0, len(whole) - 1, FULL_LOGITS).long()
            arrays["chat.logits"], case["logits_at"] = logits[at].float().clone(), at.tolist()
        if name in ("story", "code", "tool"):
            for kind, module in (("", draft), ("sliding.", sliding)):
                best, values = accept.tables(target, module, prompt, new, top=8)
                keep = slice(0, len(best), 6) if kind else slice(None)
                arrays[f"{name}.{kind}draft_ids"] = torch.tensor(best[keep], dtype=torch.int32)
                arrays[f"{name}.{kind}draft_log_probs"] = torch.tensor(values[keep], dtype=torch.float32)
                kept = {"chain": [], "tree": []}
                for at in range(len(new)):
                    chain = 0
                    while chain < 15 and at + 1 + chain < len(new) and best[at][chain][0] == new[at + 1 + chain]:
                        chain += 1
                    kept["chain"].append(chain)
                    kept["tree"].append(accept.walk(accept.tree(values[at], 22, 15), best[at], new, at))
                case["sliding_kept" if kind else "kept"] = kept
        if name == "code":
            hidden = [result.hidden_states[t + 1][0] for t in taps]
            arrays["code.taps"] = torch.stack([h[:TAP_ROWS] for h in hidden]).float().contiguous()
            x, f = torch.tensor([whole + [0] * (-len(whole) % 64)]), None
            _, ours = target(x, taps)
            worst = max((a[0, :len(whole)] - b).abs().max().item() for a, b in zip(ours, hidden))
            anchor = len(prompt)
            block = torch.full((1, 1, draft.c.block), draft.c.mask_token)
            block[0, 0, 0] = whole[anchor]
            arrays["code.draft_hidden"] = draft(torch.cat(ours, -1), block, torch.tensor([[anchor]]),
                                                target.model.embed_tokens.weight)[0, 0].float().contiguous()
            case["draft_hidden_anchor"] = anchor
            print(f"taps: transformers and ours differ by {worst:.1e}")
        cases.append(case)
        print(name, len(prompt), "+", len(new), repr(case["greedy_text"][:100]), case.get("kept", {}).get("tree", [])[:12])
    save_file(arrays, os.path.join(folder, "golden.safetensors"))
    sha = lambda p: hashlib.sha256(open(p, "rb").read()).hexdigest()
    with open(os.path.join(folder, "golden.json"), "w", encoding="utf-8") as file:
        json.dump({"target_sha256": sha(target_path), "draft_sha256": sha(draft_path), "taps": list(taps), "sliding_window": WINDOW,
                   "budget": 22, "cases": cases}, file, ensure_ascii=False, indent=1)
    for name in sorted(os.listdir(folder)):
        print(name, os.path.getsize(os.path.join(folder, name)))


if __name__ == "__main__":
    main()
