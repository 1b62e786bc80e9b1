#!/usr/bin/env python3
"""Starts a server with hostile chat templates in a GGUF file: each is refused by name, or served.

    cargo build --release
    python3 harness/faults/run_templates.py [--hearth target/release/hearth] [--count 200] [--only N]

The file is a synthetic model with the template in place of its own (`hostile_templates.py`). Either the
process ends within `START_SECONDS` with status 1 and a message that names the file, or it serves: it answers
a chat with a status below 500, within `ANSWER_SECONDS`, and then ends with status 0 on SIGTERM. It must never
end by a signal or a panic, nor have more than `MOST_MEMORY` resident. Standard library only.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from gguf_head import Head
from hostile_templates import templates

ROOT = pathlib.Path(__file__).resolve().parents[2]
REAL = [
    ROOT / "models" / "ember" / "chat_template.jinja",
    ROOT / "crates" / "chat" / "src" / "template" / "builtin_qwen3.jinja",
    ROOT / "crates" / "chat" / "src" / "template" / "builtin_qwen35.jinja",
]
KEY = "tokenizer.chat_template"
START_SECONDS, ANSWER_SECONDS = 90, 90
# A template may make 64 MiB of text and more for long inputs; values take a multiple of their text.
MOST_MEMORY = 2 << 30
TALK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(port, body):
    made = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"messages": TALK, "max_tokens": 2, **body}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(made, timeout=ANSWER_SECONDS) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def most_resident(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10 if "VmHWM:" in status else 0


class Trial:
    """One process with one template."""

    def __init__(self, hearth, file):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(hearth), "serve", str(file), "--port", str(self.port), "--max-ctx", "4096"]
        self.file, self.memory = file, 0
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([*command, "--log", "error"], stderr=self.log)

    def text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def is_ready(self):
        """Whether the server becomes ready; it has ended if not."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            self.memory = max(self.memory, most_resident(self.process.pid))
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return True
            except OSError:
                time.sleep(0.02)
        raise TimeoutError(f"neither ready nor ended after {START_SECONDS} s")

    def outcome(self):
        """What the server did, and a fault or None."""
        if not self.is_ready():
            code, text = self.process.returncode, self.text()
            if code != 1 or "panicked" in text:
                return "ended", f"ended with {code}: {text[-500:]}"
            return "refused", None if self.file.name in text else f"the file is not named: {text[-500:]}"
        for body in ({}, {"tools": [TOOL]}):
            status = chat(self.port, body)
            if status >= 500:
                return "served", f"status {status}"
        self.memory = max(self.memory, most_resident(self.process.pid))
        self.process.terminate()
        code = self.process.wait(60)
        return (
            "served",
            None if code == 0 and "panicked" not in self.text() else f"ended with {code}: {self.text()}",
        )


def attempt(hearth, head, folder, name, source):
    file = folder / f"template-{name.split(':')[0]}.gguf"
    file.write_bytes(head.with_text(KEY, source))
    trial, begun = Trial(hearth, file), time.monotonic()
    try:
        kind, fault = trial.outcome()
    except (OSError, TimeoutError, subprocess.TimeoutExpired) as error:
        kind, fault = "hung", repr(error)
    finally:
        trial.process.kill()
        trial.process.wait()
        file.unlink()
    if not fault and trial.memory > MOST_MEMORY:
        fault = f"{trial.memory >> 20} MiB resident"
    return kind, fault, time.monotonic() - begun, trial.memory


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", type=int, help="print and try this template only")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp())
    model = folder / "plain.gguf"
    subprocess.run([args.hearth, "synth", "tiny-dense:q4_0", model], check=True, capture_output=True)
    head = Head(model.read_bytes())
    made = list(templates(args.count, [path.read_text() for path in REAL]))
    if args.only is not None:
        made = [made[args.only]]
        print(made[0][0], made[0][1][:4000], sep="\n")
    kinds, faults, longest, most = collections.Counter(), [], 0, 0
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            trials = pool.map(lambda each: attempt(args.hearth, head, folder, *each), made)
            for (name, _), (kind, fault, seconds, memory) in zip(made, trials):
                kinds[kind] += 1
                longest, most = max(longest, seconds), max(most, memory)
                if fault:
                    faults.append(f"template {name}: {kind}: {fault}")
                    print(f"FAULT {faults[-1]}", flush=True)
    finally:
        shutil.rmtree(folder)
    found = {"templates": len(made), **kinds, "longest_s": round(longest, 1), "most_resident_mib": most >> 20}
    print(json.dumps({**found, "faults": len(faults)}))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
