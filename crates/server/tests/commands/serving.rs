//! Tests of `hearth serve`.

use std::fs;
use std::net::TcpListener;

use crate::client::ServerProcess;
use crate::process::{command, good, hearth, model};

#[test]
fn bundled_model_is_served_by_default_with_a_warning() {
    let server = ServerProcess::start(&[]);
    for part in [
        "a toy",
        "a model to pull",
        "device cpu",
        "32768 tokens",
        "memory ",
    ] {
        assert!(server.log.contains(part), "{part} in\n{}", server.log);
    }
    let health = server.request("/health", "");
    assert_eq!(
        (health.status, &health.json()["status"]),
        (200, &"ok".into())
    );
    let chat = server.chat();
    assert_eq!(chat.status, 200, "{}", chat.body);
    let chat = chat.json();
    assert_eq!(chat["usage"]["completion_tokens"], 4);
    assert_eq!(chat["model"], "ember");
    server.signal("TERM");
    let (code, log) = server.wait();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("stopped"), "{log}");
}

#[test]
fn file_is_served_by_two_devices_under_its_stem_and_settings_are_logged_with_origin() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("hearth.toml");
    fs::write(&config, "max-ctx = 512\nsse-ping-interval = 3\n").unwrap();
    let model = model();
    let args = [
        model.to_str().unwrap(),
        "--config",
        config.to_str().unwrap(),
        "--max-ctx",
        "1024",
        "--target-devices",
        "cpu,cpu",
    ];
    let server = ServerProcess::start_with(&args, |command| {
        command
            .env("HEARTH_QUEUE_LIMIT", "5")
            .env("HEARTH_NO_CORS", "1")
    });
    let models = server.request("/v1/models", "").json();
    assert_eq!(models["data"][0]["id"], "bf16");
    let line = |origin: &str| {
        let start = format!("settings by {origin}: ");
        server
            .log
            .lines()
            .find(|line| line.contains(&start))
            .unwrap_or("")
            .to_owned()
    };
    assert!(line("flag").contains("max-ctx=1024"), "{}", server.log);
    assert!(
        line("environment").contains("queue-limit=5"),
        "{}",
        server.log
    );
    assert!(line("environment").contains("no-cors=1"), "{}", server.log);
    assert!(
        line("configuration file").contains("sse-ping-interval=3"),
        "{}",
        server.log
    );
    assert!(line("default").contains("host=127.0.0.1"), "{}", server.log);
    assert!(
        server.log.contains("sequences of up to 1024 tokens"),
        "{}",
        server.log
    );
    assert!(server.log.contains("device cpu,cpu"), "{}", server.log);
    let chat = server.chat();
    assert_eq!(chat.status, 200, "{}", chat.body);
    server.signal("INT");
    assert_eq!(server.wait().0, Some(0));
}

#[test]
fn model_card_sets_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let card = r#"{"name": "x", "source": "s", "verified_at": "d", "max_tokens": 3,
        "sampling": {"temperature": 0.5}}"#;
    fs::write(dir.path().join("ember.json"), card).unwrap();
    let server = ServerProcess::start(&["--model-cards-dir", dir.path().to_str().unwrap()]);
    assert!(
        server
            .log
            .contains("settings by model card: temperature=0.5"),
        "{}",
        server.log
    );
    let body = r#"{"messages":[{"role":"user","content":"Hello"}],"ignore_eos":true}"#;
    let chat = server.request("/v1/chat/completions", body).json();
    assert_eq!(chat["usage"]["completion_tokens"], 3, "{chat}");
}

#[test]
fn api_key_is_required_and_never_logged() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "file-secret\n").unwrap();
    let keys = [
        "--api-key",
        "flag-secret",
        "--api-key-file",
        file.path().to_str().unwrap(),
    ];
    let server = ServerProcess::start(&keys);
    assert_eq!(server.chat().status, 401);
    for key in ["flag-secret", "file-secret"] {
        let value = format!("Bearer {key}");
        let headers = [("authorization", value.as_str())];
        assert_eq!(server.request_with("/v1/models", "", &headers).status, 200);
    }
    server.signal("TERM");
    let (code, log) = server.wait();
    assert_eq!(code, Some(0));
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn chat_template_file_is_used_and_an_invalid_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let template = dir.path().join("mine.jinja");
    fs::write(
        &template,
        "{% for m in messages %}<{{ m.content }}>{% endfor %}",
    )
    .unwrap();
    let path = template.to_str().unwrap();
    let server = ServerProcess::start(&["--chat-template-file", path]);
    let body = r#"{"messages":[{"role":"user","content":"Hello"}]}"#;
    let applied = server.request("/apply-template", body);
    assert_eq!(applied.json()["prompt"], "<Hello>", "{}", applied.body);
    drop(server);
    fs::write(&template, "{% for %}").unwrap();
    let done = hearth(&["serve", "--port", "0", "--chat-template-file", path]);
    assert_eq!(done.code, Some(1));
    assert!(done.err.contains("mine.jinja"), "{}", done.err);
}

#[test]
fn port_in_use_is_reported_before_the_model_loads() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let done = hearth(&["serve", "--port", &port]);
    assert_eq!(done.code, Some(1));
    assert!(done.err.contains(&format!("--port {port}")), "{}", done.err);
    assert!(
        done.err.contains("another program is listening"),
        "{}",
        done.err
    );
    assert!(!done.err.contains("memory "), "{}", done.err);
}

#[test]
fn wrong_files_are_reported_before_the_port_opens() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::write(at("model.safetensors"), "").unwrap();
    fs::write(at("text.gguf"), "some text").unwrap();
    let (model, folder) = (model().display().to_string(), at(""));
    let cases: [(&[&str], &[&str]); 7] = [
        (&[&at("none.gguf")], &["none.gguf", "No such file"]),
        (
            &["no-one/Qwen3.5-9B-GGUF"],
            &["not in the cache", "HF_HUB_OFFLINE"],
        ),
        (&["https://example.org/m"], &["web address", "curl"]),
        (&[&folder], &["safetensors", "convert_hf_to_gguf.py"]),
        (&[&at("text.gguf")], &["text.gguf", "not a GGUF file"]),
        (
            &[&model, "--draft", &at("d.gguf")],
            &["--draft", "d.gguf", "No such file"],
        ),
        (&[&model, "--draft", &model], &["--draft", "bf16.gguf"]),
    ];
    for (words, parts) in cases {
        let done = hearth(&[&["serve", "--port", "0"], words].concat());
        assert_eq!(done.code, Some(1), "{words:?}");
        for part in parts {
            assert!(done.err.contains(part), "{part} in {}", done.err);
        }
        assert!(!done.err.contains("listening"), "{}", done.err);
    }
}

#[test]
fn unknown_variables_are_refused_and_the_predecessors_are_warned_about() {
    let mut line = command();
    let refused = line
        .arg("serve")
        .env("HEARTH_QUEUE_LIMT", "5")
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{err}");
    let hint = "HEARTH_QUEUE_LIMT is not a setting; did you mean HEARTH_QUEUE_LIMIT?";
    assert!(err.contains(hint), "{err}");
    let server = ServerProcess::start_with(&[], |command| {
        let command = command.env("HEARTH_SERVICE_HOST", "10.0.0.1");
        command.env("DFLASH_DARFT", "x")
    });
    let hint = "DFLASH_DARFT is not a setting; did you mean DFLASH_DRAFT?";
    assert!(server.log.contains(hint), "{}", server.log);
}

#[test]
fn public_address_without_key_is_warned_about() {
    let open = ServerProcess::start(&["--host", "0.0.0.0"]);
    assert!(open.log.contains("without --api-key"), "{}", open.log);
    let closed = ServerProcess::start(&["--host", "0.0.0.0", "--api-key", "k"]);
    assert!(!closed.log.contains("without --api-key"), "{}", closed.log);
}

#[test]
fn dry_run_prints_the_memory_plan_and_exits() {
    let done = good("serve {} --dry-run --max-ctx 2048", &[&model()]);
    assert!(
        done.out
            .contains("4 sequences of up to 2048 tokens that share 82"),
        "{}",
        done.out
    );
    // The plan gives reasons for the KV cache type and the context.
    assert!(
        done.out
            .contains("keys and values f16: the default here; context of 2048: as asked"),
        "{}",
        done.out
    );
    assert!(done.out.contains("suffix matches of"), "{}", done.out);
    assert_eq!(done.out.lines().count(), 5, "{}", done.out);
}

#[test]
fn second_signal_stops_at_once() {
    let mut server = ServerProcess::start(&["--max-ctx", "8192"]);
    let address = server.address.clone();
    // A long reply, which continues after the first signal.
    let client = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let body = r#"{"messages":[{"role":"user","content":"Hello"}],"max_tokens":8000,"ignore_eos":true,"stream":true}"#;
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        // Headers and the role chunk can arrive while the request is queued, and the first signal
        // refuses queued requests. The third chunk shows that the request runs.
        let mut text = String::new();
        let mut some = [0; 256];
        while text.matches("data: ").count() < 3 {
            let n = stream.read(&mut some).unwrap();
            assert!(n > 0, "{text}");
            text.push_str(&String::from_utf8_lossy(&some[..n]));
        }
        assert!(!text.contains("\"error\""), "{text}");
        stream
    });
    let stream = client.join().unwrap();
    server.signal("TERM");
    server.wait_for("stopping");
    server.signal("TERM");
    let (code, log) = server.wait();
    assert_eq!(code, Some(130), "{log}");
    drop(stream);
}

#[test]
fn service_manager_is_notified_when_ready_and_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    let (sender, states) = std::sync::mpsc::channel();
    // Reading starts first, because a full socket would block the server.
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        while let Ok(n) = socket.recv(&mut buffer) {
            let state = String::from_utf8(buffer[..n].to_vec()).unwrap();
            if sender.send(state).is_err() {
                return;
            }
        }
    });
    let next = || {
        states
            .recv_timeout(std::time::Duration::from_secs(60))
            .unwrap()
    };
    let server = ServerProcess::start_with(&[], |command| command.env("NOTIFY_SOCKET", &path));
    let mut status = String::new();
    while !status.contains("READY=1") {
        assert!(!status.contains("STOPPING"), "{status}");
        status.push_str(&next());
    }
    assert!(status.contains("STATUS=loading"), "{status}");
    assert!(status.contains("EXTEND_TIMEOUT_USEC="), "{status}");
    assert_eq!(server.request("/health", "").status, 200);
    server.signal("TERM");
    // What is loaded may be reported after READY, on its own.
    let mut last = next();
    while last.starts_with("STATUS=") {
        assert!(!last.contains("loading"), "{last}");
        last = next();
    }
    assert!(last.contains("STOPPING=1"), "{last}");
    assert_eq!(server.wait().0, Some(0));
}
