//! The suite over the fake: a runner that keeps its promises passes, and one that breaks any of them does not.

use conformance::compare::{Exactness, Tolerance};
use conformance::fake::{FakeBackend, FakeSpec, Flaw};
use conformance::specimen::{Layout, Specimen};
use conformance::suite::{LAWS, Subject, run};
use contract::{KvFormat, KvFormats, QuantType};

fn with<T>(spec: FakeSpec, exactness: Exactness, keep: impl FnOnce(&Subject<'_>) -> T) -> T {
    keep(&Subject {
        backend: &FakeBackend { spec },
        specimen: &Specimen::new(Layout::Plain, QuantType::F32, 1),
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::Q8_0,
        },
        exactness,
        routes: Tolerance::NONE,
        exact: false,
    })
}

#[test]
fn a_runner_that_keeps_its_promises_passes() {
    for prefill_align in [1, 16, 64] {
        let spec = FakeSpec {
            prefill_align,
            ..FakeSpec::default()
        };
        with(spec.clone(), Exactness::Bits, run).unwrap();
        let loose = Exactness::Within(Tolerance::REORDERED);
        with(spec, loose, run).unwrap();
    }
}

/// A law, and a flaw that offends it.
const OFFENCES: [(&str, Flaw); 31] = [
    ("cuts at aligned places do not show", Flaw::CutsShow),
    ("asking changes nothing", Flaw::AsksShow),
    ("reading is speaking, up to rounding", Flaw::ReadingOff),
    ("prompts read in turns do not mix", Flaw::TurnsMix),
    ("a node hears what its path would", Flaw::SiblingsSeen),
    ("a node hears what its path would", Flaw::WidthShows),
    ("siblings do not see each other", Flaw::SiblingsSeen),
    ("a batch is its members alone", Flaw::NeighboursShow),
    ("a commit is its nodes one by one", Flaw::WholeTreeKept),
    ("a commit is its nodes one by one", Flaw::LastNodeForgotten),
    ("a commit of many is each alone", Flaw::SharedCommitShort),
    ("a discard leaves no trace", Flaw::DiscardKept),
    ("a closed sequence leaves no trace", Flaw::SlotDirty),
    ("restoring is identity", Flaw::RestoreShort),
    ("restoring is identity", Flaw::SnapshotAlive),
    ("a snapshot is a copy", Flaw::SnapshotAlive),
    ("a snapshot is a copy", Flaw::RestoreShort),
    (
        "conversations with one beginning do not mix",
        Flaw::SnapshotAlive,
    ),
    (
        "conversations with one beginning do not mix",
        Flaw::RestoreShort,
    ),
    ("export then import is identity", Flaw::ImportShort),
    ("damaged snapshots are refused", Flaw::ImportTrusting),
    ("what was freed is gone", Flaw::FreedStays),
    ("a top row is the head of the full row", Flaw::TopUnordered),
    ("edits mean what they say", Flaw::EditsIgnored),
    ("sums are those of the row", Flaw::RawLseEdited),
    ("room is given and given back", Flaw::CloseKeeps),
    ("a refusal changes nothing", Flaw::RefusalMoves),
    ("a full pool costs nobody anything", Flaw::PoolBottomless),
    ("a full pool costs nobody anything", Flaw::PoolKept),
    ("a broken call is answered", Flaw::MisuseTaken),
    ("the last token is the last", Flaw::LengthIgnored),
];

#[test]
fn every_law_can_be_broken_and_notices() {
    for (law, keep) in LAWS {
        let mut offended = false;
        for (_, flaw) in OFFENCES.iter().filter(|(name, _)| *name == law) {
            let spec = FakeSpec {
                flaw: Some(*flaw),
                ..FakeSpec::default()
            };
            let kept = with(spec, Exactness::Bits, keep);
            assert!(kept.is_err(), "{law} holds in spite of {flaw:?}");
            offended = true;
        }
        assert!(offended, "nothing shows that {law} can fail");
    }
}
