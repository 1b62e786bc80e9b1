//! How each client starts with settings for one run: by variables, words, or files in folders of
//! their own.

use super::ServedModel;
use super::clients::{
    anthropic_variables, claude_variables, open_ai_variables, open_webui_variables,
};
use super::coding_agents::{copilot_variables, kimi_variables, qwen_code_variables};
use super::settings_file::{hearth_file, quoted};
use crate::config::directories::Directories;

/// The start of a client.
pub(super) struct Start {
    /// The program; empty for a library, whose user names one.
    pub(super) program: String,
    /// Words before those of the user.
    pub(super) args: Vec<String>,
    /// Variables beside those of this process.
    pub(super) variables: Vec<(&'static str, String)>,
}

/// How a client starts for a server, with its files in these folders.
pub(super) type StartFn = fn(&ServedModel, &Directories) -> Start;

/// How the client of this name starts.
pub(super) fn start_of(client: &str) -> Option<StartFn> {
    Some(match client {
        "claude-code" => claude_code,
        "codex" => codex,
        "opencode" => opencode,
        "open-webui" => open_webui,
        "hermes" => hermes,
        "pi" => pi,
        "openclaw" => openclaw,
        "qwen-code" => qwen_code,
        "copilot" => copilot,
        "kilo" => kilo,
        "kimi" => kimi,
        "continue" => continue_cli,
        "aider" => aider,
        "llm" => llm,
        "litellm" => litellm,
        "lm-eval" => lm_eval,
        "openai-sdk" => open_ai,
        "anthropic-sdk" => anthropic,
        _ => return None,
    })
}

fn start(program: &str, args: &[&str], variables: Vec<(&'static str, String)>) -> Start {
    Start {
        program: program.to_owned(),
        args: args.iter().map(|word| (*word).to_owned()).collect(),
        variables,
    }
}

fn claude_code(to: &ServedModel, _: &Directories) -> Start {
    start("claude", &[], claude_variables(to))
}

/// Overrides on the command line leave the user's own configuration, sign-in and history in place.
fn codex(to: &ServedModel, _: &Directories) -> Start {
    let mut settings = vec![
        ("model".to_owned(), quoted(&to.model)),
        ("model_provider".to_owned(), quoted("hearth")),
        ("model_context_window".to_owned(), to.context.to_string()),
    ];
    let mut provider = vec![
        ("name", quoted("Hearth")),
        ("base_url", quoted(&format!("{}/v1", to.base))),
        ("wire_api", quoted("responses")),
        ("stream_idle_timeout_ms", "600000".to_owned()),
    ];
    let mut variables = Vec::new();
    if let Some(key) = &to.key {
        // A variable, since every user of the machine sees command lines.
        provider.push(("env_key", quoted("LAUNCHED_SERVER_KEY")));
        variables.push(("LAUNCHED_SERVER_KEY", key.clone()));
    }
    let provider = provider.into_iter();
    settings.extend(provider.map(|(key, value)| (format!("model_providers.hearth.{key}"), value)));
    let words = settings
        .into_iter()
        .flat_map(|(key, value)| ["-c".to_owned(), format!("{key}={value}")]);
    Start {
        program: "codex".to_owned(),
        args: words.collect(),
        variables,
    }
}

fn opencode(_: &ServedModel, own: &Directories) -> Start {
    let file = own.config.join("opencode/opencode.json");
    let file = file.display().to_string();
    start("opencode", &[], vec![("OPENCODE_CONFIG", file)])
}

fn open_webui(to: &ServedModel, _: &Directories) -> Start {
    start("open-webui", &["serve"], open_webui_variables(to))
}

fn hermes(_: &ServedModel, own: &Directories) -> Start {
    let home = own.home.join(".hermes").display().to_string();
    start("hermes", &[], vec![("HERMES_HOME", home)])
}

fn pi(to: &ServedModel, own: &Directories) -> Start {
    let folder = own.home.join(".pi/agent").display().to_string();
    let args = ["--provider", "hearth", "--model", &to.model];
    start("pi", &args, vec![("PI_CODING_AGENT_DIR", folder)])
}

fn openclaw(_: &ServedModel, own: &Directories) -> Start {
    let file = own.home.join(".openclaw/openclaw.json");
    let variables = vec![("OPENCLAW_CONFIG_PATH", file.display().to_string())];
    start("openclaw", &["agent", "--local"], variables)
}

fn qwen_code(to: &ServedModel, _: &Directories) -> Start {
    start("qwen", &["--auth-type", "openai"], qwen_code_variables(to))
}

fn copilot(to: &ServedModel, _: &Directories) -> Start {
    start("copilot", &[], copilot_variables(to))
}

fn kilo(_: &ServedModel, own: &Directories) -> Start {
    let file = own.config.join("kilo/kilo.json").display().to_string();
    start("kilo", &[], vec![("KILO_CONFIG", file)])
}

fn kimi(to: &ServedModel, _: &Directories) -> Start {
    start("kimi", &[], kimi_variables(to))
}

fn continue_cli(_: &ServedModel, own: &Directories) -> Start {
    let file = hearth_file(own, "continue.yaml").display().to_string();
    start("cn", &["--config", &file], Vec::new())
}

fn aider(_: &ServedModel, own: &Directories) -> Start {
    let config = own.home.join(".aider.conf.yml").display().to_string();
    let metadata = own
        .home
        .join(".aider.model.metadata.json")
        .display()
        .to_string();
    let args = ["--config", &config, "--model-metadata-file", &metadata];
    start("aider", &args, Vec::new())
}

fn llm(to: &ServedModel, own: &Directories) -> Start {
    let args = ["chat", "-m", &to.model, "--key", to.key()];
    let folder = own.llm.display().to_string();
    start("llm", &args, vec![("LLM_USER_PATH", folder)])
}

fn litellm(_: &ServedModel, own: &Directories) -> Start {
    let file = hearth_file(own, "litellm.yaml").display().to_string();
    start("litellm", &["--config", &file], Vec::new())
}

fn lm_eval(to: &ServedModel, _: &Directories) -> Start {
    let model = format!(
        "model={},base_url={}/v1/chat/completions,num_concurrent=4",
        to.model, to.base
    );
    let kind = ["--model", "local-chat-completions", "--apply_chat_template"];
    let mut started = start("lm_eval", &["run"], open_ai_variables(to));
    let words = kind.into_iter().chain(["--model_args", &model]);
    started.args.extend(words.map(str::to_owned));
    started
}

fn open_ai(to: &ServedModel, _: &Directories) -> Start {
    start("", &[], open_ai_variables(to))
}

fn anthropic(to: &ServedModel, _: &Directories) -> Start {
    start("", &[], anthropic_variables(to))
}
