//! CPU device speed on one model file: a prompt in one call, and single-token decode steps, as a
//! JSON line.
//!
//!   cargo run --release -p benches --bin cpu_step -- MODEL.gguf [THREADS [REPETITIONS [PROMPT
//! GENERATE]]]
//!
//! Each repetition, after one warm-up, prefills PROMPT tokens (512) and runs GENERATE decode steps
//! (128) on an empty sequence. A step verifies and commits a one-node tree and requests the best
//! token, as a greedy request does. Arguments and work equal those of the other runtime's bench in
//! `harness/golden`.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use contract::{
    Backend, CommitItem, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, NodeIdx, Runner,
    TokenId, Tree, VerifyItem,
};
use cpu::{CpuBackend, CpuOptions};
use serde_json::json;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next().map(PathBuf::from) else {
        bail!("usage: cpu_step MODEL.gguf [THREADS [REPETITIONS [PROMPT GENERATE]]]");
    };
    let mut count = |default: usize| -> Result<usize> {
        arguments.next().map_or(Ok(default), |argument| {
            let count = argument.parse().with_context(|| argument.clone())?;
            if count == 0 {
                bail!("counts must be positive");
            }
            Ok(count)
        })
    };
    let (threads, repetitions) = (count(2)?, count(3)?);
    let (n_prompt, n_generate) = (count(512)?, count(128)?);

    let loaded = model::load(&path).with_context(|| path.display().to_string())?;
    let config = LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: 1,
            context: n_prompt.max(n_generate),
            tree_nodes: 1,
            prefill_chunk: n_prompt,
            pool_tokens: None,
        },
    };
    let backend = CpuBackend::new(CpuOptions {
        reference: false,
        threads: Some(threads),
    });
    let start = Instant::now();
    let mut runner = backend.open(config, &mut |_| {})?;
    let load_s = start.elapsed().as_secs_f64();
    let vocab = runner.info().vocab as u64;
    let tokens: Vec<TokenId> = (0..n_prompt.max(n_generate) as u64)
        .map(|i| TokenId((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % vocab) as u32))
        .collect();

    prompt(&mut *runner, &tokens[..n_prompt])?;
    generate(&mut *runner, &tokens[..n_generate.min(8)])?;
    let (mut pp, mut tg) = (Vec::new(), Vec::new());
    for _ in 0..repetitions {
        pp.push(prompt(&mut *runner, &tokens[..n_prompt])?);
        tg.push(generate(&mut *runner, &tokens[..n_generate])?);
    }
    let line = json!({
        "engine": "hearth",
        "model": path.file_name().map(|name| name.to_string_lossy().into_owned()),
        "threads": threads, "kernels": runner.info().device.features.first(), "load_s": load_s,
        "prompt": n_prompt, "generate": n_generate,
        "pp": pp, "pp_median": median(&pp), "tg": tg, "tg_median": median(&tg),
    });
    writeln!(std::io::stdout(), "{line}").context("standard output")
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

/// Tokens per second of one prompt in a single call.
fn prompt(runner: &mut dyn Runner, tokens: &[TokenId]) -> Result<f64> {
    let seq = runner.open(tokens.len())?;
    let start = Instant::now();
    runner.prefill(seq, tokens, &[(tokens.len() - 1, LogitsRequest::top_k(1))])?;
    let rate = tokens.len() as f64 / start.elapsed().as_secs_f64();
    runner.close(seq);
    Ok(rate)
}

/// Tokens per second of single-token decode steps.
fn generate(runner: &mut dyn Runner, tokens: &[TokenId]) -> Result<f64> {
    let seq = runner.open(tokens.len())?;
    let requests = [LogitsRequest::top_k(1)];
    let start = Instant::now();
    for &token in tokens {
        let tree = Tree::root(token);
        let items = [VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        }];
        runner.verify(&items)?;
        let path = tree.path(&[NodeIdx::ROOT])?;
        runner.commit(&[CommitItem { seq, path: &path }])?;
    }
    let rate = tokens.len() as f64 / start.elapsed().as_secs_f64();
    runner.close(seq);
    Ok(rate)
}
