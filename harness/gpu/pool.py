"""Requests that together exceed the page pool, compared with the same requests alone.

    pool.py PORT PROMPT:TOKENS[,PROMPT:TOKENS...] [--alone which,which]

Each pair is a greedy request with that many prompt and generated tokens; end tokens are ignored. All are sent
a tenth of a second apart; meanwhile `/metrics` is read for waiting and preempted requests. Then those listed
by `--alone` (counted from 0; all by default) are sent again one by one, and their texts are compared. Prints
one line per request and a final JSON line. Standard library only.
"""

import argparse
import json
import sys
import threading
import time
import urllib.request

arguments = argparse.ArgumentParser()
arguments.add_argument("port")
arguments.add_argument("requests")
arguments.add_argument("--alone")
args = arguments.parse_args()
BASE = f"http://127.0.0.1:{args.port}"
SIZES = [tuple(map(int, pair.split(":"))) for pair in args.requests.split(",")]
ALONE = range(len(SIZES)) if args.alone is None else [int(i) for i in args.alone.split(",") if i]


def get(path):
    return urllib.request.urlopen(BASE + path, timeout=30).read().decode()


def generate(which):
    """(text, seconds to the first event, seconds in all, prompt tokens, generated tokens)"""
    prompt, tokens = SIZES[which]
    body = {
        "prompt": [(i * i + (7 + which) * i) % 1000 + 10 for i in range(prompt)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, first, text, usage = time.perf_counter(), None, "", {}
    request = urllib.request.Request(
        BASE + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                sys.exit(f"request {which}: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                text += choice["text"]
                first = first or time.perf_counter()
    ended = time.perf_counter()
    return text, first - begun, ended - begun, usage.get("prompt_tokens"), usage.get("completion_tokens")


def pool_metrics():
    lines = [line.split() for line in get("/metrics").splitlines() if line.startswith("hearth_kv_pool")]
    return {name.removeprefix("hearth_kv_pool_"): float(value) for name, value in lines}


def main():
    most, over = {}, threading.Event()

    def watch():
        while not over.wait(0.05):
            for name, value in pool_metrics().items():
                most[name] = max(most.get(name, 0), value)

    together = [None] * len(SIZES)

    def run(which):
        together[which] = generate(which)

    threads = [threading.Thread(target=run, args=(which,)) for which in range(len(SIZES))]
    watcher = threading.Thread(target=watch)
    watcher.start()
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    over.set()
    watcher.join()
    same = True
    for which, said in enumerate(together):
        if said is None:
            sys.exit(f"request {which} failed")
        text, first, whole, prompt, tokens = said
        line = (
            f"request {which}: {prompt} + {tokens} tokens, first after {first:.2f} s, all after {whole:.2f} s"
        )
        if which in ALONE:
            alone = generate(which)[0]
            equal = alone == text
            same &= equal
            at = next((i for i, (a, b) in enumerate(zip(alone, text)) if a != b), min(len(alone), len(text)))
            line += ", as alone" if equal else f", DIFFERS from alone at character {at} of {len(alone)}"
        print(line, flush=True)
    now = json.loads(get("/props"))["runtime"]["kv_pool"]
    print(json.dumps({"most": most, "after": now, "same": same}))
    sys.exit(0 if same else 1)


main()
