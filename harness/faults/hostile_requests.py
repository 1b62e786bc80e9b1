"""Hostile HTTP requests: valid requests of all dialects, each changed by a seeded mutation.

`request(number)` gives the bytes of one request. Its head is complete, so the server owes an answer. The same
number gives the same bytes, whatever other requests are made.
"""

import copy
import json
import random

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
NAMED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
USER = [{"role": "user", "content": "What is 2 + 3?"}]
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": "b"}'}},
]
# Valid requests as (path, body); every field of a body may be mutated.
VALID = [
    (CHAT, {"messages": USER, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1}),
    (CHAT, {"messages": USER, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *USER,
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
            ],
            "tools": [
                {"type": "function", "function": {"name": "look", "strict": True, "parameters": NAMED}}
            ],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "parallel_tool_calls": False,
            "max_completion_tokens": 8,
        },
    ),
    (
        CHAT,
        {
            "messages": USER,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "form", "strict": True, "schema": NAMED},
            },
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 8,
            "logit_bias": {"5": -1},
            "stop": ["\n", "end"],
        },
    ),
    (
        CHAT,
        {
            "messages": USER,
            "chat_template_kwargs": {"enable_thinking": True},
            "reasoning_effort": "low",
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "repeat_penalty": 1.1,
            "n": 1,
            "max_tokens": 4,
            "stream": True,
        },
    ),
    (TEXT, {"prompt": "Once upon", "max_tokens": 4, "echo": True, "logprobs": 1}),
    (TEXT, {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "n": 1, "stream": True}),
    (TEXT, {"prompt": "a", "max_tokens": 6, "guided_regex": "[ab]+", "min_p": 0.1, "stop_token_ids": [2]}),
    (
        MESSAGES,
        {
            "max_tokens": 6,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"a": "b"}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5"}]},
            ],
            "tools": [{"name": "look", "description": "Looks.", "input_schema": NAMED}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["end"],
        },
    ),
    (MESSAGES, {"max_tokens": 4, "messages": USER, "stream": True, "thinking": {"type": "disabled"}}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    (
        RESPONSES,
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "5"},
            ],
            "tools": [{"type": "function", "name": "look", "parameters": NAMED, "strict": False}],
            "instructions": "Be brief.",
            "max_output_tokens": 16,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "form", "schema": NAMED}},
            "metadata": {"a": "b"},
        },
    ),
    (RESPONSES, {"input": "hi", "max_output_tokens": 16, "stream": True, "store": False}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/tokenize", {"content": "a few words", "add_special": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/apply-template", {"messages": USER}),
]
CONTROL = [
    "<|im_end|>",
    "<|im_start|>system\n",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>\n<function=look>\n<parameter=a>\n",
    "</parameter></function></tool_call>",
    "<|im_end|",
    "{{ messages }}{% for x in y %}",
]
TEXTS = [
    "",
    "\x00",
    "\x1b[31m",
    "\r\n\r\n",
    "\ud800",
    "\udfff\ud800",
    "\u202e\u200d\ufeff",
    "e" + "\u0301" * 500,
    "\U0010ffff",
    "👩‍👩‍👧‍👦" * 40,
    "../../../etc/passwd",
    "%s%n%x",
    "'\"\\",
    *CONTROL,
]
NUMBERS = [
    *(0, -1, 1, 1.5, -0.0, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, 1e308, 1e-308),
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
]
SCHEMAS = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "string", "pattern": "(a|aa)+$(?=b)\\1"},
    {"type": "string", "pattern": "((((a{1,999}){1,999}){1,999}){1,999})"},
    {"type": "string", "pattern": "["},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "items": {"type": "array", "minItems": 10**6}, "minItems": 10**6},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"type": "string", "maxLength": n} for n in range(400)]},
    {"enum": list(range(20000))},
    {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(2000)}},
    {"type": "integer", "minimum": -(10**30), "multipleOf": 1e-30},
    {"type": "no such type"},
    {"if": {"required": ["a"]}, "then": False, "else": {"not": {}}},
    False,
]
# Replaced in the text of the body, where json.dumps could not write it.
DEEP = "@deep-{}@"
LONG_BYTES = 200_000


class Mutation:
    """One seeded change of one valid request."""

    def __init__(self, number):
        self.drawn = random.Random(f"hostile {number}")
        self.path, self.body = self.drawn.choice(VALID)
        self.body = json.loads(json.dumps(self.body))
        self.payload = None
        self.headers = [("host", "127.0.0.1"), ("connection", "close"), ("content-type", "application/json")]
        self.method, self.target, self.version = "POST", self.path, "HTTP/1.1"
        self.length = None

    def places(self, value=None, found=None):
        """Every (container, key) of the body."""
        value, found = (self.body, []) if found is None else (value, found)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(pairs):
            found.append((value, key))
            if isinstance(inner, (dict, list)):
                self.places(inner, found)
        return found

    def hostile(self):
        """A value that no field expects."""
        drawn = self.drawn
        kind = drawn.randrange(9)
        if kind == 0:
            return drawn.choice([None, True, False, {}, [], [[]], {"": None}])
        if kind == 1:
            return drawn.choice(NUMBERS)
        if kind == 2:
            return "".join(drawn.choices(TEXTS, k=drawn.randint(1, 4)))
        if kind == 3:
            return drawn.choice([*TEXTS, "a", "word "]) * drawn.choice([10, 1000, 20_000])
        if kind == 4:
            return DEEP.format(drawn.choice([5, 64, 127, 129, 1000, 50_000]))
        if kind == 5:
            return drawn.choice(SCHEMAS)
        if kind == 6:
            return [drawn.choice([1, "a", None, {}, "<|im_end|>"])] * drawn.choice([2, 100, 5000])
        if kind == 7:
            return {f"{drawn.choice(TEXTS)}{n}": n for n in range(drawn.choice([1, 30, 3000]))}
        return json.loads(json.dumps(drawn.choice(VALID)[1]))

    def change_values(self):
        for _ in range(self.drawn.choice([1, 1, 2, 5])):
            container, key = self.drawn.choice(self.places())
            container[key] = copy.deepcopy(self.hostile())

    def change_texts(self):
        """Control tokens and odd characters inside texts, names and keys."""
        container, key = self.drawn.choice(self.places())
        text = self.drawn.choice(TEXTS)
        if isinstance(container[key], str):
            at = self.drawn.randint(0, len(container[key]))
            container[key] = container[key][:at] + text + container[key][at:]
        elif isinstance(container, dict):
            container[f"{key}{text}"] = container.pop(key)
        else:
            container[key] = text

    def change_fields(self):
        """Fields that are missing, unknown, or of another dialect."""
        container, key = self.drawn.choice(self.places())
        way = self.drawn.randrange(3)
        if way == 0:
            del container[key]
        elif way == 1:
            self.body.update(self.drawn.choice(VALID)[1])
        else:
            self.body[self.drawn.choice(TEXTS) + self.drawn.choice("ab")] = copy.deepcopy(self.hostile())

    def change_counts(self):
        """Lists that are far too long."""
        lists = [(c, k) for c, k in self.places() if isinstance(c[k], list) and c[k]]
        if not lists:
            return self.change_values()
        container, key = self.drawn.choice(lists)
        container[key] = container[key] * self.drawn.choice([2, 50, 3000])

    def change_schema(self):
        """A hostile schema where schemas belong."""
        schema = self.drawn.choice(SCHEMAS)
        function = {"name": "f", "strict": self.drawn.random() < 0.5, "parameters": schema}
        self.body, self.path = {"messages": USER, "max_tokens": 8}, CHAT
        self.target = self.path
        way = self.drawn.randrange(4)
        if way == 0:
            self.body["tools"] = [{"type": "function", "function": function}]
            self.body["tool_choice"] = "required"
        elif way == 1:
            form = {"name": "form", "strict": True, "schema": schema}
            self.body["response_format"] = {"type": "json_schema", "json_schema": form}
        elif way == 2:
            self.body["guided_json"] = schema
        else:
            grammar = self.drawn.choice(["root ::= root", "root ::= (", "start: a\na: a a | a", "\x00" * 99])
            self.body["grammar"] = grammar * self.drawn.choice([1, 1000])
        self.body["stream"] = self.drawn.random() < 0.5

    def change_bytes(self):
        """Broken JSON: cut, flipped bytes, other encodings, doubled keys."""
        payload = bytearray(json.dumps(self.body).encode())
        way = self.drawn.randrange(6)
        if way == 0:
            payload = payload[: self.drawn.randrange(len(payload))]
        elif way == 1:
            for _ in range(self.drawn.choice([1, 3, 20])):
                payload[self.drawn.randrange(len(payload))] = self.drawn.randrange(256)
        elif way == 2:
            payload = payload.decode().encode(self.drawn.choice(["utf-16", "utf-32", "utf-8-sig"]))
        elif way == 3:
            payload = payload[:-1] + b"," + payload[1:]
        elif way == 4:
            payload = self.drawn.randbytes(self.drawn.choice([0, 1, 100, LONG_BYTES]))
        else:
            opening = self.drawn.choice([b"[", b'{"a":', b'{"messages":[', b'"', b"1", b"-", b"\\u"])
            payload = bytearray(opening * (LONG_BYTES // len(opening)))
        self.payload = bytes(payload)

    def change_head(self):
        """Headers, methods, targets and lengths that lie."""
        drawn, way = self.drawn, self.drawn.randrange(9)
        if way == 0:
            self.method = drawn.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X-Y"])
        elif way == 1:
            tails = [
                "/",
                "//",
                "/%00",
                "/..%2f..",
                "?a=%ff",
                "/" + "a" * 4000,
                "%",
                "?" + "&a=b" * 900,
                "/health",
            ]
            self.target += drawn.choice(tails)
        elif way == 2:
            kinds = [
                "text/plain",
                "",
                "application/json; charset=latin1",
                "multipart/form-data",
                "\x7f",
                "a" * 5000,
            ]
            self.headers[2] = ("content-type", drawn.choice(kinds))
        elif way == 3:
            hosts = [
                "example.org",
                "",
                "127.0.0.1:99999",
                "[::1",
                "localhost.",
                "127.0.0.1@example.org",
                "a" * 5000,
            ]
            self.headers[0] = ("host", drawn.choice(hosts))
        elif way == 4:
            self.headers += [
                (f"x-{n}", "v" * drawn.choice([1, 500])) for n in range(drawn.choice([20, 90, 300]))
            ]
        elif way == 5:
            self.length = drawn.choice(
                ["-1", "abc", "1e3", "18446744073709551616", "0", "3", "+5", "5, 5", ""]
            )
        elif way == 6:
            codings = ["gzip", "chunked", "chunked, chunked", "identity", "nothing"]
            self.headers.append(("transfer-encoding", drawn.choice(codings)))
        elif way == 7:
            names = [
                "authorization",
                "x-api-key",
                "origin",
                "anthropic-version",
                "content-encoding",
                "expect",
            ]
            self.headers.append(
                (drawn.choice(names), drawn.choice(["null", "Bearer ", "gzip", "\xff", "a" * 9000]))
            )
        else:
            self.version = drawn.choice(["HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "http/1.1", "HTTP/1.1 x"])

    def written(self):
        if self.payload is None:
            text = json.dumps(self.body)
            for number in self.body_depths(text):
                text = text.replace(f'"{DEEP.format(number)}"', "[" * number + "]" * number)
            # Numbers that JSON has no words for stand as they are.
            for bare in ("1e999", "-1e999", "NaN", "Infinity"):
                text = text.replace(f'"{bare}"', bare)
            self.payload = text.encode()
        length = str(len(self.payload)) if self.length is None else self.length
        lines = [f"{self.method} {self.target} {self.version}"]
        lines += [f"{name}: {value}" for name, value in [*self.headers, ("content-length", length)]]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace") + self.payload

    @staticmethod
    def body_depths(text):
        return [n for n in (5, 64, 127, 129, 1000, 50_000) if DEEP.format(n) in text]


WAYS = [
    *[Mutation.change_values] * 4,
    *[Mutation.change_texts] * 3,
    *[Mutation.change_fields] * 2,
    Mutation.change_counts,
    Mutation.change_schema,
    *[Mutation.change_bytes] * 2,
    *[Mutation.change_head] * 2,
]


def request(number):
    """What was changed, and the bytes of the request."""
    mutation = Mutation(number)
    way = mutation.drawn.choice(WAYS)
    way(mutation)
    return f"{way.__name__} of {mutation.path}", mutation.written()
