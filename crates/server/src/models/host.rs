//! The host: which models there are, which are loaded, and which requests wait for them.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use decode::Stats;
use tokio::sync::{mpsc, oneshot, watch};

use crate::engine::handle::EngineHandle;
use crate::engine::{EngineFactory, EnginePhase, EngineStatus, ModelHandle};
use crate::progress::percent;

use super::lease::{Lease, LeaseError};
use super::slot::{ModelSlot, SlotState};
use super::totals;

/// A model that can be loaded.
pub struct HostedModel {
    /// Its id in the API.
    pub name: String,
    /// Returns the function that loads it on its engine thread; called once per load.
    pub open: Box<dyn Fn() -> EngineFactory + Send + Sync>,
    /// Whether it fits into the memory that is free now; called on the blocking pool.
    pub fits: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// Looks for models that have come since the start; called on the blocking pool. Models whose names
/// are known are left out.
pub type ModelFinder = dyn Fn() -> Vec<HostedModel> + Send + Sync;

/// Time between two looks for new models.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// When models are unloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPolicy {
    /// The most loaded models, at least one.
    pub max_loaded: usize,
    /// Idle time after which a model is unloaded; `None` for never.
    pub idle: Option<Duration>,
    /// The longest queue of one model.
    pub queue_limit: usize,
}

/// State of a model for the outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelState {
    /// Not in memory.
    Unloaded,
    /// Being loaded.
    Loading {
        /// Percent of its bytes.
        percent: u64,
    },
    /// Takes requests.
    Loaded,
    /// Finishes its requests and leaves the memory.
    Unloading,
}

/// A model of the host, as lists show it.
pub struct ModelStatus {
    /// Its id.
    pub name: String,
    /// Its state.
    pub state: ModelState,
    /// Why the last load failed, or its engine was lost.
    pub error: Option<Arc<str>>,
    /// The loaded model.
    pub handle: Option<Arc<ModelHandle>>,
    /// Requests that hold it.
    pub leases: usize,
    /// Time until it is unloaded, if it is idle and that time is limited.
    pub expires_in: Option<Duration>,
}

/// A request to the manager.
#[derive(Debug)]
pub(super) enum Command {
    /// Load a model for those who wait for it.
    Load(usize),
    /// Unload a model, and say when that is done.
    Unload(usize, oneshot::Sender<()>),
}

/// The models of one server. A clone is another reference to them.
#[derive(Clone)]
pub struct ModelHost(pub(super) Arc<Host>);

pub(super) struct Host {
    /// Only grows; each has a slot.
    models: RwLock<Vec<Arc<HostedModel>>>,
    pub(super) policy: HostPolicy,
    finder: OnceLock<Arc<ModelFinder>>,
    /// When new models were looked for.
    last_look: Mutex<Option<Instant>>,
    slots: Mutex<Slots>,
    /// Wakes all waits for a change of a slot.
    pub(super) changed: watch::Sender<()>,
    commands: mpsc::UnboundedSender<Command>,
    /// The engine that answers while no model is loaded.
    nothing: EngineHandle,
}

pub(super) struct Slots {
    pub(super) slots: Vec<ModelSlot>,
    /// Set at shutdown: no more leases and loads.
    pub(super) is_draining: bool,
    /// Counters of the engines that have ended.
    pub(super) ended: Stats,
}

impl ModelHost {
    /// A host of these models and the commands for its manager.
    pub(super) fn new(
        models: Vec<HostedModel>,
        policy: HostPolicy,
    ) -> (ModelHost, mpsc::UnboundedReceiver<Command>) {
        let (commands, inbox) = mpsc::unbounded_channel();
        let slots = models.iter().map(|_| ModelSlot::new(policy.idle)).collect();
        let host = ModelHost(Arc::new(Host {
            models: RwLock::new(models.into_iter().map(Arc::new).collect()),
            policy,
            finder: OnceLock::new(),
            last_look: Mutex::new(None),
            slots: Mutex::new(Slots {
                slots,
                is_draining: false,
                ended: Stats::default(),
            }),
            changed: watch::Sender::new(()),
            commands,
            nothing: EngineHandle::of_no_engine(),
        }));
        (host, inbox)
    }

    /// All models.
    fn models(&self) -> Vec<Arc<HostedModel>> {
        // No code panics while it is locked.
        let models = self.0.models.read();
        models.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A model by its index.
    pub(super) fn model(&self, model: usize) -> Arc<HostedModel> {
        let models = self.0.models.read();
        Arc::clone(&models.unwrap_or_else(PoisonError::into_inner)[model])
    }

    /// Name of a model.
    pub fn name(&self, model: usize) -> String {
        self.model(model).name.clone()
    }

    /// Sets how models are found that have come since the start.
    pub fn find_new_by(&self, finder: Arc<ModelFinder>) {
        // Set once, at the start.
        let _ = self.0.finder.set(finder);
    }

    /// As [`find`](ModelHost::find); an unknown name is looked for among models that have come
    /// since the start, at most once a second.
    pub async fn find_or_look(&self, name: &str) -> Option<usize> {
        let found = self.find(name);
        let Some(finder) = self.0.finder.get().filter(|_| found.is_none()) else {
            return found;
        };
        {
            let last = self.0.last_look.lock();
            let mut last = last.unwrap_or_else(PoisonError::into_inner);
            if last.is_some_and(|last| last.elapsed() < LOOK_INTERVAL) {
                return None;
            }
            *last = Some(Instant::now());
        }
        let finder = Arc::clone(finder);
        // A finder that panics has found nothing.
        let new = tokio::task::spawn_blocking(move || finder()).await;
        for model in new.unwrap_or_default() {
            if self.find(&model.name).is_none() {
                tracing::info!("{}: a new model", model.name);
                self.add(model);
            }
        }
        self.find(name)
    }

    fn add(&self, model: HostedModel) {
        let mut slots = self.lock();
        slots.slots.push(ModelSlot::new(self.0.policy.idle));
        let models = self.0.models.write();
        let mut models = models.unwrap_or_else(PoisonError::into_inner);
        models.push(Arc::new(model));
    }

    /// The status of all engines together, with the counters of those that have ended. Phase and
    /// model are those of the model that was used last.
    pub fn totals(&self) -> EngineStatus {
        let mut status = self.current().status();
        let slots = self.lock();
        let mut stats = slots.ended;
        (status.running, status.waiting) = (0, 0);
        for engine in slots.slots.iter().filter_map(ModelSlot::engine) {
            let of_one = engine.status();
            totals::add_counters(&mut stats, &of_one.stats);
            totals::add_state(&mut stats, &of_one.stats);
            status.running += of_one.running;
            status.waiting += engine.waiting();
        }
        status.stats = stats;
        status
    }

    /// Keeps the counters of an engine that has ended, in place of the engine.
    pub(super) fn retire(&self, model: usize, engine: &EngineHandle) {
        let mut slots = self.lock();
        totals::add_counters(&mut slots.ended, &engine.status().stats);
        slots.slots[model].state = SlotState::Unloaded;
        drop(slots);
        self.note_change();
    }

    /// Index of the model of this name: spelled alike, else alike but for case and Ollama's tag
    /// `:latest`.
    pub fn find(&self, name: &str) -> Option<usize> {
        let models = self.models();
        let exact = models.iter().position(|model| model.name == name);
        let plain = name.strip_suffix(":latest").unwrap_or(name);
        exact.or_else(|| {
            let mut models = models.iter();
            models.position(|model| model.name.eq_ignore_ascii_case(plain))
        })
    }

    /// The lease of a loaded model, without waiting; `None` if it is not loaded.
    pub fn try_acquire(&self, model: usize) -> Option<Lease> {
        let mut slots = self.lock();
        if slots.is_draining {
            return None;
        }
        let engine = slots.slots[model].take_lease()?;
        Some(self.lease(model, engine))
    }

    /// The lease of a model, which is loaded first if need be. Dropping the future gives up.
    ///
    /// # Errors
    /// If the model cannot be loaded, or the server shuts down.
    pub async fn acquire(&self, model: usize) -> Result<Lease, LeaseError> {
        let granted = {
            let mut slots = self.lock();
            if slots.is_draining {
                return Err(LeaseError::Draining);
            }
            let slot = &mut slots.slots[model];
            if let Some(engine) = slot.take_lease() {
                return Ok(self.lease(model, engine));
            }
            let (waiter, granted) = oneshot::channel();
            slot.waiters.push(waiter);
            if !std::mem::replace(&mut slot.is_queued, true) {
                // The manager lives as long as the host.
                let _ = self.0.commands.send(Command::Load(model));
            }
            granted
        };
        // Only a shutdown drops the waiters.
        granted.await.unwrap_or(Err(LeaseError::Draining))
    }

    /// Ends a load: each request that waits for the model gets a lease, or the error.
    pub(super) fn settle(&self, model: usize, error: Option<Arc<str>>) {
        let mut slots = self.lock();
        let slot = &mut slots.slots[model];
        let waiters = std::mem::take(&mut slot.waiters);
        slot.error.clone_from(&error);
        let engine = match error {
            None => slot.engine().cloned(),
            Some(_) => None,
        };
        if engine.is_some() {
            slot.leases += waiters.len();
            slot.last_used = Instant::now();
        }
        // A lease whose request has gone is dropped here, and locks the slots.
        drop(slots);
        for waiter in waiters {
            let outcome = match (&engine, &error) {
                (Some(engine), _) => Ok(self.lease(model, engine.clone())),
                (None, Some(error)) => Err(LeaseError::NotLoaded(Arc::clone(error))),
                (None, None) => Err(LeaseError::Draining),
            };
            let _ = waiter.send(outcome);
        }
        self.note_change();
    }

    /// Idle time after which models are unloaded, where requests do not say.
    pub fn default_idle(&self) -> Option<Duration> {
        self.0.policy.idle
    }

    /// Sets how long a model stays loaded after its last request; `None` for ever.
    pub fn keep_alive(&self, model: usize, idle: Option<Duration>) {
        let before = {
            let mut slots = self.lock();
            std::mem::replace(&mut slots.slots[model].keep_alive, idle)
        };
        if before != idle {
            self.note_change();
        }
    }

    /// Unloads a model once its requests have ended; returns when that is done.
    pub async fn unload(&self, model: usize) {
        let (done, is_done) = oneshot::channel();
        let _ = self.0.commands.send(Command::Unload(model, done));
        // At a shutdown the manager has gone.
        let _ = is_done.await;
    }

    /// The engine of the model that was used last, or one without a model if none is loaded.
    pub fn current(&self) -> EngineHandle {
        let slots = self.lock();
        let loaded = slots.slots.iter().filter(|slot| slot.engine().is_some());
        let latest = loaded.max_by_key(|slot| slot.last_used);
        let engine = latest.and_then(ModelSlot::engine);
        engine.unwrap_or(&self.0.nothing).clone()
    }

    /// Whether the server shuts down.
    pub fn is_draining(&self) -> bool {
        self.lock().is_draining
    }

    /// The longest time that a step of any engine has taken so far.
    pub fn step_age(&self) -> Option<Duration> {
        let slots = self.lock();
        let engines = slots.slots.iter().filter_map(ModelSlot::engine);
        engines.filter_map(EngineHandle::step_age).max()
    }

    /// All models, the default first.
    pub fn list(&self) -> Vec<ModelStatus> {
        let slots = self.lock();
        let models = self.models().into_iter().zip(&slots.slots);
        models
            .map(|(model, slot)| ModelStatus {
                name: model.name.clone(),
                state: match &slot.state {
                    SlotState::Unloaded => ModelState::Unloaded,
                    SlotState::Loading(engine) => ModelState::Loading {
                        percent: loaded_percent(engine),
                    },
                    SlotState::Loaded(..) => ModelState::Loaded,
                    SlotState::Closing(_) => ModelState::Unloading,
                },
                error: slot.error.clone().or_else(|| lost(slot.engine()?)),
                handle: slot.engine().and_then(EngineHandle::model),
                leases: slot.leases,
                expires_in: slot
                    .expires_at()
                    .map(|at| at.saturating_duration_since(Instant::now())),
            })
            .collect()
    }

    /// Ends all engines within `grace`; those that load are left to the end of the process.
    pub async fn shut_down(&self, grace: Duration) {
        let mut changed = self.0.changed.subscribe();
        let mut closed = Vec::new();
        {
            let mut slots = self.lock();
            slots.is_draining = true;
            for (model, slot) in slots.slots.iter_mut().enumerate() {
                slot.waiters.clear();
                if let Some((_, engine)) = slot.close() {
                    closed.push((model, engine));
                }
                // The manager joins an engine that was closing before.
                if let SlotState::Closing(handle) = &slot.state {
                    handle.drain(grace);
                }
            }
        }
        self.note_change();
        for (model, engine) in closed {
            // A join blocks, and the engine ends with its current step at the latest.
            let _ = tokio::task::spawn_blocking(move || engine.join()).await;
            self.lock().slots[model].state = SlotState::Unloaded;
        }
        let is_closing = |slot: &ModelSlot| matches!(slot.state, SlotState::Closing(_));
        while self.lock().slots.iter().any(is_closing) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// A lease that the slot counts already.
    fn lease(&self, model: usize, engine: EngineHandle) -> Lease {
        let host = self.clone();
        Lease::new(&self.name(model), engine, move || {
            let mut slots = host.lock();
            let slot = &mut slots.slots[model];
            slot.leases = slot.leases.saturating_sub(1);
            slot.last_used = Instant::now();
            drop(slots);
            host.note_change();
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Slots> {
        // No code panics while it is locked.
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all who wait for a change.
    pub(super) fn note_change(&self) {
        self.0.changed.send_replace(());
    }
}

fn loaded_percent(engine: &EngineHandle) -> u64 {
    let progress = engine.status().progress;
    progress.map_or(0, |at| percent(at.done_bytes, at.total_bytes))
}

fn lost(engine: &EngineHandle) -> Option<Arc<str>> {
    match engine.phase() {
        EnginePhase::Failed(detail) => Some(detail),
        _ => None,
    }
}
