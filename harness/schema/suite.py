#!/usr/bin/env python3
"""Sends schemas that others wrote to a server with the bundled model and counts what becomes of them.

    cargo build --release
    python3 harness/schema/suite.py [--hearth target/release/hearth] [--draft draft2020-12] [--update]
    git clone --bare https://github.com/guidance-ai/jsonschemabench
    python3 harness/schema/suite.py --benchmark jsonschemabench.git [--update]

The schemas are the official JSON Schema suite, or a sample of JSONSchemaBench (`benchmark.py`). Each goes out
twice: as a strict `json_schema`, and as the parameters of a strict tool if an object matches it. A finished
reply is checked by the `jsonschema` package, whose source archive holds the suite. No request may be answered
with 5xx or not at all. `counts.json` beside this file keeps the counts. Exits 1 if one got worse; `--update`
writes better ones.
"""

import argparse
import concurrent.futures
import json
import pathlib
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request

import benchmark

ROOT = pathlib.Path(__file__).resolve().parents[2]
COUNTS = pathlib.Path(__file__).with_name("counts.json")
# The validator and, in its source archive, the suite.
PACKAGE, VERSION = "jsonschema", "4.26.0"
SERVE = ["--max-ctx", "32768", "--max-sequences", "8", "--log", "error"]
# Counts that may only fall; `valid` may only rise.
WORSE_IF_MORE = ["invalid", "server_error", "refused", "unsatisfiable"]


def install(folder):
    """Unpacks the suite below `folder` and returns the folder of its tests."""
    target = folder / f"{PACKAGE}-{VERSION}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip"]
        source = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder]
        subprocess.run([*pip, *source, f"{PACKAGE}=={VERSION}"], check=True)
        with tarfile.open(folder / f"{target.name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return target / "json" / "tests"


def validator(folder):
    """The validator's module, installed below `folder`."""
    target = folder / "packages"
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", target]
        subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
    sys.path.insert(0, str(target))
    import jsonschema

    return jsonschema


def cases(tests, draft):
    """Name, schema and valid values of every case of a draft that needs no other document."""
    for path in sorted((tests / draft).glob("*.json")):
        for case in json.loads(path.read_text()):
            if "localhost:1234" in json.dumps(case["schema"]):
                continue
            valid = [test["data"] for test in case["tests"] if test["valid"]]
            yield f"{path.stem}: {case['description']}", case["schema"], valid


def chat(url, fields):
    """Status and body of a chat completion."""
    body = {"messages": [{"role": "user", "content": "Fill in the form."}], "max_tokens": 160, "seed": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({**body, **fields}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")
    except OSError as error:
        return 599, f"no answer: {error}"


def as_json_schema(schema):
    form = {"name": "form", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def as_tool(schema):
    function = {"name": "form", "strict": True, "parameters": schema}
    choice = {"type": "function", "function": {"name": "form"}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


def outcome(reply, schema, checker):
    """What became of one request, and a note."""
    status, body = reply
    if status >= 500:
        return "server_error", str(body)
    if status != 200:
        message = str(body.get("error", {}).get("message"))
        return ("unsatisfiable" if "nsatisfiable" in message else "refused"), message
    choice = body["choices"][0]
    if choice["finish_reason"] == "length":
        return "unfinished", ""
    calls = choice["message"].get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
    try:
        checker(schema).validate(json.loads(text))
    except Exception as error:  # whatever the validator finds wrong is a finding
        return "invalid", f"{text!r}: {str(error).splitlines()[0]}"
    return "valid", text


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(url, found, checker):
    """Counts and notes by way and outcome."""
    jobs = []
    for name, schema, valid in found:
        jobs.append(("json_schema", name, schema, as_json_schema(schema), bool(valid)))
        if isinstance(schema, dict) and any(isinstance(value, dict) for value in valid):
            jobs.append(("tool", name, schema, as_tool(schema), True))
    counts = {"json_schema": {}, "tool": {}}
    notes = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = pool.map(lambda job: chat(url, job[3]), jobs)
        for (way, name, schema, _, is_satisfiable), reply in zip(jobs, replies):
            kind, note = outcome(reply, schema, checker)
            if kind == "unsatisfiable" and not is_satisfiable:
                kind = "refused"
            counts[way][kind] = counts[way].get(kind, 0) + 1
            if kind not in ("valid", "unfinished"):
                notes.append(f"{way} {kind}: {name}: {note}")
    return counts, notes


def got_worse(before, after):
    """The counts that are worse than before, as sentences."""
    found = []
    for way, counts in after.items():
        kept = before.get(way, {})
        for kind in WORSE_IF_MORE:
            if counts.get(kind, 0) > kept.get(kind, 0):
                found.append(f"{way}: {kind} rose from {kept.get(kind, 0)} to {counts[kind]}")
        if counts.get("valid", 0) < kept.get("valid", 0):
            found.append(f"{way}: valid fell from {kept['valid']} to {counts.get('valid', 0)}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--into", type=pathlib.Path, default=ROOT / "target" / "harness" / "schema-suite")
    parser.add_argument("--draft", default="draft2020-12")
    parser.add_argument("--benchmark", type=pathlib.Path, help="clone of JSONSchemaBench")
    parser.add_argument("--notes", type=pathlib.Path, help="file for a line per refusal or failure")
    parser.add_argument("--update", action="store_true", help="write the counts if none got worse")
    args = parser.parse_args()
    folder = args.into.resolve()
    jsonschema = validator(folder)
    newest = jsonschema.Draft202012Validator
    if args.benchmark:
        suite, found = "jsonschemabench", list(benchmark.cases(args.benchmark))

        def checker(schema):
            return jsonschema.validators.validator_for(schema, default=newest)(schema)

    else:
        suite, found = args.draft, list(cases(install(folder), args.draft))
        checker = {"draft2020-12": newest, "draft7": jsonschema.Draft7Validator}[suite]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([str(args.hearth.resolve()), "serve", "--port", str(port), *SERVE])
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=10)
                break
            except OSError:
                time.sleep(0.1)
        counts, notes = run(url, found, checker)
    finally:
        server.terminate()
        server.wait(60)
    if args.notes:
        args.notes.write_text("\n".join(notes) + "\n")
    kept = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    print(json.dumps({suite: counts}, indent=1, sort_keys=True))
    worse = got_worse(kept.get(suite, counts), counts)
    if args.update and not worse:
        kept[suite] = counts
        COUNTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    print("\n".join(worse))
    sys.exit(bool(worse or server.returncode))


if __name__ == "__main__":
    main()
