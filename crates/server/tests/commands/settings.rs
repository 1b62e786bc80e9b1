//! Tests of every flag and variable of this server and its predecessor: each works, or is refused
//! by name with a sentence.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

use crate::client::ServerProcess;
use crate::process::{command, hearth, model};

/// The effect of a flag or a variable.
enum Fate {
    /// Sets the setting of this name.
    Sets(&'static str),
    /// Refused with a sentence that contains this part.
    Refused(&'static str),
}
use Fate::{Refused, Sets};

/// Flags, with the words that follow each, in the order of the specification's table.
const FLAGS: [(&str, &[&str], Fate); 102] = [
    ("--model", &["m.gguf"], Sets("model")),
    ("--draft", &["d.gguf"], Sets("draft")),
    ("--port", &["9"], Sets("port")),
    ("--host", &["::1"], Sets("host")),
    ("--max-ctx", &["4096"], Sets("max-ctx")),
    ("--max-tokens", &["512"], Sets("max-tokens")),
    ("--model-name", &["x"], Sets("model-name")),
    (
        "--chat-template-file",
        &["t.jinja"],
        Sets("chat-template-file"),
    ),
    ("--ddtree", &[], Sets("ddtree")),
    ("--no-ddtree", &[], Sets("no-ddtree")),
    ("--no-speculation", &[], Sets("no-speculation")),
    ("--ddtree-budget", &["22"], Sets("ddtree-budget")),
    ("--attention-window", &["2048"], Sets("attention-window")),
    ("--fa-window", &["2048"], Sets("attention-window")),
    (
        "--attention-window-force",
        &[],
        Sets("attention-window-force"),
    ),
    ("--fa-window-force", &[], Sets("attention-window-force")),
    (
        "--attention-window-sinks",
        &["4"],
        Sets("attention-window-sinks"),
    ),
    ("--fa-window-sinks", &["4"], Sets("attention-window-sinks")),
    ("--lazy-draft", &[], Sets("lazy-draft")),
    (
        "--prefill-compression",
        &["auto"],
        Sets("prefill-compression"),
    ),
    ("--prefill-threshold", &["1000"], Sets("prefill-threshold")),
    ("--prefill-keep-ratio", &["0.1"], Sets("prefill-keep-ratio")),
    ("--prefill-drafter", &["d.gguf"], Sets("prefill-drafter")),
    ("--prefill-skip-park", &[], Sets("prefill-skip-park")),
    ("--cache-type-k", &["q8_0"], Sets("cache-type-k")),
    ("--cache-type-v", &["tq3_0"], Sets("cache-type-v")),
    ("--think-max-tokens", &["100"], Sets("think-max-tokens")),
    ("--default-max-tokens", &["100"], Sets("default-max-tokens")),
    (
        "--hard-limit-reply-budget",
        &["512"],
        Sets("hard-limit-reply-budget"),
    ),
    (
        "--reasoning-effort-low",
        &["100"],
        Sets("reasoning-effort-low"),
    ),
    (
        "--reasoning-effort-medium",
        &["100"],
        Sets("reasoning-effort-medium"),
    ),
    (
        "--reasoning-effort-high",
        &["100"],
        Sets("reasoning-effort-high"),
    ),
    (
        "--reasoning-effort-x-high",
        &["100"],
        Sets("reasoning-effort-x-high"),
    ),
    (
        "--reasoning-effort-max",
        &["100"],
        Sets("reasoning-effort-max"),
    ),
    ("--target-device", &["cpu"], Sets("device")),
    ("--draft-device", &["cpu"], Sets("draft-device")),
    (
        "--target-devices",
        &["cuda:0,cuda:1"],
        Sets("target-devices"),
    ),
    ("--target-layer-split", &["1,1"], Sets("target-layer-split")),
    ("--target-split-mode", &["tensor"], Sets("split-mode")),
    ("--draft-ipc-bin", &["x"], Refused("--draft-device")),
    ("--draft-ipc-gpu", &["1"], Refused("--draft-device")),
    ("--peer-access", &[], Sets("peer-access")),
    ("--chunk", &["128"], Sets("chunk")),
    ("--no-cors", &[], Sets("no-cors")),
    (
        "--prefix-cache-entries",
        &["4"],
        Sets("prefix-cache-entries"),
    ),
    ("--prefix-cache-slots", &["4"], Sets("prefix-cache-entries")),
    ("--lookup-ngram", &["3"], Sets("lookup-ngram")),
    ("--draft-sources", &["mtp,suffix"], Sets("draft-sources")),
    ("--no-mtp", &[], Sets("no-mtp")),
    ("--prefix-cache-bytes", &["1G"], Sets("prefix-cache-bytes")),
    ("--kv-cache-dir", &["kv"], Sets("kv-cache-dir")),
    ("--kv-cache-budget", &["100"], Sets("kv-cache-budget")),
    ("--prefill-cache-slots", &["4"], Refused("kv-cache-dir")),
    ("--kv-cache-min-tokens", &["4"], Sets("kv-cache-min-tokens")),
    ("--kv-cache-interval", &["4"], Refused("kv-cache-dir")),
    ("--kv-cache-cold-max", &["4"], Refused("kv-cache-dir")),
    ("--disk-prefix-cache", &["auto:30"], Refused("kv-cache-dir")),
    ("--prefill-aged", &[], Sets("prefill-aged")),
    ("--disk-prefix-cache-compress", &[], Sets("prefill-aged")),
    (
        "--prefill-curve",
        &["10000:0.5", "40000:0.2"],
        Sets("prefill-curve"),
    ),
    (
        "--prefill-upstream-base",
        &["http://x"],
        Refused("directly"),
    ),
    ("--prefill-upstream-key", &["k"], Refused("directly")),
    ("--prefill-upstream-model", &["m"], Refused("directly")),
    (
        "--draft-residency",
        &["request-scoped"],
        Refused("--lazy-draft"),
    ),
    ("--fast-rollback=0", &[], Refused("rolled back")),
    ("--no-fast-rollback", &[], Refused("rolled back")),
    ("--verify-width", &["8"], Refused("--ddtree-budget")),
    ("--draft-swa", &["128"], Sets("draft-swa")),
    ("--kvflash", &["auto"], Refused("--max-ctx")),
    ("--kvflash-policy", &["lru"], Refused("--max-ctx")),
    ("--kvflash-tau", &["64"], Refused("--max-ctx")),
    ("--adaptive-experts", &[], Refused("experts")),
    ("--spark", &[], Refused("experts")),
    ("--spark-slots", &["4"], Refused("experts")),
    ("--spark-vram", &["4"], Refused("experts")),
    ("--freq", &["x"], Refused("experts")),
    ("--collect-routing", &["x"], Refused("experts")),
    ("--ds4-anything", &[], Refused("model family")),
    ("--target-shard-ipc-bin", &["x"], Refused("one process")),
    ("--draft-ipc-work-dir", &["x"], Refused("one process")),
    ("--draft-ipc-ring-cap", &["4"], Refused("one process")),
    ("--early-dispatch", &[], Refused("--prefix-warmup")),
    ("--end-turn-snapshot", &[], Refused("--prefix-warmup")),
    ("--prefetch-prefill", &[], Refused("--prefix-warmup")),
    ("--api-key", &["k"], Sets("api-key")),
    ("--api-key-file", &["Cargo.toml"], Sets("api-key-file")),
    ("--queue-limit", &["3"], Sets("queue-limit")),
    ("--queue-timeout", &["3"], Sets("queue-timeout")),
    ("--request-timeout", &["3"], Sets("request-timeout")),
    ("--write-timeout", &["3"], Sets("write-timeout")),
    ("--shutdown-timeout", &["3"], Sets("shutdown-timeout")),
    ("--sse-ping-interval", &["3"], Sets("sse-ping-interval")),
    ("--thinking-default", &["off"], Sets("thinking-default")),
    ("--late-system", &["hoist"], Sets("late-system")),
    ("--always-usage", &[], Sets("always-usage")),
    ("--strict-model", &[], Sets("strict-model")),
    ("--status-page", &[], Sets("status-page")),
    ("--metrics", &["off"], Sets("metrics")),
    ("--log-format", &["json"], Sets("log-format")),
    ("--log-prompts", &[], Sets("log-prompts")),
    ("--model-cards-dir", &["."], Sets("model-cards-dir")),
    ("--max-sequences", &["2"], Sets("max-sequences")),
];

/// Variables of the predecessor, each with a value.
const VARIABLES: [(&str, &str, Fate); 17] = [
    ("DFLASH_FP_USE_BSA", "0", Sets("prefill-alpha")),
    ("DFLASH_FP_ALPHA", "0.85", Sets("prefill-alpha")),
    ("DFLASH_FP_PROFILE", "1", Sets("prefill-profile")),
    ("DFLASH27B_KV_TQ3", "1", Sets("kv-type")),
    ("DFLASH27B_KV_Q4", "1", Sets("kv-type")),
    ("DFLASH27B_KV_F16", "1", Sets("kv-type")),
    ("DFLASH27B_KV_K", "q8_0", Sets("cache-type-k")),
    ("DFLASH27B_KV_V", "q8_0", Sets("cache-type-v")),
    ("DFLASH27B_PREFILL_UBATCH", "128", Sets("chunk")),
    ("DFLASH27B_DRAFT_SWA", "128", Sets("draft-swa")),
    ("DFLASH_TARGET", "m.gguf", Sets("model")),
    ("DFLASH_DRAFT", "d.gguf", Sets("draft")),
    ("DFLASH_MODEL_NAME", "x", Sets("model-name")),
    ("DFLASH_MODEL_CARDS_DIR", ".", Sets("model-cards-dir")),
    ("DFLASH_KVFLASH", "auto", Refused("--max-ctx")),
    ("DFLASH_SPARK", "1", Refused("experts")),
    ("HEARTH_TARGET_DEVICE", "cpu", Sets("device")),
];

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs `hearth config show --json` with further words, on the bundled model unless one is named.
fn show(words: &[&str], change: impl FnOnce(&mut Command) -> &mut Command) -> Output {
    let mut command = command();
    command.args(["config", "show", "--json"]).args(words);
    change(&mut command).output().unwrap()
}

/// Value and origin of a setting.
fn setting(output: &Output, name: &str) -> (String, String) {
    let settings: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    let found = settings.as_array().unwrap().iter();
    let found = found.filter(|setting| setting["name"] == name);
    let found: Vec<&Value> = found.collect();
    assert_eq!(found.len(), 1, "{name}: {found:?}");
    let part = |key: &str| found[0][key].as_str().unwrap_or("").to_owned();
    (part("value"), part("origin"))
}

fn check_refused(output: &Output, name: &str, part: &str) {
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{name}: {err}");
    let named = format!("{name} is not supported");
    assert!(err.contains(&named) && err.contains(part), "{name}: {err}");
}

#[test]
fn every_specified_flag_works_or_is_refused_by_name() {
    let model = model();
    for (flag, follow, fate) in &FLAGS {
        let mut words = vec![*flag];
        words.extend(follow.iter());
        let name = flag.split('=').next().unwrap();
        if name == "--model" {
            words[1] = model.to_str().unwrap();
        }
        let output = show(&words, |command| command);
        match fate {
            Refused(part) => check_refused(&output, name, part),
            Sets(name) => assert_eq!(setting(&output, name).1, "flag", "{flag}"),
        }
    }
}

#[test]
fn every_flag_has_its_variable_and_its_key_in_the_file() {
    for (flag, follow, fate) in &FLAGS {
        let name = flag.trim_start_matches("--");
        let (name, value) = match (name.split_once('='), follow.first()) {
            (Some((name, value)), _) => (name, value),
            (None, Some(value)) => (name, *value),
            (None, None) => (name, "true"),
        };
        // Refused by prefix only; `model` is not a setting of its own.
        if name.starts_with("ds4-") || name.starts_with("target-shard") || name == "model" {
            continue;
        }
        let variable = format!("HEARTH_{}", name.to_uppercase().replace('-', "_"));
        let by_variable = show(&[], |command| command.env(&variable, value));
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), format!("{name} = \"{value}\"\n")).unwrap();
        let words = ["--config", file.path().to_str().unwrap()];
        let by_file = show(&words, |command| command);
        match fate {
            Refused(part) => {
                check_refused(&by_variable, &format!("--{name}"), part);
                check_refused(&by_file, &format!("--{name}"), part);
            }
            Sets(sets) => {
                let (_, origin) = setting(&by_variable, sets);
                assert_eq!(origin, "environment", "{variable}");
                assert_eq!(setting(&by_file, sets).1, "configuration file", "{name}");
            }
        }
    }
}

/// Variables of version 0.1, each with a value and the setting that it sets; flags and keys were
/// named alike.
const OLD_SPELLINGS: [(&str, &str, &str); 8] = [
    ("HEARTH_READ_AHEAD", "1024", "prefix-warmup"),
    ("HEARTH_EXACT", "true", "batch-invariant"),
    ("HEARTH_FA_WINDOW", "2048", "attention-window"),
    ("HEARTH_FA_WINDOW_SINKS", "4", "attention-window-sinks"),
    ("HEARTH_FA_WINDOW_FORCE", "true", "attention-window-force"),
    ("HEARTH_PREFIX_CACHE_SLOTS", "4", "prefix-cache-entries"),
    ("HEARTH_LOOKUP", "3", "lookup-ngram"),
    ("HEARTH_SUMS", "fast", "numerics"),
];

#[test]
fn old_spellings_set_the_renamed_settings() {
    for (variable, value, new) in OLD_SPELLINGS {
        let old = variable["HEARTH_".len()..].to_lowercase().replace('_', "-");
        let flag = format!("--{old}");
        let words = match value {
            "true" => vec![flag.as_str()],
            value => vec![flag.as_str(), value],
        };
        let expected = |origin: &str| (value.to_owned(), origin.to_owned());
        let by_flag = show(&words, |command| command);
        assert_eq!(setting(&by_flag, new), expected("flag"), "{old}");
        let by_variable = show(&[], |command| command.env(variable, value));
        let by_variable = setting(&by_variable, new);
        assert_eq!(by_variable, expected("environment"), "{variable}");
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), format!("{old} = \"{value}\"\n")).unwrap();
        let words = ["--config", file.path().to_str().unwrap()];
        let by_file = setting(&show(&words, |command| command), new);
        assert_eq!(by_file, expected("configuration file"), "{old}");
        let help = hearth(&["serve", "--help"]).out;
        // `--lookup` also begins `--lookup-ngram`.
        let is_shown = help.split([' ', '\n', '`', ',']).any(|word| word == flag);
        assert!(!is_shown, "{flag} is hidden in the help");
    }
}

#[test]
fn variables_of_the_predecessor_set_its_settings() {
    let model = model();
    for (variable, value, fate) in &VARIABLES {
        let value = match fate {
            Sets("model") => model.to_str().unwrap(),
            _ => value,
        };
        let output = show(&[], |command| command.env(variable, value));
        match fate {
            Refused(part) => check_refused(&output, variable, part),
            Sets(name) => {
                assert_eq!(setting(&output, name).1, "environment", "{variable}");
            }
        }
    }
}

#[test]
fn precedence_is_flag_environment_file_card_default() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hearth.toml");
    fs::write(
        &file,
        "port = 1\nqueue-limit = 1\ndefault_max_tokens = 1\nkv-type = \"f16\"\n",
    )
    .unwrap();
    let words = ["--config", file.to_str().unwrap(), "--port", "3"];
    let output = show(&words, |command| {
        command
            .env("HEARTH_PORT", "2")
            .env("HEARTH_QUEUE_LIMIT", "2")
            .env("DFLASH27B_KV_TQ3", "1")
            .env("HEARTH_API_KEY", "one-secret,two-secret")
    });
    let is = |name: &str| setting(&output, name);
    let pair = |value: &str, origin: &str| (value.to_owned(), origin.to_owned());
    assert_eq!(is("port"), pair("3", "flag"));
    assert_eq!(is("queue-limit"), pair("2", "environment"));
    assert_eq!(is("kv-type"), pair("tq3_0,q4_0", "environment"));
    assert_eq!(is("default-max-tokens"), pair("1", "configuration file"));
    assert_eq!(is("temperature").1, "model card");
    assert_eq!(is("host"), pair("127.0.0.1", "default"));
    assert_eq!(is("api-key"), pair("2 keys", "environment"));
    assert!(!text(&output.stdout).contains("secret"));
    let table = hearth(&["config", "show", "--port", "3", "--api-key", "one-secret"]);
    assert_eq!(table.code, Some(0), "{}", table.err);
    let line = |name: &str| {
        let mut lines = table.out.lines();
        let found = lines.find(|line| line.starts_with(&format!("{name} ")));
        found.unwrap_or_else(|| panic!("{name} in {}", table.out))
    };
    assert!(line("port").contains(" 3 ") && line("port").ends_with("flag"));
    assert!(!table.out.contains("secret"), "{}", table.out);
}

#[test]
fn invalid_configuration_file_is_refused_with_a_suggestion() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for (toml, part) in [
        ("prot = 1", "did you mean port?"),
        ("max-ctxt = 1", "did you mean max-ctx?"),
        ("draft-ipc-bin = \"x\"", "--draft-ipc-bin is not supported"),
        (
            "device = \"cpu\"\ntarget-device = \"cpu\"",
            "the same setting twice",
        ),
    ] {
        fs::write(file.path(), toml).unwrap();
        for words in [
            vec!["serve", "--config", path],
            vec!["config", "show", "--config", path],
        ] {
            let done = hearth(&words);
            assert_ne!(done.code, Some(0), "{toml}");
            assert!(done.err.contains(part), "{toml}: {}", done.err);
        }
    }
    let done = hearth(&["serve", "--ddtree-budgets", "3"]);
    assert!(done.err.contains("--ddtree-budget'"), "{}", done.err);
}

#[test]
fn start_command_of_the_predecessor_works_under_the_new_name() {
    let model = model();
    let mut line = command();
    line.env("DFLASH27B_KV_TQ3", "1").args([
        model.to_str().unwrap(),
        "--ddtree",
        "--ddtree-budget",
        "22",
        "--fa-window",
        "2048",
        "--max-ctx",
        "2048",
        "--max-tokens",
        "512",
        "--model-name",
        "luce-dflash",
        "--port",
        "0",
    ]);
    let server = ServerProcess::spawn(line);
    // A device without the first type uses the second, and logs it.
    let stores = |name: &str| server.log.contains(&format!("keys {name}, values {name}"));
    assert!(stores("tq3_0") || stores("q4_0"), "{}", server.log);
    let catalogue = server
        .request("/v1/models?client_version=0.169.0", "")
        .json();
    assert_eq!(catalogue["models"][0]["slug"], "luce-dflash");
    let body =
        r#"{"model": "luce-dflash", "input": "Hello", "max_output_tokens": 2, "stream": true}"#;
    let response = server.request("/v1/responses", body);
    assert!(
        response.body.contains("event: response.created"),
        "{}",
        response.body
    );
    assert!(
        response.body.contains("event: response.completed")
            || response.body.contains("event: response.incomplete"),
        "{}",
        response.body
    );
}

#[test]
fn shipped_service_files_name_existing_settings() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("service");
    let unit = fs::read_to_string(dir.join("hearth.service")).unwrap();
    let start = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let keys = tempfile::NamedTempFile::new().unwrap();
    fs::write(keys.path(), "k\n").unwrap();
    let example = fs::read_to_string(dir.join("hearth.toml")).unwrap();
    // Commented settings must be valid too, except those that name absent files.
    let lines = example.lines().map(|line| match line.strip_prefix("# ") {
        Some(setting) if setting.contains(" = ") && !setting.contains('/') => setting,
        _ => line,
    });
    let settings = tempfile::NamedTempFile::new().unwrap();
    fs::write(settings.path(), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let words: Vec<String> = start
        .unwrap()
        .split(' ')
        .skip(2)
        .map(|word| match word {
            "/etc/hearth/hearth.toml" => settings.path().display().to_string(),
            "%d/keys" => keys.path().display().to_string(),
            word => word.to_owned(),
        })
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = show(&words, |command| command);
    assert_eq!(setting(&output, "kv-type").1, "configuration file");
    assert_eq!(setting(&output, "api-key-file").1, "flag");
    assert!(unit.contains("Type=notify") && unit.contains("WatchdogSec="));
}
