"""Text that surrounds planted facts: prose, talk, code, JSON, logs, tables, mail, noise.

A maker takes a `World`, a number of characters and the passages of the split; it gives (units, joint, host): pieces
between which a fact may stand, the text between two pieces, and how a fact is stated there (see `recall_facts`).
Makers of the list HELD occur nowhere in training.
"""
import json

import gen_chat
import gen_code
import gen_prose
import gen_tools
from words import VERBS

EVERYDAY = (
    "The {n} on the table has been {a} since the morning.", "We walked along the {n} until the evening came.",
    "Nobody knew why the {n} was so {a} that day.", "{p} told us a long story about a {a} {n}.", "It rained for hours in {c}.",
    "After lunch the children played with the {n}.", "The old {n} stood at the end of the street, {a} as ever.",
    "People in {c} say that a {a} {n} brings luck.", "There was a smell of fresh bread in the whole house.",
    "The meeting about the {n} took longer than planned.", "I have never liked the {n}, but {p} does.",
    "On the way home {p} stopped to look at a {n}.", "The weather in {c} stayed {a} for most of the week.",
    "Some of the guests talked about the {n}, others about the {m}.", "A {a} {n} is better than a {b} {m}.",
    "He put the {n} into the bag and closed the door.", "She wondered whether the {n} would still be {a} tomorrow.",
    "Every year the town holds a {n} with music and food.", "The {n} had been repaired twice, and still it was {a}.",
    "They talked until midnight and then went to sleep.", "In the garden the {n} and the {m} lay side by side.",
    "When spring came, the {n} turned {a} again.", "The bus to {c} was late, so {p} read the paper.",
    "Most of the work on the {n} is done by hand.", "It is hard to explain what makes a {n} {a}.",
    "The report says little about the {n} and nothing about the {m}.", "A small crowd had gathered around the {a} {n}.",
    "If you look closely, you can see the {n} behind the {m}.", "The price of the {n} went up, and so did that of the {m}.",
    "{p} and {q} have been friends since school.", "There is always a {n} somewhere in {c}.", "The light in the {n} went out again.",
    "For a moment it was quiet, and only the {n} could be heard.", "That was the end of the {n}, or so we thought.",
    "You should have seen the {n} before it became {a}.", "With a little patience even a {a} {n} can be useful.")
SENTENCES = ("The grass is long and the wind is warm.", "One step forward, two steps back.", "Nothing happens here.", "All work and no play.",
             "The river flows to the sea.", "This line means nothing.", "Padding, padding and more padding.", "Again and again it goes around.",
             "A quiet day follows a quiet night.", "Please wait while the page loads.", "The door opens and the door closes.")
HELD_SENTENCES = ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
                  "The quick brown fox jumps over the lazy dog.", "Lorem ipsum dolor sit amet, consectetur adipiscing elit.")


def fields(w):
    return {"n": w.noun(), "m": w.word(), "a": w.adjective(), "b": w.adjective(), "p": w.person(), "q": w.person(), "c": w.city()}


def grow(make, chars):
    out, size = [], 0
    while size < chars:
        out.append(make())
        size += len(out[-1]) + 1
    return out


def everyday(w, chars, passages):
    return grow(lambda: w.choice(EVERYDAY).format(**fields(w)), chars), w.choice((" ", " ", "\n", "\n\n")), "prose"


PATTERNS = [p for name in ("EXPLAIN_OPEN", "EXPLAIN_MIDDLE", "EXPLAIN_END", "STEPS", "STORY_OPEN", "STORY_MIDDLE", "STORY_END", "MAIL_MIDDLE")
            for p in getattr(gen_prose, name)]


def essay(w, chars, passages):
    def one():
        f = gen_prose.fields_of(w)
        return " ".join(w.choice(PATTERNS).format(**f) for _ in range(w.randint(1, 4)))
    return grow(one, chars), w.choice((" ", "\n", "\n\n")), "prose"


def cut(text, chars, w):
    start = w.randint(0, max(0, len(text) - chars))
    return text[text.find("\n", start) + 1 if start else 0:][:chars]


def documents(w, chars, passages):
    """Paragraphs of real documentation."""
    out, size = [], 0
    while size < chars:
        text = cut(w.choice(passages["notes"]), min(chars - size + 200, w.randint(400, 6000)), w)
        out += [p for p in text.split("\n\n") if p.strip()]
        size += len(text) + 2
    return out, "\n\n", "prose"


def sources(w, chars, passages):
    """Lines of real source files."""
    out, size = [], 0
    while size < chars:
        text = cut(w.choice(passages["sources"]), min(chars - size + 200, w.randint(400, 8000)), w)
        out += text.split("\n\n")
        size += len(text) + 2
    return out, "\n\n", "code"


def functions(w, chars, passages):
    def one():
        task, f = gen_code.spec(w)
        return task[lang].format(**f)
    lang = w.choice((2, 3, 4))
    return grow(one, chars), "\n\n", "code"


def talk(w, chars, passages):
    """A transcript of questions and answers."""
    you, me = w.choice((("User", "Assistant"), ("Q", "A"), ("Human", "AI"), (w.person(), w.person()), ("Customer", "Agent")))

    def one():
        messages, _ = w.choice((gen_chat.fact, gen_chat.arithmetic, gen_chat.reading, gen_prose.steps, gen_prose.explain, gen_chat.fact))(w)
        return "\n".join(f"{you if m['role'] == 'user' else me}: {m['content']}" for m in messages)
    return grow(one, chars), w.choice(("\n", "\n\n")), "line"


def records(w, chars, passages):
    keys = [w.choice(("name", "title", "label"))] + w.sample(["city", "count", "email", "price", "date", "id", "active", "path", "tags", "state"],
                                                           w.randint(1, 5))
    kinds = {"count": w.integer, "email": w.email, "price": lambda: float(w.number()), "date": w.date, "id": w.ident, "active": lambda: w.chance(0.5),
             "path": w.path, "tags": lambda: [w.word() for _ in range(w.randint(1, 3))], "state": lambda: w.choice(("open", "done", "new")),
             "city": w.city}
    indent = w.choice((None, None, 2))
    one = lambda: json.dumps({k: kinds[k]() if k in kinds else w.phrase() for k in keys}, indent=indent)
    return grow(one, chars), w.choice((",\n", "\n")), "json"


LEVELS = ("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR", "TRACE")


def stamp(w):
    return w.choice(("2031-04-02 12:05:11", f"20{w.randint(20, 39)}-{w.randint(1, 12):02d}-{w.randint(1, 28):02d}T{w.randint(0, 23):02d}:"
                     f"{w.randint(0, 59):02d}:{w.randint(0, 59):02d}Z", f"[{w.randint(0, 23):02d}:{w.randint(0, 59):02d}:{w.randint(0, 59):02d}]"))


def log_line(w):
    return f"{stamp(w)} {w.choice(LEVELS)} {w.noun()}: " + w.choice((
        f"{w.choice(VERBS)} {w.noun()} took {w.randint(1, 9999)} ms", f"request {w.randint(1, 99999)} from 10.0.{w.randint(0, 255)}.{w.randint(1, 254)}",
        f"user {w.person()} did {w.choice(VERBS)} {w.path()}", f"{w.noun()} {w.integer()} is {w.adjective()}", f"retry {w.randint(1, 9)} of 9",
        f"connection closed after {w.randint(1, 999)} bytes"))


def logs(w, chars, passages):
    return grow(lambda: log_line(w), chars), "\n", "log"


def table(w, chars, passages):
    mark = w.choice((",", ";", " | ", "\t", ": ", " = "))
    makers = [w.choice((w.noun, w.word, w.person, w.city, w.integer, w.date, w.ident, w.number)) for _ in range(2 if len(mark) > 1 else w.randint(2, 5))]
    return grow(lambda: mark.join(str(m()) for m in makers), chars), "\n", "line"


def letters(w, chars, passages):
    return grow(lambda: gen_prose.mail(w)[0][1]["content"], chars), "\n\n---\n\n", "prose"


def repeated_sentence(w, chars, passages):
    text = " ".join(w.sample(SENTENCES, w.randint(1, 4))) if w.chance(0.6) else w.choice(EVERYDAY).format(**fields(w))
    return grow(lambda: text, chars), w.choice((" ", " ", "\n")), "prose"


def repeated_word(w, chars, passages):
    word = w.choice((w.word(), "...", "blah", "ha", "-", "0", "x y z", "na", "filler", "# #", "lorem"))
    return grow(lambda: " ".join([word] * w.randint(5, 30)), chars), w.choice((" ", "\n")), "prose"


def salad(w, chars, passages):
    return grow(lambda: w.words(w.randint(4, 14)) + w.choice((".", "", ",", "!")), chars), w.choice((" ", "\n")), "prose"


def symbols(w, chars, passages):
    letters = w.choice(("0123456789", "abcdefghijklmnopqrstuvwxyz", "0123456789abcdef", "+-*/=<>#@&%!?", "ABCXYZ 0123"))
    one = lambda: "".join(w.choice(letters) for _ in range(w.randint(5, 40)))
    return grow(one, chars), w.choice((" ", "\n")), "line"


def agent_rules(w, chars, passages):
    def one():
        f = dict(fields(w), v=w.choice(VERBS), p=w.path(), x=w.invented(), y=w.person(), d=w.date())
        return "- " + w.choice(gen_tools.RULES).format(**f)
    return grow(one, chars), "\n", "line"


# -- held out --------------------------------------------------------------------------------------------
def settings(w, chars, passages):
    """YAML."""
    one = lambda: f"{w.noun()}:\n" + "\n".join(f"  {w.word()}: {w.choice((w.word, w.integer, w.ident, w.path))()}" for _ in range(w.randint(1, 4)))
    return grow(one, chars), "\n", "code"


def minutes(w, chars, passages):
    forms = ("{p} opened the session and read the agenda aloud.", "Item {i}: the committee discussed whether a {n} should be {a}.",
             "{p} objected that the {n} had been delayed twice.", "It was agreed to postpone the {n}.", "A vote was held; {i} were in favor.",
             "{q} will prepare a paper about the {m} for the next session.", "The chair thanked {p} for the {a} {n}.")
    return grow(lambda: w.choice(forms).format(**fields(w), i=w.integer(1, 30)), chars), w.choice((" ", "\n")), "prose"


def markup(w, chars, passages):
    """XML."""
    def one():
        tag = w.noun()
        return f"<{tag} id=\"{w.integer()}\">" + "".join(f"<{k}>{w.word()}</{k}>" for k in (w.word(), w.word())) + f"</{tag}>"
    return grow(one, chars), "\n", "line"


def terminal(w, chars, passages):
    one = lambda: f"$ {w.choice(('ls', 'cat', 'cd', 'rm', 'make', 'git log'))} {w.path()}\n" + "\n".join(w.path() for _ in range(w.randint(0, 4)))
    return grow(one, chars), "\n", "line"


def held_sentence(w, chars, passages):
    text = w.choice(HELD_SENTENCES)
    return grow(lambda: text, chars), w.choice((" ", "\n")), "prose"


TRAIN = {"everyday": everyday, "essay": essay, "documents": documents, "sources": sources, "functions": functions, "talk": talk,
         "records": records, "logs": logs, "table": table, "letters": letters, "repeated-sentence": repeated_sentence,
         "repeated-word": repeated_word, "salad": salad, "symbols": symbols, "rules": agent_rules}
HELD = {"settings": settings, "minutes": minutes, "markup": markup, "terminal": terminal, "held-sentence": held_sentence}
SHARES = {"everyday": 14, "essay": 10, "documents": 12, "sources": 12, "functions": 6, "talk": 8, "records": 7, "logs": 7, "table": 4,
          "letters": 3, "repeated-sentence": 9, "repeated-word": 3, "salad": 4, "symbols": 2, "rules": 3}
