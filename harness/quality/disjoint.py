"""Checks that tool names, argument values and operand pairs of the tasks never occur in training.

Draws tens of thousands of new training conversations and compares them with all tasks. Values of closed sets
(booleans and enumerations) occur on both sides by design and are ignored. Usage: python disjoint.py
TASKS.jsonl WORDS.json [--conversations 40000]; exits 1 if any value overlaps.
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


def facts(tools, calls):
    """(tool names, argument values) of one conversation."""
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
    task_names, task_values, task_pairs = set(), set(), set()
    with open(args.tasks, encoding="utf-8") as file:
        for task in map(json.loads, file):
            names, values = facts(task["tools"], task["expect"].get("calls", []))
            task_names |= names
            task_values |= values
            if task["kind"] == "sum":
                task_pairs |= pairs(task["messages"][-1]["content"])
    wrong_split = [x for x in task_names | task_values if not is_held_out(x)]
    trained_names, trained_values, trained_pairs = set(), set(), set()
    mix = {"chat": 30, "tools": 50, "copy": 20}
    for i in range(args.conversations):
        sample = gen.conversation(World(f"disjoint/{i}"), mix=mix)
        names, values = facts(sample["tools"], list(calls_of(sample["messages"])))
        trained_names |= names
        trained_values |= values
        for m in sample["messages"]:
            if sample["kind"] in ("sum", "sums"):
                trained_pairs |= pairs(m["content"])
    overlaps = {
        "tool names": task_names & trained_names,
        "argument values": task_values & trained_values,
        "operand pairs": task_pairs & trained_pairs,
        "task values outside the held-out split": set(wrong_split),
    }
    print(
        f"tasks: {len(task_names)} names, {len(task_values)} values, {len(task_pairs)} pairs; "
        f"training: {len(trained_names)} names, {len(trained_values)} values, {len(trained_pairs)} pairs"
    )
    for kind, common in overlaps.items():
        print(f"{kind}: {len(common)} in common {sorted(map(str, common))[:10] if common else ''}")
    sys.exit(any(overlaps.values()))


if __name__ == "__main__":
    main()
