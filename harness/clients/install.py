#!/usr/bin/env python3
"""Installs the pinned clients that Hearth is tested with, each in a folder of its own.

    python3 harness/clients/install.py [NAME ...] [--into target/harness]

Node packages come from npm and run under the pinned Node 24. A pinned uv installs Python packages from
PyPI. No package newer than `NEWEST` is resolved, so the clients' dependencies are pinned too. Folders that
are up to date stay unchanged. All clients together take about 13 GB.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

NEWEST = "2026-11-22"
UV = "0.13.9"
NODE = "24.21.0"
# Packages of npm by client.
NPM = {
    "claude-code": {"@anthropic-ai/claude-code": "2.1.328"},
    "codex": {"@openai/codex": "0.169.0"},
    "opencode": {"opencode-ai": "1.18.33"},
    "pi": {"@earendil-works/pi-coding-agent": "0.87.1"},
    "openclaw": {"openclaw": "2026.9.6"},
    "qwen-code": {"@qwen-code/qwen-code": "0.24.4"},
    "copilot": {"@github/copilot": "1.0.102"},
    "cline": {"cline": "3.0.65"},
    "kilo": {"@kilocode/cli": "7.7.7"},
    "kimi": {"@moonshot-ai/kimi-code": "2.1.0"},
    "continue": {"@continuedev/cli": "1.5.47"},
    "ai-sdk": {
        "ai": "7.0.173",
        "@ai-sdk/openai": "4.0.118",
        "@ai-sdk/anthropic": "4.0.105",
        "@ai-sdk/openai-compatible": "3.0.92",
        "zod": "4.6.7",
    },
    "sdk-node": {"openai": "7.57.0", "@anthropic-ai/sdk": "1.12.0"},
    "browser": {"playwright-core": "1.65.1", "axe-core": "4.14.1"},
    # The SDKs as one script for a page.
    "sdk-browser": {"openai": "7.57.0", "@anthropic-ai/sdk": "1.12.0", "esbuild": "0.28.2"},
    "dom": {"jsdom": "26.1.0"},
    "openapi-linter": {"@redocly/cli": "2.77.0"},
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
    "ollama-sdk": ["ollama==0.6.3"],
    "sdk-python": [OPENAI, ANTHROPIC],
    "langchain": ["langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"],
    "pydantic-ai": ["pydantic-ai-slim[openai,anthropic]==2.68.0"],
    "openai-agents": ["openai-agents==0.24.0"],
    "schemathesis": ["schemathesis==4.32.5"],
}


def home():
    """The default folder of the clients, below `target`, which git ignores."""
    return pathlib.Path(__file__).resolve().parents[2] / "target" / "harness"


def version(name):
    """The version of a client as the result table shows it."""
    if name in NPM:
        return ", ".join(NPM[name].values())
    return ", ".join(package.partition("==")[2] for package in PYPI[name])


def path(folder, name):
    """The `PATH` with a client's own executables and the pinned Node first."""
    folders = [
        folder / name / "bin",
        folder / name / "node_modules" / ".bin",
        folder / "node" / "node_modules" / "node" / "bin",
    ]
    return os.pathsep.join([*map(str, folders), os.environ["PATH"]])


def needs_install(folder, wanted):
    """Whether `folder` differs from `wanted`; empties it if so."""
    stamp = folder / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return True


def npm(folder, name, packages):
    wanted = {"private": True, "dependencies": packages, "allowScripts": dict.fromkeys(packages, True)}
    target = folder / name
    if not needs_install(target, wanted):
        return
    (target / "package.json").write_text(json.dumps(wanted))
    command = ["npm", "install", "--no-audit", "--no-fund", f"--before={NEWEST}"]
    subprocess.run(command, cwd=target, check=True, env={**os.environ, "PATH": path(folder, name)})
    (target / "installed.json").write_text(json.dumps(wanted))


def pypi(folder, name, packages):
    target = folder / name
    if not needs_install(target, packages):
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    uv = folder / "uv" / "bin" / "uv"
    python = target / "bin" / "python"
    command = [uv, "pip", "install", "--python", python, "--exclude-newer", NEWEST, *packages]
    subprocess.run(command, check=True)
    (target / "installed.json").write_text(json.dumps(packages))


def install(folder, names):
    """Installs the named clients and the tools that install and run them below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(name in NPM for name in names):
        npm(folder, "node", {"node": NODE})
    if any(name in PYPI for name in names) and needs_install(folder / "uv", UV):
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
        "names", nargs="*", metavar="NAME", help=f"default: all of {', '.join([*NPM, *PYPI])}"
    )
    parser.add_argument("--into", type=pathlib.Path, default=home(), help="folder for the clients")
    args = parser.parse_args()
    unknown = set(args.names) - {*NPM, *PYPI}
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    install(args.into.resolve(), args.names or [*NPM, *PYPI])


if __name__ == "__main__":
    main()
