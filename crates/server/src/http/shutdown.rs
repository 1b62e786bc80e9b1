//! Shutdown signal: graceful on the first request, immediate on the second.

use tokio::sync::watch;

/// Count of shutdown requests; all clones share it.
#[derive(Debug, Clone)]
pub struct ShutdownSignal {
    requests: watch::Receiver<u32>,
}

/// Sender side of a [`ShutdownSignal`].
#[derive(Debug, Clone)]
pub struct ShutdownTrigger {
    requests: watch::Sender<u32>,
}

impl ShutdownTrigger {
    /// Requests a shutdown.
    pub fn trigger(&self) {
        self.requests.send_modify(|count| *count += 1);
    }
}

impl ShutdownSignal {
    /// A connected trigger and signal.
    pub fn new() -> (ShutdownTrigger, ShutdownSignal) {
        let (sender, receiver) = watch::channel(0);
        (
            ShutdownTrigger { requests: sender },
            ShutdownSignal { requests: receiver },
        )
    }

    /// A signal connected to the process's interrupt and terminate signals.
    pub fn on_signals() -> std::io::Result<ShutdownSignal> {
        use tokio::signal::unix::{SignalKind, signal};
        let (switch, stop) = ShutdownSignal::new();
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                switch.trigger();
            }
        });
        Ok(stop)
    }

    /// Whether a shutdown was requested.
    pub fn is_requested(&self) -> bool {
        *self.requests.borrow() > 0
    }

    /// Waits until `times` requests arrived; forever if no trigger is left.
    pub async fn requested(&self, times: u32) {
        let mut requests = self.requests.clone();
        if requests.wait_for(|count| *count >= times).await.is_err() {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn second_shutdown_request_is_distinguished() {
        let (switch, stop) = ShutdownSignal::new();
        assert!(!stop.is_requested());
        switch.trigger();
        stop.requested(1).await;
        assert!(stop.is_requested());
        let second = stop.clone();
        let waiting = tokio::spawn(async move { second.requested(2).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        switch.trigger();
        waiting.await.unwrap();
    }
}
