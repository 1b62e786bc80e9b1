"""Checks a server over HTTP and prints one line per check, `name | ok or FAILED | detail`.

    client.py PORT chat            one reply, one tool call, eight concurrent replies (needs a chat model)
    client.py PORT rate [N [P]]    N greedy tokens after a prompt of about P: tokens per second at the client

Standard library only. The rate is measured between the first and the last streamed event, so it includes the
decode step, the logits row on the host, sampling, detokenisation, the event and the socket.
"""

import json
import statistics
import sys
import threading
import time
import urllib.request

BASE = f"http://127.0.0.1:{sys.argv[1]}/v1"


def post(path, body):
    """The open response to a JSON body."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def chat(text, **more):
    """The greedy reply to one question."""
    body = {
        "model": "any",
        "temperature": 0,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": text}],
    }
    return json.load(post("/chat/completions", body | more))["choices"][0]["message"]


def line(name, ok, detail):
    print(f"{name} | {'ok' if ok else 'FAILED'} | {detail}", flush=True)
    return ok


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Use this to get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}


def check_chat():
    answer = chat("What is 23 + 45?")["content"] or ""
    good = [line("chat", "68" in answer, repr(answer[:60]))]
    calls = chat("Could you get the weather with city Paris?", tools=[WEATHER]).get("tool_calls") or []
    parsed = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    good.append(line("tool call", parsed == [("get_weather", {"city": "Paris"})], parsed))
    alone = [chat(f"What is {i} + {3 * i}?")["content"] for i in range(8)]
    together = [None] * 8
    begun = time.perf_counter()

    def ask(i):
        together[i] = chat(f"What is {i} + {3 * i}?")["content"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    same = sum(a == b for a, b in zip(alone, together))
    good.append(line("eight at once", None not in together, f"{took:.2f} s, {same} of 8 as alone"))
    return all(good)


def rate(n, prompt):
    rates = []
    for turn in range(4):
        text = f"{turn} " + "word " * prompt
        body = {
            "model": "any",
            "prompt": text,
            "temperature": 0,
            "max_tokens": n,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrived, usage = [], None
        for raw in post("/completions", body):
            if not raw.startswith(b"data: {"):
                continue
            event = json.loads(raw[6:])
            arrived.append(time.perf_counter())
            usage = event.get("usage") or usage
        if turn:  # the first warms up
            tokens = usage["completion_tokens"]
            rates.append((tokens - 1) / (arrived[-1] - arrived[0]))
    detail = (
        f"{statistics.median(rates):.1f} tok/s at the client, {tokens} tokens after {usage['prompt_tokens']}"
    )
    return line("rate", tokens == n, detail)


if __name__ == "__main__":
    arguments = [int(a) for a in sys.argv[3:]]
    done = check_chat() if sys.argv[2] == "chat" else rate(*(arguments + [160, 512][len(arguments) :]))
    sys.exit(0 if done else 1)
