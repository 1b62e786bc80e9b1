//! Partial sums of the shards of a tensor split, each shard on a thread of its own.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use contract::protocol::invalid_call;
use contract::{DeviceError, Shard, StageOutput};

/// Where shards meet: each leaves its partial sums, and takes the sum of all.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    pending: Mutex<PendingSum>,
    changed: Condvar,
}

/// One sum under way.
#[derive(Debug, Default)]
struct PendingSum {
    /// What each shard has left, by its place; the sum of all in the first once all are there.
    partial: Vec<Option<Vec<f32>>>,
    /// Shards that have taken the sum; none while partial sums are missing.
    taken: Option<usize>,
    /// Why there are no more sums: a shard has ended or failed.
    ended: Option<String>,
}

/// A shard's end of an exchange. Dropping it ends the passes of the others with an error.
#[derive(Debug)]
pub(crate) struct ExchangeEnd {
    exchange: Arc<Exchange>,
    shard: Shard,
}

impl ExchangeEnd {
    /// The end of the first shard, of a new exchange.
    pub(crate) fn first(shard: Shard) -> ExchangeEnd {
        ExchangeEnd {
            exchange: Arc::default(),
            shard,
        }
    }

    /// The end of another shard of an exchange.
    pub(crate) fn of(exchange: &Arc<Exchange>, shard: Shard) -> ExchangeEnd {
        ExchangeEnd {
            exchange: Arc::clone(exchange),
            shard,
        }
    }

    /// What all shards share.
    pub(crate) fn exchange(&self) -> &Arc<Exchange> {
        &self.exchange
    }

    /// Replaces partial sums by the sum of those of all shards, in the order of the shards. Waits
    /// for the others; returns with other values if one of them has ended.
    pub(crate) fn all_reduce(&self, rows: &mut [f32]) {
        let Shard { index, count } = self.shard;
        let mut sum = self.exchange.lock();
        sum.partial.resize(count, None);
        // The sum before this one may not have been taken by all.
        while sum.taken.is_some() && sum.ended.is_none() {
            sum = self.exchange.wait(sum);
        }
        sum.partial[index] = Some(rows.to_vec());
        if sum.partial.iter().all(Option::is_some) {
            sum.add_up();
            self.exchange.changed.notify_all();
        }
        while sum.taken.is_none() && sum.ended.is_none() {
            sum = self.exchange.wait(sum);
        }
        if sum.ended.is_some() {
            return;
        }
        if let Some(Some(sum)) = sum.partial.first() {
            rows.copy_from_slice(sum);
        }
        let taken = sum.taken.unwrap_or(0) + 1;
        sum.taken = Some(taken);
        if taken == count {
            sum.taken = None;
            sum.partial.fill(None);
            self.exchange.changed.notify_all();
        }
    }

    /// Fails if another shard has ended.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] with the reason.
    pub(crate) fn require(&self) -> Result<(), DeviceError> {
        match &self.exchange.lock().ended {
            None => Ok(()),
            Some(why) => Err(DeviceError::DeviceLost {
                during: "a pass of a tensor split",
                detail: why.clone(),
            }),
        }
    }

    /// Ends the passes of all shards, as this one cannot go on.
    pub(crate) fn fail(&self, error: &DeviceError) {
        let Shard { index, count } = self.shard;
        let why = format!("shard {} of {count} failed: {error}", index + 1);
        self.exchange.end(&why);
    }
}

impl Exchange {
    /// Ends the passes of all shards; the first reason stays.
    pub(crate) fn end(&self, why: &str) {
        self.lock().ended.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, PendingSum> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, sum: MutexGuard<'a, PendingSum>) -> MutexGuard<'a, PendingSum> {
        let waited = self.changed.wait(sum);
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

impl PendingSum {
    /// Adds the partial sums of all shards to those of the first.
    fn add_up(&mut self) {
        let Some((Some(sum), others)) = self.partial.split_first_mut() else {
            return;
        };
        for partial in others.iter().flatten() {
            for (sum, value) in sum.iter_mut().zip(partial) {
                *sum += value;
            }
        }
        self.taken = Some(0);
    }
}

impl Drop for ExchangeEnd {
    fn drop(&mut self) {
        let Shard { index, count } = self.shard;
        let why = format!("shard {} of {count} has ended", index + 1);
        self.exchange.end(&why);
    }
}

/// What the next shard connects to.
pub(crate) struct ShardOutput {
    pub(crate) exchange: Arc<Exchange>,
}

impl StageOutput for ShardOutput {
    fn read(&mut self, _rows: usize, _out: &mut [f32]) -> Result<(), DeviceError> {
        let detail = "a shard hands over no rows".to_owned();
        Err(invalid_call("reading the rows of a shard", detail))
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// The end of `shard` of the exchange that the shard before it, at `below`, takes part in.
///
/// # Errors
/// [`DeviceError::InvalidCall`] for a stage that is no shard on a CPU.
pub(crate) fn end_beside(
    below: &mut dyn StageOutput,
    shard: Shard,
) -> Result<ExchangeEnd, DeviceError> {
    match below.as_any().downcast_ref::<ShardOutput>() {
        Some(output) => Ok(ExchangeEnd::of(&output.exchange, shard)),
        None => {
            let detail = "the shard before it is not on a CPU".to_owned();
            Err(invalid_call("connect", detail))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shard_gets_the_sums_in_the_order_of_the_shards() {
        let shards: Vec<Shard> = Shard::all(3).collect();
        let first = ExchangeEnd::first(shards[0]);
        let others = [1, 2].map(|i| ExchangeEnd::of(first.exchange(), shards[i]));
        // In another order these sum to 0.
        let parts = [1.0, 1e8, -1e8];
        let run = |end: &ExchangeEnd| {
            let part = parts[end.shard.index];
            let mut sums = Vec::new();
            for i in 0..50 {
                let mut rows = vec![part, i as f32];
                end.all_reduce(&mut rows);
                sums.push(rows);
            }
            end.require().unwrap();
            sums
        };
        std::thread::scope(|scope| {
            let all = [&others[1], &first, &others[0]].map(|end| scope.spawn(move || run(end)));
            for thread in all {
                for (i, rows) in thread.join().unwrap().into_iter().enumerate() {
                    assert_eq!(rows, [(1.0 + 1e8) - 1e8, 3.0 * i as f32]);
                }
            }
        });
    }

    #[test]
    fn shards_do_not_wait_for_one_that_has_ended_or_failed_and_say_why() {
        let shards: Vec<Shard> = Shard::all(2).collect();
        for failed in [false, true] {
            let first = ExchangeEnd::first(shards[0]);
            let second = ExchangeEnd::of(first.exchange(), shards[1]);
            let why = if failed {
                second.fail(&invalid_call("verify", "a reason".to_owned()));
                "shard 2 of 2 failed: misuse of verify: a reason"
            } else {
                "shard 2 of 2 has ended"
            };
            drop(second);
            first.all_reduce(&mut [1.0]);
            let error = first.require().unwrap_err();
            assert!(matches!(error, DeviceError::DeviceLost { .. }));
            assert!(error.to_string().ends_with(why), "{error}");
        }
    }
}
