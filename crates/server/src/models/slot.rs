//! What the host knows of one model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::lease::{Lease, LeaseError};
use crate::engine::handle::EngineHandle;
use crate::engine::{Engine, EnginePhase};

/// Where a model is.
pub(super) enum SlotState {
    /// Not in memory.
    Unloaded,
    /// Its engine loads it; the manager joins the thread.
    Loading(EngineHandle),
    /// Takes requests. Closing it joins the thread.
    Loaded(EngineHandle, Engine),
    /// Takes no more requests; the manager ends the engine when its leases have ended.
    Closing(EngineHandle),
}

/// One model of the host.
pub(super) struct ModelSlot {
    pub(super) state: SlotState,
    /// Requests that hold the model.
    pub(super) leases: usize,
    /// Requests that wait for the next load. A request that has gone has closed its channel.
    pub(super) waiters: Vec<oneshot::Sender<Result<Lease, LeaseError>>>,
    /// Whether a load command is on its way to the manager.
    pub(super) is_queued: bool,
    /// Idle time after which it is unloaded.
    pub(super) keep_alive: Option<Duration>,
    /// End of the last request.
    pub(super) last_used: Instant,
    /// Why the last load failed.
    pub(super) error: Option<Arc<str>>,
}

impl ModelSlot {
    pub(super) fn new(keep_alive: Option<Duration>) -> ModelSlot {
        ModelSlot {
            state: SlotState::Unloaded,
            leases: 0,
            waiters: Vec::new(),
            is_queued: false,
            keep_alive,
            last_used: Instant::now(),
            error: None,
        }
    }

    /// The engine, if there is one.
    pub(super) fn engine(&self) -> Option<&EngineHandle> {
        match &self.state {
            SlotState::Unloaded => None,
            SlotState::Loading(engine)
            | SlotState::Loaded(engine, _)
            | SlotState::Closing(engine) => Some(engine),
        }
    }

    /// Whether it takes requests: it is loaded, and its engine works.
    pub(super) fn is_ready(&self) -> bool {
        matches!(&self.state, SlotState::Loaded(engine, _) if engine.phase() == EnginePhase::Ready)
    }

    /// Counts a lease if the model takes requests.
    pub(super) fn take_lease(&mut self) -> Option<EngineHandle> {
        if !self.is_ready() {
            return None;
        }
        self.leases += 1;
        self.last_used = Instant::now();
        self.engine().cloned()
    }

    /// Whether a request waits for a load.
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.iter().any(|waiter| !waiter.is_closed())
    }

    /// Takes a loaded engine out, to end it. The state is then closing.
    pub(super) fn close(&mut self) -> Option<(EngineHandle, Engine)> {
        let handle = match &self.state {
            SlotState::Loaded(handle, _) => handle.clone(),
            _ => return None,
        };
        let closing = SlotState::Closing(handle);
        match std::mem::replace(&mut self.state, closing) {
            SlotState::Loaded(handle, engine) => Some((handle, engine)),
            _ => None,
        }
    }

    /// When it is to be unloaded, if it is idle and not kept for ever.
    pub(super) fn expires_at(&self) -> Option<Instant> {
        let is_idle = matches!(self.state, SlotState::Loaded(..)) && self.leases == 0;
        let keep_alive = self.keep_alive.filter(|_| is_idle)?;
        self.last_used.checked_add(keep_alive)
    }
}
