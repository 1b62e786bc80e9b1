"""A sample of JSONSchemaBench: schemas of real projects, in ten groups from trivial to very large.

No package registry has the benchmark, so its files come from a clone of the public repository
`guidance-ai/jsonschemabench`. A bare clone is enough: files are read from the pinned commit.
"""

import json
import random
import subprocess

COMMIT = "ba103c73756198dd9b149ddc7db7867da7a077f6"
SEED = 29
# Schemas of each group; a smaller group is taken whole.
PER_GROUP = 80
MOST_BYTES = 60_000
# Larger ones are sent as forms of replies only: as tools they are prompts of thousands of tokens.
MOST_BYTES_OF_A_TOOL = 8_000


def names(clone):
    """The sampled files, in order of their names."""
    command = ["git", "-C", clone, "ls-tree", "-r", "-l", COMMIT, "data"]
    groups = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        about, name = line.split("\t")
        size = about.split()[-1]
        # A partial clone may lack large files, whose size is then unknown.
        if size.isdecimal() and int(size) <= MOST_BYTES:
            groups.setdefault(name.split("/")[1], []).append(name)
    drawn = random.Random(SEED)
    return sorted(
        name
        for _, files in sorted(groups.items())
        for name in drawn.sample(sorted(files), min(PER_GROUP, len(files)))
    )


def cases(clone):
    """Name, schema and a list that says whether anything, or an object, can match."""
    found = names(clone)
    asked = "".join(f"{COMMIT}:{name}\n" for name in found).encode()
    command = ["git", "-C", clone, "cat-file", "--batch"]
    answer = subprocess.run(command, input=asked, check=True, capture_output=True).stdout
    for name in found:
        # A line with the size, the content and the end of the line.
        head, _, answer = answer.partition(b"\n")
        size = int(head.split()[-1])
        schema, answer = json.loads(answer[:size]), answer[size + 1 :]
        # The benchmark's authors removed schemas that nothing matches.
        is_object = isinstance(schema, dict) and schema.get("type") == "object"
        is_tool = is_object and size <= MOST_BYTES_OF_A_TOOL
        yield name.removeprefix("data/"), schema, [{} if is_tool else None]
