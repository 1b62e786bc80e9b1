"""Features of the template language that chat templates use, one small template each."""

CHAT = [
    {"role": role, "content": role[0]} for role in ("system", "user", "tool", "assistant", "user", "user")
]
CONTEXT = {"d": {"a": 1, "b": None, "c": "é<&>'\"", "items": [1.5, True]}, "x": 0}

FEATURES = {
    "loop variables": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.index0 }} {{ loop.revindex }}"
        "{{ ' first' if loop.first }}{{ ' last' if loop.last }};{% endfor %}"
    ),
    "loop neighbours": (
        "{% for m in messages %}[{{ loop.previtem.role if loop.previtem is defined }}<{{ m.role }}>"
        "{{ loop.nextitem.role if loop.nextitem is defined }}]{% endfor %}"
    ),
    "undefined neighbour is false": (
        "{% for m in messages %}{% if loop.previtem and loop.previtem.role != 'tool' %}x{% else %}"
        "-{% endif %}{% endfor %}"
    ),
    "loop with a filter": (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}"
    ),
    "loop else": "{% for m in [] %}x{% else %}none{% endfor %}",
    "break and continue": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% if loop.index > 4 %}"
        "{% break %}{% endif %}{{ m.role }} {% endfor %}"
    ),
    "loop scope": "{% set a = 1 %}{% for m in messages %}{% set a = 2 %}{% endfor %}{{ a }}",
    "namespace": (
        "{% set ns = namespace(n=0, seen=false) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'tool' %}{% set ns.seen = true %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.seen }}"
    ),
    "macro": (
        "{% macro f(a, b='!') %}{{ a | upper }}{{ b }}{% endmacro %}{{ f('hey') }} {{ f('what', b='?') }}"
    ),
    "set block": "{% set t %}a {{ 1 + 1 }} b{% endset %}[{{ t }}]",
    "trim blocks": "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "left strip blocks": "a\n    {% if true %}\n  b\n\t{% endif %}\nc {% if true %} d {% endif %}\n",
    "dashes": "a \n {%- if true -%} \n b \n {%- endif -%} \n c {{- ' d ' -}} e",
    "comments": "a{# gone #}b\n{#- gone too -#}\nc",
    "last newline": "a\n",
    "two last newlines": "a\n\n",
    "raw": "{% raw %}{{ x }}{% endraw %}",
    "slices": (
        "{{ messages[::-1][0].role }} {{ messages[1:] | length }} {{ messages[:-1] | length }} "
        "{{ 'abcdef'[1:4] }} {{ 'abcdef'[-2:] }} {{ 'abcdef'[::-1] }} {{ messages[-1].role }}"
    ),
    "type tests": (
        "{{ 'a' is string }} {{ 1 is number }} {{ none is none }} {{ x is defined }} "
        "{{ nope is defined }} {{ {} is mapping }} {{ [] is iterable }} {{ [] is sequence }} "
        "{{ true is boolean }} {{ 'a' is iterable }} {{ 'a' is mapping }} {{ 2.5 is float }} "
        "{{ 2 is integer }} {{ true is integer }} {{ false is false }} {{ 1 is true }}"
    ),
    "strip": (
        "{{ '  pad '.strip() }}|{{ '..x..'.strip('.') }}|{{ 'xxay'.lstrip('x') }}|"
        "{{ 'ayxx'.rstrip('x') }}|{{ '\\n\\na\\n'.strip('\\n') }}|"
    ),
    "prefixes": "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('bc') }} {{ 'abc'.startswith('b') }}",
    "split": (
        "{{ 'a,b,c'.split(',') | length }} {{ 'a</t>b</t>c'.split('</t>')[-1] }} "
        "{{ 'a</t>b'.split('</t>')[0] }} {{ ' a  b '.split() | length }} "
        "{{ 'k: v: w'.split(': ', 1)[1] }}"
    ),
    "case methods": "{{ 'AbC'.lower() }} {{ 'AbC'.upper() }} {{ 'a b'.title() }} {{ 'ab'.capitalize() }}",
    "replace and find": "{{ 'aXbX'.replace('X', '-') }} {{ 'abc'.find('c') }} {{ 'abcb'.count('b') }}",
    "dict get": (
        "{{ d.get('a') }} {{ d.get('zz', 'fallback') }} {{ d.get('zz') }} {{ d['a'] }} "
        "{{ d.zz is defined }}"
    ),
    "dict keys": (
        "{{ d.keys() | list | join(',') }} {{ d.values() | list | length }} "
        "{{ d.items() | list | length }}"
    ),
    "items filter": "{% for k, v in d | items %}{{ k }}={{ v }};{% endfor %}",
    "items method": "{% for k, v in {'p': 1, 'q': none}.items() %}{{ k }}={{ v }};{% endfor %}",
    "dictsort": "{% for k, v in {'q': 2, 'p': 1} | dictsort %}{{ k }}={{ v }};{% endfor %}",
    "printing constants": "{{ true }} {{ false }} {{ none }} {{ True }} {{ False }} {{ None }} [{{ nope }}]",
    "printing numbers": (
        "{{ 1.0 }} {{ 0.1 }} {{ 1e-7 }} {{ 1e16 }} {{ 1e15 }} {{ 123456789.125 }} {{ 9007199254740993 }}"
    ),
    "printing lists": "{{ [1, 'a', none, true, 1.0, [2]] }} {{ {'k': 'v', 'n': none} }} {{ ['it\\'s'] }}",
    "arithmetic": (
        "{{ 3 / 2 }} {{ 4 / 2 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 8 }} {{ -5 // 2 }} {{ -5 % 3 }} "
        "{{ 1 + 2.0 }} {{ 2 * 3 - 1 }}"
    ),
    "comparison": (
        "{{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ 1 < 2 <= 2 }} {{ true == 1 }} {{ none == false }} "
        "{{ [1] == [1] }}"
    ),
    "trim filter": (
        "[{{ '  x \\n' | trim }}] [{{ '\u3000\u00a0x\u2003' | trim }}] [{{ '\u001cx\u001f' | trim }}]"
    ),
    "lists filters": (
        "{{ [3, 1, 2] | sort | join('-') }} {{ [1, 2] | first }} {{ [1, 2] | last }} "
        "{{ [1, 2, 2] | unique | list | length }} {{ [1, 2, 3] | sum }} {{ [2, 5] | max }} "
        "{{ [1, 2] | reverse | list | join }}"
    ),
    "default filter": (
        "{{ none | default('d', true) }} {{ nope | default('m') }} "
        "{{ '' | default('e') }}| {{ none | default('n') }}"
    ),
    "conversions": (
        "{{ '7' | int + 1 }} {{ 3.9 | int }} {{ '2.5' | float }} {{ 5 | string + 'x' }} "
        "{{ 'ab' | list | join('.') }} {{ 2.567 | round(1) }}"
    ),
    "map and select": (
        "{{ messages | map(attribute='role') | join(' ') }} "
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
        "{{ messages | rejectattr('role', 'equalto', 'user') | list | length }} "
        "{{ messages | selectattr('role', 'in', ['tool', 'system']) | list | length }}"
    ),
    "length and safe": "{{ 'é日' | length }} {{ d | length }} {{ '<b>' | safe }} {{ '<b>' }}",
    "json": (
        "{{ d | tojson }} {{ [1, [2, none], {'k': true}] | tojson }} {{ {'b': 1, 'a': 2} | tojson }} "
        "{{ '</script>' | tojson }} {{ 'a' | tojson }} {{ 1e-7 | tojson }} {{ none | tojson }}"
    ),
    "json escapes": "{{ '\u0001\\t\\n\\\\\\'\u007f\u2028/' | tojson }}",
    "indented json": "{{ {'k': [1, {'z': none}], 'e': [], 'o': {}} | tojson(indent=2) }}",
    "sorted json": "{{ {'b': 1, 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=true) }}",
    "membership": "{{ 'a' in 'cat' }} {{ 'a' in ['b'] }} {{ 'a' in d }} {{ 'zz' not in d }} {{ '' in 'x' }}",
    "logic": (
        "{{ none or 'x' }} {{ '' and 'y' }}| {{ not [] }} {{ 1 if false }}| {{ 'yes' if d.a else 'no' }} "
        "{{ (0 or none) is none }}"
    ),
    "joining text": "{{ 'n=' ~ 3 ~ ' ' ~ true ~ ' ' ~ none ~ ' ' ~ 1.0 }} {{ 'a' + 'b' }}",
    "tuple unpacking": (
        "{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }} {% endfor %}{% set p, q = 5, 6 %}{{ p }}{{ q }}"
    ),
    "range and dict": (
        "{% for i in range(3) %}{{ i }}{% endfor %} {{ range(1, 9, 3) | list | join(',') }} "
        "{{ dict(a=1, b=2) | tojson }}"
    ),
    "nested access": (
        "{{ messages[0]['role'] }} {{ messages[0].role }} {{ d['items'][0] }} "
        "{{ messages[-1]['zz'] is defined }}"
    ),
}
