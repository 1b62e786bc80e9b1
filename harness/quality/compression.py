"""Compares full prefill with compressed prompts over the HTTP API of servers.

    python compression.py OUT.jsonl --hearth hearth --device cuda [--keeps 0.1,0.05] [--lengths 4096,8192] [--seeds 8]
    python compression.py OUT.jsonl 0.1=http://127.0.0.1:8001 [0.05=URL ...]

With --hearth, it starts a server per keep ratio, and ends them: of the bundled model, or with --model of a GGUF
file, at the context that the model was trained for. Every task of
`compression_tasks.py` goes once in full to the first server, and once to each server as its keep ratio compresses
it. OUT.jsonl gets a line per answer; finished ones are skipped when it is run again. OUT.md and OUT.svg get the
table and the plot, also with --report, which sends no request.
"""

import argparse
import concurrent.futures
import json
import os
import threading
import time
import urllib.error
import urllib.request

import compression_report
import compression_servers
import compression_tasks
import grading
from words import load_common

MAX_TOKENS = 96


def post(url, path, body, timeout=900):
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        refused = error.read(2000).decode("utf-8", "replace")
        raise SystemExit(f"{url}{path} answered {error.code}: {refused}") from None


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
    args.add_argument("--hearth", help="start servers with this executable instead")
    args.add_argument("--model", help="GGUF file that they serve [default: the bundled model]")
    args.add_argument("--scorer", help="GGUF file that scores their prompts [default: the model itself]")
    args.add_argument("--device", default="auto", help="their device")
    args.add_argument("--keeps", default="0.1,0.05", help="their keep ratios")
    args.add_argument("--lengths", default="4096,8192,16000")
    args.add_argument("--seeds", type=int, default=4)
    args.add_argument("--kinds", default=",".join(compression_tasks.KINDS))
    args.add_argument("--parallel", type=int, default=1, help="tasks at a time")
    args.add_argument("--words", help="words.json of the recipe; without it, invented words replace common ones")
    args.add_argument("--seconds", type=float, default=float("inf"), help="begin no task after this time")
    args.add_argument("--report", action="store_true", help="only write the table and the plot")
    args = args.parse_args()
    if args.words:
        load_common(args.words)
    args.lengths, args.kinds = [int(n) for n in args.lengths.split(",")], args.kinds.split(",")
    begun = time.time()
    if args.hearth and not args.report:
        keeps = [float(keep) for keep in args.keeps.split(",")]
        folder = os.path.dirname(os.path.abspath(args.out))
        models = (args.hearth, args.model, args.scorer)
        started = (*models, keeps, args.device, max(args.lengths), args.parallel, folder)
        with compression_servers.serving(*started) as servers:
            print(f"{len(servers)} servers ready after {time.time() - begun:.0f} s", flush=True)
            run(args, servers, begun)
    elif not args.report:
        servers = [(float(keep), url) for keep, url in (s.split("=", 1) for s in args.servers)]
        if not servers:
            raise SystemExit("name --hearth, or at least one server as KEEP=URL")
        run(args, servers, begun)
    with open(args.out, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    stem = os.path.splitext(args.out)[0]
    table = compression_report.table(rows) + "\n\n" + compression_report.losses(rows)
    print(table)
    print(f"{len(rows)} answers, {time.time() - begun:.0f} s")
    for path, text in ((stem + ".md", table + "\n"), (stem + ".svg", compression_report.plot(rows))):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def run(args, servers, begun):
    """Appends the answers of all tasks that the file lacks."""
    done = set()
    if os.path.exists(args.out):
        with open(args.out, encoding="utf-8") as file:
            done = {(row["id"], row["keep"]) for row in map(json.loads, file)}
    first, lock = servers[0][1], threading.Lock()
    modes = [(1.0, first, "off")] + [(keep, url, "always") for keep, url in servers]

    def count(text):
        return len(post(first, "/tokenize", {"content": text})["tokens"])

    def answer(at):
        if time.time() - begun > args.seconds:
            return
        task = compression_tasks.make(*at, count)
        for keep, url, mode in modes:
            if (task["id"], keep) not in done:
                line = json.dumps(measure(url, task, mode, keep), ensure_ascii=False)
                with lock:
                    out.write(line + "\n")
                    out.flush()

    tasks = compression_tasks.plan(args.lengths, args.seeds, args.kinds)
    with open(args.out, "a", encoding="utf-8") as out:
        with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
            for _ in pool.map(answer, tasks):
                pass


if __name__ == "__main__":
    main()
