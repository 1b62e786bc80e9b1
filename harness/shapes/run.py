#!/usr/bin/env python3
"""Requests replies in JSON schemas from a running server and validates each with an independent validator.

    python3 harness/shapes/run.py http://127.0.0.1:8000 [--random 60] [--seeds 2] [--max-tokens 600]
        [--seconds 3600]

First sends forced tool calls whose parameters are the object schemas of `corpus.py`. Then sends chat
requests for each schema of `corpus.py` and for random schemas. Each has one greedy and `--seeds` sampled
replies, each with and without a draft; both replies must be equal. Every finished reply must be valid, and
no request may fail. Replies that end at the length limit are counted separately. Needs `pip install
jsonschema`. Exits 1 if a reply is wrong, or if too many replies end at the length limit.
"""

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request

from jsonschema import Draft202012Validator

from corpus import SCHEMAS


def complete(url, body):
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def random_schema(rng, depth=0):
    """A random schema of supported keywords, small enough for a reply within the length limit."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "tuple", "nullable"]
    kind = rng.choice(kinds)
    low = rng.randint(-50, 50)
    match kind:
        case "integer":
            return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 90)}
        case "number":
            return {"type": kind, "minimum": low, "exclusiveMaximum": low + rng.choice([0.5, 1, 10])}
        case "string":
            least = rng.randint(0, 4)
            return {"type": kind, "minLength": least, "maxLength": least + rng.randint(0, 12)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {
                "enum": rng.sample(
                    ["a", "b c", "ü", 0, -1, 2.5, True, None, [1], {"k": []}], rng.randint(1, 4)
                )
            }
        case "const":
            return {"const": rng.choice(["x\ny", 7, False, {"a": [None]}, "\u65e5\u672c"])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-c]{2,4}$", "^(foo|ba[rz])?$", "^\\d{2}:\\d{2}$", "^[^x]{1,3}$"]),
            }
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])}
        case "object":
            names = rng.sample(
                ["id", "name", "value", "tags", "on", "größe", "a b", "x-y"], rng.randint(0, 4)
            )
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        case "tuple":
            items = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            return {
                "type": "array",
                "prefixItems": items,
                "items": False,
                "minItems": len(items),
                "maxItems": len(items),
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case _:
            return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}


def report(case, seed, fault, schema, reply):
    print(f"{case}, seed {seed}: {fault}\n  {json.dumps(schema)[:300]}\n  {reply!r:.400}", flush=True)


def check_calls(url, counts, seeds):
    """Forces calls of tools whose parameters are the corpus's object schemas; validates the arguments."""
    for name, schema in SCHEMAS.items():
        if schema.get("type") != "object" or not schema.get("properties") or not name.isascii():
            continue
        validator = Draft202012Validator(schema)
        tool = {"name": name.replace("-", "_"), "description": name, "parameters": schema}
        for seed in range(seeds + 1):
            replies = []
            for speculative in (True, False):
                status, body = complete(
                    url,
                    {
                        "messages": [{"role": "user", "content": f"Use the tool {tool['name']}."}],
                        "tools": [{"type": "function", "function": tool}],
                        "tool_choice": "required"
                        if seed % 2
                        else {"type": "function", "function": {"name": tool["name"]}},
                        "parallel_tool_calls": False,
                        "max_tokens": 600,
                        "seed": seed,
                        "temperature": 0 if seed == 0 else 0.9,
                        "speculative": speculative,
                    },
                )
                if status == 200:
                    choice = body["choices"][0]
                    made = [call["function"] for call in choice["message"].get("tool_calls", [])]
                    replies.append((status, choice["finish_reason"], json.dumps(made)))
                else:
                    replies.append((status, None, str(body)))
            status, reason, made = replies[0]
            fault = None
            if replies[0] != replies[1]:
                fault = f"the reply with a draft differs from the one without: {replies}"
            elif status != 200:
                fault = made
            elif reason == "length":
                counts["length"] += 1
                continue
            else:
                made = json.loads(made)
                if len(made) != 1 or made[0]["name"] != tool["name"]:
                    fault = f"no call of the tool: {made}"
                else:
                    errors = validator.iter_errors(json.loads(made[0]["arguments"]))
                    fault = "; ".join(error.message for error in errors)
            counts["wrong" if fault else "valid"] += 1
            if fault:
                report(f"call of {name}", seed, fault, schema, replies[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--random", type=int, default=60, help="number of random schemas")
    parser.add_argument("--seeds", type=int, default=2, help="sampled replies per schema")
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument(
        "--seconds", type=float, default=3600, help="skip the remaining schemas after this time"
    )
    args = parser.parse_args()
    schemas = dict(SCHEMAS)
    for i in range(args.random):
        schemas[f"random-{i}"] = random_schema(random.Random(i))
    counts = {"valid": 0, "length": 0, "wrong": 0}
    started = time.time()
    check_calls(args.url, counts, args.seeds)
    print(f"forced calls: {counts}", flush=True)
    for name, schema in schemas.items():
        if time.time() - started > args.seconds:
            print(f"time limit reached before schema {name}")
            break
        validator = Draft202012Validator(schema)
        strict = {"name": "reply", "schema": schema, "strict": True}
        response_format = {"type": "json_schema", "json_schema": strict}
        for seed in range(args.seeds + 1):
            body = {
                "messages": [
                    {"role": "user", "content": f"Make up a {name.replace('-', ' ')} and give it as JSON."}
                ],
                "response_format": response_format,
                "max_tokens": args.max_tokens,
                "enable_thinking": seed == 2,
                "seed": seed,
                "temperature": 0 if seed == 0 else 0.9,
            }
            replies = []
            for speculative in (True, False):
                status, response = complete(args.url, body | {"speculative": speculative})
                if status != 200:
                    replies.append(f"{status}: {response}")
                    break
                choice = response["choices"][0]
                replies.append((choice["finish_reason"], choice["message"]["content"]))
            fault = None
            if len(set(replies)) != 1:
                fault = f"the reply with a draft differs from the one without: {replies}"
            elif isinstance(replies[0], str):
                fault = replies[0]
            elif replies[0][0] == "length":
                counts["length"] += 1
                continue
            else:
                try:
                    value = json.loads(replies[0][1])
                    fault = "; ".join(error.message for error in validator.iter_errors(value))
                except ValueError as error:
                    fault = str(error)
            counts["wrong" if fault else "valid"] += 1
            if fault:
                report(name, seed, fault, schema, replies[0])
    print(f"{len(schemas)} schemas, {counts}, {time.time() - started:.0f} s")
    sys.exit(1 if counts["wrong"] or counts["length"] * 5 > counts["valid"] else 0)


if __name__ == "__main__":
    main()
