"""Facts that a text can hold and a question can ask for: how each is stated, asked and answered.

A maker takes a `World` and gives a fact: {"kind", "key", "prose", "line", "code", "record", "log", "question",
"value", "answer", "like"}. `prose` to `log` state it in a text of that sort, `value` is what a right answer
contains, `answer` a sentence with it, and `like` makes another fact of the same sort, as distraction.
Statements, questions, attributes and owners of the held-out split occur nowhere in training.
"""
import json

from words import ADJECTIVES, NOUNS, VERBS

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


# -- values ------------------------------------------------------------------------------------------
def digits(w, low=3, high=9):
    return w.own(lambda: str(w.randint(1, 9)) + "".join(w.choice("0123456789") for _ in range(w.randint(low, high) - 1)))


def serial(w):
    """Codes of several shapes: QX-7741, 7F3K9, a1b2-c3d4, silver-otter-42, Amber-Falcon, 0x3fa9, 12-34-56."""
    c = w.choice
    letters = lambda n: "".join(c(LETTERS) for _ in range(n))
    number = lambda n: "".join(c("0123456789") for _ in range(n))
    mixed = lambda n: "".join(c(LETTERS + "0123456789") for _ in range(n))
    low = lambda n: "".join(c("0123456789abcdef") for _ in range(n))
    return w.own(lambda: c((
        lambda: f"{letters(w.randint(1, 4))}-{number(w.randint(2, 5))}", lambda: mixed(w.randint(4, 8)), lambda: low(w.randint(6, 12)),
        lambda: f"{c(ADJECTIVES)}-{c(NOUNS)}-{w.randint(1, 999)}", lambda: f"{c(ADJECTIVES).capitalize()}-{c(NOUNS).capitalize()}",
        lambda: f"{letters(2)}{number(4)}{letters(1)}", lambda: f"{number(2)}-{number(2)}-{number(2)}", lambda: f"0x{low(4)}",
        lambda: f"{mixed(4)}-{mixed(4)}", lambda: f"{letters(3)}-{number(3)}-{letters(2)}", lambda: f"{c(NOUNS)}{number(3)}",
        lambda: f"{low(8)}-{low(4)}-{low(4)}-{low(4)}-{low(12)}", lambda: f"{c(NOUNS).upper()}-{number(4)}",
        lambda: f"{c(ADJECTIVES)} {c(NOUNS)} {number(2)}", lambda: letters(w.randint(4, 7))))())


def phone(w):
    return w.own(lambda: w.choice((f"555-{w.randint(100, 9999):04d}", f"+{w.randint(1, 99)} {w.randint(100, 999)} {w.randint(10000, 999999)}",
                                   f"({w.randint(200, 999)}) {w.randint(100, 999)}-{w.randint(1000, 9999)}")))


def amount(w):
    return w.own(lambda: w.choice((f"${w.randint(1, 999)}.{w.randint(0, 99):02d}", f"{w.randint(2, 9999)} euros", f"{w.randint(2, 999)} kg",
                                   f"{w.randint(2, 999)} meters", f"{w.randint(2, 99)} percent", f"{w.randint(2, 365)} days")))


def version(w):
    return w.own(lambda: f"{w.randint(0, 30)}.{w.randint(0, 40)}.{w.randint(0, 60)}")


def internet(w):
    return w.own(lambda: ".".join(str(w.randint(1, 254)) for _ in range(4)))


def capital_words(w):
    return " ".join(x.capitalize() for x in w.phrase(1, 3).split())


def day(w):
    return w.own(lambda: f"{w.randint(1, 28)} {w.choice(MONTHS)} {w.randint(1900, 2099)}" if w.chance(0.5) else
                 f"{w.choice(MONTHS)} {w.randint(1, 28)}")


def name(w):
    return w.full_name() if w.chance(0.5) else w.person()


def color(w):
    return w.choice(COLORS) if w.chance(0.5) else f"{w.adjective()} {w.choice(COLORS)}"


def any_value(w):
    return w.choice((digits, serial, serial, name, phone, amount, version, capital_words, day, color))(w)


MONTHS = "January February March April May June July August September October November December".split()
COLORS = "red blue green yellow purple orange pink brown black white gray silver gold turquoise violet crimson".split()
CODES = ("code", "access code", "secret code", "password", "secret", "key", "passphrase", "token", "serial number", "identifier", "id",
         "activation code", "tracking number", "license key", "reference", "signature", "badge", "checksum", "launch code", "door code")
NUMBERS = ("number", "magic number", "special number", "PIN", "secret number", "room number", "lucky number", "account number", "port",
           "order number", "limit", "score", "count", "capacity", "postcode", "size", "invoice number")
ATTRIBUTES = {**{a: serial for a in CODES}, **{a: digits for a in NUMBERS}, "phone number": phone, "price": amount, "weight": amount,
              "budget": amount, "cost": amount, "version": version, "release": version, "address": internet, "host": internet,
              "nickname": capital_words, "codename": capital_words, "title": capital_words, "deadline": day, "birthday": day,
              "start date": lambda w: w.date(), "opening time": lambda w: w.clock(), "color": color, "paint": color,
              "owner": name, "manager": name, "author": name, "keeper": name, "captain": name, "guide": name, "contact": name,
              "teacher": name, "city": lambda w: w.city(), "home town": lambda w: w.city(), "destination": lambda w: w.city(),
              "email": lambda w: w.email(), "website": lambda w: w.url(), "file": lambda w: w.path(), "folder": lambda w: w.path(),
              "password hint": lambda w: w.phrase(), "motto": lambda w: w.phrase(3, 6), "slogan": lambda w: w.phrase(3, 6),
              "favorite word": lambda w: w.invented(), "name": name, "label": serial, "magic word": lambda w: w.word()}
HELD_ATTRIBUTES = {"vault combination": digits, "entry code": serial, "recovery key": serial, "batch number": digits, "gate code": digits,
                   "inspector": name, "pilot": name, "call sign": serial, "locker number": digits, "toll": amount, "watchword": capital_words}


# -- owners ------------------------------------------------------------------------------------------
def owner(w):
    """What a fact is about: "the silver harbor", "Nora", "Project Brunol", "room 12", ..."""
    c = w.choice
    if w.unseen and w.chance(0.4):
        return c((lambda: f"the {w.noun()} behind the {w.noun()}", lambda: f"the {w.adjective()} {w.adjective()} {w.noun()}",
                  lambda: f"Operation {w.invented().capitalize()}", lambda: f"{w.person()}'s {w.noun()}"))()
    return c((lambda: f"the {w.adjective()} {w.noun()}", lambda: f"the {w.adjective()} {w.noun()}", lambda: f"the {w.noun()}",
              lambda: f"the {w.word()} {w.noun()}", lambda: w.person(), lambda: w.city(), lambda: f"Project {w.invented().capitalize()}",
              lambda: f"the {w.noun()} in {w.city()}", lambda: f"the {w.noun()} of {w.person()}", lambda: f"{w.noun()} {w.integer(1, 99)}",
              lambda: w.invented(), lambda: f"the {w.common()}", lambda: f"{w.adjective()}-{w.noun()}", lambda: w.full_name(),
              lambda: f"the {w.common()} {w.common()}", lambda: f"team {w.invented().capitalize()}", lambda: f"my {w.common()} {w.noun()}",
              lambda: f"our {w.common()}", lambda: f"the {w.common()} {w.common()}", lambda: f"the {w.invented()} {w.common()}",
              lambda: f"the {w.common()} on the {w.common()}", lambda: f"{w.common()}-{w.common()}", lambda: f"{w.common()} {w.common()}",
              lambda: f"{w.invented().capitalize()} {w.common().capitalize()}", lambda: f"the {w.common()} with the {w.common()}"))()


def first_upper(text):
    return text[0].upper() + text[1:]


# -- facts of the form "the A of E is V" ------------------------------------------------------------------
SAID = ("The {a} of {e} is {v}.", "The {a} of {e} is {v}.", "The {a} for {e} is {v}.", "The {a} of {e} is: {v}.", "{E}'s {a} is {v}.",
        "For {e}, use the {a} {v}.", "{E} has the {a} {v}.", "The {a} for {e} was changed to {v}.", "{E}: {a} {v}", "{E} -> {a} = {v}",
        "{v} is the {a} of {e}.", "The {a} of {e} has been set to {v}.", "The {a} that belongs to {e} is {v}.", "The {a} of {e}: {v}.",
        "{E}, {a}: {v}", "{a} of {e} = {v}", "{E} got the {a} {v}.", "{E} uses {v} as {a}.", "As {a} of {e} we chose {v}.",
        "{v} is what {e} has as {a}.", "The {a} we use for {e} is {v}.", "{E} comes with the {a} {v}.", "The {a} of {e} will be {v}.",
        "With {e} goes the {a} {v}.", "{v} became the {a} of {e}.", "The right {a} for {e} is {v}.", "{E} was known by its {a}, {v}.",
        "One of the special {a}s for {e} is: {v}.", "The {a} to remember for {e} is {v}.", "Once, the {a} of {e} was {v}.",
        "{E} now has {v} for a {a}.", "The new {a} at {e} is {v}.", "{E} ({a} {v})", "| {e} | {a} | {v} |", "{a} [{e}]: {v}")
HELD_SAID = ("It was written on the wall that the {a} of {e} is {v}.", "Be sure to note down that {e} has {v} as its {a}.",
             "They gave {e} the {a} {v}.", "The {a} assigned to {e} is {v}.", "Keep this in mind, the {a} for {e} is {v}!")
BEFORE = ("Note: ", "Remember: ", "Remember that ", "Please keep in mind: ", "If anyone asks, ", "Somebody told me that ", "By the way, ",
          "As far as I know, ", "From today on, ", "Important: ", "{p} says that ", "We agreed that ", "According to {p}, ", "PS: ", "In the end, ",
          "The letter said: ", "Do not forget that ", "You should know that ", "Yesterday I heard that ", "It is a fact that ", "- ", "* ", "> ")
AFTER = (" It will stay so.", " {p} told me.", " Do not tell anyone.", " That was in {c}.", " (checked by {p})", " Good to know.", " Nobody knows why.")
ASKED = ("What is the {a} of {e}?", "What is the {a} of {e}?", "What is the {a} for {e}?", "What is {e}'s {a}?", "Tell me the {a} of {e}.",
         "Which {a} does {e} have?", "What was the {a} for {e}?", "Find the {a} of {e}.", "{A} of {e}?", "I need the {a} for {e}.",
         "Do you remember the {a} of {e}?", "What {a} was given for {e}?", "What is the special {a} for {e} mentioned in the provided text?",
         "Give me the {a} of {e}.", "What did the text say about the {a} of {e}?", "Please look up the {a} of {e}.",
         "Can you tell me the {a} of {e}?", "what's the {a} of {e}", "The {a} of {e}?", "Search for the {a} of {e}.", "{E}: which {a}?",
         "Say the {a} of {e}.", "What {a} does {e} use?", "Do you know which {a} {e} has?", "Which is the {a} of {e}?", "And the {a} of {e}?",
         "Write down the {a} for {e}.", "I am looking for the {a} of {e}.", "Under which {a} is {e} known?", "Show me {e}'s {a}.",
         "What should I use as {a} for {e}?", "Let me know the {a} of {e}.", "{a} {e}?", "The {a} of {e} is what?", "Could I have the {a} for {e}?",
         "Someone asks for the {a} of {e}. What do I say?", "There is a {a} for {e}. Which one?", "For {e}, what is the {a}?")
HELD_ASKED = ("Somewhere above is the {a} of {e}. What is it?", "I forgot the {a} for {e}. Can you help?", "Name the {a} belonging to {e}.",
              "What would I enter as the {a} of {e}?", "Which {a} is assigned to {e}?")
ASIDE = ("According to the text: {}", "Look at the text above. {}", "{} It is in the text.", "Now, {}", "Please answer: {}", "Question: {}",
         "One more question. {}", "Read carefully. {}", "{} Look it up.", "Thanks. {}", "Next: {}", "In the text above: {}", "Q: {}")
BRIEF = ("Answer with the {a} only.", "Reply with the {a} and nothing else.", "Only the {a}, please.", "Just the value.",
         "Answer in as few words as possible.", "Give only the answer.")


def split_of(w, train, held, share=0.75):
    """A template of training, or mostly a held-out one where the wording shall be unseen."""
    return w.choice(held) if w.unseen and w.chance(share) else w.choice(train)


def dressed(w, said):
    """A statement, now and then with words before or behind it that change nothing."""
    if not w.unseen and w.chance(0.35):
        lead = w.choice(BEFORE).format(p=w.person())
        said = lead + (said[0].lower() + said[1:] if lead[-2:] in ("t ", ", ") and said.startswith("The ") else said)
    if not w.unseen and said[-1] in ".!" and w.chance(0.1):
        said += w.choice(AFTER).format(p=w.person(), c=w.city())
    return first_upper(said)


def aside(w, question):
    return w.choice(ASIDE).format(question) if not w.unseen and w.chance(0.2) else question


def attribute_fact(w, attribute=None, about=None):
    a = attribute or (w.choice(list(HELD_ATTRIBUTES)) if w.unseen and w.chance(0.6) else
                      w.noun() if w.chance(0.15) else w.common() if w.chance(0.15) else w.choice(list(ATTRIBUTES)))
    e = about or owner(w)
    v = {**ATTRIBUTES, **HELD_ATTRIBUTES}.get(a, any_value)(w)
    fields = {"a": a, "e": e, "v": v, "p": w.person(), "A": first_upper(a), "E": first_upper(e)}
    said = dressed(w, split_of(w, SAID, HELD_SAID).format(**fields))
    question = aside(w, first_upper(split_of(w, ASKED, HELD_ASKED).format(**fields)))
    answer = f"The {a} of {e} is {v}."
    if w.chance(0.35):
        question, answer = f"{question} {w.choice(BRIEF).format(a=a)}", v
    snake = e.removeprefix("the ").replace(" ", "_").replace("'", "").replace("-", "_").lower() + "_" + a.replace(" ", "_").lower()
    code = w.choice((f"{snake} = {json.dumps(v)}", f"{snake.upper()} = {json.dumps(v)}", f"# {said}", f"// {said}",
                     f"const {snake.upper()}: &str = {json.dumps(v)};", f"let {snake} = {json.dumps(v)};"))
    return {"kind": "code" if a in CODES or a in NUMBERS else "name" if v[0].isupper() else "value", "key": f"{a}/{e}", "prose": said,
            "line": said if w.chance(0.6) else w.choice((f"{e}: {a} {v}", f"{e} | {a} | {v}", f"{a} of {e} = {v}", f"- {said}")),
            "code": code, "record": {"about": e, a: v} if w.chance(0.6) else {"note": said},
            "log": said if w.chance(0.5) else f"{a} of {e} set to {v}", "question": question, "value": v, "answer": answer,
            "like": lambda w: attribute_fact(w, a) if w.chance(0.7) else attribute_fact(w, None, e)}


# -- people and what they do -----------------------------------------------------------------------------
PLACES = ("under the {n}", "behind the {n}", "in the {a} {n}", "near the {n}", "on top of the {n}", "inside the {a} {n}")
DEEDS = (("{p} hid the {n} {l}.", "Where did {p} hide the {n}?", "{l}", "{p} hid the {n} {l}."),
         ("{p} lives in {c}.", "Where does {p} live?", "{c}", "{p} lives in {c}."),
         ("{p} moved to {c} in {y}.", "Where did {p} move in {y}?", "{c}", "{p} moved to {c}."),
         ("{p} moved to {c} in {y}.", "When did {p} move to {c}?", "{y}", "{p} moved to {c} in {y}."),
         ("{p} bought a {a} {n} in {c}.", "What did {p} buy in {c}?", "{a} {n}", "{p} bought a {a} {n} in {c}."),
         ("{p} bought a {a} {n} in {c}.", "Who bought a {a} {n}?", "{p}", "{p} bought a {a} {n}."),
         ("The {n} was painted {o} by {p}.", "Who painted the {n}?", "{p}", "{p} painted the {n}."),
         ("The {n} was painted {o} by {p}.", "Which color did {p} paint the {n}?", "{o}", "{p} painted the {n} {o}."),
         ("{p} will meet {q} at {t} near the {n}.", "When will {p} meet {q}?", "{t}", "{p} will meet {q} at {t}."),
         ("{p} will meet {q} at {t} near the {n}.", "Whom will {p} meet near the {n}?", "{q}", "{p} will meet {q} near the {n}."),
         ("The {a} {n} opens at {t} on Monday.", "At what time does the {a} {n} open?", "{t}", "The {a} {n} opens at {t}."),
         ("The {j} of {c} is called {p}.", "Who is the {j} of {c}?", "{p}", "The {j} of {c} is {p}."),
         ("{p} is the {j} of the {n}.", "Who is the {j} of the {n}?", "{p}", "The {j} of the {n} is {p}."),
         ("{p} is the {j} of the {n}.", "What is the job of {p}?", "{j}", "{p} is the {j} of the {n}."),
         ("{p} wants to {v} the {a} {n}.", "What does {p} want to do?", "{v} the {a} {n}", "{p} wants to {v} the {a} {n}."),
         ("The train to {c} leaves from track {i}.", "From which track does the train to {c} leave?", "{i}",
          "The train to {c} leaves from track {i}."),
         ("{p} ordered {i} {n}s for {c}.", "How many {n}s did {p} order?", "{i}", "{p} ordered {i} {n}s."),
         ("The best thing to do in {c} is to {v} a {a} {n} {l}.", "What is the best thing to do in {c}?", "{v} a {a} {n} {l}",
          "The best thing to do in {c} is to {v} a {a} {n} {l}."))
HELD_DEEDS = (("{p} lost the {a} {n} {l}.", "Where did {p} lose the {a} {n}?", "{l}", "{p} lost the {a} {n} {l}."),
              ("The {n} of {c} was built in {y}.", "When was the {n} of {c} built?", "{y}", "The {n} of {c} was built in {y}."),
              ("{p} gave a {a} {n} to {q}.", "What did {p} give to {q}?", "{a} {n}", "{p} gave a {a} {n} to {q}."),
              ("The secret ingredient of {p} is {a} {o} {n}.", "What is the secret ingredient of {p}?", "{a} {o} {n}",
               "The secret ingredient of {p} is {a} {o} {n}."))
ACTS = ("hid hide, found find, bought buy, sold sell, broke break, painted paint, carried carry, cleaned clean, left leave, dropped drop, "
        "opened open, repaired repair, built build, drew draw, stole steal, caught catch, drove drive, burned burn, moved move, washed wash, "
        "wrapped wrap, tested test, measured measure, counted count, borrowed borrow, rented rent, copied copy, saw see, visited visit, "
        "praised praise, forgot forget, kept keep, threw throw, chose choose, tied tie, fed feed, met meet, taught teach, followed follow, "
        "heard hear, held hold, filled fill, closed close, touched touch, picked pick, planted plant, signed sign, traded trade")
WHERE = PLACES + ("in {c}", "in {c}", "at the {n}", "beside the {n}", "between the {n} and the {m}", "outside {c}", "on the way to {c}", "by the {n}")
KIN = "sister brother dog cat horse boat teacher neighbor uncle aunt friend son daughter boss parrot".split()


def act(w, form=None):
    """Somebody did something to a thing, at a place and a time: who, what, where, when?"""
    f = {"p": name(w), "n": w.noun() if w.chance(0.5) else w.common(), "a": w.adjective() if w.chance(0.6) else w.common(), "q": w.person()}
    did, do = w.choice([x.split() for x in ACTS.split(", ")])
    place = w.choice(WHERE).format(n=w.noun(), m=w.common(), a=w.adjective(), c=w.city())
    time = w.choice((f"at {w.clock()}", f"in {w.integer(1500, 2100)}", f"on {day(w)}", f"on {w.choice(DAYS)}"))
    f.update(did=did, do=do, l=place, t=time, A=w.choice(("the", "a", "the", "his", "her", "one")))
    said, question, value, answer = (x.format(**f) for x in form or w.choice(ACT_FORMS))
    form = form or next(x for x in ACT_FORMS if x[0].format(**f) == said and x[1].format(**f) == question)
    return finished(w, "event", question, said, value, answer, lambda w: act(w, form))


ACT_FORMS = tuple((said, *ask) for said in (
    "{p} {did} {A} {a} {n} {l} {t}.", "{p} {did} {A} {a} {n} {l}.", "{T} {p} {did} {A} {a} {n} {l}.".replace("{T}", "{t}:"),
    "{p} told {q} about it and {did} {A} {a} {n} {l} {t}.") for ask in (
    ("Who {did} {A} {a} {n}?", "{p}", "{p} {did} {A} {a} {n}."), ("What did {p} {do}?", "{a} {n}", "{p} {did} {A} {a} {n}."),
    ("What did {p} {do} {l}?", "{a} {n}", "{p} {did} {A} {a} {n} {l}."), ("Where did {p} {do} {A} {a} {n}?", "{l}", "{p} {did} {A} {a} {n} {l}."),
    ("Where did {p} {do} the {n}?", "{l}", "{p} {did} the {n} {l}."), ("When did {p} {do} {A} {a} {n}?", "{t}", "{p} {did} {A} {a} {n} {t}."))
    if "{t}" in said or "{t}" not in ask[2])


def kin(w, same=None):
    """Somebody's sister is called so and so; somebody owns so many things."""
    p, q, n, i, r = name(w), w.person() if w.chance(0.5) else w.invented().capitalize(), w.noun(), str(w.integer(2, 99)), w.choice(KIN)
    said, question, value, answer = w.choice((
        (f"{p}'s {r} is called {q}.", f"What is {p}'s {r} called?", q, f"{p}'s {r} is called {q}."),
        (f"The {r} of {p} is named {q}.", f"What is the name of {p}'s {r}?", q, f"The name of {p}'s {r} is {q}."),
        (f"{p} owns {i} {n}s.", f"How many {n}s does {p} own?", i, f"{p} owns {i} {n}s."),
        (f"{p} has a {r} named {q}.", f"What is the {r} of {p} named?", q, f"The {r} of {p} is named {q}."),
        (f"There are {i} {n}s in the house of {p}.", f"How many {n}s are in the house of {p}?", i, f"There are {i} {n}s in the house of {p}.")))
    return finished(w, "event", question, said, value, answer, kin)


def finished(w, kind, question, said, value, answer, like):
    """A fact whose statement is one sentence in every host."""
    key, said = question, dressed(w, said)
    if w.chance(0.25):
        question, answer = f"{question} {w.choice(BRIEF[3:])}", value
    question = aside(w, question)
    return {"kind": kind, "key": key, "prose": said, "line": said, "code": w.choice(("# ", "// ")) + said, "record": {"note": said}, "log": said,
            "question": question, "value": value, "answer": answer, "like": like}


JOBS = "mayor doctor baker teacher captain pilot judge editor gardener nurse driver painter singer director janitor cook".split()


def deed(w, same=None):
    form = same or split_of(w, DEEDS, HELD_DEEDS)
    f = {"p": name(w), "q": w.person(), "n": w.noun(), "a": w.adjective(), "c": w.city(), "y": str(w.integer(1700, 2100)), "o": w.choice(COLORS),
         "t": w.clock(), "j": w.choice(JOBS), "v": w.choice(VERBS), "i": str(w.integer(2, 99))}
    f["l"] = w.choice(PLACES).format(n=w.noun(), a=w.adjective())
    said, question, value, answer = (x.format(**f) for x in form)
    return finished(w, "event", question, said, value, answer, lambda w: deed(w, form))


# -- a sentence to be quoted -----------------------------------------------------------------------------
SENTENCES = (("the {a} {n} {w} the {m} at {t}", "{a} {n}"), ("every {n} in {c} is {a} on {d}", "{n} in {c}"),
             ("no {a} {n} may enter {c} without a {m}", "{a} {n}"), ("{p} keeps a {a} {n} beside the {m}", "{a} {n}"),
             ("the {n} never {w} when the {m} is {a}", "{n} never {w}"), ("{p} sold {i} {a} {n}s to {q}", "{a} {n}s"))
HELD_SENTENCES = (("a {a} {n} once {w} {p} in {c}", "{a} {n}"), ("beware of the {n} that {w} a {a} {m}", "{n} that {w}"))
QUOTE = ("Which sentence mentions the {k}?", "Quote the sentence about the {k}.", "What does the text say about the {k}?",
         "Where are the words \"{k}\"? Give the whole sentence.", "Copy the sentence with {k}.", "Which line has \"{k}\" in it?",
         "What is said about the {k}?", "Find the sentence with the words \"{k}\".", "Repeat the sentence that speaks of the {k}.")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ACTIONS = "guards follows paints carries breaks visits watches opens sells builds finds lifts greets loses".split()


def sentence(w, same=None):
    if not w.unseen and w.chance(0.5):
        return loose_sentence(w)
    form = same or split_of(w, SENTENCES, HELD_SENTENCES)
    f = {"p": w.person(), "q": w.person(), "n": w.noun(), "m": w.noun(), "a": w.adjective(), "c": w.city(), "d": w.choice(DAYS), "t": w.clock(),
         "w": w.choice(ACTIONS), "i": str(w.integer(2, 99))}
    said, key = first_upper(form[0].format(**f)) + ".", form[1].format(**f)
    return quoted(w, said, key, lambda w: sentence(w, form))


def loose_sentence(w):
    """Words in any order, so that only copying helps; the question names two that follow each other."""
    small = "the a of in and to with for on at from by every no some one once never always my your".split()
    words = [w.choice(small) if w.chance(0.4) else w.choice((w.common, w.common, w.noun, w.adjective, w.person, w.city, w.invented))()
             for _ in range(w.randint(4, 12))]
    at = w.randint(0, len(words) - 2)
    while words[at] in small and words[at + 1] in small:
        words[w.randint(at, at + 1)] = w.common()
    return quoted(w, first_upper(" ".join(words)) + w.choice("..!"), " ".join(words[at:at + 2]), loose_sentence)


def quoted(w, said, key, like):
    return {"kind": "sentence", "key": key, "prose": said, "line": said, "code": w.choice(("# ", "// ")) + said, "record": {"note": said},
            "log": said, "question": aside(w, w.choice(QUOTE).format(k=key)), "value": said.rstrip(".!"), "answer": said, "like": like}


# -- constants of functions ------------------------------------------------------------------------------
CONSTANTS = (
    ("def {f}({x}):\n    return {x} {o} {i}\n", "Which constant does {f} use?", "The function {f} uses {i}."),
    ("def {f}():\n    return {i}\n", "What does {f} return?", "The function {f} returns {i}."),
    ("fn {f}({x}: u64) -> u64 {{\n    {x} {o} {i}\n}}\n", "What is the constant in the function {f}?", "The constant in {f} is {i}."),
    ("pub fn {f}() -> u32 {{\n    {i}\n}}\n", "Which number does the function {f} return?", "The function {f} returns {i}."),
    ("function {f}({x}) {{\n  return {x} {o} {i};\n}}\n", "What number is in the body of {f}?", "The number in {f} is {i}."),
    ("const {F}: u32 = {i};", "What is the value of {F}?", "The value of {F} is {i}."),
    ("{F} = {i}", "What is {F} set to?", "{F} is set to {i}."),
    ("#define {F} {i}", "What is the value of the constant {F}?", "The value of {F} is {i}."),
    ("static {F}: usize = {i};", "Which value does {F} have?", "{F} has the value {i}."),
    ("let {f} = {i};", "What is the value of {f}?", "The value of {f} is {i}."),
    ("def {f}({x}, limit={i}):\n    return {x} < limit\n", "What is the default limit of {f}?", "The default limit of {f} is {i}."),
    ("def {f}({x}):\n    \"\"\"{D}\"\"\"\n    return {x} {o} {i}\n", "What is the constant of the function {f}?", "The constant of {f} is {i}."),
    ("fn {f}({x}: &str) -> bool {{\n    {x} == \"{s}\"\n}}\n", "With which string does {f} compare?", "The function {f} compares with \"{s}\"."),
    ("def {f}():\n    return \"{s}\"\n", "Which string does {f} return?", "The function {f} returns \"{s}\"."))
CONSTANTS += (
    ("def {f}({x}):\n    while {x} < {i}:\n        {x} *= 2\n    return {x}\n", "Up to which number does {f} count?", "The function {f} counts up to {i}."),
    ("def {f}():\n    time.sleep({i})\n", "How long does {f} sleep?", "The function {f} sleeps {i}."),
    ("fn {f}() -> Config {{\n    Config {{ size: {i}, ..Config::default() }}\n}}\n", "Which size does {f} give?", "The size in {f} is {i}."),
    ("for {f} in range({i}):\n    pass\n", "How far does the loop over {f} go?", "The loop over {f} goes to {i}."),
    ("{f}({i})", "With which number is {f} called?", "{f} is called with {i}."),
    ("assert {f}({x}) == {i}", "What must {f} give?", "{f} must give {i}."),
    ("def {f}({x}):\n    {x} = {x} + 1\n    return {i} if {x} else 0\n", "Which number stands in {f}?", "In {f} stands {i}."),
    ("class {F}:\n    size = {i}\n", "What is the size of {F}?", "The size of {F} is {i}."))
HELD_CONSTANTS = (
    ("def {f}({x}):\n    if {x} > {i}:\n        return None\n    return {x}\n", "Above which number does {f} return None?",
     "The function {f} returns None above {i}."),
    ("pub const {F}: i64 = {i};", "Which number is the constant {F}?", "The constant {F} is {i}."),
    ("fn {f}() -> u64 {{\n    let seed = {i};\n    seed\n}}\n", "Which seed does {f} use?", "The function {f} uses the seed {i}."))


def constant(w, same=None):
    form = same or split_of(w, CONSTANTS, HELD_CONSTANTS)
    f = w.snake()
    f = {"f": f, "F": f.upper(), "x": w.noun(), "o": w.choice("+-*%"), "i": digits(w, 2, 6), "s": serial(w), "D": first_upper(w.phrase(2, 5)) + "."}
    code, question, answer = (x.format(**f) for x in form)
    value = f["s"] if "{s}" in form[0] else f["i"]
    if w.chance(0.3):
        question, answer = f"{question} {w.choice(BRIEF[3:])}", value
    elif w.chance(0.2):
        question = w.choice(("Look at the code. {}", "In the code above: {}", "{} Look at its body.")).format(question)
    question = aside(w, question)
    fenced = "\n" + code.rstrip() + "\n"
    return {"kind": "constant", "key": f["f"], "prose": fenced, "line": code.rstrip(), "code": code.rstrip(), "record": {"source": code},
            "log": code.split("\n")[0] if "\n" not in code.rstrip() else code.rstrip(), "question": question, "value": value, "answer": answer,
            "like": lambda w: constant(w, form)}


FACTS = ((attribute_fact, 11), (deed, 3), (act, 4), (kin, 2), (sentence, 5), (constant, 4))


def fact(w, kind=None):
    """A fact of a random maker; `kind`: one of attribute, event, sentence, constant."""
    makers = {"attribute": attribute_fact, "event": deed if w.unseen else act, "sentence": sentence, "constant": constant}
    if kind:
        return makers[kind](w)
    at = w.random() * sum(n for _, n in FACTS)
    for make, n in FACTS:
        at -= n
        if at < 0:
            return make(w)
    return FACTS[-1][0](w)


# -- questions about several facts at once ---------------------------------------------------------------
def two_hops(w):
    """Two statements and a question that needs both; the answer walks from one to the other."""
    e, p, c, v = owner(w), name(w), w.city(), serial(w)
    role = w.choice(("keeper", "owner", "manager", "author", "teacher", "guide"))
    said = [(f"The {role} of {e} is {p}.", f"{p} lives in {c}.", f"In which city does the {role} of {e} live?",
             f"The {role} of {e} is {p}. {p} lives in {c}.", c),
            (f"{first_upper(e)} belongs to {p}.", f"The code of {p} is {v}.", f"What is the code of the person to whom {e} belongs?",
             f"{first_upper(e)} belongs to {p}. The code of {p} is {v}.", v),
            (f"{p} has the {role} badge of {e}.", f"{p} works with the password {v}.",
             f"Which password does the person with the {role} badge of {e} use?", f"{p} has the {role} badge of {e}. The password of {p} is {v}.", v)]
    first, second, question, answer, value = w.choice(said)
    return two(w, first, second, question, answer, value, lambda w: two_hops(w))


def variables(w):
    """VAR A = 7421 here, VAR B = A there."""
    x, y = w.own(lambda: w.choice(("X", "Y", "Z", "V", w.noun().upper())) + str(w.randint(1, 99))), w.invented().upper()
    v, form = digits(w, 3, 6), w.choice(("{} = {}", "VAR {} = {}", "let {} = {};", "set {} to {}"))
    return two(w, form.format(x, v), form.format(y, x), w.choice((f"What is the value of {y}?", f"Which number does {y} hold?")),
               f"{y} is {x}, and {x} is {v}. So {y} is {v}.", v, lambda w: variables(w))


def two(w, first, second, question, answer, value, like):
    host = lambda s: {"prose": s, "line": s, "code": w.choice(("# ", "// ")) + s, "record": {"note": s}, "log": s}
    return {"kind": "two-hops", "key": question, "parts": [host(first), host(second)], "question": question, "value": value, "answer": answer,
            "like": like}


def several(w):
    """Two to four facts with one attribute, asked for together; or several values of one key."""
    n = w.randint(2, 4)
    a = w.choice(list(HELD_ATTRIBUTES if w.unseen and w.chance(0.5) else ATTRIBUTES))
    if w.chance(0.6):
        facts = [attribute_fact(w, a) for _ in range(n)]
        owners = [f["key"].split("/", 1)[1] for f in facts]
        question = w.choice(("What are the {a}s of {l}?", "Give me the {a} of each: {l}.", "List the {a} of {l}.")).format(
            a=a, l=", ".join(owners[:-1]) + " and " + owners[-1])
        answer = "\n".join(f"The {a} of {e} is {f['value']}." for e, f in zip(owners, facts))
    else:
        e = owner(w)
        facts = [attribute_fact(w, a, e) for _ in range(n)]
        form = w.choice(("One of the special {a}s for {e} is: {v}.", "The {e} {a} {i} is {v}.", "Another {a} of {e} is {v}."))
        for i, f in enumerate(facts):
            s = form.format(a=a, e=e, v=f["value"], i=i + 1)
            f.update(prose=s, line=s, code="# " + s, record={"note": s}, log=s)
        question = w.choice(("What are all the special {a}s for {e} mentioned in the provided text?", "List all {a}s of {e}.",
                             "Which {a}s does {e} have? Name all of them.")).format(a=a, e=e)
        answer = f"The {a}s of {e} are " + ", ".join(f["value"] for f in facts) + "."
    return {"kind": "several", "key": question, "parts": facts, "question": question, "value": [f["value"] for f in facts], "answer": answer,
            "ordered": True, "like": lambda w: attribute_fact(w, a)}


