//! Speculation on a card, with the bundled pair: text, probabilities, acceptance and states of trees beside plain
//! decoding. Run it anywhere with a card: `cargo test --release -p server --test ember card -- --nocapture`.
//!
//! Where steps sum by path, trees leave the bits of plain decoding. In the fastest order they do not, so texts may part
//! where two tokens are nearly level; how near is measured first, by feeding both the same text.

#![allow(
    clippy::print_stderr,
    reason = "figures are printed, and skipped tests say so"
)]

use std::time::Instant;

use contract::{
    Backend, CommitItem, DraftItem, LogitsRequest, NodeIdx, Runner, SeqId, TokenId, Tree,
    VerifyItem,
};
use cuda::{CudaBackend, Numerics, Options, compile};
use decode::{
    Event, GenerationParams, Job, JobId, Progress, Sampling, Scheduler, SchedulerConfig,
    Speculation,
};

use crate::draft::{acceptance, feed, plan_with_draft};
use crate::drift::{CacheFormat, Difference, Drift, STEPS};
use crate::golden::FAST;
use crate::pool::few_pages_change_no_bit;
use crate::properties::{every_budget_says_the_same, prompts};

const PROMPTS: usize = 200;
const WORDS: usize = 128;
/// Divergences are allowed once in so many tokens.
const RARE: usize = 2000;

/// The first card, or `None` with a loud line.
fn card() -> Option<CudaBackend> {
    card_that_sums(None)
}

/// The same, its steps in this order where nothing is promised.
fn card_that_sums(numerics: Option<Numerics>) -> Option<CudaBackend> {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test").to_owned();
    let cards = match cuda::probe() {
        Ok(cards) => cards,
        Err(absence) => {
            eprintln!("SKIPPED {name}: no CUDA card: {absence}");
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
    Some(CudaBackend::with_options(
        cards.into_iter().next()?,
        options,
    ))
}

fn open(card: &CudaBackend, exact: bool) -> Box<dyn Runner> {
    let mut plan = plan_with_draft(None, FAST);
    plan.limits.sequences = 4;
    plan.batch_invariant = exact;
    card.open(plan, &mut |_| {}).unwrap()
}

/// Whether a plan must say that it is exact to be so. On Hopper it is by itself, with these heads and caches.
fn must_ask(card: &CudaBackend) -> bool {
    let info = open(card, false).info().clone();
    let hopper = info.device.features.iter().any(|f| f == "sm_90");
    assert!(info.batch_invariant || !hopper, "{info:?}");
    !info.batch_invariant
}

/// What is said after each prompt, greedily, by trees of 22 nodes or one token at a time; and tokens a step.
fn texts(
    runner: Box<dyn Runner>,
    prompts: &[Vec<TokenId>],
    (trees, together): (bool, usize),
) -> (Vec<Vec<TokenId>>, f64) {
    let loaded = model::load(&crate::golden::ember("ember.gguf")).unwrap();
    let config = SchedulerConfig {
        max_sequences: together,
        queue_limit: usize::MAX,
        eos: loaded.vocab.eos,
        speculation: Speculation::default(),
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(runner, config);
    for (i, prompt) in prompts.iter().enumerate() {
        let settings = GenerationParams {
            sampling: Sampling::greedy(),
            max_tokens: WORDS,
            // Toys end early, and a text that goes on is compared longer.
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
    let mut said = vec![Vec::new(); prompts.len()];
    let mut events = Vec::new();
    while scheduler.step(&mut events).unwrap() != Progress::Idle || !events.is_empty() {
        for (id, event) in events.drain(..) {
            match event {
                Event::Tokens { tokens, .. } => {
                    said[id.0 as usize].extend(tokens.iter().map(|token| token.id));
                }
                Event::Failed { error } => panic!("{id}: {error}"),
                _ => {}
            }
        }
    }
    let stats = scheduler.stats();
    let after_first = stats.generated_tokens - prompts.len() as u64;
    // Every sequence of a round is a step of its own.
    (said, after_first as f64 / stats.batched as f64)
}

/// Whole rows along a text: `[text]` rows of logits, the one after each of its tokens, from single steps.
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

/// The same rows from trees: the text's next tokens in a line, and the draft's candidates beside them.
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
        // Paths of every length from 1 to 8, so that every node of a tree is tried.
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

/// Mean `KL(plain || tree)` and the largest difference of two logits, over texts of prompts fed to both.
fn teacher_forced(
    card: &CudaBackend,
    prompts: &[Vec<TokenId>],
    said: &[Vec<TokenId>],
) -> (f64, f32) {
    let mut runner = open(card, false);
    let (mut sum, mut n, mut noise) = (0.0, 0, 0.0_f32);
    for (prompt, text) in prompts.iter().zip(said).step_by(5) {
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

/// The lead of the best token over `other` after a prompt and the beginning of a text, by single steps.
fn lead(card: &CudaBackend, prompt: &[TokenId], text: &[TokenId], other: TokenId) -> f32 {
    let mut runner = open(card, false);
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
    let Some(card) = card_that_sums(Some(Numerics::Fastest)) else {
        return;
    };
    let prompts: Vec<Vec<TokenId>> = prompts().into_iter().take(PROMPTS).collect();
    let start = Instant::now();
    let (plain, _) = texts(open(&card, false), &prompts, (false, 4));
    let plainly = start.elapsed();
    let (tree, per_step) = texts(open(&card, false), &prompts, (true, 4));
    let (kl, noise) = teacher_forced(&card, &prompts, &plain);
    eprintln!(
        "  plain {plainly:.1?}, with trees {:.1?}, {per_step:.2} tokens a step; teacher-forced KL {kl:.2e}, logits at \
         most {noise:.2e} apart",
        start.elapsed() - plainly
    );
    let (mut parted, mut compared) = (0, 0);
    for (i, (plain, tree)) in plain.iter().zip(&tree).enumerate() {
        assert_eq!(plain.len(), WORDS, "prompt {i}");
        let same = plain.iter().zip(tree).take_while(|(a, b)| a == b).count();
        compared += WORDS.min(same + 1);
        if same < WORDS {
            parted += 1;
            let lead = lead(&card, &prompts[i], &plain[..same], tree[same]);
            eprintln!("  prompt {i} parts at token {same}, where the best leads by {lead:.2e}");
            assert!(
                lead <= 2.0 * noise,
                "prompt {i}, token {same}: {lead} with a noise of {noise}"
            );
        }
    }
    eprintln!("  {parted} of {PROMPTS} texts part, in {compared} tokens");
    assert!(per_step > 1.5, "{per_step} tokens a step");
    assert!(kl <= 1e-5, "KL {kl}");
    assert!(
        parted * RARE <= compared,
        "{parted} divergences in {compared} tokens"
    );
}

#[test]
fn trees_on_gpu_match_plain_decoding_alone_and_batched() {
    let Some(card) = card() else { return };
    let exact = must_ask(&card);
    let prompts: Vec<Vec<TokenId>> = prompts().into_iter().take(PROMPTS).collect();
    let (plain, _) = texts(open(&card, exact), &prompts, (false, 4));
    let (tree, per_step) = texts(open(&card, exact), &prompts, (true, 4));
    let (alone, _) = texts(open(&card, exact), &prompts[..PROMPTS / 5], (true, 1));
    let parted = plain.iter().zip(&tree).filter(|(a, b)| a != b).count();
    eprintln!("  {parted} of {PROMPTS} texts part, {per_step:.2} tokens a step");
    assert!(per_step > 1.5, "{per_step} tokens a step");
    assert_eq!(plain, tree);
    assert_eq!(plain[..alone.len()], alone);
}

#[test]
fn budgets_batches_and_cancellations_on_gpu_change_no_token() {
    let Some(card) = card() else { return };
    let exact = must_ask(&card);
    every_budget_says_the_same(&card, exact, (0..64).step_by(9));
}

#[test]
fn preempted_sequences_on_gpu_match_runs_alone() {
    let Some(card) = card() else { return };
    let exact = must_ask(&card);
    few_pages_change_no_bit(&card, exact);
}

#[test]
fn acceptance_on_gpu_matches_the_independent_implementation() {
    let Some(card) = card() else { return };
    for (kind, found, expected) in acceptance(&card) {
        let off = (found as f64 - expected).abs() / expected;
        eprintln!(
            "  {kind}: {found} kept, {expected} in PyTorch, {:.2} % off",
            100.0 * off
        );
        assert!(off < 0.02, "{kind}: {found} kept, {expected} expected");
    }
}

#[test]
fn states_on_gpu_after_500_tree_steps_match_plain_decoding() {
    let Some(card) = card() else { return };
    let drift = Drift::of(&card, must_ask(&card), CacheFormat::AsShipped);
    let worst = Difference::worst(&drift.end);
    eprintln!(
        "  {STEPS} steps of {:.2} tokens: worst {worst}",
        drift.per_step()
    );
    assert!(drift.per_step() > 1.2);
    assert!(worst.length <= 1e-4, "{worst:?}");
    // By path there is nothing between them.
    assert_eq!(worst.largest, 0.0);
}

#[test]
fn fastest_numerics_states_drift_no_more_than_plain_decoding() {
    let Some(card) = card_that_sums(Some(Numerics::Fastest)) else {
        return;
    };
    let drift = Drift::of(&card, false, CacheFormat::AsShipped);
    let order = drift.of_another_order(&card);
    let (first, worst) = (drift.end[0], Difference::worst(&drift.end));
    let (quarter, order) = (Difference::worst(&drift.quarter), Difference::worst(&order));
    eprintln!("  {STEPS} steps of {:.2} tokens", drift.per_step());
    eprintln!("  first layer {first}; worst {worst}");
    eprintln!("  after a quarter of them: worst {quarter}");
    eprintln!("  plain decoding, attention in another order: worst {order}");
    for (i, layer) in drift.end.iter().enumerate() {
        eprintln!("  layer {i} of states: {layer}");
    }
    assert!(drift.per_step() > 1.2);
    // What the first layer reads is the same in trees and alone, so this is what trees of states give away.
    assert!(first.length <= 1e-6, "{first:?}");
    // Above it, two ways of summing round an activation to another neighbour now and then, of which half precision has
    // one in a thousand. That is no drift: it is there from the beginning, and plain decoding that sums in another
    // order is as far from itself.
    assert!(worst.length <= 1.5 * quarter.length, "{quarter:?}");
    assert!(worst.length <= 1.5 * order.length, "{order:?}");
    assert!(worst.length <= 1e-3, "{worst:?}");
}

#[test]
fn exact_products_keep_tree_states_within_summation_error() {
    let Some(card) = card_that_sums(Some(Numerics::Fastest)) else {
        return;
    };
    for (held, most) in [
        (CacheFormat::Floats, 1e-4),
        (CacheFormat::FloatWeights, 1e-3),
    ] {
        let drift = Drift::of(&card, false, held);
        let (worst, quarter) = (
            Difference::worst(&drift.end),
            Difference::worst(&drift.quarter),
        );
        eprintln!(
            "  {held:?}, {STEPS} steps of {:.2} tokens: worst {worst}; after a quarter {quarter}",
            drift.per_step()
        );
        assert!(drift.per_step() > 1.2);
        assert!(worst.length <= most, "{held:?}: {worst:?}");
    }
}
