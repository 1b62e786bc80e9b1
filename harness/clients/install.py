#!/usr/bin/env python3
"""The clients that Hearth is tried with, pinned, each in a folder of its own.

    python3 harness/clients/install.py [NAME ...] [--into target/harness]

Node's packages come from npm and run under the pinned Node 24; Python's come from PyPI by a pinned uv.
Nothing newer than `SEEN` is resolved, so what the clients depend on is pinned too.
A folder that already holds what is wanted is left as it is. All of them together take about 13 GB.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

SEEN = "2026-11-22"
UV = "0.13.9"
NODE = "24.21.0"
# Packages of npm by client.
NPM = {
    "claude-code": {"@anthropic-ai/claude-code": "2.1.328"},
    "codex": {"@openai/codex": "0.169.0"},
    "opencode": {"opencode-ai": "1.18.33"},
    "pi": {"@earendil-works/pi-coding-agent": "0.87.1"},
    "openclaw": {"openclaw": "2026.9.6"},
    "sdk-node": {"openai": "7.57.0", "@anthropic-ai/sdk": "1.12.0"},
    "browser": {"playwright-core": "1.65.1"},
}
OPENAI, ANTHROPIC = "openai==3.54.0", "anthropic==2.12.0"
# Packages of PyPI by client.
PYPI = {
    "hermes": ["hermes-agent==0.19.0"],
    "aider": ["aider-chat==0.86.2"],
    "llm": ["llm==0.36"],
    "litellm": ["litellm[mcp]==1.106.2"],
    "lm-eval": ["lm-eval[api]==0.4.13"],
    "open-webui": ["open-webui==0.12.4"],
    "openai-sdk": [OPENAI],
    "anthropic-sdk": [ANTHROPIC],
    "sdk-python": [OPENAI, ANTHROPIC],
    "schemathesis": ["schemathesis==4.32.5"],
}


def home():
    """The folder for clients unless another is named: below `target`, which git ignores."""
    return pathlib.Path(__file__).resolve().parents[2] / "target" / "harness"


def version(name):
    """What the table calls the version of a client."""
    if name in NPM:
        return ", ".join(NPM[name].values())
    return ", ".join(wanted.partition("==")[2] for wanted in PYPI[name])


def path(folder, name):
    """The search path with which a client's own executables and the pinned Node are found."""
    places = [
        folder / name / "bin",
        folder / name / "node_modules" / ".bin",
        folder / "node" / "node_modules" / "node" / "bin",
    ]
    return os.pathsep.join([*map(str, places), os.environ["PATH"]])


def fresh(folder, wanted):
    """Whether `folder` lacks what is wanted; empties it if so."""
    stamp = folder / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return True


def npm(folder, name, packages):
    wanted = {"private": True, "dependencies": packages, "allowScripts": dict.fromkeys(packages, True)}
    place = folder / name
    if not fresh(place, wanted):
        return
    (place / "package.json").write_text(json.dumps(wanted))
    command = ["npm", "install", "--no-audit", "--no-fund", f"--before={SEEN}"]
    subprocess.run(command, cwd=place, check=True, env={**os.environ, "PATH": path(folder, name)})
    (place / "installed.json").write_text(json.dumps(wanted))


def pypi(folder, name, packages):
    place = folder / name
    if not fresh(place, packages):
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    uv = folder / "uv" / "bin" / "uv"
    command = [uv, "pip", "install", "--python", place / "bin" / "python", "--exclude-newer", SEEN, *packages]
    subprocess.run(command, check=True)
    (place / "installed.json").write_text(json.dumps(packages))


def install(folder, names):
    """Puts the named clients, and what installs and runs them, below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(name in NPM for name in names):
        npm(folder, "node", {"node": NODE})
    if any(name in PYPI for name in names) and fresh(folder / "uv", UV):
        subprocess.run([sys.executable, "-m", "venv", folder / "uv"], check=True)
        subprocess.run(
            [folder / "uv" / "bin" / "python", "-m", "pip", "install", "-q", f"uv=={UV}"], check=True
        )
        (folder / "uv" / "installed.json").write_text(json.dumps(UV))
    for name in names:
        print(f"installing {name} {version(name)}", file=sys.stderr)
        if name in NPM:
            npm(folder, name, NPM[name])
        else:
            pypi(folder, name, PYPI[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"all unless named: {', '.join([*NPM, *PYPI])}"
    )
    parser.add_argument("--into", type=pathlib.Path, default=home(), help="folder for the clients")
    args = parser.parse_args()
    unknown = set(args.names) - {*NPM, *PYPI}
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    install(args.into.resolve(), args.names or [*NPM, *PYPI])


if __name__ == "__main__":
    main()
