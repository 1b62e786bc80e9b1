"""The agents: programs that give the model tools and act on what it calls. How each is run without a person.

Each function takes a world, a prompt and whether to leave the client's full prompt for a smaller one, and
returns the turn. How the client is pointed at the server comes from its page beside this file; what is added
here only keeps it from asking a person or a network. The prompts are worded as the bundled model learnt them.
"""

import pages


def claude_code(world, prompt, small):
    # Among its twelve tools and its reminders the bundled model loses the prompt.
    few = ["--tools", "Read", "--system-prompt", "Use the functions whenever they fit."] if small else []
    command = [
        "claude",
        "-p",
        prompt,
        "--output-format",
        "stream-json",
        "--include-partial-messages",
        "--verbose",
        *few,
    ]
    return world.run(command, pages.variables(world, "claude-code"))


def codex(world, prompt, _small):
    pages.write(world, "codex", "toml", ".codex/config.toml")
    return world.run(["codex", "exec", "--skip-git-repo-check", "--json", prompt], {"HEARTH_API_KEY": "none"})


def opencode(world, prompt, _small):
    pages.write(world, "opencode", "json", ".config/opencode/opencode.json")
    command = ["opencode", "run", "--auto", "--format", "json", *prompt.split()]
    return world.run(command, {"OPENCODE_DISABLE_MODELS_FETCH": "1"})


def pi(world, prompt, _small):
    pages.write(world, "pi", "json", ".pi/agent/models.json")
    command = [
        "pi",
        "--provider",
        "hearth",
        "--model",
        "hearth",
        "--mode",
        "json",
        "--no-session",
        "-p",
        prompt,
    ]
    return world.run(command, {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"})


def openclaw(world, prompt, _small):
    pages.write(world, "openclaw", "json", ".openclaw/openclaw.json")
    config = world.home / ".openclaw" / "openclaw.json"
    return world.run(["openclaw", "agent", "exec", prompt, "--config", config, "--json"], {})


def hermes(world, prompt, small):
    pages.write(world, "hermes", "yaml", ".hermes/config.yaml")
    few = ["-t", "file"] if small else []
    return world.run(["hermes", "chat", "-Q", "--yolo", *few, "-q", prompt], {})


# By client: how to run it, and the prompt of its tool turn.
AGENTS = {
    "claude-code": (claude_code, "Please read the file with file path note"),
    "codex": (codex, 'Please exec the command with cmd "cat note".'),
    "opencode": (opencode, "Please glob the files with pattern notes/*"),
    "pi": (pi, "Please read the file with path note"),
    "openclaw": (openclaw, "Please read the file with path note"),
    "hermes": (hermes, "Please read the file with path note"),
}
