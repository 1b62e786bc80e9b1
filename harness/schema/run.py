#!/usr/bin/env python3
"""Requests generated from `/openapi.json` by schemathesis (pinned in `clients/install.py`), against the
bundled model.

    cargo build --release
    python3 harness/schema/run.py [--hearth target/release/hearth] [--requests 5000]

Well-formed and malformed requests to every operation: none may be answered with 5xx or with a status, a type
or a shape that the document does not know, and none may go without an answer. The server itself counts the
requests. Exits 1 if schemathesis finds something, the server dies, or fewer requests than wanted came.
"""

import argparse
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "harness" / "clients"))

import install  # noqa: E402 (the path comes first)

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Short answers: the requests are judged, not the writing.
SERVE = ["--max-ctx", "2048", "--default-max-tokens", "8", "--max-sequences", "8", "--log", "error"]


def counted(url):
    """Requests by status that the server has seen."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    found = {}
    for status, count in re.findall(
        r'^hearth_http_requests_total\{.*status="(\d+)".*\} (\d+)', text, re.MULTILINE
    ):
        found[status] = found.get(status, 0) + int(count)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--into", type=pathlib.Path, default=install.home(), help="folder of the clients")
    parser.add_argument("--requests", type=int, default=5000, help="requests at least")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = args.into.resolve()
    install.install(folder, ["schemathesis"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([str(args.hearth.resolve()), "serve", "--port", str(port), *SERVE])
    try:
        for _ in range(600):
            try:
                document = json.load(urllib.request.urlopen(f"{url}/openapi.json", timeout=10))
                break
            except OSError:
                time.sleep(0.1)
        operations = sum(len(methods) for methods in document["paths"].values())
        # Operations without a body have few distinct requests, so those with one get more.
        bodies = sum(
            "requestBody" in each for methods in document["paths"].values() for each in methods.values()
        )
        examples = args.requests // bodies
        command = ["st", "run", f"{url}/openapi.json", "--checks", CHECKS, "--max-examples", str(examples)]
        command += [
            "--seed",
            str(args.seed),
            "--request-timeout",
            "60",
            "--continue-on-failure",
            "--workers",
            "1",
        ]
        command += ["--phases", "examples,coverage,fuzzing", "--generation-database", "none", "--no-color"]
        command += ["--report", "junit", "--report-junit-path", folder / "out" / "schemathesis.xml"]
        (folder / "out").mkdir(exist_ok=True)
        begun = time.monotonic()
        environment = {**os.environ, "PATH": install.path(folder, "schemathesis")}
        found = subprocess.run(list(map(str, command)), env=environment).returncode
        seconds = time.monotonic() - begun
        statuses = counted(url)
    finally:
        server.terminate()
        ended = server.wait(60)
    total = sum(statuses.values())
    print(
        f"{total} requests to {operations} operations in {seconds:.0f} s by status: {dict(sorted(statuses.items()))}"
    )
    print(f"schemathesis {install.version('schemathesis')} ended with {found}, the server with {ended}")
    sys.exit(bool(found or ended or total < args.requests or any(status >= "500" for status in statuses)))


if __name__ == "__main__":
    main()
