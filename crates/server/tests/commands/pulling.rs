//! Tests of models by name, from a hub on loopback: `pull`, `list`, `rm`, and names in other
//! commands.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::client::ServerProcess;
use crate::process::{Done, command, model};
use crate::test_hub::{Access, TestHub};

const REPO: &str = "maker/Tiny-GGUF";
const NAME: &str = "maker/Tiny-GGUF:BF16";

/// A hub with the tiny model, and an empty cache.
struct Home {
    hub: TestHub,
    dir: TempDir,
}

impl Home {
    fn new() -> Home {
        let hub = TestHub::start();
        hub.add(REPO, "Tiny-BF16.gguf", fs::read(model()).unwrap());
        hub.add(REPO, "mmproj-F16.gguf", "no model");
        let dir = tempfile::tempdir().unwrap();
        Home { hub, dir }
    }

    /// Lets a command use this hub and this cache.
    fn set<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        for name in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"] {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command
            .env_remove("HF_HUB_OFFLINE")
            .env_remove("HF_HUB_CACHE")
            .env_remove("HF_TOKEN")
            .env("HF_HOME", self.dir.path())
            .env("XDG_CACHE_HOME", self.dir.path())
            .env("HF_ENDPOINT", self.hub.endpoint())
    }

    fn run_with(&self, args: &[&str], change: impl FnOnce(&mut Command) -> &mut Command) -> Done {
        let mut command = command();
        change(self.set(command.args(args)));
        let output = command.output().unwrap();
        Done {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    fn run(&self, args: &[&str]) -> Done {
        self.run_with(args, |command| command)
    }

    fn good(&self, args: &[&str]) -> Done {
        let done = self.run(args);
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.err);
        done
    }
}

#[test]
fn pulled_model_is_listed_and_removed() {
    let home = Home::new();
    assert!(home.good(&["list"]).err.contains("hearth pull"));
    let pulled = home.good(&["pull", REPO]);
    let path = PathBuf::from(pulled.out.trim_end());
    assert!(
        path.starts_with(
            home.dir
                .path()
                .join("hub/models--maker--Tiny-GGUF/snapshots")
        )
    );
    assert_eq!(fs::read(&path).unwrap(), fs::read(model()).unwrap());
    let again = home.good(&["pull", "--json", NAME]);
    let again: Value = serde_json::from_str(&again.out).unwrap();
    assert_eq!(again["path"].as_str().map(Path::new), Some(&*path));
    assert_eq!(again["downloaded_bytes"], 0);
    let listed = home.good(&["ls"]).out;
    let line = listed.lines().find(|line| line.starts_with(NAME)).unwrap();
    assert!(line.contains("BF16") && line.contains("iB"), "{line}");
    let listed: Value = serde_json::from_str(&home.good(&["list", "--json"]).out).unwrap();
    assert_eq!(listed[0]["name"], NAME);
    assert_eq!(
        listed[0]["size_bytes"],
        fs::metadata(model()).unwrap().len()
    );
    let removed = home.good(&["rm", NAME]);
    assert!(removed.err.contains("1 file removed"), "{}", removed.err);
    assert!(!path.exists());
    let gone = home.run(&["rm", NAME]);
    assert_eq!(gone.code, Some(1));
    assert!(gone.err.contains("not in the cache"), "{}", gone.err);
}

#[test]
fn name_is_downloaded_and_served_and_then_served_offline() {
    let home = Home::new();
    let args = ["--device", "cpu", NAME, "--idle-unload", "1h"];
    let served = ServerProcess::start_with(&args, |command| home.set(command));
    assert!(
        served.log.contains("pulling maker/Tiny-GGUF:BF16"),
        "{}",
        served.log
    );
    let models = served.request("/v1/models", "").body;
    assert!(models.contains("Tiny-BF16"), "{models}");
    assert_clients_pull(&home, &served);
    drop(served);
    home.hub.take_seen();
    let offline = ServerProcess::start_with(&["--device", "cpu", REPO], |command| {
        home.set(command).env("HF_HUB_OFFLINE", "1")
    });
    assert!(!offline.log.contains("pulling"), "{}", offline.log);
    let refused = offline.request("/api/pull", r#"{"model": "maker/Other-GGUF:F16"}"#);
    assert_eq!(refused.status, 403, "{}", refused.body);
    assert!(refused.body.contains("--offline"), "{}", refused.body);
    assert_eq!(home.hub.take_seen().len(), 0);
}

/// A client of Ollama's protocol has another model pulled, and then the server has it.
fn assert_clients_pull(home: &Home, served: &ServerProcess) {
    const OTHER: &str = "maker/Other-GGUF:BF16";
    let content = fs::read(model()).unwrap();
    let size = content.len() as u64;
    home.hub.add("maker/Other-GGUF", "Other-BF16.gguf", content);
    let pull = |model: &str| {
        let body = serde_json::json!({ "model": model }).to_string();
        let lines = served.request("/api/pull", &body).body;
        let lines = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        lines.collect::<Vec<Value>>()
    };
    for (name, words) in [
        ("maker/No-GGUF", "no such repository"),
        ("llama3.2", "not a model's name"),
        ("http://127.0.0.1:9/m.gguf", "only models of the hub"),
    ] {
        let error = pull(name).pop().unwrap()["error"].clone();
        assert!(error.as_str().unwrap().contains(words), "{name}: {error}");
    }
    let lines = pull(OTHER);
    assert_eq!(lines[0]["status"], "pulling manifest");
    let last = lines.last().unwrap();
    assert_eq!(last["status"], "success", "{lines:?}");
    let of_file = lines.iter().filter(|line| line["total"] == size);
    for line in of_file {
        assert!(line["completed"].as_u64() <= Some(size), "{line}");
        let digest = line["digest"].as_str().unwrap();
        assert!(
            digest.starts_with("sha256:") && digest.len() == 71,
            "{digest}"
        );
    }
    assert!(!served.request("/api/pull", "{}").body.contains("success"));
    let tags = served.request("/api/tags", "").body;
    assert!(tags.contains(OTHER), "{tags}");
    // What is there is not downloaded again.
    home.hub.take_seen();
    assert_eq!(pull(OTHER).len(), 2);
    assert_eq!(home.hub.take_seen().len(), 0);
}

#[test]
fn name_works_in_place_of_a_file() {
    let home = Home::new();
    // Commands that only look read the header, and download nothing.
    let inspect = home.good(&["inspect", NAME, "--plan", "--device", "cpu"]);
    assert!(inspect.out.contains("tiny"), "{}", inspect.out);
    let dry = home.good(&["serve", NAME, "--dry-run", "--device", "cpu"]);
    assert!(dry.out.contains("memory"), "{}", dry.out);
    let offline = home.run_with(&["inspect", NAME], |command| {
        command.env("HF_HUB_OFFLINE", "1")
    });
    assert_eq!(offline.code, Some(1));
    assert!(
        offline.err.contains("hearth pull maker/Tiny-GGUF:BF16"),
        "{}",
        offline.err
    );
    // A published shape is planned without its file.
    let words = [
        "inspect",
        "maker/Qwen3-0.6B-GGUF:Q8_0",
        "--plan",
        "--device",
        "cpu",
    ];
    let known = home.run_with(&words, |command| command.env("HF_HUB_OFFLINE", "1"));
    assert_eq!(known.code, Some(0), "{}", known.err);
    assert!(known.out.contains("total bytes"), "{}", known.out);
    assert!(known.err.contains("published shape"), "{}", known.err);
    let wrong = home.run(&["inspect", "maker/Tiny-GGUF:mmproj-F16.gguf"]);
    assert!(wrong.err.contains("not a GGUF file"), "{}", wrong.err);
    assert!(!home.dir.path().join("hub").exists());
    let run = home.good(&["run", NAME, "Hello", "-n", "4", "--device", "cpu"]);
    assert!(run.err.contains("tokens/s"), "{}", run.err);
    assert!(
        home.good(&["inspect", NAME, "--device", "cpu"])
            .out
            .contains("Tiny-BF16.gguf")
    );
    home.good(&["serve", REPO, "--dry-run", "--device", "cpu"]);
}

#[test]
fn draft_is_pulled_by_name() {
    let home = Home::new();
    // A draft of another model: the name becomes a file, and its content is what is refused.
    let words = [
        "serve", NAME, "--draft", NAME, "--port", "0", "--device", "cpu",
    ];
    let done = home.run(&words);
    assert_eq!(done.code, Some(1));
    assert!(
        done.err.contains("--draft") && done.err.contains("Tiny-BF16"),
        "{}",
        done.err
    );
}

#[test]
fn refusals_of_the_hub_are_sentences() {
    let home = Home::new();
    home.hub.protect(REPO, Access::Gated);
    for (args, part) in [
        (["pull", REPO], "maker/Tiny-GGUF is gated: accept its terms"),
        (
            ["pull", "maker/Tiny-GGUF:Q4_K_M"],
            "no GGUF file of type Q4_K_M; it has BF16",
        ),
        (["pull", "other/Tiny-GGUF"], "did you mean maker/Tiny-GGUF?"),
        (["pull", "some words"], "some words: not a model's name"),
        (
            ["serve", "maker/Tiny-GGUF@v9"],
            "no branch, tag or commit v9; it has main or v1",
        ),
    ] {
        let done = home.run(&args);
        assert_eq!(done.code, Some(1), "{args:?}");
        assert!(done.err.contains(part), "{part} in {}", done.err);
    }
}

#[test]
fn proxies_are_named_in_their_errors() {
    let home = Home::new();
    let with =
        |value: &str| home.run_with(&["pull", REPO], |command| command.env("HTTPS_PROXY", value));
    let away = with("http://user:secret@127.0.0.1:1").err;
    assert!(away.contains("through the proxy 127.0.0.1:1"), "{away}");
    assert!(!away.contains("secret"), "{away}");
    let wrong = with("nonsense://x").err;
    assert!(
        wrong.contains("HTTPS_PROXY: not the address of a proxy"),
        "{wrong}"
    );
}
