"""Longer answers: explanations, plans, stories, letters, comparisons, reviews.

An answer is a run of sentence patterns filled with words of the question. Which pattern stands at
which place depends mostly on the first letter of the topic, so that a small model can learn the
habit; names and things that the question gives are copied.
"""
from gen_chat import answer, user

EXPLAIN_OPEN = (
    "A {t} is a {a} thing that people use when they need to {v} something.",
    "The word {t} means a {a} object that helps you to {v}.",
    "In short, a {t} is what you reach for when you want to {v}.",
    "Many people know the {t}, but few can say how it works.",
    "Think of a {t} as a {a} helper in daily life.",
    "A {t} looks simple at first, yet there is a lot behind it.",
    "When somebody talks about a {t}, they mostly mean the {a} kind.",
    "There are several kinds of {t}, and the {a} one is the best known.",
    "Let me explain the {t} from the beginning.")
EXPLAIN_MIDDLE = (
    "First, look at how the {t} is made: it has a {a} part on the outside and a small core inside.",
    "It was invented because the older way was too slow and cost too much money.",
    "You will find one in almost every house, school or office.",
    "The most important thing about a {t} is that it must be kept clean and dry.",
    "Experts say that a good {t} lasts for ten years or longer.",
    "If you use the {t} every day, you soon learn what it can do and what it cannot do.",
    "Some people prefer a larger {t}, while others like a small one better.",
    "It works best in the morning, when everything around it is quiet.",
    "Before you buy a {t}, ask a friend who already owns one.",
    "Children often learn about the {t} by watching their parents.",
    "The price depends on the size, the color and the shop where you find it.",
    "A {a} {t} needs more care than an ordinary one, but it also gives more back.",
    "In the past a {t} was rare and only rich people had one.",
    "Today the {t} is made by machines, although a few are still made by hand.",
    "One common mistake is to forget the {t} outside during the night.",
    "Together with a {u} the {t} becomes even more useful.")
EXPLAIN_END = (
    "So if you ever need to {v}, remember the {t}.",
    "That is all you need to know about the {t} for now.",
    "In the end, the best way to understand a {t} is to try it yourself.",
    "I hope this makes the {t} a little clearer.",
    "Ask me again if you want to know more about the {t} or about the {u}.",
    "With a little practice you will use your {t} without thinking about it.")
STEPS = (
    "Write down why you want to work on the {t} and what should be different afterwards.",
    "Collect everything you need: a table, a good light, some paper and the {u}.",
    "Ask somebody with experience to show you how they handle a {t}.",
    "Begin with the smallest part of the {t} and finish it before you go on.",
    "Check the result carefully and write down every problem that you find.",
    "Take a break of ten minutes and look at the {t} again with fresh eyes.",
    "Repair what is broken and leave alone what already works.",
    "Show the {t} to a friend and listen to what they say.",
    "Clean the place, put the tools away and store the {t} where it is dry.",
    "Plan the next step for tomorrow, while the {t} is still in your mind.",
    "Compare the {t} with the {u} and decide which one you want to keep.",
    "Celebrate when the {t} is done, because finishing things is hard.")
STORY_OPEN = (
    "Once upon a time there was a {a} {t} named {n} who lived near {c}.",
    "In a quiet street of {c} lived {n}, a {a} {t} with a big dream.",
    "Long ago, when {c} was still a village, a {t} called {n} set out on a journey.",
    "{n} was the most {a} {t} in all of {c}, and everybody knew it.",
    "Nobody in {c} had ever seen a {t} as {a} as {n}.")
STORY_MIDDLE = (
    "One morning {n} found an old {u} under a tree and wondered where it came from.",
    "The rain fell for seven days, and the river rose until it reached the door.",
    "{n} asked the neighbours for help, but they only shook their heads.",
    "So {n} packed some bread, a lamp and a map, and walked into the hills.",
    "On the third day a friendly stranger pointed the way to a hidden bridge.",
    "Behind the bridge stood a tower, and in the tower somebody was singing.",
    "\"Do not be afraid,\" said the voice, \"I have waited for you for a long time.\"",
    "{n} gave the {u} to the singer, and the whole sky turned golden.",
    "At night the stars were so bright that nobody could sleep.",
    "When the wind stopped, {n} heard a bell ring far away.")
STORY_END = (
    "From that day on {n} was never lonely again, and the people of {c} still tell the story.",
    "When {n} came home to {c}, everybody wanted to hear what had happened.",
    "And if you visit {c} today, you can still see the {u} in the old market hall.",
    "{n} smiled, closed the door, and slept until the sun came up.")
MAIL_MIDDLE = (
    "I am writing to you because of the {t} that we talked about last week.",
    "Thank you for your help with the {t}; it made a great difference to all of us.",
    "We would like to move the meeting about the {t} to another day.",
    "As you know, the {t} has been delayed, and I want to explain the reason.",
    "The {t} is finally ready, and I would be happy to show it to you.",
    "Our team has finished the first part of the {t} and needs your opinion.")
MAIL_MORE = (
    "Please let me know by Friday whether this works for you.",
    "The {u} is attached, so that you can read all the details before we meet.",
    "If you have any questions, just call me or come to my office.",
    "I am sorry for the trouble and will do my best to find a good solution.",
    "It would be wonderful if you could bring the {u} with you.",
    "We still have enough time, so there is no reason to hurry.")
PLUS = (
    "it saves time, because you can {v} without waiting for others",
    "it is cheap and easy to find in every larger town",
    "it is {a}, which many people like",
    "it lasts for years if you treat it well",
    "it needs very little space on your desk",
    "it can be shared with friends and family")
MINUS = (
    "it can break when it falls on the floor",
    "it takes a while until you know how to use it",
    "it is not made for people who want to {v} every day",
    "the cheap ones are often of poor quality",
    "it needs a new part every two years",
    "it makes some noise during the night")


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
    return [user(q), answer(" ".join(text), f"The user wants a text about the {t}. I say what it is, give some details and end with a short summary.")], "explain"


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
