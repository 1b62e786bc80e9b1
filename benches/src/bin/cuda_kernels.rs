//! CUDA kernel speed relative to memory bandwidth, as a table and optional JSON lines.
//!
//!   cargo run --release -p benches --bin cuda_kernels -- [--json FILE] [--rows N,N..] [--form
//! NAME=VALUE,..]... [AREA...]
//!
//! Areas: matmul (small-batch GEMM), chain (fused layers), prefill, delta, attention, orders
//! (attention in batch-invariant and fastest order), rows. The default is all. Lines are appended
//! to FILE. `--rows` sets the row counts of fused layers. `--form` may repeat: fused layers
//! compiled with these defines run interleaved with the shipped form.

use std::fs::OpenOptions;

use anyhow::{Context, Result, bail};
use benches::cuda::{
    Bench, Defines, attention, fused_layer, gated_delta, gemm_small_batch, prefill, rows,
};

/// An area's name and its bench.
type Area = (&'static str, fn(&mut Bench) -> Result<()>);

const AREAS: [Area; 7] = [
    ("matmul", gemm_small_batch::run),
    ("chain", fused_layer::run),
    ("prefill", prefill::run),
    ("delta", gated_delta::run),
    ("attention", attention::run),
    ("orders", attention::orders),
    ("rows", rows::run),
];

fn main() -> Result<()> {
    let mut json = None;
    let mut rows = Vec::new();
    let mut forms = Vec::new();
    let mut wanted = Vec::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--json" {
            let name = words.next().context("--json needs a file name")?;
            let file = OpenOptions::new().create(true).append(true).open(&name);
            json = Some(file.with_context(|| name)?);
        } else if word == "--rows" {
            let list = words.next().context("--rows needs numbers")?;
            for number in list.split(',') {
                rows.push(number.parse().with_context(|| format!("--rows {list}"))?);
            }
        } else if word == "--form" {
            let list = words.next().context("--form needs NAME=VALUE")?.leak();
            let define = |one: &'static str| {
                Some((one.split_once('=')?.0, one.split_once('=')?.1.to_owned()))
            };
            let form: Option<Defines> = list.split(',').map(define).collect();
            forms.push(form.with_context(|| format!("--form {list}: not NAME=VALUE,.."))?);
        } else if AREAS.iter().any(|(name, _)| *name == word) {
            wanted.push(word);
        } else {
            bail!(
                "{word} is no area; areas are {}",
                AREAS.map(|(name, _)| name).join(", ")
            );
        }
    }
    let mut bench = Bench::open(json)?;
    bench.rows = rows;
    bench.forms = forms;
    for (name, run) in AREAS {
        if wanted.is_empty() || wanted.iter().any(|word| word == name) {
            run(&mut bench).with_context(|| format!("area {name}"))?;
        }
    }
    Ok(())
}
