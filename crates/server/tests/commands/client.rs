//! A served model in a process of its own, and just enough HTTP to talk to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::process::command;

/// How long anything may take here before the test fails; far more than it takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running server; killed when dropped.
pub(crate) struct Server {
    child: Child,
    lines: Receiver<String>,
    /// Log lines so far.
    pub(crate) log: String,
    /// `127.0.0.1:port`.
    pub(crate) address: String,
}

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

impl Server {
    /// Starts `hearth serve` on a free port and waits until it is ready.
    pub(crate) fn start(args: &[&str]) -> Server {
        Server::start_with(args, |command| command)
    }

    /// As `start`, after `change` has had the command.
    pub(crate) fn start_with(
        args: &[&str],
        change: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Server {
        let mut command = command();
        command.args(["serve", "--port", "0"]).args(args);
        change(&mut command);
        Server::spawn(command)
    }

    /// Starts a command line that serves, and waits until it is ready.
    pub(crate) fn spawn(mut command: Command) -> Server {
        command.stderr(Stdio::piped()).stdin(Stdio::null());
        let mut child = command.spawn().unwrap();
        let lines = lines(child.stderr.take().unwrap());
        let mut server = Server {
            child,
            lines,
            log: String::new(),
            address: String::new(),
        };
        let ready = server.wait_for("ready: serving at http://");
        let url = ready.split_once("http://").unwrap().1;
        server.address = url.split('/').next().unwrap().to_owned();
        server
    }

    /// Reads the log up to a line with `part`.
    pub(crate) fn wait_for(&mut self, part: &str) -> String {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => {
                    self.log.push_str(&line);
                    self.log.push('\n');
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(_) => panic!("no line with {part:?} came:\n{}", self.log),
            }
        }
    }

    /// Sends a request with a JSON body, or a GET without one.
    pub(crate) fn ask(&self, path: &str, body: &str) -> Response {
        self.ask_with(path, body, "")
    }

    /// As `ask`, with further header lines, each ended by CRLF.
    pub(crate) fn ask_with(&self, path: &str, body: &str, headers: &str) -> Response {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{headers}\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Response {
            status,
            body: body.to_owned(),
        }
    }

    /// A short chat.
    pub(crate) fn chat(&self) -> Response {
        self.ask(
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":"Hello"}],"max_tokens":4}"#,
        )
    }

    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Waits for the end; gives the exit status and the whole log.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().unwrap();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.log.push_str(&line);
            self.log.push('\n');
        }
        (status.code(), std::mem::take(&mut self.log))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already if the test went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines(stderr: ChildStderr) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}
