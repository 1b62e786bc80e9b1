"""Scores a served model on the tasks of `tasks.py` through /v1/chat/completions.

Sends one greedy request per task, a few in parallel. Prints a table; OUT.json has the table and every wrong
reply. Usage: python score.py http://127.0.0.1:8000/v1 TASKS.jsonl OUT.json [--parallel 2] [--max-tokens 320]
[--kinds tool,json]
"""

import argparse
import concurrent.futures
import json
import time
import urllib.request

import grading


def complete(base, task, max_tokens, timeout):
    """Sends a task; returns (reasoning or None, content, [(name, arguments)], finish reason)."""
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
    with urllib.request.urlopen(request, timeout=timeout) as response:
        choice = json.load(response)["choices"][0]
    message = choice["message"]
    content, calls = message.get("content") or "", []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        calls.append(
            (call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
        )
    # If the reasoning block never closed, the whole reply is reasoning.
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
    args.add_argument("--kinds", help="only these kinds of tasks, separated by commas")
    args.add_argument("--every", type=int, default=1, help="only every n-th task of a kind")
    args = args.parse_args()
    with open(args.tasks, encoding="utf-8") as file:
        todo = [json.loads(line) for line in file]
    if args.kinds:
        todo = [t for t in todo if t["kind"] in args.kinds.split(",")]
    # Consecutive tasks are pairs, one with thinking and one without.
    todo = [t for t in todo if int(t["id"].rsplit("-", 1)[1]) // 2 % args.every == 0]
    start = time.time()
    grades, wrong = [], []

    def run(task):
        reasoning, content, calls, finish = complete(args.base, task, args.max_tokens, args.timeout)
        grade = grading.grade(task, reply=content, calls=calls, reasoning=reasoning)
        return task, grade, {"reasoning": reasoning, "content": content, "calls": calls, "finish": finish}

    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        for task, grade, got in pool.map(run, todo):
            grades.append((task, grade))
            if len(grades) % 5 == 0:
                right = sum(each["right"] for _, each in grades)
                seconds = time.time() - start
                print(f"{len(grades)} of {len(todo)}, {right} right, {seconds:.0f} s", flush=True)
            if not grade["right"]:
                wrong.append(
                    {
                        "id": task["id"],
                        "asked": task["messages"][-1]["content"][-300:],
                        "expect": task["expect"],
                        "got": got,
                    }
                )
    table = grading.table(grades)
    for kind, row in table.items():
        print(f"{kind:24s}", json.dumps(row))
    print(f"{len(todo)} tasks, {time.time() - start:.0f} s")
    with open(args.out, "w") as file:
        json.dump({"table": table, "wrong": wrong}, file, indent=1)


if __name__ == "__main__":
    main()
