//! SIGHUP: reads the API keys and the log level again while the server runs.

use std::sync::OnceLock;

use anyhow::{Context, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

use crate::cli::Command;
use crate::config;
use crate::config::server::server_config;
use crate::settings::ServerConfig;

type SetFilter = Box<dyn Fn(EnvFilter) -> bool + Send + Sync>;

/// Replaces the filter of this process's log.
static LOG: OnceLock<SetFilter> = OnceLock::new();

pub(super) fn set_log_handle(set: impl Fn(EnvFilter) -> bool + Send + Sync + 'static) {
    // A process starts its log once.
    let _ = LOG.set(Box::new(set));
}

/// Registers the signal, which would otherwise end the process, and connects `config` to it.
pub(super) fn on_hangup(config: &mut ServerConfig) -> std::io::Result<()> {
    let hangup = signal(SignalKind::hangup())?;
    let (sender, receiver) = watch::channel(config.api_keys.clone());
    config.api_key_updates = Some(receiver);
    tokio::spawn(follow(hangup, sender));
    Ok(())
}

async fn follow(mut hangup: Signal, keys: watch::Sender<Vec<String>>) {
    while hangup.recv().await.is_some() {
        // Files are read on a thread that may block.
        let had_keys = !keys.borrow().is_empty();
        let read = tokio::task::spawn_blocking(move || settings(had_keys)).await;
        match read {
            Ok(Ok((log, new_keys))) => {
                let n_keys = new_keys.len();
                keys.send_replace(new_keys);
                tracing::info!("reloaded: {n_keys} keys, --log {log}");
            }
            Ok(Err(error)) => tracing::warn!("nothing is reloaded: {error:#}"),
            Err(error) => tracing::warn!("nothing is reloaded: {error}"),
        }
    }
}

/// The log filter, already in effect, and the API keys. A server with keys keeps at least one.
fn settings(had_keys: bool) -> anyhow::Result<(String, Vec<String>)> {
    let parsed = config::parse(std::env::args_os())?;
    let Command::Serve(args) = parsed.cli.command else {
        bail!("the command line no longer means serve");
    };
    let keys = server_config(&args)?.api_keys;
    if had_keys && keys.is_empty() {
        bail!("there are no API keys left; restart the server to run it without");
    }
    let log = parsed.cli.log;
    let filter = EnvFilter::try_new(&log).with_context(|| format!("--log {log}"))?;
    if !LOG.get().is_some_and(|set| set(filter)) {
        bail!("the log level cannot be changed");
    }
    Ok((log, keys))
}
