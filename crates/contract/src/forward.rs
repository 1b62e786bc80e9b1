//! Delegation for runners that wrap another runner.

use crate::Runner;

/// Implements the listed [`Runner`](crate::Runner) methods by calling them on another runner.
///
/// Use it inside `impl Runner for Wrapper`, beside the methods that the wrapper changes:
///
/// ```ignore
/// impl Runner for Timed {
///     forward_runner!(self => self.inner; info, capacity, open, close, discard);
///     fn verify(&mut self, items: &[VerifyItem<'_>]) -> ... { ... }
/// }
/// ```
#[macro_export]
macro_rules! forward_runner {
    ($this:ident => $inner:expr; $($method:ident),+ $(,)?) => {
        $($crate::forward_runner!(@ $method $this $inner);)+
    };
    (@ info $this:ident $inner:expr) => {
        fn info(&$this) -> &$crate::RunnerInfo {
            $inner.info()
        }
    };
    (@ capacity $this:ident $inner:expr) => {
        fn capacity(&$this) -> $crate::Capacity {
            $inner.capacity()
        }
    };
    (@ open $this:ident $inner:expr) => {
        fn open(&mut $this, max_len: usize) -> Result<$crate::SeqId, $crate::DeviceError> {
            $inner.open(max_len)
        }
    };
    (@ close $this:ident $inner:expr) => {
        fn close(&mut $this, seq: $crate::SeqId) {
            $inner.close(seq);
        }
    };
    (@ prefill $this:ident $inner:expr) => {
        fn prefill(
            &mut $this,
            seq: $crate::SeqId,
            tokens: &[$crate::TokenId],
            requests: &[(usize, $crate::LogitsRequest)],
        ) -> Result<Vec<$crate::LogitsRow>, $crate::DeviceError> {
            $inner.prefill(seq, tokens, requests)
        }
    };
    (@ draft $this:ident $inner:expr) => {
        fn draft(
            &mut $this,
            items: &[$crate::DraftItem],
            depth: usize,
            k: usize,
        ) -> Result<Vec<$crate::DraftCandidates>, $crate::DeviceError> {
            $inner.draft(items, depth, k)
        }
    };
    (@ draft_logits $this:ident $inner:expr) => {
        fn draft_logits(
            &mut $this,
            item: $crate::DraftItem,
        ) -> Result<$crate::DraftLogits, $crate::DeviceError> {
            $inner.draft_logits(item)
        }
    };
    (@ draft_mtp $this:ident $inner:expr) => {
        fn draft_mtp(
            &mut $this,
            items: &[$crate::MtpDraftItem],
            k: usize,
        ) -> Result<Vec<$crate::DraftCandidates>, $crate::DeviceError> {
            $inner.draft_mtp(items, k)
        }
    };
    (@ verify $this:ident $inner:expr) => {
        fn verify(
            &mut $this,
            items: &[$crate::VerifyItem<'_>],
        ) -> Result<Vec<Vec<$crate::LogitsRow>>, $crate::DeviceError> {
            $inner.verify(items)
        }
    };
    (@ begin_verify $this:ident $inner:expr) => {
        fn begin_verify(
            &mut $this,
            items: &[$crate::VerifyItem<'_>],
        ) -> Result<(), $crate::DeviceError> {
            $inner.begin_verify(items)
        }
    };
    (@ finish_verify $this:ident $inner:expr) => {
        fn finish_verify(&mut $this) -> Result<Vec<Vec<$crate::LogitsRow>>, $crate::DeviceError> {
            $inner.finish_verify()
        }
    };
    (@ commit $this:ident $inner:expr) => {
        fn commit(&mut $this, items: &[$crate::CommitItem<'_>]) -> Result<(), $crate::DeviceError> {
            $inner.commit(items)
        }
    };
    (@ discard $this:ident $inner:expr) => {
        fn discard(&mut $this, seq: $crate::SeqId) -> Result<(), $crate::DeviceError> {
            $inner.discard(seq)
        }
    };
    (@ snapshot $this:ident $inner:expr) => {
        fn snapshot(
            &mut $this,
            seq: $crate::SeqId,
            location: $crate::SnapshotLocation,
        ) -> Result<$crate::SnapshotInfo, $crate::DeviceError> {
            $inner.snapshot(seq, location)
        }
    };
    (@ restore $this:ident $inner:expr) => {
        fn restore(
            &mut $this,
            seq: $crate::SeqId,
            snapshot: $crate::SnapshotId,
        ) -> Result<(), $crate::DeviceError> {
            $inner.restore(seq, snapshot)
        }
    };
    (@ free_snapshot $this:ident $inner:expr) => {
        fn free_snapshot(&mut $this, snapshot: $crate::SnapshotId) {
            $inner.free_snapshot(snapshot);
        }
    };
    (@ export $this:ident $inner:expr) => {
        fn export(
            &mut $this,
            snapshot: $crate::SnapshotId,
            sink: &mut dyn std::io::Write,
        ) -> Result<(), $crate::DeviceError> {
            $inner.export(snapshot, sink)
        }
    };
    (@ detach $this:ident $inner:expr) => {
        fn detach(
            &mut $this,
            snapshot: $crate::SnapshotId,
        ) -> Result<Box<dyn $crate::DetachedSnapshot>, $crate::DeviceError> {
            $inner.detach(snapshot)
        }
    };
    (@ import $this:ident $inner:expr) => {
        fn import(
            &mut $this,
            source: &mut dyn std::io::Read,
        ) -> Result<$crate::SnapshotInfo, $crate::DeviceError> {
            $inner.import(source)
        }
    };
    (@ import_at $this:ident $inner:expr) => {
        fn import_at(
            &mut $this,
            source: &dyn $crate::snapshot::ReadAt,
        ) -> Result<$crate::SnapshotInfo, $crate::DeviceError> {
            $inner.import_at(source)
        }
    };
}

impl Runner for Box<dyn Runner> {
    forward_runner!(self => (**self); info, capacity, open, close, prefill, draft, draft_logits,
        draft_mtp, verify, begin_verify, finish_verify, commit, discard, snapshot, restore,
        free_snapshot, detach, export, import, import_at);
}
