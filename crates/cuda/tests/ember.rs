//! The bundled model on the card: greedy text is the CPU's, but where two tokens are nearly level.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod card;

use std::path::{Path, PathBuf};

use contract::{
    Ask, Backend, CommitItem, KvFormat, KvFormats, Limits, NodeIdx, OpenPlan, Row, Runner, SeqId,
    TokenId, Tree, VerifyItem,
};
use cpu::CpuBackend;
use cuda::{CudaBackend, Options, compile};

/// How close the two best logits may be for the devices to choose differently: what rounding activations to
/// eight bits was seen to move a logit by.
const LEVEL: f32 = 0.25;
const WORDS: usize = 120;

fn model() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember/ember.gguf");
    match here.is_file() {
        true => here,
        // A test binary that was carried elsewhere runs below the root.
        false => PathBuf::from("../../models/ember/ember.gguf"),
    }
}

fn open(backend: &dyn Backend, format: KvFormat) -> Box<dyn Runner> {
    let loaded = model::load(&model()).unwrap();
    let plan = OpenPlan {
        target: loaded.spec,
        weights: loaded.weights,
        draft: None,
        exact: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: 2,
            context: 2048,
            tree_nodes: 24,
            prefill_chunk: 512,
        },
    };
    backend.open(plan, &mut |_| {}).unwrap()
}

fn speak(runner: &mut dyn Runner, seq: SeqId, token: TokenId) -> Row {
    let tree = Tree::root(token);
    let asks = [Ask::top(4)];
    let item = VerifyItem {
        seq,
        tree: &tree,
        asks: &asks,
    };
    let row = runner.verify(&[item]).unwrap().pop().unwrap().pop();
    let path = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    row.unwrap()
}

#[test]
fn greedy_text_is_the_cpus_up_to_near_ties() {
    let Some(gpu) = card::gpu() else { return };
    let options = Options {
        compile: compile::Options {
            cache: Some(std::env::temp_dir().join("hearth-test-kernels")),
            ..compile::Options::default()
        },
        ..Options::default()
    };
    let card = CudaBackend::with_options(gpu.card().clone(), options);
    let processor = CpuBackend::new(cpu::Options::default());
    for (prompt_len, format) in [
        (1, KvFormat::F16),
        (90, KvFormat::F16),
        (700, KvFormat::F16),
        (333, KvFormat::Q8_0),
        (70, KvFormat::Q4_0),
    ] {
        let mut ours = open(&card, format);
        let mut judge = open(&processor, format);
        // Text the model was trained on would be kinder; these are its own most common tokens in a fixed order.
        let prompt: Vec<TokenId> = (0..prompt_len)
            .map(|i| TokenId(((i * i * 7 + i * 3 + 11) % 4000) as u32))
            .collect();
        let (a, b) = (ours.open(2048).unwrap(), judge.open(2048).unwrap());
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        let mut begin = 0;
        for piece in prompt.chunks(512) {
            begin += piece.len();
            let asks = [(piece.len() - 1, Ask::top(4))];
            let asks = if begin == prompt.len() {
                &asks[..]
            } else {
                &[]
            };
            found = ours.prefill(a, piece, asks).unwrap();
            expected = judge.prefill(b, piece, asks).unwrap();
        }
        let (mut found, mut expected) = (found.remove(0), expected.remove(0));
        let (mut ties, mut worst) = (0, 0.0_f32);
        for word in 0..WORDS {
            if found.ids[0] != expected.ids[0] {
                let gap = expected.logits[0] - expected.logits[1];
                assert!(
                    gap < LEVEL,
                    "word {word} after {prompt_len}: {} instead of {}, {gap} apart",
                    found.ids[0],
                    expected.ids[0]
                );
                ties += 1;
            } else {
                worst = worst.max((found.logits[0] - expected.logits[0]).abs());
            }
            // Both go on with the judge's choice, so that every word is compared.
            let token = expected.ids[0];
            found = speak(&mut *ours, a, token);
            expected = speak(&mut *judge, b, token);
        }
        eprintln!(
            "  prompt {prompt_len}, {}: {ties} near ties of {WORDS}, best logit at most {worst:.3} off",
            format.name()
        );
        assert!(ties <= WORDS / 20, "{ties} near ties");
    }
}
