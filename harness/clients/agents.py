"""Agents: clients that give the model tools and execute its tool calls, run headless.

Each function takes a sandbox, a prompt and whether to replace the client's full prompt with a smaller one.
It returns the turn. The client's page beside this file configures the server's address. Arguments added here
only keep the client from prompting a person or using a network. The prompts use the phrases of the bundled
model's training.
"""

import shlex

import pages
from sandbox import MARKER


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


def without_names(sandbox):
    """Removes the file named as the marker, for clients that list the folder in their first prompt."""
    (sandbox.work / "notes" / MARKER).unlink()


def qwen_code(sandbox, prompt, _small):
    without_names(sandbox)
    kind = [] if sandbox.launches else ["--auth-type", "openai"]
    command = ["qwen", *kind, "--yolo", "--output-format", "json", prompt]
    return sandbox.run(command, pages.variables(sandbox, "qwen-code"))


def copilot(sandbox, prompt, _small):
    command = ["copilot", "-p", prompt, "--allow-all-tools", "--no-auto-update", "--output-format", "json"]
    return sandbox.run(command, pages.variables(sandbox, "copilot"))


def cline(sandbox, prompt, _small):
    login = pages.block("cline", "", sandbox.url).splitlines()[0]
    sandbox.run(shlex.split(login), {})
    return sandbox.run(["cline", "--json", "--auto-approve", "true", "-P", "openai", prompt], {})


def kilo(sandbox, prompt, _small):
    pages.write(sandbox, "kilo", "json", ".config/kilo/kilo.json")
    command = ["kilo", "run", "--auto", "--format", "json", *prompt.split()]
    return sandbox.run(command, {"KILO_DISABLE_MODELS_FETCH": "1", "KILO_DISABLE_SESSION_INGEST": "1"})


def kimi(sandbox, prompt, _small):
    without_names(sandbox)
    return sandbox.run(["kimi", "-p", prompt], pages.variables(sandbox, "kimi"))


def continue_cli(sandbox, prompt, _small):
    file = ".config/hearth/continue.yaml"
    pages.write(sandbox, "continue", "yaml", file)
    config = [] if sandbox.launches else ["--config", sandbox.home / file]
    return sandbox.run(["cn", *config, "--auto", "-p", prompt], {"CONTINUE_TELEMETRY_ENABLED": "0"})


# By client: the function that runs it, and the prompt of its tool turn.
AGENTS = {
    "claude-code": (claude_code, "Please read the file with file path note"),
    "codex": (codex, 'Please exec the command with cmd "cat note".'),
    "opencode": (opencode, "Please glob the files with pattern notes/*"),
    "pi": (pi, "Please read the file with path note"),
    "openclaw": (openclaw, "Please read the file with path note"),
    "hermes": (hermes, "Please read the file with path note"),
    "qwen-code": (qwen_code, "Please use run_shell_command for cat note"),
    "copilot": (copilot, "Please use bash for cat note"),
    "cline": (cline, "Please use run_commands for cat note"),
    "kilo": (kilo, "Please use bash for cat note"),
    "kimi": (kimi, "Please use Bash for cat note"),
    "continue": (continue_cli, "Please use Read for note"),
}
