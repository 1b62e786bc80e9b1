//! The clients, and the settings that point each at a server.

use serde_json::{Map, Value, json};

use super::ServedModel;
use super::coding_agents::{continue_cli, copilot, kilo, kimi, opencode, qwen_code};
use super::settings_file::{FileFormat, SettingsFile, hearth_file, quoted, variables};
use crate::config::directories::Directories;

/// A client that can use this server.
pub(super) struct Client {
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// Its display name.
    pub(super) title: &'static str,
    /// The files to change, and what goes into them.
    pub(super) files: fn(&ServedModel, &Directories) -> Vec<SettingsFile>,
    /// The command to run next.
    pub(super) next: fn(&ServedModel) -> String,
}

/// All clients.
pub(super) const CLIENTS: [Client; 18] = [
    Client {
        name: "claude-code",
        title: "Claude Code",
        files: claude_code,
        next: |_| "claude".to_owned(),
    },
    Client {
        name: "codex",
        title: "Codex",
        files: codex,
        next: |to| {
            let model = &to.model;
            format!(
                "codex        # or, to keep your default provider: codex -c model_provider=hearth -m {model}"
            )
        },
    },
    Client {
        name: "opencode",
        title: "OpenCode",
        files: opencode,
        next: |to| format!("opencode -m hearth/{}", to.model),
    },
    Client {
        name: "open-webui",
        title: "Open WebUI",
        files: open_webui,
        next: |_| "open-webui serve".to_owned(),
    },
    Client {
        name: "hermes",
        title: "Hermes Agent",
        files: hermes,
        next: |_| "hermes".to_owned(),
    },
    Client {
        name: "pi",
        title: "Pi",
        files: pi,
        next: |to| format!("pi --provider hearth --model {}", to.model),
    },
    Client {
        name: "openclaw",
        title: "OpenClaw",
        files: openclaw,
        next: |_| "openclaw agent --local".to_owned(),
    },
    Client {
        name: "qwen-code",
        title: "Qwen Code",
        files: qwen_code,
        next: |_| "qwen --auth-type openai".to_owned(),
    },
    Client {
        name: "copilot",
        title: "Copilot CLI",
        files: copilot,
        next: |_| "copilot".to_owned(),
    },
    Client {
        name: "kilo",
        title: "Kilo",
        files: kilo,
        next: |to| format!("kilo -m hearth/{}", to.model),
    },
    Client {
        name: "kimi",
        title: "Kimi Code",
        files: kimi,
        next: |_| "kimi".to_owned(),
    },
    Client {
        name: "continue",
        title: "Continue",
        files: continue_cli,
        next: |_| "cn --config ~/.config/hearth/continue.yaml".to_owned(),
    },
    Client {
        name: "aider",
        title: "aider",
        files: aider,
        next: |_| "aider".to_owned(),
    },
    Client {
        name: "llm",
        title: "llm",
        files: llm,
        next: |to| format!("llm -m {} --key {} 'Say hello.'", to.model, to.key()),
    },
    Client {
        name: "litellm",
        title: "LiteLLM",
        files: litellm,
        next: |_| "litellm --config ~/.config/hearth/litellm.yaml".to_owned(),
    },
    Client {
        name: "lm-eval",
        title: "lm-evaluation-harness",
        files: open_ai,
        next: |to| {
            format!(
                "lm_eval run --model local-chat-completions --apply_chat_template --tasks TASK \\\n  \
                 --model_args model={},base_url={}/v1/chat/completions,num_concurrent=4\n\
                 # log-likelihood tasks: --model local-completions, base_url={}/v1/completions,tokenizer=DIR",
                to.model, to.base, to.base
            )
        },
    },
    Client {
        name: "openai-sdk",
        title: "the OpenAI SDKs",
        files: open_ai,
        next: |to| {
            format!(
                "python -c 'from openai import OpenAI; print(OpenAI().chat.completions.create(model=\"{}\", \
                 messages=[{{\"role\": \"user\", \"content\": \"Say hello.\"}}]).choices[0].message.content)'",
                to.model
            )
        },
    },
    Client {
        name: "anthropic-sdk",
        title: "the Anthropic SDKs",
        files: anthropic_sdk,
        next: |to| {
            format!(
                "python -c 'from anthropic import Anthropic; print(Anthropic().messages.create(model=\"{}\", \
                 max_tokens=512, messages=[{{\"role\": \"user\", \"content\": \"Say hello.\"}}]).content)'",
                to.model
            )
        },
    },
];

/// The smallest `CLAUDE_CODE_AUTO_COMPACT_WINDOW`, in tokens.
const LEAST_COMPACT_WINDOW: usize = 100_000;

fn claude_code(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let env: Map<String, Value> = claude_variables(to)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect();
    let value = json!({ "env": env });
    vec![SettingsFile {
        file: directories.claude.join("settings.json"),
        format: FileFormat::Json {
            value,
            choices: &[],
        },
    }]
}

/// The variables that Claude Code reads.
pub(super) fn claude_variables(to: &ServedModel) -> Vec<(&'static str, String)> {
    let (model, context) = (&to.model, to.context.to_string());
    let mut variables = vec![
        ("ANTHROPIC_BASE_URL", to.base.clone()),
        ("ANTHROPIC_AUTH_TOKEN", to.key().to_owned()),
        ("ANTHROPIC_MODEL", model.clone()),
        ("ANTHROPIC_DEFAULT_OPUS_MODEL", model.clone()),
        ("ANTHROPIC_DEFAULT_SONNET_MODEL", model.clone()),
        ("ANTHROPIC_DEFAULT_HAIKU_MODEL", model.clone()),
        ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", context.clone()),
        ("CLAUDE_CODE_ATTRIBUTION_HEADER", "0".to_owned()),
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".to_owned()),
    ];
    // Claude Code reads less as its minimum, and warns at every start.
    if to.context >= LEAST_COMPACT_WINDOW {
        variables.push(("CLAUDE_CODE_AUTO_COMPACT_WINDOW", context));
    }
    variables
}

fn codex(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let mut table = format!(
        "name = \"Hearth\"\nbase_url = {}\nwire_api = \"responses\"\nstream_idle_timeout_ms = 600000\n",
        quoted(&format!("{}/v1", to.base))
    );
    // Codex reads keys from variables or from these headers.
    if let Some(key) = &to.key {
        let value = quoted(&format!("Bearer {key}"));
        table += &format!("http_headers = {{ Authorization = {value} }}\n");
    }
    vec![SettingsFile {
        file: directories.codex.join("config.toml"),
        format: FileFormat::Toml {
            top: vec![
                ("model", quoted(&to.model)),
                ("model_provider", quoted("hearth")),
                ("model_context_window", to.context.to_string()),
            ],
            name: "model_providers.hearth",
            table,
        },
    }]
}

fn open_webui(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    variables(directories, "open-webui", &open_webui_variables(to))
}

/// The variables that Open WebUI reads.
pub(super) fn open_webui_variables(to: &ServedModel) -> Vec<(&'static str, String)> {
    vec![
        ("OPENAI_API_BASE_URL", format!("{}/v1", to.base)),
        ("OPENAI_API_KEY", to.key().to_owned()),
        ("DEFAULT_MODELS", to.model.clone()),
        ("ENABLE_OLLAMA_API", "False".to_owned()),
    ]
}

fn hermes(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let block = format!(
        "model:\n  provider: custom\n  base_url: {}\n  api_key: {}\n  \
         default: {}\n  context_length: {}\n",
        quoted(&format!("{}/v1", to.base)),
        quoted(to.key()),
        quoted(&to.model),
        to.context
    );
    vec![SettingsFile {
        file: directories.home.join(".hermes/config.yaml"),
        format: FileFormat::Yaml(vec![("model", block)]),
    }]
}

fn pi(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let value = json!({"providers": {"hearth": {
        "baseUrl": format!("{}/v1", to.base),
        "api": "openai-completions",
        "apiKey": to.key(),
        "models": [{
            "id": to.model,
            "contextWindow": to.context,
            "maxTokens": to.output(),
        }],
    }}});
    vec![SettingsFile {
        file: directories.home.join(".pi/agent/models.json"),
        format: FileFormat::Json {
            value,
            choices: &[],
        },
    }]
}

fn openclaw(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let value = json!({
        "agents": {"defaults": {"model": {"primary": format!("hearth/{}", to.model)}}},
        "models": {"providers": {"hearth": {
            "baseUrl": format!("{}/v1", to.base),
            "apiKey": to.key(),
            "api": "openai-completions",
            "models": [{
                "id": to.model,
                "name": to.model,
                "reasoning": false,
                "input": ["text"],
                "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                "contextWindow": to.context,
                "maxTokens": to.output(),
            }],
        }}},
    });
    vec![SettingsFile {
        file: directories.home.join(".openclaw/openclaw.json"),
        format: FileFormat::Json {
            value,
            choices: &["/agents/defaults/model/primary"],
        },
    }]
}

fn aider(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let lines = [
        ("openai-api-base", quoted(&format!("{}/v1", to.base))),
        ("openai-api-key", quoted(to.key())),
        ("model", quoted(&format!("openai/{}", to.model))),
        ("check-update", "false".to_owned()),
        ("analytics-disable", "true".to_owned()),
        ("show-model-warnings", "false".to_owned()),
    ];
    let keys = lines.map(|(key, value)| (key, format!("{key}: {value}\n")));
    let metadata = json!({format!("openai/{}", to.model): {
        "max_input_tokens": to.context,
        "max_output_tokens": to.output(),
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }});
    vec![
        SettingsFile {
            file: directories.home.join(".aider.conf.yml"),
            format: FileFormat::Yaml(keys.to_vec()),
        },
        SettingsFile {
            file: directories.home.join(".aider.model.metadata.json"),
            format: FileFormat::Json {
                value: metadata,
                choices: &[],
            },
        },
    ]
}

fn llm(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let model = quoted(&to.model);
    let base = quoted(&format!("{}/v1", to.base));
    vec![SettingsFile {
        file: directories.llm.join("extra-openai-models.yaml"),
        format: FileFormat::YamlItems(format!(
            "- model_id: {model}\n  model_name: {model}\n  api_base: {base}\n  api_key_name: hearth\n  \
             supports_tools: true\n  supports_schema: true\n"
        )),
    }]
}

fn litellm(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let (model, key) = (&to.model, quoted(to.key()));
    let text = format!(
        "model_list:\n- model_name: {}\n  litellm_params:\n    model: {}\n    api_base: {}\n    api_key: {key}\n",
        quoted(model),
        quoted(&format!("openai/{model}")),
        quoted(&format!("{}/v1", to.base)),
    );
    vec![SettingsFile {
        file: hearth_file(directories, "litellm.yaml"),
        format: FileFormat::Own(text),
    }]
}

fn open_ai(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    variables(directories, "openai", &open_ai_variables(to))
}

/// The variables that the OpenAI SDKs read.
pub(super) fn open_ai_variables(to: &ServedModel) -> Vec<(&'static str, String)> {
    vec![
        ("OPENAI_BASE_URL", format!("{}/v1", to.base)),
        ("OPENAI_API_KEY", to.key().to_owned()),
    ]
}

fn anthropic_sdk(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    variables(directories, "anthropic", &anthropic_variables(to))
}

/// The variables that the Anthropic SDKs read.
pub(super) fn anthropic_variables(to: &ServedModel) -> Vec<(&'static str, String)> {
    vec![
        ("ANTHROPIC_BASE_URL", to.base.clone()),
        ("ANTHROPIC_AUTH_TOKEN", to.key().to_owned()),
    ]
}
