//! Tests of the flags that users of llama-server, vLLM and ollama type: each sets a setting, is
//! taken silently, or is answered with the flag to use.

use std::fs;

use serde_json::Value;

use crate::process::{command, hearth, model};

/// The effect of a spelling.
enum Effect {
    /// Sets the setting of this name to this value.
    Sets(&'static str, &'static str),
    /// Asks for what is always so: no setting changes.
    Nothing,
    /// Refused with a sentence that contains this part.
    Refused(&'static str),
}
use Effect::{Nothing, Refused, Sets};

const SPELLINGS: &[(&str, Effect)] = &[
    // llama-server.
    ("-m MODEL", Sets("model", "MODEL")),
    ("-c 4096", Sets("max-ctx", "4096")),
    ("--ctx-size 4096", Sets("max-ctx", "4096")),
    ("-c 0", Nothing),
    ("-ngl 99", Nothing),
    ("-ngl all", Nothing),
    ("--n-gpu-layers -1", Nothing),
    ("-ngl 20", Refused("--device cpu")),
    ("--gpu-layers 0", Refused("--device cpu")),
    ("-np 2", Sets("max-sequences", "2")),
    ("--parallel 2", Sets("max-sequences", "2")),
    ("-np -1", Nothing),
    ("-t 3", Sets("threads", "3")),
    ("-t -1", Nothing),
    ("-tb 3", Refused("--threads")),
    ("-fa", Nothing),
    ("-fa on", Nothing),
    ("--flash-attn auto", Nothing),
    ("-fa off", Refused("remove it")),
    ("-a x", Sets("model-name", "x")),
    ("--alias x", Sets("model-name", "x")),
    ("--temp 0.5", Sets("temp", "0.5")),
    ("--top-p 0.5", Sets("top-p", "0.5")),
    ("--top-k 5", Sets("top-k", "5")),
    ("--min-p 0.5", Sets("min-p", "0.5")),
    ("--jinja", Nothing),
    ("--no-jinja", Refused("template")),
    ("--chat-template chatml", Refused("--chat-template-file")),
    ("--mmproj p.gguf", Refused("images")),
    ("-n 64", Sets("default-max-tokens", "64")),
    ("--predict -1", Nothing),
    ("-ub 128", Sets("chunk", "128")),
    ("-b 2048", Refused("--chunk")),
    ("-ctk q8_0", Sets("cache-type-k", "q8_0")),
    ("-ctv q8_0", Sets("cache-type-v", "q8_0")),
    ("-md d.gguf", Sets("draft", "d.gguf")),
    ("--draft-max 16", Refused("--ddtree-budget")),
    ("-cb", Nothing),
    ("-nocb", Refused("--max-sequences 1")),
    ("--mlock", Refused("remove it")),
    ("--no-mmap", Nothing),
    ("-sm none", Sets("split-mode", "none")),
    ("-sm layer", Sets("split-mode", "layer")),
    ("-ts 1,1", Refused("--target-layer-split")),
    ("-ncmoe 20", Refused("--vram-limit")),
    ("-ot exps=CPU", Refused("--vram-limit")),
    ("-fit on", Nothing),
    ("-fitt 1024", Refused("--vram-headroom")),
    ("-cd 4096", Refused("the model's context")),
    ("--list-devices", Refused("hearth doctor")),
    ("--chat-template-kwargs {}", Refused("--thinking-default")),
    ("--mirostat 2", Refused("sampler")),
    ("--sleep-idle-seconds 60", Sets("idle-unload", "60")),
    ("--cache-ram 8192", Refused("--prefix-cache-bytes")),
    ("--slot-save-path x", Refused("--kv-cache-dir")),
    ("--seed 1", Refused("requests set it")),
    ("--reasoning-budget -1", Nothing),
    ("--reasoning-budget 0", Refused("--thinking-default")),
    ("--metrics", Sets("metrics", "on")),
    ("--metrics off", Sets("metrics", "off")),
    ("--slots", Nothing),
    ("--no-webui", Refused("page")),
    ("--ssl-key-file k", Refused("proxy")),
    ("-lv 3", Refused("--log debug")),
    ("-v", Refused("--log debug")),
    ("--api-key-file KEYS", Sets("api-key-file", "KEYS")),
    // vLLM.
    ("--max-model-len 4096", Sets("max-ctx", "4096")),
    ("--max-model-len auto", Nothing),
    ("--served-model-name x", Sets("model-name", "x")),
    ("--max-num-seqs 2", Sets("max-sequences", "2")),
    ("--enforce-eager", Sets("eager", "true")),
    ("--gpu-memory-utilization 0.9", Refused("--vram-limit")),
    ("--tensor-parallel-size 1", Nothing),
    ("-tp 2", Refused("--target-devices cuda:0,cuda:1")),
    ("-dp 2", Refused("--device cuda:N")),
    ("--kv-cache-memory-bytes 1G", Refused("--kv-pool")),
    ("--limit-mm-per-prompt image=0", Nothing),
    ("--root-path /llm", Refused("proxy")),
    ("--dtype auto", Nothing),
    ("--dtype float16", Refused("model file")),
    ("--kv-cache-dtype fp8", Refused("--kv-type")),
    ("--enable-auto-tool-choice", Nothing),
    ("--tool-call-parser hermes", Nothing),
    ("--trust-remote-code", Nothing),
    (
        "--no-enable-prefix-caching",
        Refused("--prefix-cache-entries 0"),
    ),
    ("--allowed-origins x", Refused("--cors-origin")),
    // ollama.
    ("--keepalive 5m", Sets("idle-unload", "5m")),
];

/// The settings that `hearth config show` prints for a line, without those by default.
fn set(line: &str) -> Result<Vec<(String, String)>, String> {
    let keys = tempfile::NamedTempFile::new().unwrap();
    fs::write(keys.path(), "k\n").unwrap();
    let (keys, model) = (keys.path().to_str().unwrap(), model());
    let line = line
        .replace("KEYS", keys)
        .replace("MODEL", model.to_str().unwrap());
    let mut run = command();
    run.args(["config", "show", "--json"]).args(line.split(' '));
    let output = run.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        assert_eq!(output.status.code(), Some(2), "{line}: {err}");
        return Err(err);
    }
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let shown = shown.as_array().unwrap().iter();
    let of_flags = shown.filter(|setting| setting["origin"] == "flag");
    let part = |setting: &Value, key: &str| setting[key].as_str().unwrap_or("").to_owned();
    let back = |value: String| {
        value
            .replace(keys, "KEYS")
            .replace(model.to_str().unwrap(), "MODEL")
    };
    Ok(of_flags
        .map(|setting| (part(setting, "name"), back(part(setting, "value"))))
        .collect())
}

#[test]
fn every_spelling_of_other_servers_works_or_is_answered_with_the_flag() {
    for (line, effect) in SPELLINGS {
        let found = set(line);
        match (effect, found) {
            (Sets(name, value), Ok(found)) => {
                let expected = [((*name).to_owned(), (*value).to_owned())];
                assert_eq!(found, expected, "{line}");
            }
            (Nothing, Ok(found)) => assert_eq!(found, [], "{line}"),
            (Refused(part), Err(err)) => {
                assert!(
                    err.contains("is not supported: ") && err.contains(part),
                    "{line}: {err}"
                );
            }
            (_, found) => panic!("{line}: {found:?}"),
        }
    }
}

#[test]
fn models_of_the_hub_are_named_by_repository_and_file() {
    for line in [
        "serve -hf no-one/nothing-GGUF:Q4_K_M",
        "serve --hf-repo no-one/nothing-GGUF --hf-file nothing.gguf",
        "serve -hf no-one/nothing-GGUF:Q8_0 -hff nothing.gguf --offline",
        "-hf no-one/nothing-GGUF",
        "run -hf no-one/nothing-GGUF -p Hi",
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let done = hearth(&words);
        assert_eq!(done.code, Some(1), "{line}: {}", done.err);
        let named = if line.contains("nothing.gguf") {
            "no-one/nothing-GGUF:nothing.gguf"
        } else {
            "no-one/nothing-GGUF"
        };
        assert!(done.err.contains(named), "{line}: {}", done.err);
        assert!(done.err.contains("HF_HUB_OFFLINE"), "{line}: {}", done.err);
    }
    let alone = hearth(&["serve", "--hf-file", "a.gguf"]);
    assert_eq!(alone.code, Some(2), "{}", alone.err);
    assert!(alone.err.contains("with --model"), "{}", alone.err);
}

#[test]
fn run_takes_the_flags_of_llama_cli() {
    let model = model();
    let model = model.to_str().unwrap();
    let done = hearth(&[
        "run", "-m", model, "-p", "Hi", "-n", "2", "-ngl", "99", "-c", "512", "--temp", "0",
        "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "-fa", "--jinja", "--seed", "3",
    ]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    let refused = hearth(&["run", "-m", model, "-p", "Hi", "--mmproj", "x"]);
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(refused.err.contains("images"), "{}", refused.err);
}

#[test]
fn suggestions_name_only_flags_that_the_help_shows() {
    // Near to a refused, a hidden and a shown flag.
    for (typed, near) in [
        ("--kvflas", None),
        ("--mmpro", None),
        ("--served-model-nam", None),
        ("--max-ctxx", Some("--max-ctx")),
    ] {
        let done = hearth(&["serve", typed, "1"]);
        assert_eq!(done.code, Some(2), "{typed}");
        let similar = done.err.contains("similar");
        assert_eq!(similar, near.is_some(), "{typed}: {}", done.err);
        if let Some(near) = near {
            assert!(done.err.contains(&format!("'{near}'")), "{}", done.err);
        }
    }
}

#[test]
fn short_help_has_the_common_flags_and_the_long_help_all_under_headings() {
    let (short, long) = (
        hearth(&["serve", "-h"]).out,
        hearth(&["serve", "--help"]).out,
    );
    let flags = |help: &str| {
        let lines = help.lines().map(str::trim_start);
        lines.filter(|line| line.starts_with('-')).count()
    };
    assert!((12..=20).contains(&flags(&short)), "{short}");
    assert!(flags(&long) > 80, "{long}");
    let mut at = 0;
    for heading in [
        "Model:",
        "GPU and memory:",
        "Speculative decoding:",
        "Prompt cache:",
        "Sampling and thinking:",
        "HTTP:",
        "Logging:",
    ] {
        let found = long[at..].find(&format!("\n{heading}\n"));
        at += found.unwrap_or_else(|| panic!("{heading} in order in {long}"));
    }
}

#[test]
fn a_tilde_is_the_home_directory_in_flags_variables_and_the_file() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("keys"), "a\n").unwrap();
    fs::write(
        home.path().join("hearth.toml"),
        "api-key-file = \"~/keys\"\n",
    )
    .unwrap();
    for (words, variable) in [
        (vec!["--api-key-file=~/keys"], None),
        (vec![], Some("~/keys")),
        (vec!["--config=~/hearth.toml"], None),
    ] {
        let mut run = command();
        run.args(["config", "show"])
            .args(&words)
            .env("HOME", home.path());
        if let Some(path) = variable {
            run.env("HEARTH_API_KEY_FILE", path);
        }
        // An absent file of keys is refused.
        let output = run.output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {err}");
    }
}

#[test]
fn settings_without_a_value_are_shown_with_its_meaning() {
    let table = hearth(&["config", "show"]).out;
    let line = |name: &str| {
        let mut lines = table.lines();
        lines
            .find(|line| line.starts_with(&format!("{name} ")))
            .unwrap()
    };
    assert!(line("threads").contains("(one per core)"), "{table}");
    assert!(line("api-key").contains("(no key is required)"), "{table}");
    assert!(line("model").contains("(the bundled toy model)"), "{table}");
    assert!(
        line("max-ctx").contains("(the model's training context"),
        "{table}"
    );
    for line in table.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_ne!(words[1], "-", "{line}");
    }
}
