#!/usr/bin/env python3
"""Runs real clients headless against a server, in a network with loopback only, and prints a table of
results.

    cargo build --release
    python3 harness/clients/run.py [NAME ...] [--hearth target/release/hearth] [--into target/harness]

Installs the pinned clients that are missing (`install.py`), then goes into a network namespace of its own,
starts the server there, and has each client do three turns through a relay that keeps what goes over the wire
(`recorder.py`):

plain     the client ends well and shows what the model wrote
streamed  the same, and the answer came as a stream in parts, with its last event
tool      the model called a tool, the client ran it, and its result, a marker in a file, went back to the
model

Clients that can turn streaming off do the plain turn without it. In no turn may a request to the model be
refused. How each is pointed at the server is read from its page (`NAME.md`), or with `--connect` written by
`hearth connect`, so these are tried too. The server runs the bundled model. Where that cannot follow a
client's tool turn, `hearth serve --script replies.jsonl` replays what a model would write: logits only, all
else is real; the table says `scripted`. Exits 1 if a turn fails; what happened then is in OUT/NAME-TURN.txt.
"""

import argparse
import pathlib
import sys

import install
import world
from agents import AGENTS
from programs import PROGRAMS

HERE = pathlib.Path(__file__).resolve().parent
SERVE = ["--model-name", "hearth", "--max-ctx", "65536", "--late-system", "hoist"]


def judge(turn, kind, streams):
    """What is wrong with a turn, or nothing."""
    faults = []
    if turn.code != 0:
        faults.append(f"the client ended with {turn.code}")
    if not turn.asked:
        faults.append("nothing was asked")
    faults += [f"{each.method} {each.path} was answered {each.status}" for each in turn.refused]
    texts = [turn.expects] if turn.expects else [exchange.said for exchange in turn.asked if exchange.said]
    # After a tool's result a small model may end without a word.
    if not any(map(turn.shows, texts)) and (texts or kind != "tool"):
        faults.append("the client shows nothing of what the model wrote")
    if streams is not None and any(exchange.streamed != streams for exchange in turn.asked):
        faults.append("streamed where it should not, or not where it should")
    if kind == "streamed" and not any(each.streamed and each.whole and each.parts > 1 for each in turn.asked):
        faults.append("no stream came through in parts with its last event")
    knew = [world.MARKER.encode() in exchange.body for exchange in turn.asked]
    if kind == "tool" and (not any(knew) or knew[0]):
        faults.append("no result of a tool went back")
    return faults


def turns(name):
    """The turns of a client: kind, what runs it, and whether its requests must stream (None: as it likes)."""
    if name in AGENTS:
        client, prompt = AGENTS[name]
        yield "plain", lambda place: client(place, "Say hello.", False), None
        yield "streamed", lambda place: client(place, "Count to three.", True), None
        yield "tool", lambda place: client(place, prompt, True), None
    else:
        yield from PROGRAMS[name]


def note(folder, name, kind, turn, faults):
    """Keeps what happened in a turn."""
    lines = [f"{name} {kind}: {faults or 'pass'}", f"exit {turn.code}, {turn.seconds:.1f} s"]
    for exchange in turn.exchanges:
        lines.append(
            f"{exchange.method} {exchange.path} -> {exchange.status} streamed={exchange.streamed} parts={exchange.parts} "
            f"whole={exchange.whole} left={exchange.left} prompt={exchange.prompt_tokens} {exchange.seconds:.1f} s"
        )
        if exchange.infers:
            lines += ["  asked " + exchange.body.decode("utf-8", "replace"), "  said " + repr(exchange.said)]
            lines.append("  answered " + exchange.answered[-4000:].decode("utf-8", "replace"))
    lines += ["--- stdout", turn.output, "--- stderr", turn.errors]
    (folder / f"{name}-{kind}.txt").write_text("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"all unless named: {', '.join([*AGENTS, *PROGRAMS])}"
    )
    parser.add_argument(
        "--hearth", type=pathlib.Path, default=HERE.parents[1] / "target" / "release" / "hearth"
    )
    parser.add_argument("--into", type=pathlib.Path, default=install.home(), help="folder of the clients")
    parser.add_argument("--turn", choices=("plain", "streamed", "tool"), help="one turn alone")
    parser.add_argument("--script", type=pathlib.Path, default=HERE / "replies.jsonl")
    parser.add_argument(
        "--unscripted", action="store_true", help="the bundled model alone, whatever it can follow"
    )
    parser.add_argument(
        "--connect", action="store_true", help="let `hearth connect` point the clients at the server"
    )
    args = parser.parse_args()
    names = args.names or [*AGENTS, *PROGRAMS]
    if unknown := set(names) - {*AGENTS, *PROGRAMS}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    folder = args.into.resolve()
    if world.INSIDE not in world.os.environ:
        install.install(folder, names)
    world.leave_the_network()
    out = folder / "out"
    out.mkdir(exist_ok=True)
    servers = {False: world.Server(args.hearth.resolve(), SERVE, out / "serve.log")}
    connect = args.hearth.resolve() if args.connect else None
    print("| client | version | plain | streamed | tool |\n|---|---|---|---|---|")
    failed = False
    for name in names:
        cells = {}
        for kind, client, streams in turns(name):
            if args.turn not in (None, kind):
                continue
            if isinstance(client, str):
                cells[kind] = [client]
                continue
            scripted = kind == "tool" and name in SCRIPTED and not args.unscripted
            if scripted not in servers:
                arguments = [*SERVE, "--script", str(args.script)]
                servers[scripted] = world.Server(args.hearth.resolve(), arguments, out / "scripted.log")
            with world.World(folder, name, servers[scripted], connect) as place:
                turn = client(place)
            faults = judge(turn, kind, streams)
            note(out, name, kind, turn, faults)
            failed |= bool(faults)
            tokens = max((exchange.prompt_tokens for exchange in turn.exchanges), default=0)
            verdict = f"FAIL: {'; '.join(faults)}" if faults else f"pass{', scripted' if scripted else ''}"
            counted = f"{tokens:,} tokens, " if tokens else ""
            cells.setdefault(kind, []).append(f"{verdict} ({counted}{turn.seconds:.0f} s)")
        row = [
            name,
            install.version(name),
            *("; ".join(cells.get(kind, [])) for kind in ("plain", "streamed", "tool")),
        ]
        print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(failed)


# Clients whose tool turn the bundled model cannot follow.
SCRIPTED = {"openclaw"}

if __name__ == "__main__":
    main()
