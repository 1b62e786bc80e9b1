#!/usr/bin/env python3
"""Forces hundreds of preemptions and compares every text with the text of the same request alone.

    cargo build --release
    python3 harness/load/preemption.py [--hearth target/release/hearth] [--preemptions 300] [--minutes 10]

Starts the server with the bundled pair, a KV pool of one context for sixteen sequences, no reserve at admission,
and a folder of saved prefixes. Each request first runs alone, once. Then sixteen streams send them in random order until the server has counted
`--preemptions`. Half the requests are drawn with a seed, a third are held to a schema, all are drafted; a quarter of
the streams are closed early. Between two halves of the run the server restarts and restores prefixes from the folder.

A text that differs, a status other than 200, or a run that ends before the count is reached is a failure. Exits 1.
"""

import argparse
import asyncio
import pathlib
import random
import re
import sys
import tempfile
import time

from run import ROOT, Load, Server

STREAMS = 16
CONTEXT = 1024
FLAGS = ["--max-ctx", str(CONTEXT), "--kv-pool", str(CONTEXT), "--max-sequences", str(STREAMS), "--queue-limit", "1024",
         "--kv-cache-min-tokens", "64", "--kv-reserve", "0", "--ddtree-cost-stop", "off"]
TOPICS = ("the sea", "bread", "an old bridge", "a fox", "rain", "a clock", "winter", "a map", "ein Haus 🏠", "東京")
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "lines": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 4, "maxItems": 8},
    },
    "required": ["title", "lines"],
    "additionalProperties": False,
}


def requests():
    """Path and body of each request. Prompts end just before a page of 256 tokens does, so that all grow at once."""
    made = []
    for number in range(24):
        rules = [f"Rule {number + rule}: keep to the subject, use short words, and end in time." for rule in range(8)]
        prompt = " ".join(rules) + f"\nWrite a long story about {TOPICS[number % len(TOPICS)]}."
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 110 + 10 * (number % 7),
            "stream": True,
            "seed": number,
            "temperature": 0 if number % 2 else 0.9,
        }
        if number % 3 == 2:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}
        else:
            body["ignore_eos"] = True
        made.append(("/v1/chat/completions", body))
    return made


def counter(server, name):
    """The value of a counter or gauge, 0 where the server has none of that name."""
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", server.get("/metrics"), re.MULTILINE)
    return float(found.group(1)) if found else 0.0


async def run_until(load, preemptions, deadline):
    """Sixteen streams until the server has counted `preemptions`; the count."""
    rng = random.Random(len(load.faults) + preemptions)
    count = 0.0

    async def worker():
        while count < preemptions and time.monotonic() < deadline:
            leave = rng.uniform(0.01, 3.0) if rng.random() < 0.25 else None
            await load.one(rng.randrange(len(load.requests)), leave)

    async def watch():
        nonlocal count
        while count < preemptions and time.monotonic() < deadline:
            count = counter(load.server, "hearth_preemptions_total")
            await asyncio.sleep(0.5)

    await asyncio.gather(watch(), *(worker() for _ in range(STREAMS)))
    await load.empty("the run")
    return count


def half(arguments, flags, texts, preemptions, seconds):
    """Runs one server until it has preempted often enough; its `Load`, with the faults."""
    load = Load(Server(arguments.hearth.resolve(), flags))
    load.requests, load.alone = requests(), texts
    try:
        for number in range(len(load.requests)):
            if texts[number] is None:
                asyncio.run(load.one(number))
        count = asyncio.run(run_until(load, preemptions, time.monotonic() + seconds))
        restored = counter(load.server, "hearth_prefix_store_hits_total")
    finally:
        load.server.process.terminate()
        load.server.process.wait(60)
    print(
        f"{count:.0f} preemptions, {load.done} answers, {load.left} left early, {restored:.0f} restores, "
        f"{len(load.faults)} faults",
        flush=True,
    )
    if count < preemptions:
        load.fault(f"{count:.0f} preemptions in {seconds:.0f} s, {preemptions} are asked for")
    return load


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--preemptions", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of the whole run")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more flags of the server")
    arguments = parser.parse_args()
    texts = [None] * len(requests())
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, "--kv-cache-dir", folder, *arguments.serve]
        for _ in range(2):
            load = half(arguments, flags, texts, (arguments.preemptions + 1) // 2, arguments.minutes * 30)
            faults += load.faults
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
