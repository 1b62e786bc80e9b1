"""Scores a served model on the tasks of `tasks.py` through /v1/chat/completions.

Greedy, one request per task, a few at a time. Prints a table and writes every verdict.
Usage: python score.py http://127.0.0.1:8000/v1 TASKS.jsonl OUT.json [--parallel 2] [--max-tokens 320]
[--kinds tool,json]
"""

import argparse
import concurrent.futures
import json
import time
import urllib.request

import judge


def ask(base, task, max_tokens, timeout):
    """The judged fields of one answer: (reasoning or None, content, [(name, arguments)], finish reason)."""
    messages = []
    for i, m in enumerate(task["messages"]):
        m = dict(m)
        if m.get("tool_calls"):
            m["tool_calls"] = [
                {
                    "id": f"call_{i}_{j}",
                    "type": "function",
                    "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])},
                }
                for j, c in enumerate(m["tool_calls"])
            ]
        elif "tool_calls" in m:
            del m["tool_calls"]
        if m["role"] == "tool":
            m.setdefault("tool_call_id", f"call_{i - 1}_0")
        messages.append(m)
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "chat_template_kwargs": {"enable_thinking": task["think"]},
    }
    if task["tools"]:
        body["tools"] = task["tools"]
    request = urllib.request.Request(
        base.rstrip("/") + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        choice = json.load(answer)["choices"][0]
    message = choice["message"]
    content, calls = message.get("content") or "", []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        calls.append(
            (call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
        )
    # A block that never closed leaves everything in the reasoning.
    reasoning = (message.get("reasoning_content") or "") if content or calls or not task["think"] else None
    return reasoning, content, calls, choice["finish_reason"]


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("base")
    args.add_argument("tasks")
    args.add_argument("out")
    args.add_argument("--parallel", type=int, default=2)
    args.add_argument("--max-tokens", type=int, default=320)
    args.add_argument("--timeout", type=float, default=600)
    args.add_argument("--kinds")
    args.add_argument("--every", type=int, default=1, help="take each n-th task of a kind")
    args = args.parse_args()
    with open(args.tasks, encoding="utf-8") as file:
        todo = [json.loads(line) for line in file]
    if args.kinds:
        todo = [t for t in todo if t["kind"] in args.kinds.split(",")]
    todo = [
        t for t in todo if int(t["id"].rsplit("-", 1)[1]) // 2 % args.every == 0
    ]  # pairs: thinking and not
    start = time.time()
    verdicts, wrong = [], []

    def one(task):
        reasoning, content, calls, finish = ask(args.base, task, args.max_tokens, args.timeout)
        verdict = judge.judge(task, reply=content, calls=calls, reasoning=reasoning)
        return task, verdict, {"reasoning": reasoning, "content": content, "calls": calls, "finish": finish}

    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        for task, verdict, got in pool.map(one, todo):
            verdicts.append((task, verdict))
            if len(verdicts) % 5 == 0:
                print(
                    f"{len(verdicts)} of {len(todo)}, {sum(v['right'] for _, v in verdicts)} right, {time.time() - start:.0f} s",
                    flush=True,
                )
            if not verdict["right"]:
                wrong.append(
                    {
                        "id": task["id"],
                        "asked": task["messages"][-1]["content"][-300:],
                        "expect": task["expect"],
                        "got": got,
                    }
                )
    table = judge.table(verdicts)
    for kind, row in table.items():
        print(f"{kind:24s}", json.dumps(row))
    print(f"{len(todo)} tasks, {time.time() - start:.0f} s")
    with open(args.out, "w") as file:
        json.dump({"table": table, "wrong": wrong}, file, indent=1)


if __name__ == "__main__":
    main()
