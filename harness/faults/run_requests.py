#!/usr/bin/env python3
"""Sends hostile HTTP requests to a server with the bundled model; each must be answered, and none with 5xx.

    cargo build --release
    python3 harness/faults/run_requests.py [--hearth target/release/hearth] [--count 10000] [--only N]

`hostile_requests.py` makes request N from the number N alone, so `--only N` repeats one. Every request has a
complete head. An answer must come within a minute, whole, and with a status below 500; a stream must not end
with an error of the server; an error's body must say what is wrong. An honest request is sent before, after
every 500 requests, and at the end. Its reply must stay the same. At the end no sequence is open, the process
ends with status 0, and its resident memory has not grown by more than `MOST_GROWTH`. Standard library only.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

import hostile_requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 60
HONEST_EVERY = 500
# The prefix cache and the state of each sequence fill up, to a bound.
MOST_GROWTH = 512 << 20
CLIENTS = 8
SERVE = ["--max-ctx", "2048", "--max-sequences", "8", "--default-max-tokens", "16", "--max-tokens", "64"]
SERVE += ["--queue-limit", "1024", "--read-timeout", "5", "--log", "error"]
HONEST = {"messages": [{"role": "user", "content": "What is 23 + 45?"}], "temperature": 0, "max_tokens": 32}


class Server:
    def __init__(self, hearth):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(hearth), "serve", "--port", str(self.port), *SERVE]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        for _ in range(600):
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.1)
        sys.exit("the server did not start")

    def get(self, path, body=None):
        url = f"http://127.0.0.1:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        made = urllib.request.Request(url, data, {"content-type": "application/json"})
        with urllib.request.urlopen(made, timeout=ANSWER_SECONDS) as reply:
            return json.loads(reply.read() or b"null")

    def honest(self):
        return self.get("/v1/chat/completions", HONEST)["choices"][0]["message"]["content"]

    def is_idle(self):
        """Whether all sequences close within seconds."""
        for _ in range(100):
            slots = self.get("/slots/summary")
            if not any(slots[key] for key in ("sequences", "requests_running", "requests_waiting")):
                return True
            time.sleep(0.2)
        return False

    def resident(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10


def exchange(port, data):
    """All bytes of the answer. The server may answer and close before it has read everything."""
    answer = b""
    end = time.monotonic() + ANSWER_SECONDS
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as stream:
        try:
            # Without an end of its own: a half-closed connection counts as a client that left.
            stream.sendall(data)
        except OSError:
            pass
        try:
            while time.monotonic() < end:
                part = stream.recv(1 << 16)
                if not part:
                    return answer
                answer += part
        except ConnectionResetError:
            return answer
    raise TimeoutError(f"no end after {ANSWER_SECONDS} s and {len(answer)} bytes")


def fault(answer, is_head):
    """The status of an answer, and what is wrong with it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return 0, f"no answer: {answer[:100]!r}"
    status = int(words[1])
    if status >= 500:
        return status, "5xx"
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    length = fields.get(b"content-length", b"").strip()
    if is_head:
        return status, None
    if length and int(length) != len(body):
        return status, f"{len(body)} of {length.decode()} bytes"
    if fields.get(b"transfer-encoding", b"").strip() == b"chunked" and not body.endswith(b"0\r\n\r\n"):
        return status, "a stream without its end"
    if b"server_error" in body or b'"api_error"' in body:
        return status, "an error of the server in a reply"
    if status >= 400 and b"json" in fields.get(b"content-type", b""):
        error = json.loads(body).get("error")
        if not (error.get("message") if isinstance(error, dict) else error):
            return status, "an error without a message"
    return status, None


def attack(port, number):
    """Status, fault and seconds of one request."""
    what, data = hostile_requests.request(number)
    begun = time.monotonic()
    try:
        status, found = fault(exchange(port, data), data.startswith(b"HEAD "))
    except (OSError, ValueError) as error:
        status, found = 0, repr(error)
    seconds = time.monotonic() - begun
    return status, found and f"request {number} ({what}): status {status}: {found}", seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", type=int, help="send this request only and print its answer")
    args = parser.parse_args()
    server = Server(args.hearth.resolve())
    if args.only is not None:
        what, data = hostile_requests.request(args.only)
        print(what, data[:2000], exchange(server.port, data)[:4000], sep="\n")
        server.process.terminate()
        sys.exit(server.process.wait(60))
    expected, before = server.honest(), server.resident()
    statuses, faults, slowest = collections.Counter(), [], (0, None)
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        for first in range(0, args.count, HONEST_EVERY):
            numbers = range(first, min(first + HONEST_EVERY, args.count))
            answers = pool.map(lambda number: attack(server.port, number), numbers)
            for number, (status, found, seconds) in zip(numbers, answers):
                statuses[status] += 1
                slowest = max(slowest, (seconds, number))
                if found:
                    faults.append(found)
                    print(f"FAULT {found}", flush=True)
            if server.process.poll() is not None:
                sys.exit(f"the server ended with {server.process.returncode} before request {numbers.stop}")
            if server.honest() != expected:
                faults.append(f"after request {numbers.stop} an honest request has another reply")
                print(f"FAULT {faults[-1]}", flush=True)
    seconds = time.monotonic() - begun
    if not server.is_idle():
        faults.append(f"requests remain: {server.get('/slots/summary')}")
    after = server.resident()
    if after - before > MOST_GROWTH:
        faults.append(f"resident memory grew from {before >> 20} to {after >> 20} MiB")
    server.process.terminate()
    log = server.process.communicate(timeout=60)[1].decode()
    if server.process.returncode or "panicked" in log:
        faults.append(f"the server ended with {server.process.returncode}: {log[-2000:]}")
    found = {
        "requests": args.count,
        "statuses": {str(status): statuses[status] for status in sorted(statuses)},
        "slowest": {"seconds": round(slowest[0], 1), "request": slowest[1]},
        "seconds": round(seconds),
        "resident_mib": [before >> 20, after >> 20],
        "faults": len(faults),
    }
    print(*faults[:20], json.dumps(found), sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
