//! The CPU against Hugging Face in f32 on the same dequantised weights: logits, the residual stream after each
//! layer, and the states of layer 0. `crates/conformance/fixtures/README.md` says where the fixtures come from.

#![expect(
    clippy::unwrap_used,
    reason = "a fixture that cannot be read fails the test"
)]

use std::path::{Path, PathBuf};

use contract::{
    Ask, Backend, CommitItem, KvFormat, KvFormats, Limits, OpenPlan, Row, TokenId, Tree, VerifyItem,
};
use cpu::{CpuBackend, InspectedRunner, Options};

/// One tiny model and what others say of it.
struct Golden {
    stem: String,
    manifest: serde_json::Value,
}

impl Golden {
    fn all() -> Vec<Golden> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(folder()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if let Some(stem) = name.strip_suffix(".json") {
                let text = std::fs::read_to_string(path(stem, "json")).unwrap();
                all.push(Golden {
                    stem: stem.to_owned(),
                    manifest: serde_json::from_str(&text).unwrap(),
                });
            }
        }
        assert!(all.len() >= 5, "the fixtures are there");
        all
    }

    fn numbers(&self, field: &str) -> Vec<usize> {
        let list = self.manifest[field].as_array().unwrap();
        list.iter().map(|n| n.as_u64().unwrap() as usize).collect()
    }

    fn tokens(&self) -> Vec<TokenId> {
        let ids = self.numbers("ids").into_iter();
        ids.map(|id| TokenId(id as u32)).collect()
    }

    fn plan(&self, options: Options) -> OpenPlan {
        let loaded = model::load(&path(&self.stem, "gguf")).unwrap();
        // Half precision in the cache alone costs the oracle 1e-3.
        let kv = match options.reference {
            true => KvFormat::F32,
            false => KvFormat::F16,
        };
        OpenPlan {
            target: loaded.spec,
            weights: loaded.weights,
            kv: KvFormats { k: kv, v: kv },
            limits: Limits {
                sequences: 2,
                context: 256,
                tree_nodes: 8,
                prefill_chunk: 256,
            },
        }
    }

    fn open(&self, options: Options) -> Box<dyn InspectedRunner> {
        CpuBackend::new(options)
            .open_inspected(self.plan(options), &mut |_| {})
            .unwrap()
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/fixtures/models")
}

fn path(stem: &str, ending: &str) -> PathBuf {
    folder().join(format!("{stem}.{ending}"))
}

/// A `<f4` array in NumPy's format 1.0: its dimensions and values.
fn npy(stem: &str, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path(stem, &format!("{name}.npy"))).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let header = u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
    let text = std::str::from_utf8(&bytes[10..10 + header]).unwrap();
    assert!(text.contains("'<f4'") && text.contains("'fortran_order': False"));
    let shape = text.split_once("'shape': (").unwrap().1;
    let shape = shape.split_once(')').unwrap().0.split(',');
    let shape = shape.filter(|n| !n.trim().is_empty());
    let values = bytes[10 + header..].chunks_exact(4);
    (
        shape.map(|n| n.trim().parse().unwrap()).collect(),
        values
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect(),
    )
}

/// Worst and mean absolute difference.
fn distance(found: &[f32], expected: &[f32]) -> (f32, f32) {
    assert_eq!(found.len(), expected.len());
    let differences: Vec<f32> = found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .collect();
    assert!(differences.iter().all(|d| d.is_finite()));
    let worst = differences.iter().copied().fold(0.0, f32::max);
    (
        worst,
        differences.iter().sum::<f32>() / differences.len() as f32,
    )
}

fn full_rows(runner: &mut dyn InspectedRunner, tokens: &[TokenId], at: &[usize]) -> Vec<Row> {
    let seq = runner.open(tokens.len()).unwrap();
    let asks: Vec<(usize, Ask)> = at.iter().map(|&at| (at, Ask::full())).collect();
    let rows = runner.prefill(seq, tokens, &asks).unwrap();
    runner.close(seq);
    rows
}

const ORACLE: Options = Options {
    reference: true,
    threads: Some(2),
};
const FAST: Options = Options {
    reference: false,
    threads: Some(2),
};

/// Differences of the logits of one prefill over all tokens.
fn logits_distance(golden: &Golden, options: Options) -> (f32, f32) {
    let (_, expected) = npy(&golden.stem, "logits");
    let mut runner = golden.open(options);
    let positions = golden.numbers("logit_positions");
    let rows = full_rows(&mut *runner, &golden.tokens(), &positions);
    let found: Vec<f32> = rows.into_iter().flat_map(|row| row.logits).collect();
    distance(&found, &expected)
}

#[test]
fn the_oracles_logits_are_those_of_the_independent_implementation() {
    for golden in Golden::all() {
        let (worst, _) = logits_distance(&golden, ORACLE);
        assert!(worst < 1e-4, "{}: {worst}", golden.stem);
    }
}

#[test]
fn the_fast_paths_logits_are_within_the_error_of_eight_bit_activations() {
    for golden in Golden::all() {
        let (_, mean) = logits_distance(&golden, FAST);
        assert!(mean < 0.06, "{}: {mean}", golden.stem);
    }
}

#[test]
fn no_layer_of_the_oracle_diverges() {
    for golden in Golden::all() {
        let (shape, expected) = npy(&golden.stem, "hidden");
        let mut runner = golden.open(ORACLE);
        let layers = runner.hidden_states(&golden.tokens()).unwrap();
        let positions = golden.numbers("hidden_positions");
        let hidden = shape[2];
        assert_eq!(shape, [layers.len() + 1, positions.len(), hidden]);
        for (i, layer) in layers.iter().enumerate() {
            let found: Vec<f32> = positions
                .iter()
                .flat_map(|at| layer[at * hidden..][..hidden].to_vec())
                .collect();
            let size = positions.len() * hidden;
            let (worst, _) = distance(&found, &expected[(i + 1) * size..][..size]);
            assert!(worst < 1e-4, "{} layer {i}: {worst}", golden.stem);
        }
    }
}

#[test]
fn delta_state_and_window_after_the_prompt_are_right() {
    for golden in Golden::all() {
        if !golden.numbers("recurrent_layers").contains(&0) {
            continue;
        }
        let mut runner = golden.open(ORACLE);
        let tokens = golden.tokens();
        let seq = runner.open(tokens.len()).unwrap();
        runner.prefill(seq, &tokens, &[]).unwrap();
        for (name, found) in [
            ("delta", runner.delta_state(seq, 0).unwrap()),
            ("conv", runner.conv_window(seq, 0).unwrap()),
        ] {
            let (worst, _) = distance(&found, &npy(&golden.stem, name).1);
            assert!(worst < 1e-4, "{} {name}: {worst}", golden.stem);
        }
    }
}

#[test]
fn greedy_decoding_gives_the_published_ids() {
    for golden in Golden::all() {
        let mut runner = golden.open(ORACLE);
        let tokens = golden.tokens();
        let seq = runner.open(256).unwrap();
        let last = tokens.len() - 1;
        let rows = runner
            .prefill(seq, &tokens, &[(last, Ask::top(1))])
            .unwrap();
        let mut next = rows[0].ids[0];
        let mut ids = Vec::new();
        for _ in 0..golden.numbers("greedy_ids").len() {
            ids.push(next.0 as usize);
            let tree = Tree::root(next);
            let item = VerifyItem {
                seq,
                tree: &tree,
                asks: &[Ask::top(1)],
            };
            next = runner.verify(&[item]).unwrap()[0][0].ids[0];
            let path = tree.path_to(contract::NodeIdx::ROOT);
            runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
        }
        assert_eq!(ids, golden.numbers("greedy_ids"), "{}", golden.stem);
    }
}

#[test]
fn a_runner_holds_what_was_estimated_and_tells_how_far_loading_is() {
    for golden in Golden::all() {
        for options in [FAST, ORACLE] {
            let plan = golden.plan(options);
            let backend = CpuBackend::new(options);
            let estimate = backend.estimate(&plan).unwrap();
            let mut last = None;
            let runner = backend.open(plan, &mut |p| last = Some(p)).unwrap();
            assert_eq!(runner.info().memory, estimate, "{}", golden.stem);
            let last = last.unwrap();
            assert_eq!(last.done_bytes, last.total_bytes);
        }
    }
}
