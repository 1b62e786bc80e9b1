//! What others do to a running server: close its log, flood it, and leave.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::client::ServerProcess;
use crate::process::command;

/// Longer than anything here takes, in an unoptimised build beside other tests.
const LIMIT: Duration = Duration::from_secs(120);

/// A server whose log this test holds; killed when dropped.
struct Bare {
    child: Child,
    address: String,
}

impl Bare {
    /// Starts on a free port, with a line of log for each request.
    fn start(log: Stdio) -> Bare {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let mut command: Command = command();
        let port = address.port().to_string();
        command.args(["serve", "--log", "debug", "--port", &port]);
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let address = address.to_string();
        Bare { child, address }
    }

    fn until_ready(&self) {
        let begun = Instant::now();
        while !self
            .get("/health")
            .is_some_and(|answer| answer.contains(" 200 "))
        {
            assert!(begun.elapsed() < LIMIT, "not ready in time");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
            self.address
        )
        .ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    }

    fn check_serves_without_log(&self) {
        for _ in 0..5 {
            let answer = chat(&self.address, "Hello");
            assert!(answer.contains(" 200 "), "{answer}");
        }
        let metrics = self.get("/metrics").unwrap();
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("hearth_log_lines_lost_total "));
        let lost: u64 = line.unwrap().parse().unwrap();
        assert!(lost >= 5, "{lost}");
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // It has not ended by itself, or the test has failed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send_chat(address: &str, content: &str) -> TcpStream {
    let body = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{content}\"}}],\"max_tokens\":4}}"
    );
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream
}

fn chat(address: &str, content: &str) -> String {
    let mut answer = String::new();
    let mut stream = send_chat(address, content);
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn server_outlives_a_closed_log_pipe() {
    let mut server = Bare::start(Stdio::piped());
    let mut log = BufReader::new(server.child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("ready: serving") {
        line.clear();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "the log ended early");
    }
    drop(log);
    server.check_serves_without_log();
}

#[test]
fn server_outlives_a_full_log_disk() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let server = Bare::start(Stdio::from(full));
    server.until_ready();
    server.check_serves_without_log();
}

/// Time of all cores that the process has used. Other programs on the machine are not in it.
fn used_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The name of the program is in brackets and may contain spaces; 100 ticks are a second.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let ticks = fields.split_whitespace().skip(11).take(2);
    Duration::from_millis(ticks.map(|n| n.parse::<u64>().unwrap() * 10).sum())
}

/// Most memory that the process has had, in MiB.
fn peak_mib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib: Option<u64> = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    kib.unwrap() / 1024
}

#[test]
fn five_clients_that_send_30_mb_and_leave_take_little_memory_and_time() {
    let server = ServerProcess::start(&[]);
    let before = peak_mib(server.pid());
    let content = "many words in a row ".repeat(30_000_000 / 20);
    let streams: Vec<TcpStream> = (0..5)
        .map(|_| send_chat(&server.address, &content))
        .collect();
    drop(streams);
    let used = used_time(server.pid());
    assert_eq!(server.chat().status, 200);
    let used = used_time(server.pid()) - used;
    assert!(used < Duration::from_secs(30), "{used:?}");
    let grown = peak_mib(server.pid()) - before;
    assert!(grown <= 1024, "{grown} MiB");
}

#[test]
fn text_of_15_mb_is_refused_in_seconds() {
    let server = ServerProcess::start(&[]);
    let content = "many words in a row ".repeat(15_000_000 / 20);
    let used = used_time(server.pid());
    let answer = chat(&server.address, &content);
    let used = used_time(server.pid()) - used;
    assert!(answer.contains(" 400 "), "{answer}");
    assert!(answer.contains("context_length_exceeded"), "{answer}");
    // 3 s in a release build; this one is several times slower.
    assert!(used < Duration::from_secs(15), "{used:?}");
}

#[test]
fn hangup_reloads_keys_and_log_level_and_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (keys, config) = (dir.path().join("keys"), dir.path().join("hearth.toml"));
    fs::write(&keys, "one\n").unwrap();
    fs::write(&config, "log = \"info\"\n").unwrap();
    let args = [
        "--api-key-file",
        keys.to_str().unwrap(),
        "--config",
        config.to_str().unwrap(),
    ];
    let mut server = ServerProcess::start(&args);
    let status = |server: &ServerProcess, key: &str| {
        let headers = [("x-api-key", key)];
        server.request_with("/v1/models", "", &headers).status
    };
    assert_eq!((status(&server, "one"), status(&server, "two")), (200, 401));
    fs::write(&keys, "two\n").unwrap();
    fs::write(&config, "log = \"debug\"\n").unwrap();
    server.signal("HUP");
    server.wait_for("reloaded: 1 keys, --log debug");
    assert_eq!((status(&server, "one"), status(&server, "two")), (401, 200));
    server.wait_for("request answered");
    fs::write(&keys, "\n").unwrap();
    server.signal("HUP");
    server.wait_for("nothing is reloaded");
    assert_eq!((status(&server, ""), status(&server, "two")), (401, 200));
    server.signal("TERM");
    assert_eq!(server.wait().0, Some(0));
}
