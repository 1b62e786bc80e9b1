//! `hearth connect` and `hearth probe`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::client::ServerProcess;
use crate::process::{Done, command, hearth};

const CLIENTS: [(&str, &str); 18] = [
    ("claude-code", ".claude/settings.json"),
    ("codex", ".codex/config.toml"),
    ("opencode", ".config/opencode/opencode.json"),
    ("open-webui", ".config/hearth/open-webui.env"),
    ("hermes", ".hermes/config.yaml"),
    ("pi", ".pi/agent/models.json"),
    ("openclaw", ".openclaw/openclaw.json"),
    ("qwen-code", ".config/hearth/qwen-code.env"),
    ("copilot", ".config/hearth/copilot.env"),
    ("kilo", ".config/kilo/kilo.json"),
    ("kimi", ".config/hearth/kimi.env"),
    ("continue", ".config/hearth/continue.yaml"),
    ("aider", ".aider.conf.yml"),
    ("llm", ".config/io.datasette.llm/extra-openai-models.yaml"),
    ("litellm", ".config/hearth/litellm.yaml"),
    ("lm-eval", ".config/hearth/openai.env"),
    ("openai-sdk", ".config/hearth/openai.env"),
    ("anthropic-sdk", ".config/hearth/anthropic.env"),
];
const KNOWN: [&str; 6] = [
    "--url",
    "http://127.0.0.1:9/v1",
    "--model",
    "m-1",
    "--context",
    "65536",
];

/// Runs `hearth connect` with `home` as the home directory.
fn connect(home: &Path, words: &[&str]) -> Done {
    let mut command = command();
    for name in [
        "XDG_CONFIG_HOME",
        "CODEX_HOME",
        "CLAUDE_CONFIG_DIR",
        "LLM_USER_PATH",
    ] {
        command.env_remove(name);
    }
    let output = command
        .env("HOME", home)
        .arg("connect")
        .args(words)
        .output()
        .unwrap();
    Done {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn write(home: &Path, client: &str, more: &[&str]) -> Done {
    let words: Vec<&str> = [client, "--write"]
        .iter()
        .chain(&KNOWN)
        .chain(more)
        .copied()
        .collect();
    connect(home, &words)
}

#[test]
fn connect_prints_and_writes_every_client_idempotently() {
    let listed = hearth(&["connect"]).out;
    assert_eq!(listed.lines().count(), CLIENTS.len(), "{listed}");
    for (client, file) in CLIENTS {
        let home = tempfile::tempdir().unwrap();
        let words: Vec<&str> = [client].iter().chain(&KNOWN).copied().collect();
        let shown = connect(home.path(), &words);
        assert_eq!(shown.code, Some(0), "{}", shown.err);
        for part in [file, "http://127.0.0.1:9"] {
            assert!(
                shown.out.contains(part) && (shown.out.contains("m-1")),
                "{client}: {part} in {}",
                shown.out
            );
        }
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "{client}");
        let written = write(home.path(), client, &["--api-key", "k-2"]);
        assert_eq!(written.code, Some(0), "{client}: {}", written.err);
        let text = fs::read_to_string(home.path().join(file)).unwrap();
        assert!(text.contains("http://127.0.0.1:9"), "{client}: {text}");
        // `llm` takes its key on its own command line.
        assert!(text.contains("k-2") || client == "llm", "{client}: {text}");
        let again = write(home.path(), client, &["--api-key", "k-2"]);
        assert!(
            again.out.contains("is up to date"),
            "{client}: {}",
            again.out
        );
        assert_eq!(fs::read_to_string(home.path().join(file)).unwrap(), text);
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(home.path().join(file))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(
            mode & 0o077,
            0,
            "{client}: only the user can read a file with a key"
        );
    }
}

/// Writes over a client's file with the text `before`; the result must contain the parts `after`.
fn check_kept(client: &str, before: &str, after: &[&str]) {
    let file = CLIENTS.iter().find(|(name, _)| *name == client).unwrap().1;
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, before).unwrap();
    let done = write(home.path(), client, &[]);
    assert_eq!(done.code, Some(0), "{client}: {}", done.err);
    let text = fs::read_to_string(&path).unwrap();
    for part in after {
        assert!(text.contains(part), "{client}: {part} in {text}");
    }
    let mut copy = path.into_os_string();
    copy.push(".before-hearth");
    assert_eq!(fs::read_to_string(&copy).unwrap(), before, "{client}");
    assert!(done.out.contains(copy.to_str().unwrap()), "{}", done.out);
}

#[test]
fn connect_keeps_user_settings_and_copies_the_file_first() {
    check_kept(
        "claude-code",
        "{\"permissions\": {\"allow\": [\"Read\"]}, \"env\": {\"MINE\": \"1\"}}",
        &["\"Read\"", "\"MINE\": \"1\"", "ANTHROPIC_BASE_URL"],
    );
    check_kept(
        "codex",
        "# mine\nmodel = \"big\"\n[model_providers.other]\nname = \"o\"\n",
        &[
            "# mine\nmodel = \"big\"",
            "[model_providers.other]",
            "[model_providers.hearth]",
        ],
    );
    check_kept(
        "opencode",
        "{\"model\": \"cloud/big\", \"provider\": {\"cloud\": {}}}",
        &[
            "\"model\": \"cloud/big\"",
            "\"cloud\": {}",
            "\"hearth\"",
            "\"context\": 65536",
        ],
    );
    check_kept(
        "hermes",
        "display: x\nmodel:\n  default: big\n",
        &["display: x", "default: \"m-1\""],
    );
    check_kept(
        "pi",
        "{\"providers\": {\"other\": {}}}",
        &["\"other\": {}", "\"contextWindow\": 65536"],
    );
    check_kept(
        "openclaw",
        "{\"gateway\": {\"port\": 1}}",
        &["\"port\": 1", "hearth/m-1"],
    );
    check_kept(
        "aider",
        "# mine\ndark-mode: true\nmodel: big\n",
        &["# mine\ndark-mode: true", "model: \"openai/m-1\""],
    );
    check_kept(
        "llm",
        "- model_id: big\n  api_base: x\n",
        &["- model_id: big", "model_id: \"m-1\""],
    );
}

#[test]
fn connect_leaves_unparsable_files_unchanged() {
    for (client, before) in [
        ("claude-code", "{ // a comment\n}"),
        ("codex", "model = "),
        ("hermes", "{model: {default: big}}"),
        ("llm", "models: []"),
    ] {
        let file = CLIENTS.iter().find(|(name, _)| *name == client).unwrap().1;
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, before).unwrap();
        let done = write(home.path(), client, &[]);
        assert_eq!(done.code, Some(1), "{client}: {}", done.out);
        assert!(
            done.err.contains(file) && done.err.contains("by hand"),
            "{}",
            done.err
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), before);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
    let home = tempfile::tempdir().unwrap();
    let unknown = connect(home.path(), &["emacs"]);
    assert_eq!(unknown.code, Some(1));
    assert!(unknown.err.contains("claude-code"), "{}", unknown.err);
    let unreachable = connect(home.path(), &["codex", "--url", "http://127.0.0.1:9"]);
    assert!(
        unreachable.err.contains("does not respond"),
        "{}",
        unreachable.err
    );
}

#[test]
fn running_server_reports_its_model_and_passes_probe() {
    let server = ServerProcess::start(&["--api-key", "k-3"]);
    let url = format!("http://{}", server.address);
    let home = tempfile::tempdir().unwrap();
    let closed = connect(home.path(), &["codex", "--url", &url]);
    assert!(closed.err.contains("--api-key"), "{}", closed.err);
    let open = connect(home.path(), &["codex", "--url", &url, "--api-key", "k-3"]);
    assert!(
        open.out.contains("model = \"ember\""),
        "{}{}",
        open.out,
        open.err
    );
    assert!(
        open.out.contains("model_context_window = 32768"),
        "{}",
        open.out
    );

    let done = hearth(&["probe", "--url", &url, "--api-key", "k-3", "--json"]);
    assert_eq!(done.code, Some(0), "{}{}", done.out, done.err);
    let lines: Vec<Value> = done
        .out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.len() > 30, "{}", done.out);
    for line in &lines {
        assert_eq!(line["result"], "ok", "{line}");
    }
    let refused = hearth(&["probe", "--url", &url, "--api-key", "wrong"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.out.contains("FAILED"), "{}", refused.out);
}

#[test]
fn probe_fails_on_wrong_responses() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // Responds to every request with the same list of models.
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut buffer = [0; 1 << 16];
            let _ = stream.read(&mut buffer);
            let body =
                json!({"object": "list", "data": [{"id": "x", "context_length": 64}]}).to_string();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
        }
    });
    let done = hearth(&["probe", "--url", &url, "--timeout", "10"]);
    assert_eq!(done.code, Some(1));
    let result = |name: &str| {
        let mut lines = done.out.lines();
        let found = lines.find(|line| line.contains(&format!(" {name} ")));
        found
            .unwrap_or_else(|| panic!("{name} in {}", done.out))
            .split(' ')
            .next()
            .unwrap()
            .to_owned()
    };
    assert_eq!(result("models"), "ok");
    for name in [
        "chat",
        "chat: stream",
        "messages",
        "responses",
        "error: invalid JSON",
        "error: unknown path",
    ] {
        assert_eq!(result(name), "FAILED", "{name}");
    }
    assert!(done.err.contains("checks failed"), "{}", done.err);
}
