#!/usr/bin/env python3
"""Records conversations of Claude Code and Codex for `turns.py --recorded`.

    python3 harness/cache/record.py [claude-code] [codex] [--hearth target/release/hearth]
        [--into target/harness]

A conversation has two user messages and tool calls. `harness/clients` installs the pinned clients. They run
in a network namespace with loopback only. A scripted server replies, so their tool calls are the same in
every run. The clients produce everything else: blocks, tools, reminders, tool results, their order, and how
a message changes between requests. Instructions and descriptions are copyrighted, so each word is replaced
by another of the same length. Names, tags, schemas and the conversation itself stay. Folders, user names and
ids are replaced too. Writes CLIENT.json beside this file: in `requests` and `parts`, {"$": n} refers to
entry n of `parts`.
"""

import argparse
import json
import pathlib
import re
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "clients"))

import install  # noqa: E402
import pages  # noqa: E402
from sandbox import Sandbox, Server, is_isolated, isolate_network  # noqa: E402

SERVE = ["--model-name", "hearth", "--max-ctx", "65536"]
# Sources of `crates/decode/src` that the tools read, by file name in the client's folder.
SOURCES = {
    "accept.rs": "scheduler/accept.rs",
    "surprisal.rs": "speculation/surprisal.rs",
    "event.rs": "event.rs",
    "cancel.rs": "scheduler/cancel.rs",
    "stats.rs": "stats.rs",
    "error.rs": "error.rs",
}
MESSAGES = [
    "Please read the sources in src and tell what each is for.",
    "And which of them knows of the device?",
]
# Parts with fewer characters of JSON stay inline.
INLINE_CHARS = 64
WORDS = """a i
of to in it is as at by on or we an so if no
the and for you all are can use not any one two new set get let may its out run see ask
with that from this file tool when code must only text name path each call list line work then them what
other which value given where under first input order after while write check plain shall there files
should result before number always string answer passed beside change longer either single return
command content context without another message through request between nothing against
response function included previous complete optional directory
""".split()


def calls(client):
    """The tool calls for the first user message, and the one for the second, in the model's markup."""

    def call(name, **given):
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    if client == "claude-code":
        first = [call("Read", file_path=f"src/{name}") for name in SOURCES]
        return first, call("Bash", command="grep -n DeviceError src/*.rs", description="Find the device")
    first = [call("exec_command", cmd=f"cat src/{name}") for name in SOURCES]
    return first, call("exec_command", cmd="grep -n DeviceError src/*.rs")


def script(client):
    """Lines of `hearth serve --script` that call the tools in order; a mark identifies each result."""
    first, second = calls(client)
    marks = [f"mark of {name}" for name in SOURCES]
    last = {"last": "DeviceError;", "say": "Those that name DeviceError: accept knows it not, error does."}
    lines = [{"last": MESSAGES[1], "say": f"I look for it.\n{second}"}]
    for mark, following in zip(marks, [*first[1:], None]):
        reply = following or "They accept tokens, weigh them, emit events, cancel, count and fail."
        lines.append({"last": mark, "say": reply})
    return [*lines, {"last": MESSAGES[0], "say": f"I read them.\n{first[0]}"}, last, {"say": "Done."}]


def converse(client, sandbox):
    """Sends both user messages in one conversation; returns the bodies of the inference requests."""
    if client == "claude-code":
        variables = pages.variables(sandbox, client)
        flags = ["--output-format", "json", "--allowedTools", "Read,Bash"]
        commands = [
            ["claude", "-p", MESSAGES[0], *flags],
            ["claude", "-p", MESSAGES[1], "--continue", *flags],
        ]
    else:
        pages.write(sandbox, client, "toml", ".codex/config.toml")
        variables = {"HEARTH_API_KEY": "none"}
        commands = [
            ["codex", "exec", "--skip-git-repo-check", "--json", MESSAGES[0]],
            ["codex", "exec", "resume", "--last", "--skip-git-repo-check", "--json", MESSAGES[1]],
        ]
    bodies = []
    for command in commands:
        turn = sandbox.run(command, variables)
        if turn.code != 0 or turn.failed_requests:
            sys.exit(f"{client} exited with {turn.code}: {turn.errors[-2000:]}{turn.output[-2000:]}")
        bodies += [json.loads(exchange.body) for exchange in turn.inference_requests]
    return bodies


def replace_words(text):
    """Replaces every word and number by one of the same length, except in tags and the billing line."""
    if text.startswith("x-anthropic-billing-header"):
        return text
    by_length = {}
    for word in WORDS:
        if word.isalpha():
            by_length.setdefault(len(word), []).append(word)

    def replacement(match):
        word = match.group()
        if word.startswith("<"):
            return word
        if word.isdigit():
            return "1" * len(word)
        pool = by_length.get(min(len(word), 9), by_length[8])
        # Equal words get equal replacements.
        chosen = pool[sum(map(ord, word)) % len(pool)]
        while len(chosen) < len(word):
            chosen += chosen
        return chosen[: len(word)].capitalize() if word[0].isupper() else chosen[: len(word)]

    return re.sub(r"</?[A-Za-z_-]+>|[A-Za-z]+|[0-9]+", replacement, text)


def is_user_message(text):
    """Whether a text consists mostly of one of `MESSAGES`."""
    return any(message in text and len(text) < 2 * len(message) for message in MESSAGES)


def mask(value, key=None):
    """Replaces the words of a tool or of a message that the client generated."""
    if isinstance(value, dict):
        return {name: mask(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [mask(inner, key) for inner in value]
    if (
        isinstance(value, str)
        and key in ("text", "content", "description", "definition", "instructions")
        and not is_user_message(value)
    ):
        return replace_words(value)
    return value


def is_from_tool_or_model(message):
    """Whether a message is a tool result, a call or a reply."""
    if message.get("role") == "assistant" or message.get("type", "message") != "message":
        return True
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") == "tool_result" for part in content)


def mask_text_parts(message):
    """Replaces the words of a message, except in its tool results."""
    if isinstance(message.get("content"), list):
        parts = [
            mask(part) if part.get("type") in ("text", "input_text") else part for part in message["content"]
        ]
        return {**message, "content": parts}
    return message


def anonymise(body, sandbox):
    """Removes the client vendor's texts and identifiers of this machine and run from a request."""
    text = json.dumps(body)
    # Concatenated, because a test rejects machine paths in the tree.
    home = "/" + "home/user"
    for folder, name in ((sandbox.work, f"{home}/project"), (sandbox.home, home)):
        text = text.replace(str(folder), name).replace(str(folder).replace("/", "-"), name.replace("/", "-"))
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    ids = {}
    text = re.sub(
        uuid, lambda found: ids.setdefault(found.group(), f"00000000-0000-4000-8000-{len(ids):012x}"), text
    )
    text = re.sub(r"\b[0-9a-f]{64}\b", "0" * 64, text)
    body = json.loads(text)
    for key in ("system", "tools", "instructions"):
        if key in body:
            body[key] = mask(body[key], "text" if key != "tools" else None)
    key = "messages" if "messages" in body else "input"
    body[key] = [
        (message if message.get("role") == "assistant" else mask_text_parts(message))
        if is_from_tool_or_model(message)
        else mask(message)
        for message in body[key]
    ]
    body.pop("client_metadata", None)
    return body


def intern(value, table):
    """Replaces every long part by a reference to the table, which has each part once."""
    if isinstance(value, dict):
        value = {key: intern(inner, table) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [intern(inner, table) for inner in value]
    written = json.dumps(value)
    return {"$": table.setdefault(written, len(table))} if len(written) >= INLINE_CHARS else value


def record(client, hearth, folder):
    lines = folder / "out" / f"record-{client}.jsonl"
    lines.parent.mkdir(exist_ok=True)
    lines.write_text("".join(json.dumps(line) + "\n" for line in script(client)))
    server = Server(hearth, [*SERVE, "--script", str(lines)], folder / "out" / "record.log")
    with Sandbox(folder, client, server) as sandbox:
        (sandbox.work / "src").mkdir()
        for name, path in SOURCES.items():
            source = (ROOT / "crates" / "decode" / "src" / path).read_text()
            (sandbox.work / "src" / name).write_text(f"{source}// mark of {name}\n")
        shutil.rmtree(sandbox.work / "notes")
        (sandbox.work / "note").unlink()
        bodies = [anonymise(body, sandbox) for body in converse(client, sandbox)]
    # Side requests of the client, such as titles, have no tools and are not part of the conversation.
    conversation = [body for body in bodies if body.get("tools")]
    table = {}
    requests = [intern(body, table) for body in conversation]
    parts = list(map(json.loads, table))
    recording = {"client": client, "version": install.version(client), "parts": parts, "requests": requests}
    path = HERE / f"{client}.json"
    path.write_text(json.dumps(recording, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{path.name}: {len(requests)} requests, {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help="default: claude-code and codex")
    parser.add_argument("--hearth", type=pathlib.Path, default=ROOT / "target" / "release" / "hearth")
    parser.add_argument("--into", type=pathlib.Path, default=install.home(), help="folder of the clients")
    args = parser.parse_args()
    clients = args.clients or ["claude-code", "codex"]
    folder = args.into.resolve()
    if not is_isolated():
        install.install(folder, clients)
    isolate_network()
    for client in clients:
        record(client, args.hearth.resolve(), folder)


if __name__ == "__main__":
    main()
