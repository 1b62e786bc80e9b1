"""Long prompts with known answers, to compare full prefill with compressed prompts.

Kinds: `needle` (one fact at a given depth), `four` (four facts asked for at once), `hops` (two facts, the second
found through the first), `page` (one of twelve statements of a page that stands in other text), `function` (a
function in real code, to be found and written again with another constant), `tools` (a tool call after a long
text). Facts, questions and most fillers come from the generators of the bundled model's recipe, with values of the
held-out split; `code` is this project's own source.

A task is {"id", "kind", "filler", "length", "depth", "seed", "messages", "tools", "value", "calls", "needed"}:
`needed` are the statements without which nobody could answer.
"""

import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
sys.path.insert(0, os.path.join(ROOT, "models", "ember", "train"))

import gen_recall
import gen_tools
import recall_facts
import recall_filler
from tasks import plain_names
from words import World

KINDS = ("needle", "four", "hops", "page", "function", "tools")
LEADS = ("{d}\n\n{q}", "Read this text:\n\n{d}\n\n{q}", "Context:\n{d}\n\nQuestion: {q}\nAnswer:")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Written by people or of sentences that people wrote; random words; real code.
FILLERS = {"own": ("everyday", "essay", "minutes"), "random": ("salad",), "code": ("code",)}
PAGE_STATEMENTS = 12
# Longer items of code would make a text much longer than asked for.
LONGEST_ITEM_CHARS = 2000


def sources():
    """Top-level items of this project's Rust files, in a fixed order, but for long ones."""
    folder = os.path.join(ROOT, "crates", "decode", "src")
    paths = sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
    pieces = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
        pieces += re.split(r"\n\n(?=[^\s}])", text)
    return [piece for piece in pieces if len(piece) <= LONGEST_ITEM_CHARS]


CODE = []


def filler(w, sort, chars):
    """(pieces, joint) of about `chars` characters."""
    name = w.choice(FILLERS[sort])
    if name == "code":
        CODE[:] = CODE or sources()
        start = w.randint(0, len(CODE) - 1)
        pieces, size = [], 0
        while size < chars:
            piece = CODE[(start + len(pieces)) % len(CODE)]
            pieces.append(piece)
            size += len(piece) + 2
        return pieces, "\n\n"
    makers = {**recall_filler.TRAIN, **recall_filler.HELD}
    pieces, joint, _ = makers[name](w, chars, {})
    return pieces, joint


def plant(pieces, joint, planted):
    """The text of `pieces` with (statement, depth) planted; depths are in 0 to 1."""
    size = sum(len(piece) + len(joint) for piece in pieces)
    out, at, left = [], 0, sorted(planted, key=lambda p: p[1])
    for piece in pieces:
        while left and left[0][1] < 1.0 and left[0][1] * size <= at:
            out.append(left.pop(0)[0])
        out.append(piece)
        at += len(piece) + len(joint)
    return joint.join(out + [statement for statement, _ in left])


def statement(part, sort):
    return part["code" if sort == "code" else "prose"].strip()


def sentences_with(text, values):
    """The sentences of a statement that hold one of the values, or all of it."""
    sentences = re.split(r"(?<=[.!?]) ", text)
    return [s for s in sentences if any(v in s for v in values)] or [text]


def facts_of(w, kind, sort):
    """(parts to plant, question, values, statements needed) of a fact."""
    if kind == "needle":
        fact = recall_facts.fact(w, "constant" if sort == "code" else w.choice(("attribute", "event", "sentence")))
    elif kind == "four":
        while True:
            fact = recall_facts.several(w)
            if len(fact["parts"]) == 4:
                break
    else:
        fact = recall_facts.two_hops(w)
    values = fact["value"] if isinstance(fact["value"], list) else [fact["value"]]
    return fact, [statement(part, sort) for part in gen_recall.parts_of(fact)], values


def page(w):
    """A page of statements that follow each other, and one of them."""
    facts = [recall_facts.fact(w, w.choice(("attribute", "event"))) for _ in range(PAGE_STATEMENTS)]
    fact = w.choice(facts)
    title = f"Page {w.integer(2, 400)}: {w.phrase()}"
    text = title + "\n\n" + " ".join(statement(f, "own") for f in facts)
    return fact, text, [fact["value"]]


def function(w):
    """A function, and its body after a change."""
    name, x = w.snake(), w.noun()
    old, new = (recall_facts.digits(w, 3, 5) for _ in range(2))
    text = f"def {name}({x}):\n    return {x} * {old}"
    question = f"Find the function {name} and write it again with {new} instead of {old}."
    return text, question, [f"def {name}({x})", new]


def make(kind, sort, length, depth, seed, count):
    """One task; `count` counts the tokens of a text, and the text is made again until it fits.

    Of a text of another size the other choices differ too, so each attempt aims lower. No text has more than
    `length` tokens.
    """
    chars, task, most = int(length * 3.4), None, 0
    for attempt in range(12):
        made = draft(kind, sort, chars, depth, f"compression-1/{kind}/{sort}/{length}/{depth}/{seed}")
        tokens = count(max((m["content"] for m in made["messages"]), key=len))
        if most < tokens <= length:
            task, most = made, tokens
        if most >= (0.9 - 0.03 * attempt) * length:
            break
        chars = int(chars + ((0.96 - 0.03 * attempt) * length - tokens) * chars / tokens)
    if task is None:
        raise ValueError(f"no text of {kind} in {sort} fits in {length} tokens")
    task["id"] = f"{kind}-{sort}-{length}-{depth}-{seed}"
    task.update(kind=kind, filler=sort, length=length, depth=depth, seed=seed)
    return task


def draft(kind, sort, chars, depth, seed):
    w = World(seed, "heldout")
    if kind == "tools":
        return tool_task(w, sort, chars)
    if kind == "function":
        text, question, values = function(w)
        needed, planted = [text], [(text, depth)]
        extra = [(function(w)[0], w.random()) for _ in range(8)]
    elif kind == "page":
        fact, text, values = page(w)
        question, planted, extra = fact["question"], [(text, depth)], []
        needed = sentences_with(statement(fact, "own"), values)
    else:
        fact, needed, values = facts_of(w, kind, sort)
        question = fact["question"]
        depths = [depth] if kind == "needle" else sorted(w.random() for _ in needed)
        planted = list(zip(needed, depths))
        needed = [s for text in needed for s in sentences_with(text, values)]
        others = gen_recall.distractions(w, [fact], 8)
        extra = [(statement(p, sort), w.random()) for o in others for p in gen_recall.parts_of(o)]
    pieces, joint = filler(w, sort, chars)
    text = plant(pieces, joint, planted + extra)
    messages = [{"role": "user", "content": w.choice(LEADS).format(d=text, q=question)}]
    return {"messages": messages, "tools": None, "value": values, "calls": None, "needed": needed}


def tool_task(w, sort, chars):
    """A request that one of the tools answers, in a conversation that began with a long text."""
    naming = plain_names(w)
    sample = gen_tools.tool_sample(w, False, turns=1, no_fit=0, answer=0, parallel=0, naming=naming)
    request, reply = sample["messages"][-2], sample["messages"][-1]
    pieces, joint = filler(w, sort, chars)
    messages = [m for m in sample["messages"][:-2] if m["role"] == "system"]
    messages.append({"role": "user", "content": f"Read my notes:\n{joint.join(pieces)}"})
    messages.append({"role": "assistant", "content": "I have read the text."})
    messages.append({"role": "user", "content": request["content"]})
    return {
        "messages": messages,
        "tools": sample["tools"],
        "value": None,
        "calls": reply["tool_calls"],
        "needed": [request["content"]] + [tool["function"]["name"] for tool in sample["tools"]],
    }


def plan(lengths, seeds, kinds=KINDS):
    """(kind, filler, length, depth, seed) of all tasks; a prefix of the list is a fair sample of it."""
    for seed in range(seeds):
        for length in lengths:
            for i, kind in enumerate(kinds):
                sorts = ("code",) if kind == "function" else ("own", "random")
                if kind == "needle":
                    for j, depth in enumerate(DEPTHS):
                        yield kind, ("own", "random", "code")[(seed + j) % 3], length, depth, seed
                else:
                    depth = DEPTHS[(seed + i) % len(DEPTHS)]
                    yield kind, sorts[seed % len(sorts)], length, depth, seed
