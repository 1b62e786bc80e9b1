"""Clients that are no agents: chat programs, libraries, an evaluator, a web interface. How each is pointed at the server.

Each function takes a world and whether to stream, and returns the turn; those with tools have one more function.
What has no command line of its own runs a page of Python from `turns/` in the client's own environment.
"""

import pathlib

TURNS = pathlib.Path(__file__).resolve().parent / "turns"
WISH = "Please read the note with name note"


def aider(world, streams):
    variables = {"OPENAI_API_BASE": f"{world.url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = ["aider", "--model", "openai/hearth", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    command += ["--no-git", "--no-pretty", "--yes-always", "--no-detect-urls", "--stream" if streams else "--no-stream"]
    return world.run([*command, "--message", "Say hello."], variables)


def llm(world, streams, more=("Say hello.",)):
    world.write(
        "llm/extra-openai-models.yaml",
        f"- model_id: hearth\n  model_name: hearth\n  api_base: {world.url}/v1\n  supports_tools: true\n  supports_schema: true\n",
    )
    command = ["llm", "prompt", "-m", "hearth", "--key", "none", "--no-log", *([] if streams else ["--no-stream"])]
    return world.run([*command, *more], {"LLM_USER_PATH": str(world.home / "llm")})


def llm_tool(world):
    function = 'def read_note(name: str) -> str:\n    "Reads a note"\n    return open(name).read()\n'
    return llm(world, True, ["--functions", function, WISH])


def page(name, mode):
    """Runs `turns/NAME.py` with the server and what to do; the page prints what the model wrote."""
    return lambda world: world.run(["python", TURNS / f"{name}.py", world.url, mode], {"PYTHONUNBUFFERED": "1"})


def lm_eval(backend, task, *more):
    def run(world):
        path = "completions" if backend == "local-completions" else "chat/completions"
        arguments = f"model=hearth,base_url={world.url}/v1/{path},num_concurrent=2,max_retries=1"
        command = ["lm_eval", "run", "--model", backend, "--tasks", task, "--include_path", TURNS / "tasks", *more]
        command += ["--output_path", world.work / "scores", "--log_samples"]
        variables = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HEARTH_TASKS": str(TURNS / "tasks"),
            "OPENAI_API_KEY": "none",
        }
        turn = world.run([*command, "--model_args", arguments], variables)
        turn.output += "\n".join(file.read_text() for file in (world.work / "scores").rglob("*.json*"))
        # Of log-probabilities the client shows the score alone.
        turn.expects = '"acc,none"' if backend == "local-completions" else ""
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
        ("plain", page("with_litellm", "plain"), False),
        ("streamed", page("with_litellm", "streamed"), True),
        ("tool", page("with_litellm", "tool"), None),
    ],
    "open-webui": [
        ("plain", page("with_open_webui", "plain"), None),
        ("streamed", page("with_open_webui", "streamed"), None),
        ("tool", page("with_open_webui", "tool"), None),
    ],
    "lm-eval": [
        ("plain", lm_eval("local-chat-completions", "hearth_writes", "--apply_chat_template"), False),
        # Its other way of asking: log-probabilities of prompts that are token ids.
        ("plain", lm_eval("local-completions", "hearth_ranks"), False),
        ("streamed", "has none", None),
        ("tool", "has none", None),
    ],
}
