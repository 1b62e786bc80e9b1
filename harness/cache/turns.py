#!/usr/bin/env python3
"""Measures the time to first token of later turns: cold, from the prefix cache, and after a restart.

    harness/cache/turns.py target/release/hearth [--recorded CLIENT] [--tokens 8000] [--context N] [--kills 0]
        [MODEL [SERVE-FLAGS...]]

The conversation is generated, or with --recorded the requests of that client. `record.py` made them:
claude-code with Anthropic's Messages API, codex with OpenAI's Responses API. The first tool result of a
recording is lengthened until the first request has about `--tokens` tokens. The rest stays: five tool
results, a new user message, a tool result. With --as-qwen, these results are cut to their token count in
Qwen's vocabulary. Bundled and synthetic models need up to three tokens for one of Qwen's. `--pause S` waits
before the new user message; the model's actual reply replaces the recorded one. At the end, new
conversations with each turn's number of new tokens are prefilled.

Prints one JSON line per case, and checks that greedy replies are equal in all of them (not with
--unchecked). With --kills N, the server is killed (SIGKILL) N times during writes. A kill counts if the file
that was being written when the process was alive is still unfinished once it is dead. Every reply after a
kill is compared with that of a server without a prefix cache. Standard library only.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

SYSTEM = "You are a careful assistant. Answer in one short sentence."


class Chat:
    """OpenAI's chat completions; `read` returns an event's text, other text, usage and timings."""

    path, limit = "/v1/chat/completions", "max_tokens"

    @staticmethod
    def read(event):
        deltas = [choice["delta"] for choice in event.get("choices", [])]
        text = "".join(delta.get("content") or "" for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        return text, reasoning, event.get("usage"), event.get("timings")

    @staticmethod
    def count(usage):
        """(prompt tokens, cached prompt tokens)"""
        return usage["prompt_tokens"], usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)


class Messages:
    """Anthropic's Messages API."""

    path, limit, counts = "/v1/messages", "max_tokens", ("/v1/messages/count_tokens", "messages")

    @staticmethod
    def read(event):
        delta = event.get("delta") or {}
        other = "".join(delta.get(key) or "" for key in ("thinking", "partial_json"))
        usage = event.get("usage") or (event.get("message") or {}).get("usage") or {}
        return delta.get("text") or "", other, usage, usage.get("timings")

    @staticmethod
    def count(usage):
        cached = usage.get("cache_read_input_tokens", 0)
        return usage["input_tokens"] + cached, cached


class Responses:
    """OpenAI's Responses API."""

    path, limit, counts = "/v1/responses", "max_output_tokens", ("/v1/responses/input_tokens", "input")

    @staticmethod
    def read(event):
        response = event.get("response") or {}
        delta = event["delta"] if event["type"].endswith(".delta") else ""
        text, other = (delta, "") if event["type"] == "response.output_text.delta" else ("", delta)
        return text, other, response.get("usage"), response.get("timings")

    @staticmethod
    def count(usage):
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


CHAT = Chat
RECORDED = {"claude-code": Messages, "codex": Responses}
# The budget of the folder in which writes are killed.
KILLS_MIB = 256
# Characters per token of Qwen's published vocabulary in the recorded tool results.
QWEN = {"claude-code": 3.60, "codex": 4.11}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, args, flags):
        self.port = free_port()
        command = [
            args.hearth,
            "serve",
            *args.model,
            "--port",
            str(self.port),
            "--max-sequences",
            "1",
            "--max-ctx",
            str(args.context or args.tokens * 2),
            "--log",
            args.log_level,
            *flags,
        ]
        self.log = open(args.log, "ab+") if args.log else tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        until = time.time() + 120
        while time.time() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as response:
                    if response.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.log.seek(0)
        sys.exit("the server did not start:\n" + self.log.read().decode())

    def post(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            sys.exit(f"{path} failed with {error.code}: {error.read().decode()[:500]}")

    def complete(self, request, max_tokens=16):
        """Requests a greedy reply to messages or to a recorded request.

        Returns (seconds to the first token, text, usage). Afterwards `reply` has the text without reasoning
        and calls, and `timings` the engine's times.
        """
        dialect = request["dialect"] if isinstance(request, dict) else CHAT
        body = dict(request["body"]) if isinstance(request, dict) else {"messages": request}
        body |= {"model": "m", "temperature": 0, dialect.limit: max_tokens, "stream": True}
        if dialect is CHAT:
            body["stream_options"] = {"include_usage": True}
        started, first, text, usage = time.monotonic(), None, "", {}
        self.timings, self.reply = {}, ""
        with self.post(dialect.path, body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                delta, other, counts, timings = dialect.read(event)
                self.reply += delta
                usage, self.timings = usage | (counts or {}), timings or self.timings
                if delta + other and first is None:
                    first = time.monotonic() - started
                text += delta + other
        return first or time.monotonic() - started, text, dialect.count(usage)

    def stop(self, sent_signal=signal.SIGTERM):
        self.process.send_signal(sent_signal)
        self.process.wait(60)


def words(n, seed):
    rng = random.Random(seed)
    pool = "the sum of two numbers is found by adding them as a list of values in order with care".split()
    return " ".join(rng.choice(pool) for _ in range(n))


def conversation(tokens, seed=1):
    """A conversation of about `tokens` tokens that ends with a user message."""
    messages = [{"role": "system", "content": SYSTEM}]
    each = 700
    for i in range(max(1, tokens // (2 * each))):
        messages.append({"role": "user", "content": words(each, seed * 100 + i)})
        messages.append({"role": "assistant", "content": words(each, seed * 100 + 50 + i)})
    messages.append({"role": "user", "content": "What is 2 + 3?"})
    return messages


def report(case, first, usage, server, **more):
    """Prints one line; `engine_ms` is the engine's part, from admission to the first logits."""
    prompt, cached = usage
    print(
        json.dumps(
            {
                "case": case,
                "first_token_ms": round(first * 1000, 1),
                "engine_ms": server.timings.get("prefill_ms"),
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                **more,
            }
        ),
        flush=True,
    )


def resolve(value, parts):
    """Resolves a recorded value's references to the table."""
    if isinstance(value, dict):
        if set(value) == {"$"}:
            return resolve(parts[value["$"]], parts)
        return {key: resolve(inner, parts) for key, inner in value.items()}
    return [resolve(inner, parts) for inner in value] if isinstance(value, list) else value


def replace_texts(body, texts):
    """Replaces texts of a request by a table from old to new."""
    if isinstance(body, dict):
        return {key: replace_texts(inner, texts) for key, inner in body.items()}
    if isinstance(body, list):
        return [replace_texts(inner, texts) for inner in body]
    return texts.get(body, body) if isinstance(body, str) else body


def results_of(body, key):
    """The tool results of a request in order; `key` names its list of messages."""
    found = []
    for message in body[key]:
        parts = message.get("content") if isinstance(message.get("content"), list) else []
        parts = [part.get("content") for part in parts if part.get("type") == "tool_result"]
        found += [text for text in [message.get("output"), *parts] if isinstance(text, str)]
    return found


def cut(server, text, tokens):
    """The longest prefix of a text with at most `tokens` tokens, to within 8 characters."""
    low, high = 0, len(text)
    while high - low > 8:
        middle = (low + high + 1) // 2
        with server.post("/tokenize", {"content": text[:middle]}) as response:
            fits = len(json.load(response)["tokens"]) <= tokens
        low, high = (middle, high) if fits else (low, middle)
    return text[:low]


def recorded(args, server):
    """A recorded conversation from its second request on, with the first tool result lengthened."""
    dialect = RECORDED[args.recorded]
    recording = json.loads((pathlib.Path(__file__).parent / f"{args.recorded}.json").read_text())
    bodies = [resolve(request, recording["parts"]) for request in recording["requests"][1:]]
    path, key = dialect.counts
    first, *others = results_of(bodies[-1], key)
    texts = (
        {text: cut(server, text, len(text) / QWEN[args.recorded]) for text in others} if args.as_qwen else {}
    )

    def count(body):
        with server.post(path, body | {"model": "m"}) as response:
            return json.load(response)["input_tokens"]

    # The token count is nearly proportional to the length, so one measurement gives the length.
    without_result = count(replace_texts(bodies[0], {first: ""}))
    times = max(0, args.tokens - without_result) / (count(bodies[0]) - without_result)
    texts[first] = (first * (int(times) + 1))[: int(len(first) * times)]
    return [{"dialect": dialect, "body": replace_texts(body, texts)} for body in bodies]


# The recorded reply before the new user message.
REPLY = "They accept tokens, weigh them, emit events, cancel, count and fail."
# The new part of each recorded request after the first.
NEW_PARTS = [
    *(f"a tool's result, {nth}" for nth in ("second", "third", "fourth", "fifth", "sixth")),
    "the next user message",
    "a tool's result for it",
]


def new_conversation(tokens, server, seed):
    """A new conversation of about `tokens` tokens."""
    with server.post("/tokenize", {"content": words(1000, seed)}) as response:
        tokens_per_word = len(json.load(response)["tokens"]) / 1000
    return [{"role": "user", "content": words(max(1, int((tokens - 12) / tokens_per_word)), seed)}]


def replay(args, folder):
    """Sends the recorded conversation, request by request."""
    flags = ["--kv-cache-dir", folder]
    server = Server(args, flags)
    server.complete([{"role": "user", "content": "hi"}])
    first, *rest = recorded(args, server)
    cold, text, usage = server.complete(first)
    report("cold", cold, usage, server)
    requests, replies, new_tokens = [first], [text], []
    for i, part in enumerate(NEW_PARTS):
        request = rest[i]
        if part == "the next user message":
            # Like a real client, send back the reply that the server gave.
            rest[i:] = [replace_texts(body, {REPLY: server.reply}) for body in rest[i:]]
            request = rest[i]
            time.sleep(args.pause)
        took, text, usage = server.complete(request)
        new = usage[0] - usage[1]
        report(
            part,
            took,
            usage,
            server,
            share_of_cold=round(took / cold, 4),
            new_tokens=new,
            share_new=round(new / usage[0], 4),
        )
        new_tokens.append(new)
        requests.append(request)
        replies.append(text)
    took, again, usage = server.complete(rest[-1])
    report("the last once more", took, usage, server, share_of_cold=round(took / cold, 4))
    # After all turns, because earlier these requests would evict cached states.
    for i, (part, new) in enumerate(zip(NEW_PARTS, new_tokens)):
        took, _, usage = server.complete(new_conversation(new, server, 1000 + i))
        report(f"as many tokens as {part}, alone", took, usage, server)
    server.stop()
    server = Server(args, flags)
    took, after, usage = server.complete(rest[-1])
    report("the last once more, after a restart", took, usage, server, share_of_cold=round(took / cold, 4))
    server.stop()
    if args.unchecked:
        return True
    return replies_equal(args, requests + [rest[-1]] * 2, replies + [again, after])


def replies_equal(args, requests, replies):
    """Whether a server without a prefix cache gives the same replies."""
    plain = Server(args, ["--prefix-cache-entries", "0"])
    known = {}
    for request in requests:
        key = json.dumps(request["body"] if isinstance(request, dict) else request)
        known[key] = known.get(key) or plain.complete(request)[1]
    plain.stop()
    expected = [
        known[json.dumps(request["body"] if isinstance(request, dict) else request)] for request in requests
    ]
    same = expected == replies
    result = "equal with and without a prefix cache" if same else "DIFFERENT"
    print(json.dumps({"answers": result}), flush=True)
    return same


def turns(args, folder):
    flags = ["--kv-cache-dir", folder]
    server = Server(args, flags)
    server.complete([{"role": "user", "content": "hi"}])
    first_turn = conversation(args.tokens)
    cold, reply, usage = server.complete(first_turn)
    report("turn 1, cold", cold, usage, server)
    more = [{"role": "assistant", "content": reply}, {"role": "user", "content": "And 4 + 5?"}]
    second_turn = first_turn + more
    warm, text, usage = server.complete(second_turn)
    report("turn 2, from memory", warm, usage, server, share_of_cold=round(warm / cold, 4))
    other = conversation(args.tokens // 2, seed=2)
    between, _, usage = server.complete(other)
    report("another conversation, cold", between, usage, server)
    again, repeated, usage = server.complete(second_turn)
    report("turn 2 once more, after the other", again, usage, server, share_of_cold=round(again / cold, 4))
    more = [{"role": "assistant", "content": text}, {"role": "user", "content": "And 7 + 1?"}]
    third_turn = second_turn + more
    server.stop()
    server = Server(args, flags)
    resumed, after, usage = server.complete(third_turn)
    report("turn 3, after a restart", resumed, usage, server, share_of_cold=round(resumed / cold, 4))
    server.stop()
    if args.unchecked:
        return True
    requests = [first_turn, second_turn, second_turn, third_turn]
    return replies_equal(args, requests, [reply, text, repeated, after])


def kill_during_write(server, folder):
    """Kills the server as soon as a state is being written; whether the kill came before the write's end."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        # A part file has its final name only once it is complete and synced.
        if part_files(folder):
            break
    server.stop(signal.SIGKILL)
    return bool(part_files(folder))


def part_files(folder):
    return list(pathlib.Path(folder).glob("*/*.part"))


def kills(args, folder):
    rng = random.Random(5)
    # Room for the first states: each write evicts others before it begins, and a killed one adds none.
    flags = ["--kv-cache-dir", folder, "--kv-cache-budget", str(KILLS_MIB), "--kv-cache-min-tokens", "128"]
    plain = Server(args, ["--prefix-cache-entries", "0"])
    # Conversations with a stored state, which the attempts continue.
    server, begun = Server(args, flags), []
    for seed in range(6):
        messages = conversation(1500, seed)
        reply = server.complete(messages, 8)[1]
        begun.append([*messages, {"role": "assistant", "content": reply}])
    server.stop()
    wrong, hits, during, attempts = 0, 0, 0, 0
    while during < args.kills and attempts < 4 * args.kills:
        attempts += 1
        server = Server(args, flags)
        if part_files(folder):
            wrong += 1
            print(f"attempt {attempts}: a part file of a dead server remains")
        # New words, so that there is a state to write.
        messages = [*rng.choice(begun), {"role": "user", "content": words(400, 1000 + attempts)}]
        _, text, usage = server.complete(messages, 8)
        hits += usage[1] > 0
        during += kill_during_write(server, folder)
        wrong += text != plain.complete(messages, 8)[1]
        size = sum(
            os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names
        )
        if size > KILLS_MIB << 20:
            wrong += 1
            print(f"attempt {attempts}: {size} bytes in the cache folder, more than {KILLS_MIB} MiB")
    plain.stop()
    found = {"kills": attempts, "during_a_write": during, "answers_from_states": hits, "wrong": wrong}
    print(json.dumps(found), flush=True)
    return wrong == 0 and during >= args.kills and hits > attempts // 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("hearth")
    parser.add_argument("model", nargs="*")
    parser.add_argument("--recorded", choices=RECORDED, help="send the recorded requests of this client")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument(
        "--context", type=int, help="the server's context; some models need two to three tokens per word"
    )
    parser.add_argument(
        "--as-qwen",
        action="store_true",
        help="cut recorded results to their token count in Qwen's vocabulary",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0,
        help="seconds before the new user message of a recorded conversation",
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not compare with a server without a prefix cache"
    )
    parser.add_argument("--kills", type=int, default=0, help="kill the server this many times during writes")
    parser.add_argument("--log", help="file for the servers' logs at `--log-level`")
    parser.add_argument("--log-level", default="info")
    args, more = parser.parse_known_args()
    args.model += more
    folder = tempfile.mkdtemp()
    try:
        check = kills if args.kills else replay if args.recorded else turns
        passed = check(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
