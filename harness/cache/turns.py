#!/usr/bin/env python3
"""Second turns: how long the first token of a conversation takes cold, warm, and after a restart from disk.

    harness/cache/turns.py target/release/hearth [--tokens 8000] [--context N] [--kills 0] [MODEL [SERVE-FLAGS...]]

Prints one JSON line for each way, and checks that greedy answers are the same every way. With --kills N, the
server is killed (SIGKILL) N times while states are being written, and every answer after a kill is compared with
that of a server that keeps nothing. Standard library only.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

SYSTEM = "You are a careful assistant. Answer in one short sentence."


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

    def ask(self, messages, max_tokens=16):
        """(seconds to the first token, text, usage) of a greedy answer."""
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": True,
                "stream_options": {"include_usage": True}}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/chat/completions",
                                         json.dumps(body).encode(), {"content-type": "application/json"})
        begun, first, text, usage = time.monotonic(), None, "", None
        self.timings = {}
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                self.timings = chunk.get("timings") or self.timings
                for choice in chunk.get("choices", []):
                    delta = choice["delta"]
                    piece = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
                    if piece and first is None:
                        first = time.monotonic() - begun
                    text += piece
        return first or time.monotonic() - begun, text, usage

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
    details = usage.get("prompt_tokens_details", {})
    print(json.dumps({"way": what, "first_token_ms": round(first * 1000, 1),
                      "engine_ms": server.timings.get("prefill_ms"), "prompt_tokens": usage["prompt_tokens"],
                      "cached_tokens": details.get("cached_tokens", 0), **more}), flush=True)


def turns(args, folder):
    first_turn = conversation(args.tokens)
    flags = ["--kv-cache-dir", folder]
    server = Server(args, flags)
    server.ask([{"role": "user", "content": "hi"}])
    cold, reply, usage = server.ask(first_turn)
    tell("turn 1, cold", cold, usage, server)
    second_turn = first_turn + [{"role": "assistant", "content": reply}, {"role": "user", "content": "And 4 + 5?"}]
    warm, text, usage = server.ask(second_turn)
    tell("turn 2, from memory", warm, usage, server, share_of_cold=round(warm / cold, 4))
    other = conversation(args.tokens // 2, seed=2)
    between, _, usage = server.ask(other)
    tell("another conversation, cold", between, usage, server)
    again, repeated, usage = server.ask(second_turn)
    tell("turn 2 once more, after the other", again, usage, server, share_of_cold=round(again / cold, 4))
    third_turn = second_turn + [{"role": "assistant", "content": text}, {"role": "user", "content": "And 7 + 1?"}]
    server.stop()
    server = Server(args, flags)
    begun, after, usage = server.ask(third_turn)
    tell("turn 3, after a restart", begun, usage, server, share_of_cold=round(begun / cold, 4))
    server.stop()
    plain = Server(args, ["--prefix-cache-slots", "0"])
    expected = [plain.ask(turn)[1] for turn in (first_turn, second_turn, third_turn)]
    plain.stop()
    same = expected == [reply, text, after] and repeated == text
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
        hits += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) > 0
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
