"""Grades replies to the tasks of `tasks.py`; independent of model and server."""

import json
import re

CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.S)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.S)


def split_thinking(text, think):
    """Splits generated text into (reasoning, reply); reasoning is None if its block was never closed.

    With `think`, the prompt has already opened the block.
    """
    if not think:
        return "", text
    if "</think>" not in text:
        return None, ""
    reasoning, reply = text.split("</think>", 1)
    return reasoning.strip(), reply.strip()


def calls_in(reply):
    """[(name, {key: text})] of the calls in a reply, in the named-parameter format."""
    return [(name.strip(), dict(PARAMETER.findall(body))) for name, body in CALL.findall(reply)]


def argument_text(value):
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def value_matches(text, expected):
    """Whether `text` equals a value as text, as JSON, or as a boolean word."""
    if text == argument_text(expected):
        return True
    if isinstance(expected, bool):
        return text.strip().lower() == str(expected).lower()
    try:
        return not isinstance(expected, str) and json.loads(text) == expected
    except ValueError:
        return False


def calls_match(calls, expected):
    """Whether `calls`, [(name, {key: text or value})], equal the expected calls in order."""
    expected = [call.get("function", call) for call in expected]
    if len(calls) != len(expected):
        return False
    for (name, args), call in zip(calls, expected):
        if name != call["name"] or set(args) != set(call["arguments"]):
            return False
        for key, value in call["arguments"].items():
            got = args[key]
            if not (got == value or (isinstance(got, str) and value_matches(got, value))):
                return False
    return True


def json_in(reply):
    """The JSON value of a reply, with or without a code fence; raises ValueError."""
    body = re.sub(r"^```(?:json)?\s*\n(.*?)\n```$", r"\1", reply.strip(), flags=re.S)
    return json.loads(body)


def grade(task, text=None, reply=None, calls=None, reasoning=None):
    """Grade {"closed", "right", ...} of generated `text`, or of the fields that an API returned."""
    if text is not None:
        reasoning, reply = split_thinking(text, task["think"])
        calls = calls_in(reply)
    out = {"closed": reasoning is not None}
    expect = task["expect"]
    if "calls" in expect:
        out["right"] = calls_match(calls or [], expect["calls"])
        out["name"] = [c[0] for c in calls or []] == [c.get("function", c)["name"] for c in expect["calls"]]
    elif "json" in expect:
        try:
            value = json_in(reply)
            out["well_formed"], out["right"] = True, value == expect["json"]
        except ValueError:
            out["well_formed"], out["right"] = False, False
    elif "number" in expect:
        numbers = re.findall(r"-?\d+", reply)
        out["right"] = bool(numbers) and int(numbers[-1]) == expect["number"]
    else:
        out["right"] = out["closed"]
    return out


def table(grades):
    """{kind: {measure: share, "n": count}} over (task, grade) pairs, also split by thinking."""
    groups = {}
    for task, grade in grades:
        for key in (task["kind"], f"{task['kind']}/{'think' if task['think'] else 'direct'}"):
            groups.setdefault(key, []).append(grade)
        if task["think"]:
            groups.setdefault("closed think blocks", []).append({"right": grade["closed"]})
    return {
        key: {"n": len(vs), **{m: round(sum(v[m] for v in vs) / len(vs), 4) for m in vs[0]}}
        for key, vs in sorted(groups.items())
    }
