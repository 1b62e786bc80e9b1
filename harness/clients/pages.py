"""How the clients are pointed at the server: by what their pages tell a person to write, or by `hearth
connect`.

Both are read by the run, so a page or a command that is wrong fails it.
"""

import os
import pathlib
import re
import shlex
import subprocess

PAGES = pathlib.Path(__file__).resolve().parent
# What the pages call the server.
ADDRESS = "http://127.0.0.1:8000"


def block(client, language, url):
    """The first block of a language in `CLIENT.md`, with the server's real address in it."""
    text = (PAGES / f"{client}.md").read_text()
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found.group(1).replace(ADDRESS, url)


def connect(world, client):
    """Has `hearth connect` write the client's configuration into the world's home."""
    command = [
        world.hearth,
        "connect",
        client,
        "--url",
        world.url,
        "--model",
        "hearth",
        "--context",
        "65536",
        "--write",
    ]
    subprocess.run(
        command, check=True, env={**os.environ, "HOME": str(world.home)}, stdout=subprocess.DEVNULL
    )


def write(world, client, language, path):
    """Puts the client's configuration at `path` of the world's home."""
    if world.hearth:
        connect(world, client)
        assert (world.home / path).exists(), f"`hearth connect {client}` wrote no {path}"
    else:
        world.write(path, block(client, language, world.url))


def variables(world, client):
    """The variables that a person sets for the client."""
    if not world.hearth:
        return exports(block(client, "", world.url))
    connect(world, client)
    file = world.home / ".config" / "hearth" / f"{client}.env"
    return exports(file.read_text()) if file.exists() else {}


def exports(text):
    """The variables that lines of a shell export."""
    found = {}
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            found.update(word.split("=", 1) for word in words[1:])
    return found
