//! A shard of a tensor split on a thread of its own: its passes wait for those of the shards behind
//! it, which the caller starts next.

use std::io::{Read, Write};
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use contract::protocol::invalid_call;
use contract::{
    Capacity, CommitItem, DetachedSnapshot, DeviceError, DraftCandidates, DraftItem, DraftLogits,
    LogitsRequest, LogitsRow, MtpDraftItem, Runner, RunnerInfo, SeqId, Shard, SnapshotId,
    SnapshotInfo, SnapshotLocation, Stage, StageOutput, TokenId, Tree, TreePath, VerifyItem,
};

use crate::exchange::{ExchangeEnd, ShardOutput, end_beside};
use crate::runner::CpuRunner;

/// Something to do with the runner.
type Call = Box<dyn FnOnce(&mut CpuRunner) + Send>;

/// The thread of a shard. Dropping it ends the thread and with it the passes of the other shards.
pub(crate) struct ShardThread {
    info: RunnerInfo,
    output: ShardOutput,
    /// `None` once the thread is to end.
    calls: Option<Sender<Call>>,
    /// The first error of a pass, which the next call reports.
    failed: Arc<Mutex<Option<DeviceError>>>,
    /// Joined on drop.
    thread: Option<JoinHandle<()>>,
}

impl ShardThread {
    /// A shard that is not the last, opened by `open` on its thread.
    ///
    /// # Errors
    /// Those of opening a model, and [`DeviceError::Io`] without a thread.
    pub(crate) fn open(
        shard: Shard,
        open: impl FnOnce() -> Result<CpuRunner, DeviceError> + Send + 'static,
    ) -> Result<ShardThread, DeviceError> {
        let (calls, received) = channel::<Call>();
        let (opened, opening) = channel();
        let end = ExchangeEnd::first(shard);
        let exchange = Arc::clone(end.exchange());
        let work = move || {
            let mut runner = match open() {
                Ok(runner) => runner,
                Err(error) => {
                    let _ = opened.send(Err(error));
                    return;
                }
            };
            runner.exchange_through(end);
            let _ = opened.send(Ok(runner.info().clone()));
            for call in received {
                call(&mut runner);
            }
        };
        let name = format!("shard {}", shard.index);
        let thread = std::thread::Builder::new().name(name).spawn(work)?;
        let info = match opening.recv() {
            Ok(info) => info?,
            Err(_) => return Err(ended()),
        };
        Ok(ShardThread {
            info,
            output: ShardOutput { exchange },
            calls: Some(calls),
            failed: Arc::default(),
            thread: Some(thread),
        })
    }

    fn send(&self, call: Call) -> Result<(), DeviceError> {
        let sent = self.calls.as_ref().map(|calls| calls.send(call));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(ended()),
        }
    }

    /// Runs a call behind the pass under way, and waits for both.
    fn call<T: Send + 'static>(
        &self,
        of: impl FnOnce(&mut CpuRunner) -> T + Send + 'static,
    ) -> Result<T, DeviceError> {
        let (result, received) = channel();
        self.send(Box::new(move |runner| {
            let _ = result.send(of(runner));
        }))?;
        let result = received.recv().map_err(|_| ended())?;
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        match &*failed {
            None => Ok(result),
            Some(error) => Err(DeviceError::DeviceLost {
                during: "a pass of a shard",
                detail: error.to_string(),
            }),
        }
    }

    /// Starts a pass. Its error is that of the next call.
    fn start<T>(
        &self,
        of: impl FnOnce(&mut CpuRunner) -> Result<T, DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        let failed = Arc::clone(&self.failed);
        self.send(Box::new(move |runner| {
            if let Err(error) = of(runner) {
                runner.fail_exchange(&error);
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert(error);
            }
        }))
    }
}

fn ended() -> DeviceError {
    DeviceError::DeviceLost {
        during: "a call of a shard",
        detail: "its thread has ended".to_owned(),
    }
}

fn no_drafts<T>(call: &'static str) -> Result<T, DeviceError> {
    Err(invalid_call(call, "only the last shard drafts".to_owned()))
}

impl Drop for ShardThread {
    fn drop(&mut self) {
        // A pass under way waits for a shard that may be gone.
        self.output.exchange.end("the model was closed");
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Runner for ShardThread {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn capacity(&self) -> Capacity {
        self.call(|runner| runner.capacity()).unwrap_or_default()
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.call(move |runner| runner.open(max_len))?
    }

    fn close(&mut self, seq: SeqId) {
        // The next call reports a thread that has ended.
        let _ = self.call(move |runner| runner.close(seq));
    }

    /// Only starts the pass.
    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let (tokens, requests) = (tokens.to_vec(), requests.to_vec());
        self.start(move |runner| runner.prefill(seq, &tokens, &requests))?;
        Ok(Vec::new())
    }

    fn draft(
        &mut self,
        _items: &[DraftItem],
        _depth: usize,
        _k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        no_drafts("draft")
    }

    fn draft_logits(&mut self, _item: DraftItem) -> Result<DraftLogits, DeviceError> {
        no_drafts("draft_logits")
    }

    fn draft_mtp(
        &mut self,
        _items: &[MtpDraftItem],
        _k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        no_drafts("draft_mtp")
    }

    /// Only starts the pass.
    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let owned = items
            .iter()
            .map(|item| (item.seq, item.tree.clone(), item.requests.to_vec()));
        let owned: Vec<(SeqId, Tree, Vec<LogitsRequest>)> = owned.collect();
        self.start(move |runner| {
            let items = owned.iter().map(|(seq, tree, requests)| VerifyItem {
                seq: *seq,
                tree,
                requests,
            });
            runner.verify(&items.collect::<Vec<_>>())
        })?;
        Ok(Vec::new())
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        let owned = items.iter().map(|item| (item.seq, item.path.clone()));
        let owned: Vec<(SeqId, TreePath)> = owned.collect();
        self.call(move |runner| {
            let items = owned.iter();
            let items = items.map(|(seq, path)| CommitItem { seq: *seq, path });
            runner.commit(&items.collect::<Vec<_>>())
        })?
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.call(move |runner| runner.discard(seq))?
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        self.call(move |runner| runner.snapshot(seq, location))?
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        self.call(move |runner| runner.restore(seq, snapshot))?
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        // The next call reports a thread that has ended.
        let _ = self.call(move |runner| runner.free_snapshot(snapshot));
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        self.detach(snapshot)?.write(sink)
    }

    fn detach(&mut self, snapshot: SnapshotId) -> Result<Box<dyn DetachedSnapshot>, DeviceError> {
        self.call(move |runner| runner.detach(snapshot))?
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes)?;
        self.call(move |runner| runner.import(&mut &bytes[..]))?
    }
}

impl Stage for ShardThread {
    fn passes(&self, position: usize, n: usize) -> Vec<Range<usize>> {
        let passes = self.call(move |runner| runner.passes(position, n));
        // The call that follows reports the fault.
        passes.unwrap_or_else(|_| std::iter::once(0..n).collect())
    }

    fn items_per_pass(&self, nodes: &[usize]) -> usize {
        let nodes = nodes.to_vec();
        self.call(move |runner| runner.items_per_pass(&nodes))
            .unwrap_or(1)
    }

    fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError> {
        self.call(move |runner| runner.reserve(seq, rows))?
    }

    fn connect(&mut self, below: &mut dyn StageOutput) -> Result<(), DeviceError> {
        let shard = self.call(|runner| runner.which_shard())?;
        let shard = shard.ok_or_else(ended)?;
        let end = end_beside(below, shard)?;
        self.output.exchange = Arc::clone(end.exchange());
        self.call(move |runner| runner.exchange_through(end))
    }

    fn receive(&mut self, _below: &mut dyn StageOutput, _rows: usize) -> Result<(), DeviceError> {
        let detail = "a shard has the whole residual stream".to_owned();
        Err(invalid_call("receive", detail))
    }

    fn output(&mut self) -> &mut dyn StageOutput {
        &mut self.output
    }
}
