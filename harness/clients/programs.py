"""Clients other than agents: chat programs, libraries, an evaluator and a web interface.

Each function takes a sandbox and whether to stream, and returns the turn. Clients with tools have one more
function. Libraries without a command line run a script from `turns/` in the client's own environment.
"""

import pathlib
import shlex

import pages

TURNS = pathlib.Path(__file__).resolve().parent / "turns"
PROMPT = "Please read the note with name note"


def aider(sandbox, streaming):
    variables = {**pages.variables(sandbox, "aider"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
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
        "--stream" if streaming else "--no-stream",
    ]
    return sandbox.run([*command, "--message", "Say hello."], variables)


def llm(sandbox, streaming, arguments=("Say hello.",)):
    pages.write(sandbox, "llm", "yaml", ".config/io.datasette.llm/extra-openai-models.yaml")
    command = [
        "llm",
        "prompt",
        "-m",
        "hearth",
        "--key",
        "none",
        "--no-log",
        *([] if streaming else ["--no-stream"]),
    ]
    return sandbox.run([*command, *arguments], {})


def llm_tool(sandbox):
    function = 'def read_note(name: str) -> str:\n    "Reads a note"\n    return open(name).read()\n'
    return llm(sandbox, True, ["--functions", function, PROMPT])


def script(name, mode, page=None):
    """Runs a script of `turns/` with the server's URL and the mode; it prints the model's reply."""

    def run(sandbox):
        variables = {"PYTHONUNBUFFERED": "1", **(pages.variables(sandbox, page) if page else {})}
        command = ["python", TURNS / f"{name}.py"]
        if not command[1].exists():
            # Node looks for packages beside the script, so the script gets their folder.
            variables["CLIENT_PACKAGES"] = str(sandbox.folder / sandbox.name)
            command = ["node", TURNS / f"{name}.mjs"]
        return sandbox.run([*command, sandbox.url, mode], variables)

    return run


def lm_eval(number, task, expected=""):
    """Runs command `number` of the client's page on a task of `turns/tasks`."""

    def run(sandbox):
        commands = pages.block("lm-eval", "", sandbox.url).replace("\\\n", " ").splitlines()
        command = shlex.split(commands[number].replace("TASK", task))
        command += [
            "--include_path",
            TURNS / "tasks",
            "--output_path",
            sandbox.work / "scores",
            "--log_samples",
        ]
        turn = sandbox.run(
            command, {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        )
        turn.output += "\n".join(file.read_text() for file in (sandbox.work / "scores").rglob("*.json*"))
        turn.expected = expected
        return turn

    return run


# By client: its turns, as `run.turns` yields them; a string replaces a turn that the client lacks.
PROGRAMS = {
    "aider": [
        ("plain", lambda sandbox: aider(sandbox, False), False),
        ("streamed", lambda sandbox: aider(sandbox, True), True),
        ("tool", "has none", None),
    ],
    "llm": [
        ("plain", lambda sandbox: llm(sandbox, False), False),
        ("streamed", lambda sandbox: llm(sandbox, True), True),
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
    "ollama-sdk": [
        ("plain", script("with_ollama_sdk", "plain"), False),
        ("streamed", script("with_ollama_sdk", "streamed"), True),
        ("tool", script("with_ollama_sdk", "tool"), True),
    ],
    "ai-sdk": [
        ("plain", script("with_ai_sdk", "plain"), False),
        ("streamed", script("with_ai_sdk", "streamed"), True),
        ("tool", script("with_ai_sdk", "tool"), True),
    ],
    "langchain": [
        ("plain", script("with_langchain", "plain"), False),
        ("streamed", script("with_langchain", "streamed"), True),
        ("tool", script("with_langchain", "tool"), True),
    ],
    "pydantic-ai": [
        ("plain", script("with_pydantic_ai", "plain"), False),
        ("streamed", script("with_pydantic_ai", "streamed"), True),
        ("tool", script("with_pydantic_ai", "tool"), True),
    ],
    "openai-agents": [
        ("plain", script("with_openai_agents", "plain"), False),
        ("streamed", script("with_openai_agents", "streamed"), True),
        ("tool", script("with_openai_agents", "tool"), True),
    ],
    "open-webui": [
        ("plain", script("with_open_webui", "plain", "open-webui"), None),
        ("streamed", script("with_open_webui", "streamed", "open-webui"), None),
        ("tool", script("with_open_webui", "tool", "open-webui"), None),
    ],
    "lm-eval": [
        ("plain", lm_eval(1, "hearth_writes"), False),
        # Its other request type: log-probabilities of prompts given as token ids. It prints only the score.
        ("plain", lm_eval(0, "hearth_ranks", '"acc,none"'), False),
        ("streamed", "has none", None),
        ("tool", "has none", None),
    ],
}
