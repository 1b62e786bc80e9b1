//! States after hundreds of tree decode steps, compared with plain decoding of the same tokens.

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

use crate::draft::{config_with_draft, feed};
use crate::golden::{FAST, REFERENCE, ember};
use crate::properties::prompts;

/// Steps per text.
pub(crate) const STEPS: usize = 500;
/// Context for steps that accept every token, and for the prompt.
const CONTEXT: usize = STEPS * 16 + 256;

/// Decodes greedily by `steps` trees of 22 drafted nodes from `root`. Returns the committed tokens
/// and the next root.
fn tree_text(
    runner: &mut dyn Runner,
    (seq, mut root): (SeqId, TokenId),
    steps: usize,
) -> (Vec<TokenId>, TokenId) {
    let depth = runner.info().draft_depth.unwrap();
    let mut text = Vec::new();
    for _ in 0..steps {
        let candidates = runner.draft(&[DraftItem { seq, root }], depth, 8).unwrap();
        let inputs = TreeInputs {
            root,
            forced: &[],
            hints: &[],
            candidates: &candidates[0],
        };
        let budget = TreeBudget {
            max_nodes: 22,
            max_depth: depth,
            init: TreeInit::None,
        };
        let tree = build_tree(inputs, budget).tree;
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
        // A section is kind and layer, then the length, then the bytes.
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

/// A runner for one text, the identity of its snapshots, its sequence after the prompt and the next
/// token.
struct Rig {
    runner: Box<dyn Runner>,
    identity: SnapshotIdentity,
    prompt: Vec<TokenId>,
}

/// Precision of weights, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredPrecision {
    /// Weights as in the file, keys and values in half precision.
    AsShipped,
    /// The target's weights dequantised to f32, keys and values in half precision.
    FloatWeights,
    /// Dequantised weights, keys and values in f32.
    Floats,
}

impl Rig {
    fn new(backend: &dyn Backend, batch_invariant: bool, precision: StoredPrecision) -> Rig {
        let mut config = config_with_draft(None, FAST);
        config.batch_invariant = batch_invariant;
        if precision != StoredPrecision::AsShipped {
            let loaded = load_as_floats(&ember("ember.gguf")).unwrap();
            (config.target, config.weights) = (loaded.spec, loaded.weights);
        }
        if precision == StoredPrecision::Floats {
            config.kv = KvFormats {
                k: KvFormat::F32,
                v: KvFormat::F32,
            };
        }
        config.limits.context = CONTEXT;
        config.limits.sequences = 2;
        let draft = config.draft.as_ref().unwrap();
        let mut identity = SnapshotIdentity {
            model: config.target.hash,
            kv: config.kv,
            rotated: false,
            draft: Some((draft.spec.hash, draft.kv)),
            mtp: false,
        };
        let runner = backend.open(config, &mut |_| {}).unwrap();
        identity.mtp = runner.info().mtp.is_some();
        Rig {
            runner,
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

    /// The states after each part of a text, decoded token by token.
    fn plain_states(&mut self, parts: &[Vec<TokenId>]) -> Vec<Vec<Vec<f32>>> {
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

/// Difference of two states of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Difference {
    /// The largest difference relative to the largest value.
    pub(crate) largest: f32,
    /// The norm of the difference relative to the norm.
    pub(crate) length: f64,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Difference { largest, length } = self;
        write!(
            f,
            "{largest:.2e} of the largest value, {length:.2e} of the norm"
        )
    }
}

impl Difference {
    /// One difference per layer.
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

    /// The maximum of each over the layers.
    pub(crate) fn worst(layers: &[Difference]) -> Difference {
        let largest = layers.iter().map(|layer| layer.largest);
        let length = layers.iter().map(|layer| layer.length);
        Difference {
            largest: largest.fold(0.0, f32::max),
            length: length.fold(0.0, f64::max),
        }
    }
}

/// States after [`STEPS`] tree steps.
pub(crate) struct Drift {
    /// Differences between trees and plain decoding of the same tokens per layer: after a quarter
    /// of the steps, and at the end.
    pub(crate) quarter: Vec<Difference>,
    pub(crate) end: Vec<Difference>,
    /// Tokens of the quarter and of the rest.
    parts: [Vec<TokenId>; 2],
    plain: Vec<Vec<f32>>,
}

impl Drift {
    pub(crate) fn of(
        backend: &dyn Backend,
        batch_invariant: bool,
        precision: StoredPrecision,
    ) -> Drift {
        let mut rig = Rig::new(backend, batch_invariant, precision);
        let (seq, root) = rig.begin();
        let (quarter, root) = tree_text(&mut *rig.runner, (seq, root), STEPS / 4);
        let after_quarter = rig.states(seq);
        let (rest, _) = tree_text(&mut *rig.runner, (seq, root), STEPS - STEPS / 4);
        let at_end = rig.states(seq);
        let parts = [quarter, rest];
        let mut plain = rig.plain_states(&parts);
        Drift {
            quarter: Difference::of(&after_quarter, &plain[0]),
            end: Difference::of(&at_end, &plain[1]),
            parts,
            plain: plain.remove(1),
        }
    }

    pub(crate) fn per_step(&self) -> f64 {
        self.parts.iter().map(Vec::len).sum::<usize>() as f64 / STEPS as f64
    }

    /// Differences between plain decoding and plain decoding with another summation order in
    /// attention; no trees are involved.
    pub(crate) fn of_another_order(&self, backend: &dyn Backend) -> Vec<Difference> {
        let mut rig = Rig::new(backend, true, StoredPrecision::AsShipped);
        Difference::of(&rig.plain_states(&self.parts)[1], &self.plain)
    }
}

#[test]
fn states_after_500_tree_steps_are_bit_identical_to_plain_decoding() {
    let drift = Drift::of(&CpuBackend::new(FAST), false, StoredPrecision::AsShipped);
    assert_eq!(Difference::worst(&drift.end).largest, 0.0);
    // A small model that continues past its end writes text that the draft rarely predicts.
    assert!(drift.per_step() > 1.2, "{}", drift.per_step());
}

#[test]
fn states_of_two_f32_summation_orders_are_close() {
    // The reference sums sequentially, the fast path in lanes; neither rounds to less than f32.
    let fast = CpuBackend::new(FAST);
    let mut rig = Rig::new(&fast, false, StoredPrecision::Floats);
    let (seq, root) = rig.begin();
    let (text, _) = tree_text(&mut *rig.runner, (seq, root), STEPS / 8);
    let parts = [text];
    let found = rig.plain_states(&parts).remove(0);
    let mut reference = Rig::new(&CpuBackend::new(REFERENCE), false, StoredPrecision::Floats);
    let expected = reference.plain_states(&parts).remove(0);
    let worst = Difference::worst(&Difference::of(&found, &expected));
    eprintln!("  {} tokens: worst {worst}", parts[0].len());
    assert!(worst.length > 0.0 && worst.length <= 1e-5, "{worst:?}");
}
