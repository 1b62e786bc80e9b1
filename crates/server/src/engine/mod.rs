//! The engine thread: one std thread that owns the scheduler and, inside it, the device.
//!
//! It never awaits and never waits on a client. Messages come in through one inbox; what happens goes out
//! through one channel per request, made with room for everything the request can ever say, so a send fails
//! only when the reader has gone, which is cancellation. Health and counts are published as a watch value.
//!
//! A fault of the device, or a panic in here, ends the thread: every live request is told, health turns to
//! failing, and [`serve`](crate::http::serve()) ends the process. A broken context is not repaired in place.

pub mod active_requests;
pub mod control;
pub mod handle;
pub mod in_flight;
pub mod prefix_warmup;
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

use crate::engine::handle::{EngineEvent, EngineHandle, TerminalError, Timestamped};
use crate::engine::store::{DiskStore, StoreStatus};
use crate::text::model_context::ModelContext;

/// An idle engine keeps its hands free for this long: the next turn of a conversation often comes at once.
const IDLE_DELAY: Duration = Duration::from_millis(300);
/// How late a message may be seen in that time.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// An error of any kind, as far as loading is concerned: it is only shown.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Loads everything, on the engine thread, so that a device context never moves between threads.
pub type EngineFactory =
    Box<dyn FnOnce(&mut dyn FnMut(LoadProgress)) -> Result<Loaded, BoxError> + Send>;

/// What a factory gives.
pub struct Loaded {
    /// The opened device; owned, and dropped, by the engine thread.
    pub runner: Box<dyn Runner>,
    /// How the scheduler is to work; its queue limit is replaced by the engine's.
    pub scheduler: SchedulerConfig,
    /// The text side of the same model.
    pub model: ModelContext,
    /// Where saved states outlive the process, if anywhere.
    pub store: Option<DiskStore>,
}

/// The loaded model as the HTTP side sees it.
pub struct Ready {
    /// Text side: tokenizer, template, facts.
    pub model: ModelContext,
    /// Device side: limits and sizes.
    pub info: RunnerInfo,
    /// What of prompts is saved.
    pub prefix: PrefixConfig,
    /// Where it outlives the process, if anywhere.
    pub store: Option<StoreStatus>,
}

/// Where the engine stands in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Reading weights.
    Loading,
    /// Taking requests.
    Ready,
    /// Finishing what runs; nothing new is taken.
    Draining,
    /// Over, because of a fault.
    Failed(Arc<str>),
    /// Over, because it was asked to stop.
    Stopped,
}

/// What the engine tells everyone, without a lock that a turn could wait on.
#[derive(Clone)]
pub struct Published {
    /// Where it stands. Changes of this, and of nothing else, wake those who wait on the value.
    pub phase: Phase,
    /// How far loading has come.
    pub progress: Option<LoadProgress>,
    /// The model, once loaded.
    pub ready: Option<Arc<Ready>>,
    /// The scheduler's counters.
    pub stats: Stats,
    /// Requests on the device.
    pub running: usize,
    /// Requests that wait for a place.
    pub waiting: usize,
}

/// What the engine thread can be told.
pub(crate) enum Message {
    /// Take a request.
    Submit(Box<Submission>),
    /// Drop a request; its reader has gone.
    Cancel(JobId),
    /// Drop one choice of a request.
    CancelChoice(JobId, usize),
    /// What a conversation's next prompt will begin with.
    WarmPrefix(NextPrompt),
    /// Take nothing more, finish what runs within the given time, and end.
    Drain(Duration),
}

/// A request on its way to the scheduler.
pub(crate) struct Submission {
    pub(crate) job: Job,
    /// Where its events go.
    pub(crate) events: mpsc::Sender<Timestamped>,
    /// A place in the queue, given back once the request has started.
    pub(crate) queue_permit: OwnedSemaphorePermit,
}

/// When the present turn began; lets others see that a turn does not end.
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

    /// How long the present turn has taken so far; `None` while idle.
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
    /// `queue_limit` is how many requests may wait for a place on the device, at least one.
    pub fn start(
        factory: EngineFactory,
        queue_limit: usize,
    ) -> std::io::Result<(Engine, EngineHandle)> {
        let (inbox_in, inbox) = mpsc::unbounded_channel();
        let (published_in, published) = watch::channel(Published {
            phase: Phase::Loading,
            progress: None,
            ready: None,
            stats: Stats::default(),
            running: 0,
            waiting: 0,
        });
        let heartbeat = Arc::new(Heartbeat::new());
        let handle = EngineHandle::new(
            inbox_in,
            published,
            Arc::clone(&heartbeat),
            queue_limit.max(1),
        );
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || run_engine(factory, inbox, published_in, &heartbeat))?;
        Ok((Engine { thread }, handle))
    }

    /// Waits for the thread to end.
    pub fn join(self) {
        // A panic was caught inside and published; there is nothing to learn from a second one.
        let _ = self.thread.join();
    }
}

fn run_engine(
    factory: EngineFactory,
    mut inbox: mpsc::UnboundedReceiver<Message>,
    published: watch::Sender<Published>,
    heartbeat: &Heartbeat,
) {
    let loading = catch_unwind(AssertUnwindSafe(|| {
        factory(&mut |progress| {
            published.send_if_modified(|p| {
                p.progress = Some(progress);
                false
            });
        })
    }));
    let loaded = match loading {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(error)) => return fail(&published, &mut inbox, error.to_string()),
        Err(panic) => return fail(&published, &mut inbox, panic_text(panic.as_ref())),
    };
    let info = loaded.runner.info().clone();
    let ready = Arc::new(Ready {
        model: loaded.model,
        info,
        prefix: loaded.scheduler.prefix.clone(),
        store: loaded.store.as_ref().map(DiskStore::status),
    });
    let scheduler = SchedulerConfig {
        // The handle's places bound what waits; a second bound here could refuse what was admitted there.
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
        published: &published,
        drain_until: None,
    };
    published.send_modify(|p| {
        p.ready = Some(ready);
        p.phase = Phase::Ready;
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
            fail(&published, &mut inbox, detail);
            engine.fail_all(&error);
        }
        None => {
            engine.fail_all(&TerminalError::Draining);
            inbox.close();
            published.send_modify(|p| p.phase = Phase::Stopped);
        }
    }
}

/// Ends the thread's public life; requests still in the inbox see their channel close.
fn fail(
    published: &watch::Sender<Published>,
    inbox: &mut mpsc::UnboundedReceiver<Message>,
    detail: String,
) {
    inbox.close();
    published.send_modify(|p| p.phase = Phase::Failed(detail.into()));
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("no message"))
}

/// One request on the engine's side.
struct EngineRequest {
    events: mpsc::Sender<Timestamped>,
    /// Held while the request waits; `None` once it has started.
    queue_permit: Option<OwnedSemaphorePermit>,
    /// Choices that have not finished.
    choices_left: usize,
}

struct EngineLoop<'a> {
    scheduler: Scheduler,
    requests: HashMap<JobId, EngineRequest>,
    published: &'a watch::Sender<Published>,
    /// Set once the engine is asked to stop.
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
                    // Every handle is gone, so nobody can ever ask for anything again.
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
            let outcome = self.scheduler.step(&mut events);
            if let Err(error) = &outcome {
                // Before anyone is told, so that whoever was told and asks for health gets the same answer.
                let detail = error.to_string().into();
                self.published
                    .send_modify(|p| p.phase = Phase::Failed(detail));
            }
            self.deliver(&mut events, begun);
            self.publish();
            outcome?;
        }
    }

    /// The next message, however long it takes. Once it takes longer than clients do between two turns, what prompts
    /// will begin with is read meanwhile, chunk by chunk, and then saved states go to the store, one at a time.
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
            // A failed send means that the reader has gone, which needs no answer; so in all of this file.
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

    /// Refuses what waits, lets run what runs.
    fn drain(&mut self, grace: Duration) {
        self.drain_until = Instant::now().checked_add(grace);
        self.published.send_modify(|p| p.phase = Phase::Draining);
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

    /// Sends what a step that began at `begun` gave rise to.
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
            // Admission comes first in a step, everything else at its end.
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
        self.published.send_if_modified(|p| {
            p.stats = stats;
            p.running = running;
            p.waiting = waiting;
            false
        });
    }
}
