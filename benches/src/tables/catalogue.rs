//! The tables of `benches/README.md`: file, filter, row labels and columns of each.

use super::{Column, Measurement, Table};

/// A column in the unit of its field.
const fn column(heading: &'static str, field: &'static str, decimals: usize) -> Column {
    Column {
        heading,
        field,
        scale: 1.0,
        decimals,
    }
}

/// A column in percent of a field that is a share.
const fn percent(heading: &'static str, field: &'static str, decimals: usize) -> Column {
    Column {
        heading,
        field,
        scale: 100.0,
        decimals,
    }
}

/// A table of single passes, one row per case.
const fn passes(name: &'static str, filter: fn(&Measurement) -> bool) -> Table {
    Table {
        name,
        file: "cuda_bench.jsonl",
        filter,
        label: &[("case", "case")],
        columns: PASS,
        sources: true,
    }
}

const PASS: &[Column] = &[
    column("ms", "ms", 3),
    column("lowest", "low_ms", 3),
    column("highest", "high_ms", 3),
    column("tokens/s", "tokens_per_s", 1),
    percent("share of peak bandwidth, %", "share_of_roofline", 0),
    column("J/token", "joules_per_token", 3),
];

fn is_pass(m: &Measurement, device: &str, model: &str) -> bool {
    m.text("bench") == "step"
        && m.is_of_a_commit()
        && m.begins("device", device)
        && m.begins("model", model)
        && m.number("ms").is_some()
}

/// Whether a run used the fastest kernels instead of the batch-invariant ones.
fn is_fastest(m: &Measurement) -> bool {
    let command = m.text("command");
    ["--sums fast", "--numerics fastest"]
        .iter()
        .any(|flag| command.contains(flag))
}

/// Whether the tables have a row for the case; other cases were single experiments.
fn has_row(m: &Measurement) -> bool {
    let case = m.text("case");
    let shown = ["draft", "pp 512", "pp 2048", "tg 128"];
    shown.contains(&case.as_str()) || case.starts_with("verify ")
}

fn is_at_512(m: &Measurement) -> bool {
    m.number("depth") == Some(512.0) && has_row(m)
}

fn is_deep(m: &Measurement) -> bool {
    let case = m.text("case");
    ["verify 1", "verify 23", "prefill from 0"].contains(&case.as_str())
}

fn is_speculative(m: &Measurement) -> bool {
    m.text("bench") == "whole_step" && m.begins("model", "qwen3.5-27b") && m.is_of_a_commit()
}

fn is_prefix_cache(m: &Measurement) -> bool {
    m.text("bench") == "prefix_cache"
        && m.is_of_a_commit()
        && m.begins("device", "NVIDIA")
        && !m.begins("case", "as many tokens")
        && m.number("first_token_ms").is_some()
}

/// Every generated table.
pub const TABLES: &[Table] = &[
    passes("h100-27b", |m| {
        is_pass(m, "NVIDIA H100", "qwen3.5-27b") && is_at_512(m) && !is_fastest(m)
    }),
    passes("h200-27b", |m| {
        is_pass(m, "NVIDIA H200", "qwen3.5-27b") && is_at_512(m) && !is_fastest(m)
    }),
    passes("h200-0.8b", |m| {
        is_pass(m, "NVIDIA H200", "qwen3.5-0.8b") && is_at_512(m)
    }),
    Table {
        name: "long-context",
        file: "depth_card.jsonl",
        filter: |m| is_pass(m, "NVIDIA H200", "qwen3.5-27b") && is_deep(m),
        label: &[("K/V types", "kv"), ("case", "case"), ("context", "depth")],
        columns: PASS,
        sources: true,
    },
    Table {
        name: "speculation",
        file: "speculation_card.jsonl",
        filter: is_speculative,
        label: &[
            ("GPU", "device"),
            ("sequences", "sequences"),
            ("node budget", "budget"),
            ("sized by measured costs", "cost_stop"),
            ("batch-invariant", "exact"),
        ],
        columns: &[
            column("nodes per tree", "nodes_per_tree", 1),
            column("ms per step", "ms", 2),
            column("draft", "draft_ms", 2),
            column("verify", "verify_ms", 2),
            column("tokens per step (mean)", "mean_tokens_per_step", 2),
            column("tokens/s (mean)", "mean_tokens_per_s", 0),
            column("against one sequence", "mean_times_one_sequence", 2),
        ],
        sources: true,
    },
    Table {
        name: "prefix-cache",
        file: "prefix_cache.jsonl",
        filter: is_prefix_cache,
        label: &[("device", "device"), ("model", "model"), ("case", "case")],
        columns: &[
            column("first token, ms", "first_token_ms", 0),
            column("prompt tokens", "prompt_tokens", 0),
            column("found in the cache", "cached_tokens", 0),
            percent("share of the cold time, %", "share_of_cold", 1),
        ],
        sources: false,
    },
    Table {
        name: "cpu-against-llamacpp",
        file: "cpu_vs_llamacpp.jsonl",
        filter: |m| m.get("engine").is_some() && m.number("pp512.median").is_some(),
        label: &[
            ("engine", "engine"),
            ("flash attention", "flash_attention"),
            ("runs", "scheduling"),
        ],
        columns: &[
            column("prefill of 512, tokens/s", "pp512.median", 1),
            column("decode of 128, tokens/s", "tg128.median", 1),
        ],
        sources: false,
    },
    Table {
        name: "cpu-kernels",
        file: "cpu_kernels.jsonl",
        filter: |m| m.text("bench") == "linear",
        label: &[
            ("type", "type"),
            ("rows", "rows"),
            ("columns", "cols"),
            ("kernels", "kernels"),
        ],
        columns: &[
            column("1 token, us", "n1_us", 1),
            percent("share of streaming read, %", "n1_share_of_read", 0),
            column("512 tokens, us", "n512_us", 0),
            column("Gop/s", "n512_gop_per_s", 0),
        ],
        sources: true,
    },
    Table {
        name: "server-overhead",
        file: "server_overhead.jsonl",
        filter: |m| m.text("bench") == "server_overhead",
        label: &[("metric", "metric"), ("streams", "streams")],
        columns: &[
            column("median, ms", "median_ms", 3),
            column("95th percentile", "p95_ms", 3),
            column("highest", "max_ms", 3),
        ],
        sources: true,
    },
];
