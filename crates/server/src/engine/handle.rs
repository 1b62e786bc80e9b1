//! How the async side talks to the engine thread: [`EngineHandle::submit`] gives a stream of what happens to
//! a request, and dropping that stream cancels the request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use contract::TokenId;
use decode::{Event, FinishReason, GenerationParams, Job, JobId, NextPrompt, SubmitError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use crate::engine::{Heartbeat, Message, Phase, Published, Ready, Submission};
use crate::settings::Timeouts;

/// A request as the engine takes it: all text is tokens by now.
#[derive(Debug, Clone)]
pub struct Order {
    /// The prompt, at least one token.
    pub prompt: Arc<[TokenId]>,
    /// How many replies are wanted; reply `i` is seeded with `seed + i`.
    pub choices: usize,
    /// How each is sampled and ended.
    pub settings: GenerationParams,
    /// Higher goes first in the queue.
    pub priority: i32,
}

/// What happened, and when the engine saw it happen.
#[derive(Debug)]
pub struct Timestamped {
    /// End of the engine's step that gave rise to it; its beginning for a start.
    pub at: Instant,
    /// What happened.
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

/// One thing that happened to a request.
#[derive(Debug)]
pub enum EngineEvent {
    /// The scheduler's own words.
    Scheduler(Event),
    /// The end, and not a good one; nothing follows.
    Error(TerminalError),
}

/// Why a request ended without being finished by the scheduler.
#[derive(Debug, Clone)]
pub enum TerminalError {
    /// The scheduler does not take it.
    Rejected(SubmitError),
    /// It waited too long for its turn.
    QueueTimeout(Duration),
    /// The server is going down.
    Draining,
    /// The engine is gone.
    EngineLost(Arc<str>),
}

/// Why a request was not taken at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdmissionError {
    /// As many requests wait as may wait.
    QueueFull {
        /// How many that is.
        waiting: usize,
    },
    /// The engine is loading, draining or gone.
    NotReady(Phase),
}

/// A cloneable door to the engine thread.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: mpsc::UnboundedSender<Message>,
    published: watch::Receiver<Published>,
    heartbeat: Arc<Heartbeat>,
    /// One permit per place in the queue; a request holds one until it starts. Bounds the inbox.
    queue_permits: Arc<Semaphore>,
    queue_limit: usize,
    next_id: Arc<AtomicU64>,
}

impl EngineHandle {
    pub(crate) fn new(
        inbox: mpsc::UnboundedSender<Message>,
        published: watch::Receiver<Published>,
        heartbeat: Arc<Heartbeat>,
        queue_limit: usize,
    ) -> EngineHandle {
        EngineHandle {
            inbox,
            published,
            heartbeat,
            queue_permits: Arc::new(Semaphore::new(queue_limit)),
            queue_limit,
            next_id: Arc::new(AtomicU64::new(1)),
        }
    }

    /// Hands a request over. Refuses at once when the queue is full or the engine does not take requests.
    pub fn submit(&self, order: Order, timeouts: Timeouts) -> Result<Events, AdmissionError> {
        self.check_ready()?;
        let permit = Arc::clone(&self.queue_permits)
            .try_acquire_owned()
            .map_err(|_| AdmissionError::QueueFull {
                waiting: self.queue_limit,
            })?;
        self.enqueue(order, timeouts, permit)
    }

    /// As [`submit`](EngineHandle::submit), but waits for a place in the queue, for further parts of a
    /// request whose first part was taken.
    pub async fn submit_later(
        &self,
        order: Order,
        timeouts: Timeouts,
    ) -> Result<Events, AdmissionError> {
        let permit = Arc::clone(&self.queue_permits).acquire_owned().await;
        self.check_ready()?;
        let permit = permit.map_err(|_| AdmissionError::QueueFull {
            waiting: self.queue_limit,
        })?;
        self.enqueue(order, timeouts, permit)
    }

    fn check_ready(&self) -> Result<(), AdmissionError> {
        match self.phase() {
            Phase::Ready => Ok(()),
            phase => Err(AdmissionError::NotReady(phase)),
        }
    }

    fn enqueue(
        &self,
        order: Order,
        timeouts: Timeouts,
        permit: OwnedSemaphorePermit,
    ) -> Result<Events, AdmissionError> {
        let id = JobId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = mpsc::channel(channel_capacity(&order));
        let choices = order.choices;
        let job = Job {
            id,
            prompt: order.prompt,
            choices,
            params: order.settings,
            priority: order.priority,
        };
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

    /// Tells the engine what a conversation's next prompt will begin with, to be read when there is nothing else to do.
    pub fn warm_prefix(&self, text: NextPrompt) {
        // An engine that is gone reads nothing.
        let _ = self.inbox.send(Message::WarmPrefix(text));
    }

    /// Where the engine stands.
    pub fn phase(&self) -> Phase {
        self.published.borrow().phase.clone()
    }

    /// All it publishes.
    pub fn published(&self) -> Published {
        self.published.borrow().clone()
    }

    /// The loaded model, once there is one.
    pub fn ready(&self) -> Option<Arc<Ready>> {
        self.published.borrow().ready.clone()
    }

    /// How many requests wait for a place on the device.
    pub fn waiting(&self) -> usize {
        self.queue_limit - self.queue_permits.available_permits()
    }

    /// How long the engine's present turn has taken so far; `None` while it is idle.
    pub fn step_age(&self) -> Option<Duration> {
        self.heartbeat.age()
    }

    /// Asks the engine to take nothing more and to end within `grace`.
    pub fn drain(&self, grace: Duration) {
        // An engine that is gone already needs no telling.
        let _ = self.inbox.send(Message::Drain(grace));
    }

    /// Waits until `reached` holds for the engine's phase, and gives that phase.
    pub async fn wait_for(&self, reached: impl Fn(&Phase) -> bool) -> Phase {
        let mut published = self.published.clone();
        match published.wait_for(|p| reached(&p.phase)).await {
            Ok(found) => found.phase.clone(),
            // The thread has dropped its end; what it said last stands.
            Err(_) => self.phase(),
        }
    }
}

/// Events of one request can never outnumber this.
///
/// Each token, at worst, is an event of its own; each choice has an end; a prompt is cut into chunks of at
/// least 16 tokens with a progress and a logprobs event each.
fn channel_capacity(order: &Order) -> usize {
    let per_choice = order.settings.max_tokens.saturating_add(4);
    let prefill = order.prompt.len() / 8 + 64;
    order
        .choices
        .saturating_mul(per_choice)
        .saturating_add(prefill)
        .min(Semaphore::MAX_PERMITS)
}

/// What happens to one request, in order. Dropping it before the end cancels the request.
pub struct Events {
    id: JobId,
    events: mpsc::Receiver<Timestamped>,
    inbox: mpsc::UnboundedSender<Message>,
    choices: usize,
    choices_left: usize,
    /// When to give up waiting for the start, and how long that was; `None` once started.
    queue_deadline: Option<(tokio::time::Instant, Duration)>,
    /// When to end the request as if it had reached its length limit, and how long that was.
    deadline: Option<(tokio::time::Instant, Duration)>,
    timed_out: bool,
}

impl Events {
    /// The next thing that happens; `None` after the last choice finished or after a fault.
    ///
    /// Safe to drop in the middle: nothing is lost.
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

    /// What has already happened, without waiting.
    pub fn try_next(&mut self) -> Option<Timestamped> {
        if self.choices_left == 0 {
            return None;
        }
        let received = self.events.try_recv().ok()?;
        Some(self.record(Some(received)))
    }

    /// Ends one choice early; it still finishes, as cancelled.
    pub fn cancel_choice(&self, choice: usize) {
        let _ = self.inbox.send(Message::CancelChoice(self.id, choice));
    }

    /// Whether the request was ended because its time was up.
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
                // It never started, so there is no text that could end here.
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
