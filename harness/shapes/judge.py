#!/usr/bin/env python3
"""Asks a running server for replies in JSON schemas and has every reply judged by an independent validator.

    python3 harness/shapes/judge.py http://127.0.0.1:8000 [--random 60] [--seeds 2] [--max-tokens 600]
    [--seconds 3600]

For each schema of `corpus.py`, and for random ones, a greedy and some sampled replies, with and without
drafting (which must say the same), in the chat dialect; every reply that ended must be valid, and none may
fail. Before that, forced calls of tools whose parameters are the corpus's objects, with the same demands on
their arguments. Replies that ran into the length are counted apart: their text must still be the beginning of
some JSON. Needs the package `jsonschema` (`pip install jsonschema`). Ends with 0 if everything held.
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


def ask(url, body):
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def random_schema(dice, depth=0):
    """A schema of keywords that are kept, not too large to be filled within the length."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "tuple", "nullable"]
    kind = dice.choice(kinds)
    low = dice.randint(-50, 50)
    match kind:
        case "integer":
            return {"type": kind, "minimum": low, "maximum": low + dice.randint(0, 90)}
        case "number":
            return {"type": kind, "minimum": low, "exclusiveMaximum": low + dice.choice([0.5, 1, 10])}
        case "string":
            least = dice.randint(0, 4)
            return {"type": kind, "minLength": least, "maxLength": least + dice.randint(0, 12)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {
                "enum": dice.sample(
                    ["a", "b c", "ü", 0, -1, 2.5, True, None, [1], {"k": []}], dice.randint(1, 4)
                )
            }
        case "const":
            return {"const": dice.choice(["x\ny", 7, False, {"a": [None]}, "\u65e5\u672c"])}
        case "pattern":
            return {
                "type": "string",
                "pattern": dice.choice(["^[a-c]{2,4}$", "^(foo|ba[rz])?$", "^\\d{2}:\\d{2}$", "^[^x]{1,3}$"]),
            }
        case "format":
            return {"type": "string", "format": dice.choice(["date", "time", "uuid", "ipv4"])}
        case "object":
            names = dice.sample(
                ["id", "name", "value", "tags", "on", "größe", "a b", "x-y"], dice.randint(0, 4)
            )
            return {
                "type": "object",
                "properties": {name: random_schema(dice, depth + 1) for name in names},
                "required": [name for name in names if dice.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            least = dice.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(dice, depth + 1),
                "minItems": least,
                "maxItems": least + dice.randint(0, 2),
            }
        case "tuple":
            items = [random_schema(dice, depth + 1) for _ in range(dice.randint(1, 3))]
            return {
                "type": "array",
                "prefixItems": items,
                "items": False,
                "minItems": len(items),
                "maxItems": len(items),
            }
        case "anyOf":
            return {"anyOf": [random_schema(dice, depth + 1) for _ in range(dice.randint(1, 3))]}
        case _:
            return {"anyOf": [random_schema(dice, depth + 1), {"type": "null"}]}


def calls(url, counts, seeds):
    """Forced calls of tools whose parameters are the corpus's objects; their arguments must be valid."""
    for name, schema in SCHEMAS.items():
        if schema.get("type") != "object" or not schema.get("properties") or not name.isascii():
            continue
        validator = Draft202012Validator(schema)
        tool = {"name": name.replace("-", "_"), "description": name, "parameters": schema}
        for seed in range(seeds + 1):
            said = []
            for speculative in (True, False):
                status, answer = ask(
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
                choice = answer["choices"][0] if status == 200 else None
                made = [c["function"] for c in choice["message"].get("tool_calls", [])] if choice else []
                said.append(
                    (status, choice and choice["finish_reason"], json.dumps(made) if choice else str(answer))
                )
            status, reason, made = said[0]
            fault = None
            if said[0] != said[1]:
                fault = f"drafting shows: {said}"
            elif status != 200:
                fault = made
            elif reason == "length":
                counts["length"] += 1
                continue
            else:
                made = json.loads(made)
                if len(made) != 1 or made[0]["name"] != tool["name"]:
                    fault = f"no call of it: {made}"
                else:
                    errors = validator.iter_errors(json.loads(made[0]["arguments"]))
                    fault = "; ".join(error.message for error in errors)
            counts["wrong" if fault else "valid"] += 1
            if fault:
                print(
                    f"call of {name}, seed {seed}: {fault}\n  {json.dumps(schema)[:300]}\n  {said[0]!r:.400}",
                    flush=True,
                )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--random", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=3600, help="leave out what is not reached by then")
    args = parser.parse_args()
    schemas = dict(SCHEMAS)
    for i in range(args.random):
        schemas[f"random-{i}"] = random_schema(random.Random(i))
    counts = {"valid": 0, "length": 0, "wrong": 0}
    began = time.time()
    calls(args.url, counts, args.seeds)
    print(f"forced calls: {counts}", flush=True)
    for name, schema in schemas.items():
        if time.time() - began > args.seconds:
            print(f"time is up before {name}")
            break
        validator = Draft202012Validator(schema)
        wanted = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": True}}
        for seed in range(args.seeds + 1):
            body = {
                "messages": [
                    {"role": "user", "content": f"Make up a {name.replace('-', ' ')} and give it as JSON."}
                ],
                "response_format": wanted,
                "max_tokens": args.max_tokens,
                "enable_thinking": seed == 2,
                "seed": seed,
                "temperature": 0 if seed == 0 else 0.9,
            }
            said = []
            for speculative in (True, False):
                status, answer = ask(args.url, body | {"speculative": speculative})
                if status != 200:
                    said.append(f"{status}: {answer}")
                    break
                choice = answer["choices"][0]
                said.append((choice["finish_reason"], choice["message"]["content"]))
            fault = None
            if len(set(said)) != 1:
                fault = f"drafting shows: {said}"
            elif isinstance(said[0], str):
                fault = said[0]
            elif said[0][0] == "length":
                counts["length"] += 1
                continue
            else:
                try:
                    value = json.loads(said[0][1])
                    fault = "; ".join(error.message for error in validator.iter_errors(value))
                except ValueError as error:
                    fault = str(error)
            counts["wrong" if fault else "valid"] += 1
            if fault:
                print(
                    f"{name}, seed {seed}: {fault}\n  {json.dumps(schema)[:300]}\n  {said[0]!r:.400}",
                    flush=True,
                )
    print(f"{len(schemas)} schemas, {counts}, {time.time() - began:.0f} s")
    sys.exit(1 if counts["wrong"] or counts["length"] * 5 > counts["valid"] else 0)


if __name__ == "__main__":
    main()
