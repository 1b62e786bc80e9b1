#!/usr/bin/env python3
"""Runs every SDK check, Python and Node, in a network with loopback only; prints a result table.

    cargo build --release
    python3 harness/sdk/run.py [--hearth target/release/hearth] [--into target/harness]

Installs the pinned SDKs if they are missing, and starts a server with the bundled model and a scripted server
(`unicode.jsonl`). Then runs the checks beside this file. If a check fails, prints its output and exits 1.
"""

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

import install  # noqa: E402 (the path comes first)
from sandbox import Sandbox, Server, is_isolated, isolate_network  # noqa: E402

# File, server, URL suffix, and the SDKs that the file uses.
CHECKS = [
    ("openai_sdk.py", "bundled", "/v1", "openai (Python)"),
    ("responses_sdk.py", "bundled", "/v1", "openai (Python)"),
    ("anthropic_sdk.py", "bundled", "", "anthropic (Python)"),
    ("forced_sdk.py", "bundled", "", "openai, anthropic (Python)"),
    ("unicode.py", "scripted", "", "openai, anthropic (Python)"),
    ("streams.mjs", "bundled", "", "openai, @anthropic-ai/sdk (Node)"),
    ("unicode.mjs", "scripted", "", "openai, @anthropic-ai/sdk (Node)"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hearth", type=pathlib.Path, default=HERE.parents[1] / "target" / "release" / "hearth"
    )
    parser.add_argument("--into", type=pathlib.Path, default=install.home(), help="folder of the SDKs")
    args = parser.parse_args()
    folder = args.into.resolve()
    if not is_isolated():
        install.install(folder, ["sdk-python", "sdk-node"])
    isolate_network()
    out = folder / "out"
    out.mkdir(exist_ok=True)
    script = ["--script", str(HERE / "unicode.jsonl")]
    servers = {
        "bundled": Server(args.hearth.resolve(), ["--max-ctx", "8192"], out / "sdk-bundled.log"),
        "scripted": Server(args.hearth.resolve(), ["--max-ctx", "8192", *script], out / "sdk-scripted.log"),
    }
    print(f"Python: openai, anthropic {install.version('sdk-python')}; Node: {install.version('sdk-node')}")
    print("| checks | SDK | server | result |\n|---|---|---|---|")
    failed = ""
    for file, server, path, sdk in CHECKS:
        name, runner = ("sdk-python", "python") if file.endswith(".py") else ("sdk-node", "node")
        with Sandbox(folder, name, servers[server]) as sandbox:
            turn = sandbox.run([runner, HERE / file, sandbox.url + path, folder / name], {})
        passed = turn.output.count("\nok ") + turn.output.startswith("ok ")
        print(
            f"| {file} | {sdk} | {server} | {'FAIL after' if turn.code else 'pass:'} {passed} |", flush=True
        )
        if turn.code:
            failed += f"--- {file}\n{turn.output[-500:]}\n{turn.errors[-2000:]}\n"
    print(failed, end="")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
