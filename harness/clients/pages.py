"""Configures clients for the server, from the set-up pages or with `hearth connect`.

The run uses both, so an error in a page or in the command makes it fail. A client that `hearth launch` starts
needs neither.
"""

import os
import pathlib
import re
import shlex
import subprocess

PAGES = pathlib.Path(__file__).resolve().parent
# The server's address in the pages.
ADDRESS = "http://127.0.0.1:8000"


def block(client, language, url):
    """The first code block of a language in `CLIENT.md`, with the server's real address."""
    text = (PAGES / f"{client}.md").read_text()
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found.group(1).replace(ADDRESS, url)


def connect(sandbox, client):
    """Lets `hearth connect` write the client's configuration into the sandbox's home."""
    command = [
        sandbox.hearth,
        "connect",
        client,
        "--url",
        sandbox.url,
        "--model",
        "hearth",
        "--context",
        "65536",
        "--write",
    ]
    subprocess.run(
        command, check=True, env={**os.environ, "HOME": str(sandbox.home)}, stdout=subprocess.DEVNULL
    )


def write(sandbox, client, language, path):
    """Writes the client's configuration to `path` in the sandbox's home, unless it is launched."""
    if sandbox.launches:
        return
    if sandbox.hearth:
        connect(sandbox, client)
        assert (sandbox.home / path).exists(), f"`hearth connect {client}` wrote no {path}"
    else:
        sandbox.write(path, block(client, language, sandbox.url))


def variables(sandbox, client):
    """The environment variables that a user sets for the client; none if it is launched."""
    if sandbox.launches:
        return {}
    if not sandbox.hearth:
        return exports(block(client, "", sandbox.url))
    connect(sandbox, client)
    file = sandbox.home / ".config" / "hearth" / f"{client}.env"
    return exports(file.read_text()) if file.exists() else {}


def exports(text):
    """The variables that lines of shell export."""
    found = {}
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            found.update(word.split("=", 1) for word in words[1:])
    return found
