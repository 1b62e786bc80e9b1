//! `hearth bench`: how fast a model runs here, through the same seam as serving.
//!
//! A model comes from a file, or is made up: exact shapes, random weights, in no file. Every figure is the
//! time between a call of the runner and its rows on the host, so what a server adds is all that is missing.

mod args;
mod cases;
mod cost;
mod report;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use contract::{DraftLoad, DraftPlan, QuantType};
use model::synth::{SynthSpec, draft_for};

pub use args::{BENCH_HELP, BenchArgs};
use cases::Bench;
use report::Report;

use crate::commands::open::{self, Fitted, Wish};
use crate::devices;

pub(super) fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    let loaded = model(args)?;
    let forms = args.forms()?;
    let choice = open::choice(&args.device)?;
    let backend = devices::choose(&choice)?;
    // Before the model takes the card.
    let instruments = devices::instruments(&backend.probe()?.id, &choice)?;
    let deepest = args.depth.iter().copied().max().unwrap_or(0);
    let longest = args.pp.iter().copied().max().unwrap_or(0).max(args.tg + 1);
    let wish = Wish {
        sequences: forms.iter().map(|form| form.trees).max().unwrap_or(1),
        context: Some(deepest + longest + 64),
        tree_nodes: forms.iter().map(|form| form.nodes).max().unwrap_or(1),
    };
    let Fitted {
        mut plan,
        memory,
        device,
    } = open::fit(backend.as_ref(), &loaded, &args.device, wish)?;
    if let Some(ty) = &args.draft {
        plan.draft = Some(draft(&loaded, ty, plan.kv.k)?);
    }
    let fitted = Fitted {
        plan: plan.clone(),
        memory,
        device: device.clone(),
    };
    for line in open::plan_lines(&loaded, &fitted) {
        tracing::info!("{line}");
    }
    let has_draft = plan.draft.is_some();
    let runner = open::open(backend.as_ref(), plan.clone(), &mut |_| {})?;
    let report = Report::new(args, &loaded, &device, instruments)?;
    let mut bench = Bench::new(runner, &plan, report, args.reps);
    for &depth in &args.depth {
        for &tokens in args.pp.iter().filter(|&&tokens| tokens > 0) {
            bench.prefill(depth, tokens)?;
        }
        if args.tg > 0 {
            bench.decode(depth, args.tg)?;
        }
        for &form in &forms {
            bench.verify(depth, form)?;
        }
        if has_draft {
            bench.draft(depth)?;
        }
    }
    bench.end()
}

/// The model of a file, or a made-up one.
fn model(args: &BenchArgs) -> anyhow::Result<model::Loaded> {
    match (&args.model, &args.synthetic) {
        (Some(path), None) => open::load(path),
        (None, Some(what)) => {
            // Speed is compared on the mix of published files.
            let mix = if what.to_ascii_lowercase().ends_with(":q4_k_m") || what.ends_with(":bf16") {
                format!("{what}-published")
            } else {
                what.clone()
            };
            let mut spec = SynthSpec::parse(&mix)?;
            spec.seed = args.seed;
            Ok(spec.load()?)
        }
        _ => bail!("name a model file, or a shape with --synthetic; see hearth bench --help"),
    }
}

/// A draft for the target: from a file, or made up of one type.
fn draft(target: &model::Loaded, what: &str, kv: contract::KvFormat) -> anyhow::Result<DraftPlan> {
    let path = Path::new(what);
    let ty = QuantType::ALL
        .into_iter()
        .find(|ty| ty.name().eq_ignore_ascii_case(what));
    let (spec, weights) = match ty {
        Some(ty) => {
            let made = draft_for(target, ty, 1);
            (made.spec, made.weights)
        }
        None => {
            let loaded = model::load_draft(path, &target.spec, model::DraftOptions::default())
                .with_context(|| format!("--draft {what}: neither a weight type nor a draft"))?;
            (loaded.spec, loaded.weights)
        }
    };
    Ok(DraftPlan {
        spec: Arc::clone(&spec),
        weights,
        kv,
        load: DraftLoad::AtOpen,
    })
}
