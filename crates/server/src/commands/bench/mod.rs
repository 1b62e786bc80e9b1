//! `hearth bench`: times a model through the device interface that serving uses.
//!
//! The model is a file, or has the exact shapes of a known model and random weights. Every time is
//! from the call of the runner to its rows on the host, so only the server's overhead is missing.

mod cases;
mod cost;
mod cpu_time;
mod depth;
mod energy;
mod first_token;
mod plot;
mod prompt_table;
mod reply_timing;
mod report;
mod score;
mod serve;
mod speculation_ab;
#[cfg(test)]
mod speculation_recording;
#[cfg(test)]
mod speculation_replay;
mod step;
mod step_shape;
mod timed_runner;
mod tune;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use contract::{DraftLoad, DraftLoadConfig, QuantType};
use model::DraftKind;
use model::synth::{SynthDraft, SynthSpec, draft_for, draft_of};

use cases::Bench;
use report::Report;
use step_shape::parse_shapes;

use crate::cli::{BenchArgs, BenchCommand};
use crate::open::bundled::Bundled;
use crate::open::devices;
use crate::open::drafting;
use crate::open::{self, FittedConfig, MemoryRequest};

/// Tokens of a KV page, on any device.
const PAGE: usize = 256;

/// The context for cases of up to `longest` tokens that begin at these depths.
///
/// A snapshot at a depth within a page keeps that page, so a sequence that continues from it needs
/// one page more.
fn context_tokens(depths: &[usize], longest: usize) -> usize {
    let deepest = depths.iter().copied().max().unwrap_or(0);
    let within = depths.iter().any(|depth| depth % PAGE != 0);
    deepest + longest + 64 + if within { PAGE } else { 0 }
}

pub(super) fn bench(args: &BenchArgs, bundled: Bundled) -> anyhow::Result<()> {
    match &args.benchmark {
        Some(BenchCommand::Step(args)) => return step::step(args, bundled),
        Some(BenchCommand::Tune(args)) => return tune::tune(args, bundled),
        Some(BenchCommand::Speculation(args)) => return speculation_ab::compare(args, bundled),
        Some(BenchCommand::Depth(args)) => return depth::depth(args, bundled),
        Some(BenchCommand::Prompts(args)) => return prompt_table::table(args, bundled),
        Some(BenchCommand::Score(args)) => {
            return match &args.target {
                Some(target) => first_token::measure(args, bundled, target),
                None => score::score(args, bundled),
            };
        }
        Some(BenchCommand::Serve(args)) => return serve::serve(args),
        Some(BenchCommand::Energy(args)) => return energy::energy(args),
        None => {}
    }
    let source = ModelSource {
        model: args.model.as_deref(),
        synthetic: args.synthetic.as_deref(),
        seed: args.seed,
        bundled: Some(bundled),
    };
    let loaded = model(&source)?;
    let shapes = parse_shapes(&args.verify)?;
    let choice = open::choice_with_draft(&args.device, args.draft_device.as_deref())?;
    let backend = devices::choose(&choice)?;
    // Bandwidth is measured before the model fills the GPU's memory.
    let instruments = devices::instruments(&backend.probe()?.id, &choice)?;
    let longest = args.pp.iter().copied().max().unwrap_or(0).max(args.tg + 1);
    let request = MemoryRequest {
        sequences: shapes.iter().map(|shape| shape.trees).max().unwrap_or(1),
        context: Some(context_tokens(&args.depth, longest)),
        tree_nodes: shapes.iter().map(|shape| shape.nodes).max().unwrap_or(1),
    };
    let FittedConfig {
        mut config,
        memory,
        placement,
        device,
        usable,
        why,
    } = open::fit_with_head(backend.as_ref(), &loaded, &args.device, request)?;
    if args.draft.is_some() {
        config.draft = Some(draft(&loaded, args.draft.as_deref(), &source, config.kv.k)?);
    }
    let fitted = FittedConfig {
        config: config.clone(),
        memory,
        placement,
        device: device.clone(),
        usable,
        why,
    };
    for line in open::plan_lines(&loaded, &fitted) {
        tracing::info!("{line}");
    }
    let has_draft = config.draft.is_some();
    let runner = open::open(backend.as_ref(), config.clone(), &mut |_| {})?;
    let report = Report::new(args.json.as_deref(), &loaded, &device, instruments)?;
    let mut bench = Bench::new(runner, &config, report, args.reps);
    for &depth in &args.depth {
        for &tokens in args.pp.iter().filter(|&&tokens| tokens > 0) {
            bench.prefill(depth, tokens)?;
        }
        if args.tg > 0 {
            bench.decode(depth, args.tg)?;
        }
        for &shape in &shapes {
            bench.verify(depth, shape)?;
        }
        if has_draft {
            bench.draft(depth)?;
        }
        bench.draft_mtp(depth)?;
    }
    bench.finish();
    Ok(())
}

/// The source of a model and its draft.
struct ModelSource<'a> {
    model: Option<&'a Path>,
    synthetic: Option<&'a str>,
    /// Seed of random weights.
    seed: u64,
    /// The model if neither a file nor a shape is named.
    bundled: Option<Bundled>,
}

impl ModelSource<'_> {
    /// The bundled model, if neither a file nor a shape is named.
    fn bundled_default(&self) -> Option<Bundled> {
        match (self.model, self.synthetic) {
            (None, None) => self.bundled,
            _ => None,
        }
    }
}

/// The model of a file, with random weights, or the bundled one.
fn model(source: &ModelSource<'_>) -> anyhow::Result<model::LoadedModel> {
    if let Some(bundled) = source.bundled_default() {
        return open::load_or(None, bundled);
    }
    match (source.model, source.synthetic) {
        (Some(path), None) => open::load(path),
        (None, Some(what)) => {
            // Published files mix weight types, and so do benchmarks.
            let mix = if what.to_ascii_lowercase().ends_with(":q4_k_m") || what.ends_with(":bf16") {
                format!("{what}-published")
            } else {
                what.to_owned()
            };
            let mut spec = SynthSpec::parse(&mix)?;
            spec.seed = source.seed;
            Ok(spec.load()?)
        }
        _ => bail!("name a model file, or a shape with --synthetic; see hearth bench --help"),
    }
}

/// A draft with random weights from the name of a type, or of a kind, a type and perhaps the rows
/// of a block, such as `dflash2:q8_0` or `dflash2:q8_0:16`.
fn synthetic_draft(target: &model::LoadedModel, what: &str) -> Option<SynthDraft> {
    const KINDS: [DraftKind; 3] = [DraftKind::Dflash, DraftKind::Dflash2, DraftKind::Dspark];
    let type_of = |name: &str| {
        let mut types = QuantType::ALL.into_iter();
        types.find(|ty| ty.name().eq_ignore_ascii_case(name))
    };
    if let Some(ty) = type_of(what) {
        return Some(draft_for(target, ty, 1));
    }
    let (kind, rest) = what.split_once(':')?;
    let (ty, rows) = match rest.split_once(':') {
        Some((ty, rows)) => (ty, Some(rows.parse().ok().filter(|rows| *rows > 1)?)),
        None => (rest, None),
    };
    let mut kinds = KINDS.into_iter();
    let kind = kinds.find(|other| other.name().eq_ignore_ascii_case(kind))?;
    let mut made = draft_of(target, kind, type_of(ty)?, 1);
    if let Some(rows) = rows {
        Arc::make_mut(&mut made.spec).block = rows;
    }
    Some(made)
}

/// A draft model for the target: from a file, with random weights of one type, or the bundled one.
fn draft(
    target: &model::LoadedModel,
    what: Option<&str>,
    source: &ModelSource<'_>,
    kv: contract::KvFormat,
) -> anyhow::Result<DraftLoadConfig> {
    let options = drafting::options(0);
    let (spec, weights) = match (what, source.bundled_default()) {
        (None, Some(bundled)) => {
            let bytes = gguf::FileBytes::embedded(bundled.draft);
            let loaded = model::load_draft_bytes(bundled.name, bytes, &target.spec, options)?;
            (loaded.spec, loaded.weights)
        }
        (None, None) => {
            bail!("--draft is missing: name the draft of the model, or a type such as q8_0")
        }
        (Some(what), _) => match synthetic_draft(target, what) {
            Some(made) => (made.spec, made.weights),
            None => {
                let loaded = model::load_draft(Path::new(what), &target.spec, options);
                let loaded = loaded.with_context(|| {
                    format!("--draft {what}: neither a weight type nor a draft file")
                })?;
                (loaded.spec, loaded.weights)
            }
        },
    };
    Ok(DraftLoadConfig {
        spec: Arc::clone(&spec),
        weights,
        kv,
        load: DraftLoad::AtOpen,
    })
}
