//! The clients, and how each is pointed at a server.

use std::path::PathBuf;

use serde_json::json;

use super::Target;
use super::pieces::{FileFormat, Piece};
use crate::config::directories::Directories;

/// A client that can be pointed here.
pub(super) struct Client {
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// Its name for people.
    pub(super) title: &'static str,
    /// What has to be set.
    pub(super) pieces: fn(&Target, &Directories) -> Vec<Piece>,
    /// What to run then.
    pub(super) then: fn(&Target) -> String,
}

/// All of them, by name.
pub(super) const CLIENTS: [Client; 13] = [
    Client {
        name: "claude-code",
        title: "Claude Code",
        pieces: claude_code,
        then: |_| "claude".to_owned(),
    },
    Client {
        name: "codex",
        title: "Codex",
        pieces: codex,
        then: |to| {
            let model = &to.model;
            format!(
                "codex        # or, beside another default: codex -c model_provider=hearth -m {model}"
            )
        },
    },
    Client {
        name: "opencode",
        title: "OpenCode",
        pieces: opencode,
        then: |to| format!("opencode -m hearth/{}", to.model),
    },
    Client {
        name: "open-webui",
        title: "Open WebUI",
        pieces: open_webui,
        then: |_| "open-webui serve".to_owned(),
    },
    Client {
        name: "hermes",
        title: "Hermes Agent",
        pieces: hermes,
        then: |_| "hermes".to_owned(),
    },
    Client {
        name: "pi",
        title: "Pi",
        pieces: pi,
        then: |to| format!("pi --provider hearth --model {}", to.model),
    },
    Client {
        name: "openclaw",
        title: "OpenClaw",
        pieces: openclaw,
        then: |_| "openclaw agent --local".to_owned(),
    },
    Client {
        name: "aider",
        title: "aider",
        pieces: aider,
        then: |_| "aider".to_owned(),
    },
    Client {
        name: "llm",
        title: "llm",
        pieces: llm,
        then: |to| format!("llm -m {} --key {} 'Say hello.'", to.model, to.key()),
    },
    Client {
        name: "litellm",
        title: "LiteLLM",
        pieces: litellm,
        then: |_| "litellm --config ~/.config/hearth/litellm.yaml".to_owned(),
    },
    Client {
        name: "lm-eval",
        title: "lm-evaluation-harness",
        pieces: open_ai,
        then: |to| {
            format!(
                "lm_eval run --model local-chat-completions --apply_chat_template --tasks TASK \\\n  \
                 --model_args model={},base_url={}/v1/chat/completions,num_concurrent=4\n\
                 # tasks of likelihoods: --model local-completions, base_url={}/v1/completions,tokenizer=FOLDER",
                to.model, to.base, to.base
            )
        },
    },
    Client {
        name: "openai-sdk",
        title: "the OpenAI SDKs",
        pieces: open_ai,
        then: |to| {
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
        pieces: anthropic_sdk,
        then: |to| {
            format!(
                "python -c 'from anthropic import Anthropic; print(Anthropic().messages.create(model=\"{}\", \
                 max_tokens=512, messages=[{{\"role\": \"user\", \"content\": \"Say hello.\"}}]).content)'",
                to.model
            )
        },
    },
];

fn claude_code(to: &Target, places: &Directories) -> Vec<Piece> {
    let context = to.context.to_string();
    let env = json!({
        "ANTHROPIC_BASE_URL": to.base,
        "ANTHROPIC_AUTH_TOKEN": to.key(),
        "ANTHROPIC_MODEL": to.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": context,
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": context,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    });
    let value = json!({ "env": env });
    vec![Piece {
        file: places.claude.join("settings.json"),
        form: FileFormat::Json {
            value,
            choices: &[],
        },
    }]
}

fn codex(to: &Target, places: &Directories) -> Vec<Piece> {
    let mut table = format!(
        "name = \"Hearth\"\nbase_url = {}\nwire_api = \"responses\"\nstream_idle_timeout_ms = 600000\n",
        quoted(&format!("{}/v1", to.base))
    );
    // Codex takes keys from variables, or these header lines.
    if let Some(key) = &to.key {
        let value = quoted(&format!("Bearer {key}"));
        table += &format!("http_headers = {{ Authorization = {value} }}\n");
    }
    vec![Piece {
        file: places.codex.join("config.toml"),
        form: FileFormat::Toml {
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

fn opencode(to: &Target, places: &Directories) -> Vec<Piece> {
    let model = format!("hearth/{}", to.model);
    let limit = json!({"context": to.context, "output": to.output()});
    let value = json!({
        "$schema": "https://opencode.ai/config.json",
        "provider": {"hearth": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Hearth",
            "options": {
                "baseURL": format!("{}/v1", to.base),
                "apiKey": to.key(),
                "timeout": 600_000,
            },
            "models": {&to.model: {"name": to.model, "limit": limit}},
        }},
        "model": model,
        "small_model": model,
    });
    vec![Piece {
        file: places.config.join("opencode/opencode.json"),
        form: FileFormat::Json {
            value,
            choices: &["/model", "/small_model"],
        },
    }]
}

fn open_webui(to: &Target, places: &Directories) -> Vec<Piece> {
    let base = format!("{}/v1", to.base);
    variables(
        places,
        "open-webui",
        &[
            ("OPENAI_API_BASE_URL", &base),
            ("OPENAI_API_KEY", to.key()),
            ("DEFAULT_MODELS", &to.model),
            ("ENABLE_OLLAMA_API", "False"),
        ],
    )
}

fn hermes(to: &Target, places: &Directories) -> Vec<Piece> {
    let block = format!(
        "model:\n  provider: custom\n  base_url: {}\n  api_key: {}\n  \
         default: {}\n  context_length: {}\n",
        quoted(&format!("{}/v1", to.base)),
        quoted(to.key()),
        quoted(&to.model),
        to.context
    );
    vec![Piece {
        file: places.home.join(".hermes/config.yaml"),
        form: FileFormat::Yaml(vec![("model", block)]),
    }]
}

fn pi(to: &Target, places: &Directories) -> Vec<Piece> {
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
    vec![Piece {
        file: places.home.join(".pi/agent/models.json"),
        form: FileFormat::Json {
            value,
            choices: &[],
        },
    }]
}

fn openclaw(to: &Target, places: &Directories) -> Vec<Piece> {
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
    vec![Piece {
        file: places.home.join(".openclaw/openclaw.json"),
        form: FileFormat::Json {
            value,
            choices: &["/agents/defaults/model/primary"],
        },
    }]
}

fn aider(to: &Target, places: &Directories) -> Vec<Piece> {
    let lines = [
        ("openai-api-base", quoted(&format!("{}/v1", to.base))),
        ("openai-api-key", quoted(to.key())),
        ("model", quoted(&format!("openai/{}", to.model))),
        ("check-update", "false".to_owned()),
        ("analytics-disable", "true".to_owned()),
        ("show-model-warnings", "false".to_owned()),
    ];
    let keys = lines.map(|(key, value)| (key, format!("{key}: {value}\n")));
    let about = json!({format!("openai/{}", to.model): {
        "max_input_tokens": to.context,
        "max_output_tokens": to.output(),
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }});
    vec![
        Piece {
            file: places.home.join(".aider.conf.yml"),
            form: FileFormat::Yaml(keys.to_vec()),
        },
        Piece {
            file: places.home.join(".aider.model.metadata.json"),
            form: FileFormat::Json {
                value: about,
                choices: &[],
            },
        },
    ]
}

fn llm(to: &Target, places: &Directories) -> Vec<Piece> {
    let model = quoted(&to.model);
    let base = quoted(&format!("{}/v1", to.base));
    vec![Piece {
        file: places.llm.join("extra-openai-models.yaml"),
        form: FileFormat::YamlItems(format!(
            "- model_id: {model}\n  model_name: {model}\n  api_base: {base}\n  api_key_name: hearth\n  \
             supports_tools: true\n  supports_schema: true\n"
        )),
    }]
}

fn litellm(to: &Target, places: &Directories) -> Vec<Piece> {
    let (model, key) = (&to.model, quoted(to.key()));
    let text = format!(
        "model_list:\n- model_name: {}\n  litellm_params:\n    model: {}\n    api_base: {}\n    api_key: {key}\n",
        quoted(model),
        quoted(&format!("openai/{model}")),
        quoted(&format!("{}/v1", to.base)),
    );
    vec![Piece {
        file: own(places, "litellm.yaml"),
        form: FileFormat::Own(text),
    }]
}

fn open_ai(to: &Target, places: &Directories) -> Vec<Piece> {
    let base = format!("{}/v1", to.base);
    let pairs = [
        ("OPENAI_BASE_URL", base.as_str()),
        ("OPENAI_API_KEY", to.key()),
    ];
    variables(places, "openai", &pairs)
}

fn anthropic_sdk(to: &Target, places: &Directories) -> Vec<Piece> {
    let pairs = [
        ("ANTHROPIC_BASE_URL", to.base.as_str()),
        ("ANTHROPIC_AUTH_TOKEN", to.key()),
    ];
    variables(places, "anthropic", &pairs)
}

/// A file of our own for a shell to read.
fn variables(places: &Directories, name: &str, pairs: &[(&str, &str)]) -> Vec<Piece> {
    let lines = pairs
        .iter()
        .map(|(name, value)| format!("export {name}='{}'\n", value.replace('\'', "'\\''")));
    vec![Piece {
        file: own(places, &format!("{name}.env")),
        form: FileFormat::Variables(lines.collect()),
    }]
}

fn own(places: &Directories, name: &str) -> PathBuf {
    places.config.join("hearth").join(name)
}

/// A string as JSON, TOML and YAML alike read it.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}
