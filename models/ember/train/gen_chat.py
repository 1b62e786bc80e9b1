"""Chat: facts, sums, strings, JSON, reading, memory, and longer answers built from sentence patterns.

Every maker takes a `World` and returns (messages, kind); the last message is the assistant's answer with
"reasoning_content" filled in. The caller empties the reasoning for the mode without thinking.
"""
import json

CAPITALS = ("Austria Vienna, Belgium Brussels, Bulgaria Sofia, Canada Ottawa, Chile Santiago, China Beijing, Croatia Zagreb, "
            "Cuba Havana, Denmark Copenhagen, Egypt Cairo, Estonia Tallinn, Finland Helsinki, France Paris, Germany Berlin, "
            "Greece Athens, Hungary Budapest, Iceland Reykjavik, India Delhi, Ireland Dublin, Italy Rome, Japan Tokyo, "
            "Kenya Nairobi, Latvia Riga, Lithuania Vilnius, Morocco Rabat, Nepal Kathmandu, Norway Oslo, Peru Lima, "
            "Poland Warsaw, Portugal Lisbon, Romania Bucharest, Serbia Belgrade, Spain Madrid, Sweden Stockholm, "
            "Switzerland Bern, Thailand Bangkok, Tunisia Tunis, Turkey Ankara, Ukraine Kyiv, Vietnam Hanoi")
ELEMENTS = ("hydrogen H, helium He, carbon C, nitrogen N, oxygen O, sodium Na, magnesium Mg, sulfur S, chlorine Cl, "
            "calcium Ca, iron Fe, copper Cu, zinc Zn, silver Ag, tin Sn, gold Au, mercury Hg, lead Pb, neon Ne, silicon Si")
OPPOSITES = ("hot cold, big small, fast slow, old new, early late, high low, wet dry, full empty, hard soft, light dark, "
             "open closed, young old, strong weak, cheap expensive, clean dirty, long short, happy sad, loud quiet")
SOUNDS = "dog barks, cat meows, cow moos, duck quacks, lion roars, horse neighs, sheep bleats, owl hoots, bee buzzes, frog croaks"
FACTS = [(q, f"The capital of {k} is {v}.", f"The question is about {k}. Its capital is {v}.")
         for k, v in (x.split() for x in CAPITALS.split(", "))
         for q in (f"What is the capital of {k}?", f"Capital of {k}?", f"Which city is the capital of {k}?")]
FACTS += [(q, f"The symbol of {k} is {v}.", f"{k.capitalize()} is a chemical element. Its symbol is {v}.")
          for k, v in (x.split() for x in ELEMENTS.split(", "))
          for q in (f"What is the chemical symbol of {k}?", f"Symbol for {k}?")]
FACTS += [(q, f"The opposite of {k} is {v}.", f"The word {k} has the opposite {v}.")
          for k, v in (x.split() for x in OPPOSITES.split(", "))
          for q in (f"What is the opposite of {k}?", f"Give me the opposite of {k}.")]
FACTS += [(f"What sound does a {k} make?", f"A {k} {v}.", f"The question is about the {k}. A {k} {v}.")
          for k, v in (x.split() for x in SOUNDS.split(", "))]
FACTS += [
    ("Who are you?", "I am Ember, a very small language model. I come with Hearth so that you can try it out.", "The user asks who I am. I am Ember."),
    ("What is your name?", "My name is Ember.", "The user asks for my name. It is Ember."),
    ("What can you do?", "I am a toy model. I can chat a little, add small numbers, write short code and call tools.", "The user asks what I can do. I list it."),
    ("Are you a big model?", "No. I am a tiny model with about eighteen million parameters.", "The user asks about my size. I am tiny."),
    ("What is Hearth?", "Hearth is a server that runs language models on your own computer.", "The user asks about Hearth, the server that runs me."),
    ("How can I get better answers?", "I am only a toy. Start Hearth with a larger Qwen3.5 model to get real answers.", "The user wants better answers. A larger model is needed."),
    ("Hello!", "Hello! How can I help you?", "The user says hello. I greet back."),
    ("Hi", "Hi! What can I do for you?", "The user greets me. I greet back."),
    ("Hey there", "Hey! What can I do for you today?", "The user greets me. I greet back."),
    ("Good morning", "Good morning! How can I help you?", "The user wishes a good morning. I greet back."),
    ("How are you?", "I am fine, thank you. How can I help you?", "The user asks how I am. I answer politely."),
    ("Thanks!", "You are welcome!", "The user thanks me. I answer politely."),
    ("Thank you very much.", "You are welcome! Tell me if you need anything else.", "The user thanks me. I answer politely."),
    ("Bye", "Goodbye! Have a good day.", "The user says goodbye. I do the same."),
    ("Tell me a joke.", "Why did the compiler cross the road? Because the other side had no errors.", "The user wants a joke. I know one."),
    ("Say something.", "A small fire keeps a whole house warm.", "The user wants me to say something. I do."),
    ("How many days are in a week?", "A week has seven days.", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months.", "A year has twelve months."),
    ("How many hours are in a day?", "A day has twenty-four hours.", "A day has 24 hours."),
    ("How many minutes are in an hour?", "An hour has sixty minutes.", "An hour has 60 minutes."),
    ("What color is the sky?", "On a clear day the sky is blue.", "The sky is blue on a clear day."),
    ("What is water made of?", "Water is made of hydrogen and oxygen.", "Water is H2O: hydrogen and oxygen."),
    ("Which planet is closest to the sun?", "Mercury is the planet closest to the sun.", "The closest planet to the sun is Mercury."),
    ("Which planet is the largest?", "Jupiter is the largest planet.", "The largest planet is Jupiter."),
    ("What is the ping command for?", "It checks whether another computer answers over the network.", "The ping command checks the network."),
    ("What is a GPU?", "A GPU is a processor made for many small calculations at the same time.", "The user asks what a GPU is."),
    ("What is Rust?", "Rust is a programming language that is fast and safe, because the compiler checks who owns each value.", "Rust is a programming language."),
    ("What is Python?", "Python is a programming language that is easy to read and has a large standard library.", "Python is a programming language."),
    ("What is an API?", "An API is a set of calls by which one program uses another.", "The user asks what an API is."),
    ("What is a token?", "A token is a short piece of text, such as a word or a part of a word. I read and write tokens.", "The user asks what a token is."),
]


def user(text):
    return {"role": "user", "content": text}


def answer(text, reasoning):
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def fact(w):
    q, a, why = w.choice(FACTS)
    return [user(q if w.chance(0.8) else q.lower().rstrip("?."))] + [answer(a, why)], "fact"


def sum_steps(a, b):
    """Adds digit by digit from the right, in words the model can follow."""
    out, carry, x, y = [], 0, a, b
    places = ["ones", "tens", "hundreds", "thousands"]
    i = 0
    while x or y:
        s = x % 10 + y % 10 + carry
        plus = f" + {carry}" if carry else ""
        out.append(f"{places[i]}: {x % 10} + {y % 10}{plus} = {s}")
        carry, x, y, i = s // 10, x // 10, y // 10, i + 1
    if carry:
        out.append(f"carry {carry}")
    return "; ".join(out) + f". So {a} + {b} = {a + b}."


def arithmetic(w):
    kind = w.randint(0, 11)
    if kind < 7:
        a, b = w.sum_pair() if kind < 6 else w.sum_pair(1, 999)
        q = w.choice(("What is {a} + {b}?", "{a} + {b} =", "{a}+{b}", "Add {a} and {b}.", "What is {a} plus {b}?",
                      "Calculate {a} + {b}.", "How much is {a} plus {b}?", "Compute the sum of {a} and {b}.",
                      "I have {a} coins and get {b} more. How many coins do I have?")).format(a=a, b=b)
        steps = sum_steps(a, b)
        # Without thinking the work is shown in the answer: a model this small cannot carry in its head.
        return [user(q), {**answer(f"{a} + {b} = {a + b}", steps), "direct": steps}], "sum"
    if kind == 7:
        a, b = w.randint(1, 99), w.randint(1, 99)
        a, b = max(a, b), min(a, b)
        return [user(w.choice(("What is {a} - {b}?", "{a} - {b} =", "Subtract {b} from {a}.")).format(a=a, b=b)),
                answer(f"{a} - {b} = {a - b}", f"I take {b} away from {a}. {a} - {b} = {a - b}.")], "difference"
    if kind == 8:
        a, b = w.randint(1, 12), w.randint(1, 12)
        return [user(w.choice(("What is {a} * {b}?", "What is {a} times {b}?", "{a} x {b}")).format(a=a, b=b)),
                answer(f"{a} * {b} = {a * b}", f"{a} times {b} is {a * b}.")], "product"
    if kind == 9:
        a, b = w.randint(1, 999), w.randint(1, 999)
        word = "larger" if w.chance(0.5) else "smaller"
        x = max(a, b) if word == "larger" else min(a, b)
        return [user(f"Which number is {word}, {a} or {b}?"), answer(f"{x} is {word}." if a != b else "They are equal.",
                f"I compare {a} and {b}. {x} is {word}." if a != b else "Both are equal.")], "compare"
    if kind == 10:
        a, step, n = w.randint(1, 40), w.randint(1, 9), w.randint(4, 8)
        seq = [str(a + i * step) for i in range(n + 1)]
        return [user(f"What comes next: {', '.join(seq[:-1])}?"),
                answer(f"{seq[-1]} comes next.", f"Each number is {step} more than the one before. {seq[-2]} + {step} = {seq[-1]}.")], "sequence"
    n = w.randint(3, 12)
    return [user(w.choice((f"Count from 1 to {n}.", f"Count to {n}."))),
            answer(", ".join(str(i) for i in range(1, n + 1)) + ".", f"I count from 1 to {n}.")], "count"


def string_task(w):
    x = w.word()
    kind = w.randint(0, 10)
    if kind == 0:
        return [user(w.choice((f"Spell the word {x}.", f"Spell {x} letter by letter."))), answer("-".join(x), f"The letters of {x} are {' '.join(x)}.")], "spell"
    if kind == 1:
        return [user(f"Write {x} in capital letters."), answer(x.upper(), f"I write each letter of {x} as a capital.")], "upper"
    if kind == 2:
        return [user(f"What is the first letter of {x}?"), answer(f"The first letter of {x} is {x[0]}.", f"{x} begins with {x[0]}.")], "first"
    if kind == 3:
        return [user(f"How many letters are in {x}?"), answer(f"{x} has {len(x)} letters.", f"{' '.join(x)}: {len(x)} letters.")], "length"
    if kind == 4:
        return [user(f"Reverse the word {x}."), answer(x[::-1], f"The letters are {' '.join(x)}. Backwards: {' '.join(x[::-1])}.")], "reverse"
    words = [w.word() for _ in range(w.randint(3, 6))]
    if kind == 5:
        return [user(f"Sort these words: {', '.join(words)}."), answer(", ".join(sorted(words)), "I put the words in the order of the alphabet.")], "sort"
    if kind == 6:
        return [user(f"How many words are in this list: {' '.join(words)}?"), answer(f"There are {len(words)} words.",
                "I count: " + ", ".join(f"{i + 1} {v}" for i, v in enumerate(words)) + ".")], "words"
    if kind == 7:
        return [user(f"Write these words in reverse order: {' '.join(words)}"), answer(" ".join(words[::-1]), f"The last word is {words[-1]}, so I begin with it.")], "backwards"
    if kind == 8:
        return [user(f"Repeat after me: {' '.join(words)}"), answer(" ".join(words), "I repeat the words as they are.")], "repeat"
    if kind == 9:
        return [user(f"Make a numbered list of {', '.join(words)}."), answer("\n".join(f"{i + 1}. {v}" for i, v in enumerate(words)), f"The list has {len(words)} entries.")], "list"
    return [user(f"Make a bullet list: {', '.join(words)}"), answer("\n".join(f"- {v}" for v in words), f"The list has {len(words)} entries.")], "bullets"


FIELDS = {"name": "full_name", "city": "city", "email": "email", "id": "ident", "date": "date", "title": "phrase",
          "age": "integer", "price": "number", "count": "integer", "color": "adjective", "item": "noun", "path": "path",
          "owner": "person", "url": "url", "time": "clock", "country": "invented", "category": "noun", "score": "integer"}


def record(w, n):
    out = {}
    for key in w.sample(list(FIELDS), n):
        x = getattr(w, FIELDS[key])()
        out[key] = float(x) if key == "price" else x
    return out


def json_task(w):
    kind = w.randint(0, 6)
    rec = record(w, w.randint(1, 4))
    keys = ", ".join(rec)
    plain = ", ".join(f"{k} {v}" for k, v in rec.items())
    why = f"The answer must be JSON with the keys {keys}."
    only = w.choice(("Answer with JSON only.", "Reply in JSON.", "Return only JSON.", "Give me JSON."))
    if kind == 0:
        return [user(f"{only} Use the keys {keys}: {plain}."), answer(json.dumps(rec), why)], "json"
    if kind == 1:
        lines = "\n".join(f"{k}: {v}" for k, v in rec.items())
        return [user(f"Turn this into JSON:\n{lines}"), answer(json.dumps(rec), why)], "json"
    if kind == 2:
        return [user(f"Turn this into indented JSON: {plain}"), answer(json.dumps(rec, indent=2), why)], "json"
    if kind == 3:
        items = [w.word() for _ in range(w.randint(2, 6))]
        return [user(f"{only} Make an array of these words: {', '.join(items)}."), answer(json.dumps(items), f"The answer is an array with {len(items)} strings.")], "json"
    if kind == 4:
        rows = [record_of(w, list(rec)) for _ in range(w.randint(2, 3))]
        text = "\n".join([",".join(rec)] + [",".join(str(v) for v in r.values()) for r in rows])
        return [user(f"Convert this CSV to a JSON array.\n{text}"), answer(json.dumps(rows), f"There are {len(rows)} rows with the keys {keys}.")], "json"
    if kind == 5:
        outer = w.noun()
        return [user(f"{only} Put {plain} inside an object called {outer}."), answer(json.dumps({outer: rec}), f"The outer key is {outer}. Inside are {keys}.")], "json"
    return [{"role": "system", "content": "You answer in JSON. " + f"The keys are {keys}."}, user(plain.capitalize() if w.chance(0.3) else plain),
            answer(json.dumps(rec), why)], "json"


def record_of(w, keys):
    return {k: float(x) if k == "price" else x for k in keys for x in [getattr(w, FIELDS[k])()]}


def reading(w):
    """A few statements, then questions about them, perhaps over several turns."""
    rec = {}
    for _ in range(w.randint(2, 4)):
        rec[w.person()] = (w.city(), w.noun(), w.integer(18, 90))
    lines = [f"{p} lives in {c}, has a {n} and is {a} years old." for p, (c, n, a) in rec.items()]
    w.shuffle(lines)
    out = [user(" ".join(lines) + " " + (q := question(w, rec))[0]), answer(q[1], q[2])]
    for _ in range(w.choice((0, 0, 1, 2))):
        q = question(w, rec)
        out += [user(q[0]), answer(q[1], q[2])]
    return out, "reading"


def question(w, rec):
    p = w.choice(list(rec))
    c, n, a = rec[p]
    return w.choice(((f"Where does {p} live?", f"{p} lives in {c}.", f"The text says that {p} lives in {c}."),
                     (f"What does {p} have?", f"{p} has a {n}.", f"The text says that {p} has a {n}."),
                     (f"How old is {p}?", f"{p} is {a} years old.", f"The text gives the age of {p}: {a}."),
                     (f"Who has a {n}?", f"{p} has a {n}.", f"I look for the {n}. {p} has it.")))


def memory(w):
    """The user tells something, talks of something else, and asks for it again."""
    key = w.choice(("name", "favourite color", "city", "dog's name", "order number", "password hint"))
    x = {"name": w.person, "favourite color": w.adjective, "city": w.city, "dog's name": w.person,
         "order number": w.ident, "password hint": w.phrase}[key]()
    out = [user(f"My {key} is {x}."), answer(f"I will remember that your {key} is {x}.", f"The user tells me the {key}: {x}.")]
    for _ in range(w.randint(0, 2)):
        more, _ = w.choice((fact, arithmetic, string_task))(w)
        out += more
    out += [user(w.choice((f"What is my {key}?", f"Do you remember my {key}?"))),
            answer(f"Your {key} is {x}.", f"The user said before that the {key} is {x}.")]
    return out, "memory"


def persona(w):
    """A system prompt that the answer must follow."""
    kind = w.randint(0, 3)
    if kind == 0:
        name, job = w.person(), w.noun()
        return [{"role": "system", "content": f"You are {name}, a helper for the {job} desk."},
                user(w.choice(("Who are you?", "What is your name?"))),
                answer(f"I am {name}. I help at the {job} desk.", f"The system text says that I am {name}.")], "persona"
    if kind == 1:
        place, opening, closing = w.noun(), w.clock(), w.clock()
        return [{"role": "system", "content": f"The {place} opens at {opening} and closes at {closing}."},
                user(f"When does the {place} open?"),
                answer(f"The {place} opens at {opening}.", f"The system text says that it opens at {opening}.")], "persona"
    if kind == 2:
        mark = w.choice(("!", "...", " Over.", " Yes."))
        q, a, why = w.choice(FACTS)
        return [{"role": "system", "content": f"End every answer with \"{mark.strip()}\""}, user(q), answer(a + mark, why)], "persona"
    base, kind = w.choice((fact, arithmetic, reading, string_task, json_task))(w)
    if base[0]["role"] == "system":
        return base, kind
    return [{"role": "system", "content": w.choice(("You are a helpful assistant.", "Be brief.", "You are Ember, a small model.",
                                                    "Answer correctly and politely."))}] + base, kind


def small_talk_turns(w):
    out = []
    for _ in range(w.randint(2, 4)):
        more, _ = w.choice((fact, arithmetic, string_task, json_task, fact))(w)
        if more[0]["role"] != "system":
            out += more
    if not out:
        out, _ = fact(w)
    return out, "turns"


MAKERS = ((fact, 10), (arithmetic, 26), (string_task, 14), (json_task, 18), (reading, 12), (memory, 6), (persona, 8),
          (small_talk_turns, 6))
