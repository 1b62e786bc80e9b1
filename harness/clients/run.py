#!/usr/bin/env python3
"""Runs real clients headless against a server in a network with loopback only; prints a result table.

    cargo build --release
    python3 harness/clients/run.py [NAME ...] [--hearth target/release/hearth] [--into target/harness]

Installs missing pinned clients (`install.py`), enters a new network namespace and starts the server there.
Each client runs three turns through a recording proxy (`recorder.py`):

plain     the client exits with 0 and prints the model's text
streamed  the same, and the response arrived in parts as a stream with its last event
tool      the model called a tool, the client ran it, and the result (a marker in a file) went to the model

Clients that can disable streaming run the plain turn without it. In every turn, all inference requests must
succeed. The configuration comes from the client's page (`NAME.md`), or with `--connect` from `hearth
connect`; with `--launch`, `hearth launch` starts the client. Runs test all three. The server runs the bundled model. If that model cannot follow a client's tool
turn, `hearth serve --script replies.jsonl` replays a model's output. It replaces logits only, and the table
shows `scripted`. Exits 1 if a turn fails. `out/NAME-TURN.txt` in the clients' folder has the details of each
turn.
"""

import argparse
import pathlib
import sys

import install
from agents import AGENTS
from programs import PROGRAMS
from sandbox import MARKER, Sandbox, Server, is_isolated, isolate_network

HERE = pathlib.Path(__file__).resolve().parent
SERVE = ["--model-name", "hearth", "--max-ctx", "65536", "--late-system", "hoist"]


def check(turn, kind, streaming):
    """The faults of a turn; an empty list if it passes."""
    faults = []
    if turn.code != 0:
        faults.append(f"the client exited with {turn.code}")
    requests = turn.inference_requests
    if not requests:
        faults.append("no inference request arrived")
    faults += [f"{each.method} {each.path} returned {each.status}" for each in turn.failed_requests]
    texts = [turn.expected] if turn.expected else [each.text for each in requests if each.text]
    # After a tool result, a small model may end its turn without text.
    if not any(map(turn.shows, texts)) and (texts or kind != "tool"):
        faults.append("the client does not print the model's text")
    if streaming is not None and any(each.streamed != streaming for each in requests):
        faults.append("a response was not streamed" if streaming else "a response was streamed")
    if kind == "streamed" and not any(
        each.streamed and each.is_complete and each.parts > 1 for each in requests
    ):
        faults.append("no stream arrived in parts with its last event")
    has_marker = [MARKER.encode() in each.body for each in requests]
    if kind == "tool" and (not any(has_marker) or has_marker[0]):
        faults.append("no request contains a tool result")
    return faults


def turns(name):
    """The turns of a client: kind, function, and whether its requests must stream (None: either)."""
    if name in AGENTS:
        client, prompt = AGENTS[name]
        yield "plain", lambda sandbox: client(sandbox, "Say hello.", False), None
        yield "streamed", lambda sandbox: client(sandbox, "Count to three.", True), None
        yield "tool", lambda sandbox: client(sandbox, prompt, True), None
    else:
        yield from PROGRAMS[name]


def write_log(folder, name, kind, turn, faults):
    """Writes the requests, responses and output of a turn to a file."""
    lines = [f"{name} {kind}: {faults or 'pass'}", f"exit {turn.code}, {turn.seconds:.1f} s"]
    for exchange in turn.exchanges:
        lines.append(
            f"{exchange.method} {exchange.path} -> {exchange.status} streamed={exchange.streamed} "
            f"parts={exchange.parts} complete={exchange.is_complete} disconnected={exchange.disconnected} "
            f"prompt_tokens={exchange.prompt_tokens} {exchange.seconds:.1f} s"
        )
        if exchange.is_inference:
            lines.append("  request " + exchange.body.decode("utf-8", "replace"))
            lines.append("  text " + repr(exchange.text))
            lines.append("  response " + exchange.response[-4000:].decode("utf-8", "replace"))
    lines += ["--- stdout", turn.output, "--- stderr", turn.errors]
    (folder / f"{name}-{kind}.txt").write_text("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {', '.join([*AGENTS, *PROGRAMS])}"
    )
    parser.add_argument(
        "--hearth", type=pathlib.Path, default=HERE.parents[1] / "target" / "release" / "hearth"
    )
    parser.add_argument("--into", type=pathlib.Path, default=install.home(), help="folder of the clients")
    parser.add_argument("--turn", choices=("plain", "streamed", "tool"), help="run only this turn")
    parser.add_argument("--script", type=pathlib.Path, default=HERE / "replies.jsonl")
    parser.add_argument(
        "--unscripted", action="store_true", help="use the bundled model in every turn, without a script"
    )
    parser.add_argument("--launch", action="store_true", help="start the clients with `hearth launch`")
    parser.add_argument("--scripted", action="store_true", help="replay the script in every turn")
    parser.add_argument(
        "--connect", action="store_true", help="configure the clients with `hearth connect`"
    )
    args = parser.parse_args()
    names = args.names or (LAUNCHED if args.launch else [*AGENTS, *PROGRAMS])
    if unknown := set(names) - {*AGENTS, *PROGRAMS}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    folder = args.into.resolve()
    if not is_isolated():
        install.install(folder, names)
    isolate_network()
    out = folder / "out"
    out.mkdir(exist_ok=True)
    servers = {}
    connect = args.hearth.resolve() if args.connect else None
    launch = args.hearth.resolve() if args.launch else None
    print("| client | version | plain | streamed | tool |\n|---|---|---|---|---|")
    failed = False
    for name in names:
        cells = {}
        for kind, client, streaming in turns(name):
            if args.turn not in (None, kind):
                continue
            if isinstance(client, str):
                cells[kind] = [client]
                continue
            scripted = args.scripted or (kind == "tool" and name in SCRIPTED and not args.unscripted)
            if scripted not in servers:
                arguments = [*SERVE, *(["--script", str(args.script)] if scripted else [])]
                log = out / ("scripted.log" if scripted else "serve.log")
                servers[scripted] = Server(args.hearth.resolve(), arguments, log)
            own = None if name in BY_PAGE else connect
            with Sandbox(folder, name, servers[scripted], own, launch) as sandbox:
                turn = client(sandbox)
            faults = check(turn, kind, streaming)
            write_log(out, name, kind, turn, faults)
            failed |= bool(faults)
            tokens = max((exchange.prompt_tokens for exchange in turn.exchanges), default=0)
            result = f"FAIL: {'; '.join(faults)}" if faults else f"pass{', scripted' if scripted else ''}"
            counted = f"{tokens:,} tokens, " if tokens else ""
            cells.setdefault(kind, []).append(f"{result} ({counted}{turn.seconds:.0f} s)")
        row = [
            name,
            install.version(name),
            *("; ".join(cells.get(kind, [])) for kind in ("plain", "streamed", "tool")),
        ]
        print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(failed)


# Clients that `hearth connect` does not know.
BY_PAGE = {"cline"}
# Clients that `hearth launch` starts with words for one headless turn.
LAUNCHED = ["claude-code", "codex", "opencode", "pi", "qwen-code", "copilot", "kilo", "kimi", "continue"]
# Clients with a tool turn that the bundled model cannot follow.
SCRIPTED = {
    *("claude-code", "opencode", "pi", "openclaw", "qwen-code"),
    *("copilot", "cline", "kilo", "kimi", "continue"),
}

if __name__ == "__main__":
    main()
