"""Exact copying and looking up: dense practice for arguments, JSON values and long prompts."""
import json

from gen_chat import answer, sum_steps, user

KINDS = ("invented", "ident", "path", "email", "url", "date", "number", "person", "city", "phrase", "word", "full_name")


def a_value(w):
    return getattr(w, w.choice(KINDS))()


def repeat_lines(w):
    lines = [a_value(w) for _ in range(w.randint(4, 16))]
    return [user(w.choice(("Repeat these lines exactly:\n", "Copy this text:\n", "Write the same lines again:\n")) + "\n".join(lines)),
            answer("\n".join(lines), f"I copy the {len(lines)} lines as they are.")], "copy"


def lookup(w):
    """A table of keys and values, then questions about single entries."""
    table = {}
    for _ in range(w.randint(6, 30)):
        table[w.own(lambda: w.word() + (f" {w.word()}" if w.chance(0.3) else ""))] = a_value(w)
    form = w.choice(("{k}: {v}", "{k} = {v}", "- {k} {v}", "{k} -> {v}", "The {k} is {v}."))
    text = "\n".join(form.format(k=k, v=v) for k, v in table.items())
    out = []
    for i in range(w.randint(3, 8)):
        k = w.choice(list(table))
        q = w.choice((f"What is the {k}?", f"Give me the {k}.", f"{k}?", f"Look up {k}."))
        out += [user((text + "\n\n" + q) if i == 0 else q), answer(table[k], f"I look for {k} in the table. It is {table[k]}.")]
    return out, "lookup"


def reverse_lookup(w):
    table = {w.word(): w.invented() for _ in range(w.randint(5, 20))}
    text = "\n".join(f"{k}: {v}" for k, v in table.items())
    out = []
    for i in range(w.randint(2, 5)):
        k = w.choice(list(table))
        q = f"Which key has the value {table[k]}?"
        out += [user((text + "\n\n" + q) if i == 0 else q), answer(k, f"The value {table[k]} stands beside {k}.")]
    return out, "lookup"


def sum_list(w):
    pairs = [w.sum_pair() for _ in range(w.randint(3, 8))]
    text = "\n".join(f"{a} + {b} =" for a, b in pairs)
    return [user("Work out these sums:\n" + text),
            answer("\n".join(sum_steps(a, b) for a, b in pairs), f"There are {len(pairs)} sums. I add digit by digit.")], "sums"


def json_lists(w):
    """Words into quotes, again and again: the step that JSON answers and list arguments need."""
    out = []
    for i in range(w.randint(1, 4)):
        items = [w.word() if w.chance(0.7) else a_value(w) for _ in range(w.randint(3, 10))]
        if w.chance(0.5):
            out += [user(w.choice(("As a JSON array: ", "JSON list of ", "Quote each of these: ")) + ", ".join(items)),
                    answer(json.dumps(items), f"The array has {len(items)} strings.")]
        else:
            pairs = {w.word(): x for x in items[:5]}
            text = ", ".join(f"{k} {v}" for k, v in pairs.items()) if w.chance(0.6) else "\n".join(f"{k}: {v}" for k, v in pairs.items())
            out += [user(w.choice(("As a JSON object: ", "JSON object with ", "Make an object of ")) + text),
                    answer(json.dumps(pairs), f"The object has {len(pairs)} keys.")]
    return out, "json-list"


MAKERS = ((json_lists, 6), (repeat_lines, 4), (lookup, 5), (reverse_lookup, 2), (sum_list, 2))
