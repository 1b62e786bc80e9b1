//! Table of `hearth inspect --plan`: memory by context length and KV cache type, before anything is
//! loaded.

use std::fmt::Write;
use std::sync::Arc;

use anyhow::Context;
use contract::{
    Backend, DeviceError, ExpertPlacement, KvFormat, KvFormats, Limits, LoadConfig, ModelSpec,
};
use serde_json::{Value, json};

use crate::cli::InspectArgs;
use crate::open::drafting::Drafting;
use crate::open::headroom::UsableMemory;
use crate::open::{self, memory_fit};
use crate::progress::bytes_text;

/// Context lengths of the table.
const CONTEXTS: [usize; 6] = [8_192, 16_384, 32_768, 65_536, 131_072, 262_144];

/// One KV cache type.
struct FormatRow {
    format: KvFormat,
    /// Bytes per token.
    token_bytes: u64,
    /// Total bytes with a pool of one context, by context.
    totals: Vec<u64>,
    /// Longest context that fits, in tokens.
    longest: usize,
}

/// Device to plan for: this machine's, or a GPU with the given memory.
///
/// # Errors
/// If there is no such device, or the size is invalid.
pub(crate) fn device(args: &InspectArgs) -> anyhow::Result<Box<dyn Backend>> {
    let Some(text) = &args.plan.vram else {
        return open::device(&args.device);
    };
    let total_bytes =
        open::bytes_of(text).with_context(|| format!("--vram {text}: use a size such as 24GiB"))?;
    let here = cuda::probe()
        .ok()
        .and_then(|cards| cards.into_iter().next());
    let gpu = cuda::GpuInfo {
        total_bytes,
        name: format!("a card with {}", bytes_text(total_bytes)),
        ..here.unwrap_or_else(default_gpu)
    };
    let mut options = cuda::Options {
        assume_free: true,
        ..open::choice(&args.device)?.gpu
    };
    let backend = cuda::CudaBackend::with_options(gpu.clone(), options.clone());
    options.expert_room = Some(UsableMemory::of(&args.device, &backend.probe()?)?.bytes);
    Ok(Box::new(cuda::CudaBackend::with_options(gpu, options)))
}

/// Default GPU of `--plan`: an RTX 3090.
fn default_gpu() -> cuda::GpuInfo {
    cuda::GpuInfo {
        ordinal: 0,
        name: String::new(),
        capability: (8, 6),
        run_as: None,
        sm_count: 82,
        total_bytes: 0,
    }
}

/// The table as text and as JSON.
pub(crate) fn table(
    backend: &dyn Backend,
    loaded: &model::LoadedModel,
    args: &InspectArgs,
    drafting: &Drafting,
) -> anyhow::Result<(String, Value)> {
    let device = backend.probe()?;
    let room = UsableMemory::of(&args.device, &device)?.bytes;
    let target = drafting.target(&loaded.spec);
    let config = |format: KvFormat, context: usize| LoadConfig {
        target: Arc::clone(&target),
        weights: Arc::clone(&loaded.weights),
        draft: drafting.config.clone(),
        batch_invariant: drafting.batch_invariant,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: args.max_sequences,
            context,
            tree_nodes: drafting.tree_nodes(),
            prefill_chunk: memory_fit::prefill_chunk(&args.device, device.id != "cpu"),
            // One sequence at full length; a larger pool only allows more long sequences.
            pool_tokens: Some(args.device.kv_pool.unwrap_or(0)),
        },
    };
    let mut rows = Vec::new();
    for format in KvFormat::ALL {
        if format == KvFormat::F32 {
            continue;
        }
        let planned_gib = |context: usize| match backend.estimate(&config(format, context)) {
            Ok(memory) => Ok(Some(memory.total_bytes())),
            Err(DeviceError::Unsupported { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        // Unsupported types have no row.
        let totals: Result<Option<Vec<u64>>, DeviceError> =
            CONTEXTS.into_iter().map(planned_gib).collect();
        let Some(totals) = totals? else { continue };
        let fits = |n: usize| planned_gib(n).is_ok_and(|bytes| bytes.is_some_and(|b| b <= room));
        rows.push(FormatRow {
            format,
            token_bytes: token_bytes(&target, format),
            totals,
            longest: memory_fit::longest_context(memory_fit::MAX_CONTEXT, fits),
        });
    }
    Ok((text(&rows, room, args), json_of(&rows, room, args)))
}

/// Where experts lie and what that costs, behind the reasons for the cache.
pub(crate) fn expert_text(experts: ExpertPlacement) -> String {
    let ms = experts.step_us as f64 / 1e3;
    format!(
        "; {} of the {} experts of each layer on the card, {} in host memory: about {:.0} tokens/s          of one sequence if all experts are used alike ({ms:.1} ms, {:.0} GB/s assumed of the bus)",
        experts.on_device,
        experts.n_experts,
        bytes_text(experts.outside_bytes),
        1e3 / ms,
        experts.bus_bytes_per_s as f64 / 1e9,
    )
}

/// KV bytes per token.
fn token_bytes(spec: &ModelSpec, format: KvFormat) -> u64 {
    let layers = spec.kv_layers();
    layers
        .map(|a| 2 * format.bytes(a.n_kv_heads * a.head_dim) as u64)
        .sum()
}

fn text(rows: &[FormatRow], room: u64, args: &InspectArgs) -> String {
    let mut text = format!(
        "\nmemory for {} sequences that share one context, in GiB; what does not fit {} is in brackets\n  {:<8}{:>10}",
        args.max_sequences,
        bytes_text(room),
        "type",
        "B/token"
    );
    for context in CONTEXTS {
        let _ = write!(text, "{:>10}", format!("{}K", context / 1024));
    }
    text.push_str("   longest\n");
    for row in rows {
        let _ = write!(text, "  {:<8}{:>10}", row.format.name(), row.token_bytes);
        for total in &row.totals {
            let gib = *total as f64 / f64::from(1 << 30);
            let shown = if *total <= room {
                format!("{gib:.2} ")
            } else {
                format!("({gib:.2})")
            };
            let _ = write!(text, "{shown:>10}");
        }
        let _ = writeln!(text, "{:>10}", row.longest);
    }
    text
}

fn json_of(rows: &[FormatRow], room: u64, args: &InspectArgs) -> Value {
    let rows = rows.iter().map(|row| {
        let totals = CONTEXTS.iter().zip(&row.totals);
        let totals = totals.map(
            |(context, bytes)| json!({"context": context, "bytes": bytes, "fits": *bytes <= room}),
        );
        json!({
            "type": row.format.name(),
            "token_bytes": row.token_bytes,
            "longest_context": row.longest,
            "totals": totals.collect::<Vec<Value>>(),
        })
    });
    json!({
        "room_bytes": room,
        "sequences": args.max_sequences,
        "pool_tokens": args.device.kv_pool,
        "types": rows.collect::<Vec<Value>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::{DraftLoad, DraftLoadConfig, QuantType};
    use model::synth::{SynthSpec, draft_for};

    /// Planned GiB of the 27B shape, upper bounds of driver memory included.
    fn planned_gib(capability: (u32, u32), (format, context): (KvFormat, usize)) -> f64 {
        let spec = SynthSpec::parse("qwen3.5-27b:q4_k_m-published").unwrap();
        let loaded = spec.load().unwrap();
        let made = draft_for(&loaded, QuantType::Q8_0, 1);
        let gpu = cuda::GpuInfo {
            capability,
            run_as: None,
            sm_count: if capability == (9, 0) { 132 } else { 82 },
            total_bytes: 24 << 30,
            ..default_gpu()
        };
        let config = LoadConfig {
            target: Arc::clone(&loaded.spec),
            weights: Arc::clone(&loaded.weights),
            draft: Some(DraftLoadConfig {
                spec: Arc::clone(&made.spec),
                weights: Arc::clone(&made.weights),
                kv: KvFormat::F16,
                load: DraftLoad::AtOpen,
            }),
            batch_invariant: false,
            kv: KvFormats {
                k: format,
                v: format,
            },
            limits: Limits {
                sequences: 1,
                context,
                tree_nodes: 23,
                prefill_chunk: 2048,
                pool_tokens: None,
            },
        };
        let memory = cuda::CudaBackend::new(gpu).estimate(&config).unwrap();
        memory.total_bytes() as f64 / f64::from(1 << 30)
    }

    /// Contexts that a 24 GiB GPU must hold, with a draft and trees of 22 drafted nodes.
    #[test]
    fn long_contexts_fit_a_24_gib_gpu() {
        for capability in [(8, 6), (9, 0)] {
            for wanted in [
                (KvFormat::Q8_0, 131_072 + 512),
                (KvFormat::Q4_0, 262_144),
                (KvFormat::Tq3_0, 262_144),
            ] {
                let gib = planned_gib(capability, wanted);
                assert!(gib < 23.6, "{wanted:?} on {capability:?}: {gib:.2} GiB");
            }
        }
    }
}
