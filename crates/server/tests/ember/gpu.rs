//! Speculation on a GPU with the bundled pair: text, probabilities, acceptance and states of tree
//! decoding compared with plain decoding. Run it on any machine with a GPU: `cargo test --release
//! -p server --test ember gpu -- --nocapture`.
//!
//! With batch-invariant numerics, tree decoding gives the bits of plain decoding. With the fastest
//! numerics it does not, so texts may diverge where two tokens nearly tie. The teacher-forced test
//! measures the logit differences on the same text first.

#![allow(
    clippy::print_stderr,
    reason = "prints figures and notices of skipped tests"
)]

#[path = "../../../cuda/tests/fixtures/gpu_class.rs"]
mod gpu_class;

use std::time::Instant;

use contract::{
    Backend, CommitItem, DraftItem, LogitsRequest, NodeIdx, Runner, SeqId, TokenId, Tree,
    VerifyItem,
};
use cuda::{CudaBackend, Numerics, Options, compile};
use decode::{
    Event, GenerationParams, Job, JobId, Sampling, Scheduler, SchedulerConfig, SchedulerState,
    SpeculationConfig,
};

use crate::draft::{acceptance, config_with_draft, feed};
use crate::drift::{Difference, Drift, STEPS, StoredPrecision};
use crate::golden::FAST;
use crate::head::check_head;
use crate::own_drafts::check_own_drafts;
use crate::pool::check_small_pool;
use crate::properties::{check_budgets, prompts};

const PROMPTS: usize = 200;
const MAX_TOKENS: usize = 128;
/// At most one divergence per this many tokens is allowed.
const RARE: usize = 2000;

/// The first GPU, or `None` with a printed notice.
fn gpu() -> Option<CudaBackend> {
    gpu_with_numerics(None)
}

/// The first GPU with default `numerics` for plans that do not require batch invariance.
fn gpu_with_numerics(numerics: Option<Numerics>) -> Option<CudaBackend> {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test").to_owned();
    let gpus = match cuda::probe() {
        Ok(gpus) => gpus,
        Err(absence) => {
            eprintln!("SKIPPED {name}: no CUDA GPU: {absence}");
            return None;
        }
    };
    let options = Options {
        numerics,
        compile: compile::Options {
            cache: Some(std::env::temp_dir().join("hearth-test-kernels")),
            ..compile::Options::default()
        },
        ..Options::default()
    };
    let gpu = gpu_class::from_environment(gpus.into_iter().next()?);
    Some(CudaBackend::with_options(gpu, options))
}

fn open(gpu: &CudaBackend, batch_invariant: bool) -> Box<dyn Runner> {
    let mut config = config_with_draft(None, FAST);
    config.limits.sequences = 4;
    config.batch_invariant = batch_invariant;
    gpu.open(config, &mut |_| {}).unwrap()
}

/// Greedy continuations of the prompts by trees of 22 nodes or one token at a time, and tokens per
/// step.
fn generate(
    runner: Box<dyn Runner>,
    prompts: &[Vec<TokenId>],
    (trees, together): (bool, usize),
) -> (Vec<Vec<TokenId>>, f64) {
    let loaded = model::load(&crate::golden::ember("ember.gguf")).unwrap();
    let config = SchedulerConfig {
        max_sequences: together,
        queue_limit: usize::MAX,
        eos: loaded.vocab.eos,
        speculation: SpeculationConfig::default(),
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(runner, config);
    for (i, prompt) in prompts.iter().enumerate() {
        let settings = GenerationParams {
            sampling: Sampling::greedy(),
            max_tokens: MAX_TOKENS,
            // The small model ends early; a longer text compares more tokens.
            ignore_eos: true,
            speculate: trees,
            ..GenerationParams::default()
        };
        scheduler
            .submit(Job {
                id: JobId(i as u64),
                prompt: prompt.as_slice().into(),
                choices: 1,
                params: settings,
                priority: 0,
            })
            .unwrap();
    }
    let mut generated = vec![Vec::new(); prompts.len()];
    let mut events = Vec::new();
    while scheduler.step(&mut events).unwrap() != SchedulerState::Idle || !events.is_empty() {
        for (id, event) in events.drain(..) {
            match event {
                Event::Tokens { tokens, .. } => {
                    generated[id.0 as usize].extend(tokens.iter().map(|token| token.id));
                }
                Event::Failed { error } => panic!("{id}: {error}"),
                _ => {}
            }
        }
    }
    let stats = scheduler.stats();
    let after_first = stats.generated_tokens - prompts.len() as u64;
    // Each sequence of a decode step counts as one step.
    (generated, after_first as f64 / stats.batch_size_sum as f64)
}

/// Full rows of logits `[text]` along a text, one after each token, from single steps.
fn plain_rows(runner: &mut dyn Runner, seq: SeqId, text: &[TokenId]) -> Vec<Vec<f32>> {
    let one = |token: &TokenId| {
        let tree = Tree::root(*token);
        let requests = [LogitsRequest::full()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        let row = runner.verify(&[item]).unwrap().remove(0).remove(0);
        let path = tree.path_to(NodeIdx::ROOT);
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
        row.raw
    };
    text.iter().map(one).collect()
}

/// The same rows from trees: the text's next tokens as a chain, the draft's candidates as siblings.
fn tree_rows(runner: &mut dyn Runner, seq: SeqId, text: &[TokenId]) -> Vec<Vec<f32>> {
    let depth = runner.info().draft_depth.unwrap();
    let (mut rows, mut at) = (Vec::with_capacity(text.len()), 0);
    while at < text.len() {
        let drafted = runner
            .draft(
                &[DraftItem {
                    seq,
                    root: text[at],
                }],
                depth,
                3,
            )
            .unwrap();
        // Accepted paths of each length from 1 to 8 cover every node of a tree.
        let keep = (1 + at % 8).min(text.len() - at);
        let mut tree = Tree::root(text[at]);
        let mut path = vec![NodeIdx::ROOT];
        for (i, &token) in text[at + 1..].iter().take(7).enumerate() {
            let parent = path[i];
            for rank in 0..2 {
                let beside = drafted[0].ids[i * 3 + rank];
                if beside != token && tree.child_with(parent, beside).is_none() {
                    tree.push(parent, beside).unwrap();
                }
            }
            path.push(tree.push(parent, token).unwrap());
        }
        let requests = vec![LogitsRequest::full(); tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        let mut found = runner.verify(&[item]).unwrap().remove(0);
        let kept = tree.path_to(path[keep - 1]);
        for node in kept.nodes() {
            rows.push(std::mem::take(&mut found[node.index()].raw));
        }
        runner.commit(&[CommitItem { seq, path: &kept }]).unwrap();
        at += keep;
    }
    rows
}

/// `KL(p || q)` of two rows of logits, in f64.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let lse = |row: &[f32]| {
        let most = row
            .iter()
            .fold(f64::NEG_INFINITY, |m, x| m.max(f64::from(*x)));
        most + row
            .iter()
            .map(|x| (f64::from(*x) - most).exp())
            .sum::<f64>()
            .ln()
    };
    let (a, b) = (lse(p), lse(q));
    let terms = p.iter().zip(q).map(|(p, q)| {
        let (p, q) = (f64::from(*p) - a, f64::from(*q) - b);
        p.exp() * (p - q)
    });
    terms.sum()
}

/// Mean `KL(plain || tree)` and the largest logit difference, teacher-forced over texts of prompts.
fn teacher_forced(
    gpu: &CudaBackend,
    prompts: &[Vec<TokenId>],
    generated: &[Vec<TokenId>],
) -> (f64, f32) {
    let mut runner = open(gpu, false);
    let (mut sum, mut n, mut noise) = (0.0, 0, 0.0_f32);
    for (prompt, text) in prompts.iter().zip(generated).step_by(5) {
        let mut rows = Vec::new();
        for trees in [false, true] {
            let seq = runner.open(1024).unwrap();
            runner.prefill(seq, prompt, &[]).unwrap();
            rows.push(if trees {
                tree_rows(&mut *runner, seq, text)
            } else {
                plain_rows(&mut *runner, seq, text)
            });
            runner.close(seq);
        }
        for (plain, tree) in rows[0].iter().zip(&rows[1]) {
            sum += divergence(plain, tree);
            n += 1;
            let off = plain.iter().zip(tree).map(|(a, b)| (a - b).abs());
            noise = off.fold(noise, f32::max);
        }
    }
    assert!(n > 4000, "only {n} rows were compared");
    (sum / f64::from(n), noise)
}

/// Logit lead of the best token over `other` after a prompt and the beginning of a text, by single
/// steps.
fn lead(gpu: &CudaBackend, prompt: &[TokenId], text: &[TokenId], other: TokenId) -> f32 {
    let mut runner = open(gpu, false);
    let seq = runner.open(1024).unwrap();
    let requests = [(prompt.len() - 1, LogitsRequest::full())];
    let first = runner
        .prefill(seq, prompt, &requests)
        .unwrap()
        .remove(0)
        .raw;
    let row = match text {
        [] => first,
        [before @ .., last] => {
            before
                .iter()
                .for_each(|token| feed(&mut *runner, seq, *token));
            plain_rows(&mut *runner, seq, &[*last]).remove(0)
        }
    };
    row.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x)) - row[other.index()]
}

#[test]
fn fastest_numerics_diverge_from_plain_decoding_only_at_near_ties() {
    let Some(gpu) = gpu_with_numerics(Some(Numerics::Fastest)) else {
        return;
    };
    let prompts: Vec<Vec<TokenId>> = prompts().into_iter().take(PROMPTS).collect();
    let start = Instant::now();
    let (plain, _) = generate(open(&gpu, false), &prompts, (false, 4));
    let plainly = start.elapsed();
    let (tree, per_step) = generate(open(&gpu, false), &prompts, (true, 4));
    let (kl, noise) = teacher_forced(&gpu, &prompts, &plain);
    eprintln!(
        "  plain {plainly:.1?}, with trees {:.1?}, {per_step:.2} tokens per step; teacher-forced KL {kl:.2e}, logits differ \
         by at most {noise:.2e}",
        start.elapsed() - plainly
    );
    let (mut diverged, mut compared) = (0, 0);
    for (i, (plain, tree)) in plain.iter().zip(&tree).enumerate() {
        assert_eq!(plain.len(), MAX_TOKENS, "prompt {i}");
        let same = plain.iter().zip(tree).take_while(|(a, b)| a == b).count();
        compared += MAX_TOKENS.min(same + 1);
        if same < MAX_TOKENS {
            diverged += 1;
            let lead = lead(&gpu, &prompts[i], &plain[..same], tree[same]);
            eprintln!(
                "  prompt {i} diverges at token {same}, where the best token leads by {lead:.2e}"
            );
            assert!(
                lead <= 2.0 * noise,
                "prompt {i}, token {same}: {lead} with a noise of {noise}"
            );
        }
    }
    eprintln!("  {diverged} of {PROMPTS} texts diverge, in {compared} tokens");
    assert!(per_step > 1.5, "{per_step} tokens per step");
    assert!(kl <= 1e-5, "KL {kl}");
    assert!(
        diverged * RARE <= compared,
        "{diverged} divergences in {compared} tokens"
    );
}

#[test]
fn trees_on_gpu_match_plain_decoding_alone_and_batched() {
    let Some(gpu) = gpu() else { return };
    assert!(open(&gpu, false).info().batch_invariant);
    let prompts: Vec<Vec<TokenId>> = prompts().into_iter().take(PROMPTS).collect();
    let (plain, _) = generate(open(&gpu, false), &prompts, (false, 4));
    let (tree, per_step) = generate(open(&gpu, false), &prompts, (true, 4));
    let (alone, _) = generate(open(&gpu, false), &prompts[..PROMPTS / 5], (true, 1));
    let diverged = plain.iter().zip(&tree).filter(|(a, b)| a != b).count();
    eprintln!("  {diverged} of {PROMPTS} texts diverge, {per_step:.2} tokens per step");
    assert!(per_step > 1.5, "{per_step} tokens per step");
    assert_eq!(plain, tree);
    assert_eq!(plain[..alone.len()], alone);
}

#[test]
fn budgets_batches_and_cancellations_on_gpu_change_no_token() {
    let Some(gpu) = gpu() else { return };
    check_budgets(&gpu, false, (0..64).step_by(9));
}

#[test]
fn preempted_sequences_on_gpu_match_runs_alone() {
    let Some(gpu) = gpu() else { return };
    check_small_pool(&gpu, false);
}

#[test]
fn drafts_of_a_head_on_gpu_change_no_text() {
    let Some(gpu) = gpu() else { return };
    check_head(&gpu);
}

#[test]
fn every_own_draft_on_gpu_changes_no_text() {
    let Some(gpu) = gpu() else { return };
    check_own_drafts(&gpu);
}

#[test]
fn acceptance_on_gpu_matches_the_independent_implementation() {
    let Some(gpu) = gpu() else { return };
    for (kind, found, expected) in acceptance(&gpu) {
        let off = (found as f64 - expected).abs() / expected;
        eprintln!(
            "  {kind}: {found} accepted, {expected} in PyTorch, {:.2} % off",
            100.0 * off
        );
        assert!(off < 0.02, "{kind}: {found} accepted, {expected} expected");
    }
}

#[test]
fn states_on_gpu_after_500_tree_steps_match_plain_decoding() {
    let Some(gpu) = gpu() else { return };
    let drift = Drift::of(&gpu, false, StoredPrecision::AsShipped);
    let worst = Difference::worst(&drift.end);
    eprintln!(
        "  {STEPS} steps of {:.2} tokens: worst {worst}",
        drift.per_step()
    );
    assert!(drift.per_step() > 1.2);
    assert!(worst.length <= 1e-4, "{worst:?}");
    // Batch-invariant numerics differ in no bit.
    assert_eq!(worst.largest, 0.0);
}

#[test]
fn fastest_numerics_states_drift_no_more_than_plain_decoding() {
    let Some(gpu) = gpu_with_numerics(Some(Numerics::Fastest)) else {
        return;
    };
    let drift = Drift::of(&gpu, false, StoredPrecision::AsShipped);
    let order = drift.of_another_order(&gpu);
    let (first, worst) = (drift.end[0], Difference::worst(&drift.end));
    let (quarter, order) = (Difference::worst(&drift.quarter), Difference::worst(&order));
    eprintln!("  {STEPS} steps of {:.2} tokens", drift.per_step());
    eprintln!("  first layer {first}; worst {worst}");
    eprintln!("  after a quarter of the steps: worst {quarter}");
    eprintln!("  plain decoding, attention in another summation order: worst {order}");
    for (i, layer) in drift.end.iter().enumerate() {
        eprintln!("  layer {i} of states: {layer}");
    }
    assert!(drift.per_step() > 1.2);
    // The first layer's inputs are identical in trees and alone, so this is the error of the tree
    // states.
    assert!(first.length <= 1e-6, "{first:?}");
    // In later layers, two summation orders now and then round an activation to different
    // neighbours. Half precision does so once in a thousand. This is no drift: it is present from
    // the start, and plain decoding with another summation order differs from itself as much.
    assert!(worst.length <= 1.5 * quarter.length, "{quarter:?}");
    // One order where both split these short contexts by single tiles.
    assert!(
        order.length == 0.0 || worst.length <= 1.5 * order.length,
        "{order:?}"
    );
    assert!(worst.length <= 1e-3, "{worst:?}");
}

#[test]
fn exact_products_keep_tree_states_within_summation_error() {
    let Some(gpu) = gpu_with_numerics(Some(Numerics::Fastest)) else {
        return;
    };
    for (precision, most) in [
        (StoredPrecision::Floats, 1e-4),
        (StoredPrecision::FloatWeights, 1e-3),
    ] {
        let drift = Drift::of(&gpu, false, precision);
        let (worst, quarter) = (
            Difference::worst(&drift.end),
            Difference::worst(&drift.quarter),
        );
        eprintln!(
            "  {precision:?}, {STEPS} steps of {:.2} tokens: worst {worst}; after a quarter {quarter}",
            drift.per_step()
        );
        assert!(drift.per_step() > 1.2);
        assert!(worst.length <= most, "{precision:?}: {worst:?}");
    }
}
