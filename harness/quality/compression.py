"""Compares full prefill with compressed prompts over a running server's HTTP API.

    hearth serve --port 8001 --prefill-compression always --prefill-keep-ratio 0.1 &
    python compression.py OUT.jsonl 0.1=http://127.0.0.1:8001 [0.05=URL ...] [--lengths 4096,8192] [--seeds 2]

Every task of `compression_tasks.py` goes once in full to the first server, and once to each server as its keep
ratio compresses it. OUT.jsonl gets a line per answer; finished ones are skipped when it is run again. OUT.md and
OUT.svg get the table and the plot, also with --report, which asks nobody.
"""

import argparse
import json
import os
import time
import urllib.request

import compression_report
import compression_tasks
import grading
from words import load_common

MAX_TOKENS = 96


def post(url, path, body, timeout=900):
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)


def ask(url, task, mode):
    """(the reply's message, timings, text of the prompt that was prefilled)."""
    body = {
        "messages": task["messages"],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "chat_template_kwargs": {"enable_thinking": False},
        "prefill_compression": mode,
        "cache_prompt": False,
        "return_token_ids": True,
    }
    if task["tools"]:
        body["tools"] = task["tools"]
    reply = post(url, "/v1/chat/completions", body)
    prompt = post(url, "/detokenize", {"tokens": reply["prompt_token_ids"]})["content"]
    return reply["choices"][0]["message"], reply["timings"], prompt


def is_right(task, message):
    if task["calls"] is None:
        said = message.get("content") or ""
        return all(value in said for value in task["value"])
    calls = [call["function"] for call in message.get("tool_calls") or []]
    try:
        calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
    except ValueError:
        return False
    return grading.calls_match(calls, task["calls"])


def measure(url, task, mode, keep):
    """The line of one answer."""
    begun = time.time()
    message, timings, prompt = ask(url, task, mode)
    has_all = all(statement in prompt for statement in task["needed"])
    return {
        **{key: task[key] for key in ("id", "kind", "filler", "length", "depth", "seed")},
        "keep": keep,
        "right": is_right(task, message),
        "has_needed": has_all,
        "tokens": timings.get("compressed_from_tokens"),
        "prefilled": timings.get("compressed_tokens"),
        "reason": timings.get("compression_reason"),
        "scoring_ms": timings.get("compression_ms"),
        "seconds": round(time.time() - begun, 2),
        "question": task["messages"][-1]["content"][-160:],
        "needed": task["needed"],
        "value": task["value"] or task["calls"],
        "reply": message.get("content") or message.get("tool_calls"),
    }


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("out")
    args.add_argument("servers", nargs="*", metavar="KEEP=URL")
    args.add_argument("--lengths", default="4096,8192,16000")
    args.add_argument("--seeds", type=int, default=4)
    args.add_argument("--kinds", default=",".join(compression_tasks.KINDS))
    args.add_argument("--words", help="words.json of the recipe; without it, invented words replace common ones")
    args.add_argument("--seconds", type=float, default=float("inf"), help="begin no task after this time")
    args.add_argument("--report", action="store_true", help="only write the table and the plot")
    args = args.parse_args()
    if args.words:
        load_common(args.words)
    servers = [(float(keep), url) for keep, url in (s.split("=", 1) for s in args.servers)]
    if not args.report:
        if not servers:
            raise SystemExit("name at least one server as KEEP=URL")
        run(args, servers)
    with open(args.out, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    stem = os.path.splitext(args.out)[0]
    table = compression_report.table(rows)
    print(table)
    for path, text in ((stem + ".md", table + "\n"), (stem + ".svg", compression_report.plot(rows))):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def run(args, servers):
    done = set()
    if os.path.exists(args.out):
        with open(args.out, encoding="utf-8") as file:
            done = {(row["id"], row["keep"]) for row in map(json.loads, file)}
    first, begun = servers[0][1], time.time()
    lengths, kinds = [int(n) for n in args.lengths.split(",")], args.kinds.split(",")

    def count(text):
        return len(post(first, "/tokenize", {"content": text})["tokens"])

    with open(args.out, "a", encoding="utf-8") as out:
        for at in compression_tasks.plan(lengths, args.seeds, kinds):
            if time.time() - begun > args.seconds:
                break
            task = compression_tasks.make(*at, count)
            for keep, url, mode in [(1.0, first, "off")] + [(k, u, "always") for k, u in servers]:
                if (task["id"], keep) not in done:
                    row = measure(url, task, mode, keep)
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
                    out.flush()


if __name__ == "__main__":
    main()
