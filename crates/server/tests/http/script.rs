//! A fake runner that replays a test's script and lets the test hold, fail and observe it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use conformance::fake::{FakeHandle, FakeRunner, FakeSpec, Language, RunnerMethod, answer};
use contract::{
    CommitItem, DeviceError, KvPool, Limits, LogitsRequest, LogitsRow, Runner, SeqId, SnapshotId,
    SnapshotInfo, SnapshotLocation, TokenId, VerifyItem,
};

/// The next token, given how many were generated so far.
pub(crate) type Script = Arc<dyn Fn(usize) -> TokenId + Send + Sync>;

/// Lets a test hold the device between calls.
#[derive(Default)]
pub(crate) struct Gate {
    held: Mutex<bool>,
    released: Condvar,
    panics: AtomicBool,
}

impl Gate {
    /// Makes the next prefill or verify wait until `release`.
    pub(crate) fn hold(&self) {
        *self.held.lock().unwrap() = true;
    }

    pub(crate) fn release(&self) {
        *self.held.lock().unwrap() = false;
        self.released.notify_all();
    }

    /// Makes the next prefill or verify panic.
    pub(crate) fn panic_next(&self) {
        self.panics.store(true, Ordering::SeqCst);
    }

    fn pass(&self) {
        let mut held = self.held.lock().unwrap();
        while *held {
            held = self.released.wait(held).unwrap();
        }
        drop(held);
        if self.panics.swap(false, Ordering::SeqCst) {
            panic!("requested by the test");
        }
    }
}

/// A test's handle to the runner that the engine thread owns.
#[derive(Clone)]
pub(crate) struct Watch {
    pub(crate) gate: Arc<Gate>,
    pub(crate) fake: FakeHandle,
}

impl Watch {
    /// How often a method was called.
    pub(crate) fn count(&self, call: RunnerMethod) -> u64 {
        self.fake.record().count(call)
    }

    /// Number of open sequences.
    pub(crate) fn open_now(&self) -> u64 {
        self.count(RunnerMethod::Open) - self.count(RunnerMethod::Close)
    }
}

/// Runner that follows a script; see the module.
pub(crate) struct ScriptRunner {
    inner: FakeRunner,
    /// `None` leaves the fake runner's own logits.
    script: Option<Script>,
    generated: HashMap<SeqId, usize>,
    saved: HashMap<SnapshotId, usize>,
}

impl ScriptRunner {
    pub(crate) fn new(
        vocab: usize,
        limits: Limits,
        step: Duration,
        script: Option<Script>,
    ) -> (ScriptRunner, Watch) {
        let gate = Arc::new(Gate::default());
        let at_gate = Arc::clone(&gate);
        let spec = FakeSpec {
            language: Language {
                vocab,
                spread: 8.0,
                ending: None,
                salt: 7,
            },
            limits,
            pool_tokens: KvPool::for_limits(limits, 1).tokens(),
            ..FakeSpec::default()
        };
        let inner = FakeRunner::new(spec).with_hook(move |call| {
            if matches!(call, RunnerMethod::Prefill | RunnerMethod::Verify) {
                std::thread::sleep(step);
                at_gate.pass();
            }
        });
        let watch = Watch {
            gate,
            fake: inner.handle(),
        };
        let runner = ScriptRunner {
            inner,
            script,
            generated: HashMap::new(),
            saved: HashMap::new(),
        };
        (runner, watch)
    }

    fn row(&self, script: &Script, generated: usize, ask: &LogitsRequest) -> LogitsRow {
        let vocab = self.inner.info().vocab;
        let mut raw: Vec<f32> = (0..vocab).map(|i| -20.0 - i as f32 * 1e-3).collect();
        raw[script(generated).index()] = 0.0;
        answer(raw, ask)
    }
}

impl Runner for ScriptRunner {
    contract::forward_runner!(self => self.inner; info, capacity, open, draft, discard, export,
        import);

    fn close(&mut self, seq: SeqId) {
        self.generated.remove(&seq);
        self.inner.close(seq);
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let rows = self.inner.prefill(seq, tokens, requests)?;
        Ok(match &self.script {
            None => rows,
            Some(script) => requests
                .iter()
                .map(|(_, ask)| self.row(script, 0, ask))
                .collect(),
        })
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let rows = self.inner.verify(items)?;
        let Some(script) = &self.script else {
            return Ok(rows);
        };
        let scripted = items.iter().map(|item| {
            let before = self.generated.get(&item.seq).copied().unwrap_or(0);
            let nodes = item.tree.nodes().zip(item.requests);
            nodes
                .map(|(node, ask)| self.row(script, before + 1 + item.tree.depth(node), ask))
                .collect()
        });
        Ok(scripted.collect())
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        for item in items {
            *self.generated.entry(item.seq).or_default() += item.path.len();
        }
        self.inner.commit(items)
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        let info = self.inner.snapshot(seq, location)?;
        let generated = self.generated.get(&seq).copied().unwrap_or(0);
        self.saved.insert(info.id, generated);
        Ok(info)
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        let generated = self.saved.get(&snapshot).copied().unwrap_or(0);
        self.generated.insert(seq, generated);
        self.inner.restore(seq, snapshot)
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.saved.remove(&snapshot);
        self.inner.free_snapshot(snapshot);
    }
}
