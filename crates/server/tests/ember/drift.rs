//! What hundreds of steps of tree decoding leave behind, beside plain decoding of the same tokens.

#![allow(clippy::print_stderr, reason = "figures are printed")]

use conformance::golden::load_as_floats;
use contract::snapshot::{SectionKind, SnapshotIdentity, read_header, read_section};
use contract::{
    Backend, CommitItem, DraftItem, KvFormat, KvFormats, LogitsRequest, NodeIdx, Runner, SeqId,
    SnapshotLocation, TokenId, VerifyItem,
};
use cpu::CpuBackend;
use decode::TreeInit;
use decode::speculation::{TreeBudget, TreeInputs, build_tree};

use crate::draft::{feed, plan_with_draft};
use crate::golden::{FAST, REFERENCE, ember};
use crate::properties::prompts;

/// Steps of one text.
pub(crate) const STEPS: usize = 500;
/// Room for steps that keep everything, and for the prompt.
const CONTEXT: usize = STEPS * 16 + 256;

/// Decodes greedily by `steps` trees of 22 drafted nodes from `root` on; the tokens committed, and the next root.
fn tree_text(
    runner: &mut dyn Runner,
    (seq, mut root): (SeqId, TokenId),
    steps: usize,
) -> (Vec<TokenId>, TokenId) {
    let depth = runner.info().draft_depth.unwrap();
    let mut text = Vec::new();
    for _ in 0..steps {
        let candidates = runner.draft(&[DraftItem { seq, root }], depth, 8).unwrap();
        let soil = TreeInputs {
            root,
            forced: &[],
            hints: &[],
            candidates: &candidates[0],
        };
        let shape = TreeBudget {
            max_nodes: 22,
            max_depth: depth,
            init: TreeInit::None,
        };
        let tree = build_tree(soil, shape).tree;
        let requests = vec![LogitsRequest::top_k(1); tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
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
    (text, root)
}

/// The delta states of a sequence, layer by layer.
fn states(runner: &mut dyn Runner, seq: SeqId, identity: SnapshotIdentity) -> Vec<Vec<f32>> {
    let saved = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let mut bytes = Vec::new();
    runner.export(saved.id, &mut bytes).unwrap();
    runner.free_snapshot(saved.id);
    let mut source = &bytes[..];
    let header = read_header(&mut source, identity).unwrap();
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

/// A runner for one text, whom its snapshots belong to, and its sequence after the prompt with the next token.
struct Rig {
    runner: Box<dyn Runner>,
    identity: SnapshotIdentity,
    prompt: Vec<TokenId>,
}

/// How what is multiplied and kept is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheFormat {
    /// As the files have it, keys and values in half precision.
    AsShipped,
    /// The target's weights as the f32 numbers that they stand for, keys and values in half precision.
    FloatWeights,
    /// The same with f32 keys and values.
    Floats,
}

impl Rig {
    fn new(backend: &dyn Backend, exact: bool, held: CacheFormat) -> Rig {
        let mut plan = plan_with_draft(None, FAST);
        plan.batch_invariant = exact;
        if held != CacheFormat::AsShipped {
            let loaded = load_as_floats(&ember("ember.gguf")).unwrap();
            (plan.target, plan.weights) = (loaded.spec, loaded.weights);
        }
        if held == CacheFormat::Floats {
            plan.kv = KvFormats {
                k: KvFormat::F32,
                v: KvFormat::F32,
            };
        }
        plan.limits.context = CONTEXT;
        plan.limits.sequences = 2;
        let draft = plan.draft.as_ref().unwrap();
        let identity = SnapshotIdentity {
            model: plan.target.hash,
            kv: plan.kv,
            rotated: false,
            draft: Some((draft.spec.hash, draft.kv)),
        };
        Rig {
            runner: backend.open(plan, &mut |_| {}).unwrap(),
            identity,
            prompt: prompts().remove(0),
        }
    }

    fn begin(&mut self) -> (SeqId, TokenId) {
        let seq = self.runner.open(CONTEXT).unwrap();
        let requests = [(self.prompt.len() - 1, LogitsRequest::top_k(1))];
        let rows = self.runner.prefill(seq, &self.prompt, &requests).unwrap();
        (seq, rows[0].ids[0])
    }

    fn states(&mut self, seq: SeqId) -> Vec<Vec<f32>> {
        states(&mut *self.runner, seq, self.identity)
    }

    /// The states after each part of a text, token by token.
    fn plainly(&mut self, parts: &[Vec<TokenId>]) -> Vec<Vec<Vec<f32>>> {
        let (seq, _) = self.begin();
        let mut all = Vec::with_capacity(parts.len());
        for part in parts {
            part.iter()
                .for_each(|token| feed(&mut *self.runner, seq, *token));
            all.push(self.states(seq));
        }
        all
    }
}

/// What is between two states of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Difference {
    /// The largest difference as a share of the largest value.
    pub(crate) largest: f32,
    /// The length of the difference as a share of the length.
    pub(crate) length: f64,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Difference { largest, length } = self;
        write!(
            f,
            "{largest:.2e} of the largest value and {length:.2e} of the length off"
        )
    }
}

impl Difference {
    /// Layer by layer.
    fn of(found: &[Vec<f32>], expected: &[Vec<f32>]) -> Vec<Difference> {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let pairs = found.iter().zip(expected);
        let of = |(found, expected): (&Vec<f32>, &Vec<f32>)| {
            let both = || found.iter().zip(expected);
            let most = both().fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
            let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let off: f64 = both().map(|(a, b)| square(a - b)).sum();
            let all: f64 = expected.iter().map(|x| square(*x)).sum();
            Difference {
                largest: most / largest,
                length: (off / all).sqrt(),
            }
        };
        pairs.map(of).collect()
    }

    /// The most of each, over layers.
    pub(crate) fn worst(layers: &[Difference]) -> Difference {
        let largest = layers.iter().map(|layer| layer.largest);
        let length = layers.iter().map(|layer| layer.length);
        Difference {
            largest: largest.fold(0.0, f32::max),
            length: length.fold(0.0, f64::max),
        }
    }
}

/// What [`STEPS`] steps of trees leave behind.
pub(crate) struct Drift {
    /// Between trees and plain decoding of the same tokens, layer by layer: after a quarter of the steps and in the
    /// end.
    pub(crate) quarter: Vec<Difference>,
    pub(crate) end: Vec<Difference>,
    /// Tokens of the quarter and of the rest.
    parts: [Vec<TokenId>; 2],
    plain: Vec<Vec<f32>>,
}

impl Drift {
    pub(crate) fn of(backend: &dyn Backend, exact: bool, held: CacheFormat) -> Drift {
        let mut rig = Rig::new(backend, exact, held);
        let (seq, root) = rig.begin();
        let (quarter, root) = tree_text(&mut *rig.runner, (seq, root), STEPS / 4);
        let after_quarter = rig.states(seq);
        let (rest, _) = tree_text(&mut *rig.runner, (seq, root), STEPS - STEPS / 4);
        let in_the_end = rig.states(seq);
        let parts = [quarter, rest];
        let mut plain = rig.plainly(&parts);
        Drift {
            quarter: Difference::of(&after_quarter, &plain[0]),
            end: Difference::of(&in_the_end, &plain[1]),
            parts,
            plain: plain.remove(1),
        }
    }

    pub(crate) fn per_step(&self) -> f64 {
        self.parts.iter().map(Vec::len).sum::<usize>() as f64 / STEPS as f64
    }

    /// Between plain decoding and plain decoding whose attention sums in another order: no tree has any part in it.
    pub(crate) fn of_another_order(&self, backend: &dyn Backend) -> Vec<Difference> {
        let mut rig = Rig::new(backend, true, CacheFormat::AsShipped);
        Difference::of(&rig.plainly(&self.parts)[1], &self.plain)
    }
}

#[test]
fn states_after_500_tree_steps_are_bit_identical_to_plain_decoding() {
    let drift = Drift::of(&CpuBackend::new(FAST), false, CacheFormat::AsShipped);
    assert_eq!(Difference::worst(&drift.end).largest, 0.0);
    // A toy that goes on after its end rambles, and little of that is foreseen.
    assert!(drift.per_step() > 1.2, "{}", drift.per_step());
}

#[test]
fn states_of_two_f32_summation_orders_are_close() {
    // The oracle sums one value after the other, the fast path in lanes; neither rounds anything to less than f32.
    let fast = CpuBackend::new(FAST);
    let mut rig = Rig::new(&fast, false, CacheFormat::Floats);
    let (seq, root) = rig.begin();
    let (text, _) = tree_text(&mut *rig.runner, (seq, root), STEPS / 8);
    let parts = [text];
    let found = rig.plainly(&parts).remove(0);
    let mut reference = Rig::new(&CpuBackend::new(REFERENCE), false, CacheFormat::Floats);
    let expected = reference.plainly(&parts).remove(0);
    let worst = Difference::worst(&Difference::of(&found, &expected));
    eprintln!("  {} tokens: worst {worst}", parts[0].len());
    assert!(worst.length > 0.0 && worst.length <= 1e-5, "{worst:?}");
}
