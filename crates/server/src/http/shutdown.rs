//! Being asked to stop: once politely, a second time at once.

use tokio::sync::watch;

/// How often the server was asked to stop. Cloneable; all clones see the same count.
#[derive(Debug, Clone)]
pub struct Stop {
    asked: watch::Receiver<u32>,
}

/// Asks a server to stop.
#[derive(Debug, Clone)]
pub struct StopSwitch {
    asked: watch::Sender<u32>,
}

impl StopSwitch {
    /// Counts one request to stop.
    pub fn ask(&self) {
        self.asked.send_modify(|count| *count += 1);
    }
}

impl Stop {
    /// A pair of switch and lamp.
    pub fn new() -> (StopSwitch, Stop) {
        let (sender, receiver) = watch::channel(0);
        (StopSwitch { asked: sender }, Stop { asked: receiver })
    }

    /// A lamp that follows the process's interrupt and terminate signals.
    pub fn on_signals() -> std::io::Result<Stop> {
        use tokio::signal::unix::{SignalKind, signal};
        let (switch, stop) = Stop::new();
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                switch.ask();
            }
        });
        Ok(stop)
    }

    /// Whether it was asked at least once.
    pub fn is_asked(&self) -> bool {
        *self.asked.borrow() > 0
    }

    /// Waits until it was asked `times` times; forever if nobody is left who could ask.
    pub async fn asked(&self, times: u32) {
        let mut asked = self.asked.clone();
        if asked.wait_for(|count| *count >= times).await.is_err() {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_second_request_is_told_from_the_first() {
        let (switch, stop) = Stop::new();
        assert!(!stop.is_asked());
        switch.ask();
        stop.asked(1).await;
        assert!(stop.is_asked());
        let second = stop.clone();
        let waiting = tokio::spawn(async move { second.asked(2).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        switch.ask();
        waiting.await.unwrap();
    }
}
