use std::fs;
use std::net::TcpListener;

use crate::client::Server;
use crate::process::{good, hearth, model};

#[test]
fn without_a_model_the_bundled_one_is_served_and_called_a_toy() {
    let server = Server::start(&[]);
    for part in [
        "a toy",
        "hearth synth",
        "device cpu",
        "32768 tokens",
        "memory ",
    ] {
        assert!(server.log.contains(part), "{part} in\n{}", server.log);
    }
    let health = server.ask("/health", "");
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
    let (code, log) = server.end();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("stopped"), "{log}");
}

#[test]
fn a_file_is_served_under_its_stem_and_flags_are_told_with_their_origin() {
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
    ];
    let server = Server::start_with(&args, |command| {
        command
            .env("HEARTH_QUEUE_LIMIT", "5")
            .env("HEARTH_NO_CORS", "1")
    });
    let models = server.ask("/v1/models", "").json();
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
    server.signal("INT");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn a_model_card_gives_the_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let card = r#"{"name": "x", "source": "s", "verified_at": "d", "max_tokens": 3,
        "sampling": {"temperature": 0.5}}"#;
    fs::write(dir.path().join("ember.json"), card).unwrap();
    let server = Server::start(&["--model-cards-dir", dir.path().to_str().unwrap()]);
    assert!(
        server
            .log
            .contains("settings by model card: temperature=0.5"),
        "{}",
        server.log
    );
    let body = r#"{"messages":[{"role":"user","content":"Hello"}],"ignore_eos":true}"#;
    let chat = server.ask("/v1/chat/completions", body).json();
    assert_eq!(chat["usage"]["completion_tokens"], 3, "{chat}");
}

#[test]
fn a_key_is_asked_for_and_never_logged() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "file-secret\n").unwrap();
    let keys = [
        "--api-key",
        "flag-secret",
        "--api-key-file",
        file.path().to_str().unwrap(),
    ];
    let server = Server::start(&keys);
    assert_eq!(server.chat().status, 401);
    for key in ["flag-secret", "file-secret"] {
        let header = format!("authorization: Bearer {key}\r\n");
        assert_eq!(server.ask_with("/v1/models", "", &header).status, 200);
    }
    server.signal("TERM");
    let (code, log) = server.end();
    assert_eq!(code, Some(0));
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn a_chat_template_can_be_given_and_a_bad_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let template = dir.path().join("mine.jinja");
    fs::write(
        &template,
        "{% for m in messages %}<{{ m.content }}>{% endfor %}",
    )
    .unwrap();
    let path = template.to_str().unwrap();
    let server = Server::start(&["--chat-template-file", path]);
    let body = r#"{"messages":[{"role":"user","content":"Hello"}]}"#;
    let applied = server.ask("/apply-template", body);
    assert_eq!(applied.json()["prompt"], "<Hello>", "{}", applied.body);
    drop(server);
    fs::write(&template, "{% for %}").unwrap();
    let done = hearth(&["serve", "--port", "0", "--chat-template-file", path]);
    assert_eq!(done.code, Some(1));
    assert!(done.err.contains("mine.jinja"), "{}", done.err);
}

#[test]
fn a_port_in_use_is_named_before_anything_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let done = hearth(&["serve", "--port", &port]);
    assert_eq!(done.code, Some(1));
    assert!(done.err.contains(&format!("--port {port}")), "{}", done.err);
    assert!(
        done.err.contains("something else is listening"),
        "{}",
        done.err
    );
    assert!(!done.err.contains("memory "), "{}", done.err);
}

#[test]
fn an_open_door_to_the_network_is_warned_of() {
    let open = Server::start(&["--host", "0.0.0.0"]);
    assert!(open.log.contains("without --api-key"), "{}", open.log);
    let closed = Server::start(&["--host", "0.0.0.0", "--api-key", "k"]);
    assert!(!closed.log.contains("without --api-key"), "{}", closed.log);
}

#[test]
fn a_dry_run_prints_the_plan_and_starts_nothing() {
    let done = good("serve {} --dry-run --max-ctx 2048", &[&model()]);
    assert!(
        done.out
            .contains("4 sequences of up to 2048 tokens that share 82"),
        "{}",
        done.out
    );
    // And why these types of keys and values, and this context.
    assert!(
        done.out
            .contains("keys and values f16: the default here; context of 2048: as asked"),
        "{}",
        done.out
    );
    assert_eq!(done.out.lines().count(), 4, "{}", done.out);
}

#[test]
fn a_second_signal_stops_at_once() {
    let mut server = Server::start(&["--max-ctx", "8192"]);
    let address = server.address.clone();
    // A long answer that the first signal lets run.
    let client = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let body = r#"{"messages":[{"role":"user","content":"Hello"}],"max_tokens":8000,"ignore_eos":true,"stream":true}"#;
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        // Headers and the chunk that names the role can come while the request still waits, and those that wait
        // are refused by the first signal; chunks behind them are the answer's.
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
    let (code, log) = server.end();
    assert_eq!(code, Some(130), "{log}");
    drop(stream);
}

#[test]
fn a_service_manager_is_told_when_the_model_answers_and_when_it_stops() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    let (sender, states) = std::sync::mpsc::channel();
    // Read from the start: a full socket would hold the server up.
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
    let server = Server::start_with(&[], |command| command.env("NOTIFY_SOCKET", &path));
    let mut told = String::new();
    while !told.contains("READY=1") {
        assert!(!told.contains("STOPPING"), "{told}");
        told.push_str(&next());
    }
    assert!(told.contains("STATUS=loading"), "{told}");
    assert!(told.contains("EXTEND_TIMEOUT_USEC="), "{told}");
    assert_eq!(server.ask("/health", "").status, 200);
    server.signal("TERM");
    assert!(next().contains("STOPPING=1"));
    assert_eq!(server.end().0, Some(0));
}
