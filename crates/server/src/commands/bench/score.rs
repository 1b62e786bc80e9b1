//! `hearth bench score`: times the scorer of prompt compression on random tokens, and reports the
//! memory that it takes beside its weights.
//!
//! With `--target`, [`super::first_token`] times whole compressed prompts instead.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use contract::{Backend, BlockSparsity, MemoryPlan, ScoreSettings, ScorerConfig, TokenId};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::{ModelSource, model};
use crate::cli::ScoreArgs;
use crate::commands::compressing;
use crate::open::bundled::Bundled;
use crate::open::{self, devices};

/// The scorer's model.
///
/// # Errors
/// If there is none.
pub(super) fn load(args: &ScoreArgs, bundled: Bundled) -> anyhow::Result<model::LoadedModel> {
    model(&ModelSource {
        model: args.model.as_deref(),
        synthetic: args.synthetic.as_deref(),
        seed: args.seed,
        bundled: Some(bundled),
    })
}

/// The scorer of the flags, for prompts of up to `max_tokens`, and how it scores.
pub(super) fn scorer(
    args: &ScoreArgs,
    loaded: &model::LoadedModel,
    max_tokens: usize,
) -> (ScorerConfig, ScoreSettings) {
    let (config, scored_layers) = compressing::config(loaded, args.exit_layer);
    let config = ScorerConfig {
        max_tokens,
        ..config
    };
    let settings = ScoreSettings {
        scored_layers,
        sparsity: BlockSparsity {
            alpha: args.alpha,
            ..BlockSparsity::default()
        },
        ..ScoreSettings::default()
    };
    (config, settings)
}

/// The longest prompt of the flags.
pub(super) fn longest(args: &ScoreArgs) -> usize {
    args.tokens.iter().copied().max().unwrap_or(0)
}

pub(super) fn score(args: &ScoreArgs, bundled: Bundled) -> anyhow::Result<()> {
    let loaded = load(args, bundled)?;
    let (config, settings) = scorer(args, &loaded, longest(args));
    let choice = open::choice(&args.device)?.first();
    let backend = devices::choose(&choice)?;
    let planned = planned(&*backend, &config)?;
    // The watch starts before this process uses GPU memory.
    let watch = devices::watch(&backend.probe()?.id)?;
    let mut scorer = backend.open_scorer(config, &mut |_| {})?;
    let info = scorer.info().clone();
    let mut report = ScoreReport::new(
        args.json.as_deref(),
        json!({
            "bench": "score", "model": loaded.info.name, "device": info.device,
            "exit_layer": info.exit_layer, "alpha": args.alpha, "version": env!("CARGO_PKG_VERSION"),
        }),
    )?;
    let mut random = StdRng::seed_from_u64(args.seed);
    for &n in &args.tokens {
        let mut took = Vec::with_capacity(args.reps);
        for run in 0..=args.reps {
            let token = |_| TokenId(random.random_range(0..loaded.spec.vocab as u32));
            let tokens: Vec<TokenId> = (0..n).map(token).collect();
            let start = Instant::now();
            let scores = scorer.score(&tokens, &settings, &mut |_| ControlFlow::Continue(()))?;
            if scores.is_none() {
                bail!("the scorer gave up a prompt of {n} tokens");
            }
            // The first run warms up.
            if run > 0 {
                took.push(start.elapsed());
            }
        }
        report.line("score", n, &took)?;
    }
    let peak = watch.and_then(devices::MemoryWatch::peak_bytes);
    report.memory(planned, peak, "with the CUDA context")
}

/// The planned memory of a scorer; `None` for a device that plans none, such as the CPU.
///
/// # Errors
/// If the device runs scorers, but not this one.
pub(super) fn planned(
    backend: &dyn Backend,
    config: &ScorerConfig,
) -> anyhow::Result<Option<MemoryPlan>> {
    if backend.probe()?.is_cpu() {
        return Ok(None);
    }
    Ok(Some(backend.estimate_scorer(config)?))
}

/// Prints times and memory, and appends them to a file of JSON lines.
pub(super) struct ScoreReport {
    json: Option<File>,
    /// Fields of every JSON line.
    fields: Value,
}

impl ScoreReport {
    /// Opens the file and prints the table's header.
    pub(super) fn new(json: Option<&Path>, fields: Value) -> anyhow::Result<ScoreReport> {
        let json = match json {
            Some(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                Some(file.with_context(|| format!("--json {}", path.display()))?)
            }
            None => None,
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{fields}")?;
        writeln!(
            out,
            "{:<20} {:>8} {:>10} {:>21} {:>9}",
            "case", "tokens", "ms", "spread ms", "tok/s"
        )?;
        Ok(ScoreReport { json, fields })
    }

    /// Reports the median of runs over prompts of `tokens` tokens.
    pub(super) fn line(
        &mut self,
        case: &str,
        tokens: usize,
        took: &[Duration],
    ) -> anyhow::Result<()> {
        let mut ms: Vec<f64> = took.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let (Some(low), Some(high)) = (ms.first(), ms.last()) else {
            bail!("no run of {case} was timed");
        };
        let median = ms[ms.len() / 2];
        let per_s = tokens as f64 / median * 1e3;
        writeln!(
            std::io::stdout(),
            "{case:<20} {tokens:>8} {median:>10.3} {:>21} {per_s:>9.0}",
            format!("{low:.3}..{high:.3}")
        )?;
        self.append(json!({
            "case": case, "tokens": tokens, "ms": median, "low_ms": low, "high_ms": high,
            "runs": ms.len(), "tokens_per_s": per_s,
        }))
    }

    /// Reports the planned memory and the peak by the driver's free memory, both without the
    /// scorer's weights; `peak` includes them, and what `scope` says.
    pub(super) fn memory(
        &mut self,
        planned: Option<MemoryPlan>,
        peak: Option<u64>,
        scope: &str,
    ) -> anyhow::Result<()> {
        let Some(planned) = planned else {
            return Ok(());
        };
        let weights = planned.weights_bytes;
        let beside = planned.total_bytes() - weights;
        let peak = peak.map(|peak| peak.saturating_sub(weights));
        let gib = |bytes: u64| format!("{:.3} GiB", bytes as f64 / f64::from(1 << 30));
        let measured = match peak {
            Some(peak) => format!("at most {} taken, {scope}", gib(peak)),
            None => "the device does not report the memory in use".to_owned(),
        };
        writeln!(
            std::io::stdout(),
            "memory beside {} of weights: {} planned; {measured}",
            gib(weights),
            gib(beside)
        )?;
        self.append(json!({
            "case": "memory", "weights_bytes": weights, "planned_bytes": beside,
            "peak_bytes": peak, "scope": scope,
        }))
    }

    /// Appends a line of these fields and those of every line.
    fn append(&mut self, mut line: Value) -> anyhow::Result<()> {
        let Some(file) = &mut self.json else {
            return Ok(());
        };
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, &self.fields) {
            line.extend(fields.clone());
        }
        writeln!(file, "{line}").context("the file of --json")
    }
}
