//! States on their way to the disk: a queue with a bound in bytes, in which the newest matters most.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use contract::{DetachedSnapshot, TokenId};

use super::access_times::LastUses;

/// A state to be written.
pub(super) struct Order {
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) parcel: Box<dyn DetachedSnapshot>,
    /// Bytes of the parcel.
    pub(super) size: u64,
}

/// What waits, and what is being written. Its bytes are bounded: a state that comes beyond the bound is taken all the
/// same, once nothing else waits but what is being written.
pub(super) struct Waiting {
    most: u64,
    line: Mutex<Line>,
    /// Told of every change.
    turn: Condvar,
}

#[derive(Default)]
struct Line {
    orders: VecDeque<Order>,
    /// Tokens and bytes of the state that is being written.
    begun: Option<(Arc<[TokenId]>, u64)>,
    last_uses: Option<LastUses>,
    closed: bool,
}

impl Line {
    fn bytes(&self) -> u64 {
        let begun = self.begun.as_ref().map_or(0, |(_, size)| *size);
        begun + self.orders.iter().map(|order| order.size).sum::<u64>()
    }
}

impl Waiting {
    /// A queue of `most` bytes.
    pub(super) fn new(most: u64) -> Waiting {
        Waiting {
            most,
            line: Mutex::default(),
            turn: Condvar::new(),
        }
    }

    /// Takes a state; those that have waited longest give way to it where there is no room for all.
    pub(super) fn push(&self, order: Order) {
        let mut line = self.line();
        while line.bytes().saturating_add(order.size) > self.most {
            let Some(old) = line.orders.pop_front() else {
                break;
            };
            let (tokens, size) = (old.tokens.len(), old.size);
            tracing::info!(
                tokens,
                size,
                "a state is not kept on disk: the disk is slower than states come"
            );
        }
        line.orders.push_back(order);
        self.turn.notify_all();
    }

    /// Takes a state as soon as there is room for it.
    pub(super) fn push_with_room(&self, order: Order) {
        let line = self.line();
        let full = |line: &mut Line| {
            let bytes = line.bytes();
            bytes > 0 && bytes.saturating_add(order.size) > self.most
        };
        let line = self.turn.wait_while(line, full);
        let mut line = line.unwrap_or_else(PoisonError::into_inner);
        line.orders.push_back(order);
        self.turn.notify_all();
    }

    /// The process ends: from now on ages follow from this.
    pub(super) fn end(&self, last_uses: LastUses) {
        self.line().last_uses = Some(last_uses);
    }

    /// When the state of these tokens was used last, if the process ends.
    pub(super) fn last_use(&self, tokens: &[TokenId]) -> Option<SystemTime> {
        let line = self.line();
        line.last_uses.as_ref().map(|uses| uses.of(tokens))
    }

    /// Nothing more will come.
    pub(super) fn close(&self) {
        self.line().closed = true;
        self.turn.notify_all();
    }

    /// Waits for the next state to write; `None` once the queue is closed and empty.
    pub(super) fn next(&self) -> Option<Order> {
        let idle = |line: &mut Line| line.orders.is_empty() && !line.closed;
        let line = self.turn.wait_while(self.line(), idle);
        let mut line = line.unwrap_or_else(PoisonError::into_inner);
        let order = line.orders.pop_front()?;
        line.begun = Some((Arc::clone(&order.tokens), order.size));
        Some(order)
    }

    /// What [`next`](Waiting::next) gave last is written, or given up.
    pub(super) fn done(&self) {
        self.line().begun = None;
        self.turn.notify_all();
    }

    /// How many tokens of `tokens` the longest of these states covers.
    pub(super) fn covered(&self, tokens: &[TokenId]) -> usize {
        let line = self.line();
        let begun = line.begun.iter().map(|(kept, _)| kept);
        let all = line.orders.iter().map(|order| &order.tokens).chain(begun);
        let along = all.filter(|kept| tokens.starts_with(kept));
        along.map(|kept| kept.len()).max().unwrap_or(0)
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        // The line is whole between any two statements that could panic.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(salt: u32, size: usize) -> Order {
        Order {
            tokens: [TokenId(salt)].into(),
            parcel: Box::new(vec![0; size]),
            size: size as u64,
        }
    }

    fn left(waiting: &Waiting) -> Vec<u32> {
        waiting.close();
        let orders = std::iter::from_fn(|| waiting.next());
        orders.map(|order| order.tokens[0].0).collect()
    }

    #[test]
    fn the_newest_takes_the_place_of_what_has_waited_longest() {
        let waiting = Waiting::new(100);
        waiting.push(order(0, 60));
        assert_eq!(waiting.next().unwrap().size, 60);
        // 60 bytes are being written: 40 are left.
        waiting.push(order(1, 20));
        waiting.push(order(2, 20));
        waiting.push(order(3, 20));
        assert_eq!(waiting.covered(&[TokenId(1), TokenId(9)]), 0);
        assert_eq!(waiting.covered(&[TokenId(3), TokenId(9)]), 1);
        assert_eq!(waiting.covered(&[TokenId(0)]), 1, "what is being written");
        waiting.push(order(4, 1000));
        assert_eq!(left(&waiting), [4], "beyond the bound, but the newest");
    }

    #[test]
    fn who_waits_for_room_loses_nobody() {
        let waiting = Waiting::new(100);
        waiting.push_with_room(order(0, 1000));
        std::thread::scope(|scope| {
            let pushes = scope.spawn(|| {
                waiting.push_with_room(order(1, 70));
                waiting.push_with_room(order(2, 70));
            });
            for expected in 0..3 {
                let order = waiting.next().unwrap();
                assert_eq!(order.tokens[0].0, expected);
                waiting.done();
            }
            pushes.join().unwrap();
        });
        assert!(left(&waiting).is_empty());
    }
}
