//! Perplexity of the licence text, against figures of two independent programs that computed in
//! f32 on the dequantised weights.

use std::sync::Arc;

use chat::Tokenizer;
use contract::{Backend, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, TokenId};
use cpu::{CpuBackend, CpuOptions};

use super::{GEMMA3, SMOLLM2, weights};

const TEXT: &str = include_str!("../../../../../LICENSE");
/// Tokens of the text, the beginning-of-text token included.
const N_TOKENS: usize = 2000;
/// The eight-bit activations and half-precision cache may move it by this share.
const ALLOWED: f64 = 0.005;
/// Rows of logits that are in memory at once.
const CHUNK: usize = 64;

/// e to the mean of the negative log-probabilities of all tokens but the first.
fn perplexity(file: &str) -> Option<f64> {
    let loaded = model::load(&weights(file)?).unwrap();
    let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
    let ids = tokenizer.encode_prompt_up_to(TEXT, usize::MAX.into());
    let ids: Vec<TokenId> = ids.unwrap().into_iter().take(N_TOKENS).collect();
    assert_eq!(ids.len(), N_TOKENS);
    let config = LoadConfig {
        target: Arc::clone(&loaded.spec),
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: 1,
            context: N_TOKENS,
            tree_nodes: 1,
            prefill_chunk: CHUNK,
            pool_tokens: None,
        },
    };
    let backend = CpuBackend::new(CpuOptions::default());
    let mut runner = backend.open(config, &mut |_| {}).unwrap();
    let seq = runner.open(N_TOKENS).unwrap();
    let mut total = 0.0;
    let mut next = ids.iter().skip(1);
    for chunk in ids.chunks(CHUNK) {
        let all = (0..chunk.len()).map(|row| (row, LogitsRequest::full()));
        let all: Vec<(usize, LogitsRequest)> = all.collect();
        let rows = runner.prefill(seq, chunk, &all).unwrap();
        for (row, next) in rows.iter().zip(next.by_ref()) {
            total += f64::from(row.raw_lse - row.raw[next.index()]);
        }
    }
    Some((total / (N_TOKENS - 1) as f64).exp())
}

fn check(file: &str, expected: f64) {
    let Some(found) = perplexity(file) else {
        return;
    };
    let off = found / expected - 1.0;
    assert!(off.abs() < ALLOWED, "{file}: {found}, {expected} expected");
}

#[test]
fn smollm2_perplexity_equals_that_of_two_independent_programs() {
    check(SMOLLM2, 13.515);
}

#[test]
fn gemma3_perplexity_equals_that_of_two_independent_programs() {
    check(GEMMA3, 8.852);
}
