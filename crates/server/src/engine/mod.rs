//! Engine thread: one std thread that owns the scheduler and the device.
//!
//! The thread never awaits and never blocks on a client. Messages arrive through one inbox. Events
//! leave through one channel per request, whose capacity covers every event of that request. A send
//! therefore fails only if the reader is gone, which cancels the request. Health and counters are
//! published as a watch value.
//!
//! A device error or a panic ends the thread: every open request gets the error, health reports it,
//! and [`serve`](crate::http::serve::serve()) ends the process. A broken device context is not
//! repaired in place.

pub mod active_requests;
pub mod control;
pub mod errors;
pub mod handle;
pub mod request_stats;
pub mod store;

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use contract::{LoadProgress, Runner, RunnerInfo};
use decode::{Event, Job, JobId, NextPrompt, PrefixConfig, Scheduler, SchedulerConfig, Stats};
use tokio::sync::mpsc::error::{TryRecvError, TrySendError};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use crate::engine::errors::TerminalError;
use crate::engine::handle::{EngineEvent, EngineHandle, Timestamped};
use crate::engine::store::{DiskStore, StoreStatus};
use crate::text::model_context::ModelContext;

/// Idle time before prefix warm-up starts: the next turn of a conversation often arrives within it.
const IDLE_DELAY: Duration = Duration::from_millis(300);
/// Poll interval of the inbox during that time.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Load error of any type; it is only displayed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Loads the model on the engine thread, so that a device context never changes threads.
pub type EngineFactory =
    Box<dyn FnOnce(&mut dyn FnMut(LoadProgress)) -> Result<Loaded, BoxError> + Send>;

/// Result of an [`EngineFactory`].
pub struct Loaded {
    /// Opened device; the engine thread owns and drops it.
    pub runner: Box<dyn Runner>,
    /// Scheduler configuration; the engine replaces its queue limit.
    pub scheduler: SchedulerConfig,
    /// Tokenizer, template and constraints of the same model.
    pub model: ModelContext,
    /// Disk store of the KV prefix cache, if one is configured.
    pub store: Option<DiskStore>,
}

/// Handle of the loaded model for the HTTP side.
pub struct ModelHandle {
    /// Tokenizer, template and description.
    pub model: ModelContext,
    /// Device limits and sizes.
    pub info: RunnerInfo,
    /// Prefix cache configuration.
    pub prefix: PrefixConfig,
    /// Status of the disk store, if one is configured.
    pub store: Option<StoreStatus>,
}

impl ModelHandle {
    /// The text side and the context length in tokens.
    pub fn text_side(&self) -> (&ModelContext, usize) {
        (&self.model, self.info.limits.context)
    }
}

/// Life-cycle phase of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnginePhase {
    /// Loads weights.
    Loading,
    /// Admits requests.
    Ready,
    /// Finishes running requests and admits none.
    Draining,
    /// Ended by an error.
    Failed(Arc<str>),
    /// Ended by a shutdown.
    Stopped,
}

/// Status that the engine publishes for the HTTP side, in a watch channel.
#[derive(Clone)]
pub struct EngineStatus {
    /// Phase. Only a phase change wakes the watchers of this value.
    pub phase: EnginePhase,
    /// Load progress.
    pub progress: Option<LoadProgress>,
    /// The model, once loaded.
    pub model: Option<Arc<ModelHandle>>,
    /// The scheduler's counters.
    pub stats: Stats,
    /// Requests that hold a sequence on the device.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
}

/// Message to the engine thread.
pub(crate) enum Message {
    /// Submit a request.
    Submit(Box<Submission>),
    /// Cancel a request; its reader is gone.
    Cancel(JobId),
    /// Cancel one choice of a request.
    CancelChoice(JobId, usize),
    /// Prefill the start of a conversation's next prompt when idle.
    WarmPrefix(NextPrompt),
    /// Admit no more requests, finish running ones within the given time, and end.
    Drain(Duration),
}

/// A request on its way to the scheduler.
pub(crate) struct Submission {
    pub(crate) job: Job,
    /// Sender of the request's events.
    pub(crate) events: mpsc::Sender<Timestamped>,
    /// Queue permit, released when the request starts.
    pub(crate) queue_permit: OwnedSemaphorePermit,
}

/// Start time of the current engine step; a watchdog detects a stalled step with it.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    origin: Instant,
    /// Milliseconds since `origin`, plus one; 0 while idle.
    since: AtomicU64,
}

impl Heartbeat {
    fn new() -> Heartbeat {
        Heartbeat {
            origin: Instant::now(),
            since: AtomicU64::new(0),
        }
    }

    fn begin_step(&self) {
        let now = u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.since.store(now + 1, Ordering::Relaxed);
    }

    fn idle(&self) {
        self.since.store(0, Ordering::Relaxed);
    }

    /// Age of the current step; `None` while idle.
    pub(crate) fn age(&self) -> Option<Duration> {
        let since = self.since.load(Ordering::Relaxed).checked_sub(1)?;
        Some(
            self.origin
                .elapsed()
                .saturating_sub(Duration::from_millis(since)),
        )
    }
}

/// The running engine thread. Dropping it does not stop the thread; [`EngineHandle::drain`] does.
pub struct Engine {
    thread: JoinHandle<()>,
}

impl Engine {
    /// Starts the thread, which begins by loading.
    ///
    /// `queue_limit` is the maximum queue length, at least one.
    pub fn start(
        factory: EngineFactory,
        queue_limit: usize,
    ) -> std::io::Result<(Engine, EngineHandle)> {
        let (inbox_in, inbox) = mpsc::unbounded_channel();
        let (status_in, status) = watch::channel(EngineStatus {
            phase: EnginePhase::Loading,
            progress: None,
            model: None,
            stats: Stats::default(),
            running: 0,
            waiting: 0,
        });
        let heartbeat = Arc::new(Heartbeat::new());
        let handle =
            EngineHandle::new(inbox_in, status, Arc::clone(&heartbeat), queue_limit.max(1));
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || run_engine(factory, inbox, status_in, &heartbeat))?;
        Ok((Engine { thread }, handle))
    }

    /// Waits for the thread to end.
    pub fn join(self) {
        // The thread catches and publishes a panic, so a join error adds nothing.
        let _ = self.thread.join();
    }
}

fn run_engine(
    factory: EngineFactory,
    mut inbox: mpsc::UnboundedReceiver<Message>,
    status: watch::Sender<EngineStatus>,
    heartbeat: &Heartbeat,
) {
    let loading = catch_unwind(AssertUnwindSafe(|| {
        factory(&mut |progress| {
            status.send_if_modified(|p| {
                p.progress = Some(progress);
                false
            });
        })
    }));
    let loaded = match loading {
        Ok(Ok(loaded)) => match truncation() {
            None => loaded,
            Some(error) => return fail(&status, &mut inbox, error.to_string()),
        },
        Ok(Err(error)) => return fail(&status, &mut inbox, error.to_string()),
        Err(panic) => return fail(&status, &mut inbox, panic_text(panic.as_ref())),
    };
    let info = loaded.runner.info().clone();
    let model = Arc::new(ModelHandle {
        model: loaded.model,
        info,
        prefix: loaded.scheduler.prefix.clone(),
        store: loaded.store.as_ref().map(DiskStore::status),
    });
    let scheduler = SchedulerConfig {
        // The handle's queue permits already bound the queue.
        queue_limit: usize::MAX,
        ..loaded.scheduler
    };
    let mut scheduler = Scheduler::new(loaded.runner, scheduler);
    if let Some(store) = loaded.store {
        scheduler = scheduler.with_store(Box::new(store));
    }
    let mut engine = EngineLoop {
        scheduler,
        requests: HashMap::new(),
        status: &status,
        drain_until: None,
    };
    status.send_modify(|p| {
        p.model = Some(model);
        p.phase = EnginePhase::Ready;
    });
    let outcome = catch_unwind(AssertUnwindSafe(|| engine.run(&mut inbox, heartbeat)));
    heartbeat.idle();
    let lost = match outcome {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(panic) => Some(panic_text(panic.as_ref())),
    };
    match lost {
        Some(detail) => {
            tracing::error!(%detail, "the engine is lost");
            let error = TerminalError::EngineLost(detail.as_str().into());
            fail(&status, &mut inbox, detail);
            engine.fail_all(&error);
        }
        None => {
            engine.fail_all(&TerminalError::Draining);
            inbox.close();
            status.send_modify(|p| p.phase = EnginePhase::Stopped);
        }
    }
}

/// The error after a model file was shortened while it is in use.
fn truncation() -> Option<contract::DeviceError> {
    gguf::truncated_file().map(|file| contract::DeviceError::DeviceLost {
        during: "reading the weights",
        detail: format!(
            "{file}: the file was shortened while it was in use; replace a model file by renaming a new one over it"
        ),
    })
}

/// Publishes the failure; requests still in the inbox see their channel close.
fn fail(
    status: &watch::Sender<EngineStatus>,
    inbox: &mut mpsc::UnboundedReceiver<Message>,
    detail: String,
) {
    inbox.close();
    status.send_modify(|p| p.phase = EnginePhase::Failed(detail.into()));
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("no message"))
}

/// One open request, as the engine thread sees it.
struct EngineRequest {
    events: mpsc::Sender<Timestamped>,
    /// Queue permit; `None` once the request has started.
    queue_permit: Option<OwnedSemaphorePermit>,
    /// Unfinished choices.
    choices_left: usize,
}

struct EngineLoop<'a> {
    scheduler: Scheduler,
    requests: HashMap<JobId, EngineRequest>,
    status: &'a watch::Sender<EngineStatus>,
    /// Deadline of a shutdown, if one was requested.
    drain_until: Option<Instant>,
}

impl EngineLoop<'_> {
    fn run(
        &mut self,
        inbox: &mut mpsc::UnboundedReceiver<Message>,
        heartbeat: &Heartbeat,
    ) -> Result<(), contract::DeviceError> {
        let mut events = Vec::new();
        loop {
            if self.scheduler.is_idle() {
                self.publish();
                if self.drain_until.is_some() {
                    return self.scheduler.flush();
                }
                heartbeat.idle();
                match self.wait(inbox, heartbeat)? {
                    Some(message) => self.handle_message(message),
                    // All handles are dropped, so no further message can arrive.
                    None => return Ok(()),
                }
            }
            while let Ok(message) = inbox.try_recv() {
                self.handle_message(message);
            }
            if self
                .drain_until
                .is_some_and(|until| Instant::now() >= until)
            {
                self.abort_all();
                return self.scheduler.flush();
            }
            if self.scheduler.is_idle() {
                continue;
            }
            heartbeat.begin_step();
            let begun = Instant::now();
            let mut outcome = self.scheduler.step(&mut events);
            if let Some(error) = truncation() {
                // What the step has computed is worthless: lost weights were read as zeros.
                events.clear();
                outcome = Err(error);
            }
            if let Err(error) = &outcome {
                // Published before the error events, so that a client that asks for health sees the
                // failure.
                let detail = error.to_string().into();
                self.status
                    .send_modify(|p| p.phase = EnginePhase::Failed(detail));
            }
            self.deliver(&mut events, begun);
            self.publish();
            outcome?;
        }
    }

    /// Waits for the next message. After [`IDLE_DELAY`] without one, runs prefix warm-up chunk by
    /// chunk, then writes prefix-cache entries to the disk store one at a time.
    fn wait(
        &mut self,
        inbox: &mut mpsc::UnboundedReceiver<Message>,
        heartbeat: &Heartbeat,
    ) -> Result<Option<Message>, contract::DeviceError> {
        let begun = Instant::now();
        while self.scheduler.has_warmup() || self.scheduler.has_unpersisted() {
            match inbox.try_recv() {
                Ok(message) => return Ok(Some(message)),
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) if begun.elapsed() < IDLE_DELAY => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(TryRecvError::Empty) if self.scheduler.has_warmup() => {
                    heartbeat.begin_step();
                    self.scheduler.warmup_step()?;
                    // Nothing that was computed from lost weights reaches the disk.
                    truncation().map_or(Ok(()), Err)?;
                    heartbeat.idle();
                    self.publish();
                }
                Err(TryRecvError::Empty) => {
                    self.scheduler.persist_next()?;
                }
            }
        }
        Ok(inbox.blocking_recv())
    }

    fn handle_message(&mut self, message: Message) {
        match message {
            Message::Submit(submission) => self.submit(*submission),
            Message::Cancel(id) => {
                if self.requests.remove(&id).is_some() {
                    self.scheduler.cancel(id);
                }
            }
            Message::CancelChoice(id, choice) => {
                if self.requests.contains_key(&id) {
                    self.scheduler.cancel_choice(id, choice);
                }
            }
            Message::WarmPrefix(text) => self.scheduler.queue_warmup(text),
            Message::Drain(grace) => self.drain(grace),
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission {
            job,
            events,
            queue_permit,
        } = submission;
        if self.drain_until.is_some() {
            // A failed send means that the reader is gone; it needs no answer (also below).
            let _ = events.try_send(Timestamped::now(EngineEvent::Error(
                TerminalError::Draining,
            )));
            return;
        }
        if events.is_closed() {
            return;
        }
        let (id, choices_left) = (job.id, job.choices);
        match self.scheduler.submit(job) {
            Ok(()) => {
                self.requests.insert(
                    id,
                    EngineRequest {
                        events,
                        queue_permit: Some(queue_permit),
                        choices_left,
                    },
                );
            }
            Err(reject) => {
                let error = TerminalError::Rejected(reject);
                let _ = events.try_send(Timestamped::now(EngineEvent::Error(error)));
            }
        }
    }

    /// Rejects queued requests and lets running ones finish.
    fn drain(&mut self, grace: Duration) {
        self.drain_until = Instant::now().checked_add(grace);
        self.status.send_modify(|p| p.phase = EnginePhase::Draining);
        let waiting: Vec<JobId> = self
            .requests
            .iter()
            .filter(|(_, request)| request.queue_permit.is_some())
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            self.abort(id, &TerminalError::Draining);
        }
    }

    fn abort_all(&mut self) {
        let ids: Vec<JobId> = self.requests.keys().copied().collect();
        for id in ids {
            self.abort(id, &TerminalError::Draining);
        }
        self.publish();
    }

    fn abort(&mut self, id: JobId, error: &TerminalError) {
        if let Some(request) = self.requests.remove(&id) {
            let _ = request
                .events
                .try_send(Timestamped::now(EngineEvent::Error(error.clone())));
            self.scheduler.cancel(id);
        }
    }

    fn fail_all(&mut self, error: &TerminalError) {
        for (_, request) in self.requests.drain() {
            let _ = request
                .events
                .try_send(Timestamped::now(EngineEvent::Error(error.clone())));
        }
    }

    /// Sends the events of a step that began at `begun`.
    fn deliver(&mut self, events: &mut Vec<(JobId, Event)>, begun: Instant) {
        let ended = Instant::now();
        for (id, event) in events.drain(..) {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            let droppable = matches!(event, Event::Prefill { .. });
            match &event {
                Event::Started { .. } => request.queue_permit = None,
                Event::Finished { .. } => {
                    request.choices_left = request.choices_left.saturating_sub(1);
                }
                Event::Failed { .. } => request.choices_left = 0,
                _ => {}
            }
            // Admission happens at the start of a step, everything else at its end.
            let at = match &event {
                Event::Started { .. } => begun,
                _ => ended,
            };
            let over = request.choices_left == 0;
            let event = EngineEvent::Scheduler(event);
            let gone = match request.events.try_send(Timestamped { at, event }) {
                Ok(()) => false,
                Err(TrySendError::Full(_)) => !droppable,
                Err(TrySendError::Closed(_)) => true,
            };
            if over || gone {
                self.requests.remove(&id);
            }
            if gone && !over {
                self.scheduler.cancel(id);
            }
        }
    }

    fn publish(&self) {
        let running = self
            .requests
            .values()
            .filter(|request| request.queue_permit.is_none())
            .count();
        let waiting = self.requests.len() - running;
        let stats = self.scheduler.stats();
        self.status.send_if_modified(|p| {
            p.stats = stats;
            p.running = running;
            p.waiting = waiting;
            false
        });
    }
}
