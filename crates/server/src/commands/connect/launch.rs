//! `hearth launch`: starts a client on this server, for one run. The user's own settings of the
//! client stay as they are.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

use super::starts::{Start, start_of};
use super::{find, served_model};
use crate::cli::{ConnectArgs, LaunchArgs};
use crate::commands::INTERRUPTED;
use crate::commands::http_client::HttpClient;
use crate::config::directories::{self, Directories};

/// Longest wait for an answer of a server that runs.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two looks at a server that starts.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Longest wait for the end of a server that was started here, in steps of [`POLL_INTERVAL`].
const MOST_WAITS: usize = 50;
/// Exit status after a signal that ends this process, as shells report it.
const ENDED: u8 = 143;

pub(in crate::commands) fn launch(args: &LaunchArgs) -> anyhow::Result<()> {
    let client = find(&args.client)?;
    let start = start_of(client.name).with_context(|| {
        let name = client.name;
        format!("{name} cannot be started from here; use `hearth connect {name}`")
    })?;
    let asking = HttpClient::new(&args.url, args.api_key.clone(), TIMEOUT)?;
    let state = watch_signals()?;
    let runs = asking.get("/health").is_ok();
    if !runs && args.dry_run {
        bail!(
            "{} does not respond; a dry run starts no server",
            asking.base()
        );
    }
    let started = if runs {
        tracing::info!("using the server at {}", asking.base());
        None
    } else {
        Some(OwnServer::start(args, &asking, &state)?)
    };
    let to = served_model(&ConnectArgs {
        client: None,
        url: args.url.clone(),
        // The model of a server that is started here is its only one.
        model: args.model.clone().filter(|_| runs),
        context: args.context,
        api_key: args.api_key.clone(),
        write: false,
    })?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let own = temporary(&folder)?;
    for settings in (client.files)(&to, &own) {
        settings.write()?;
    }
    let mut start = start(&to, &own);
    start.args.extend(args.words.iter().cloned());
    if start.program.is_empty() {
        if start.args.is_empty() {
            bail!(
                "{} is a library; give the program to start, as in `hearth launch {} python chat.py`",
                client.title,
                client.name
            );
        }
        start.program = start.args.remove(0);
    }
    if args.dry_run {
        return print(&start);
    }
    tracing::info!("starting {} with {}", start.program, to.model);
    state.client_runs.store(true, Ordering::SeqCst);
    let status = Command::new(&start.program)
        .args(&start.args)
        .envs(start.variables.iter().map(|(name, value)| (name, value)))
        .status()
        .with_context(|| {
            let program = &start.program;
            format!(
                "{program} cannot be started; is {} installed and in PATH?",
                client.title
            )
        });
    drop(started);
    let status = status?;
    if !status.success() {
        bail!("{} ended with {status}", start.program);
    }
    Ok(())
}

/// Folders of settings within a temporary one.
fn temporary(folder: &TempDir) -> anyhow::Result<Directories> {
    let at = |name: &str| folder.path().join(name);
    let own = Directories {
        home: at("home"),
        config: at("config"),
        codex: at("codex"),
        claude: at("claude"),
        llm: at("llm"),
    };
    for dir in [&own.home, &own.config, &own.codex, &own.claude, &own.llm] {
        std::fs::create_dir(dir).context("cannot create a temporary folder")?;
    }
    Ok(own)
}

/// Prints a start as a command line; what a shell would read otherwise is quoted.
fn print(start: &Start) -> anyhow::Result<()> {
    use std::io::Write;
    let variables = start
        .variables
        .iter()
        .map(|(name, value)| format!("{name}={}", quoted(value)));
    let words = std::iter::once(&start.program).chain(&start.args);
    let line: Vec<String> = variables.chain(words.map(|word| quoted(word))).collect();
    writeln!(std::io::stdout().lock(), "{}", line.join(" "))?;
    Ok(())
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@,+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// A server that was started for one run; dropping it ends it.
struct OwnServer(Child);

impl OwnServer {
    /// Starts a server and waits until its model is loaded.
    fn start(
        args: &LaunchArgs,
        asking: &HttpClient,
        state: &RunState,
    ) -> anyhow::Result<OwnServer> {
        let base = asking.base();
        let (host, port) = address(base).with_context(|| {
            format!("{base} does not respond, and no server can be started there; start `hearth serve` on it")
        })?;
        let log = log_file()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve");
        command.env("HEARTH_HOST", &host).env("HEARTH_PORT", &port);
        if let Some(model) = &args.model {
            command.env("HEARTH_MODEL", model);
        }
        if let Some(context) = args.context {
            command.env("HEARTH_MAX_CTX", context.to_string());
        }
        if let Some(config) = &args.config {
            command.env("HEARTH_CONFIG", config);
        }
        if let Some(key) = &args.api_key {
            command.env("HEARTH_API_KEY", key);
        }
        tracing::info!("no server at {base}: starting one; its log is {}", log.1);
        let child = command
            // Ctrl-C is for the client.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log.0.try_clone()?)
            .stderr(log.0)
            .spawn()
            .context("cannot start the server")?;
        let mut server = OwnServer(child);
        if let Some(pid) = server.pid() {
            state.server.get_or_init(|| pid);
        }
        loop {
            if let Some(status) = server.0.try_wait()? {
                bail!("the server ended with {status}; its log is {}", log.1);
            }
            if asking
                .get("/health")
                .is_ok_and(|response| response.status == 200)
            {
                return Ok(server);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl OwnServer {
    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.0.id()).ok().and_then(Pid::from_raw)
    }
}

/// What a signal has to know.
#[derive(Default)]
struct RunState {
    /// The server that was started here.
    server: OnceLock<Pid>,
    /// Ctrl-C is for the client.
    client_runs: AtomicBool,
}

/// Watches signals: an end of this process ends the server too, and ctrl-C does so only before the
/// client runs.
fn watch_signals() -> io::Result<Arc<RunState>> {
    let state = Arc::new(RunState::default());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // Registered before the thread starts, so that no signal is lost.
    let (mut interrupts, mut hangups, mut ends) = {
        let _guard = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::terminate())?,
        )
    };
    let watched = Arc::clone(&state);
    let watch = async move {
        loop {
            tokio::select! {
                _ = interrupts.recv() => {
                    if !watched.client_runs.load(Ordering::SeqCst) {
                        end_now(&watched, INTERRUPTED);
                    }
                }
                _ = hangups.recv() => end_now(&watched, ENDED),
                _ = ends.recv() => end_now(&watched, ENDED),
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || runtime.block_on(watch))?;
    Ok(state)
}

#[expect(clippy::exit, reason = "the main thread waits for a program")]
fn end_now(state: &RunState, status: u8) {
    if let Some(pid) = state.server.get() {
        // It may have ended by itself.
        let _ = kill_process(*pid, Signal::TERM);
    }
    std::process::exit(i32::from(status))
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        for _ in 0..MOST_WAITS {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Host and port of an address on this machine; `None` for others.
fn address(base: &str) -> Option<(String, String)> {
    let (host, port) = base.strip_prefix("http://")?.rsplit_once(':')?;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let is_here = bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    is_here.then(|| (bare.to_owned(), port.to_owned()))
}

/// The log of a server that is started here, in the user's state directory.
fn log_file() -> anyhow::Result<(File, String)> {
    let path = directories::state().map(|folder| folder.join("serve.log"));
    let path = path.context("HOME is not set, so the log has no place; set it")?;
    let folder = path.parent().unwrap_or(&path);
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let name = path.display().to_string();
    Ok((File::create(&path).with_context(|| name.clone())?, name))
}

#[cfg(test)]
mod tests {
    use super::super::ServedModel;
    use super::super::clients::CLIENTS;
    use super::*;

    #[test]
    fn servers_are_started_on_loopback_only() {
        let of = |base: &str| address(base).map(|(host, port)| format!("{host} {port}"));
        assert_eq!(
            of("http://127.0.0.1:8000").as_deref(),
            Some("127.0.0.1 8000")
        );
        assert_eq!(of("http://[::1]:9").as_deref(), Some("::1 9"));
        assert_eq!(of("http://localhost:80").as_deref(), Some("localhost 80"));
        assert_eq!(of("http://192.0.2.1:8000"), None);
    }

    #[test]
    fn every_client_starts_with_the_address_and_the_model_and_leaves_the_home_alone() {
        let to = ServedModel {
            base: "http://127.0.0.1:9".to_owned(),
            model: "m-1".to_owned(),
            context: 4096,
            key: Some("k-2".to_owned()),
        };
        for client in &CLIENTS {
            let folder = tempfile::tempdir().unwrap();
            let own = temporary(&folder).unwrap();
            let mut text = String::new();
            for settings in (client.files)(&to, &own) {
                assert!(settings.file.starts_with(folder.path()), "{}", client.name);
                text += &settings.text().unwrap();
            }
            let start = start_of(client.name).unwrap()(&to, &own);
            let values = start.variables.iter().map(|(_, value)| value);
            let given: Vec<&str> = values.chain(&start.args).map(String::as_str).collect();
            let given = given.join(" ");
            // Either the words name the server, or they name the file that does.
            let in_file = given.contains(folder.path().to_str().unwrap());
            assert!(
                given.contains("127.0.0.1:9") || in_file,
                "{}: {given}",
                client.name
            );
            let all = if in_file {
                format!("{given} {text}")
            } else {
                given
            };
            let names_model = all.contains("m-1");
            assert!(
                names_model || start.program.is_empty(),
                "{}: {all}",
                client.name
            );
        }
    }

    #[test]
    fn printed_command_lines_are_quoted() {
        for (word, expected) in [
            ("a-b", "a-b"),
            ("it's", "'it'\\''s'"),
            ("", "''"),
            ("a b", "'a b'"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }
}
