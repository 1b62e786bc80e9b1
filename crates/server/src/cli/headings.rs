//! The order of `hearth serve --help`: flags under headings, and the few that `-h` shows.

use clap::{Arg, Command};

/// Headings and the ids of their arguments. What is in none stands under "Options".
const HEADINGS: [(&str, &[&str]); 7] = [
    (
        "Model",
        &[
            "model_flag",
            "hf_file",
            "offline",
            "model_name",
            "strict_model",
            "chat_template_file",
            "model_cards_dir",
            "models_dir",
            "models",
            "models_max",
            "idle_unload",
            "script",
        ],
    ),
    (
        "GPU and memory",
        &[
            "device",
            "target_devices",
            "split_mode",
            "target_layer_split",
            "peer_access",
            "cpu_reference",
            "threads",
            "max_ctx",
            "max_sequences",
            "kv_pool",
            "kv_reserve",
            "cache_type_k",
            "cache_type_v",
            "kv_type",
            "chunk",
            "vram_limit",
            "vram_headroom",
            "eager",
            "gpu_like",
            "gpu_sms",
            "separate_gemms",
            "numerics",
            "one_launch",
            "batch_invariant",
            "nvrtc",
            "kernel_cache",
            "attention_window",
            "attention_window_sinks",
            "attention_window_force",
        ],
    ),
    (
        "Speculative decoding",
        &[
            "draft",
            "ddtree",
            "no_ddtree",
            "no_speculation",
            "ddtree_budget",
            "ddtree_temp",
            "ddtree_chain_seed",
            "ddtree_cost_stop",
            "draft_sources",
            "no_mtp",
            "lookup_ngram",
            "lazy_draft",
            "draft_device",
            "draft_swa",
            "draft_width",
        ],
    ),
    (
        "Prompt cache",
        &[
            "prefix_cache_entries",
            "prefix_cache_bytes",
            "prefix_warmup",
            "kv_cache_dir",
            "kv_cache_budget",
            "kv_cache_min_tokens",
            "prefill_compression",
            "prefill_threshold",
            "prefill_keep_ratio",
            "prefill_curve",
            "prefill_keep_by_session",
            "prefill_aged",
            "prefill_drafter",
            "prefill_device",
            "prefill_exit_layer",
            "prefill_alpha",
            "prefill_profile",
            "prefill_skip_park",
        ],
    ),
    (
        "Sampling and thinking",
        &[
            "default_max_tokens",
            "max_tokens",
            "thinking_default",
            "think_max_tokens",
            "hard_limit_reply_budget",
            "reasoning_effort_low",
            "reasoning_effort_medium",
            "reasoning_effort_high",
            "reasoning_effort_x_high",
            "reasoning_effort_max",
            "temp",
            "top_p",
            "top_k",
            "min_p",
            "late_system",
            "reasoning_field",
        ],
    ),
    (
        "HTTP",
        &[
            "host",
            "port",
            "api_key",
            "api_key_file",
            "allowed_host",
            "cors_origin",
            "no_cors",
            "read_timeout",
            "max_connections",
            "always_usage",
            "queue_limit",
            "queue_timeout",
            "request_timeout",
            "write_timeout",
            "shutdown_timeout",
            "sse_ping_interval",
            "max_body",
            "responses_memory",
            "responses_dir",
            "responses_budget",
            "metrics",
            "status_page",
        ],
    ),
    (
        "Logging",
        &[
            "log_prompts",
            "log",
            "log_format",
            "no_color",
            "otlp_endpoint",
        ],
    ),
];

/// The ids of the arguments that `-h` shows.
const COMMON: [&str; 15] = [
    "model",
    "model_name",
    "device",
    "max_ctx",
    "max_sequences",
    "kv_type",
    "vram_limit",
    "draft",
    "kv_cache_dir",
    "thinking_default",
    "temp",
    "host",
    "port",
    "api_key",
    "config",
];

/// A command with the arguments of `serve` under their headings, and the rare ones left out of
/// `-h`.
pub(crate) fn arranged(command: Command) -> Command {
    command.mut_args(|arg| {
        let is_common = COMMON.contains(&arg.get_id().as_str());
        headed(arg).hide_short_help(!is_common)
    })
}

/// A command with the flags that all commands share under their headings.
pub(crate) fn arranged_globals(command: Command) -> Command {
    command.mut_args(headed)
}

fn headed(arg: Arg) -> Arg {
    let id = arg.get_id().as_str();
    let heading = HEADINGS.iter().find(|(_, ids)| ids.contains(&id));
    match heading {
        Some((heading, _)) => arg.help_heading(*heading),
        None => arg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    /// Arguments that stand under "Options" or "Arguments".
    const UNDER_OPTIONS: [&str; 5] = ["model", "config", "dry_run", "help", "version"];

    #[test]
    fn every_flag_of_serve_has_one_heading() {
        let mut root = Cli::command();
        root.build();
        let serve = root.find_subcommand("serve").unwrap();
        let ids: Vec<&str> = serve
            .get_arguments()
            .filter(|arg| !arg.is_hide_set())
            .map(|arg| arg.get_id().as_str())
            .collect();
        let all: Vec<&str> = HEADINGS.iter().flat_map(|(_, ids)| *ids).copied().collect();
        for id in &ids {
            let n_headings = usize::from(!UNDER_OPTIONS.contains(id));
            let n_listed = all.iter().filter(|at| *at == id).count();
            assert_eq!(n_listed, n_headings, "{id}");
        }
        for id in all.iter().chain(&COMMON) {
            assert!(ids.contains(id), "{id} is no flag of serve");
        }
    }
}
