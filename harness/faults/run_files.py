#!/usr/bin/env python3
"""Runs the executable with damaged files: each is refused by name or used, and no reply changes.

    cargo build --release
    python3 harness/faults/run_files.py [KIND ...] [--hearth target/release/hearth] [--count 5000] [--only N]

model       a synthetic model, damaged anywhere: `hearth run` for two tokens
tokenizer   the same, damaged in its tokenizer only
settings    a settings file of `serve`: `hearth config show`
cache       stored states: a server starts with `STATES` damaged files and answers the prompts of all; every
            reply must equal that of a server without a cache

Damage N of a kind is made from the number N alone. A process must end within `SECONDS` and `MOST_MEMORY`,
with status 0, or with 1 or 2 and a message that names the file or the setting; never by a signal or a panic.
Drafts are damaged in `crates/model/tests/draft`, in all their formats. Standard library only.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from gguf_head import Head

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 60
# Of address space, in which stacks of threads count whole.
MOST_MEMORY = 6 << 30
STATES = 25
RAISED = re.compile(r"raise_exception\('([^']+)'")
NUMBERS = [0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
SETTINGS = """\
host = "127.0.0.1"
port = 8000
max-ctx = 4096
max-sequences = 4
kv-pool = 8192
temp = 0.7
top-p = 0.9
min-p = 0.05
log = "info"
log-format = "text"
cors-origin = ["http://localhost:3000"]
allowed-host = ["box"]
read-timeout = 30
queue-limit = 64
kv-cache-budget = 512
thinking-default = "on"
no-cors = false
metrics = "on"
"""
WORDS = [
    "true",
    "-1",
    "1e999",
    '"x"',
    "[1]",
    "{}",
    "nan",
    "0x10",
    "'''",
    "99999999999999999999",
    "[[a]]",
    "\x00",
    "=",
]


def damage_bytes(drawn, data, ranges):
    """Bytes with some changed within the ranges, or the whole cut."""
    data = bytearray(data)
    for _ in range(drawn.choice([1, 1, 2, 5])):
        begin, end = drawn.choice(ranges)
        at, way = drawn.randrange(begin, end), drawn.randrange(5)
        length = min(drawn.choice([1, 4, 8, 64]), end - at)
        if way == 0:
            data[at] ^= 1 << drawn.randrange(8)
        elif way == 1:
            data[at] = drawn.randrange(256)
        elif way == 2:
            number = drawn.choice(NUMBERS) & (1 << 8 * length) - 1
            data[at : at + length] = number.to_bytes(length, "little")
        elif way == 3:
            other = drawn.randrange(begin, end - length + 1)
            data[at : at + length] = data[other : other + length]
        else:
            data[at : at + length] = drawn.randbytes(length)
    if drawn.random() < 0.05:
        del data[drawn.randrange(len(data)) :]
    return bytes(data)


def damage_settings(drawn, text):
    lines = text.splitlines(keepends=True)
    for _ in range(drawn.choice([1, 2, 4])):
        at, way = drawn.randrange(len(lines)), drawn.randrange(6)
        if way == 0:
            lines[at] = lines[at].split("=")[0] + "= " + drawn.choice(WORDS) + "\n"
        elif way == 1:
            lines[at] += lines[at]
        elif way == 2:
            lines[at] = drawn.choice(WORDS) + lines[at]
        elif way == 3:
            cut = drawn.randrange(len(lines[at]))
            lines[at] = lines[at][:cut] + lines[at][cut + 1 :]
        elif way == 4:
            lines[at] = f'{lines[at].split("=")[0]}= "{"a" * drawn.choice([1, 1000, 100_000])}"\n'
        else:
            lines[at] = lines[at].split("=")[0] + "= " + "[" * drawn.choice([3, 5000]) + "\n"
    made = "".join(lines).encode()
    return made if drawn.random() < 0.8 else damage_bytes(drawn, made, [(0, len(made))])


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_once(command, names):
    """What became of a process, and a fault or None."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, preexec_fn=limit_memory)
    except subprocess.TimeoutExpired:
        return "hung", f"no end after {SECONDS} s"
    text = done.stderr.decode(errors="replace")
    if done.returncode not in (0, 1, 2) or "panicked" in text:
        return "broke", f"status {done.returncode}: {text[-600:]}"
    if done.returncode == 0:
        return "used", None
    return "refused", None if any(name in text for name in names) else f"nothing is named: {text[-600:]}"


class Model:
    """Damage to a model file, anywhere or in the pairs with a prefix."""

    def __init__(self, hearth, folder, prefix=None):
        self.hearth, self.folder = hearth, folder
        self.data = synthetic(hearth, folder).read_bytes()
        head = Head(self.data)
        # Most damage is to the head, which is small.
        whole = [(0, head.end), (0, head.end), (0, len(self.data))]
        self.ranges = head.places(prefix) if prefix else whole

    def attempt(self, number):
        data = damage_bytes(random.Random(f"model {number}"), self.data, self.ranges)
        file = self.folder / f"damaged-{number}.gguf"
        file.write_bytes(data)
        try:
            flags = ["--max-tokens", "2", "--max-ctx", "256", "--temperature", "0", "--log", "error"]
            # A damaged template may raise other words of its own.
            names = [file.name, "the chat template", *RAISED.findall(data.decode("latin-1"))]
            return run_once([self.hearth, "run", file, "hi", *flags], names)
        finally:
            file.unlink()


class Settings:
    def __init__(self, hearth, folder):
        self.hearth, self.folder = hearth, folder

    def attempt(self, number):
        file = self.folder / f"damaged-{number}.toml"
        file.write_bytes(damage_settings(random.Random(f"settings {number}"), SETTINGS))
        try:
            return run_once([self.hearth, "config", "show", "--config", file], [file.name, "--"])
        finally:
            file.unlink()


class Server:
    """A server of the synthetic model with a folder of states."""

    def __init__(self, hearth, model, states=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        cache = ["--kv-cache-dir", states, "--kv-cache-min-tokens", "64"] if states else []
        command = [hearth, "serve", model, "--port", str(self.port), "--max-ctx", "1024", "--log", "error"]
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([*command, *cache], stderr=self.log)
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.01)
        raise RuntimeError(f"the server did not start: {self.stop()}")

    def complete(self, prompt):
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        url, kind = f"http://127.0.0.1:{self.port}/v1/completions", {"content-type": "application/json"}
        made = urllib.request.Request(url, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(made, timeout=SECONDS) as reply:
            found = json.load(reply)
        details = found["usage"].get("prompt_tokens_details") or {}
        return found["choices"][0]["text"], details.get("cached_tokens", 0)

    def stop(self):
        """The log, or what is wrong with the end."""
        self.process.terminate()
        code = self.process.wait(SECONDS)
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        return f"ended with {code}: {text}" if code or "panicked" in text else None


class Cache:
    """Damage to stored states; attempt N is a server with the damages from N * STATES on."""

    def __init__(self, hearth, folder):
        self.hearth, self.folder = hearth, folder
        self.model = synthetic(hearth, folder)
        words = "the sea a town an old bridge bread rain winter".split()
        drawn = random.Random(1)
        self.prompts = [" ".join(drawn.choices(words, k=60 + n)) for n in range(STATES)]
        plain = Server(hearth, self.model)
        self.expected = [plain.complete(prompt)[0] for prompt in self.prompts]
        plain.stop()
        self.whole = folder / "whole"
        self.whole.mkdir(mode=0o700)
        server = Server(hearth, self.model, self.whole)
        for prompt in self.prompts:
            server.complete(prompt)
        server.stop()
        self.files = sorted(self.whole.glob("*/*.state"))
        if len(self.files) < STATES:
            raise RuntimeError(f"only {len(self.files)} states were stored")

    def damage(self, file, number):
        drawn = random.Random(f"cache {number}")
        way = drawn.randrange(8)
        data = file.read_bytes()
        if way == 0:
            data = drawn.choice(self.files).read_bytes()
        elif way == 1:
            data = data[: drawn.randrange(len(data))]
        elif way == 2:
            data += drawn.randbytes(drawn.choice([1, 4096]))
        elif way < 5:
            # The header and the token ids.
            data = damage_bytes(drawn, data, [(0, 4096)])
        else:
            data = damage_bytes(drawn, data, [(0, len(data))])
        file.write_bytes(data)

    def attempt(self, number):
        states = self.folder / f"states-{number}"
        shutil.copytree(self.whole, states)
        for at, file in enumerate(sorted(states.glob("*/*.state"))):
            self.damage(file, number * STATES + at)
        try:
            server = Server(self.hearth, self.model, states)
            replies = [server.complete(prompt) for prompt in self.prompts]
            fault = server.stop()
            wrong = [n for n, (text, _) in enumerate(replies) if text != self.expected[n]]
            if wrong:
                fault = f"other replies to prompts {wrong}"
            return f"{sum(cached > 0 for _, cached in replies)} prompts cached", fault
        except (OSError, RuntimeError) as error:
            return "broke", repr(error)
        finally:
            shutil.rmtree(states)


def synthetic(hearth, folder):
    file = folder / "plain.gguf"
    if not file.exists():
        command = [hearth, "synth", "tiny-dense:q4_0", file]
        subprocess.run(command, check=True, capture_output=True)
    return file


KINDS = {
    "model": Model,
    "tokenizer": lambda hearth, folder: Model(hearth, folder, "tokenizer."),
    "settings": Settings,
    "cache": Cache,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"default: all of {', '.join(KINDS)}")
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--count", type=int, default=5000, help="damaged files of each kind")
    parser.add_argument("--only", type=int, help="try this number only")
    args = parser.parse_args()
    hearth, n_faults = args.hearth.resolve(), 0
    for kind in args.kinds or KINDS:
        folder = pathlib.Path(tempfile.mkdtemp())
        begun, results, faults = time.monotonic(), collections.Counter(), []
        try:
            trials = KINDS[kind](hearth, folder)
            n_attempts = args.count // STATES if kind == "cache" else args.count
            numbers = range(n_attempts) if args.only is None else [args.only]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                for number, (result, fault) in zip(numbers, pool.map(trials.attempt, numbers)):
                    results[result] += 1
                    if fault:
                        faults.append(f"{kind} {number}: {result}: {fault}")
                        print(f"FAULT {faults[-1]}", flush=True)
        finally:
            shutil.rmtree(folder)
        n_files = len(numbers) * (STATES if kind == "cache" else 1)
        found = {"kind": kind, "files": n_files, **dict(sorted(results.items()))}
        print(
            json.dumps({**found, "seconds": round(time.monotonic() - begun), "faults": len(faults)}),
            flush=True,
        )
        n_faults += len(faults)
    sys.exit(bool(n_faults))


if __name__ == "__main__":
    main()
