//! Settings of coding agents that take a server of the user's own by variables or a file.

use serde_json::{Value, json};

use super::ServedModel;
use super::settings_file::{FileFormat, SettingsFile, hearth_file, quoted, variables};
use crate::config::directories::Directories;

pub(super) fn opencode(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    vec![SettingsFile {
        file: directories.config.join("opencode/opencode.json"),
        format: FileFormat::Json {
            value: opencode_value(to),
            choices: &["/model", "/small_model"],
        },
    }]
}

/// The settings of OpenCode.
fn opencode_value(to: &ServedModel) -> Value {
    let model = format!("hearth/{}", to.model);
    let limit = json!({"context": to.context, "output": to.output()});
    json!({
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
    })
}

pub(super) fn qwen_code(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    variables(directories, "qwen-code", &qwen_code_variables(to))
}

/// The variables that Qwen Code reads.
pub(super) fn qwen_code_variables(to: &ServedModel) -> Vec<(&'static str, String)> {
    vec![
        ("OPENAI_BASE_URL", format!("{}/v1", to.base)),
        ("OPENAI_API_KEY", to.key().to_owned()),
        ("OPENAI_MODEL", to.model.clone()),
        ("QWEN_TELEMETRY_ENABLED", "false".to_owned()),
    ]
}

pub(super) fn copilot(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    variables(directories, "copilot", &copilot_variables(to))
}

/// The variables that Copilot's command line reads; with them it needs no account.
pub(super) fn copilot_variables(to: &ServedModel) -> Vec<(&'static str, String)> {
    let prompt = to.context.saturating_sub(to.output());
    vec![
        ("COPILOT_PROVIDER_BASE_URL", format!("{}/v1", to.base)),
        ("COPILOT_PROVIDER_API_KEY", to.key().to_owned()),
        ("COPILOT_MODEL", to.model.clone()),
        ("COPILOT_PROVIDER_MAX_PROMPT_TOKENS", prompt.to_string()),
        (
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS",
            to.output().to_string(),
        ),
        ("COPILOT_OFFLINE", "true".to_owned()),
    ]
}

pub(super) fn kimi(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    variables(directories, "kimi", &kimi_variables(to))
}

/// The variables that Kimi Code reads; with them it needs no account.
pub(super) fn kimi_variables(to: &ServedModel) -> Vec<(&'static str, String)> {
    vec![
        ("KIMI_MODEL_PROVIDER_TYPE", "openai".to_owned()),
        ("KIMI_MODEL_BASE_URL", format!("{}/v1", to.base)),
        ("KIMI_MODEL_API_KEY", to.key().to_owned()),
        ("KIMI_MODEL_NAME", to.model.clone()),
        ("KIMI_MODEL_MAX_CONTEXT_SIZE", to.context.to_string()),
        ("KIMI_CODE_NO_AUTO_UPDATE", "1".to_owned()),
    ]
}

/// Kilo is made from OpenCode and reads the same settings.
pub(super) fn kilo(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let mut value = opencode_value(to);
    value["$schema"] = json!("https://app.kilo.ai/config.json");
    vec![SettingsFile {
        file: directories.config.join("kilo/kilo.json"),
        format: FileFormat::Json {
            value,
            choices: &["/model", "/small_model"],
        },
    }]
}

/// Continue reads one file with all models, so Hearth's is beside the user's own.
pub(super) fn continue_cli(to: &ServedModel, directories: &Directories) -> Vec<SettingsFile> {
    let model = quoted(&to.model);
    let text = format!(
        "name: Hearth\nversion: 1.0.0\nschema: v1\nmodels:\n- name: {model}\n  provider: openai\n  \
         model: {model}\n  apiBase: {}\n  apiKey: {}\n  roles: [chat]\n  \
         capabilities: [tool_use]\n  defaultCompletionOptions:\n    contextLength: {}\n    \
         maxTokens: {}\n",
        quoted(&format!("{}/v1", to.base)),
        quoted(to.key()),
        to.context,
        to.output()
    );
    vec![SettingsFile {
        file: hearth_file(directories, "continue.yaml"),
        format: FileFormat::Own(text),
    }]
}
