"""Hostile chat templates: constructions that grow, nest, recurse or run long, and damaged real templates.

`templates(count, real)` gives pairs of a name and a source; each is made from its number alone.
"""

import random

# Expressions that grow `x`; `{n}` is a large number.
GROWTH = {
    "text": [
        "x ~ x",
        "x + x",
        "x * 2",
        "x | replace('a', x)",
        "[x, x] | join",
        "x | indent({n})",
        "'%s%s' | format(x, x)",
    ],
    "list": ["[x, x]", "x + x", "x * 3", "[x]", "x | list + [x]", "x | map('list') | list"],
    "map": ["{'a': x}", "{'a': x, 'b': x}", "dict(a=x, b=x)", "dict(x, c=x)"],
}
STARTS = {"text": "'a'", "list": "[1]", "map": "{}"}
AT_ONCE = [
    "{{ 'a' * {n} }}",
    "{{ range({n}) | list | length }}",
    "{{ 'a' | center({n}) }}",
    "{{ 'a\nb' | indent({n}) }}",
    "{{ '%{n}d' | format(1) }}",
    "{{ '{:>{n}}'.format(1) }}",
    "{{ ('a' * 9999999) | replace('a', 'b' * 9999999) }}",
    "{{ range(99999) | join('a' * 9999999) }}",
    "{{ ('a,' * 9999999).split(',') | length }}",
    "{{ [1] | batch({n}, 0) | list }}",
    "{{ [[[1]]] | tojson(indent={n}) }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns | tojson }}",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(a) %}{{ f(a) }}{{ f(a) }}{% endmacro %}{{ f(1) }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in messages %}{% for b in range(99999) %}{{ a | tojson }}{% endfor %}{% endfor %}",
    "{% include 'other' %}",
    "{% extends messages %}",
    "{% import 'os' as os %}{{ os.system('true') }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ lipsum({n}) }}",
    "{{ raise_exception('a' * 9999999) }}",
    "{{ strftime_now('%' * 99999) }}",
    "{{ strftime_now('%99999999d') }}",
]
CHAINS = [
    "{{{{ {c}1 }}}}|-",
    "{{{{ {c}1 }}}}|not ",
    "{{{{ {c}1 }}}}|(",
    "{{{{ {c}1 }}}}|[",
    "{{{{ a{c} }}}}|.a",
    "{{{{ a{c} }}}}|[0]",
    "{{{{ a{c} }}}}|()",
    "{{{{ a{c} }}}}||trim",
    "{{{{ 1{c} }}}}|+1",
    "{{{{ 1{c} }}}}|**9",
    "{{{{ 1{c} }}}}| if 1 else 1",
    "{c}|{{% if 1 %}}",
    "{c}|{{% for a in messages %}}",
    "{{% if 1 %}}{c}|{{% elif 0 %}}",
    "{c}|{{% macro f() %}}",
    "{c}|{{#",
    "{c}|{{% raw %}}",
]
NUMBERS = [10**4, 10**6, 10**9, 10**12, 2**63, -1]
TOKENS = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "-%}",
    "endif",
    "endfor",
    "'",
    '"',
    "\\",
    "|",
    "\x00",
    "\u202e",
    "~",
    "|length",
]


def constructed(number):
    """A template whose only purpose is to exhaust the process."""
    drawn = random.Random(f"constructed {number}")
    way = number % 3
    if way == 0:
        kind = drawn.choice(list(GROWTH))
        step = drawn.choice(GROWTH[kind]).replace("{n}", str(drawn.choice(NUMBERS)))
        rounds = drawn.choice([40, 1000, 90_000])
        if drawn.random() < 0.5:
            steps = ("{% set x = " + step + " %}") * min(rounds, 500)
            return f"{step}, straight", "{% set x = " + STARTS[kind] + " %}" + steps + "{{ x | length }}"
        looped = "{% set ns = namespace(x=" + STARTS[kind] + ") %}{% for i in range(" + str(rounds) + ") %}"
        looped += "{% set x = ns.x %}{% set ns.x = " + step + " %}{% endfor %}{{ ns.x }}"
        return f"{step}, {rounds} times", looped
    if way == 1:
        source = AT_ONCE[number // 3 % len(AT_ONCE)]
        return source[:60], source.replace("{n}", str(drawn.choice(NUMBERS)))
    form, _, part = CHAINS[number // 3 % len(CHAINS)].partition("|")
    rounds = drawn.choice([1000, 30_000, 200_000])
    return f"{rounds} of {part}", form.replace("{c}", "{c}", 1).format(c=part.format() * rounds)


def damaged(number, real):
    """A real template with seeded damage."""
    drawn = random.Random(f"damaged {number}")
    source = drawn.choice(real)
    for _ in range(drawn.choice([1, 2, 8])):
        a, b = sorted(drawn.randrange(len(source) + 1) for _ in range(2))
        b = min(b, a + drawn.choice([1, 10, 200]))
        way = drawn.randrange(6)
        if way == 0:
            source = source[:a] + source[b:]
        elif way == 1:
            source = source[:b] + source[a:b] * drawn.choice([2, 100, 3000]) + source[b:]
        elif way == 2:
            source = source[:a] + drawn.choice(TOKENS) + source[a:]
        elif way == 3:
            source = source[: max(a, 1)]
        elif way == 4:
            words = ["messages", "tools", "content", "role", "loop.index0", "namespace", "trim", "string"]
            source = source.replace(
                drawn.choice(words), drawn.choice([*words, "x * 99999999", "range(10**9)"])
            )
        else:
            source = (
                source[:a] + drawn.choice(AT_ONCE).replace("{n}", str(drawn.choice(NUMBERS))) + source[a:]
            )
    return "damage", source


def templates(count, real):
    for number in range(count):
        made = constructed(number) if number % 2 else damaged(number, real)
        yield f"{number}: {made[0]}", made[1]
