"""Code: functions, records, tests, queries and commands written to a specification, and explained.

The names in the question decide the answer, so a small model can be right.
"""
from gen_chat import answer, user

PY, RS, JS, SQL, SH = "python", "rust", "javascript", "sql", "bash"


def fence(lang, code):
    return f"```{lang}\n{code}\n```"


# what, words, python body, rust signature and body, javascript body; {f} name, {x} list, {v} one entry, {n} number
TASKS = (
    ("adds all numbers of {x}", "starts at zero and adds every number of {x}",
     "def {f}({x}):\n    total = 0\n    for {v} in {x}:\n        total += {v}\n    return total",
     "fn {f}({x}: &[i64]) -> i64 {{\n    let mut total = 0;\n    for {v} in {x} {{\n        total += {v};\n    }}\n    total\n}}",
     "function {f}({x}) {{\n  let total = 0;\n  for (const {v} of {x}) {{\n    total += {v};\n  }}\n  return total;\n}}"),
    ("returns the largest number of {x}", "keeps the largest number seen so far while it walks over {x}",
     "def {f}({x}):\n    best = {x}[0]\n    for {v} in {x}:\n        if {v} > best:\n            best = {v}\n    return best",
     "fn {f}({x}: &[i64]) -> Option<i64> {{\n    let mut best = *{x}.first()?;\n    for &{v} in {x} {{\n        if {v} > best {{\n            best = {v};\n        }}\n    }}\n    Some(best)\n}}",
     "function {f}({x}) {{\n  let best = {x}[0];\n  for (const {v} of {x}) {{\n    if ({v} > best) {{\n      best = {v};\n    }}\n  }}\n  return best;\n}}"),
    ("keeps the entries of {x} that are greater than {n}", "builds a new list with the entries of {x} above {n}",
     "def {f}({x}):\n    result = []\n    for {v} in {x}:\n        if {v} > {n}:\n            result.append({v})\n    return result",
     "fn {f}({x}: &[i64]) -> Vec<i64> {{\n    {x}.iter().copied().filter(|{v}| *{v} > {n}).collect()\n}}",
     "function {f}({x}) {{\n  return {x}.filter(({v}) => {v} > {n});\n}}"),
    ("multiplies every entry of {x} by {n}", "makes a new list in which every entry of {x} is multiplied by {n}",
     "def {f}({x}):\n    return [{v} * {n} for {v} in {x}]",
     "fn {f}({x}: &[i64]) -> Vec<i64> {{\n    {x}.iter().map(|{v}| {v} * {n}).collect()\n}}",
     "function {f}({x}) {{\n  return {x}.map(({v}) => {v} * {n});\n}}"),
    ("counts how often each entry of {x} occurs", "uses a map from entry to count and adds one for every entry of {x}",
     "def {f}({x}):\n    counts = {{}}\n    for {v} in {x}:\n        counts[{v}] = counts.get({v}, 0) + 1\n    return counts",
     "use std::collections::HashMap;\n\nfn {f}({x}: &[String]) -> HashMap<&str, usize> {{\n    let mut counts = HashMap::new();\n    for {v} in {x} {{\n        *counts.entry({v}.as_str()).or_insert(0) += 1;\n    }}\n    counts\n}}",
     "function {f}({x}) {{\n  const counts = {{}};\n  for (const {v} of {x}) {{\n    counts[{v}] = (counts[{v}] || 0) + 1;\n  }}\n  return counts;\n}}"),
    ("reverses the text {x}", "returns the characters of {x} from the last to the first",
     "def {f}({x}):\n    return {x}[::-1]",
     "fn {f}({x}: &str) -> String {{\n    {x}.chars().rev().collect()\n}}",
     "function {f}({x}) {{\n  return {x}.split(\"\").reverse().join(\"\");\n}}"),
    ("tells whether {x} is even", "looks at the remainder of {x} divided by two",
     "def {f}({x}):\n    return {x} % 2 == 0",
     "fn {f}({x}: i64) -> bool {{\n    {x} % 2 == 0\n}}",
     "function {f}({x}) {{\n  return {x} % 2 === 0;\n}}"),
    ("reads the file {x} and returns its lines", "opens {x}, reads all of it and splits it into lines",
     "def {f}({x}):\n    with open({x}, encoding=\"utf-8\") as file:\n        return file.read().splitlines()",
     "use std::{{fs, io}};\n\nfn {f}({x}: &str) -> io::Result<Vec<String>> {{\n    let text = fs::read_to_string({x})?;\n    Ok(text.lines().map(String::from).collect())\n}}",
     "const fs = require(\"fs\");\n\nfunction {f}({x}) {{\n  return fs.readFileSync({x}, \"utf-8\").split(\"\\n\");\n}}"),
    ("computes the factorial of {x}", "multiplies all numbers from two up to {x}",
     "def {f}({x}):\n    result = 1\n    for i in range(2, {x} + 1):\n        result *= i\n    return result",
     "fn {f}({x}: u64) -> u64 {{\n    let mut result = 1;\n    for i in 2..={x} {{\n        result *= i;\n    }}\n    result\n}}",
     "function {f}({x}) {{\n  let result = 1;\n  for (let i = 2; i <= {x}; i++) {{\n    result *= i;\n  }}\n  return result;\n}}"),
    ("joins the entries of {x} with commas", "turns the entries of {x} into one text with commas between them",
     "def {f}({x}):\n    return \", \".join(str({v}) for {v} in {x})",
     "fn {f}({x}: &[String]) -> String {{\n    {x}.join(\", \")\n}}",
     "function {f}({x}) {{\n  return {x}.join(\", \");\n}}"),
    ("returns the first {n} entries of {x}", "cuts {x} after {n} entries",
     "def {f}({x}):\n    return {x}[:{n}]",
     "fn {f}({x}: &[i64]) -> &[i64] {{\n    &{x}[..{x}.len().min({n})]\n}}",
     "function {f}({x}) {{\n  return {x}.slice(0, {n});\n}}"),
    ("raises an error when {x} is below {n} and returns it otherwise", "checks {x} against the limit {n} before it returns it",
     "def {f}({x}):\n    if {x} < {n}:\n        raise ValueError(f\"{x} must be at least {n}, got {{{x}}}\")\n    return {x}",
     "fn {f}({x}: i64) -> Result<i64, String> {{\n    if {x} < {n} {{\n        return Err(format!(\"{x} must be at least {n}, got {{{x}}}\"));\n    }}\n    Ok({x})\n}}",
     "function {f}({x}) {{\n  if ({x} < {n}) {{\n    throw new Error(`{x} must be at least {n}, got ${{{x}}}`);\n  }}\n  return {x};\n}}"),
)
NAMES = {PY: "Python", RS: "Rust", JS: "JavaScript"}
RESERVED = set("""abstract assert async await become break case class const continue crate default delete elif else enum except
export extends extern false final finally from function global impl import interface lambda loop macro match move nonlocal
null override package pass print private protected public raise return self static struct super switch this throw trait true
type typeof unsafe unsized virtual void where while with yield total best result counts file text""".split())


def spec(w):
    task = w.choice(TASKS)
    f = {"f": w.snake(), "x": w.own(lambda: w.choice(("values", "items", "numbers", "entries", w.noun(), w.noun() + "s", w.invented()))),
         "n": w.integer(2, 99)}
    while f["x"] in RESERVED:
        f["x"] = w.own(lambda: w.noun() + "s")
    last = f["f"].split("_")[-1]  # an entry is called as the function is: `add_silver_order` adds each `order`
    f["v"] = "value" if last in RESERVED or last == f["x"] else last
    return task, f


def function(w):
    task, f = spec(w)
    lang = w.choice((PY, PY, RS, RS, JS))
    code = task[{PY: 2, RS: 3, JS: 4}[lang]].format(**f)
    what, how = task[0].format(**f), task[1].format(**f)
    q = w.choice(("Write a {l} function {f} that {w}.", "{l}: a function `{f}` that {w}.", "Please write {f} in {l}. It {w}.",
                  "I need a {l} function called {f}. It {w}.")).format(l=NAMES[lang], f=f["f"], w=what)
    out = fence(lang, code)
    if not w.chance(0.3):
        out = f"Here is the function `{f['f']}` in {NAMES[lang]}:\n\n{out}\n\nCall `{f['f']}` with `{f['x']}`: it {how}."
    return [user(q), answer(out, f"I write {f['f']} in {NAMES[lang]}. Its parameter is {f['x']}; {f['f']} {how}.")], "code"


def explain_code(w):
    task, f = spec(w)
    lang = w.choice((PY, RS, JS))
    code = task[{PY: 2, RS: 3, JS: 4}[lang]].format(**f)
    return [user(w.choice(("What does this code do?", "Explain this function.", "Explain:")) + "\n\n" + fence(lang, code)),
            answer(f"This is a {NAMES[lang]} function named `{f['f']}`. It {task[0].format(**f)}: `{f['f']}` {task[1].format(**f)}.",
                   f"The code defines {f['f']} in {NAMES[lang]} with {f['x']}. I read the body of {f['f']}.")], "code-explain"


def translate(w):
    task, f = spec(w)
    a, b = w.sample([2, 3, 4], 2)
    langs = {2: PY, 3: RS, 4: JS}
    return [user(f"Translate this to {NAMES[langs[b]]}:\n\n{fence(langs[a], task[a].format(**f))}"),
            answer(fence(langs[b], task[b].format(**f)), f"The code of {f['f']} {task[1].format(**f)}. I write {f['f']} in {NAMES[langs[b]]}.")], "code"


def test_for(w):
    task, f = spec(w)
    lang = w.choice((PY, RS))
    a, b, c = sorted(w.randint(1, 99) for _ in range(3))
    name = f["f"]
    if lang == PY:
        code = f"import unittest\n\nfrom {f['x']} import {name}\n\n\nclass Test{name.title().replace('_', '')}(unittest.TestCase):\n    def test_{name}(self):\n        self.assertEqual({name}([{a}, {b}]), {c})\n\n\nif __name__ == \"__main__\":\n    unittest.main()"
    else:
        code = f"#[cfg(test)]\nmod tests {{\n    use super::*;\n\n    #[test]\n    fn test_{name}() {{\n        assert_eq!({name}(&[{a}, {b}]), {c});\n    }}\n}}"
    return [user(f"Write a {NAMES[lang]} test for {name} from {f['x']}: for {a} and {b} it gives {c}."),
            answer(fence(lang, code), f"The test calls {name} with {a} and {b} and expects {c}.")], "code"


KINDS = {"name": ("str", "String"), "title": ("str", "String"), "id": ("int", "u64"), "count": ("int", "usize"),
         "price": ("float", "f64"), "active": ("bool", "bool"), "tags": ("list[str]", "Vec<String>"), "email": ("str", "String"),
         "age": ("int", "u32"), "score": ("float", "f64"), "path": ("str", "String"), "size": ("int", "usize")}


def record(w):
    name = "".join(x.capitalize() for x in w.own(lambda: w.choice(("", w.adjective() + "_")) + w.noun()).split("_"))
    keys = w.sample(list(KINDS), w.randint(2, 5))
    if w.chance(0.4):
        keys[0] = w.invented()
    lang = w.choice((PY, RS))
    kind = lambda k: KINDS.get(k, ("str", "String"))
    if lang == PY:
        code = f"from dataclasses import dataclass\n\n\n@dataclass\nclass {name}:\n" + "\n".join(f"    {k}: {kind(k)[0]}" for k in keys)
        if w.chance(0.4):
            code += f"\n\n    def describe(self) -> str:\n        return f\"{name}({', '.join(f'{k}={{self.{k}}}' for k in keys)})\""
            extra = " Add a method describe."
        else:
            extra = ""
    else:
        code = f"#[derive(Debug, Clone)]\npub struct {name} {{\n" + "\n".join(f"    pub {k}: {kind(k)[1]}," for k in keys) + "\n}"
        if w.chance(0.4):
            args = ", ".join(f"{k}: {kind(k)[1]}" for k in keys)
            code += f"\n\nimpl {name} {{\n    pub fn new({args}) -> Self {{\n        Self {{ {', '.join(keys)} }}\n    }}\n}}"
            extra = " Add a constructor."
        else:
            extra = ""
    thing = "dataclass" if lang == PY else "struct"
    return [user(f"Write a {NAMES[lang]} {thing} {name} with the fields {', '.join(keys)}.{extra}"),
            answer(fence(lang, code), f"{name} is a {thing} with {len(keys)} fields: {', '.join(keys)}.")], "code"


def sql(w):
    table, cols = w.noun() + "s", [w.noun() for _ in range(w.randint(1, 3))]
    n, x = w.integer(1, 500), w.noun()
    kind = w.randint(0, 3)
    if kind == 0:
        q, code = f"Select {', '.join(cols)} from {table} where {x} is greater than {n}.", f"SELECT {', '.join(cols)}\nFROM {table}\nWHERE {x} > {n};"
    elif kind == 1:
        q, code = f"Count the rows of {table} for each {x}.", f"SELECT {x}, COUNT(*)\nFROM {table}\nGROUP BY {x}\nORDER BY COUNT(*) DESC;"
    elif kind == 2:
        q, code = f"Delete the rows of {table} where {x} is {n}.", f"DELETE FROM {table}\nWHERE {x} = {n};"
    else:
        q = f"Create a table {table} with the columns {', '.join(cols)}."
        code = f"CREATE TABLE {table} (\n    id INTEGER PRIMARY KEY,\n" + ",\n".join(f"    {c} TEXT" for c in cols) + "\n);"
    return [user(f"SQL: {q}" if w.chance(0.5) else f"Write an SQL statement. {q}"), answer(fence(SQL, code), f"The statement works on {table} with {', '.join((cols + [x], [x], [x], cols)[kind])}.")], "code"


def shell(w):
    p, n, x = w.path(), w.integer(2, 99), w.word()
    q, code = w.choice(((f"show the first {n} lines of {p}", f"head -n {n} {p}"), (f"count the lines of {p}", f"wc -l {p}"),
                        (f"search for {x} in {p}", f"grep \"{x}\" {p}"), (f"make a folder {x}", f"mkdir -p {x}"),
                        (f"copy {p} to {x}", f"cp {p} {x}"), (f"delete {p}", f"rm {p}"),
                        (f"list all files that end in .{x}", f"find . -name \"*.{x}\""), (f"show how large {p} is", f"du -h {p}")))
    return [user(w.choice(("How do I {} in the shell?", "Which command do I use to {}?", "Shell command to {}.")).format(q)),
            answer(f"{fence(SH, code)}\n\nThis will {q}.", f"The user wants to {q}. The command is {code.split()[0]}.")], "code"


def rename(w):
    task, f = spec(w)
    lang, new = w.choice((2, 3, 4)), w.snake()
    return [user(f"Rename {f['f']} to {new}:\n\n{fence({2: PY, 3: RS, 4: JS}[lang], task[lang].format(**f))}"),
            answer(fence({2: PY, 3: RS, 4: JS}[lang], task[lang].format(**{**f, 'f': new})), f"I replace {f['f']} by {new} and keep the rest.")], "code"


def class_with_methods(w):
    name = w.noun().capitalize()
    x = w.own(lambda: w.choice(("items", "entries", w.noun() + "s")))
    v = "value" if name.lower() in RESERVED else name.lower()
    methods = w.sample(("add", "remove", "count", "clear", "first"), w.randint(2, 4))
    body = {"add": f"    def add(self, {v}):\n        self.{x}.append({v})", "remove": f"    def remove(self, {v}):\n        self.{x}.remove({v})",
            "count": f"    def count(self):\n        return len(self.{x})", "clear": f"    def clear(self):\n        self.{x} = []",
            "first": f"    def first(self):\n        return self.{x}[0] if self.{x} else None"}
    code = f"class {name}:\n    def __init__(self):\n        self.{x} = []\n\n" + "\n\n".join(body[m] for m in methods)
    return [user(f"Write a Python class {name} that keeps a list {x} and has the methods {', '.join(methods)}."),
            answer(f"Here is the class `{name}`:\n\n{fence(PY, code)}\n\nIt keeps its data in `{x}` and has {len(methods)} methods: {', '.join(f'`{m}`' for m in methods)}.",
                   f"The class {name} has the list {x} and the methods {', '.join(methods)}.")], "code"


MAKERS = ((function, 10), (explain_code, 4), (translate, 3), (test_for, 3), (record, 5), (sql, 4), (shell, 3), (rename, 2),
          (class_with_methods, 4))
