//! The task that opens and closes engines, one at a time.
//!
//! An engine is closed when its requests have ended: it takes no more leases, and its thread then
//! writes the prefix cache to the store. New requests for it wait for its next load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::host::{Command, ModelHost};
use super::slot::{ModelSlot, SlotState};
use crate::engine::{Engine, EnginePhase};

/// Longest wait between two looks at idle models.
const IDLE_CHECK: Duration = Duration::from_secs(3600);

pub(super) struct Manager {
    host: ModelHost,
    commands: mpsc::UnboundedReceiver<Command>,
}

impl Manager {
    pub(super) fn new(host: ModelHost, commands: mpsc::UnboundedReceiver<Command>) -> Manager {
        Manager { host, commands }
    }

    /// Works until the server shuts down.
    pub(super) async fn run(mut self) {
        let mut changed = self.host.0.changed.subscribe();
        while !self.host.is_draining() {
            let next_check = self.unload_expired().await;
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(Command::Load(model)) => self.load(model).await,
                    Some(Command::Unload(model, done)) => {
                        self.close(model).await;
                        // The request may have gone.
                        let _ = done.send(());
                    }
                    None => return,
                },
                // A lease has ended, or a keep-alive time is another.
                _ = changed.changed() => {}
                () = tokio::time::sleep(next_check) => {}
            }
        }
    }

    /// Unloads idle models whose time is over; returns the time to the next look.
    async fn unload_expired(&self) -> Duration {
        let now = Instant::now();
        let mut next = IDLE_CHECK;
        let mut expired = Vec::new();
        for (model, slot) in self.host.lock().slots.iter().enumerate() {
            match slot.expires_at() {
                Some(at) if at <= now => expired.push(model),
                Some(at) => next = next.min(at - now),
                None => {}
            }
        }
        for model in expired {
            tracing::info!("{}: idle, so it is unloaded", self.host.name(model));
            self.close(model).await;
        }
        next
    }

    async fn load(&self, model: usize) {
        {
            let mut slots = self.host.lock();
            let slot = &mut slots.slots[model];
            slot.is_queued = false;
            if slots.is_draining || !slots.slots[model].has_waiters() {
                return;
            }
            if slots.slots[model].is_ready() {
                drop(slots);
                return self.host.settle(model, None);
            }
        }
        // An engine that was lost is closed before it is opened again.
        self.close(model).await;
        self.make_room(model).await;
        let hosted = self.host.model(model);
        tracing::info!("{}: loading", hosted.name);
        let begun = Instant::now();
        let queue_limit = self.host.0.policy.queue_limit;
        let (engine, handle) = match Engine::start((hosted.open)(), queue_limit) {
            Ok(started) => started,
            Err(error) => return self.host.settle(model, Some(error.to_string().into())),
        };
        self.set(model, |slot| {
            slot.state = SlotState::Loading(handle.clone())
        });
        let phase = handle
            .wait_for(|phase| *phase != EnginePhase::Loading)
            .await;
        let error: Arc<str> = match phase {
            EnginePhase::Ready => {
                let seconds = begun.elapsed().as_secs_f64();
                tracing::info!("{}: loaded in {seconds:.1} s", hosted.name);
                self.set(model, |slot| slot.state = SlotState::Loaded(handle, engine));
                return self.host.settle(model, None);
            }
            EnginePhase::Failed(error) => error,
            _ => "the engine ended".into(),
        };
        tracing::error!("{}: cannot be loaded: {error}", hosted.name);
        join(engine).await;
        self.set(model, |slot| slot.state = SlotState::Unloaded);
        self.host.settle(model, Some(error));
    }

    /// Unloads the least recently used models while there are too many, or this one does not fit.
    async fn make_room(&self, model: usize) {
        loop {
            let least_used = {
                let slots = self.host.lock();
                let loaded = slots.slots.iter().enumerate();
                let loaded: Vec<(usize, &ModelSlot)> = loaded
                    .filter(|(_, slot)| matches!(slot.state, SlotState::Loaded(..)))
                    .collect();
                let is_full = loaded.len() >= self.host.0.policy.max_loaded.max(1);
                // Idle models go before those that must be waited for.
                let order = |(_, slot): &&(usize, &ModelSlot)| (slot.leases > 0, slot.last_used);
                let least_used = loaded.iter().min_by_key(order).map(|(model, _)| *model);
                least_used.map(|least_used| (least_used, is_full))
            };
            let Some((least_used, is_full)) = least_used else {
                return;
            };
            if !is_full && self.fits(model).await {
                return;
            }
            self.close(least_used).await;
        }
    }

    /// Whether a model fits into the free memory. The probe of a GPU may take a tenth of a second.
    async fn fits(&self, model: usize) -> bool {
        let fits = Arc::clone(&self.host.model(model).fits);
        // A probe that panics says nothing; the load says what is wrong.
        tokio::task::spawn_blocking(move || fits())
            .await
            .unwrap_or(true)
    }

    /// Waits until the requests of a loaded model have ended, and ends its engine.
    async fn close(&self, model: usize) {
        let mut changed = self.host.0.changed.subscribe();
        let Some((handle, engine)) = self.host.lock().slots[model].close() else {
            return;
        };
        self.host.note_change();
        while self.host.lock().slots[model].leases > 0 {
            if changed.changed().await.is_err() {
                return;
            }
        }
        handle.drain(Duration::ZERO);
        join(engine).await;
        tracing::info!("{}: unloaded", self.host.name(model));
        self.host.retire(model, &handle);
    }

    fn set(&self, model: usize, change: impl FnOnce(&mut ModelSlot)) {
        change(&mut self.host.lock().slots[model]);
        self.host.note_change();
    }
}

/// Waits for the end of an engine's thread, which may write states to the disk.
async fn join(engine: Engine) {
    // A join blocks. The thread catches its panics.
    let _ = tokio::task::spawn_blocking(move || engine.join()).await;
}
