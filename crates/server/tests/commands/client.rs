//! A server in its own process, and an HTTP client for it.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::process::command;

/// Longest wait before a test fails; far longer than needed.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A running server; killed when dropped.
pub(crate) struct ServerProcess {
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

impl ServerProcess {
    /// Starts `hearth serve` on a free port and waits until it is ready.
    pub(crate) fn start(args: &[&str]) -> ServerProcess {
        ServerProcess::start_with(args, |command| command)
    }

    /// As `start`, with `change` applied to the command.
    pub(crate) fn start_with(
        args: &[&str],
        change: impl FnOnce(&mut Command) -> &mut Command,
    ) -> ServerProcess {
        let mut command = command();
        command.args(["serve", "--port", "0"]).args(args);
        change(&mut command);
        ServerProcess::spawn(command)
    }

    /// Starts a command that serves, and waits until it is ready.
    pub(crate) fn spawn(mut command: Command) -> ServerProcess {
        command.stderr(Stdio::piped()).stdin(Stdio::null());
        let mut child = command.spawn().unwrap();
        let lines = lines(child.stderr.take().unwrap());
        let mut server = ServerProcess {
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

    /// Reads the log up to a line that contains `part`.
    pub(crate) fn wait_for(&mut self, part: &str) -> String {
        loop {
            match self.lines.recv_timeout(TIMEOUT) {
                Ok(line) => {
                    self.log.push_str(&line);
                    self.log.push('\n');
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(_) => panic!("the log ended without {part:?}:\n{}", self.log),
            }
        }
    }

    /// Sends a request with a JSON body, or a GET without one.
    pub(crate) fn request(&self, path: &str, body: &str) -> Response {
        self.request_with(path, body, &[])
    }

    /// As `request`, with further headers.
    pub(crate) fn request_with(
        &self,
        path: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> Response {
        request(&self.address, path, body, headers)
    }

    /// A short chat.
    pub(crate) fn chat(&self) -> Response {
        self.request(
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":"Hello"}],"max_tokens":4}"#,
        )
    }

    /// The process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
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

    /// Waits for the exit; returns the exit status and the whole log.
    pub(crate) fn wait(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().unwrap();
        while let Ok(line) = self.lines.recv_timeout(TIMEOUT) {
            self.log.push_str(&line);
            self.log.push('\n');
        }
        (status.code(), std::mem::take(&mut self.log))
    }
}

/// Sends a request with a JSON body, or a GET without one, to `host:port`.
pub(crate) fn request(address: &str, path: &str, body: &str, headers: &[(&str, &str)]) -> Response {
    let url = format!("http://{address}{path}");
    let agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .proxy(None)
        .timeout_per_read(Some(TIMEOUT));
    let agent = agent.build().new_agent();
    let mut request = ureq::http::Request::builder().uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = if body.is_empty() {
        agent.run(request.body(()).unwrap())
    } else {
        let request = request
            .method("POST")
            .header("content-type", "application/json");
        agent.run(request.body(body).unwrap())
    };
    let mut response = response.unwrap();
    Response {
        status: response.status().as_u16(),
        body: response.body_mut().read_to_string().unwrap(),
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // It has exited already if the test succeeded.
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
