//! The suite over the fake: a runner that keeps its promises passes, and one that breaks any of
//! them does not.

use conformance::compare::{Precision, Tolerance};
use conformance::fake::{FakeBackend, FakeSpec, Flaw};
use conformance::suite::{Case, properties, run};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{KvFormat, KvFormats, QuantType};

fn with<T>(spec: FakeSpec, precision: Precision, keep: impl FnOnce(&Case<'_>) -> T) -> T {
    keep(&Case {
        backend: &FakeBackend { spec },
        model: &SyntheticModel::new(SyntheticLayout::Plain, QuantType::F32, 1),
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::Q8_0,
        },
        precision,
        prefill_tolerance: Tolerance::NONE,
        batch_invariant: false,
    })
}

#[test]
fn correct_runners_satisfy_every_property() {
    for prefill_align in [1, 16, 64] {
        let spec = FakeSpec {
            prefill_align,
            ..FakeSpec::default()
        };
        with(spec.clone(), Precision::BitExact, run).unwrap();
        let loose = Precision::Within(Tolerance::REORDERED);
        with(spec, loose, run).unwrap();
    }
}

/// A property, and a flaw that offends it.
const FLAW_OF_PROPERTY: [(&str, Flaw); 31] = [
    (
        "aligned prefill chunks change no bit",
        Flaw::ChunkingChangesResult,
    ),
    ("logits requests change nothing", Flaw::RequestsChangeResult),
    (
        "prefill equals decode up to rounding",
        Flaw::PrefillDiffersFromDecode,
    ),
    (
        "interleaved prefills are independent",
        Flaw::PrefillDisturbsOthers,
    ),
    (
        "tree nodes equal decoding their path",
        Flaw::SiblingsVisible,
    ),
    (
        "tree nodes equal decoding their path",
        Flaw::TreeWidthChangesResult,
    ),
    ("siblings are independent", Flaw::SiblingsVisible),
    (
        "batched verify equals single verify",
        Flaw::BatchChangesResult,
    ),
    (
        "committing a path equals decoding it",
        Flaw::CommitsWholeTree,
    ),
    (
        "committing a path equals decoding it",
        Flaw::CommitDropsLastNode,
    ),
    (
        "batched commit equals single commit",
        Flaw::BatchCommitKeepsRoots,
    ),
    ("discard leaves no trace", Flaw::DiscardCommits),
    ("closed sequences leave no trace", Flaw::SlotNotCleared),
    ("restore is bit-identical", Flaw::RestoreDropsLastToken),
    ("restore is bit-identical", Flaw::SnapshotNotCopied),
    (
        "snapshots are independent of their sequence",
        Flaw::SnapshotNotCopied,
    ),
    (
        "snapshots are independent of their sequence",
        Flaw::RestoreDropsLastToken,
    ),
    (
        "conversations with a shared prefix are independent",
        Flaw::SnapshotNotCopied,
    ),
    (
        "conversations with a shared prefix are independent",
        Flaw::RestoreDropsLastToken,
    ),
    (
        "import of an export is bit-identical",
        Flaw::ImportDropsFirstToken,
    ),
    ("damaged snapshots are refused", Flaw::ImportUnchecked),
    ("freed snapshots are unknown", Flaw::FreedSnapshotUsable),
    (
        "top-k rows equal the best of the full row",
        Flaw::TopKUnordered,
    ),
    (
        "logits processors match the reference",
        Flaw::ProcessorsIgnored,
    ),
    ("log-sum-exps cover the whole row", Flaw::RawLseEdited),
    ("closing returns capacity", Flaw::CloseLeaks),
    (
        "refused calls change nothing",
        Flaw::RefusedCallChangesState,
    ),
    (
        "an exhausted pool refuses without side effects",
        Flaw::PoolUnlimited,
    ),
    (
        "an exhausted pool refuses without side effects",
        Flaw::PoolLeaks,
    ),
    ("invalid calls are refused", Flaw::InvalidCallAccepted),
    ("max_len is the exact limit", Flaw::MaxLenIgnored),
];

#[test]
fn every_property_detects_a_flaw() {
    for (property, keep) in properties() {
        let mut offended = false;
        for (_, flaw) in FLAW_OF_PROPERTY
            .iter()
            .filter(|(name, _)| *name == property)
        {
            let spec = FakeSpec {
                flaw: Some(*flaw),
                ..FakeSpec::default()
            };
            let kept = with(spec, Precision::BitExact, keep);
            assert!(kept.is_err(), "{property} holds in spite of {flaw:?}");
            offended = true;
        }
        assert!(offended, "nothing shows that {property} can fail");
    }
}
