#!/usr/bin/env python3
"""Lints the OpenAPI document of a running `hearth`, with the pinned Redocly CLI.

    python3 harness/openapi/lint.py [target/debug/hearth] [--into target/harness]

The linter is installed by `harness/clients/install.py openapi-linter`. Exits with 1 on any finding.
"""

import argparse
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "harness" / "clients"))
import install  # noqa: E402


def document(hearth):
    """The document as a client gets it; it is served while the model loads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([hearth, "serve", "--device", "cpu", "--port", str(port), "--log", "error"])
    try:
        for _ in range(1200):
            try:
                url = f"http://127.0.0.1:{port}/openapi.json"
                return urllib.request.urlopen(url, timeout=10).read()
            except OSError:
                if server.poll() is not None:
                    sys.exit("the server ended at its start")
                time.sleep(0.1)
        sys.exit("the server did not open its port within 120 s")
    finally:
        server.kill()
        server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hearth", nargs="?", type=pathlib.Path, default=ROOT / "target/debug/hearth")
    parser.add_argument("--into", type=pathlib.Path, default=install.home(), help="folder of the linter")
    args = parser.parse_args()
    folder = args.into.resolve()
    environment = {
        **os.environ,
        "PATH": install.path(folder, "openapi-linter"),
        # The linter would look for newer versions and report its use.
        "CI": "true",
        "REDOCLY_TELEMETRY": "off",
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "openapi.json"
        path.write_bytes(document(args.hearth.resolve()))
        command = ["redocly", "lint", f"--config={HERE / 'redocly.yaml'}", "--max-problems=1000", str(path)]
        sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main()
