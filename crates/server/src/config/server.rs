//! The server's configuration from the flags of `serve`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use chat::openai::response::ReasoningField;
use chat::request::LateSystem;
use contract::AttentionWindow;

use crate::cli::{LateSystemArg, OnOff, ReasoningFieldArg, ServeArgs};
use crate::config::{ConfigError, read_text};
use crate::kept_responses::ResponseStore;
use crate::settings::model_pulls::ModelPulls;
use crate::settings::{GenerationDefaults, ServerConfig, Timeouts, WindowPolicy};

/// Name of the bundled model in the API.
const UNNAMED: &str = "ember";

/// The configuration of the flags; values of the model's card are left at their defaults.
///
/// # Errors
/// If the file of API keys cannot be read or is empty.
pub fn server_config(args: &ServeArgs) -> Result<ServerConfig, ConfigError> {
    let defaults = GenerationDefaults {
        thinking: args.reasoning.thinking_default.map(is_on),
        ..GenerationDefaults::default()
    };
    Ok(ServerConfig {
        host: args.host.clone(),
        port: args.port,
        model_name: model_name(args),
        strict_model: args.strict_model,
        api_keys: api_keys(args)?,
        api_key_updates: None,
        allowed_hosts: args.listen.allowed_host.clone(),
        cors_origins: args.listen.cors_origin.clone(),
        cors: !args.listen.no_cors,
        max_connections: args.listen.max_connections,
        metrics: is_on(args.metrics),
        status_page: args.status_page,
        body_limit_bytes: usize::try_from(args.max_body).unwrap_or(usize::MAX) << 20,
        always_usage: args.always_usage,
        log_prompts: args.log_prompts,
        late_system: match args.late_system {
            LateSystemArg::User => LateSystem::User,
            LateSystemArg::Hoist => LateSystem::Hoist,
            LateSystemArg::Error => LateSystem::Refuse,
        },
        reasoning_field: match args.reasoning_field {
            ReasoningFieldArg::ReasoningContent => ReasoningField::ReasoningContent,
            ReasoningFieldArg::Reasoning => ReasoningField::Reasoning,
            ReasoningFieldArg::Both => ReasoningField::Both,
        },
        timeouts: Timeouts {
            queue: limit(args.queue_timeout),
            request: limit(args.request_timeout),
            read: Duration::from_secs(args.listen.read_timeout),
            write: Duration::from_secs(args.write_timeout),
            keep_alive: Duration::from_secs(args.sse_ping_interval),
            shutdown: Duration::from_secs(args.shutdown_timeout),
            ..Timeouts::default()
        },
        queue_limit: args.queue_limit,
        window: WindowPolicy {
            window: AttentionWindow::new(
                args.window.attention_window,
                args.window.attention_window_sinks,
            ),
            force: args.window.attention_window_force,
        },
        defaults,
        responses: ResponseStore::in_memory(args.listen.responses.responses_memory << 20),
        pulls: ModelPulls::default(),
    })
}

/// The file to serve, from the argument or the flag.
pub fn model_path(args: &ServeArgs) -> Option<&PathBuf> {
    args.model.as_ref().or(args.model_flag.as_ref())
}

/// Whether a switch is on.
pub fn is_on(switch: OnOff) -> bool {
    switch == OnOff::On
}

/// A time limit in seconds; 0 means no limit.
fn limit(seconds: u64) -> Option<Duration> {
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

fn model_name(args: &ServeArgs) -> String {
    let stem = |path: &PathBuf| {
        let stem = Path::new(path).file_stem()?.to_string_lossy().into_owned();
        (!stem.is_empty()).then_some(stem)
    };
    args.model_name
        .clone()
        .or_else(|| model_path(args).and_then(stem))
        .unwrap_or_else(|| UNNAMED.to_owned())
}

fn api_keys(args: &ServeArgs) -> Result<Vec<String>, ConfigError> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let text = read_text("--api-key-file", path)?;
        let lines = text.lines().map(str::trim);
        let found: Vec<String> = lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(str::to_owned)
            .collect();
        if found.is_empty() {
            // An empty file must not open the server to everyone.
            let detail = "holds no keys; write one per line".to_owned();
            return Err(ConfigError::File {
                path: path.clone(),
                detail,
            });
        }
        keys.extend(found);
    }
    keys.retain(|key| !key.is_empty());
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn config(words: &[&str]) -> Result<ServerConfig, ConfigError> {
        let words = ["hearth", "serve"].iter().chain(words);
        match Cli::try_parse_from(words)?.command {
            Command::Serve(args) => server_config(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flag_defaults_equal_the_server_defaults() {
        let config = config(&[]).unwrap();
        let own = ServerConfig::default();
        assert_eq!((config.host, config.port), (own.host, own.port));
        assert_eq!(
            (config.timeouts, config.queue_limit),
            (own.timeouts, own.queue_limit)
        );
        assert_eq!(
            (config.cors, config.metrics, config.body_limit_bytes),
            (true, true, own.body_limit_bytes)
        );
        assert_eq!(config.defaults, own.defaults);
        assert_eq!(config.model_name, UNNAMED);
    }

    #[test]
    fn model_is_named_after_its_file_unless_a_flag_names_it() {
        assert_eq!(
            config(&["dir/Qwen3.5-0.8B.Q4.gguf"]).unwrap().model_name,
            "Qwen3.5-0.8B.Q4"
        );
        assert_eq!(config(&["--model", "a.gguf"]).unwrap().model_name, "a");
        assert_eq!(
            config(&["a.gguf", "--model-name", "b"]).unwrap().model_name,
            "b"
        );
    }

    #[test]
    fn zero_means_no_limit() {
        let config = config(&["--queue-timeout", "0", "--request-timeout", "7"]).unwrap();
        assert_eq!(config.timeouts.queue, None);
        assert_eq!(config.timeouts.request, Some(Duration::from_secs(7)));
    }

    #[test]
    fn keys_come_from_flags_and_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# ours\n k1 \n\nk2\n").unwrap();
        let path = file.path().to_str().unwrap();
        let both = config(&["--api-key", "k0", "--api-key-file", path]).unwrap();
        assert_eq!(both.api_keys, ["k0", "k1", "k2"]);
        std::fs::write(file.path(), "\n").unwrap();
        let error = config(&["--api-key-file", path]).unwrap_err().to_string();
        assert!(error.contains("holds no keys"), "{error}");
    }
}
