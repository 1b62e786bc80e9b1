"""The agents: programs that give the model tools and act on what it calls. How each is pointed at the server, and asked.

Each function takes a world, a wish and whether to leave the client's full prompt for a smaller one, and returns the
turn. What a person would write is in the page of the client beside this file; the wishes are worded as the bundled
model learnt them.
"""

CONTEXT = 49152


def claude_code(world, wish, small):
    models = [f"ANTHROPIC_{kind}MODEL" for kind in ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_")]
    variables = {
        "ANTHROPIC_BASE_URL": world.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        **dict.fromkeys(models, "hearth"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    # Among its twelve tools and its reminders the bundled model loses the wish.
    few = ["--tools", "Read", "--system-prompt", "Use the functions whenever they fit."] if small else []
    command = ["claude", "-p", wish, "--output-format", "stream-json", "--include-partial-messages", "--verbose", *few]
    return world.run(command, variables)


def codex(world, wish, _small):
    world.write(
        ".codex/config.toml",
        'model = "hearth"\nmodel_provider = "hearth"\ncheck_for_update_on_startup = false\n'
        f"model_context_window = {CONTEXT}\n"
        '[model_providers.hearth]\nname = "Hearth"\nwire_api = "responses"\nenv_key = "HEARTH_API_KEY"\n'
        f'base_url = "{world.url}/v1"\n[analytics]\nenabled = false\n',
    )
    return world.run(["codex", "exec", "--skip-git-repo-check", "--json", wish], {"HEARTH_API_KEY": "none"})


def opencode(world, wish, _small):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{world.url}/v1", "apiKey": "none", "timeout": 600000},
        "models": {"hearth": {"limit": {"context": CONTEXT, "output": 8192}}},
    }
    world.write(
        ".config/opencode/opencode.json",
        {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "provider": {"hearth": provider},
            "model": "hearth/hearth",
            "small_model": "hearth/hearth",
        },
    )
    return world.run(["opencode", "run", "--auto", "--format", "json", *wish.split()], {"OPENCODE_DISABLE_MODELS_FETCH": "1"})


def pi(world, wish, _small):
    provider = {
        "baseUrl": f"{world.url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": "hearth", "contextWindow": CONTEXT, "maxTokens": 8192}],
    }
    world.write(".pi/agent/models.json", {"providers": {"hearth": provider}})
    command = ["pi", "--provider", "hearth", "--model", "hearth", "--mode", "json", "--no-session", "-p", wish]
    return world.run(command, {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"})


def openclaw(world, wish, _small):
    model = {
        "id": "hearth",
        "name": "Hearth",
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": CONTEXT,
        "maxTokens": 8192,
    }
    provider = {"baseUrl": f"{world.url}/v1", "apiKey": "none", "api": "openai-completions", "models": [model]}
    world.write(
        "openclaw.json",
        {
            "agents": {"defaults": {"model": {"primary": "hearth/hearth"}}},
            "models": {"mode": "replace", "providers": {"hearth": provider}},
        },
    )
    command = ["openclaw", "agent", "exec", wish, "--config", world.home / "openclaw.json", "--json"]
    return world.run(command, {})


def hermes(world, wish, small):
    world.write(
        ".hermes/config.yaml",
        f'model:\n  provider: custom\n  base_url: "{world.url}/v1"\n  api_key: none\n  default: hearth\n'
        f"  context_length: {CONTEXT * 2}\n",
    )
    few = ["-t", "file"] if small else []
    return world.run(["hermes", "chat", "-Q", "--yolo", *few, "-q", wish], {})


# By client: how to run it, and the wish of its tool turn.
AGENTS = {
    "claude-code": (claude_code, "Please read the file with file path note"),
    "codex": (codex, 'Please exec the command with cmd "cat note".'),
    "opencode": (opencode, "Please glob the files with pattern notes/*"),
    "pi": (pi, "Please read the file with path note"),
    "openclaw": (openclaw, "Please read the file with path note"),
    "hermes": (hermes, "Please read the file with path note"),
}
