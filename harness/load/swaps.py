#!/usr/bin/env python3
"""Swaps two models in a server that holds one of them: a long session must be warm again after a swap, and swaps
under load must lose nothing and leak no memory.

    cargo build --release
    python3 harness/load/swaps.py [--hearth target/release/hearth] [--device cpu] [--session 2000] [--swaps 50] [A B]

A and B are GGUF files; without them, two tiny models with random weights are written. In order:

session  a prompt of so many tokens for A, a request for B, and the session's next turn for A: how long its first
         token takes, with the load of A, and how much of the prompt was remembered
swaps    three clients and one that changes the model with every request, until the server has loaded so many models;
         every request must be answered. All models are then unloaded, after a tenth of the swaps and at the end: the
         server's anonymous memory, and with a GPU that of the device, may not grow by more than the larger of two
         percent and 32 MiB

Prints one JSON line. Exits 1 if a check fails.
"""

import argparse
import json
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = 3
REPLY_TOKENS = 8
# The server gives freed pages back every 20 seconds.
SETTLE_SECONDS = 22
FLAT_SHARE = 0.02
FLAT_BYTES = 32 << 20


class Server:
    """The server, its log and its memory."""

    def __init__(self, hearth, models, flags, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.base = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.base.rsplit(":", 1)[1]
        self.log = log
        listed = ["--models", f"a={models[0]},b={models[1]}", "--models-max", "1", "--port", port]
        command = [hearth, "serve", *listed, "--no-color", *flags]
        self.process = subprocess.Popen([str(word) for word in command], stderr=log.open("w"))
        for _ in range(600):
            try:
                return self.get("/health") and None
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(f"the server ended at its start: {log.read_text()}")
                time.sleep(0.1)

    def get(self, path):
        return urllib.request.urlopen(self.base + path, timeout=60).read()

    def open(self, path, body):
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=600)

    def reply(self, model, prompt, tokens=REPLY_TOKENS):
        """Seconds to the first event of text, and the usage of a completion that is read to its end."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}
        begun, first, usage = time.monotonic(), None, {}
        for line in self.open("/v1/completions", body):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise OSError(event["error"]["message"])
            if event.get("choices"):
                first = first or time.monotonic() - begun
            usage = event.get("usage") or usage
        if usage.get("completion_tokens") != tokens:
            raise OSError(f"{usage.get('completion_tokens')} tokens instead of {tokens}")
        return first, usage

    def loads(self):
        return [float(seconds) for seconds in re.findall(r"loaded in ([\d.]+) s", self.log.read_text())]

    def unload(self):
        for model in "ab":
            self.open("/v1/models/unload", {"model": model}).read()
        time.sleep(SETTLE_SECONDS)

    def memory(self):
        """Anonymous bytes of the process, and its bytes on GPUs or 0."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        host = int(re.search(r"RssAnon:\s+(\d+)", status)[1]) << 10
        try:
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            used = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            return host, sum(int(line) for line in used.split()) << 20
        except (OSError, subprocess.CalledProcessError, ValueError):
            return host, 0


def ids(count, seed):
    """So many token ids that every vocabulary has."""
    draw = random.Random(seed)
    return [draw.randrange(100, 900) for _ in range(count)]


def session(server, tokens):
    prompt = ids(tokens, 1)
    cold, usage = server.reply("a", prompt)
    server.reply("b", ids(20, 3))
    before = len(server.loads())
    warm, again = server.reply("a", prompt + ids(20, 2))
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cold_s": round(cold, 3),
        "warm_s": round(warm, 3),
        "load_s": server.loads()[before],
        "cached_tokens": again["prompt_tokens_details"]["cached_tokens"],
    }


def swaps(server, count):
    """Swaps so many times; returns the answered requests, and memory after a tenth of the swaps and at the end."""
    faults, answered, memory = [], [], []
    for stop_at in (count // 10, count):
        begun, ends = len(server.loads()), threading.Event()

        def client(number, ends=ends):
            draw = random.Random(number)
            turn = 0
            while not ends.is_set():
                model = "ab"[turn % 2 if number == 0 else draw.randrange(2)]
                turn += 1
                try:
                    server.reply(model, ids(30, number))
                    answered.append(model)
                except OSError as error:
                    faults.append(f"{model}: {error}")

        threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS + 1)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 900
        while len(server.loads()) - begun < stop_at - len(memory) * (count // 10) and time.monotonic() < deadline:
            time.sleep(0.05)
        ends.set()
        for thread in threads:
            thread.join()
        server.unload()
        memory.append(server.memory())
    return answered, faults, memory


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target/release/hearth")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--session", type=int, default=2000)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("models", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        models = arguments.models
        if not models:
            models = [folder / "a.gguf", folder / "b.gguf"]
            for model, what in zip(models, ("tiny-hybrid:q8_0", "tiny-dense:q8_0")):
                subprocess.run([arguments.hearth, "synth", what, model], check=True, stderr=subprocess.DEVNULL)
        flags = ["--device", arguments.device, "--max-ctx", arguments.session + 512, "--kv-cache-min-tokens", "64",
                 "--kv-cache-budget", "16384", "--max-sequences", CLIENTS + 1]
        server = Server(arguments.hearth, models, flags, folder / "log")
        try:
            result = {"bench": "swaps", "device": arguments.device, "models": [model.name for model in models]}
            if arguments.session:
                result |= session(server, arguments.session)
            good = not arguments.session or result["cached_tokens"] > result["prompt_tokens"] // 2
            if arguments.swaps:
                answered, faults, memory = swaps(server, arguments.swaps)
                (host, device), (host_end, device_end) = memory
                result |= {"swaps": len(server.loads()), "answered": len(answered), "failed": len(faults),
                           "mean_load_s": round(sum(server.loads()) / len(server.loads()), 3),
                           "host_bytes": [host, host_end], "device_bytes": [device, device_end]}
                flat = all(end - start <= max(FLAT_SHARE * start, FLAT_BYTES)
                           for start, end in ((host, host_end), (device, device_end)))
                good = good and flat and not faults
                for fault in faults[:5]:
                    print(fault, file=sys.stderr)
            print(json.dumps(result))
        finally:
            server.process.terminate()
            server.process.wait()
    sys.exit(not good)


if __name__ == "__main__":
    main()
