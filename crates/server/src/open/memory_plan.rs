//! Table of `hearth inspect --plan`: memory by context length and KV cache type, before anything is
//! loaded.

use std::fmt::Write;
use std::sync::Arc;

use anyhow::{Context, bail};
use contract::{
    Backend, DeviceError, ExpertPlacement, KvFormat, KvFormats, Limits, LoadConfig, ModelSpec,
};
use serde_json::{Value, json};

use crate::cli::{DeviceArgs, InspectArgs};
use crate::open::devices::{self, DeviceChoice};
use crate::open::drafting::Drafting;
use crate::open::headroom::UsableMemory;
use crate::open::placement::PlacementChoice;
use crate::open::{self, memory_fit};
use crate::progress::bytes_text;

/// Context lengths of the table.
const CONTEXTS: [usize; 6] = [8_192, 16_384, 32_768, 65_536, 131_072, 262_144];

/// Memory of a configuration.
#[derive(Debug, Clone, Copy)]
struct PlannedMemory {
    /// Bytes of all devices.
    bytes: u64,
    /// Whether every device has room for its part.
    fits: bool,
}

/// One KV cache type.
struct FormatRow {
    format: KvFormat,
    /// Bytes per token.
    token_bytes: u64,
    /// With a pool of one context, by context.
    totals: Vec<PlannedMemory>,
    /// Longest context that fits, in tokens.
    longest: usize,
}

/// Device to plan for beside a scorer of `scorer_bytes`: this machine's, or GPUs with the given
/// memory.
///
/// # Errors
/// If there is no such device, or a size is invalid.
pub(crate) fn device(args: &InspectArgs, scorer_bytes: u64) -> anyhow::Result<Box<dyn Backend>> {
    let sizes = &args.plan.vram;
    let mut device = args.device.clone();
    // Without a list, the GPUs of several sizes share the layers, unless the model's is named.
    if sizes.len() > 1 && device.target_devices.is_empty() && device.device == "auto" {
        device.target_devices = (0..sizes.len()).map(|i| format!("cuda:{i}")).collect();
        let draft = args.plan.draft_device.as_deref();
        device.target_devices.retain(|name| Some(&**name) != draft);
    }
    let mut choice = open::choice(&args.device)?;
    choice.placement = PlacementChoice::of(&device, args.plan.draft_device.as_deref())?;
    if sizes.is_empty() {
        return devices::choose(&choice);
    }
    let mut totals = Vec::with_capacity(sizes.len());
    for text in sizes {
        let bytes = open::bytes_of(text)
            .with_context(|| format!("--vram {text}: use a size such as 24GiB"))?;
        totals.push(bytes);
    }
    let gpu = |name: &str| -> anyhow::Result<Box<dyn Backend>> {
        let ordinal = match name.strip_prefix("cuda:") {
            Some(number) => number.parse().ok(),
            None => Some(0),
        };
        // A single size is that of every GPU.
        let total = match (&totals[..], ordinal) {
            ([total], _) => Some(total),
            (several, Some(ordinal)) => several.get(ordinal as usize),
            _ => None,
        };
        let Some((ordinal, total)) = ordinal.zip(total) else {
            bail!(
                "--vram has {} sizes; give one for {name} as well",
                sizes.len()
            );
        };
        imagined_gpu(ordinal, (*total, scorer_bytes), (&args.device, &choice))
    };
    match &choice.placement {
        Some(placement) => Ok(Box::new(placement.backend(&|name| {
            if name == "cpu" {
                return devices::choose(&DeviceChoice {
                    name: name.to_owned(),
                    placement: None,
                    ..choice.clone()
                });
            }
            gpu(name)
        })?)),
        None => gpu(&args.device.device),
    }
}

/// A GPU with this much memory, of which a scorer takes a part: of this machine's kind, or an RTX
/// 3090.
///
/// # Errors
/// If a limit of the flags is invalid.
fn imagined_gpu(
    ordinal: u32,
    (total_bytes, scorer_bytes): (u64, u64),
    (args, choice): (&DeviceArgs, &DeviceChoice),
) -> anyhow::Result<Box<dyn Backend>> {
    let here = cuda::probe()
        .ok()
        .and_then(|cards| cards.into_iter().next());
    let gpu = cuda::GpuInfo {
        ordinal,
        total_bytes,
        name: format!("a card with {}", bytes_text(total_bytes)),
        ..here.unwrap_or_else(default_gpu)
    };
    let mut options = cuda::Options {
        assume_free: true,
        ..choice.gpu.clone()
    };
    let backend = cuda::CudaBackend::with_options(gpu.clone(), options.clone());
    let usable = UsableMemory::of(args, &backend.probe()?)?.beside(scorer_bytes);
    options.expert_room = Some(usable.bytes);
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

/// The table as text and as JSON, beside a scorer of `scorer_bytes`.
pub(crate) fn table(
    backend: &dyn Backend,
    loaded: &model::LoadedModel,
    args: &InspectArgs,
    (drafting, scorer_bytes): (&Drafting, u64),
) -> anyhow::Result<(String, Value)> {
    let device = backend.probe()?;
    let usable = UsableMemory::of(&args.device, &device)?;
    let room = usable.beside(scorer_bytes).bytes;
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
            prefill_chunk: memory_fit::prefill_chunk(&args.device, !device.is_cpu()),
            // One sequence at full length; a larger pool only allows more long sequences.
            pool_tokens: Some(args.device.kv_pool.unwrap_or(0)),
        },
    };
    let mut rows = Vec::new();
    for format in KvFormat::ALL {
        if format == KvFormat::F32 {
            continue;
        }
        let planned = |context: usize| match planned(backend, &config(format, context), room) {
            Ok(planned) => Ok(Some(planned)),
            Err(DeviceError::Unsupported { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        // Unsupported types have no row.
        let totals: Result<Option<Vec<PlannedMemory>>, DeviceError> =
            CONTEXTS.into_iter().map(planned).collect();
        let Some(totals) = totals? else { continue };
        let fits = |n: usize| planned(n).is_ok_and(|planned| planned.is_some_and(|p| p.fits));
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
        "; {} of the {} experts of each layer on the card, {} in host memory: about {:.0} tokens/s \
         of one sequence if all experts are used alike ({ms:.1} ms, {:.0} GB/s assumed of the bus)",
        experts.on_device,
        experts.n_experts,
        bytes_text(experts.outside_bytes),
        1e3 / ms,
        experts.bus_bytes_per_s as f64 / 1e9,
    )
}

/// Memory of a configuration on a device with `room` bytes, or on several devices.
fn planned(
    backend: &dyn Backend,
    config: &LoadConfig,
    room: u64,
) -> Result<PlannedMemory, DeviceError> {
    if let Some(placement) = backend.placement(config)? {
        return Ok(PlannedMemory {
            bytes: placement.total_bytes(),
            fits: placement.require_memory().is_ok(),
        });
    }
    let bytes = backend.estimate(config)?.total_bytes();
    Ok(PlannedMemory {
        bytes,
        fits: bytes <= room,
    })
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
            let gib = total.bytes as f64 / f64::from(1 << 30);
            let shown = if total.fits {
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
            |(context, total)| json!({"context": context, "bytes": total.bytes, "fits": total.fits}),
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
