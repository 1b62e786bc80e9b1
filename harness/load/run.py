#!/usr/bin/env python3
"""Many streams at once, and clients that go away: nothing may leak, stall, or change a letter of what the others get.

    cargo build --release
    python3 harness/load/run.py [--hearth target/release/hearth] [--minutes 5] [--streams 256]

Starts the server with the bundled model on loopback and runs, one after the other:

alone    each prompt once by itself, greedy or with a seed, in one of three dialects: what it must say ever after
levels   1, 8, 64 and 256 streams at once
storms   waves of streams that all leave at random moments; after each the device must be empty within seconds
soak     streams for some minutes, of which half leave at random moments

Every answer that is read to its end must be what the prompt said alone. While there is work the counter of generated
tokens must move at least every ten seconds. At the end no sequence is left, and what is kept of prompts is what it was
after a first soak, of four answers a stream, that only warms up.

Memory is what the kernel counts as resident (RSS), read every second. It must be flat within two percent in two ways:
the most of any fifth of the soak (of five minutes: of any minute) against the most of its first fifth, while all
streams are there; and with nobody there, after the soak against before it, the difference held against the most of the
soak's first fifth. Both are printed as they are. Exits 1 if one of these does not hold.
"""

import argparse
import asyncio
import json
import pathlib
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEVELS = (1, 8, 64, 256)
STALL_SECONDS = 10.0
EMPTY_SECONDS = 20.0
# Allocators give pages back with some delay.
SETTLE_SECONDS = 3.0
FLAT = 0.02
FIFTHS = 5
SUBJECTS = ("the sea", "a small town", "the moon", "an old bridge", "bread", "a fox", "rain", "a train", "the desert",
            "two brothers", "a clock", "winter", "a map", "a song", "the harbour", "ein Haus 🏠", "東京", "नदी")
# Long enough that its state is kept and found again by the prompts that begin with it.
PREAMBLE = " ".join(f"Rule {number}: keep to the subject, use short words, and end in time." for number in range(16))
ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")


def requests():
    """The prompts: path, body, and how the text is read from an event of the stream."""
    made = []
    for number, subject in enumerate(SUBJECTS):
        wish = (PREAMBLE + "\n" if number % 4 < 2 else "") + f"Write a story about {subject}."
        drawn = {"stream": True, "seed": number, "temperature": 0 if number % 2 else 0.8}
        messages = [{"role": "user", "content": wish}]
        tokens = 24 + 8 * (number % 7)
        made.append(
            [
                ("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, **drawn}),
                ("/v1/messages", {"messages": messages, "max_tokens": tokens, **drawn}),
                ("/v1/responses", {"input": wish, "max_output_tokens": tokens, **drawn}),
            ][number % 3]
        )
    return made


def text_of(stream):
    """Reasoning and text of a whole stream of any of the three dialects."""
    said = ""
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices") or []:
            said += (choice["delta"].get("reasoning_content") or "") + (choice["delta"].get("content") or "")
        delta = event.get("delta")
        if isinstance(delta, dict):
            said += (delta.get("thinking") or "") + (delta.get("text") or "")
        elif isinstance(delta, str):
            said += delta
    return said


class Server:
    """The server under load, and what it says of itself."""

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
        return json.loads(self.get("/slots"))

    def kept(self):
        """Gauges about what is kept of prompts, by name."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if re.match(r"hearth_\w*(snapshot|cache_(bytes|entries)|prefix)\w*", line) and "_total" not in line:
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
        return found

    def resident(self):
        """Resident memory in bytes."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) * 1024



async def ask(port, path, body, leave_after=None):
    """The status and the bytes of an answer; of one that is left after some seconds, the status 0."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.0\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)
        try:
            answer = await asyncio.wait_for(reader.read(-1), leave_after or 600)
        except TimeoutError:
            return 0, b""
        return int(answer.split(b" ", 2)[1]), answer
    finally:
        writer.close()


class Load:
    """Requests against one server, and what went wrong with them."""

    def __init__(self, server):
        self.server = server
        self.requests = requests()
        self.alone = [None] * len(self.requests)
        self.faults = []
        self.done = self.left = 0
        # Seconds into the soak and the bytes resident then.
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
        said = text_of(answer)
        if self.alone[number] is None:
            self.alone[number] = said
            if not said:
                self.fault(f"{path} said nothing alone")
        elif said != self.alone[number]:
            self.fault(f"request {number}: {said!r} beside others, {self.alone[number]!r} alone")
        return said

    async def streams(self, count, rounds):
        """`count` streams at once, each going through `rounds` prompts."""
        begun, done = time.monotonic(), self.done
        rng = random.Random(count)

        async def worker():
            for _ in range(rounds):
                await self.one(rng.randrange(len(self.requests)))

        await self.watched(asyncio.gather(*(worker() for _ in range(count))))
        seconds = time.monotonic() - begun
        print(f"{count} streams: {self.done - done} answers, {(self.done - done) / seconds:.1f} a second", flush=True)

    async def storm(self, count, seconds):
        """A wave of streams that all leave within `seconds`; then the device must be empty soon."""
        rng = random.Random(seconds)
        picks = [(rng.randrange(len(self.requests)), rng.uniform(0.001, seconds)) for _ in range(count)]
        await asyncio.gather(*(self.one(number, leave) for number, leave in picks))
        await self.empty(f"a storm of {seconds} s")

    async def soak(self, count, seconds):
        """`count` streams at once for some seconds; half of them leave early."""
        end = time.monotonic() + seconds
        rng = random.Random(seconds)

        async def worker():
            while time.monotonic() < end:
                leave = rng.uniform(0.001, 8.0) if rng.random() < 0.5 else None
                await self.one(rng.randrange(len(self.requests)), leave)

        await self.watched(asyncio.gather(*(worker() for _ in range(count))))
        await self.empty(f"a soak of {seconds} s")

    async def watched(self, work):
        """Waits for `work` and sees that tokens keep coming."""
        task = asyncio.ensure_future(work)
        last, begun = -1, time.monotonic()
        moved = begun
        self.memory = []
        while not task.done():
            slots = await asyncio.to_thread(self.server.slots)
            now = time.monotonic()
            self.memory.append((now - begun, self.server.resident()))
            if slots["generated_tokens"] != last or not slots["requests_running"] + slots["requests_waiting"]:
                last, moved = slots["generated_tokens"], now
            elif now - moved > STALL_SECONDS:
                self.fault(f"no token for {now - moved:.0f} s: {slots}")
                moved = now
            await asyncio.wait([task], timeout=1.0)
        await task

    async def empty(self, after):
        """The device lets go of everybody within seconds."""
        begun = time.monotonic()
        while time.monotonic() - begun < EMPTY_SECONDS:
            slots = await asyncio.to_thread(self.server.slots)
            if not any(slots[key] for key in ("sequences", "requests_running", "requests_waiting")):
                return
            await asyncio.sleep(0.2)
        self.fault(f"after {after} this is left: {slots}")


async def run(load, told):
    for number in range(len(load.requests)):
        await load.one(number)
    print(f"alone: {len(load.requests)} prompts", flush=True)
    for level in LEVELS:
        if level <= told.streams:
            await load.streams(level, max(1, 32 // level))
    for seconds in (0.05, 0.5, 2.0, 0.05, 0.5):
        await load.storm(told.streams, seconds)
    print(f"storms: {load.left} left", flush=True)
    # Long enough for every place on the device to have held prompts and answers of all lengths, however slow it is.
    warm = load.done + 4 * told.streams
    while load.done < warm:
        await load.soak(told.streams, told.minutes * 12)
    await asyncio.sleep(SETTLE_SECONDS)
    kept, idle = load.server.kept(), load.server.resident()
    done, left = load.done, load.left
    seconds = told.minutes * 60
    await load.soak(told.streams, seconds)
    memory = load.memory
    print(f"soak of {told.minutes} minutes: {load.done - done} answers, {load.left - left} left", flush=True)
    await asyncio.sleep(SETTLE_SECONDS)
    flat_memory(load, [most(memory, seconds, fifth) for fifth in range(FIFTHS)], (idle, load.server.resident()))
    for name, was in kept.items():
        now = load.server.kept()[name]
        print(f"{name}: {was:,.0f} -> {now:,.0f}")
        if abs(now - was) > FLAT * was:
            load.fault(f"{name} is not flat")
    for number in range(len(load.requests)):
        await load.one(number)


def most(memory, seconds, fifth):
    """The most that was resident in a fifth of the soak; its last answers, after its time, belong to none."""
    begin, end = (seconds * at / FIFTHS for at in (fifth, fifth + 1))
    return max((resident for at, resident in memory if begin <= at < end), default=0)


def flat_memory(load, fifths, idle):
    """Memory under load and with nobody there, against the first fifth of the soak."""
    first = fifths[0]
    print("memory under load, the most of each fifth: " + ", ".join(f"{most / 1e6:,.1f} MB" for most in fifths))
    grown = (max(fifths) - first) / first
    print(f"memory under load: {grown:+.2%} at most against the first fifth")
    if grown > FLAT:
        load.fault("memory under load is not flat")
    before, after = idle
    grown = after - before
    print(f"memory with nobody there: {before / 1e6:,.1f} -> {after / 1e6:,.1f} MB "
          f"({grown / before:+.2%} of it, {grown / first:+.2%} of what the load takes)")
    if grown > FLAT * first:
        load.fault("memory with nobody there is not flat")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of the soak")
    parser.add_argument("--streams", type=int, default=256, help="streams at once in storms and soak")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more flags of the server")
    told = parser.parse_args()
    flags = ["--max-ctx", "1024", "--max-sequences", str(told.streams), "--queue-limit", "1024", *told.serve]
    load = Load(Server(told.hearth.resolve(), flags))
    try:
        asyncio.run(run(load, told))
    finally:
        load.server.process.terminate()
        ended = load.server.process.wait(60)
    if ended != 0:
        load.fault(f"the server ended with {ended}")
    print(f"{load.done} answers, {load.left} left early, {len(load.faults)} faults")
    sys.exit(bool(load.faults))


if __name__ == "__main__":
    main()
