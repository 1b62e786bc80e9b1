"""Agents: clients that give the model tools and execute its tool calls, run headless.

Each function takes a sandbox, a prompt and whether to replace the client's full prompt with a smaller one.
It returns the turn. The client's page beside this file configures the server's address. Arguments added here
only keep the client from prompting a person or using a network. The prompts use the phrases of the bundled
model's training.
"""

import pages


def claude_code(sandbox, prompt, small):
    # With all twelve tools and the reminders, the bundled model no longer follows the prompt.
    reduced = ["--tools", "Read", "--system-prompt", "Use the functions whenever they fit."] if small else []
    command = [
        "claude",
        "-p",
        prompt,
        "--output-format",
        "stream-json",
        "--include-partial-messages",
        "--verbose",
        *reduced,
    ]
    return sandbox.run(command, pages.variables(sandbox, "claude-code"))


def codex(sandbox, prompt, _small):
    pages.write(sandbox, "codex", "toml", ".codex/config.toml")
    command = ["codex", "exec", "--skip-git-repo-check", "--json", prompt]
    return sandbox.run(command, {"HEARTH_API_KEY": "none"})


def opencode(sandbox, prompt, _small):
    pages.write(sandbox, "opencode", "json", ".config/opencode/opencode.json")
    command = ["opencode", "run", "--auto", "--format", "json", *prompt.split()]
    return sandbox.run(command, {"OPENCODE_DISABLE_MODELS_FETCH": "1"})


def pi(sandbox, prompt, _small):
    pages.write(sandbox, "pi", "json", ".pi/agent/models.json")
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
    return sandbox.run(command, {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"})


def openclaw(sandbox, prompt, _small):
    pages.write(sandbox, "openclaw", "json", ".openclaw/openclaw.json")
    config = sandbox.home / ".openclaw" / "openclaw.json"
    return sandbox.run(["openclaw", "agent", "exec", prompt, "--config", config, "--json"], {})


def hermes(sandbox, prompt, small):
    pages.write(sandbox, "hermes", "yaml", ".hermes/config.yaml")
    reduced = ["-t", "file"] if small else []
    return sandbox.run(["hermes", "chat", "-Q", "--yolo", *reduced, "-q", prompt], {})


# By client: the function that runs it, and the prompt of its tool turn.
AGENTS = {
    "claude-code": (claude_code, "Please read the file with file path note"),
    "codex": (codex, 'Please exec the command with cmd "cat note".'),
    "opencode": (opencode, "Please glob the files with pattern notes/*"),
    "pi": (pi, "Please read the file with path note"),
    "openclaw": (openclaw, "Please read the file with path note"),
    "hermes": (hermes, "Please read the file with path note"),
}
