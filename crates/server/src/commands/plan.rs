//! The table of `hearth inspect --plan`: what a model takes for any context and storage of keys and values,
//! before anything is loaded.

use std::fmt::Write;
use std::sync::Arc;

use anyhow::Context;
use contract::{Backend, KvFormat, KvFormats, Limits, ModelSpec, OpenPlan};
use serde_json::{Value, json};

use crate::cli::InspectArgs;
use crate::commands::drafting::Drafting;
use crate::commands::open;
use crate::commands::progress::bytes_text;

/// Contexts of the table, in tokens.
const CONTEXTS: [usize; 6] = [8_192, 16_384, 32_768, 65_536, 131_072, 262_144];
const CHUNK: usize = 512;
const CARD_CHUNK: usize = 2048;

/// One storage of keys and values.
struct Line {
    format: KvFormat,
    /// Bytes of one token of one sequence.
    token_bytes: u64,
    /// Bytes in all, by context.
    totals: Vec<u64>,
    /// The longest context that fits, in tokens.
    longest: u64,
}

/// The table for people and for programs.
pub(super) fn table(
    loaded: &model::Loaded,
    args: &InspectArgs,
    drafting: &Drafting,
) -> anyhow::Result<(String, Value)> {
    let backend = open::device(&args.device)?;
    let device = backend.probe()?;
    let room = match &args.plan.vram {
        Some(text) => open::bytes_of(text)
            .with_context(|| format!("--vram {text}: use a size such as 24GiB"))?,
        None => device.free_bytes,
    };
    let sequences = args.max_sequences as u64;
    // Everything but keys and values, which hardly grows with the context.
    let mut rests = Vec::new();
    for context in CONTEXTS {
        rests.push(rest(
            backend.as_ref(),
            loaded,
            (args, drafting),
            (context, device.id.as_str()),
        )?);
    }
    let lines = KvFormat::ALL
        .into_iter()
        .filter(|format| *format != KvFormat::F32);
    let lines: Vec<Line> = lines
        .map(|format| {
            let token_bytes = token_bytes(&loaded.spec, format);
            let kv = |context: usize| token_bytes * sequences * context as u64;
            let totals = CONTEXTS.iter().zip(&rests).map(|(n, rest)| rest + kv(*n));
            let most = rests.last().copied().unwrap_or(0);
            Line {
                format,
                token_bytes,
                totals: totals.collect(),
                longest: room.saturating_sub(most) / (token_bytes * sequences).max(1),
            }
        })
        .collect();
    Ok((text(&lines, room, args), json_of(&lines, room, args)))
}

/// Bytes of everything but keys and values at a context.
fn rest(
    backend: &dyn Backend,
    loaded: &model::Loaded,
    (args, drafting): (&InspectArgs, &Drafting),
    (context, device): (usize, &str),
) -> anyhow::Result<u64> {
    let plan = OpenPlan {
        target: Arc::clone(&loaded.spec),
        weights: Arc::clone(&loaded.weights),
        draft: drafting.plan.clone(),
        exact: drafting.exact,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: args.max_sequences,
            context,
            tree_nodes: drafting.tree_nodes(),
            prefill_chunk: args.device.chunk.unwrap_or(match device {
                "cpu" => CHUNK,
                _ => CARD_CHUNK,
            }),
        },
    };
    let memory = backend.estimate(&plan)?;
    Ok(memory.total_bytes() - memory.kv_bytes)
}

/// Bytes of the keys and values of one token.
fn token_bytes(spec: &ModelSpec, format: KvFormat) -> u64 {
    let layers = spec.attention_layers();
    layers
        .map(|a| 2 * format.bytes(a.n_kv_heads * a.head_dim) as u64)
        .sum()
}

fn text(lines: &[Line], room: u64, args: &InspectArgs) -> String {
    let mut text = format!(
        "\nmemory for {} sequences, in GiB; what does not fit {} is in brackets\n  {:<8}{:>10}",
        args.max_sequences,
        bytes_text(room),
        "type",
        "B/token"
    );
    for context in CONTEXTS {
        let _ = write!(text, "{:>10}", format!("{}K", context / 1024));
    }
    text.push_str("   longest\n");
    for line in lines {
        let _ = write!(text, "  {:<8}{:>10}", line.format.name(), line.token_bytes);
        for total in &line.totals {
            let gib = *total as f64 / f64::from(1 << 30);
            let shown = match *total <= room {
                true => format!("{gib:.2} "),
                false => format!("({gib:.2})"),
            };
            let _ = write!(text, "{shown:>10}");
        }
        let _ = writeln!(text, "{:>10}", line.longest);
    }
    text
}

fn json_of(lines: &[Line], room: u64, args: &InspectArgs) -> Value {
    let rows = lines.iter().map(|line| {
        let totals = CONTEXTS.iter().zip(&line.totals);
        let totals = totals.map(
            |(context, bytes)| json!({"context": context, "bytes": bytes, "fits": *bytes <= room}),
        );
        json!({
            "type": line.format.name(),
            "token_bytes": line.token_bytes,
            "longest_context": line.longest,
            "totals": totals.collect::<Vec<Value>>(),
        })
    });
    json!({
        "room_bytes": room,
        "sequences": args.max_sequences,
        "types": rows.collect::<Vec<Value>>(),
    })
}
