"""Scores answers to the tasks of `tasks.py`. Text in, verdict out; knows no model and no server."""

import json
import re

CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.S)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.S)


def split_thinking(text, think):
    """(reasoning or None if it never closed, reply) of generated text; the prompt opened the block when
    `think`."""
    if not think:
        return "", text
    if "</think>" not in text:
        return None, ""
    reasoning, reply = text.split("</think>", 1)
    return reasoning.strip(), reply.strip()


def calls_in(reply):
    """[(name, {key: text})] of the calls written as named parameters."""
    return [(name.strip(), dict(PARAMETER.findall(body))) for name, body in CALL.findall(reply)]


def argument_text(value):
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def same_value(said, wanted):
    """Equal as text, or equal once both are read as JSON or as a boolean word."""
    if said == argument_text(wanted):
        return True
    if isinstance(wanted, bool):
        return said.strip().lower() == str(wanted).lower()
    try:
        return not isinstance(wanted, str) and json.loads(said) == wanted
    except ValueError:
        return False


def calls_match(said, wanted):
    """said [(name, {key: text or value})]; every call right, in order, nothing missing and nothing added."""
    wanted = [w.get("function", w) for w in wanted]
    if len(said) != len(wanted):
        return False
    for (name, args), want in zip(said, wanted):
        if name != want["name"] or set(args) != set(want["arguments"]):
            return False
        for key, value in want["arguments"].items():
            got = args[key]
            if not (got == value or (isinstance(got, str) and same_value(got, value))):
                return False
    return True


def json_in(reply):
    """The JSON value of a reply, with or without a code fence; raises ValueError."""
    body = re.sub(r"^```(?:json)?\s*\n(.*?)\n```$", r"\1", reply.strip(), flags=re.S)
    return json.loads(body)


def judge(task, text=None, reply=None, calls=None, reasoning=None):
    """Verdict {"closed", "right", ...} from generated `text`, or from the fields an API returned."""
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


def table(verdicts):
    """{kind: {measure: share, "n": count}} over (task, verdict) pairs, split by thinking too."""
    groups = {}
    for task, verdict in verdicts:
        for key in (task["kind"], f"{task['kind']}/{'think' if task['think'] else 'direct'}"):
            groups.setdefault(key, []).append(verdict)
        if task["think"]:
            groups.setdefault("closed think blocks", []).append({"right": verdict["closed"]})
    return {
        key: {"n": len(vs), **{m: round(sum(v[m] for v in vs) / len(vs), 4) for m in vs[0]}}
        for key, vs in sorted(groups.items())
    }
