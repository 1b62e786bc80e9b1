#!/usr/bin/env python3
"""Load test: many concurrent streams and disconnecting clients must cause no leak, no stall and no changed
reply.

    cargo build --release
    python3 harness/load/run.py [--hearth target/release/hearth] [--minutes 5] [--streams 256]

Starts the server with the bundled model on loopback and runs in order:

alone    each prompt by itself, greedy or with a seed, in one of three dialects: the reference replies
levels   1, 8, 64 and 256 concurrent streams
storms   waves of streams that all disconnect at random times; after each, no sequence may be open within
seconds soak     streams for some minutes, half of which disconnect at random times

Every complete reply must equal the reference. While there is work, the counter of generated tokens must
advance at least every ten seconds. At the end no sequence is open, and the prefix cache has the size that it
had after a warm-up soak of four replies per stream.

Memory is the resident set size (RSS), read every second. It must be flat within two percent in two ways.

Under load, RSS rises and falls with the tokens that the open sequences hold: the cache of keys and values is
allocated as sequences grow. A line through all seconds of the soak, RSS against held tokens, shows what a
token takes. That share is taken out, relative to the mean number of tokens. The mean of each fifth of the
soak is then compared with that of the first fifth, which begins when nine of ten streams are open. A leak of
any other kind raises the later fifths. The maximum of each fifth is printed too, but says little: it shows
how many long replies happened to overlap.

While idle, the difference before and after the soak is compared with the mean under load. Exits 1 if a
check fails.
"""

import argparse
import asyncio
import json
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import typing
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEVELS = (1, 8, 64, 256)
STALL_SECONDS = 10.0
EMPTY_SECONDS = 20.0
# The server gives freed pages back every 20 seconds.
SETTLE_SECONDS = 25.0
FLAT = 0.02
FIFTHS = 5
SUBJECTS = (
    "the sea",
    "a small town",
    "the moon",
    "an old bridge",
    "bread",
    "a fox",
    "rain",
    "a train",
    "the desert",
    "two brothers",
    "a clock",
    "winter",
    "a map",
    "a song",
    "the harbour",
    "ein Haus 🏠",
    "東京",
    "नदी",
)
# Long enough to be cached and reused by the prompts that begin with it.
PREAMBLE = " ".join(
    f"Rule {number}: keep to the subject, use short words, and end in time." for number in range(16)
)
ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")


def requests():
    """The requests as (path, body)."""
    made = []
    for number, subject in enumerate(SUBJECTS):
        prompt = (PREAMBLE + "\n" if number % 4 < 2 else "") + f"Write a story about {subject}."
        drawn = {"stream": True, "seed": number, "temperature": 0 if number % 2 else 0.8}
        messages = [{"role": "user", "content": prompt}]
        tokens = 24 + 8 * (number % 7)
        made.append(
            [
                ("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, **drawn}),
                ("/v1/messages", {"messages": messages, "max_tokens": tokens, **drawn}),
                ("/v1/responses", {"input": prompt, "max_output_tokens": tokens, **drawn}),
            ][number % 3]
        )
    return made


def text_of(stream):
    """Reasoning and text of a whole stream of any of the three dialects."""
    text = ""
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices") or []:
            text += (choice["delta"].get("reasoning_content") or "") + (choice["delta"].get("content") or "")
        delta = event.get("delta")
        if isinstance(delta, dict):
            text += (delta.get("thinking") or "") + (delta.get("text") or "")
        elif isinstance(delta, str):
            text += delta
    return text


class Server:
    """The server under load, and its status."""

    def __init__(self, hearth, arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(hearth), "serve", "--port", str(self.port), "--log", "warn", *arguments]
        self.process = subprocess.Popen(command)
        for _ in range(600):
            try:
                self.get("/health")
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit("the server ended at its start")
                time.sleep(0.1)

    def get(self, path):
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30).read().decode()

    def slots(self):
        return json.loads(self.get("/slots/summary"))

    def kept(self):
        """Gauges of the prefix cache by name."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if (
                re.match(r"hearth_\w*(snapshot|cache_(bytes|entries)|prefix)\w*", line)
                and "_total" not in line
            ):
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
        return found

    def resident(self):
        """Resident memory in bytes."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) * 1024


class Sample(typing.NamedTuple):
    """The server at one second of a soak."""

    seconds: float
    resident: int
    """Bytes."""
    held: int
    """Tokens in the pages of the open sequences."""
    sequences: int


async def ask(port, path, body, leave_after=None):
    """Status and bytes of a response; status 0 if it was abandoned after `leave_after` seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        payload = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.0\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        try:
            answer = await asyncio.wait_for(reader.read(-1), leave_after or 600)
        except TimeoutError:
            return 0, b""
        return int(answer.split(b" ", 2)[1]), answer
    finally:
        writer.close()


class Load:
    """Requests to one server, and their faults."""

    def __init__(self, server, trace=None):
        self.server = server
        self.trace = trace
        self.requests = requests()
        self.alone = [None] * len(self.requests)
        self.faults = []
        self.done = self.left = 0
        # Samples of the soak.
        self.memory = []

    def fault(self, text):
        if len(self.faults) < 20:
            print(f"FAULT {text}", flush=True)
        self.faults.append(text)

    async def one(self, number, leave_after=None):
        path, body = self.requests[number]
        status, answer = await ask(self.server.port, path, body, leave_after)
        if status == 0:
            self.left += 1
            return None
        self.done += 1
        if status != 200 or not any(end in answer for end in ENDS):
            self.fault(f"{path} ended with {status}: {answer[-300:]!r}")
            return None
        text = text_of(answer)
        if self.alone[number] is None:
            self.alone[number] = text
            if not text:
                self.fault(f"{path} returned no text alone")
        elif text != self.alone[number]:
            self.fault(f"request {number}: {text!r} under load, {self.alone[number]!r} alone")
        return text

    async def streams(self, count, rounds):
        """`count` streams at once, each going through `rounds` prompts."""
        begun, done = time.monotonic(), self.done
        rng = random.Random(count)

        async def worker():
            for _ in range(rounds):
                await self.one(rng.randrange(len(self.requests)))

        await self.watched(asyncio.gather(*(worker() for _ in range(count))))
        seconds = time.monotonic() - begun
        print(
            f"{count} streams: {self.done - done} answers, {(self.done - done) / seconds:.1f} a second",
            flush=True,
        )

    async def storm(self, count, seconds):
        """A wave of streams that all disconnect within `seconds`; then no sequence may stay open."""
        rng = random.Random(seconds)
        picks = [(rng.randrange(len(self.requests)), rng.uniform(0.001, seconds)) for _ in range(count)]
        await asyncio.gather(*(self.one(number, leave) for number, leave in picks))
        await self.empty(f"a storm of {seconds} s")

    async def soak(self, count, seconds):
        """`count` concurrent streams for some seconds; half of them disconnect early."""
        end = time.monotonic() + seconds
        rng = random.Random(seconds)

        async def worker():
            while time.monotonic() < end:
                leave = rng.uniform(0.001, 8.0) if rng.random() < 0.5 else None
                await self.one(rng.randrange(len(self.requests)), leave)

        await self.watched(asyncio.gather(*(worker() for _ in range(count))))
        await self.empty(f"a soak of {seconds} s")

    async def watched(self, work):
        """Waits for `work` and checks that tokens keep being generated."""
        task = asyncio.ensure_future(work)
        last, begun = -1, time.monotonic()
        moved = begun
        self.memory = []
        while not task.done():
            slots = await asyncio.to_thread(self.server.slots)
            now = time.monotonic()
            held = slots["pool_tokens"] - slots["free_context_tokens"]
            self.memory.append(Sample(now - begun, self.server.resident(), held, slots["sequences"]))
            if self.trace:
                print(json.dumps(self.memory[-1]._asdict()), file=self.trace, flush=True)
            if slots["generated_tokens"] != last or not slots["requests_running"] + slots["requests_waiting"]:
                last, moved = slots["generated_tokens"], now
            elif now - moved > STALL_SECONDS:
                self.fault(f"no token for {now - moved:.0f} s: {slots}")
                moved = now
            await asyncio.wait([task], timeout=1.0)
        await task

    async def empty(self, after):
        """Checks that all sequences close within seconds."""
        begun = time.monotonic()
        while time.monotonic() - begun < EMPTY_SECONDS:
            slots = await asyncio.to_thread(self.server.slots)
            if not any(slots[key] for key in ("sequences", "requests_running", "requests_waiting")):
                return
            await asyncio.sleep(0.2)
        self.fault(f"after {after}, sequences or requests remain: {slots}")


async def run(load, args):
    for number in range(len(load.requests)):
        await load.one(number)
    print(f"alone: {len(load.requests)} prompts", flush=True)
    for level in LEVELS:
        if level <= args.streams:
            await load.streams(level, max(1, 32 // level))
    for seconds in (0.05, 0.5, 2.0, 0.05, 0.5):
        await load.storm(args.streams, seconds)
    print(f"storms: {load.left} left", flush=True)
    # Long enough for every slot to have held prompts and replies of all lengths, on slow devices too.
    warm = load.done + 4 * args.streams
    while load.done < warm:
        await load.soak(args.streams, args.minutes * 12)
    await asyncio.sleep(SETTLE_SECONDS)
    kept, idle = load.server.kept(), load.server.resident()
    done, left = load.done, load.left
    seconds = args.minutes * 60
    await load.soak(args.streams, seconds)
    memory = load.memory
    print(f"soak of {args.minutes} minutes: {load.done - done} answers, {load.left - left} left", flush=True)
    await asyncio.sleep(SETTLE_SECONDS)
    flat_memory(load, [sample for sample in memory if sample.seconds < seconds], args.streams)
    flat_idle(load, memory, idle, load.server.resident())
    for name, was in kept.items():
        now = load.server.kept()[name]
        print(f"{name}: {was:,.0f} -> {now:,.0f}")
        if abs(now - was) > FLAT * was:
            load.fault(f"{name} is not flat")
    for number in range(len(load.requests)):
        await load.one(number)


def fifths_of(memory, streams):
    """The samples of each fifth, from the time on at which nine of ten streams are open."""
    open_at = next((at for at, sample in enumerate(memory) if sample.sequences >= 0.9 * streams), 0)
    memory = memory[open_at:]
    begin, end = memory[0].seconds, memory[-1].seconds + 1e-3
    fifths = [[] for _ in range(FIFTHS)]
    for sample in memory:
        fifths[int(FIFTHS * (sample.seconds - begin) / (end - begin))].append(sample)
    return fifths


def flat_memory(load, memory, streams):
    """Checks memory under load: each fifth of the soak against the first, at equal tokens."""
    fifths = fifths_of(memory, streams)
    samples = [sample for fifth in fifths for sample in fifth]
    mean_held = statistics.fmean(sample.held for sample in samples)
    per_token = statistics.linear_regression(
        [sample.held for sample in samples], [sample.resident for sample in samples]
    ).slope
    print(
        "memory under load, maximum of each fifth: " + megabytes(max(s.resident for s in f) for f in fifths)
    )
    means = [
        statistics.fmean(sample.resident - per_token * (sample.held - mean_held) for sample in fifth)
        for fifth in fifths
    ]
    grown = max(means) / means[0] - 1
    print(
        f"memory under load, mean of each fifth at {mean_held:,.0f} tokens of {per_token:,.0f} bytes: "
        f"{megabytes(means)}; {grown:+.2%} at most against the first fifth"
    )
    if grown > FLAT:
        load.fault("memory under load is not flat")


def flat_idle(load, memory, before, after):
    """Checks memory with no request, before and after the soak."""
    under_load = statistics.fmean(sample.resident for sample in memory)
    grown = after - before
    print(
        f"idle memory: {megabytes([before])} -> {megabytes([after])} "
        f"({grown / before:+.2%} of it, {grown / under_load:+.2%} of the memory under load)"
    )
    if grown > FLAT * under_load:
        load.fault("idle memory is not flat")


def megabytes(values):
    return ", ".join(f"{value / 1e6:,.1f} MB" for value in values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of the soak")
    parser.add_argument("--streams", type=int, default=256, help="streams at once in storms and soak")
    parser.add_argument("--trace", type=argparse.FileType("w"), help="file for a line of memory per second")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more flags of the server")
    args = parser.parse_args()
    flags = ["--max-ctx", "1024", "--max-sequences", str(args.streams), "--queue-limit", "1024", *args.serve]
    load = Load(Server(args.hearth.resolve(), flags), args.trace)
    try:
        asyncio.run(run(load, args))
    finally:
        load.server.process.terminate()
        ended = load.server.process.wait(60)
    if ended != 0:
        load.fault(f"the server ended with {ended}")
    print(f"{load.done} answers, {load.left} left early, {len(load.faults)} faults")
    sys.exit(bool(load.faults))


if __name__ == "__main__":
    main()
