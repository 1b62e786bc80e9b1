//! What is typed after `hearth bench`.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use contract::Tree;

use crate::cli::DeviceArgs;

/// What stands below the flags in `hearth bench --help`.
pub const BENCH_HELP: &str = "Examples:\n  hearth bench --synthetic qwen3.5-27b:q4_k_m --device cuda:0\n  \
    hearth bench --synthetic qwen3.5-0.8b:bf16 --pp 0 --tg 128 --verify '' --depth 0,4096\n  \
    hearth bench model.gguf --verify 1,24,4x8 --json lines.jsonl\n\n\
    Cases: pp N (N tokens of a prompt), tg N (N tokens one by one, row on the host), verify N (a tree of N\n\
    nodes) or SxN (S sequences with a tree of N each), draft. Medians over --reps runs, after one to warm up.";

/// `hearth bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The GGUF file to measure.
    #[arg(conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,
    /// A made-up model instead: a shape and a recipe, as for `hearth synth`.
    #[arg(long, value_name = "SHAPE:TYPES")]
    pub synthetic: Option<String>,
    /// Where and how it runs.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Lengths of prompts; 0 for none.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512,2048"
    )]
    pub pp: Vec<usize>,
    /// Tokens decoded one by one; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tg: usize,
    /// Trees to verify: nodes, or sequences x nodes.
    #[arg(long, value_name = "LIST", default_value = "1,8,16,24,32,48,64,4x8")]
    pub verify: String,
    /// A draft to measure as well: a weight type such as q8_0 for a made-up one, or a file.
    #[arg(long, value_name = "WHAT")]
    pub draft: Option<String>,
    /// Committed tokens before each case.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512"
    )]
    pub depth: Vec<usize>,
    /// How often each case runs.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub reps: usize,
    /// Append a JSON line for each case to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Seed of made-up weights and of tokens.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Trees of one verify call: so many, each of so many nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) trees: usize,
    pub(super) nodes: usize,
}

impl BenchArgs {
    /// The trees that `--verify` lists.
    pub(super) fn forms(&self) -> anyhow::Result<Vec<Form>> {
        self.verify
            .split(',')
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .map(form)
            .collect()
    }
}

fn form(text: &str) -> anyhow::Result<Form> {
    let (trees, nodes) = text.split_once('x').unwrap_or(("1", text));
    let count = |text: &str| {
        text.parse::<usize>()
            .ok()
            .filter(|n| *n > 0)
            .with_context(|| format!("--verify {text}: use numbers such as 24, or 4x8"))
    };
    let form = Form {
        trees: count(trees)?,
        nodes: count(nodes)?,
    };
    if form.trees * form.nodes > Tree::MAX_NODES {
        bail!("--verify {text}: at most {} nodes in all", Tree::MAX_NODES);
    }
    Ok(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_read_and_bounded() {
        assert_eq!(
            form("24").unwrap(),
            Form {
                trees: 1,
                nodes: 24
            }
        );
        assert_eq!(form("4x8").unwrap(), Form { trees: 4, nodes: 8 });
        for wrong in ["0", "x", "4x", "65", "8x9", "many"] {
            assert!(form(wrong).is_err(), "{wrong}");
        }
    }
}
