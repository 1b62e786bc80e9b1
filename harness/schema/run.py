#!/usr/bin/env python3
"""Sends requests that schemathesis generates from `/openapi.json` to a server with the bundled model.

    cargo build --release
    python3 harness/schema/run.py [--hearth target/release/hearth] [--requests 5000]

`clients/install.py` pins schemathesis. It sends well-formed and malformed requests to every operation. Each
must get a response whose status, content type and schema the document lists, and none a 5xx. The server
counts the requests. Exits 1 on a finding of schemathesis, if the server dies, or after too few requests.
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
# Short replies: the check tests requests and responses, not generated text.
SERVE = ["--max-ctx", "2048", "--default-max-tokens", "8", "--max-sequences", "8", "--log", "error"]


def request_counts(url):
    """The server's request counts by status."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    counts = {}
    for status, count in re.findall(
        r'^hearth_http_requests_total\{.*status="(\d+)".*\} (\d+)', text, re.MULTILINE
    ):
        counts[status] = counts.get(status, 0) + int(count)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--into", type=pathlib.Path, default=install.home(), help="folder of the clients")
    parser.add_argument("--requests", type=int, default=5000, help="minimum number of requests")
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
        # Operations without a body have few distinct requests, so operations with a body get more.
        with_body = sum(
            "requestBody" in each for methods in document["paths"].values() for each in methods.values()
        )
        examples = args.requests // with_body
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
        started = time.monotonic()
        environment = {**os.environ, "PATH": install.path(folder, "schemathesis")}
        exit_code = subprocess.run(list(map(str, command)), env=environment).returncode
        seconds = time.monotonic() - started
        statuses = request_counts(url)
    finally:
        server.terminate()
        server_code = server.wait(60)
    total = sum(statuses.values())
    by_status = dict(sorted(statuses.items()))
    print(f"{total} requests to {operations} operations in {seconds:.0f} s by status: {by_status}")
    version = install.version("schemathesis")
    print(f"schemathesis {version} exited with {exit_code}, the server with {server_code}")
    server_errors = any(status >= "500" for status in statuses)
    sys.exit(bool(exit_code or server_code or total < args.requests or server_errors))


if __name__ == "__main__":
    main()
