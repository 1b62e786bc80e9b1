//! The waiting queue.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::job::{Job, JobId};

/// How often the last admitted session may overtake an earlier job.
const MAX_OVERTAKES: u32 = 2;
/// How often short prompts may overtake an earlier job.
const MAX_SHORT_OVERTAKES: u32 = 16;

/// Priority order: higher priority first, then order of arrival.
pub(super) type PriorityKey = (Reverse<i32>, u64);

/// A waiting job and its choices that are not cancelled.
#[derive(Debug)]
pub(super) struct QueuedJob {
    pub(super) job: Job,
    /// Open choices, ascending, at least one.
    pub(super) open: Vec<usize>,
    /// How many later jobs of the last session have overtaken it.
    overtaken: u32,
    /// How many later jobs with short prompts have overtaken it.
    overtaken_by_short: u32,
}

/// Waiting jobs in priority order, with two exceptions. The last admitted session goes first, since
/// its prefix is cached. Short prompts may go first while every sequence is in use.
///
/// A job is overtaken at most [`MAX_OVERTAKES`] and [`MAX_SHORT_OVERTAKES`] times, and only at
/// equal priority. Otherwise the first job is never skipped, however small the later ones are, so
/// none starves.
#[derive(Debug, Default)]
pub(super) struct WaitingQueue {
    entries: BTreeMap<PriorityKey, QueuedJob>,
    arrivals: u64,
    /// The session admitted last, if it had a name.
    last_session: Option<Arc<str>>,
    /// Maximum number of tokens of a short prompt: those of one prefill chunk.
    short_tokens: usize,
}

impl WaitingQueue {
    /// An empty queue for chunks of this many tokens.
    pub(super) fn new(short_tokens: usize) -> WaitingQueue {
        WaitingQueue {
            short_tokens,
            ..WaitingQueue::default()
        }
    }

    /// Number of waiting jobs.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no job waits.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Queues a job.
    pub(super) fn push(&mut self, job: Job) {
        self.arrivals += 1;
        let key = (Reverse(job.priority), self.arrivals);
        let open = (0..job.choices).collect();
        let queued = QueuedJob {
            job,
            open,
            overtaken: 0,
            overtaken_by_short: 0,
        };
        self.entries.insert(key, queued);
    }

    /// The next job.
    pub(super) fn first(&self) -> Option<&Job> {
        let entry = self.entries.get(&self.next_key()?)?;
        Some(&entry.job)
    }

    /// The key of the next job.
    pub(super) fn first_key(&self) -> Option<PriorityKey> {
        self.next_key()
    }

    /// The job with this key.
    pub(super) fn get(&self, key: PriorityKey) -> Option<&Job> {
        self.entries.get(&key).map(|entry| &entry.job)
    }

    /// The first job of the highest priority whose prompt takes one chunk, unless it would
    /// overtake a job too often.
    pub(super) fn first_short(&self) -> Option<PriorityKey> {
        let (highest, _) = self.entries.first_key_value()?.0;
        for (key, entry) in &self.entries {
            if key.0 != *highest {
                break;
            }
            if entry.job.prompt.len() <= self.short_tokens {
                return Some(*key);
            }
            if entry.overtaken_by_short >= MAX_SHORT_OVERTAKES {
                break;
            }
        }
        None
    }

    /// Takes the next job out.
    pub(super) fn pop(&mut self) -> Option<(PriorityKey, QueuedJob)> {
        let key = self.next_key()?;
        Some((key, self.take(key)?))
    }

    /// Takes the job with this key out.
    pub(super) fn take(&mut self, key: PriorityKey) -> Option<QueuedJob> {
        let entry = self.entries.remove(&key)?;
        let short = entry.job.prompt.len() <= self.short_tokens;
        for (_, earlier) in self.entries.range_mut(..key) {
            if short {
                earlier.overtaken_by_short += 1;
            } else {
                earlier.overtaken += 1;
            }
        }
        self.last_session = entry.job.params.session.clone();
        Some(entry)
    }

    /// The key of the next job.
    fn next_key(&self) -> Option<PriorityKey> {
        let (first, _) = self.entries.first_key_value()?;
        let same_session = |entry: &QueuedJob| {
            self.last_session.is_some() && entry.job.params.session == self.last_session
        };
        for (key, entry) in &self.entries {
            if key.0 != first.0 {
                break;
            }
            if same_session(entry) {
                return Some(*key);
            }
            if entry.overtaken >= MAX_OVERTAKES {
                break;
            }
        }
        Some(*first)
    }

    /// The waiting job with this id.
    pub(super) fn find(&mut self, id: JobId) -> Option<&mut QueuedJob> {
        self.entries.values_mut().find(|entry| entry.job.id == id)
    }

    /// Takes a job out.
    pub(super) fn remove(&mut self, id: JobId) -> Option<QueuedJob> {
        let mut entries = self.entries.iter();
        let key = *entries.find(|(_, entry)| entry.job.id == id)?.0;
        self.entries.remove(&key)
    }

    /// All waiting jobs.
    pub(super) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.entries.values().map(|entry| &entry.job)
    }

    /// The ids of all waiting jobs, in priority order.
    pub(super) fn into_ids(self) -> impl Iterator<Item = JobId> {
        self.entries.into_values().map(|entry| entry.job.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::GenerationParams;
    use contract::TokenId;

    fn job(id: u64, priority: i32) -> Job {
        of(id, priority, None)
    }

    fn of(id: u64, priority: i32, session: Option<&str>) -> Job {
        Job {
            id: JobId(id),
            prompt: [TokenId(0)].into(),
            choices: 2,
            params: GenerationParams {
                session: session.map(Into::into),
                ..GenerationParams::default()
            },
            priority,
        }
    }

    fn order(queue: &mut WaitingQueue) -> Vec<u64> {
        let next = || {
            let peeked = queue.first().map(|job| job.id);
            let (_, entry) = queue.pop()?;
            assert_eq!(peeked, Some(entry.job.id));
            Some(entry.job.id.0)
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn higher_priority_first_then_arrival_order() {
        let mut queue = WaitingQueue::default();
        for (id, priority) in [(1, 0), (2, 5), (3, 0), (4, -1), (5, 5)] {
            queue.push(job(id, priority));
        }
        let removed = queue.remove(JobId(3)).unwrap();
        assert_eq!((removed.job.id, removed.open), (JobId(3), vec![0, 1]));
        assert_eq!(order(&mut queue), [2, 5, 1, 4]);
    }

    #[test]
    fn last_session_goes_first_but_overtakes_a_job_at_most_twice() {
        let mut queue = WaitingQueue::default();
        let mut queued = vec![of(1, 0, Some("a")), of(2, 0, Some("b")), of(3, 0, None)];
        queued.extend((4..8).map(|id| of(id, 0, Some("a"))));
        queued.into_iter().for_each(|job| queue.push(job));
        // After 4 and 5 overtook job 2, it goes before the session's other jobs.
        assert_eq!(order(&mut queue), [1, 4, 5, 2, 3, 6, 7]);
    }

    #[test]
    fn short_prompts_overtake_a_long_one_a_bounded_number_of_times() {
        let mut queue = WaitingQueue::new(4);
        let long = |id, priority| Job {
            prompt: [TokenId(0); 5].into(),
            ..job(id, priority)
        };
        for queued in [long(1, 0), long(2, 0), job(3, -1), long(4, 1)] {
            queue.push(queued);
        }
        (10..40).for_each(|id| queue.push(job(id, 0)));
        assert_eq!(queue.first_short(), None, "the highest priority is long");
        assert_eq!(queue.pop().unwrap().1.job.id, JobId(4));
        let mut overtaking = Vec::new();
        while let Some(key) = queue.first_short() {
            overtaking.push(queue.take(key).unwrap().job.id.0);
        }
        assert_eq!(overtaking, (10..26).collect::<Vec<_>>());
        let mut expected = vec![1, 2];
        expected.extend(26..40);
        expected.push(3);
        assert_eq!(order(&mut queue), expected);
    }

    #[test]
    fn last_session_never_overtakes_higher_priority() {
        let mut queue = WaitingQueue::default();
        queue.push(of(1, 1, Some("a")));
        queue.push(of(2, 1, None));
        queue.push(of(3, 0, Some("a")));
        assert_eq!(order(&mut queue), [1, 2, 3]);
    }

    #[test]
    fn jobs_without_session_keep_arrival_order() {
        let mut queue = WaitingQueue::default();
        queue.push(job(1, 0));
        queue.push(of(2, 0, Some("a")));
        queue.push(job(3, 0));
        assert_eq!(order(&mut queue), [1, 2, 3]);
    }
}
