"""Held-out tasks with known answers, for any model behind a chat API or in PyTorch.

Tasks come from the generator of the bundled model's training data, with values of the held-out split only.
Operand pairs, tool names and argument values of these tasks occur nowhere in training; `disjoint.py` checks
this.

There are two sorts of tool tasks. In "tool" and "tool-long", names describe the tools, as in real agents:
`fetch_invoice`, `fetchInvoice`, `invoice-fetch`, or a server's prefix before all of its tools. In "tool-hard"
and "tool-long-hard", every name has its own style, and one in ten is two invented words. The model must find
such a tool by its description; these kinds have no target.

A task is {"id", "kind", "think", "messages", "tools", "expect"}; `expect` is one of {"calls": [...]},
{"json": value}, {"number": n} or {"closed": true}. Usage: python tasks.py OUT.jsonl [--scale 1.0]
"""

import argparse
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "models", "ember", "train"))

import gen
import gen_chat
import gen_tools
from words import World, load_common

SEED = "quality-1"
COUNTS = {
    "tool": 240,
    "tool-hard": 120,
    "tool-long": 60,
    "tool-long-hard": 30,
    "json": 240,
    "sum": 400,
    "think": 300,
}
LONG_CHARS = 67_000  # about 16,000 tokens of the bundled model


def strip(sample):
    """Splits a sample into (messages before the reply, the reply)."""
    return sample["messages"][:-1], sample["messages"][-1]


def plain_names(w):
    """A naming function with one style for a whole set of tools."""
    style, server = w.randint(0, 4), w.noun()

    def name(w, parts):
        camel = parts[0] + "".join(p.capitalize() for p in parts[1:])
        return (
            "_".join(parts),
            camel,
            "-".join(parts),
            "_".join(parts[1:] + parts[:1]),
            server + "__" + "_".join(parts),
        )[style]

    return name


def make(kind, index, notes=()):
    w = World(f"{SEED}/{kind}/{index}", "heldout")
    think = index % 2 == 0
    naming = None if kind.endswith("hard") else plain_names(w)
    if kind in ("tool", "tool-hard"):
        sample = gen_tools.tool_sample(w, think, turns=1, no_fit=0, answer=0, parallel=0.2, naming=naming)
    elif kind in ("tool-long", "tool-long-hard"):
        sample = gen_tools.agent_sample(
            w, LONG_CHARS, notes, think, requests=1, no_fit=0, answer=0, parallel=0, naming=naming
        )
    elif kind == "json":
        messages, _ = gen_chat.json_task(w)
        sample = {"messages": messages, "tools": None}
    elif kind == "sum":
        while True:
            messages, operation = gen_chat.arithmetic(w)
            if (
                operation == "sum"
                and 20 <= (total := int(messages[-1]["content"].rstrip(".").split("=")[-1])) <= 198
            ):
                break
        sample = {"messages": messages, "tools": None}
    else:
        think = True
        sample = gen.conversation(w, think=True)
    messages, reply = strip(sample)
    expect = (
        {"calls": reply["tool_calls"]}
        if kind.startswith("tool")
        else {"json": json.loads(reply["content"])}
        if kind == "json"
        else {"number": total}
        if kind == "sum"
        else {"closed": True}
    )
    return {
        "id": f"{kind}-{index}",
        "kind": kind,
        "think": think,
        "messages": messages,
        "tools": sample["tools"],
        "expect": expect,
    }


def all_tasks(scale=1.0, notes=()):
    return [make(kind, i, notes) for kind, n in COUNTS.items() for i in range(max(1, int(n * scale)))]


def notes_of(corpus):
    """Documentation passages of held-out files, used as padding in long prompts."""
    import lzma

    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    return [e["text"] for e in entries if e["split"] == "heldout" and e["source"] == "rust-docs"]


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("out")
    args.add_argument("--scale", type=float, default=1.0)
    args.add_argument(
        "--words", help="words.json of the recipe; without it, invented words replace common ones"
    )
    args.add_argument(
        "--corpus", help="corpus.jsonl.xz of the recipe; pads long prompts with documentation"
    )
    args = args.parse_args()
    if args.words:
        load_common(args.words)
    with open(args.out, "w", encoding="utf-8") as file:
        for task in all_tasks(args.scale, notes_of(args.corpus) if args.corpus else ()):
            file.write(json.dumps(task, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
