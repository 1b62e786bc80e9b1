//! Handle to the engine thread: [`EngineHandle::submit`] returns the request's event stream;
//! dropping the stream cancels the request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use decode::{Event, FinishReason, Job, JobId, NextPrompt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use crate::engine::errors::{AdmissionError, TerminalError};
use crate::engine::{EnginePhase, EngineStatus, Heartbeat, Message, ModelHandle, Submission};
use crate::settings::Timeouts;

/// An engine event with the engine's timestamp.
#[derive(Debug)]
pub struct Timestamped {
    /// End of the engine step that caused it; the step's beginning for a start event.
    pub at: Instant,
    /// The event.
    pub event: EngineEvent,
}

impl Timestamped {
    pub(crate) fn now(event: EngineEvent) -> Timestamped {
        Timestamped {
            at: Instant::now(),
            event,
        }
    }
}

/// Event of one request.
#[derive(Debug)]
pub enum EngineEvent {
    /// An event of the scheduler.
    Scheduler(Event),
    /// A terminal error; nothing follows it.
    Error(TerminalError),
}

/// Cloneable handle to the engine thread.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: mpsc::UnboundedSender<Message>,
    status: watch::Receiver<EngineStatus>,
    heartbeat: Arc<Heartbeat>,
    /// One permit per queue slot, held until the request starts; it also bounds the inbox.
    queue_permits: Arc<Semaphore>,
    queue_limit: usize,
    next_id: Arc<AtomicU64>,
}

impl EngineHandle {
    pub(crate) fn new(
        inbox: mpsc::UnboundedSender<Message>,
        status: watch::Receiver<EngineStatus>,
        heartbeat: Arc<Heartbeat>,
        queue_limit: usize,
    ) -> EngineHandle {
        EngineHandle {
            inbox,
            status,
            heartbeat,
            queue_permits: Arc::new(Semaphore::new(queue_limit)),
            queue_limit,
            next_id: Arc::new(AtomicU64::new(1)),
        }
    }

    /// The handle of no engine: it is ready, has no model, and takes no requests.
    pub(crate) fn of_no_engine() -> EngineHandle {
        let (inbox, _) = mpsc::unbounded_channel();
        let (_, status) = watch::channel(EngineStatus {
            phase: EnginePhase::Ready,
            progress: None,
            model: None,
            stats: decode::Stats::default(),
            running: 0,
            waiting: 0,
        });
        EngineHandle::new(inbox, status, Arc::new(Heartbeat::new()), 1)
    }

    /// A job id that is unique in this process.
    pub fn new_job_id(&self) -> JobId {
        JobId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Submits a request. Fails at once if the queue is full or the engine does not admit requests.
    pub fn submit(&self, job: Job, timeouts: Timeouts) -> Result<Events, AdmissionError> {
        self.check_ready()?;
        let permit = Arc::clone(&self.queue_permits)
            .try_acquire_owned()
            .map_err(|_| AdmissionError::QueueFull {
                waiting: self.queue_limit,
            })?;
        self.enqueue(job, timeouts, permit)
    }

    /// As [`submit`](EngineHandle::submit), but waits for a queue permit: for further prompts of a
    /// request whose first prompt was admitted.
    pub async fn submit_waiting_for_queue(
        &self,
        job: Job,
        timeouts: Timeouts,
    ) -> Result<Events, AdmissionError> {
        let permit = Arc::clone(&self.queue_permits).acquire_owned().await;
        self.check_ready()?;
        let permit = permit.map_err(|_| AdmissionError::QueueFull {
            waiting: self.queue_limit,
        })?;
        self.enqueue(job, timeouts, permit)
    }

    /// Fails if a request would be refused now: work before its admission would be for nothing.
    pub fn check_room(&self) -> Result<(), AdmissionError> {
        self.check_ready()?;
        match self.queue_permits.available_permits() {
            0 => Err(AdmissionError::QueueFull {
                waiting: self.queue_limit,
            }),
            _ => Ok(()),
        }
    }

    fn check_ready(&self) -> Result<(), AdmissionError> {
        match self.phase() {
            EnginePhase::Ready => Ok(()),
            phase => Err(AdmissionError::NotReady(phase)),
        }
    }

    fn enqueue(
        &self,
        job: Job,
        timeouts: Timeouts,
        permit: OwnedSemaphorePermit,
    ) -> Result<Events, AdmissionError> {
        let (id, choices) = (job.id, job.choices);
        let (sender, events) = mpsc::channel(channel_capacity(&job));
        let submission = Box::new(Submission {
            job,
            events: sender,
            queue_permit: permit,
        });
        if self.inbox.send(Message::Submit(submission)).is_err() {
            return Err(AdmissionError::NotReady(self.phase()));
        }
        let now = tokio::time::Instant::now();
        Ok(Events {
            id,
            events,
            inbox: self.inbox.clone(),
            choices,
            choices_left: choices,
            queue_deadline: timeouts.queue.map(|after| (now + after, after)),
            deadline: timeouts.request.map(|after| (now + after, after)),
            timed_out: false,
        })
    }

    /// Queues the start of a conversation's next prompt for prefix warm-up.
    pub fn warm_prefix(&self, text: NextPrompt) {
        // An ended engine ignores it.
        let _ = self.inbox.send(Message::WarmPrefix(text));
    }

    /// Phase of the engine.
    pub fn phase(&self) -> EnginePhase {
        self.status.borrow().phase.clone()
    }

    /// Everything that the engine publishes.
    pub fn status(&self) -> EngineStatus {
        self.status.borrow().clone()
    }

    /// The loaded model, once there is one.
    pub fn model(&self) -> Option<Arc<ModelHandle>> {
        self.status.borrow().model.clone()
    }

    /// Number of queued requests.
    pub fn waiting(&self) -> usize {
        self.queue_limit - self.queue_permits.available_permits()
    }

    /// Age of the current engine step; `None` while idle.
    pub fn step_age(&self) -> Option<Duration> {
        self.heartbeat.age()
    }

    /// Starts a shutdown: no more admissions, end within `grace`.
    pub fn drain(&self, grace: Duration) {
        // An ended engine ignores it.
        let _ = self.inbox.send(Message::Drain(grace));
    }

    /// Waits until `reached` is true for the engine's phase, and returns that phase.
    pub async fn wait_for(&self, reached: impl Fn(&EnginePhase) -> bool) -> EnginePhase {
        let mut status = self.status.clone();
        match status.wait_for(|p| reached(&p.phase)).await {
            Ok(found) => found.phase.clone(),
            // The thread has ended; its last published phase is final.
            Err(_) => self.phase(),
        }
    }
}

/// Upper bound of the number of events of one request.
///
/// At worst each token is an event and each choice has an end; a prompt is prefilled in chunks of
/// at least 16 tokens, with one progress and one logprobs event each.
fn channel_capacity(job: &Job) -> usize {
    let per_choice = job.params.max_tokens.saturating_add(4);
    let prefill = job.prompt.len() / 8 + 64;
    job.choices
        .saturating_mul(per_choice)
        .saturating_add(prefill)
        .min(Semaphore::MAX_PERMITS)
}

/// Event stream of one request, in order. Dropping it before the end cancels the request.
pub struct Events {
    id: JobId,
    events: mpsc::Receiver<Timestamped>,
    inbox: mpsc::UnboundedSender<Message>,
    choices: usize,
    choices_left: usize,
    /// Queue deadline and its duration; `None` once started.
    queue_deadline: Option<(tokio::time::Instant, Duration)>,
    /// Request deadline and its duration; the request then ends as if at its length limit.
    deadline: Option<(tokio::time::Instant, Duration)>,
    timed_out: bool,
}

impl Events {
    /// The next event; `None` after the last choice finished or after a terminal error.
    ///
    /// Cancellation-safe: no event is lost.
    pub async fn next(&mut self) -> Option<Timestamped> {
        if self.choices_left == 0 {
            return None;
        }
        loop {
            let wake = match (self.queue_deadline, self.deadline) {
                (Some((queue, _)), Some((all, _))) => Some(queue.min(all)),
                (Some((wake, _)), None) | (None, Some((wake, _))) => Some(wake),
                (None, None) => None,
            };
            let received = match wake {
                None => self.events.recv().await,
                Some(wake) => match tokio::time::timeout_at(wake, self.events.recv()).await {
                    Ok(received) => received,
                    Err(_) => match self.check_deadlines() {
                        Some(error) => return Some(error),
                        None => continue,
                    },
                },
            };
            return Some(self.record(received));
        }
    }

    /// The next event, if one is available without waiting.
    pub fn try_next(&mut self) -> Option<Timestamped> {
        if self.choices_left == 0 {
            return None;
        }
        let received = self.events.try_recv().ok()?;
        Some(self.record(Some(received)))
    }

    /// Cancels one choice; it still finishes, with reason `cancelled`.
    pub fn cancel_choice(&self, choice: usize) {
        let _ = self.inbox.send(Message::CancelChoice(self.id, choice));
    }

    /// Whether a deadline ended the request.
    pub fn timed_out(&self) -> bool {
        self.timed_out
    }

    fn check_deadlines(&mut self) -> Option<Timestamped> {
        let now = tokio::time::Instant::now();
        if let Some((queue, after)) = self.queue_deadline
            && queue <= now
        {
            self.cancel();
            return Some(Timestamped::now(EngineEvent::Error(
                TerminalError::QueueTimeout(after),
            )));
        }
        if let Some((_, after)) = self.deadline.take_if(|(deadline, _)| *deadline <= now) {
            self.timed_out = true;
            if self.queue_deadline.is_some() {
                // It never started, so there is no text to finish.
                self.cancel();
                return Some(Timestamped::now(EngineEvent::Error(
                    TerminalError::QueueTimeout(after),
                )));
            }
            for choice in 0..self.choices {
                self.cancel_choice(choice);
            }
        }
        None
    }

    fn record(&mut self, received: Option<Timestamped>) -> Timestamped {
        let Some(mut timestamped) = received else {
            self.choices_left = 0;
            let error = TerminalError::EngineLost("the engine ended".into());
            return Timestamped::now(EngineEvent::Error(error));
        };
        match &mut timestamped.event {
            EngineEvent::Scheduler(Event::Started { .. }) => self.queue_deadline = None,
            EngineEvent::Scheduler(Event::Finished { reason, .. }) => {
                self.choices_left -= 1;
                if self.timed_out && *reason == FinishReason::Cancelled {
                    *reason = FinishReason::Length;
                }
            }
            EngineEvent::Scheduler(Event::Failed { .. }) | EngineEvent::Error(_) => {
                self.choices_left = 0
            }
            EngineEvent::Scheduler(_) => {}
        }
        timestamped
    }

    fn cancel(&mut self) {
        self.choices_left = 0;
        let _ = self.inbox.send(Message::Cancel(self.id));
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if self.choices_left > 0 {
            self.cancel();
        }
    }
}
