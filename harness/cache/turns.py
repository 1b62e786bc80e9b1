#!/usr/bin/env python3
"""Second turns: how long the first token of a conversation takes cold, warm, and after a restart from disk.

    harness/cache/turns.py target/release/hearth [--recorded CLIENT] [--tokens 8000] [--context N] [--kills 0]
        [MODEL [SERVE-FLAGS...]]

The conversation is made up, or with --recorded what that client sent (`record.py`; claude-code in Anthropic's messages,
codex in OpenAI's Responses), its results of tools lengthened or cut until the last request has about `--tokens` tokens.

Prints one JSON line for each way, and checks that greedy answers are the same every way. With --kills N, the
server is killed (SIGKILL) N times while states are being written, and every answer after a kill is compared with
that of a server that keeps nothing. Standard library only.
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
    """OpenAI's chat completions: how an event tells text, counts and times."""

    path, limit = "/v1/chat/completions", "max_tokens"

    @staticmethod
    def read(event):
        deltas = [choice["delta"] for choice in event.get("choices", [])]
        text = "".join((delta.get("content") or "") + (delta.get("reasoning_content") or "") for delta in deltas)
        return text, event.get("usage"), event.get("timings")

    @staticmethod
    def count(usage):
        """(tokens of the prompt, of them from a state)"""
        return usage["prompt_tokens"], usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)


class Messages:
    """Anthropic's messages."""

    path, limit, counts = "/v1/messages", "max_tokens", ("/v1/messages/count_tokens", "messages")

    @staticmethod
    def read(event):
        delta = event.get("delta") or {}
        text = "".join(delta.get(key) or "" for key in ("text", "thinking", "partial_json"))
        usage = event.get("usage") or (event.get("message") or {}).get("usage") or {}
        return text, usage, usage.get("timings")

    @staticmethod
    def count(usage):
        cached = usage.get("cache_read_input_tokens", 0)
        return usage["input_tokens"] + cached, cached


class Responses:
    """OpenAI's Responses."""

    path, limit, counts = "/v1/responses", "max_output_tokens", ("/v1/responses/input_tokens", "input")

    @staticmethod
    def read(event):
        answer = event.get("response") or {}
        text = event["delta"] if event["type"].endswith(".delta") else ""
        return text, answer.get("usage"), answer.get("timings")

    @staticmethod
    def count(usage):
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


CHAT = Chat
RECORDED = {"claude-code": Messages, "codex": Responses}
# What is left of a tool's result at least, as a share: a new one is what a turn reads.
LEAST = 0.1


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, args, flags):
        self.port = free_port()
        command = [args.hearth, "serve", *args.model, "--port", str(self.port), "--max-sequences", "1",
                   "--max-ctx", str(args.context or args.tokens * 2), "--log", args.log_level, *flags]
        self.log = open(args.log, "ab+") if args.log else tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        until = time.time() + 120
        while time.time() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.log.seek(0)
        sys.exit("the server did not start:\n" + self.log.read().decode())

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            sys.exit(f"{path} was answered {error.code}: {error.read().decode()[:500]}")

    def ask(self, asked, max_tokens=16):
        """(seconds to the first token, text, usage) of a greedy answer to messages of a chat, or to a recorded request."""
        dialect = asked["dialect"] if isinstance(asked, dict) else CHAT
        body = dict(asked["body"]) if isinstance(asked, dict) else {"messages": asked}
        body |= {"model": "m", "temperature": 0, dialect.limit: max_tokens, "stream": True}
        if dialect is CHAT:
            body["stream_options"] = {"include_usage": True}
        begun, first, text, usage = time.monotonic(), None, "", {}
        self.timings = {}
        with self.post(dialect.path, body) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                piece, counted, timings = dialect.read(event)
                usage, self.timings = usage | (counted or {}), timings or self.timings
                if piece and first is None:
                    first = time.monotonic() - begun
                text += piece
        return first or time.monotonic() - begun, text, dialect.count(usage)

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(60)


def words(n, seed):
    dice = random.Random(seed)
    pool = "the sum of two numbers is found by adding them as a list of values in order with care".split()
    return " ".join(dice.choice(pool) for _ in range(n))


def conversation(tokens, seed=1):
    """A conversation of about `tokens` tokens, and its next turn."""
    messages = [{"role": "system", "content": SYSTEM}]
    each = 700
    for i in range(max(1, tokens // (2 * each))):
        messages.append({"role": "user", "content": words(each, seed * 100 + i)})
        messages.append({"role": "assistant", "content": words(each, seed * 100 + 50 + i)})
    messages.append({"role": "user", "content": "What is 2 + 3?"})
    return messages


def tell(what, first, usage, server, **more):
    """One line; `engine_ms` is the engine's part, from admission to the first row."""
    prompt, cached = usage
    print(json.dumps({"way": what, "first_token_ms": round(first * 1000, 1),
                      "engine_ms": server.timings.get("prefill_ms"), "prompt_tokens": prompt,
                      "cached_tokens": cached, **more}), flush=True)


def whole(value, parts):
    """A recorded value with what stands in the table put in its places."""
    if isinstance(value, dict):
        if set(value) == {"$"}:
            return whole(parts[value["$"]], parts)
        return {key: whole(inner, parts) for key, inner in value.items()}
    return [whole(inner, parts) for inner in value] if isinstance(value, list) else value


def lengthened(body, texts):
    """A request in which texts of the table, results of tools, are the longer or shorter ones."""
    if isinstance(body, dict):
        return {key: lengthened(inner, texts) for key, inner in body.items()}
    if isinstance(body, list):
        return [lengthened(inner, texts) for inner in body]
    return texts.get(body, body) if isinstance(body, str) else body


def recorded(args, server):
    """The last five requests of a recorded conversation at length: three results of tools, a wish, a result for it."""
    dialect = RECORDED[args.recorded]
    told = json.loads((pathlib.Path(__file__).parent / f"{args.recorded}.json").read_text())
    bodies = [whole(request, told["parts"]) for request in told["requests"][-5:]]
    path, said = dialect.counts
    with server.post(path, bodies[-1] | {"model": "m"}) as answer:
        have = json.load(answer)["input_tokens"]
    results = []
    for message in bodies[0][said]:
        parts = message.get("content") if isinstance(message.get("content"), list) else []
        parts = [part.get("content") for part in parts if part.get("type") == "tool_result"]
        results += [text for text in [message.get("output"), *parts] if isinstance(text, str)]
    # Code has about as many characters a token wherever it is cut, so lengths follow the count of the whole.
    with server.post("/tokenize", {"content": "".join(results)}) as answer:
        each = len(json.load(answer)["tokens"])
    times = max(LEAST, 1 + (args.tokens - have) / max(1, each))
    longer = {text: (text * (int(times) + 1))[: int(len(text) * times)] for text in results}
    return [{"dialect": dialect, "body": lengthened(body, longer)} for body in bodies]


def turns(args, folder):
    flags = ["--kv-cache-dir", folder]
    server = Server(args, flags)
    server.ask([{"role": "user", "content": "hi"}])
    played = recorded(args, server) if args.recorded else None
    first_turn = played[0] if played else conversation(args.tokens)
    cold, reply, usage = server.ask(first_turn)
    tell("turn 1, cold", cold, usage, server)
    more = [{"role": "assistant", "content": reply}, {"role": "user", "content": "And 4 + 5?"}]
    second_turn = played[1] if played else first_turn + more
    warm, text, usage = server.ask(second_turn)
    tell("turn 2, from memory", warm, usage, server, share_of_cold=round(warm / cold, 4))
    other = conversation(args.tokens // 2, seed=2)
    between, _, usage = server.ask(other)
    tell("another conversation, cold", between, usage, server)
    again, repeated, usage = server.ask(second_turn)
    tell("turn 2 once more, after the other", again, usage, server, share_of_cold=round(again / cold, 4))
    more = [{"role": "assistant", "content": text}, {"role": "user", "content": "And 7 + 1?"}]
    third_turn = played[2] if played else second_turn + more
    server.stop()
    server = Server(args, flags)
    begun, after, usage = server.ask(third_turn)
    tell("turn 3, after a restart", begun, usage, server, share_of_cold=round(begun / cold, 4))
    asked, answers = [first_turn, second_turn, third_turn], [reply, text, after]
    # Templates show tool calls of earlier wishes otherwise than those of the last, so a new wish finds less.
    for what, request in zip(("the next wish", "a tool's result for it"), played[3:] if played else []):
        took, answer, usage = server.ask(request)
        tell(what, took, usage, server, share_of_cold=round(took / cold, 4))
        asked.append(request)
        answers.append(answer)
    server.stop()
    plain = Server(args, ["--prefix-cache-slots", "0"])
    expected = [plain.ask(turn)[1] for turn in asked]
    plain.stop()
    same = expected == answers and repeated == text
    print(json.dumps({"answers": "equal with and without states" if same else "DIFFERENT"}), flush=True)
    return same


def kills(args, folder):
    dice = random.Random(5)
    flags = ["--kv-cache-dir", folder, "--kv-cache-budget", "64", "--kv-cache-min-tokens", "128"]
    plain = Server(args, ["--prefix-cache-slots", "0"])
    expected, wrong, hits = {}, 0, 0
    for i in range(args.kills):
        server = Server(args, flags)
        seed = dice.randrange(6)
        messages = conversation(1500, seed)
        _, text, usage = server.ask(messages, 8)
        hits += usage[1] > 0
        if seed not in expected:
            expected[seed] = plain.ask(messages, 8)[1]
        wrong += text != expected[seed]
        # States go to the disk 300 ms after the last word.
        time.sleep(0.25 + dice.random() * 0.25)
        server.stop(signal.SIGKILL)
        size = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)
        if size > 64 << 20:
            wrong += 1
            print(f"kill {i}: {size} bytes in the folder")
    plain.stop()
    print(json.dumps({"kills": args.kills, "answers_from_states": hits, "wrong": wrong}), flush=True)
    return wrong == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("hearth")
    parser.add_argument("model", nargs="*")
    parser.add_argument("--recorded", choices=RECORDED, help="play what this client sent")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--context", type=int, help="of the server; a word is two to three tokens to some models")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--log", help="a file that gets what the servers log; `--log-level` is theirs")
    parser.add_argument("--log-level", default="info")
    args, more = parser.parse_known_args()
    args.model += more
    folder = tempfile.mkdtemp()
    try:
        right = kills(args, folder) if args.kills else turns(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
