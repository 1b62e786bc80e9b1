//! The port, who may use it, and what stands between clients and it.

use std::io::ErrorKind;
use std::net::{TcpListener, ToSocketAddrs};
use std::time::Duration;

use super::finding::{Finding, Severity};
use crate::cli::ServeArgs;
use crate::commands::http_client::HttpClient;
use crate::config::server::server_config;
use crate::config::surroundings::Surroundings;

/// Longest wait for a server that has the port already.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Open files below which connections are refused early.
const FEW_FILES: u64 = 256;

pub(super) fn findings(args: &ServeArgs, surroundings: &Surroundings) -> Vec<Finding> {
    let mut found = vec![port(&args.host, args.port)];
    match server_config(args) {
        Err(error) => found.push(
            Finding::new("settings", Severity::Problem, error.to_string())
                .action("correct the file or the flag that this names"),
        ),
        Ok(config) if config.api_keys.is_empty() && !is_loopback(&args.host) => found.push(
            Finding::new(
                "keys",
                Severity::Warning,
                format!(
                    "anyone who reaches {}:{} can use the model",
                    args.host, args.port
                ),
            )
            .at(format!("--host {}", args.host))
            .action("set --api-key or --api-key-file, or use --host 127.0.0.1"),
        ),
        Ok(_) => {}
    }
    if let Some(name) = surroundings.proxy_of_loopback() {
        found.push(
            Finding::new(
                "proxy",
                Severity::Warning,
                "clients send requests for this machine through a proxy, which fails",
            )
            .at(format!("environment: {name}"))
            .action("export no_proxy=localhost,127.0.0.1"),
        );
    }
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if let Some(files) = files.filter(|files| *files < FEW_FILES) {
        found.push(
            Finding::new(
                "files",
                Severity::Warning,
                format!("at most {files} files may be open"),
            )
            .at("ulimit -n")
            .action("`ulimit -n 1024` before the start; else connections are refused"),
        );
    }
    if cfg!(debug_assertions) {
        found.push(
            Finding::new(
                "build",
                Severity::Warning,
                "a debug build, which is many times slower",
            )
            .action("cargo build -r"),
        );
    }
    found
}

fn is_loopback(host: &str) -> bool {
    let addresses = (host, 0).to_socket_addrs().into_iter().flatten();
    let mut all = addresses.peekable();
    all.peek().is_some() && all.all(|address| address.ip().is_loopback())
}

/// Whether the port can be listened on; a server of ours that has it is no problem by itself.
fn port(host: &str, port: u16) -> Finding {
    let flags = format!("--host {host} --port {port}");
    let problem = |what: String, action: &str| {
        Finding::new("port", Severity::Problem, what)
            .at(flags.clone())
            .action(action)
    };
    match TcpListener::bind((host, port)) {
        Ok(_) => Finding::new("port", Severity::Ok, format!("{host}:{port} is free")),
        Err(error) => match error.kind() {
            ErrorKind::AddrInUse if answers(host, port) => Finding::new(
                "port",
                Severity::Note,
                format!("a Hearth server is listening on {host}:{port} already"),
            )
            .action("use it, or start another one with --port"),
            ErrorKind::AddrInUse => problem(
                format!("another program is listening on {host}:{port}"),
                "choose another --port; `ss -ltnp` names the program",
            ),
            ErrorKind::PermissionDenied => problem(
                format!("{host}:{port} is not permitted"),
                "use a port above 1023",
            ),
            ErrorKind::AddrNotAvailable => problem(
                format!("{host} is no address of this machine"),
                "use 127.0.0.1, or 0.0.0.0 for all addresses",
            ),
            _ => problem(format!("cannot listen: {error}"), "use --host 127.0.0.1"),
        },
    }
}

/// Whether a server of ours answers there.
fn answers(host: &str, port: u16) -> bool {
    let host = match host {
        "0.0.0.0" => "127.0.0.1",
        "::" => "[::1]",
        host => host,
    };
    let ask = || {
        let client = HttpClient::new(&format!("http://{host}:{port}"), None, TIMEOUT).ok()?;
        let response = client.get("/health").ok()?;
        Some(response.header("server")?.starts_with("hearth/"))
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_free_or_taken_and_addresses_of_others_are_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = listener.local_addr().unwrap().port();
        // It accepts and says nothing, as a program that is no web server.
        let finding = port("192.0.2.1", 0);
        assert_eq!(finding.severity, Severity::Problem, "{finding:?}");
        assert!(
            finding.what.contains("no address of this machine"),
            "{finding:?}"
        );
        assert_eq!(port("127.0.0.1", 0).severity, Severity::Ok);
        let silent = std::thread::spawn(move || drop(listener.accept()));
        let finding = port("127.0.0.1", taken);
        assert_eq!(finding.severity, Severity::Problem, "{finding:?}");
        assert!(finding.action.contains("another --port"), "{finding:?}");
        silent.join().unwrap();
    }

    #[test]
    fn loopback_hosts_are_known() {
        assert!(is_loopback("127.0.0.1") && is_loopback("::1"));
        assert!(!is_loopback("0.0.0.0"));
    }
}
