#!/usr/bin/env python3
"""Records the requests of Claude Code and Codex: two user messages with tool calls, for `turns.py
--recorded`.

    python3 harness/cache/record.py [claude-code] [codex] [--hearth target/release/hearth] [--into
    target/harness]

`harness/clients` installs the pinned clients. They run in a network namespace with loopback only. A scripted
server replies, so their tool calls are the same in every run. Everything else is their own: blocks, tools,
reminders, tool results, their order, and how a message changes between requests. Their instructions and
descriptions belong to their makers, so each word is replaced by another of the same length. Names, tags,
schemas and the conversation itself stay. Folders, user names and ids are replaced too. Writes CLIENT.json
beside this file: in `requests` and `parts`, {"$": n} refers to entry n of `parts`.
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
import world  # noqa: E402

SERVE = ["--model-name", "hearth", "--max-ctx", "65536"]
# Sources of `crates/decode/src` that the tools read, by their names in the client's folder.
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
# Parts shorter than this as JSON are not moved to the table.
SHORT = 64
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
    """Lines of `hearth serve --script` that call the tools in order; each result has a mark that identifies
    it."""
    first, second = calls(client)
    marks = [f"mark of {name}" for name in SOURCES]
    last = {"last": "DeviceError;", "say": "Those that name DeviceError: accept knows it not, error does."}
    lines = [{"last": MESSAGES[1], "say": f"I look for it.\n{second}"}]
    for mark, following in zip(marks, [*first[1:], None]):
        say = (
            "They accept tokens, weigh them, emit events, cancel, count and fail."
            if following is None
            else following
        )
        lines.append({"last": mark, "say": say})
    return [*lines, {"last": MESSAGES[0], "say": f"I read them.\n{first[0]}"}, last, {"say": "Done."}]


def converse(client, place):
    """Sends both user messages in one conversation; returns the bodies of the requests to the model."""
    if client == "claude-code":
        variables = pages.variables(place, client)
        may = ["--output-format", "json", "--allowedTools", "Read,Bash"]
        commands = [["claude", "-p", MESSAGES[0], *may], ["claude", "-p", MESSAGES[1], "--continue", *may]]
    else:
        pages.write(place, client, "toml", ".codex/config.toml")
        variables = {"HEARTH_API_KEY": "none"}
        ask = ["codex", "exec", "--skip-git-repo-check", "--json"]
        commands = [
            [*ask, MESSAGES[0]],
            ["codex", "exec", "resume", "--last", "--skip-git-repo-check", "--json", MESSAGES[1]],
        ]
    bodies = []
    for command in commands:
        turn = place.run(command, variables)
        if turn.code != 0 or turn.refused:
            sys.exit(f"{client} ended with {turn.code}: {turn.errors[-2000:]}{turn.output[-2000:]}")
        bodies += [json.loads(exchange.body) for exchange in turn.asked]
    return bodies


def other_words(text):
    """`text` with every word and number replaced by one of the same length, except tags and lines for the
    server."""
    if text.startswith("x-anthropic-billing-header"):
        return text
    by_length = {}
    for word in WORDS:
        if word.isalpha():
            by_length.setdefault(len(word), []).append(word)

    def other(match):
        word = match.group()
        if word.startswith("<"):
            return word
        if word.isdigit():
            return "1" * len(word)
        pool = by_length.get(min(len(word), 9), by_length[8])
        # Equal words have equal replacements.
        chosen = pool[sum(map(ord, word)) % len(pool)]
        while len(chosen) < len(word):
            chosen += chosen
        return chosen[: len(word)].capitalize() if word[0].isupper() else chosen[: len(word)]

    return re.sub(r"</?[A-Za-z_-]+>|[A-Za-z]+|[0-9]+", other, text)


def ours(text):
    """Whether a text belongs to the conversation itself."""
    return any(message in text and len(text) < 2 * len(message) for message in MESSAGES)


def mask(value, key=None):
    """A tool, or a message that the client generated, with its words replaced."""
    if isinstance(value, dict):
        return {name: mask(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [mask(inner, key) for inner in value]
    if (
        isinstance(value, str)
        and key in ("text", "content", "description", "definition", "instructions")
        and not ours(value)
    ):
        return other_words(value)
    return value


def said_by_tools_or_model(message):
    """Whether a message is a result, a call or a reply."""
    if message.get("role") == "assistant" or message.get("type", "message") != "message":
        return True
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") == "tool_result" for part in content)


def result_only(message):
    """A message with tool results; the words of its other parts are replaced."""
    if isinstance(message.get("content"), list):
        parts = [
            mask(part) if part.get("type") in ("text", "input_text") else part for part in message["content"]
        ]
        return {**message, "content": parts}
    return message


def cleaned(body, place):
    """A request without data of the client's makers, of this machine or of one run."""
    text = json.dumps(body)
    # Concatenated, because a test looks for machine paths in the tree.
    home = "/" + "home/user"
    for folder, name in ((place.work, f"{home}/project"), (place.home, home)):
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
    said = "messages" if "messages" in body else "input"
    body[said] = [
        (message if message.get("role") == "assistant" else result_only(message))
        if said_by_tools_or_model(message)
        else mask(message)
        for message in body[said]
    ]
    body.pop("client_metadata", None)
    return body


def interned(value, table):
    """The value with every long part replaced by a reference to the table, which holds it once."""
    if isinstance(value, dict):
        value = {key: interned(inner, table) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [interned(inner, table) for inner in value]
    written = json.dumps(value)
    return {"$": table.setdefault(written, len(table))} if len(written) >= SHORT else value


def record(client, hearth, folder):
    lines = folder / "out" / f"record-{client}.jsonl"
    lines.parent.mkdir(exist_ok=True)
    lines.write_text("".join(json.dumps(line) + "\n" for line in script(client)))
    server = world.Server(hearth, [*SERVE, "--script", str(lines)], folder / "out" / "record.log")
    with world.World(folder, client, server) as place:
        (place.work / "src").mkdir()
        for name, path in SOURCES.items():
            source = (ROOT / "crates" / "decode" / "src" / path).read_text()
            (place.work / "src" / name).write_text(f"{source}// mark of {name}\n")
        shutil.rmtree(place.work / "notes")
        (place.work / "note").unlink()
        bodies = [cleaned(body, place) for body in converse(client, place)]
    # Side requests of the client, such as titles, do not belong to the conversation.
    conversation = [body for body in bodies if body.get("tools")]
    table = {}
    requests = [interned(body, table) for body in conversation]
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
    if world.INSIDE not in world.os.environ:
        install.install(folder, clients)
    world.leave_the_network()
    for client in clients:
        record(client, args.hearth.resolve(), folder)


if __name__ == "__main__":
    main()
