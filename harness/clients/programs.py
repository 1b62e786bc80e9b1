"""Clients that are no agents: chat programs, libraries, an evaluator, a web interface. How each is pointed at
the server.

Each function takes a world and whether to stream, and returns the turn; those with tools have one more
function. What has no command line of its own runs a page of Python from `turns/` in the client's own
environment.
"""

import pathlib
import shlex

import pages

TURNS = pathlib.Path(__file__).resolve().parent / "turns"
PROMPT = "Please read the note with name note"


def aider(world, streams):
    variables = {**pages.variables(world, "aider"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [
        "aider",
        "--model",
        "openai/hearth",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-model-warnings",
    ]
    command += [
        "--no-git",
        "--no-pretty",
        "--yes-always",
        "--no-detect-urls",
        "--stream" if streams else "--no-stream",
    ]
    return world.run([*command, "--message", "Say hello."], variables)


def llm(world, streams, more=("Say hello.",)):
    pages.write(world, "llm", "yaml", ".config/io.datasette.llm/extra-openai-models.yaml")
    command = [
        "llm",
        "prompt",
        "-m",
        "hearth",
        "--key",
        "none",
        "--no-log",
        *([] if streams else ["--no-stream"]),
    ]
    return world.run([*command, *more], {})


def llm_tool(world):
    function = 'def read_note(name: str) -> str:\n    "Reads a note"\n    return open(name).read()\n'
    return llm(world, True, ["--functions", function, PROMPT])


def script(name, mode, page=None):
    """Runs `turns/NAME.py` with the server and what to do; it prints what the model wrote."""

    def run(world):
        variables = {"PYTHONUNBUFFERED": "1", **(pages.variables(world, page) if page else {})}
        return world.run(["python", TURNS / f"{name}.py", world.url, mode], variables)

    return run


def lm_eval(number, task, expects=""):
    """Runs command `number` of the client's page on a task of ours."""

    def run(world):
        commands = pages.block("lm-eval", "", world.url).replace("\\\n", " ").splitlines()
        command = shlex.split(commands[number].replace("TASK", task))
        command += [
            "--include_path",
            TURNS / "tasks",
            "--output_path",
            world.work / "scores",
            "--log_samples",
        ]
        turn = world.run(
            command, {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        )
        turn.output += "\n".join(file.read_text() for file in (world.work / "scores").rglob("*.json*"))
        turn.expects = expects
        return turn

    return run


# By client: its turns, as `run.turns` gives them; a text stands for a turn that the client does not have.
PROGRAMS = {
    "aider": [
        ("plain", lambda world: aider(world, False), False),
        ("streamed", lambda world: aider(world, True), True),
        ("tool", "has none", None),
    ],
    "llm": [
        ("plain", lambda world: llm(world, False), False),
        ("streamed", lambda world: llm(world, True), True),
        ("tool", llm_tool, None),
    ],
    "litellm": [
        ("plain", script("with_litellm", "plain"), False),
        ("streamed", script("with_litellm", "streamed"), True),
        ("tool", script("with_litellm", "tool"), None),
    ],
    "openai-sdk": [
        ("plain", script("with_openai_sdk", "plain"), False),
        ("streamed", script("with_openai_sdk", "streamed"), True),
        ("tool", script("with_openai_sdk", "tool"), True),
    ],
    "anthropic-sdk": [
        ("plain", script("with_anthropic_sdk", "plain"), False),
        ("streamed", script("with_anthropic_sdk", "streamed"), True),
        ("tool", script("with_anthropic_sdk", "tool"), True),
    ],
    "open-webui": [
        ("plain", script("with_open_webui", "plain", "open-webui"), None),
        ("streamed", script("with_open_webui", "streamed", "open-webui"), None),
        ("tool", script("with_open_webui", "tool", "open-webui"), None),
    ],
    "lm-eval": [
        ("plain", lm_eval(1, "hearth_writes"), False),
        # Its other way of asking: log-probabilities of prompts that are token ids. It shows the score alone.
        ("plain", lm_eval(0, "hearth_ranks", '"acc,none"'), False),
        ("streamed", "has none", None),
        ("tool", "has none", None),
    ],
}
