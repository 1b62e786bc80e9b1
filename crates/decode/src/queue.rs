//! Who waits, and who goes next.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::{Job, JobId};

/// When a job's turn comes: higher priority first, then order of arrival.
pub(crate) type Turn = (Reverse<i32>, u64);

/// A waiting job and those of its choices that nobody has cancelled.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The job.
    pub(crate) job: Job,
    /// Choices still wanted, rising, at least one.
    pub(crate) open: Vec<usize>,
}

/// Jobs waiting for room, in the order of their turns. The first one is never passed over, however small
/// the ones behind it are, so none waits for ever.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    entries: BTreeMap<Turn, Entry>,
    arrivals: u64,
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
        self.entries.insert(turn, Entry { job, open });
    }

    /// The next in line.
    pub(crate) fn first(&self) -> Option<&Job> {
        self.entries.first_key_value().map(|(_, entry)| &entry.job)
    }

    /// Takes the next in line out.
    pub(crate) fn pop(&mut self) -> Option<(Turn, Entry)> {
        self.entries.pop_first()
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
        Job {
            id: JobId(id),
            prompt: [TokenId(0)].into(),
            choices: 2,
            settings: Settings::default(),
            priority,
        }
    }

    #[test]
    fn higher_priority_goes_first_and_equals_keep_their_order() {
        let mut queue = Queue::default();
        for (id, priority) in [(1, 0), (2, 5), (3, 0), (4, -1), (5, 5)] {
            queue.push(job(id, priority));
        }
        let removed = queue.remove(JobId(3)).unwrap();
        assert_eq!((removed.job.id, removed.open), (JobId(3), vec![0, 1]));
        let order: Vec<u64> = std::iter::from_fn(|| queue.pop())
            .map(|(_, entry)| entry.job.id.0)
            .collect();
        assert_eq!(order, [2, 5, 1, 4]);
    }
}
