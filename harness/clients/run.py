#!/usr/bin/env python3
"""Real agent clients against a running server: a plain turn and a tool turn each, headless, loopback only.

    hearth serve --max-ctx 49152 --late-system hoist &
    python3 harness/clients/run.py --install DIR [--url http://127.0.0.1:8000] [--only codex]

Installs the pinned clients from npm into DIR (Node 24 comes along) and prints a table.
A plain turn passes when the client ends well with some text.
A tool turn passes when the model called the tool, the client ran it, and its result, a marker in a file, went back.
The plain turns use each client's full prompt; so does Codex's tool turn, while Claude Code's has one tool and a short system prompt.
The wishes are worded as the bundled model learnt them; other models understand them too.
Exits 1 if a turn fails.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

PACKAGES = {
    "node": "24",
    "@anthropic-ai/claude-code": "2.1.328",
    "@openai/codex": "0.169.0",
}
MARKER = "HEARTH-4711"
LIMIT_SECONDS = 600


def install(folder):
    """Puts the pinned clients into `folder`; a folder that holds them already is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "package.json"
    wanted = {
        "private": True,
        "dependencies": PACKAGES,
        "allowScripts": {"node": True, "@anthropic-ai/claude-code": True},
    }
    if manifest.exists() and json.loads(manifest.read_text()) == wanted and (folder / "node_modules").exists():
        return
    manifest.write_text(json.dumps(wanted))
    node = folder / "node_modules" / "node" / "bin"
    for _ in range(2):
        # The second pass runs under the Node that the first one brought: clients ask for it while they install.
        path = f"{node}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True, env={**os.environ, "PATH": path})


def run(folder, work, home, command, variables):
    """Output of a client, and the seconds it took; nothing of the caller's environment but the path."""
    node = folder / "node_modules"
    env = {
        "HOME": str(home),
        "PATH": f"{node / 'node' / 'bin'}{os.pathsep}{node / '.bin'}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
        **variables,
    }
    begun = time.monotonic()
    ended = subprocess.run(
        command, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    lines = []
    for line in ended.stdout.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return ended.returncode, [line for line in lines if isinstance(line, dict)], time.monotonic() - begun


def claude_code(url, folder, work, home, arguments):
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "hearth",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "hearth",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "hearth",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "hearth",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = ["claude", "-p", *arguments, "--output-format", "stream-json", "--verbose"]
    code, events, seconds = run(folder, work, home, command, variables)
    text = next((event.get("result") for event in events if event.get("type") == "result" and not event.get("is_error")), None)
    results = [
        json.dumps(block)
        for event in events
        if event.get("type") == "user"
        for block in event["message"]["content"]
        if isinstance(block, dict) and block.get("type") == "tool_result"
    ]
    return code == 0 and bool(text), results, seconds


def codex(url, folder, work, home, arguments):
    settings = home / ".codex"
    settings.mkdir(exist_ok=True)
    (settings / "config.toml").write_text(
        'model = "hearth"\nmodel_provider = "hearth"\ncheck_for_update_on_startup = false\n'
        '[model_providers.hearth]\nname = "Hearth"\nwire_api = "responses"\nenv_key = "HEARTH_API_KEY"\n'
        f'base_url = "{url}/v1"\n[analytics]\nenabled = false\n'
    )
    command = ["codex", "exec", "--skip-git-repo-check", "--json", *arguments]
    code, events, seconds = run(folder, work, home, command, {"HEARTH_API_KEY": "none"})
    items = [event["item"] for event in events if event.get("type") == "item.completed"]
    text = any(item["type"] == "agent_message" and item["text"] for item in items)
    results = [item["aggregated_output"] for item in items if item["type"] == "command_execution"]
    return code == 0 and text, results, seconds


# How to run a client, its package, and the arguments of its tool turn.
CLIENTS = {
    "claude-code": (
        claude_code,
        "@anthropic-ai/claude-code",
        # The bundled model loses the wish among the twelve tools and the reminders of the full prompt.
        ["Please read the file with file path note", "--tools", "Read", "--system-prompt", "Use the functions whenever they fit."],
    ),
    "codex": (codex, "@openai/codex", ['Please exec the command with cmd "cat note".']),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--install", type=pathlib.Path, required=True, help="folder for the clients")
    parser.add_argument("--only", choices=sorted(CLIENTS), help="one client alone")
    told = parser.parse_args()
    folder = told.install.resolve()
    install(folder)
    print("| client | version | plain turn | tool turn |\n|---|---|---|---|")
    failed = False
    for name, (client, package, tool_turn) in CLIENTS.items():
        if told.only not in (None, name):
            continue
        cells = []
        for turn, arguments in (("plain", ["Say hello."]), ("tool", tool_turn)):
            with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
                (pathlib.Path(work) / "note").write_text(MARKER + "\n")
                try:
                    well, results, seconds = client(told.url, folder, pathlib.Path(work), pathlib.Path(home), arguments)
                except subprocess.TimeoutExpired:
                    well, results, seconds = False, [], LIMIT_SECONDS
            passed = well and (turn == "plain" or any(MARKER in result for result in results))
            failed |= not passed
            cells.append(f"{'pass' if passed else 'FAIL'} ({seconds:.0f} s)")
        print(f"| {name} | {PACKAGES[package]} | {' | '.join(cells)} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
