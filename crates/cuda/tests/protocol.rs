//! What the card's runner answers when it is called wrongly or asked for more than there is: an error that says
//! why. Without a card every test but the plans' says SKIPPED and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod card;

use conformance::specimen::{Layout, Specimen};
use contract::{
    Ask, Backend, CommitItem, DeviceError, KvFormat, KvFormats, Limits, NodeIdx, OpenPlan, Place,
    QuantType, Runner, SeqId, SnapshotId, TokenId, Tree, VerifyItem,
};
use cuda::{Card, CudaBackend, Options, compile};

const LIMITS: Limits = Limits {
    sequences: 2,
    context: 100,
    tree_nodes: 4,
    prefill_chunk: 64,
};

fn plan() -> OpenPlan {
    let specimen = Specimen::new(Layout::HybridTiled, QuantType::Q8_0, 1);
    OpenPlan {
        target: specimen.spec,
        weights: specimen.weights,
        draft: None,
        exact: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: LIMITS,
    }
}

fn options() -> Options {
    Options {
        compile: compile::Options {
            cache: Some(std::env::temp_dir().join("hearth-test-kernels")),
            ..compile::Options::default()
        },
        ..Options::default()
    }
}

fn open() -> Option<Box<dyn Runner>> {
    let gpu = card::gpu()?;
    let backend = CudaBackend::with_options(gpu.card().clone(), options());
    Some(backend.open(plan(), &mut |_| {}).unwrap())
}

fn misuse<T: std::fmt::Debug>(result: Result<T, DeviceError>, part: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, DeviceError::Misuse { .. }), "{error}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn broken_calls_are_answered_and_change_nothing() {
    let Some(mut runner) = open() else { return };
    let seq = runner.open(10).unwrap();
    let gone = SeqId(999);
    let beyond = [TokenId(263)];
    misuse(runner.prefill(seq, &beyond, &[]), "263");
    let eleven = [TokenId(1); 11];
    misuse(runner.prefill(seq, &eleven, &[]), "10 tokens");
    let late = [(1, Ask::full())];
    misuse(runner.prefill(seq, &eleven[..1], &late), "asks");
    assert!(matches!(
        runner.prefill(gone, &eleven[..1], &[]),
        Err(DeviceError::UnknownSequence(_))
    ));
    let tree = Tree::chain(&eleven[..4]).unwrap();
    let asks = vec![Ask::NOTHING; 4];
    let item = VerifyItem {
        seq,
        tree: &tree,
        asks: &asks,
    };
    misuse(runner.verify(&[item, item]), "twice");
    misuse(runner.discard(seq), "nothing pending");
    runner.verify(&[item]).unwrap();
    misuse(runner.verify(&[item]), "pending");
    misuse(runner.prefill(seq, &eleven[..1], &[]), "pending");
    misuse(runner.snapshot(seq, Place::Host), "pending");
    let path = tree.path_to(NodeIdx(3));
    runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    misuse(
        runner.commit(&[CommitItem { seq, path: &path }]),
        "nothing pending",
    );
    misuse(runner.draft(&[], 1, 1), "no draft");
    misuse(runner.score(&eleven, &mut |_| true), "no scorer");
    assert!(matches!(
        runner.restore(seq, SnapshotId(77)),
        Err(DeviceError::UnknownSnapshot(_))
    ));
    runner.close(gone);
    runner.free_snapshot(SnapshotId(77));
}

#[test]
fn a_sequence_may_be_filled_to_its_last_token_and_no_further() {
    let Some(mut runner) = open() else { return };
    let seq = runner.open(10).unwrap();
    runner.prefill(seq, &[TokenId(1); 9], &[]).unwrap();
    let tree = Tree::chain(&[TokenId(2); 4]).unwrap();
    let asks = vec![Ask::top(2); 4];
    let item = VerifyItem {
        seq,
        tree: &tree,
        asks: &asks,
    };
    let rows = runner.verify(&[item]).unwrap();
    assert!(rows[0].iter().all(|row| row.ids.len() == 2));
    let too_far = tree.path_to(NodeIdx(1));
    let item = CommitItem {
        seq,
        path: &too_far,
    };
    misuse(runner.commit(&[item]), "10 tokens");
    let last = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &last }]).unwrap();
    misuse(runner.prefill(seq, &[TokenId(1)], &[]), "10 tokens");
}

/// A card that no test opens.
fn home_card() -> Card {
    Card {
        ordinal: 0,
        name: "a home card".to_owned(),
        capability: (8, 6),
        multiprocessors: 82,
        total_bytes: 24 << 30,
    }
}

fn unsupported(plan: &OpenPlan, part: &str) {
    let error = CudaBackend::new(home_card()).estimate(plan).unwrap_err();
    assert!(matches!(error, DeviceError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn what_the_card_cannot_run_is_refused_by_name_before_anything_is_loaded() {
    let mut wrong = plan();
    wrong.kv.v = KvFormat::Q5_1;
    unsupported(&wrong, "storing values as q5_1");
    let mut wrong = plan();
    wrong.limits.sequences = 0;
    unsupported(&wrong, "a limit of 0");
    let mut wrong = plan();
    wrong.limits.tree_nodes = 65;
    unsupported(&wrong, "use at most 64");
    // Its tiles take 48 KiB, and a ring holds two.
    let specimen = Specimen::new(Layout::HybridTiled, QuantType::Q2_K, 1);
    wrong = plan();
    (wrong.target, wrong.weights) = (specimen.spec, specimen.weights);
    unsupported(&wrong, "multiplying Q2_K weights");
}

#[test]
fn a_plan_beyond_the_limit_is_refused_with_the_context_that_fits() {
    let Some(gpu) = card::gpu() else { return };
    let limited = Options {
        vram_limit: Some(64 << 20),
        ..options()
    };
    let backend = CudaBackend::with_options(gpu.card().clone(), limited);
    let mut long = plan();
    long.limits.context = 1 << 20;
    let error = backend.open(long.clone(), &mut |_| {}).map(|_| ());
    let text = error.unwrap_err().to_string();
    assert!(text.contains("67108864 that may be used"), "{text}");
    let fits = text.split("a context of ").last().unwrap();
    let fits: usize = fits.split(' ').next().unwrap().parse().unwrap();
    long.limits.context = fits;
    let runner = backend.open(long.clone(), &mut |_| {}).unwrap();
    assert_eq!(runner.info().memory, backend.estimate(&long).unwrap());
    assert!(runner.info().memory.total_bytes() <= 64 << 20);
    long.limits.context = fits + 512;
    assert!(backend.open(long, &mut |_| {}).is_err());
}
