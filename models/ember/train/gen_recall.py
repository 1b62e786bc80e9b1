"""Recall: facts planted in filler at any depth, then questions about them.

A document is filler of one or several kinds with facts between its pieces. Beside the facts that are asked for
stand others of the same sort. A long document gets many questions, so that every row trains many retrievals.
"""
import recall_facts
import recall_filler
import render
from gen_chat import answer, user
from recall_facts import first_upper

LEADS = ("Read this text:\n\n{d}\n\n{q}", "{d}\n\n{q}", "{d}\n\nQuestion: {q}", "Here is a text.\n\n{d}\n\n{q}", "<text>\n{d}\n</text>\n\n{q}",
         "Use the text below to answer.\n\n{d}\n\n{q}", "Context:\n{d}\n\nQuestion: {q}\nAnswer:", "```\n{d}\n```\n\n{q}",
         "Some special facts are hidden within the following text. Make sure to memorize them. I will quiz you about them afterwards.\n{d}\n{q}",
         "My notes:\n\n{d}\n\nMy question: {q}", "{d}\n{q}", "Document:\n{d}\n\n---\n\n{q}")
BEFORE = ("{q} The text follows.\n\n{d}", "{q}\n\n{d}", "Question: {q}\n\nText:\n{d}\n\nAgain, the question: {q}")
STORE = (("Remember this: {s}", "I will remember it."), ("By the way: {s}", "Noted."), ("{s}", "OK."), ("Please note: {s}", "I have noted it."),
         ("One more thing. {s}", "Thank you, I will keep it in mind."), ("Just so you know, {s}", "Good to know."))
SYSTEMS = ("You are a helpful assistant.\n\n{d}", "{d}", "Answer from these notes.\n\n{d}", "# Knowledge\n\n{d}\n\nAnswer briefly.")


def filler_kinds(w, kinds=None):
    """One kind for the whole document, or a few that follow each other."""
    if kinds:
        return kinds
    names, shares = list(recall_filler.SHARES), list(recall_filler.SHARES.values())
    return w.rng.choices(names, shares, k=w.choice((1, 1, 1, 2, 3, 4)))


def filler(w, chars, passages, kinds=None):
    """[(unit, joint, host)] of about `chars` characters."""
    names = filler_kinds(w, kinds)
    makers = {**recall_filler.TRAIN, **recall_filler.HELD}
    out = []
    for name in names:
        units, joint, host = makers[name](w, max(1, chars // len(names)), passages)
        out += [(u, joint, host) for u in units]
    return out


def stated(w, part, host):
    if host == "log":
        return f"{recall_filler.stamp(w)} INFO {w.noun()}: {part['log']}" if w.chance(0.7) else part["prose"]
    if host == "json":
        return recall_filler.json.dumps(part["record"]) if w.chance(0.7) else part["line"]
    if host == "code" and w.chance(0.3):
        return part["prose"].strip("\n")
    return part[host] if host != "prose" or w.chance(0.9) else "\n" + part["line"] + "\n"


def plant(w, pieces, parts):
    """Text of the pieces with the parts at given depths: parts is [(part, depth in 0..1)]. Depth counts characters."""
    ends, size = [], 0
    for unit, joint, _ in pieces:
        size += len(unit) + len(joint)
        ends.append(size)
    at = {}
    for part, depth in parts:
        want, index = depth * size, 0
        while index < len(ends) and ends[index] <= want:
            index += 1
        if depth >= 1.0:
            index = len(pieces)
        at.setdefault(index, []).append(part)
    out = []
    for i in range(len(pieces) + 1):
        unit, joint, host = pieces[min(i, len(pieces) - 1)] if pieces else ("", "\n", "prose")
        for part in at.get(i, ()):
            out += [stated(w, part, host), joint]
        if i < len(pieces):
            out += [unit, joint]
    return "".join(out).strip()


def parts_of(fact):
    return fact.get("parts", [fact])


def choose(w, n, kind=None):
    """`n` facts to ask for, no two with the same key."""
    out, seen = [], set()
    while len(out) < n:
        r = w.random()
        f = recall_facts.fact(w, kind) if kind else (recall_facts.two_hops(w) if r < 0.06 else recall_facts.variables(w) if r < 0.08 else
                                                     recall_facts.several(w) if r < 0.15 else recall_facts.fact(w))
        if f["key"] not in seen:
            seen.add(f["key"])
            out.append(f)
    return out


def distractions(w, facts, n):
    """Facts like those asked for that share no key with them."""
    taken = {p.get("key", f["key"]) for f in facts for p in parts_of(f)}
    taken |= {f["key"] for f in facts}
    out = []
    for _ in range(n * 3):
        if len(out) >= n:
            break
        other = w.choice(facts)["like"](w)
        if other["key"] not in taken and not any(p.get("key") in taken for p in parts_of(other)):
            taken.add(other["key"])
            out.append(other)
    return out


def in_order(w, fact, depths):
    """The depths of a fact's parts: sorted where the answer lists the parts as they stand."""
    mine = [depths() for _ in parts_of(fact)]
    return sorted(mine) if fact.get("ordered") else mine


def reply(w, fact):
    """The assistant's message."""
    if "parts" in fact:
        why = w.choice(("I look for the facts in the text.", "The answer needs more than one place of the text."))
    else:
        said = fact["prose"].strip()
        why = f"The text says: {said}" if "\n" not in said and w.chance(0.8) else f"I look for it in the text. {fact['answer']}"
    return answer(fact["answer"], why)


def document(w, chars, passages, facts, extra=(), kinds=None, depth=None):
    """Filler with the facts and the distractions in it; `depth` fixes where every asked fact stands."""
    depths = w.random if depth is None else lambda: depth
    parts = [(p, d) for f in facts for p, d in zip(parts_of(f), in_order(w, f, depths))]
    parts += [(p, w.random()) for f in extra for p in parts_of(f)]
    return plant(w, filler(w, chars, passages, kinds), parts)


def sample(w, chars, passages, dense=0.0):
    """A conversation about a document of about `chars` characters."""
    if w.chance(dense):  # many facts and hardly any filler: most of the tokens are answers
        count, chars = w.randint(4, 40), w.randint(0, 900)
        facts, extra = choose(w, count), []
        asked = w.sample(facts, count)
    else:
        count = w.randint(6, 48) if chars > 8_000 else max(1, min(w.randint(1, 24), chars // 250 + 1))
        facts = choose(w, count)
        extra = distractions(w, facts, w.randint(0, min(24, chars // 300 + 1)))
        asked = facts if count < 3 else w.sample(facts, w.randint(max(1, count * 2 // 3), count))
    shape = w.random()
    messages = []
    if shape < 0.14 and chars < 20_000:
        return {"messages": talk(w, chars, passages, facts, asked), "tools": None, "kind": "recall-talk"}
    text = document(w, chars, passages, facts, extra)
    first, rest = asked[0], asked[1:]
    if shape < 0.30:
        messages.append({"role": "system", "content": w.choice(SYSTEMS).format(d=text)})
        messages += [user(first["question"]), reply(w, first)]
    elif shape < 0.40:
        messages += [user(w.choice(("Here is a text. Read it.\n\n{d}", "{d}", "Read my notes:\n{d}")).format(d=text)),
                     answer(w.choice(("I have read the text.", "OK.", "I have read it. What do you want to know?")), "I read the text.")]
        messages += [user(first["question"]), reply(w, first)]
    else:
        if w.chance(0.15):
            messages.append({"role": "system", "content": "You are a helpful assistant."})
        form = w.choice(BEFORE) if w.chance(0.12) else w.choice(LEADS)
        messages += [user(form.format(d=text, q=first["question"])), reply(w, first)]
    for f in rest:
        messages += [user(f["question"]), reply(w, f)]
    return {"messages": messages, "tools": None, "kind": "recall"}


def talk(w, chars, passages, facts, asked):
    """Facts told between other turns of a chat."""
    import gen_chat
    import gen_prose
    turns, size = [], 0
    while size < chars:
        if w.chance(0.5):
            pair = w.choice((gen_chat.fact, gen_chat.arithmetic, gen_chat.reading, gen_prose.explain, gen_prose.steps, gen_chat.string_task))(w)[0]
        else:
            unit = filler(w, w.randint(60, 900), passages)[0][0]
            pair = [user(first_upper(unit[:1500]) if unit.strip() else "Go on."), answer(w.choice(("I see.", "OK.", "Interesting.", "Thank you.")), "A short answer.")]
        for m in pair:
            m.pop("direct", None)
        turns.append(pair)
        size += sum(len(m["content"]) for m in pair)
    for f in facts:
        spots = sorted(w.randint(0, len(turns)) for _ in parts_of(f))
        for spot, part in reversed(list(zip(spots, parts_of(f)))):
            form, ok = w.choice(STORE)
            turns.insert(spot, [user(form.format(s=part["prose"])), answer(ok, "I keep it in mind.")])
    out = [m for pair in turns for m in pair]
    for f in asked:
        out += [user(f["question"]), reply(w, f)]
    return out


def raw(w, chars, passages):
    """A document that goes on with questions and answers, without the chat format: (text, weight) runs."""
    facts = choose(w, max(1, min(w.randint(1, 16), chars // 250 + 1)))
    text = document(w, chars, passages, facts, distractions(w, facts, w.randint(0, 8)))
    form = w.choice(("\n\nQuestion: {q}\nAnswer:", "\nQ: {q}\nA:", "\n\n{q}\n"))
    out = [(text, render.FILLER_WEIGHT)]
    for f in facts:
        lead = form.format(q=f["question"])
        out += [(lead, render.FILLER_WEIGHT), (("" if lead.endswith("\n") else " ") + f["answer"], 1.0)]
    return out + [("\n<|endoftext|>", render.PROMPT_WEIGHT)]


def training_parts(w, chars, passages, dense=0.0):
    """(text, weight) runs of a recall sample; the document itself counts for little."""
    if w.chance(0.07):
        return raw(w, chars, passages)
    conversation = sample(w, chars, passages, dense)
    think = w.chance(0.4)
    for m in conversation["messages"]:
        if m["role"] == "assistant" and not think:
            m["reasoning_content"] = ""
    parts = render.segments(conversation["messages"])
    return [(t, render.FILLER_WEIGHT if p != 1.0 else 1.0) for t, p in parts] + [("<|endoftext|>", render.PROMPT_WEIGHT)]
