//! Notifications to a service manager (systemd, `Type=notify`); without one, they do nothing.

use std::time::Duration;

use sd_notify::NotifyState;

/// Time that each report of progress adds to the start timeout.
const EXTENSION: Duration = Duration::from_secs(60);

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager cannot be notified");
    }
}

/// Reports loading progress.
pub(super) fn loading(percent: u64) {
    starting(&format!("loading {percent}%"));
}

/// Reports the progress of a download.
pub(super) fn downloading(percent: u64) {
    starting(&format!("downloading {percent}%"));
}

fn starting(status: &str) {
    let more = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
    notify(&[
        NotifyState::Status(status),
        NotifyState::ExtendTimeoutUsec(more),
    ]);
}

/// Reports that the port is open and the model is ready.
pub(super) fn ready(url: &str) {
    notify(&[NotifyState::Ready]);
    serving(url);
}

/// Reports that requests are served, after a start or a later load.
pub(super) fn serving(url: &str) {
    notify(&[NotifyState::Status(&format!("serving at {url}"))]);
}

/// Reports that the server is stopping.
pub(super) fn stopping() {
    notify(&[NotifyState::Stopping, NotifyState::Status("stopping")]);
}

/// Feeds the watchdog, if one is on, while no engine step takes longer than `stall`.
pub(super) async fn feed_watchdog(step_age: impl Fn() -> Option<Duration>, stall: Duration) {
    let Some(period) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval((period / 2).max(Duration::from_millis(1)));
    loop {
        ticks.tick().await;
        if step_age().is_none_or(|age| age < stall) {
            notify(&[NotifyState::Watchdog]);
        }
    }
}
