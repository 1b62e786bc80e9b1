//! The suite over the fake: a runner that keeps its promises passes, and one that breaks any of them does not.

use conformance::compare::{Precision, Tolerance};
use conformance::fake::{FakeBackend, FakeSpec, Flaw};
use conformance::suite::{Case, PROPERTIES, run};
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
fn a_runner_that_keeps_its_promises_passes() {
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
        "cuts at aligned places do not show",
        Flaw::ChunkingChangesResult,
    ),
    ("asking changes nothing", Flaw::RequestsChangeResult),
    (
        "reading is speaking, up to rounding",
        Flaw::PrefillDiffersFromDecode,
    ),
    (
        "prompts read in turns do not mix",
        Flaw::PrefillDisturbsOthers,
    ),
    ("a node hears what its path would", Flaw::SiblingsVisible),
    (
        "a node hears what its path would",
        Flaw::TreeWidthChangesResult,
    ),
    ("siblings do not see each other", Flaw::SiblingsVisible),
    ("a batch is its members alone", Flaw::BatchChangesResult),
    ("a commit is its nodes one by one", Flaw::CommitsWholeTree),
    (
        "a commit is its nodes one by one",
        Flaw::CommitDropsLastNode,
    ),
    (
        "a commit of many is each alone",
        Flaw::BatchCommitKeepsRoots,
    ),
    ("a discard leaves no trace", Flaw::DiscardCommits),
    ("a closed sequence leaves no trace", Flaw::SlotNotCleared),
    ("restoring is identity", Flaw::RestoreDropsLastToken),
    ("restoring is identity", Flaw::SnapshotNotCopied),
    ("a snapshot is a copy", Flaw::SnapshotNotCopied),
    ("a snapshot is a copy", Flaw::RestoreDropsLastToken),
    (
        "conversations with one beginning do not mix",
        Flaw::SnapshotNotCopied,
    ),
    (
        "conversations with one beginning do not mix",
        Flaw::RestoreDropsLastToken,
    ),
    (
        "export then import is identity",
        Flaw::ImportDropsFirstToken,
    ),
    ("damaged snapshots are refused", Flaw::ImportUnchecked),
    ("what was freed is gone", Flaw::FreedSnapshotUsable),
    ("a top row is the head of the full row", Flaw::TopKUnordered),
    ("edits mean what they say", Flaw::EditsIgnored),
    ("sums are those of the row", Flaw::RawLseEdited),
    ("room is given and given back", Flaw::CloseLeaks),
    ("a refusal changes nothing", Flaw::RefusedCallChangesState),
    ("a full pool costs nobody anything", Flaw::PoolUnlimited),
    ("a full pool costs nobody anything", Flaw::PoolLeaks),
    ("a broken call is answered", Flaw::InvalidCallAccepted),
    ("the last token is the last", Flaw::MaxLenIgnored),
];

#[test]
fn every_law_can_be_broken_and_notices() {
    for (property, keep) in PROPERTIES {
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
