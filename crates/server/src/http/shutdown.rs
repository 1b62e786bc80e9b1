//! Being asked to stop: once politely, a second time at once.

use tokio::sync::watch;

/// How often the server was asked to stop. Cloneable; all clones see the same count.
#[derive(Debug, Clone)]
pub struct ShutdownSignal {
    requests: watch::Receiver<u32>,
}

/// Asks a server to stop.
#[derive(Debug, Clone)]
pub struct ShutdownTrigger {
    requests: watch::Sender<u32>,
}

impl ShutdownTrigger {
    /// Counts one request to stop.
    pub fn trigger(&self) {
        self.requests.send_modify(|count| *count += 1);
    }
}

impl ShutdownSignal {
    /// A pair of switch and lamp.
    pub fn new() -> (ShutdownTrigger, ShutdownSignal) {
        let (sender, receiver) = watch::channel(0);
        (
            ShutdownTrigger { requests: sender },
            ShutdownSignal { requests: receiver },
        )
    }

    /// A lamp that follows the process's interrupt and terminate signals.
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

    /// Whether it was asked at least once.
    pub fn is_requested(&self) -> bool {
        *self.requests.borrow() > 0
    }

    /// Waits until it was asked `times` times; forever if nobody is left who could ask.
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
    async fn the_second_request_is_told_from_the_first() {
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
