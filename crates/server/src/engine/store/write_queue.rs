//! Write queue of states, bounded in bytes; newer states take precedence.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use contract::{DetachedSnapshot, TokenId};

use super::access_times::AccessTimes;

/// State to be written.
pub(super) struct PendingWrite {
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) snapshot: Box<dyn DetachedSnapshot>,
    /// Bytes of the snapshot.
    pub(super) size: u64,
}

/// Queued states and the one being written. A state beyond the bound is accepted only when the
/// queue is empty but for the write in progress.
pub(super) struct WriteQueue {
    max_bytes: u64,
    state: Mutex<QueueState>,
    /// Notified of every change.
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    pending: VecDeque<PendingWrite>,
    /// Tokens and bytes of the state being written.
    writing: Option<(Arc<[TokenId]>, u64)>,
    access_times: Option<AccessTimes>,
    closed: bool,
}

impl QueueState {
    fn bytes(&self) -> u64 {
        let writing = self.writing.as_ref().map_or(0, |(_, size)| *size);
        writing + self.pending.iter().map(|write| write.size).sum::<u64>()
    }
}

impl WriteQueue {
    /// A queue of `max_bytes` bytes.
    pub(super) fn new(max_bytes: u64) -> WriteQueue {
        WriteQueue {
            max_bytes,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Queues a state; drops the oldest queued states if there is no room.
    pub(super) fn push(&self, write: PendingWrite) {
        let mut state = self.state();
        while state.bytes().saturating_add(write.size) > self.max_bytes {
            let Some(old) = state.pending.pop_front() else {
                break;
            };
            let (tokens, size) = (old.tokens.len(), old.size);
            tracing::info!(
                tokens,
                size,
                "a state is not kept on disk: the disk is slower than states come"
            );
        }
        state.pending.push_back(write);
        self.changed.notify_all();
    }

    /// Queues a state, waiting for room.
    pub(super) fn push_with_room(&self, write: PendingWrite) {
        let state = self.state();
        let full = |state: &mut QueueState| {
            let bytes = state.bytes();
            bytes > 0 && bytes.saturating_add(write.size) > self.max_bytes
        };
        let state = self.changed.wait_while(state, full);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        state.pending.push_back(write);
        self.changed.notify_all();
    }

    /// Shutdown: access times now come from this list.
    pub(super) fn end(&self, access_times: AccessTimes) {
        self.state().access_times = Some(access_times);
    }

    /// Access time of a state, at shutdown.
    pub(super) fn access_time(&self, tokens: &[TokenId]) -> Option<SystemTime> {
        let state = self.state();
        state.access_times.as_ref().map(|uses| uses.of(tokens))
    }

    /// Closes the queue.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// Waits for the next state to write; `None` once the queue is closed and empty.
    pub(super) fn next(&self) -> Option<PendingWrite> {
        let idle = |state: &mut QueueState| state.pending.is_empty() && !state.closed;
        let state = self.changed.wait_while(self.state(), idle);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let write = state.pending.pop_front()?;
        state.writing = Some((Arc::clone(&write.tokens), write.size));
        Some(write)
    }

    /// Marks the state that [`next`](WriteQueue::next) returned as done.
    pub(super) fn done(&self) {
        self.state().writing = None;
        self.changed.notify_all();
    }

    /// Length of the longest queued state that is a prefix of `tokens`.
    pub(super) fn longest_prefix_len(&self, tokens: &[TokenId]) -> usize {
        let state = self.state();
        let writing = state.writing.iter().map(|(kept, _)| kept);
        let all = state
            .pending
            .iter()
            .map(|write| &write.tokens)
            .chain(writing);
        let along = all.filter(|kept| tokens.starts_with(kept));
        along.map(|kept| kept.len()).max().unwrap_or(0)
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        // The state is consistent between any two statements that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(salt: u32, size: usize) -> PendingWrite {
        PendingWrite {
            tokens: [TokenId(salt)].into(),
            snapshot: Box::new(vec![0; size]),
            size: size as u64,
        }
    }

    fn left(queue: &WriteQueue) -> Vec<u32> {
        queue.close();
        let pending = std::iter::from_fn(|| queue.next());
        pending.map(|write| write.tokens[0].0).collect()
    }

    #[test]
    fn newest_state_replaces_the_oldest_queued_ones() {
        let queue = WriteQueue::new(100);
        queue.push(write(0, 60));
        assert_eq!(queue.next().unwrap().size, 60);
        // 60 bytes are in progress, 40 are free.
        queue.push(write(1, 20));
        queue.push(write(2, 20));
        queue.push(write(3, 20));
        assert_eq!(queue.longest_prefix_len(&[TokenId(1), TokenId(9)]), 0);
        assert_eq!(queue.longest_prefix_len(&[TokenId(3), TokenId(9)]), 1);
        assert_eq!(
            queue.longest_prefix_len(&[TokenId(0)]),
            1,
            "what is being written"
        );
        queue.push(write(4, 1000));
        assert_eq!(left(&queue), [4], "beyond the bound, but the newest");
    }

    #[test]
    fn blocking_push_drops_no_state() {
        let queue = WriteQueue::new(100);
        queue.push_with_room(write(0, 1000));
        std::thread::scope(|scope| {
            let pushes = scope.spawn(|| {
                queue.push_with_room(write(1, 70));
                queue.push_with_room(write(2, 70));
            });
            for expected in 0..3 {
                let write = queue.next().unwrap();
                assert_eq!(write.tokens[0].0, expected);
                queue.done();
            }
            pushes.join().unwrap();
        });
        assert!(left(&queue).is_empty());
    }
}
