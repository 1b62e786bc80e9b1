//! What hundreds of steps of tree decoding leave behind, beside plain decoding of the same tokens.

use contract::snapshot::{Owner, SectionKind, read_header, read_section};
use contract::{
    Ask, Backend, CommitItem, DraftItem, NodeIdx, Place, Runner, SeqId, TokenId, VerifyItem,
};
use cpu::CpuBackend;
use decode::Seed;
use decode::grow::{Shape, Soil, grow};

use crate::draft::{feed, plan_with_draft};
use crate::golden::FAST;
use crate::laws::prompts;

/// Steps of one text.
pub(crate) const STEPS: usize = 500;
/// Room for steps that keep everything, and for the prompt.
const CONTEXT: usize = STEPS * 16 + 256;

/// Decodes greedily by trees of 22 drafted nodes; the tokens committed after the prompt, and the tokens a step.
fn tree_text(runner: &mut dyn Runner, seq: SeqId, root: TokenId) -> (Vec<TokenId>, f64) {
    let depth = runner.info().draft_depth.unwrap();
    let (mut root, mut text) = (root, Vec::new());
    for _ in 0..STEPS {
        let candidates = runner.draft(&[DraftItem { seq, root }], depth, 8).unwrap();
        let soil = Soil {
            root,
            forced: &[],
            hints: &[],
            candidates: &candidates[0],
        };
        let shape = Shape {
            budget: 22,
            max_depth: depth,
            seed: Seed::None,
        };
        let tree = grow(soil, shape).tree;
        let asks = vec![Ask::top(1); tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            asks: &asks,
        };
        let rows = runner.verify(&[item]).unwrap().remove(0);
        let mut at = NodeIdx::ROOT;
        while let Some(child) = tree.child_with(at, rows[at.index()].ids[0]) {
            at = child;
        }
        let path = tree.path_to(at);
        text.extend(path.nodes().iter().map(|node| tree.token(*node)));
        root = rows[at.index()].ids[0];
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
    let per_step = text.len() as f64 / STEPS as f64;
    (text, per_step)
}

/// The delta states of a sequence, layer by layer.
fn states(runner: &mut dyn Runner, seq: SeqId, owner: Owner) -> Vec<Vec<f32>> {
    let saved = runner.snapshot(seq, Place::Host).unwrap();
    let mut bytes = Vec::new();
    runner.export(saved.id, &mut bytes).unwrap();
    runner.free_snapshot(saved.id);
    let mut source = &bytes[..];
    let header = read_header(&mut source, owner).unwrap();
    let mut states = Vec::new();
    for _ in 0..header.sections {
        // Kind and layer come first, then the length, which is what it is told to expect.
        let length = u64::from_le_bytes(source[8..16].try_into().unwrap()) as usize;
        let section = read_section(&mut source, |_, _| Some(length)).unwrap();
        if section.kind == SectionKind::DeltaState {
            let (values, _) = section.bytes.as_chunks::<4>();
            states.push(values.iter().map(|v| f32::from_le_bytes(*v)).collect());
        }
    }
    assert!(!states.is_empty());
    states
}

/// What is between a layer's states after [`STEPS`] steps of trees and after plain decoding of the same tokens, at the
/// worst layer: the largest difference as a share of the largest value, and the length of the difference as a share
/// of the length; and the tokens a step.
pub(crate) fn drift(backend: &dyn Backend, exact: bool) -> (f32, f64, f64) {
    let mut plan = plan_with_draft(None, FAST);
    plan.exact = exact;
    plan.limits.context = CONTEXT;
    plan.limits.sequences = 2;
    let draft = plan.draft.as_ref().unwrap();
    let owner = Owner {
        model: plan.target.hash,
        kv: plan.kv,
        turned: false,
        draft: Some((draft.spec.hash, draft.kv)),
    };
    let mut runner = backend.open(plan, &mut |_| {}).unwrap();
    let prompt = prompts().remove(0);
    let begin = |runner: &mut dyn Runner| {
        let seq = runner.open(CONTEXT).unwrap();
        let asks = [(prompt.len() - 1, Ask::top(1))];
        let rows = runner.prefill(seq, &prompt, &asks).unwrap();
        (seq, rows[0].ids[0])
    };
    let (tree, root) = begin(&mut *runner);
    let (text, per_step) = tree_text(&mut *runner, tree, root);
    let (plain, _) = begin(&mut *runner);
    for token in &text {
        feed(&mut *runner, plain, *token);
    }
    let found = states(&mut *runner, tree, owner);
    let expected = states(&mut *runner, plain, owner);
    let (mut worst, mut mean) = (0.0_f32, 0.0_f64);
    for (found, expected) in found.iter().zip(&expected) {
        let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        worst = worst.max(off.fold(0.0, f32::max) / largest);
        let square = |x: f32| f64::from(x) * f64::from(x);
        let off: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
        let all: f64 = expected.iter().map(|x| square(*x)).sum();
        mean = mean.max((off / all).sqrt());
    }
    (worst, mean, per_step)
}

#[test]
fn five_hundred_steps_of_trees_leave_the_states_of_plain_decoding_to_the_bit() {
    let (worst, _, per_step) = drift(&CpuBackend::new(FAST), false);
    assert_eq!(worst, 0.0);
    // A toy that goes on after its end rambles, and little of that is foreseen.
    assert!(per_step > 1.2, "{per_step} tokens a step");
}
