//! One delta layer, one attention layer, feed-forward and head in the shapes of a real 27B model,
//! against the CPU: prompts of 2,048 tokens, trees of 1, 24 and 64 nodes, and a cache filled to
//! position 131,072 in a slot more than 2^31 bytes into its array.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
}

use std::sync::Arc;

use contract::snapshot::{
    SectionKind, SnapshotHeader, SnapshotIdentity, write_header, write_section,
};
use contract::{
    CommitItem, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, LogitsRow, Mixer, NodeIdx,
    Runner, SeqId, TokenId, Tree, VerifyItem,
};
use cpu::CpuBackend;
use cuda::{CudaBackend, Options};
use fixtures::gpu::Random;
use half::f16;
use model::synth::SynthSpec;

/// Relative RMS difference after two layers and a head. The CPU's 8-bit activations dominate it.
/// Measured: 0.014.
const RELATIVE: f32 = 0.02;
const F16_KV: KvFormats = KvFormats {
    k: KvFormat::F16,
    v: KvFormat::F16,
};

/// The model's first delta and first attention layer, with its whole vocabulary.
fn load_config(limits: Limits) -> LoadConfig {
    let loaded = SynthSpec::parse("qwen3.5-27b:q4_k_m")
        .unwrap()
        .load()
        .unwrap();
    let mut spec = (*loaded.spec).clone();
    let first = |attention: bool| {
        let kind = |mixer: &Mixer| matches!(mixer, Mixer::Attention(_)) == attention;
        spec.layers.iter().find(|l| kind(&l.mixer)).unwrap().clone()
    };
    spec.layers = vec![first(false), first(true)];
    LoadConfig {
        target: Arc::new(spec),
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: F16_KV,
        limits,
    }
}

fn backend() -> Option<CudaBackend> {
    let gpu = fixtures::gpu::gpu()?;
    let options = Options {
        poison: true,
        compile: fixtures::gpu::compiling(),
        ..Options::default()
    };
    Some(CudaBackend::with_options(gpu.info().clone(), options))
}

fn tokens(n: usize, salt: usize) -> Vec<TokenId> {
    let ids = (0..n).map(|i| (i * 7919 + salt * 104_729 + 13) % 248_000);
    ids.map(|id| TokenId(id as u32)).collect()
}

fn check(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let square = |sum: f64, x: f32| sum + f64::from(x) * f64::from(x);
    let differences = found.iter().zip(expected).map(|(f, e)| f - e);
    let off = differences.fold(0.0, square);
    let all = expected.iter().copied().fold(0.0, square);
    let relative = (off / all).sqrt() as f32;
    eprintln!("  {what}: {relative:.5} off");
    assert!(relative < RELATIVE, "{what}: {relative} off");
}

fn rows(what: &str, found: &[LogitsRow], expected: &[LogitsRow]) {
    let values =
        |rows: &[LogitsRow]| -> Vec<f32> { rows.iter().flat_map(|r| r.raw.clone()).collect() };
    check(what, &values(found), &values(expected));
}

/// Verifies trees on both devices, compares some rows, and commits a path of each.
fn trees((ours, a): (&mut dyn Runner, SeqId), (cpu, b): (&mut dyn Runner, SeqId)) {
    for (n, salt) in [(1, 3), (24, 4), (64, 5), (1, 6)] {
        let parents: Vec<NodeIdx> = (1..n).map(|i| NodeIdx((i / 2) as u16)).collect();
        let tree = Tree::new(&tokens(n, salt), &parents).unwrap();
        let mut requests = vec![LogitsRequest::NONE; n];
        requests[0] = LogitsRequest::full();
        requests[n / 2] = LogitsRequest::full();
        requests[n - 1] = LogitsRequest::full();
        let path = tree.path_to(NodeIdx(n as u16 - 1));
        let mut all = Vec::new();
        let (tree, requests, path) = (&tree, &requests[..], &path);
        let mut pass = |runner: &mut dyn Runner, seq: SeqId| {
            let rows = runner
                .verify(&[VerifyItem {
                    seq,
                    tree,
                    requests,
                }])
                .unwrap();
            runner.commit(&[CommitItem { seq, path }]).unwrap();
            all.extend(rows);
        };
        pass(ours, a);
        pass(cpu, b);
        rows(&format!("a tree of {n}"), &all[0], &all[1]);
    }
}

#[test]
fn two_layers_of_real_shapes_match_the_cpu() {
    let Some(backend) = backend() else { return };
    let limits = Limits {
        sequences: 1,
        context: 4096,
        tree_nodes: 64,
        prefill_chunk: 2048,
        pool_tokens: None,
    };
    let mut ours = backend
        .open_inspected(load_config(limits), &mut |_| {})
        .unwrap();
    let processor = CpuBackend::new(cpu::CpuOptions::default());
    let mut cpu = processor
        .open_inspected(load_config(limits), &mut |_| {})
        .unwrap();
    let prompt = tokens(2048, 1);
    let found = ours.hidden_states(&prompt).unwrap();
    let expected = cpu.hidden_states(&prompt).unwrap();
    for (layer, (found, expected)) in found.iter().zip(&expected).enumerate() {
        check(&format!("2,048 rows after layer {layer}"), found, expected);
    }
    let (a, b) = (ours.open(4096).unwrap(), cpu.open(4096).unwrap());
    let prompt = tokens(300, 2);
    let requests = [(0, LogitsRequest::full()), (299, LogitsRequest::full())];
    let found = ours.prefill(a, &prompt, &requests).unwrap();
    let expected = cpu.prefill(b, &prompt, &requests).unwrap();
    rows("a prompt of 300", &found, &expected);
    trees((&mut *ours, a), (&mut *cpu, b));
    check(
        "the delta state",
        &ours.delta_state(a, 0).unwrap(),
        &cpu.delta_state(b, 0).unwrap(),
    );
}

/// Neutral bytes of a simulated state at `position`.
fn simulated_snapshot(config: &LoadConfig, position: usize) -> Vec<u8> {
    let mut random = Random::new(9);
    let mut bytes = Vec::new();
    let identity = SnapshotIdentity {
        model: config.target.hash,
        kv: config.kv,
        rotated: false,
        draft: None,
        mtp: false,
    };
    let header = SnapshotHeader {
        identity,
        position: position as u64,
        sections: 4,
    };
    write_header(&mut bytes, &header).unwrap();
    for (layer, of) in config.target.layers.iter().enumerate() {
        let layer = layer as u32;
        match &of.mixer {
            Mixer::Attention(a) => {
                for kind in [SectionKind::Keys, SectionKind::Values] {
                    let n = position * a.n_kv_heads * a.head_dim;
                    let halves: Vec<u8> = (0..n)
                        .flat_map(|_| f16::from_f32(random.unit() * 2.0 - 1.0).to_le_bytes())
                        .collect();
                    write_section(&mut bytes, kind, layer, &halves).unwrap();
                }
            }
            Mixer::GatedDelta(d) => {
                let sections = [
                    (SectionKind::DeltaState, d.state_values(), 0.05),
                    (SectionKind::ConvWindow, d.window_values(), 0.5),
                ];
                for (kind, n, scale) in sections {
                    let values = random.normals(n, scale);
                    let values: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                    write_section(&mut bytes, kind, layer, &values).unwrap();
                }
            }
        }
    }
    bytes
}

#[test]
fn kv_cache_at_position_131072_beyond_2_gib_matches_the_cpu() {
    const POSITION: usize = 131_072;
    const SLOTS: usize = 12;
    let Some(backend) = backend() else { return };
    let limits = |sequences| Limits {
        sequences,
        context: POSITION + 512,
        tree_nodes: 64,
        prefill_chunk: 256,
        pool_tokens: None,
    };
    let mut ours = backend
        .open_inspected(load_config(limits(SLOTS)), &mut |_| {})
        .unwrap();
    let processor = CpuBackend::new(cpu::CpuOptions::default());
    let alone = load_config(limits(1));
    let bytes = simulated_snapshot(&alone, POSITION);
    let mut cpu = processor.open_inspected(alone, &mut |_| {}).unwrap();
    let before: Vec<SeqId> = (1..SLOTS).map(|_| ours.open(64).unwrap()).collect();
    let (a, b) = (
        ours.open(POSITION + 512).unwrap(),
        cpu.open(POSITION + 512).unwrap(),
    );
    let saved = ours.import(&mut &bytes[..]).unwrap();
    ours.restore(a, saved.id).unwrap();
    let saved = cpu.import(&mut &bytes[..]).unwrap();
    cpu.restore(b, saved.id).unwrap();
    trees((&mut *ours, a), (&mut *cpu, b));
    let more = tokens(100, 8);
    let requests = [(99, LogitsRequest::full())];
    let found = ours.prefill(a, &more, &requests).unwrap();
    let expected = cpu.prefill(b, &more, &requests).unwrap();
    rows("a prompt of 100 at the end", &found, &expected);
    drop(before);
}
