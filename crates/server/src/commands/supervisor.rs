//! What a service manager is told (systemd, `Type=notify`). Where there is none, nothing happens.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::engine::handle::EngineHandle;

/// How much longer loading may take from each sign of progress on.
const EXTENSION: Duration = Duration::from_secs(60);

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager cannot be told");
    }
}

/// Loading has come this far.
pub(super) fn loading(percent: u64) {
    let more = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
    tell(&[
        NotifyState::Status(&format!("loading {percent}%")),
        NotifyState::ExtendTimeoutUsec(more),
    ]);
}

/// The port is bound and the model answers.
pub(super) fn ready(url: &str) {
    tell(&[
        NotifyState::Ready,
        NotifyState::Status(&format!("serving at {url}")),
    ]);
}

/// Running requests are being finished.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("stopping")]);
}

/// Feeds the watchdog, if one is on, for as long as no turn of the engine takes longer than `stall`.
pub(super) async fn feed_watchdog(engine: EngineHandle, stall: Duration) {
    let Some(period) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval((period / 2).max(Duration::from_millis(1)));
    loop {
        ticks.tick().await;
        if engine.step_age().is_none_or(|age| age < stall) {
            tell(&[NotifyState::Watchdog]);
        }
    }
}
