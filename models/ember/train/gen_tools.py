"""Tool tasks: schemas of many shapes, calls whose arguments must be copied, results answered, refusals.

Each maker returns a sample {"messages", "tools", "kind"}; the last assistant message is the answer,
its `reasoning_content` is empty in the mode without thinking.
"""
import json

from words import NOUNS, VERBS

UNITS = [["celsius", "fahrenheit"], ["low", "medium", "high"], ["json", "csv", "xml"], ["draft", "sent", "paid"],
         ["asc", "desc"], ["daily", "weekly", "monthly"], ["small", "large"], ["red", "green", "blue"],
         ["en", "de", "fr", "es"], ["open", "closed"], ["north", "south", "east", "west"], ["cash", "card"]]
# parameter name -> (kind of value, description)
PARAMS = {
    "city": ("city", "Name of the city"), "location": ("city", "Place to use"), "destination": ("city", "Where to go"),
    "name": ("person", "Name to use"), "user": ("person", "Name of the user"), "recipient": ("person", "Who gets it"),
    "owner": ("person", "The owner"), "assignee": ("person", "Person in charge"), "customer": ("person", "The customer"),
    "id": ("ident", "Identifier"), "order_id": ("ident", "Identifier of the order"), "ticket": ("ident", "Ticket key"),
    "code": ("ident", "Code to look up"), "account_id": ("ident", "Identifier of the account"), "sku": ("ident", "Stock key"),
    "date": ("date", "Date as YYYY-MM-DD"), "start_date": ("date", "First day"), "due_date": ("date", "Last day"),
    "time": ("clock", "Time as HH:MM"), "amount": ("number", "Amount of money"), "price": ("number", "Price"),
    "weight": ("number", "Weight in kilograms"), "limit": ("integer", "Most entries to return"),
    "count": ("integer", "How many"), "quantity": ("integer", "How many pieces"), "page": ("integer", "Page number"),
    "minutes": ("integer", "Length in minutes"), "query": ("phrase", "Text to search for"),
    "message": ("phrase", "Text to send"), "title": ("phrase", "Title"), "note": ("phrase", "A short note"),
    "subject": ("phrase", "Subject line"), "path": ("path", "Path of the file"), "file": ("path", "File to use"),
    "email": ("email", "E-mail address"), "url": ("url", "Address of the page"),
    "unit": ("enum", "One of the listed values"), "priority": ("enum", "One of the listed values"),
    "format": ("enum", "Format of the result"), "status": ("enum", "State to use"), "order": ("enum", "Order of the result"),
    "urgent": ("bool", "Whether it is urgent"), "recursive": ("bool", "Whether to go deeper"),
    "notify": ("bool", "Whether to tell people"), "dry_run": ("bool", "Only pretend"),
    "tags": ("list", "Tags to set"), "items": ("list", "Items to use"), "filter": ("object", "Fields to match"),
}
TYPES = {"integer": "integer", "number": "number", "bool": "boolean", "list": "array", "object": "object"}


def spoken(name):
    return name.replace("_", " ")


def make_tool(w, used, noun=None, verb=None, naming=None):
    """A tool and what its tasks need: {"schema", "name", "verb", "noun", "params": [(name, kind, enum, required)]}.

    `naming` turns (world, words of the name) into the name; without it any of the styles below.
    """
    while True:
        v, n = verb or w.choice(VERBS), noun or w.choice(NOUNS)
        if w.chance(0.25):
            n = w.choice(NOUNS) + "_" + n
        style = w.randint(0, 19)
        parts = [v] + n.split("_")
        camel = parts[0] + "".join(p.capitalize() for p in parts[1:])
        name = ("_".join(parts) if style < 7 else camel if style < 10
                else w.choice(NOUNS) + "__" + "_".join(parts) if style < 13
                else w.invented() + "_" + w.invented() if style < 15
                else "_".join(parts[1:] + parts[:1]) if style < 17
                else "-".join(parts) if style < 18
                else "_".join(parts) + w.choice(("_v2", "_tool", "_now", "_by_id", "_" + w.choice(NOUNS))))
        if naming:
            name = naming(w, parts)
        if w.own_ok(name) and name not in used and not any(v == o["verb"] and n == o["noun"] for o in used.values()):
            break
    params = []
    for key in w.sample(list(PARAMS), w.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))):
        kind = PARAMS[key][0]
        if w.chance(0.1):
            key = w.invented()
        params.append((key, kind, w.choice(UNITS) if kind == "enum" else None, not params or w.chance(0.6)))
    properties = {}
    for key, kind, enum, _ in params:
        entry = {"type": TYPES.get(kind, "string")}
        if kind == "list":
            entry["items"] = {"type": "string"}
        if enum:
            entry["enum"] = enum
        if w.chance(0.6):
            entry["description"] = PARAMS.get(key, (0, f"The {key}"))[1]
        properties[key] = entry
    schema = {"type": "object", "properties": properties}
    required = [p[0] for p in params if p[3]]
    if required or w.chance(0.5):
        schema["required"] = required
    if w.chance(0.15):
        schema["additionalProperties"] = False
    article = "the" if v in ("get", "read", "open", "close", "start", "stop") else "a"
    description = w.choice((f"{v.capitalize()} {article} {spoken(n)}.", f"{v.capitalize()} {article} {spoken(n)}",
                            f"Use this to {v} {article} {spoken(n)}."))
    function = {"name": name, "description": description, "parameters": schema}
    if w.chance(0.1):
        function["strict"] = True
    tool = {"schema": {"type": "function", "function": function}, "name": name, "verb": v, "noun": n, "params": params}
    used[name] = tool
    return tool


def value(w, kind, enum):
    """(argument, how the user writes it)."""
    if kind == "enum":
        x = w.choice(enum)
        return x, x
    if kind == "bool":
        x = w.chance(0.5)
        return x, w.choice(("true", "on", "yes") if x else ("false", "off", "no"))
    if kind == "integer":
        x = w.integer(1, 500)
        return x, str(x)
    if kind == "number":
        x = w.number()
        return float(x), repr(float(x))
    if kind == "list":
        x = [w.word() for _ in range(w.randint(1, 3))]
        return x, " and ".join(x) if len(x) < 3 else f"{x[0]}, {x[1]} and {x[2]}"
    if kind == "object":
        x = {w.word(): w.word() for _ in range(w.randint(1, 2))}
        return x, " and ".join(f"{a} {b}" for a, b in x.items())
    x = getattr(w, kind)()
    if kind == "phrase":
        return x, f'"{x}"'
    return x, x


def request(w, tool):
    """(user sentence without final mark, arguments, short form for the reasoning)."""
    args, said = {}, []
    for key, kind, enum, required in tool["params"]:
        if required or w.chance(0.5):
            args[key], text = value(w, kind, enum)
            said.append(w.choice((f"{spoken(key)} {text}", f"{spoken(key)} = {text}", f"{spoken(key)}: {text}"))
                        if w.chance(0.4) else f"{spoken(key)} {text}")
    body = f"{tool['verb']} {w.choice(('the', 'a', 'my', 'the'))} {spoken(tool['noun'])}"
    if said:
        joined = said[0] if len(said) == 1 else ", ".join(said[:-1]) + w.choice((" and ", ", ")) + said[-1]
        body += w.choice((f" with {joined}", f", {joined}", f" using {joined}", f" ({joined})"))
    return body, args


LEADS = ("{}", "Please {}", "Can you {}?", "I need you to {}", "{} now", "Could you {}?", "I would like to {}",
         "Hi, please {}", "{} for me", "Go ahead and {}")


def ask(w, bodies):
    text = " and then ".join(bodies) if len(bodies) < 3 else ", then ".join(bodies)
    text = w.choice(LEADS).format(text)
    text = text[0].upper() + text[1:]
    return text if text.endswith("?") else text + w.choice((".", ".", ""))


def reason(calls, tools):
    """Short reasoning that names the function and repeats the arguments."""
    out = []
    for call, tool in zip(calls, tools):
        pairs = ", ".join(f"{k} = {json.dumps(v, ensure_ascii=False) if isinstance(v, (dict, list)) else v}"
                          for k, v in call["arguments"].items())
        line = f"To {tool['verb']} the {spoken(tool['noun'])} the function {call['name']} fits."
        out.append(line + (f" Arguments: {pairs}." if pairs else " It needs no arguments."))
    return ("" if len(out) == 1 else f"There are {len(out)} things to do. ") + " ".join(out)


def result(w, tool):
    """(tool result text, the assistant's sentence about it)."""
    noun = spoken(tool["noun"])
    kind = w.randint(0, 4)
    if kind == 0:
        return json.dumps({"error": (why := w.phrase())}), f"The attempt to {tool['verb']} the {noun} failed: {why}."
    if kind == 1:
        what = w.phrase()
        return what, f"The {noun} says: {what}."
    pairs = {}
    for key in w.sample(["status", "id", "count", "owner", "city", "price", "date", "state", "total", "temperature"],
                        w.randint(1, 3)):
        pairs[key] = {"status": lambda: w.choice(("ok", "done", "pending")), "id": w.ident, "count": w.integer,
                      "owner": w.person, "city": w.city, "price": lambda: float(w.number()), "date": w.date,
                      "state": w.word, "total": w.integer, "temperature": lambda: w.integer(1, 40)}[key]()
    listed = ", ".join(f"{k} {v}" for k, v in pairs.items())
    return json.dumps(pairs), f"Done. The {noun} has {listed}."


def toolset(w, n, naming=None):
    used = {}
    for _ in range(n):
        # Now and then a neighbour that shares the verb or the noun, so that one word is not enough.
        other = w.choice(list(used.values())) if used and w.chance(0.25) else None
        if other and w.chance(0.5):
            make_tool(w, used, noun=other["noun"].split("_")[-1], naming=naming)
        else:
            make_tool(w, used, verb=other["verb"] if other else None, naming=naming)
    tools = list(used.values())
    w.shuffle(tools)
    return tools


def assistant(think, reasoning, content="", calls=None):
    return {"role": "assistant", "reasoning_content": reasoning if think else "", "content": content,
            "tool_calls": calls or []}


def refusal(w, tools, known):
    """A wish that no tool serves, and the polite no."""
    while True:
        v, n = w.choice(VERBS), w.noun()
        if not any(n in t["noun"].split("_") or v == t["verb"] for t in tools) and n not in known:
            break
    names = ", ".join(t["name"] for t in tools[:3])
    return (ask(w, [f"{v} the {n}"]), f"No function here can {v} the {n}.",
            f"None of the functions can {v} the {n}. I can use {names}.")


def exchange(w, tools, think, out, parallel=0.2, no_fit=0.12, answer=0.5):
    """Appends one request with its calls, and perhaps the results and the answer about them."""
    if w.chance(no_fit):
        text, why, sorry = refusal(w, tools, ())
        out += [{"role": "user", "content": text}, assistant(think, why, sorry)]
        return "refuse"
    chosen = w.sample(tools, 1 if w.random() > parallel or len(tools) < 2 else w.choice((2, 2, 3)) if len(tools) > 2 else 2)
    bodies, calls = [], []
    for tool in chosen:
        body, args = request(w, tool)
        bodies.append(body)
        calls.append({"name": tool["name"], "arguments": args})
    out += [{"role": "user", "content": ask(w, bodies)}, assistant(think, reason(calls, chosen), "", calls)]
    if w.chance(answer):
        said = []
        for tool in chosen:
            text, sentence = result(w, tool)
            out.append({"role": "tool", "content": text})
            said.append(sentence)
        out.append(assistant(think, "The result is here. I tell the user what it says.", " ".join(said)))
        return "answer"
    return "parallel" if len(calls) > 1 else "call"


def tool_sample(w, think=None, turns=None, n_tools=None, naming=None, **rates):
    """A short conversation with tools."""
    think = w.chance(0.5) if think is None else think
    tools = toolset(w, n_tools or w.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8)), naming)
    messages = []
    if w.chance(0.3):
        messages.append({"role": "system", "content": w.choice(SYSTEMS)})
    turns = turns or w.choice((1, 2, 3, 4, 6, 8))
    for i in range(turns):
        r = dict(rates)
        if i + 1 < turns:
            r["answer"] = 1.0
        kind = exchange(w, tools, think, messages, **r)
    return {"messages": messages, "tools": [t["schema"] for t in tools], "kind": "tool-" + kind}


SYSTEMS = ("You are a helpful assistant.", "You are an agent that works with tools. Be brief.",
           "Use the functions whenever they fit.", "You help a small company with its daily work.",
           "Answer in short sentences.", "You are a careful assistant. Never invent arguments.")
RULES = ("Never {v} a {n} without being asked.", "When the user mentions a {n}, stay calm and polite.",
         "The {a} {n} is not part of this project.", "Always keep the {n} {a}.", "Do not {v} files outside {p}.",
         "Notes about the {n} are kept in {p}.", "If a {n} looks {a}, tell the user.",
         "The team calls the {n} by its old name, {x}.", "Prefer a {a} {n} over a {b} one.",
         "Work on one {n} at a time, and {v} it before the next.", "Ask {y} about the {n} on {d}.",
         "Commands run in {p}; the {n} there is {a}.", "Today is {d}.", "The user is called {y} and lives in {c}.")


def agent_system(w, chars, passages):
    """Agent-style instructions of about `chars` characters: rules, notes, and passages of documentation."""
    out = ["You are an agent that works in a terminal. Follow the rules below.\n\n# Rules"]
    size = 0
    while size < chars:
        if passages and w.chance(0.08):
            text = w.choice(passages)
            start = w.randint(0, max(0, len(text) - 2000))
            block = f"\n# Notes on the {w.choice(NOUNS)}\n\n" + text[start:start + w.randint(300, 2000)] + "\n\n# More rules"
        else:
            block = "- " + w.choice(RULES).format(
                v=w.choice(VERBS), n=w.choice(NOUNS), a=w.adjective(), b=w.adjective(), p=w.path(), x=w.invented(),
                y=w.person(), d=w.date(), c=w.city())
        out.append(block)
        size += len(block)
    return "\n".join(out)


def agent_sample(w, chars, passages, think=None, requests=None, tool_share=0.6, naming=None, **rates):
    """A long agent prompt (about `chars` characters) with many tools, then several requests."""
    think = w.chance(0.5) if think is None else think
    tools = toolset(w, max(3, int(chars * tool_share / 400)), naming)
    system = agent_system(w, int(chars * (1 - tool_share)), passages)
    messages = [{"role": "system", "content": system}]
    requests = requests or max(1, min(24, chars // 1500))
    for i in range(requests):
        r = dict(rates)
        if i + 1 < requests:
            r["answer"] = 1.0
        kind = exchange(w, tools, think, messages, **r)
    return {"messages": messages, "tools": [t["schema"] for t in tools], "kind": "agent-" + kind}
