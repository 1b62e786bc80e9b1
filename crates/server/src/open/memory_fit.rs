//! Choice of KV cache type and context length: as requested, or the best that fits.
//!
//! - A requested type is used. Otherwise a GPU takes the first of q8_0, q4_0 and tq3_0 with which
//!   the requested context fits: each is smaller and less precise than the one before. The CPU
//!   takes f16: its memory is larger, and unpacked rows are fastest.
//! - A requested context is used or rejected. Otherwise it is the longest that fits, up to the
//!   trained length. On a GPU a coarser type is used only if the finer one leaves less than
//!   [`SUFFICIENT_CONTEXT`] tokens. On the CPU the limit is [`CPU_CONTEXT`] and a fifth of the
//!   memory stays free.
//! - This is for one sequence. Several share one pool: as many tokens as requested, else a full
//!   context each as far as they fit.

use std::sync::Arc;

use anyhow::{Context, bail};
use contract::{
    Backend, DeviceError, DeviceInfo, KvFormats, Limits, LoadConfig, MemoryPlan, Placement,
    PlacementError,
};

use crate::cli::DeviceArgs;
use crate::open::drafting::Drafting;
use crate::open::headroom::UsableMemory;
use crate::open::kv_candidates::{KvCandidates, choices};
use crate::open::memory_plan::expert_text;
use crate::progress::bytes_text;

/// Maximum default context on the CPU.
const CPU_CONTEXT: usize = 32_768;
/// Context with which a type is sufficient by default.
const SUFFICIENT_CONTEXT: usize = 32_768;
/// Minimum context.
const MIN_CONTEXT: usize = 1_024;
/// Minimum pool without a requested context.
const MIN_POOL: usize = 512;
/// Upper bound of a requested context.
pub(crate) const MAX_CONTEXT: usize = 1 << 24;
/// Default contexts are multiples of this, or the trained length.
const CONTEXT_STEP: usize = 256;
const DEFAULT_CHUNK: usize = 512;
/// A GPU needs more rows per prefill call.
const GPU_CHUNK: usize = 2048;
/// Memory request of a command, before the context is fitted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryRequest {
    /// Concurrent sequences.
    pub sequences: usize,
    /// Default context in tokens; `None` is as long as fits.
    pub context: Option<usize>,
    /// Maximum tree nodes.
    pub tree_nodes: usize,
}

/// A configuration that fits, with its memory use and device.
pub(crate) struct FittedConfig {
    /// What to open.
    pub config: LoadConfig,
    /// Memory use.
    pub memory: MemoryPlan,
    /// Which device runs what, if there are several.
    pub placement: Option<Placement>,
    /// Device.
    pub device: DeviceInfo,
    /// The memory that the plan may take.
    pub usable: UsableMemory,
    /// Why this KV cache type and context were chosen.
    pub why: String,
}

/// The choice.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KvChoice {
    kv: KvFormats,
    context: usize,
    why: String,
}

/// Inputs of the choice.
struct FitBudget<'a> {
    choices: &'a KvCandidates,
    /// Requested context.
    asked: Option<usize>,
    /// Maximum default context, and the context with which a type is sufficient.
    longest: usize,
    enough: usize,
    /// Bytes available.
    bytes: u64,
    /// The bytes available in words, for refusals.
    free: String,
}

fn name(kv: KvFormats) -> String {
    if kv.k == kv.v {
        kv.k.name().to_owned()
    } else {
        format!("{} keys and {} values", kv.k.name(), kv.v.name())
    }
}

/// Chooses by bytes at a context; skips types that the device does not support, except the last.
fn choose_kv(
    budget: &FitBudget<'_>,
    bytes_for: impl Fn(KvFormats, usize) -> Result<u64, DeviceError>,
) -> anyhow::Result<KvChoice> {
    let mut rejected: Vec<String> = Vec::new();
    let mut best: Option<KvChoice> = None;
    let last = budget.choices.formats.len().saturating_sub(1);
    for (i, kv) in budget.choices.formats.iter().enumerate() {
        let min_bytes =
            match bytes_for(*kv, budget.asked.unwrap_or(MIN_CONTEXT.min(budget.longest))) {
                Ok(bytes) => bytes,
                Err(DeviceError::Unsupported { .. }) if i < last => {
                    tracing::debug!("the device does not store {}; trying the next", name(*kv));
                    rejected.push(format!("the device does not store {}", name(*kv)));
                    continue;
                }
                Err(DeviceError::Placement(error))
                    if matches!(*error, PlacementError::LacksMemory { .. }) =>
                {
                    rejected.push(format!("{}: {error}", name(*kv)));
                    continue;
                }
                Err(_) if best.is_some() => break,
                Err(error) => return Err(error.into()),
            };
        let too_large = |bytes: u64| {
            format!(
                "{} would take {} of {}",
                name(*kv),
                bytes_text(bytes),
                bytes_text(budget.bytes)
            )
        };
        if min_bytes > budget.bytes {
            rejected.push(too_large(min_bytes));
            continue;
        }
        let fits = |n: usize| bytes_for(*kv, n).is_ok_and(|bytes| bytes <= budget.bytes);
        let context = match budget.asked {
            Some(context) => context,
            None => longest_context(budget.longest, fits),
        };
        let enough = budget.asked.is_some() || context >= budget.enough.min(budget.longest);
        let choice = KvChoice {
            kv: *kv,
            context,
            why: explain(budget, *kv, (context, &rejected)),
        };
        if enough {
            return Ok(choice);
        }
        rejected.push(format!("{} leaves {context} tokens", name(*kv)));
        if best.as_ref().is_none_or(|best| best.context < context) {
            best = Some(choice);
        }
    }
    best.with_context(|| refusal_text(budget, &rejected, bytes_for))
}

/// Longest context up to `most` that fits; memory grows with the context.
pub(crate) fn longest_context(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    if fits(most) {
        return most;
    }
    let (mut low, mut high) = (0, most / CONTEXT_STEP);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle * CONTEXT_STEP) {
            low = middle
        } else {
            high = middle - 1
        }
    }
    low * CONTEXT_STEP
}

/// Explanation of the choice.
fn explain(
    budget: &FitBudget<'_>,
    kv: KvFormats,
    (context, rejected): (usize, &[String]),
) -> String {
    let storage = match (budget.choices.named, rejected.is_empty()) {
        (true, true) => "as asked".to_owned(),
        (false, true) if budget.choices.formats.len() == 1 => "the default here".to_owned(),
        (false, true) => "the finest of the types tried on a card".to_owned(),
        (_, false) => rejected.join(", "),
    };
    let length = match budget.asked {
        Some(_) => "as asked".to_owned(),
        None if context == budget.longest => "the longest taken unasked".to_owned(),
        None => "the longest that fits".to_owned(),
    };
    format!("{}: {storage}; context of {context}: {length}", name(kv))
}

/// Error text if nothing fits.
fn refusal_text(
    budget: &FitBudget<'_>,
    rejected: &[String],
    bytes_for: impl Fn(KvFormats, usize) -> Result<u64, DeviceError>,
) -> String {
    let free = &budget.free;
    let tried = rejected.join(", ");
    let Some(context) = budget.asked else {
        return format!("even a context of {MIN_CONTEXT} tokens does not fit: {tried}; {free}");
    };
    let fits = |kv: KvFormats| {
        longest_context(context, |n| {
            bytes_for(kv, n).is_ok_and(|b| b <= budget.bytes)
        })
    };
    let most = budget.choices.formats.iter().map(|kv| (fits(*kv), *kv));
    let instead = match most.max_by_key(|(n, _)| *n) {
        Some((n, kv)) if n >= CONTEXT_STEP => format!("--max-ctx {n} fits with {}", name(kv)),
        _ => "no context fits; use a smaller model".to_owned(),
    };
    format!(
        "--max-ctx {context}: a context of {context} tokens does not fit: {tried}, and {free}; \
         {instead}, or run fewer sequences, or use a coarser --kv-type"
    )
}

/// Tokens per prefill call.
pub(crate) fn prefill_chunk(args: &DeviceArgs, on_gpu: bool) -> usize {
    args.chunk
        .unwrap_or(if on_gpu { GPU_CHUNK } else { DEFAULT_CHUNK })
}

/// Fits a configuration without a draft.
pub(crate) fn fit(
    backend: &dyn Backend,
    loaded: &model::LoadedModel,
    args: &DeviceArgs,
    request: MemoryRequest,
) -> anyhow::Result<FittedConfig> {
    fit_with_draft(backend, loaded, args, (request, &Drafting::none()))
}

/// Fits a configuration. A requested context is used or rejected; otherwise the longest that fits.
pub(crate) fn fit_with_draft(
    backend: &dyn Backend,
    loaded: &model::LoadedModel,
    args: &DeviceArgs,
    (request, drafting): (MemoryRequest, &Drafting),
) -> anyhow::Result<FittedConfig> {
    fit_beside(backend, loaded, args, (request, drafting), 0)
}

/// As [`fit_with_draft`], beside a scorer of `scorer_bytes` on the same device.
pub(crate) fn fit_beside(
    backend: &dyn Backend,
    loaded: &model::LoadedModel,
    args: &DeviceArgs,
    (request, drafting): (MemoryRequest, &Drafting),
    scorer_bytes: u64,
) -> anyhow::Result<FittedConfig> {
    let trained = loaded.spec.trained_context;
    let device = backend.probe()?;
    let on_gpu = !device.is_cpu();
    let prefill_chunk = prefill_chunk(args, on_gpu);
    if prefill_chunk == 0 || !prefill_chunk.is_multiple_of(64) {
        bail!("--chunk {prefill_chunk}: use a multiple of 64");
    }
    let asked = args.max_ctx.or(request.context);
    if let Some(context) = asked {
        if context > MAX_CONTEXT {
            bail!(
                "--max-ctx {context}: use at most {MAX_CONTEXT}; the model was trained for {trained}"
            );
        }
        if context > trained {
            tracing::warn!(
                context,
                trained,
                "the context is longer than the model was trained for"
            );
        }
    }
    if let (Some(pool), Some(asked)) = (args.kv_pool, asked)
        && pool < asked
    {
        bail!("--kv-pool {pool}: use at least the {asked} of --max-ctx");
    }
    // Without --max-ctx the pool bounds the context.
    if let (Some(pool), None) = (args.kv_pool, asked)
        && pool < MIN_POOL.min(trained)
    {
        bail!("--kv-pool {pool}: use at least {MIN_POOL}, or set --max-ctx as well");
    }
    let target = drafting.target(&loaded.spec);
    let config = |kv: KvFormats, context: usize, pool: usize| LoadConfig {
        target: Arc::clone(&target),
        weights: Arc::clone(&loaded.weights),
        draft: drafting.config.clone(),
        batch_invariant: drafting.batch_invariant,
        kv,
        limits: Limits {
            sequences: request.sequences,
            context,
            tree_nodes: request.tree_nodes,
            prefill_chunk,
            pool_tokens: Some(pool),
        },
    };
    let usable = UsableMemory::of(args, &device)?.beside(scorer_bytes);
    let choices = choices(args, on_gpu)?;
    let budget = FitBudget {
        choices: &choices,
        asked,
        longest: if on_gpu {
            trained
        } else {
            trained.min(CPU_CONTEXT)
        }
        .min(args.kv_pool.unwrap_or(usize::MAX)),
        enough: if on_gpu {
            SUFFICIENT_CONTEXT
        } else {
            MIN_CONTEXT
        },
        bytes: if on_gpu || asked.is_some() {
            usable.bytes
        } else {
            usable.bytes / 5 * 4
        },
        free: usable.text(),
    };
    let bytes_for = |kv: KvFormats, (context, pool): (usize, usize)| {
        let memory = backend.estimate(&config(kv, context, pool))?;
        // Nothing beyond what was requested or suffices moves experts off the card.
        let one = context.saturating_add(request.tree_nodes + CONTEXT_STEP);
        let unasked =
            (asked.is_none() && context > budget.enough) || (args.kv_pool.is_none() && pool > one);
        Ok(match memory.experts {
            Some(_) if unasked => u64::MAX,
            _ => memory.total_bytes(),
        })
    };
    // A pool holds at least one sequence.
    let min_bytes = args.kv_pool.unwrap_or(0);
    let choice = choose_kv(&budget, |kv, context| bytes_for(kv, (context, min_bytes)))?;
    let (kv, context) = (choice.kv, choice.context);
    let pool = args.kv_pool.unwrap_or_else(|| {
        let each = (context + request.tree_nodes).next_multiple_of(CONTEXT_STEP);
        let fits = |n: usize| bytes_for(kv, (context, n)).is_ok_and(|bytes| bytes <= budget.bytes);
        longest_context(each.saturating_mul(request.sequences), fits)
    });
    let config = config(kv, context, pool);
    let memory = backend.estimate(&config)?;
    let placement = backend.placement(&config)?;
    Ok(FittedConfig {
        config,
        why: choice.why + &memory.experts.map_or_else(String::new, expert_text),
        memory,
        placement,
        device,
        usable,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::open::kv_candidates::GPU_KV_FORMATS;
    use crate::open::{device, open, tiny};
    use clap::Parser;
    use contract::{KvFormat, KvPool};

    fn device_args(words: &[&str]) -> DeviceArgs {
        let words = ["hearth", "serve", "--device", "cpu"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Serve(args) => args.device,
            other => panic!("{other:?}"),
        }
    }

    fn check_refused(words: &[&str], parts: &[&str]) {
        let args = device_args(words);
        let loaded = tiny();
        let backend = device(&args).unwrap();
        let request = MemoryRequest {
            sequences: 4,
            context: None,
            tree_nodes: 1,
        };
        let Err(error) = fit(backend.as_ref(), &loaded, &args, request) else {
            panic!("{words:?} was taken");
        };
        for part in parts {
            assert!(error.to_string().contains(part), "{part} in {error}");
        }
    }

    use KvFormat::{F16, F32, Q4_0, Q8_0, Tq3_0};

    #[test]
    fn kv_type_sets_both_cache_types_and_single_flags_override_it() {
        let check = |words: &[&str], expected: &[(KvFormat, KvFormat)]| {
            let choices = choices(&device_args(words), false).unwrap();
            let pairs: Vec<_> = choices.formats.iter().map(|kv| (kv.k, kv.v)).collect();
            assert_eq!(pairs, expected, "{words:?}");
        };
        check(&["--kv-type", "q8_0"], &[(Q8_0, Q8_0)]);
        let words = ["--kv-type", "q8_0", "--cache-type-v", "F16"];
        check(&words, &[(Q8_0, F16)]);
        check(&["--cpu-reference"], &[(F32, F32)]);
        check(&[], &[(F16, F16)]);
        let words = ["--kv-type", "tq3_0,q4_0"];
        check(&words, &[(Tq3_0, Tq3_0), (Q4_0, Q4_0)]);
    }

    #[test]
    fn gpu_kv_types_are_tried_from_fine_to_coarse() {
        let formats = |words: &[&str]| {
            let choices = choices(&device_args(words), true).unwrap();
            choices
                .formats
                .iter()
                .map(|kv| (kv.k, kv.v))
                .collect::<Vec<_>>()
        };
        assert_eq!(formats(&[]), [(Q8_0, Q8_0), (Q4_0, Q4_0), (Tq3_0, Tq3_0)]);
        assert_eq!(formats(&["--cache-type-k", "f16"])[0], (F16, Q8_0));
        assert_eq!(formats(&["--kv-type", "f16"]), [(F16, F16)]);
        let both = ["--cache-type-k", "f16", "--cache-type-v", "q8_0"];
        assert_eq!(formats(&both), [(F16, Q8_0)]);
    }

    /// A device with 24,000 bytes: weights take 16,000, each token 34, 18 or 14 thousandths.
    fn bytes_for(kv: KvFormats, context: usize) -> Result<u64, DeviceError> {
        let each = match kv.k {
            Q8_0 => 34,
            Q4_0 => 18,
            Tq3_0 => 14,
            _ => {
                return Err(DeviceError::Unsupported {
                    what: kv.k.name().to_owned(),
                    device: "this".to_owned(),
                    instead: "use q4_0".to_owned(),
                });
            }
        };
        Ok(16_000 + each * context as u64 / 1000)
    }

    fn choice(formats: &[KvFormat], asked: Option<usize>, bytes: u64) -> anyhow::Result<KvChoice> {
        let choices = KvCandidates {
            formats: formats.iter().map(|k| KvFormats { k: *k, v: *k }).collect(),
            named: false,
        };
        let budget = FitBudget {
            choices: &choices,
            asked,
            longest: 262_144,
            enough: SUFFICIENT_CONTEXT,
            bytes,
            free: String::new(),
        };
        choose_kv(&budget, bytes_for)
    }

    #[test]
    fn requested_context_gets_the_finest_type_that_fits() {
        for (asked, kv) in [(131_072, Q8_0), (262_144, Q4_0), (500_000, Tq3_0)] {
            let choice = choice(&GPU_KV_FORMATS, Some(asked), 24_000).unwrap();
            assert_eq!((choice.kv.k, choice.context), (kv, asked), "{}", choice.why);
        }
        let refused = choice(&GPU_KV_FORMATS, Some(600_000), 24_000)
            .unwrap_err()
            .to_string();
        for part in ["--max-ctx 600000", "--max-ctx 571392 fits with tq3_0"] {
            assert!(refused.contains(part), "{part} in {refused}");
        }
    }

    #[test]
    fn default_context_uses_the_finest_sufficient_type() {
        let check = |bytes, kv, context| {
            let choice = choice(&GPU_KV_FORMATS, None, bytes).unwrap();
            assert_eq!(
                (choice.kv.k, choice.context),
                (kv, context),
                "{}",
                choice.why
            );
        };
        check(24_000, Q8_0, 235_264);
        check(40_000, Q8_0, 262_144);
        // 1,000 bytes are 29,412 tokens of q8_0, and 55,555 of q4_0.
        check(17_000, Q4_0, 55_552);
        // Not sufficient with any type: the longest wins.
        check(16_200, Tq3_0, 14_336);
        assert!(choice(&GPU_KV_FORMATS, None, 16_001).is_err());
    }

    #[test]
    fn unsupported_kv_type_falls_back_to_the_next() {
        let choose = |formats: &[KvFormat]| choice(formats, Some(4096), 24_000).map(|p| p.kv.k);
        assert_eq!(choose(&[F16, Q4_0]).unwrap(), Q4_0);
        assert_eq!(choose(&[Q8_0, F16]).unwrap(), Q8_0);
        // The last type is left to the device to reject.
        assert!(choose(&[F16]).unwrap_err().to_string().contains("use q4_0"));
    }

    #[test]
    fn impossible_plans_are_rejected_by_flag() {
        check_refused(&["--kv-type", "q7"], &["--kv-type q7", "q8_0"]);
        check_refused(&["--chunk", "100"], &["--chunk 100", "multiple of 64"]);
        check_refused(
            &["--max-ctx", "99999999999"],
            &["--max-ctx 99999999999", "at most"],
        );
        check_refused(
            &["--max-ctx", "16777216", "--kv-pool", "67108864"],
            &["--max-ctx 16777216", "free"],
        );
    }

    #[test]
    fn pool_is_as_requested_or_one_context_per_sequence() {
        let loaded = tiny();
        let pool = |words: &[&str]| {
            let args = device_args(words);
            let backend = device(&args).unwrap();
            let request = MemoryRequest {
                sequences: 4,
                context: None,
                tree_nodes: 16,
            };
            let fitted = fit(backend.as_ref(), &loaded, &args, request).unwrap();
            let limits = fitted.config.limits;
            (
                limits.context,
                KvPool::for_limits(limits, 256).pages,
                fitted.memory.kv_bytes,
            )
        };
        let (context, pages, all) = pool(&["--max-ctx", "1024"]);
        assert_eq!((context, pages), (1024, 20));
        let (context, pages, some) = pool(&["--max-ctx", "1024", "--kv-pool", "2048"]);
        assert_eq!((context, pages, some), (1024, 8, all / 20 * 8));
        // No context exceeds the pool.
        let (context, pages, _) = pool(&["--kv-pool", "512"]);
        assert_eq!((context, pages), (512, 3));
        let words = ["--max-ctx", "1024", "--kv-pool", "512"];
        check_refused(&words, &["--kv-pool 512", "1024"]);
    }

    #[test]
    fn tiny_model_opens_with_its_trained_context() {
        let args = device_args(&[]);
        let loaded = tiny();
        let backend = device(&args).unwrap();
        let request = MemoryRequest {
            sequences: 1,
            context: None,
            tree_nodes: 1,
        };
        let fitted = fit(backend.as_ref(), &loaded, &args, request).unwrap();
        assert_eq!(fitted.config.limits.context, loaded.spec.trained_context);
        let runner = open(backend.as_ref(), fitted.config, &mut |_| {}).unwrap();
        assert_eq!(runner.info().vocab, loaded.spec.vocab);
    }
}
