"""Longer answers: explanations, plans, stories, letters, comparisons, reviews.

An answer is a run of sentence patterns filled with words of the question. Which pattern stands at
which place depends mostly on the first letter of the topic, so that a small model can learn the
habit; names and things that the question gives are copied.
"""
from gen_chat import answer, user

EXPLAIN_OPEN = (
    "A {t} is a {a} thing that people use when they need to {v} something.",
    "The word {t} means a {a} object that helps you to {v}.",
    "In short, a {a} {t} is what you reach for when you want to {v} with a {u}.",
    "Many people know the {t}, but few can say how a {a} {t} works beside a {u}.",
    "Think of a {t} as a {a} helper next to the {u} in daily life.",
    "A {t} looks {a} at first, yet there is a {u} behind it.",
    "When somebody talks about a {t}, they mostly mean the {a} kind with a {u}.",
    "There are several kinds of {t}, and the {a} {t} is the best known to {v}.",
    "Let me explain the {a} {t} from the beginning, then the {u}.")
EXPLAIN_MIDDLE = (
    "First, look at how the {t} is made: a {a} {u} on the outside and a small {t} inside.",
    "The {t} was invented because the older {u} was too slow and cost too much.",
    "You will find a {a} {t} in almost every house, and a {u} in every office.",
    "The most important thing about a {t} is the {u}, which must be kept {a} and dry.",
    "Experts say that a {a} {t} lasts longer than the {u}.",
    "If you use the {t} every day, you soon learn what the {u} can do and how {a} it is.",
    "Some people prefer a {a} {t}, while others like a {u} better.",
    "A {t} works best in the morning, when the {u} around it is {a}.",
    "Before you buy a {t}, ask a friend who already owns a {a} {u}.",
    "Children often learn about the {t} by watching the {a} {u}.",
    "The price of a {t} depends on the {u}, the color and how {a} it is.",
    "A {a} {t} needs more care than an ordinary {u}, but a {t} also gives more back.",
    "In the past a {a} {t} was rare and only the {u} was known.",
    "Today the {t} is made by machines, although a {a} {u} is still made by hand.",
    "One common mistake is to forget the {t} outside with the {a} {u}.",
    "Together with a {u} the {a} {t} becomes even more useful.")
EXPLAIN_END = (
    "So if you ever need to {v}, remember the {a} {t} and the {u}.",
    "That is all about the {t}, the {u} and how to {v} for now.",
    "In the end, the best way to understand a {t} is to {v} with a {u} yourself.",
    "I hope this makes the {a} {t} and the {u} clearer.",
    "Ask me again if you want to know more about the {t} or about the {u}.",
    "With a little practice you will {v} with your {t} without a {u}.")
STEPS = (
    "Write down why the {t} needs the {u} and what should be different afterwards.",
    "Collect everything for the {t}: a table, a good light and the {u}.",
    "Ask somebody to show you how a {u} fits a {t}.",
    "Begin with the smallest part of the {t} and finish it before the {u}.",
    "Check the {t} carefully and write down every problem of the {u}.",
    "Take a break from the {u} and look at the {t} again.",
    "Repair the broken {u} and leave the {t} alone.",
    "Show the {t} to a friend who knows a {u}.",
    "Clean the {u} and store the {t} where it is dry.",
    "Plan the next {u} for tomorrow, while the {t} is fresh.",
    "Compare the {t} with the {u} and decide which one you want to keep.",
    "Celebrate when the {t} is done and the {u} works.")
STORY_OPEN = (
    "Once upon a time there was a {a} {t} named {n} who lived near {c}.",
    "In a quiet street of {c} lived {n}, a {a} {t} who dreamed of a {u}.",
    "Long ago, when {c} was a village, a {a} {t} called {n} set out to find a {u}.",
    "{n} was the most {a} {t} in all of {c}, and every {u} knew it.",
    "Nobody in {c} had ever seen a {t} as {a} as {n}.")
STORY_MIDDLE = (
    "One morning {n} found a {u} under a tree and asked the {a} {t} of {c} about it.",
    "The rain fell on {c} for days, until the {u} of {n} was {a} and wet.",
    "{n} asked in {c} for help, but no {t} had a {u}.",
    "So {n} packed a {u}, left {c} and walked into the {a} hills.",
    "On the third day a {a} stranger showed {n} the way from {c} to a hidden {u}.",
    "Behind the {u} stood a tower, and in it a {a} {t} sang about {c}.",
    "\"Do not be afraid, {n},\" said the {u}, \"a {t} from {c} is always {a}.\"",
    "{n} gave the {u} to the {a} {t}, and the sky over {c} turned golden.",
    "At night the stars over {c} were so {a} that {n} dropped the {u}.",
    "When the wind stopped, {n} heard a {a} bell in {c} and took the {u}.")
STORY_END = (
    "From that day on {n} the {t} was never lonely again, and {c} still talks of the {u}.",
    "When {n} came home to {c}, every {t} wanted to see the {a} {u}.",
    "And if you visit {c} today, you can still see {n} and the {a} {u}.",
    "{n} smiled at the {u}, and the {a} {t} slept until the sun came up over {c}.")
MAIL_MIDDLE = (
    "I am writing to {n} because of the {t} and the {u} of last week.",
    "Thank you, {n}, for your help with the {t}; the {u} made a great difference.",
    "We would like to move the {t} and the {u} to another day.",
    "As you know, the {t} has been delayed, and the {u} is the reason.",
    "The {t} is finally ready, and {n} can see it with the {u}.",
    "Our team has finished the {u} of the {t} and needs your opinion, {n}.")
MAIL_MORE = (
    "Please let me know by Friday whether the {t} fits the {u}.",
    "The {u} is attached, so that {n} can read about the {t} before we meet.",
    "If you have questions about the {u}, {n}, just bring the {t} to my office.",
    "I am sorry for the {t} and will find a better {u}, {n}.",
    "It would be wonderful if {n} could bring the {u} for the {t}.",
    "The {t} still has time, so {n} need not hurry with the {u}.")
PLUS = (
    "the {t} saves time, because you can {v} without waiting",
    "the {t} is {a} and easy to find",
    "a {a} {t} is what many people like",
    "the {t} lasts for years if you {v} well",
    "a {a} {t} needs very little space",
    "the {t} can be shared when you {v} with friends")
MINUS = (
    "a {a} {t} can break when you {v}",
    "it takes a while until you {v} with a {t}",
    "the {t} is not made for people who {v} every day",
    "a {t} that is {a} is often of poor quality",
    "the {t} needs a new part before you {v} again",
    "a {a} {t} makes noise when you {v}")


def run(w, topic, patterns, n, fields, at=0):
    """`n` different patterns; the place and the topic decide which."""
    out, seen = [], set()
    for i in range(n):
        pick = pattern_index(w, topic, at + i, len(patterns))
        while pick in seen:
            pick = (pick + 1) % len(patterns)
        seen.add(pick)
        out.append(patterns[pick].format(**fields))
    return out


def pattern_index(w, topic, place, n):
    if w.chance(0.1):
        return w.randint(0, n - 1)
    return ((ord(topic[0].lower()) - 97) % 26 * 5 + place * 3 + len(topic) % 2) % n


def fields_of(w):
    return {"t": w.word(), "u": w.noun(), "a": w.adjective(), "v": w.choice(("rest", "travel", "cook", "learn", "write", "build", "paint", "measure", "sing", "count")),
            "n": w.person(), "c": w.city()}


def explain(w):
    f = fields_of(w)
    t = f["t"]
    q = w.choice(("Explain what a {t} is. Mention a {u}, the word {a} and how to {v}.", "Tell me about the {t}: {a}, good to {v}, together with a {u}.",
                  "What is a {t}? Use the words {a}, {v} and {u}.", "Write a short text about a {a} {t} that helps to {v}, and a {u}.")).format(**f)
    text = run(w, t, EXPLAIN_OPEN, 1, f) + run(w, t, EXPLAIN_MIDDLE, w.randint(3, 6), f, 1) + run(w, t, EXPLAIN_END, 1, f, 2)
    return [user(q), answer(" ".join(text), f"The text is about a {f['a']} {t}. I say what it is, mention the {f['u']} and how to {f['v']}, and end with a summary.")], "explain"


def steps(w):
    f = fields_of(w)
    n = w.randint(3, 7)
    q = w.choice(("Give me {n} steps for a plan about my {t} and the {u}.", "Make a plan with {n} steps: {t}, {u}.",
                  "How do I start with a {t} and a {u}? List {n} steps.")).format(n=n, t=f["t"], u=f["u"])
    lines = [f"{i + 1}. {s}" for i, s in enumerate(run(w, f["t"], STEPS, n, f))]
    return [user(q), answer(f"Here is a plan with {n} steps for your {f['t']}:\n\n" + "\n".join(lines) + f"\n\nGood luck with the {f['t']}!",
                            f"The user wants {n} steps about the {f['t']} and the {f['u']}. I write a numbered list.")], "steps"


def story(w):
    f = fields_of(w)
    q = w.choice(("Write a short story about a {a} {t} named {n} in {c} with a {u}.", "Tell me a story. Hero: {n}, a {a} {t}. Place: {c}. Thing: {u}.",
                  "Make up a story about {n}, the {a} {t} of {c}, and a {u}.")).format(**f)
    text = run(w, f["t"], STORY_OPEN, 1, f) + run(w, f["t"], STORY_MIDDLE, w.randint(3, 6), f, 1) + run(w, f["t"], STORY_END, 1, f, 2)
    half = len(text) // 2
    return [user(q), answer(" ".join(text[:half]) + "\n\n" + " ".join(text[half:]),
                            f"The story is about {f['n']}, a {f['a']} {f['t']}. It happens in {f['c']}, and a {f['u']} is part of it.")], "story"


def mail(w):
    f = fields_of(w)
    sender, kind = w.person(), w.choice(("an e-mail", "a letter", "a message"))
    q = w.choice(("Write {k} to {n} about the {t} and the {u}. Sign it as {s}.", "I am {s}. Write {k} to {n}: {t}, {u}.")).format(k=kind, s=sender, **f)
    text = run(w, f["t"], MAIL_MIDDLE, w.randint(1, 2), f) + run(w, f["t"], MAIL_MORE, w.randint(2, 3), f, 1)
    hello, bye = (("Dear", "Best regards,"), ("Hello", "Kind regards,"), ("Hi", "See you soon,"))[len(f["n"]) % 3]
    return [user(q), answer(f"{hello} {f['n']},\n\n{' '.join(text)}\n\n{bye}\n{sender}",
                            f"I write {kind} to {f['n']} about the {f['t']}. It is signed by {sender}.")], "mail"


def balance(w):
    f = fields_of(w)
    n = w.randint(2, 4)
    q = w.choice(("What are the pros and cons of a {a} {t} if I want to {v}? Give {n} each.", "List {n} good and {n} bad things about a {a} {t} to {v}.")).format(**{**f, "n": n})
    good, bad = run(w, f["t"], PLUS, n, f), run(w, f["t"], MINUS, n, f, 1)
    text = f"Good things about a {f['t']}:\n" + "\n".join(f"- {x}" for x in good) + f"\n\nBad things about a {f['t']}:\n" + "\n".join(f"- {x}" for x in bad)
    return [user(q), answer(text + f"\n\nAll in all, a {f['a']} {f['t']} is worth a try.", f"I list {n} good and {n} bad things about the {f['t']}.")], "balance"


def compare(w):
    f = fields_of(w)
    t, u, a, b = f["t"], f["u"], f["a"], w.adjective()
    q = f"Compare a {a} {t} with a {b} {u}."
    lines = [f"A {t} and a {u} have some things in common, but they are not the same.",
             f"The {t} is {a}, while the {u} is {b}.",
             f"If you need something {a}, take the {t}."] + run(w, t, EXPLAIN_MIDDLE, w.randint(1, 3), f) + [
             f"If you would rather have something {b}, the {u} is the better choice.",
             f"Many people own both, a {t} and a {u}."]
    return [user(q), answer(" ".join(lines), f"I compare two things: the {a} {t} and the {b} {u}.")], "compare"


def summary(w):
    f = fields_of(w)
    body = run(w, f["t"], EXPLAIN_MIDDLE, w.randint(2, 4), f)
    w.shuffle(body)
    return [user("Rewrite this text as a list: " + " ".join(body)),
            answer("\n".join(f"- {x}" for x in body), f"The text has {len(body)} sentences. I write one line for each.")], "summary"


MAKERS = ((explain, 5), (steps, 4), (story, 5), (mail, 4), (balance, 3), (compare, 3), (summary, 3))
