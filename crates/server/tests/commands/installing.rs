//! Tests of what an installation has beside the server: `hearth launch`, completions, manual pages,
//! and the port that a service manager passes. A chat of `hearth run` on a server is here too, as
//! it shares the server.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use crate::client::ServerProcess;
use crate::process::{command, hearth, model};

#[test]
fn running_server_is_used_by_run_and_by_launched_programs() {
    let model = model();
    let path = model.to_str().unwrap();
    let server = ServerProcess::start(&[path, "--max-ctx", "1024"]);
    let url = format!("http://{}", server.address);
    for named in [None, Some(path), Some("bf16")] {
        let words = ["run", "--url", &url, "-n", "4", "-p", "Hello"];
        let words: Vec<&str> = words.into_iter().chain(named).collect();
        let done = hearth(&words);
        assert_eq!(done.code, Some(0), "{}", done.err);
        let said = format!("using bf16 of the server at {url}");
        assert!(done.err.contains(&said), "{}", done.err);
        assert!(done.err.contains(" prompt tokens"), "{}", done.err);
    }
    let done = hearth(&["run", "other.gguf", "--url", &url, "-p", "Hello"]);
    assert!(
        done.err.contains("no such model; it has: bf16"),
        "{}",
        done.err
    );

    let script = "echo $OPENAI_BASE_URL $OPENAI_API_KEY \"$1\"";
    let words = [
        "launch",
        "--url",
        &url,
        "openai-sdk",
        "sh",
        "-c",
        script,
        "x",
        "--flag",
    ];
    let done = hearth(&words);
    assert_eq!(
        (done.code, done.out.trim()),
        (Some(0), &*format!("{url}/v1 none --flag")),
        "{}",
        done.err
    );
    let shown = hearth(&["launch", "--url", &url, "--dry-run", "codex", "exec", "a b"]);
    for part in [
        "codex -c ",
        "model_provider=",
        &format!("{url}/v1"),
        "exec 'a b'",
    ] {
        assert!(
            shown.out.contains(part),
            "{part}: {}{}",
            shown.out,
            shown.err
        );
    }
    let failed = hearth(&[
        "launch",
        "--url",
        &url,
        "anthropic-sdk",
        "sh",
        "-c",
        "exit 3",
    ]);
    assert_eq!(failed.code, Some(1));
    assert!(
        failed.err.contains("sh ended with exit status: 3"),
        "{}",
        failed.err
    );
    let bare = hearth(&["launch", "--url", &url, "openai-sdk"]);
    assert!(bare.err.contains("give the program"), "{}", bare.err);
}

#[test]
fn launch_starts_a_server_that_ends_with_the_client() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let url = format!("http://{address}");
    let state = tempfile::tempdir().unwrap();
    let model = model();
    let output = command()
        .args(["launch", "--url", &url, "-c", "512", "-m"])
        .arg(&model)
        .args([
            "openai-sdk",
            env!("CARGO_BIN_EXE_hearth"),
            "ps",
            "--url",
            &url,
        ])
        .env("XDG_STATE_HOME", state.path())
        .env("HEARTH_DEVICE", "cpu")
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(out.contains("bf16") && out.contains("512"), "{out}{err}");
    assert!(err.contains("starting one"), "{err}");
    let log = std::fs::read_to_string(state.path().join("hearth/serve.log")).unwrap();
    assert!(log.contains("stopped"), "{log}");
    assert!(
        TcpStream::connect(&address).is_err(),
        "the server still runs"
    );
    let elsewhere = hearth(&[
        "launch",
        "--url",
        "http://192.0.2.1:1",
        "--dry-run",
        "codex",
    ]);
    assert!(
        elsewhere.err.contains("starts no server"),
        "{}",
        elsewhere.err
    );
}

#[test]
fn port_of_the_service_manager_answers_once_the_model_is_loaded() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // A shell moves the port to the descriptor where the protocol expects it.
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\"";
    let model = model();
    let mut server = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_hearth"), "serve"])
        .arg(&model)
        .args(["--max-ctx", "512", "--port", "1"])
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The port takes connections before the server runs, as a service manager's does. The request
    // that starts it is answered, not refused because the model is still loading.
    let body = r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}"#;
    let reply = crate::client::request(&address, "/v1/chat/completions", body, &[]);
    let ended = server.kill().and_then(|()| server.wait());
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["model"], "bf16");
    ended.unwrap();
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let done = hearth(&["completions", shell]);
        assert_eq!(done.code, Some(0), "{}", done.err);
        for name in ["serve", "doctor", "launch", "max-ctx"] {
            assert!(done.out.contains(name), "{shell}: {name}");
        }
        // The generator of fish leaves words without a flag out.
        let names_clients = done.out.contains("claude-code");
        assert_eq!(names_clients, shell != "fish", "{shell}");
        if shell == "bash" {
            let mut bash = Command::new("bash")
                .arg("-n")
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            bash.stdin
                .take()
                .unwrap()
                .write_all(done.out.as_bytes())
                .unwrap();
            assert!(bash.wait().unwrap().success());
        }
    }
    let page = hearth(&["man"]).out;
    assert!(
        page.contains(".TH hearth 1") && page.contains("hearth\\-doctor(1)"),
        "{page}"
    );
    let dir = tempfile::tempdir().unwrap();
    let done = hearth(&["man", "--dir", dir.path().to_str().unwrap()]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    let serve = std::fs::read_to_string(dir.path().join("hearth-serve.1")).unwrap();
    for part in [
        "\\-\\-max\\-ctx",
        "HEARTH_MAX_CTX",
        "GGUF file or name to serve, as a flag",
    ] {
        assert!(serve.contains(part), "{part}: {serve}");
    }
    assert!(dir.path().join("hearth.1").is_file());
}
