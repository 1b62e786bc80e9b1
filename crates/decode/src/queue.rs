//! Who waits, and who goes next.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{Job, JobId};

/// How often the conversation admitted last may go before a job that came earlier.
const PASSED: u32 = 2;

/// When a job's turn comes: higher priority first, then order of arrival.
pub(crate) type Turn = (Reverse<i32>, u64);

/// A waiting job and those of its choices that nobody has cancelled.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The job.
    pub(crate) job: Job,
    /// Choices still wanted, rising, at least one.
    pub(crate) open: Vec<usize>,
    /// How many have gone before it that came after it.
    passed: u32,
}

/// Jobs waiting for room, in the order of their turns, but that the conversation admitted last goes on first, since
/// its state is at hand. That happens to a job [`PASSED`] times at most, and never across priorities; otherwise the
/// first one is not passed over, however small the ones behind it are, so none waits for ever.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    entries: BTreeMap<Turn, Entry>,
    arrivals: u64,
    /// The name of the conversation admitted last, if it had one.
    hot: Option<Arc<str>>,
}

impl Queue {
    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Lines a job up.
    pub(crate) fn push(&mut self, job: Job) {
        self.arrivals += 1;
        let turn = (Reverse(job.priority), self.arrivals);
        let open = (0..job.choices).collect();
        let passed = 0;
        self.entries.insert(turn, Entry { job, open, passed });
    }

    /// The next in line.
    pub(crate) fn first(&self) -> Option<&Job> {
        let entry = self.entries.get(&self.next()?)?;
        Some(&entry.job)
    }

    /// The turn of the next in line.
    pub(crate) fn first_turn(&self) -> Option<Turn> {
        self.next()
    }

    /// Takes the next in line out.
    pub(crate) fn pop(&mut self) -> Option<(Turn, Entry)> {
        let turn = self.next()?;
        for (_, entry) in self.entries.range_mut(..turn) {
            entry.passed += 1;
        }
        let entry = self.entries.remove(&turn)?;
        self.hot = entry.job.settings.session.clone();
        Some((turn, entry))
    }

    /// Whose turn it is.
    fn next(&self) -> Option<Turn> {
        let (first, _) = self.entries.first_key_value()?;
        let of_hot = |entry: &Entry| self.hot.is_some() && entry.job.settings.session == self.hot;
        for (turn, entry) in &self.entries {
            if turn.0 != first.0 {
                break;
            }
            if of_hot(entry) {
                return Some(*turn);
            }
            if entry.passed >= PASSED {
                break;
            }
        }
        Some(*first)
    }

    /// A waiting job, wherever it stands.
    pub(crate) fn find(&mut self, id: JobId) -> Option<&mut Entry> {
        self.entries.values_mut().find(|entry| entry.job.id == id)
    }

    /// Takes a job out, wherever it stands.
    pub(crate) fn remove(&mut self, id: JobId) -> Option<Entry> {
        let mut entries = self.entries.iter();
        let turn = *entries.find(|(_, entry)| entry.job.id == id)?.0;
        self.entries.remove(&turn)
    }

    /// All that wait.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.entries.values().map(|entry| &entry.job)
    }

    /// The names of all that wait, in the order of their turns.
    pub(crate) fn into_ids(self) -> impl Iterator<Item = JobId> {
        self.entries.into_values().map(|entry| entry.job.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use contract::TokenId;

    fn job(id: u64, priority: i32) -> Job {
        of(id, priority, None)
    }

    fn of(id: u64, priority: i32, session: Option<&str>) -> Job {
        Job {
            id: JobId(id),
            prompt: [TokenId(0)].into(),
            choices: 2,
            settings: Settings {
                session: session.map(Into::into),
                ..Settings::default()
            },
            priority,
        }
    }

    fn order(queue: &mut Queue) -> Vec<u64> {
        let next = || {
            let told = queue.first().map(|job| job.id);
            let (_, entry) = queue.pop()?;
            assert_eq!(told, Some(entry.job.id));
            Some(entry.job.id.0)
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn higher_priority_goes_first_and_equals_keep_their_order() {
        let mut queue = Queue::default();
        for (id, priority) in [(1, 0), (2, 5), (3, 0), (4, -1), (5, 5)] {
            queue.push(job(id, priority));
        }
        let removed = queue.remove(JobId(3)).unwrap();
        assert_eq!((removed.job.id, removed.open), (JobId(3), vec![0, 1]));
        assert_eq!(order(&mut queue), [2, 5, 1, 4]);
    }

    #[test]
    fn a_conversation_goes_on_before_others_begin_but_passes_nobody_more_than_twice() {
        let mut queue = Queue::default();
        let mut line = vec![of(1, 0, Some("a")), of(2, 0, Some("b")), of(3, 0, None)];
        line.extend((4..8).map(|id| of(id, 0, Some("a"))));
        line.into_iter().for_each(|job| queue.push(job));
        // After 4 and 5 the second has waited enough; the third then goes before the conversation of the others.
        assert_eq!(order(&mut queue), [1, 4, 5, 2, 3, 6, 7]);
    }

    #[test]
    fn a_conversation_passes_nobody_of_a_higher_priority() {
        let mut queue = Queue::default();
        queue.push(of(1, 1, Some("a")));
        queue.push(of(2, 1, None));
        queue.push(of(3, 0, Some("a")));
        assert_eq!(order(&mut queue), [1, 2, 3]);
    }

    #[test]
    fn jobs_without_a_name_are_not_a_conversation() {
        let mut queue = Queue::default();
        queue.push(job(1, 0));
        queue.push(of(2, 0, Some("a")));
        queue.push(job(3, 0));
        assert_eq!(order(&mut queue), [1, 2, 3]);
    }
}
