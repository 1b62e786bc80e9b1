//! The card against the suite every device must pass, and against the CPU's oracle row by row and layer by
//! layer. Without a card every test says SKIPPED and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod card;

use conformance::compare::{Exactness, Tolerance, compare};
use conformance::specimen::{Layout, Specimen};
use conformance::suite::{self, Subject};
use contract::inspect::Inspect;
use contract::{
    Ask, CommitItem, KvFormat, KvFormats, Limits, NodeIdx, OpenPlan, QuantType, Row, Runner,
    TokenId, Tree, VerifyItem,
};
use cpu::CpuBackend;
use cuda::compile;
use cuda::driver::Gpu;
use cuda::{CudaBackend, Options};

const LIMITS: Limits = Limits {
    sequences: 4,
    context: 600,
    tree_nodes: 64,
    prefill_chunk: 192,
};
/// Fewer buckets, so fewer kernels to compile where there are many models.
const SMALL: Limits = Limits {
    sequences: 1,
    tree_nodes: 24,
    ..LIMITS
};

/// The card, kept open so that opening a runner does not begin with a new context.
struct Bench {
    backend: CudaBackend,
    _gpu: Gpu,
}

fn bench(eager: bool) -> Option<Bench> {
    bench_with(Options {
        eager,
        ..Options::default()
    })
}

fn bench_with(options: Options) -> Option<Bench> {
    let gpu = card::gpu()?;
    let options = Options {
        poison: true,
        compile: compile::Options {
            cache: Some(std::env::temp_dir().join("hearth-test-kernels")),
            ..compile::Options::default()
        },
        ..options
    };
    Some(Bench {
        backend: CudaBackend::with_options(gpu.card().clone(), options),
        _gpu: gpu,
    })
}

/// How far the card may be from the oracle, value by value and in the mean of a row.
#[derive(Debug, Clone, Copy)]
struct Allowance {
    each: Tolerance,
    mean: f32,
}

/// What rounding activations makes of these models' logits, which spread by 2.
///
/// A step multiplies block formats with activations in eight bits, one scale for 256 values. A uniform error of
/// `max / 127` has a deviation of `max / 127 / sqrt(12)`: with the largest of 256 values at 2.8 deviations, as in a
/// normed row, that is 0.6 percent of the row's; at 8, as behind a SwiGLU, 1.8 percent. A dozen such products one
/// after the other, through three layers of random weights with gains up to 1.5, were measured to make 0.09 to
/// 0.14 in the mean of a row on the card, and single values up to 0.6. bfloat16 has 0.11 percent a product:
/// measured 0.027 in the mean. f32 activations show nothing of it, which tells rounding from a fault: there the
/// same plans are within 1e-4.
fn against_the_oracle(ty: QuantType) -> Allowance {
    let allow = |absolute, relative, mean| Allowance {
        each: Tolerance { absolute, relative },
        mean,
    };
    match ty {
        QuantType::F32 => allow(0.01, 0.005, 0.001),
        QuantType::F16 => allow(0.05, 0.01, 0.009),
        QuantType::BF16 => allow(0.15, 0.03, 0.04),
        _ => allow(0.9, 0.15, 0.2),
    }
}

fn tolerance(specimen: &Specimen, kv: KvFormats) -> Tolerance {
    Tolerance::of_logits(specimen.ty)
        .or(Tolerance::of_cache(kv.k))
        .or(Tolerance::of_cache(kv.v))
}

fn keep_laws(bench: &Bench, specimen: &Specimen, k: KvFormat, v: KvFormat) {
    let kv = KvFormats { k, v };
    let subject = Subject {
        backend: &bench.backend,
        specimen,
        kv,
        exactness: Exactness::Within(tolerance(specimen, kv)),
        // Prompts are read with f16 activations, whatever the weights are.
        routes: match specimen.ty {
            QuantType::F32 | QuantType::F16 => Tolerance::NONE,
            ty => against_the_oracle(ty).each,
        },
    };
    if let Err(breach) = suite::run(&subject) {
        panic!("{breach}");
    }
}

#[test]
fn every_layout_keeps_every_law() {
    let Some(bench) = bench(false) else { return };
    for layout in Layout::ALL {
        let specimen = Specimen::new(layout, QuantType::Q4_K, 1);
        keep_laws(&bench, &specimen, KvFormat::F16, KvFormat::F16);
    }
}

#[test]
fn launch_by_launch_keeps_every_law() {
    let Some(bench) = bench(true) else { return };
    let specimen = Specimen::new(Layout::HybridGrouped, QuantType::Q5_K, 4);
    keep_laws(&bench, &specimen, KvFormat::Q8_0, KvFormat::F16);
}

#[test]
fn every_weight_type_keeps_every_law() {
    let Some(bench) = bench(false) else { return };
    for ty in QuantType::ALL {
        let specimen = Specimen::new(Layout::HybridTiled, ty, 2);
        keep_laws(&bench, &specimen, KvFormat::F16, KvFormat::F16);
    }
}

#[test]
fn every_pair_of_cache_formats_keeps_every_law() {
    let Some(bench) = bench(false) else { return };
    let formats = [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0, KvFormat::Q4_0];
    let specimen = Specimen::new(Layout::HybridEven, QuantType::Q6_K, 3);
    for k in formats {
        for v in formats {
            keep_laws(&bench, &specimen, k, v);
        }
    }
}

fn plan(specimen: &Specimen, kv: KvFormats, limits: Limits) -> OpenPlan {
    OpenPlan {
        target: specimen.spec.clone(),
        weights: specimen.weights.clone(),
        draft: None,
        exact: false,
        kv,
        limits,
    }
}

fn oracle() -> CpuBackend {
    CpuBackend::new(cpu::Options {
        reference: true,
        threads: None,
    })
}

fn text(vocab: usize, n: usize, salt: usize) -> Vec<TokenId> {
    let ids = (0..n).map(|i| (i * i * 3 + (5 + salt) * i + 17 * salt + 1) % vocab);
    ids.map(|id| TokenId(id as u32)).collect()
}

/// What two runners are compared in.
struct Pair {
    /// What is tried, for messages.
    what: String,
    allowance: Allowance,
    /// The largest difference seen, in units of what is allowed.
    worst: f32,
    /// The largest mean difference of a row.
    worst_mean: f32,
    /// What is further off than allowed; the first of them tell where it begins.
    faults: Vec<String>,
}

impl Pair {
    fn rows(&mut self, step: &str, found: &[Row], expected: &[Row]) {
        assert_eq!(found.len(), expected.len(), "{} {step}", self.what);
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            self.values(&format!("{step}, row {i}"), &found.raw, &expected.raw);
        }
    }

    /// Single values may be far off where activations are rounded; on the whole they may not.
    fn values(&mut self, step: &str, found: &[f32], expected: &[f32]) {
        let off = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
        let mean = off.sum::<f32>() / found.len().max(1) as f32;
        let most = self.allowance.mean;
        if mean > most {
            let fault = format!(
                "{}, {step}: {mean:e} off in the mean, {most:e} allowed",
                self.what
            );
            self.faults.push(fault);
        }
        self.worst_mean = self.worst_mean.max(mean);
        match compare(found, expected, self.allowance.each) {
            Ok(agreement) => {
                self.worst = self
                    .worst
                    .max(agreement.worst / self.allowance.each.absolute)
            }
            Err(difference) => self
                .faults
                .push(format!("{}, {step}: {difference}", self.what)),
        }
    }

    /// Prints how close it was, and gives 1 if that was not close enough: all models are tried before a test
    /// fails.
    fn end(self) -> usize {
        eprintln!(
            "  {}: worst difference {:.3} of what is allowed, in the mean {:.2e}, {} faults",
            self.what,
            self.worst,
            self.worst_mean,
            self.faults.len()
        );
        for fault in self.faults.iter().take(FAULTS_SHOWN) {
            eprintln!("    {fault}");
        }
        usize::from(!self.faults.is_empty())
    }
}

/// Faults of one model that are shown.
const FAULTS_SHOWN: usize = 6;

fn none_was_faulty(faulty: usize) {
    assert_eq!(faulty, 0, "{faulty} models are further off than allowed");
}

/// A tree of `n` nodes whose node `i` hangs below node `parent(i)`.
fn tree(vocab: usize, n: usize, parent: impl Fn(usize) -> usize) -> Tree {
    let tokens: Vec<TokenId> = (0..n)
        .map(|i| TokenId(((i * 7 + 3) % vocab) as u32))
        .collect();
    let parents: Vec<NodeIdx> = (1..n).map(|i| NodeIdx(parent(i) as u16)).collect();
    Tree::new(&tokens, &parents).unwrap()
}

fn verify(runner: &mut dyn Runner, seq: contract::SeqId, tree: &Tree) -> Vec<Row> {
    let asks = vec![Ask::full(); tree.len()];
    let item = VerifyItem {
        seq,
        tree,
        asks: &asks,
    };
    runner.verify(&[item]).unwrap().pop().unwrap()
}

/// Reads a prompt, verifies and commits trees of many shapes, and compares every row and state on the way.
fn follows_the_oracle(
    bench: &Bench,
    specimen: &Specimen,
    (kv, limits): (KvFormats, Limits),
    allowance: Allowance,
) -> usize {
    let vocab = specimen.spec.vocab;
    let mut pair = Pair {
        what: format!(
            "{}, keys {}, values {}",
            specimen.spec.name,
            kv.k.name(),
            kv.v.name()
        ),
        allowance,
        worst: 0.0,
        worst_mean: 0.0,
        faults: Vec::new(),
    };
    let mut ours = bench
        .backend
        .open_inspected(plan(specimen, kv, limits), &mut |_| {})
        .unwrap();
    let mut judge = oracle()
        .open_inspected(plan(specimen, kv, limits), &mut |_| {})
        .unwrap();
    let prompt = text(vocab, 150, 1);
    let found = ours.hidden_states(&prompt).unwrap();
    let expected = judge.hidden_states(&prompt).unwrap();
    for (layer, (found, expected)) in found.iter().zip(&expected).enumerate() {
        pair.values(&format!("after layer {layer}"), found, expected);
    }
    let (a, b) = (ours.open(600).unwrap(), judge.open(600).unwrap());
    let asks: Vec<(usize, Ask)> = (0..prompt.len()).map(|i| (i, Ask::full())).collect();
    let found = ours.prefill(a, &prompt, &asks).unwrap();
    let expected = judge.prefill(b, &prompt, &asks).unwrap();
    pair.rows("prompt", &found, &expected);
    states(&mut pair, (&mut *ours, a), (&mut *judge, b), specimen);
    let shapes: Vec<(&str, Tree)> = vec![
        ("a root", tree(vocab, 1, |_| 0)),
        ("a chain of 5", tree(vocab, 5, |i| i - 1)),
        ("a star of 8", tree(vocab, 8, |_| 0)),
        ("a bush of 23", tree(vocab, 23, |i| (i - 1) / 2)),
        ("a comb of 31", tree(vocab, 31, |i| i.saturating_sub(2))),
        ("a chain of 64", tree(vocab, 64, |i| i - 1)),
        ("a bush of 64", tree(vocab, 64, |i| i * 2 / 3)),
        ("a second root", tree(vocab, 1, |_| 0)),
    ];
    for (name, tree) in shapes {
        if tree.len() > limits.tree_nodes {
            continue;
        }
        let found = verify(&mut *ours, a, &tree);
        let expected = verify(&mut *judge, b, &tree);
        pair.rows(name, &found, &expected);
        let path = tree.path_to(NodeIdx(tree.len() as u16 - 1));
        ours.commit(&[CommitItem {
            seq: a,
            path: &path,
        }])
        .unwrap();
        judge
            .commit(&[CommitItem {
                seq: b,
                path: &path,
            }])
            .unwrap();
        states(&mut pair, (&mut *ours, a), (&mut *judge, b), specimen);
    }
    // A prompt goes on after what was spoken.
    let more = text(vocab, 70, 5);
    let asks = [(69, Ask::full())];
    let found = ours.prefill(a, &more, &asks).unwrap();
    let expected = judge.prefill(b, &more, &asks).unwrap();
    pair.rows("a second prompt", &found, &expected);
    pair.end()
}

/// Compares what both hold of a sequence.
fn states(
    pair: &mut Pair,
    (ours, a): (&mut dyn Inspect, contract::SeqId),
    (judge, b): (&mut dyn Inspect, contract::SeqId),
    specimen: &Specimen,
) {
    for layer in 0..specimen.spec.layers.len() {
        let found = ours.conv_window(a, layer).unwrap();
        let expected = judge.conv_window(b, layer).unwrap();
        pair.values(&format!("window of layer {layer}"), &found, &expected);
        let found = ours.delta_state(a, layer).unwrap();
        let expected = judge.delta_state(b, layer).unwrap();
        pair.values(&format!("state of layer {layer}"), &found, &expected);
        let found = ours.kv_rows(a, layer).unwrap();
        let expected = judge.kv_rows(b, layer).unwrap();
        pair.values(&format!("keys of layer {layer}"), &found.0, &expected.0);
        pair.values(&format!("values of layer {layer}"), &found.1, &expected.1);
    }
}

const HALF: KvFormats = KvFormats {
    k: KvFormat::F16,
    v: KvFormat::F16,
};
const WHOLE: KvFormats = KvFormats {
    k: KvFormat::F32,
    v: KvFormat::F32,
};

#[test]
fn every_layout_follows_the_oracle() {
    let mut faulty = 0;
    for eager in [true, false] {
        let Some(bench) = bench(eager) else { return };
        for layout in Layout::ALL {
            let specimen = Specimen::new(layout, QuantType::F32, 6);
            let allowance = against_the_oracle(QuantType::F32);
            faulty += follows_the_oracle(&bench, &specimen, (WHOLE, LIMITS), allowance);
        }
    }
    none_was_faulty(faulty);
}

#[test]
fn prompts_read_as_chains_follow_the_oracle() {
    let mut faulty = 0;
    let Some(bench) = bench_with(Options {
        eager: true,
        chains: true,
        ..Options::default()
    }) else {
        return;
    };
    for layout in Layout::ALL {
        let specimen = Specimen::new(layout, QuantType::F32, 6);
        let allowance = against_the_oracle(QuantType::F32);
        faulty += follows_the_oracle(&bench, &specimen, (WHOLE, LIMITS), allowance);
    }
    none_was_faulty(faulty);
}

#[test]
fn every_weight_type_follows_the_oracle() {
    let mut faulty = 0;
    let Some(bench) = bench(false) else { return };
    for ty in QuantType::ALL {
        let specimen = Specimen::new(Layout::HybridEven, ty, 7);
        faulty += follows_the_oracle(&bench, &specimen, (HALF, SMALL), against_the_oracle(ty));
    }
    none_was_faulty(faulty);
}

#[test]
fn every_cache_format_follows_the_oracle() {
    let mut faulty = 0;
    let Some(bench) = bench(false) else { return };
    for format in [KvFormat::F16, KvFormat::Q8_0, KvFormat::Q4_0] {
        for layout in [Layout::Plain, Layout::HybridTiled] {
            let specimen = Specimen::new(layout, QuantType::F32, 8);
            let kv = KvFormats {
                k: format,
                v: format,
            };
            let allowance = match format {
                KvFormat::F16 => against_the_oracle(QuantType::F16),
                _ => against_the_oracle(QuantType::Q8_0),
            };
            faulty += follows_the_oracle(&bench, &specimen, (kv, SMALL), allowance);
        }
    }
    none_was_faulty(faulty);
}

#[test]
fn two_hundred_steps_do_not_drift() {
    let mut faulty = 0;
    let Some(bench) = bench(false) else { return };
    for layout in [Layout::HybridEven, Layout::HybridGrouped] {
        let specimen = Specimen::new(layout, QuantType::F32, 9);
        let mut ours = bench
            .backend
            .open_inspected(plan(&specimen, WHOLE, SMALL), &mut |_| {})
            .unwrap();
        let mut judge = oracle()
            .open_inspected(plan(&specimen, WHOLE, SMALL), &mut |_| {})
            .unwrap();
        let mut pair = Pair {
            what: specimen.spec.name.clone(),
            allowance: against_the_oracle(QuantType::F32),
            worst: 0.0,
            worst_mean: 0.0,
            faults: Vec::new(),
        };
        let (a, b) = (ours.open(600).unwrap(), judge.open(600).unwrap());
        for (i, token) in text(specimen.spec.vocab, 200, 3).into_iter().enumerate() {
            let tree = Tree::root(token);
            let found = verify(&mut *ours, a, &tree);
            let expected = verify(&mut *judge, b, &tree);
            pair.rows(&format!("step {i}"), &found, &expected);
            let path = tree.path_to(NodeIdx::ROOT);
            ours.commit(&[CommitItem {
                seq: a,
                path: &path,
            }])
            .unwrap();
            judge
                .commit(&[CommitItem {
                    seq: b,
                    path: &path,
                }])
                .unwrap();
        }
        states(&mut pair, (&mut *ours, a), (&mut *judge, b), &specimen);
        faulty += pair.end();
    }
    none_was_faulty(faulty);
}

/// Every kind of pass once, small enough for a memory checker.
#[test]
fn a_short_run_of_every_pass() {
    let Some(bench) = bench(true) else { return };
    let specimen = Specimen::new(Layout::HybridTiled, QuantType::Q4_K, 11);
    let kv = KvFormats {
        k: KvFormat::Q8_0,
        v: KvFormat::F16,
    };
    let opened = bench
        .backend
        .open_inspected(plan(&specimen, kv, SMALL), &mut |_| {});
    let mut runner = opened.unwrap();
    let seq = runner.open(300).unwrap();
    let prompt = text(specimen.spec.vocab, 70, 2);
    let asks = [(0, Ask::top(3)), (69, Ask::full())];
    runner.prefill(seq, &prompt, &asks).unwrap();
    for n in [1, 24] {
        let tree = tree(specimen.spec.vocab, n, |i| i / 2);
        let rows = verify(&mut *runner, seq, &tree);
        assert!(rows.iter().all(|row| row.raw.iter().all(|x| x.is_finite())));
        let path = tree.path_to(NodeIdx(n as u16 - 1));
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
    let saved = runner.snapshot(seq, contract::Place::Host).unwrap();
    runner.restore(seq, saved.id).unwrap();
}
