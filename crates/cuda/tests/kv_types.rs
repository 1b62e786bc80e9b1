//! Divergence of each KV type, on the shapes of a real 27B model with random weights.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
}

use std::sync::Arc;

use contract::{Backend, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, Runner, TokenId};
use cuda::{CudaBackend, Options};
use model::synth::SynthSpec;

/// Layers kept, a quarter of them attention, so that errors pass through several layers.
const LAYERS: usize = 16;

fn backend() -> Option<CudaBackend> {
    let gpu = fixtures::gpu::gpu()?;
    let options = Options {
        compile: fixtures::gpu::compiling(),
        ..Options::default()
    };
    Some(CudaBackend::with_options(gpu.info().clone(), options))
}

/// Log-probabilities of the next token at 60 positions of an 800-token text.
fn decode_probabilities(backend: &CudaBackend, format: KvFormat) -> Vec<Vec<f64>> {
    let spec = SynthSpec::parse("qwen3.5-27b:q4_k_m-published").unwrap();
    let loaded = spec.load().unwrap();
    let mut spec = (*loaded.spec).clone();
    spec.layers.truncate(LAYERS);
    let config = LoadConfig {
        target: Arc::new(spec),
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: 1,
            context: 1024,
            tree_nodes: 1,
            prefill_chunk: 1024,
            pool_tokens: None,
        },
    };
    let mut runner: Box<dyn Runner> = backend.open(config, &mut |_| {}).unwrap();
    let seq = runner.open(1024).unwrap();
    let ids = (0..800_usize).map(|i| (i * i * 7919 + 104_729 * i + 13) % 248_000);
    let tokens: Vec<TokenId> = ids.map(|id| TokenId(id as u32)).collect();
    let requests: Vec<(usize, LogitsRequest)> = (200..800)
        .step_by(10)
        .map(|at| (at, LogitsRequest::full()))
        .collect();
    let rows = runner.prefill(seq, &tokens, &requests).unwrap();
    let log_probs = |row: contract::LogitsRow| {
        let lse = f64::from(row.raw_lse);
        row.raw.into_iter().map(|x| f64::from(x) - lse).collect()
    };
    rows.into_iter().map(log_probs).collect()
}

#[test]
fn kv_type_divergence_on_real_shapes_is_ordered_by_precision() {
    let Some(backend) = backend() else { return };
    let half = decode_probabilities(&backend, KvFormat::F16);
    let drift = |format: KvFormat| {
        let found = decode_probabilities(&backend, format);
        let of = |(p, q): (&Vec<f64>, &Vec<f64>)| -> f64 {
            p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum()
        };
        let mean = half.iter().zip(&found).map(of).sum::<f64>() / half.len() as f64;
        eprintln!("  {:6} KL {mean:.3e} against f16", format.name());
        mean
    };
    let [q8, q5, q4, tq3] = [
        KvFormat::Q8_0,
        KvFormat::Q5_0,
        KvFormat::Q4_0,
        KvFormat::Tq3_0,
    ]
    .map(drift);
    assert!(q8 < q5 && q5 < q4 && q4 < tq3, "{q8} {q5} {q4} {tq3}");
}
