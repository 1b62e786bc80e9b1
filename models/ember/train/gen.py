"""The mixture: which kind of sample comes how often, and samples as weighted token runs.

A conversation for training is made by `conversation(world)`; held-out prompts for evaluation come from the
same makers with a `World` of the held-out split.
"""
import gen_chat
import gen_code
import gen_copy
import gen_prose
import gen_tools
import render

MAKERS = {"chat": gen_chat.MAKERS, "prose": gen_prose.MAKERS, "code": gen_code.MAKERS, "copy": gen_copy.MAKERS, "tools": None}
MIX = {"chat": 36, "prose": 20, "code": 27, "tools": 17}


def weighted(w, makers):
    total = sum(m[-1] for m in makers)
    at = w.random() * total
    for m in makers:
        at -= m[-1]
        if at < 0:
            return m
    return makers[-1]


def plain(w, makers, think):
    """A sample without tools, now and then with tools that it must leave alone."""
    messages, kind = weighted(w, makers)[0](w)
    for m in messages:
        if m["role"] == "assistant":
            shown = m.pop("direct", None)
            if not think:
                m["reasoning_content"] = ""
                m["content"] = shown or m["content"]
    tools = None
    if messages[0]["role"] == "user" and w.chance(0.05):
        tools = [t["schema"] for t in gen_tools.toolset(w, w.randint(1, 4))]
    return {"messages": messages, "tools": tools, "kind": kind}


def conversation(w, family=None, think=None, passages=(), mix=MIX):
    """One sample {"messages", "tools", "kind", "family"} of a mixture of families."""
    name = family or weighted(w, list(mix.items()))[0]
    makers = MAKERS[name]
    think = w.chance(0.45) if think is None else think
    if name != "tools":
        sample = plain(w, makers, think)
    elif w.chance(0.12):
        sample = gen_tools.agent_sample(w, w.randint(2500, 9000), passages, think)
    else:
        sample = gen_tools.tool_sample(w, think)
    sample["family"], sample["think"] = name, think
    return sample


def training_parts(sample):
    """(text, weight) runs of a sample, ending with the end-of-text mark."""
    return render.segments(sample["messages"], sample["tools"]) + [("<|endoftext|>", render.PROMPT_WEIGHT)]


def task(sample):
    """(prompt text, expected answer message) of a sample: everything before its last assistant message."""
    messages = sample["messages"]
    assert messages[-1]["role"] == "assistant"
    return render.text(messages[:-1], sample["tools"], sample["think"], generate=True), messages[-1]
