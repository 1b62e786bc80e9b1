"""What the pages of the clients tell a person to write, read by the run: a page that is wrong fails it."""

import pathlib
import re
import shlex

PAGES = pathlib.Path(__file__).resolve().parent
# What the pages call the server.
ADDRESS = "http://127.0.0.1:8000"


def block(client, language, url):
    """The first block of a language in `CLIENT.md`, with the server's real address in it."""
    text = (PAGES / f"{client}.md").read_text()
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found.group(1).replace(ADDRESS, url)


def exports(client, url):
    """The variables that `CLIENT.md` tells a person to export."""
    found = {}
    for line in block(client, "", url).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            found.update(word.split("=", 1) for word in words[1:])
    return found
