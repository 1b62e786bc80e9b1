"""Checks that what the tasks ask for was never trained: tool names, argument values and operand pairs.

Draws fresh training conversations by the tens of thousands and compares them with all tasks. Words of closed
sets (booleans and the values a schema lists) are the same on both sides by nature and are left out. Usage:
python disjoint.py TASKS.jsonl WORDS.json [--conversations 40000]; exits 1 when something overlaps.
"""

import argparse
import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "models", "ember", "train"))

import gen
import gen_tools
from words import World, is_held_out, load_common

CLOSED = {str(x) for values in gen_tools.UNITS for x in values} | {"True", "False"}
PAIR = re.compile(r"\b(\d{2}) ?(?:\+|plus|and) ?(\d{2})\b")


def leaves(value):
    if isinstance(value, dict):
        for k, v in value.items():
            yield str(k)
            yield from leaves(v)
    elif isinstance(value, list):
        for v in value:
            yield from leaves(v)
    else:
        yield str(value)


def calls_of(messages):
    for m in messages:
        for call in m.get("tool_calls") or []:
            yield call.get("function", call)


def facts(messages, tools, calls):
    """(tool names, argument values, operand pairs) of one conversation."""
    names = {t["function"]["name"] for t in tools or []} | {c["name"] for c in calls}
    values = {x for c in calls for v in c["arguments"].values() for x in leaves(v)} - CLOSED
    return names, values


def pairs(text):
    return {tuple(sorted(map(int, p))) for p in PAIR.findall(text)}


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("tasks")
    args.add_argument("words")
    args.add_argument("--conversations", type=int, default=40_000)
    args = args.parse_args()
    load_common(args.words)
    asked_names, asked_values, asked_pairs = set(), set(), set()
    with open(args.tasks, encoding="utf-8") as file:
        for task in map(json.loads, file):
            names, values = facts([], task["tools"], task["expect"].get("calls", []))
            asked_names |= names
            asked_values |= values
            if task["kind"] == "sum":
                asked_pairs |= pairs(task["messages"][-1]["content"])
    wrong_split = [x for x in asked_names | asked_values if not is_held_out(x)]
    seen_names, seen_values, seen_pairs = set(), set(), set()
    mix = {"chat": 30, "tools": 50, "copy": 20}
    for i in range(args.conversations):
        sample = gen.conversation(World(f"disjoint/{i}"), mix=mix)
        names, values = facts([], sample["tools"], list(calls_of(sample["messages"])))
        seen_names |= names
        seen_values |= values
        for m in sample["messages"]:
            if sample["kind"] in ("sum", "sums"):
                seen_pairs |= pairs(m["content"])
    overlaps = {
        "tool names": asked_names & seen_names,
        "argument values": asked_values & seen_values,
        "operand pairs": asked_pairs & seen_pairs,
        "not of the held-out split": set(wrong_split),
    }
    print(
        f"asked: {len(asked_names)} names, {len(asked_values)} values, {len(asked_pairs)} pairs; "
        f"trained on: {len(seen_names)} names, {len(seen_values)} values, {len(seen_pairs)} pairs"
    )
    for what, common in overlaps.items():
        print(f"{what}: {len(common)} in common {sorted(map(str, common))[:10] if common else ''}")
    sys.exit(any(overlaps.values()))


if __name__ == "__main__":
    main()
