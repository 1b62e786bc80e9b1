//! `hearth bench depth`: one prompt read to its end, with steps measured on the way, and the memory that took.
//!
//! Reading a prompt of 262,144 tokens takes a minute on a large card, so it is read once: at every depth that was asked
//! for the reading stops, single passes are timed, and what they committed stays part of the text.

use anyhow::bail;
use contract::{AttentionWindow, KvFormat};

use super::cases::Bench;
use super::report::Report;
use super::step_shape::forms;
use super::{ModelSource, draft, model};
use crate::cli::DepthArgs;
use crate::open::bundled::Bundled;
use crate::open::devices;
use crate::open::{self, FittedPlan, MemoryRequest};
use crate::progress::bytes_text;

/// Room behind the deepest point for what is decoded there.
const BEHIND: usize = 512;

pub(super) fn depth(args: &DepthArgs, bundled: Bundled) -> anyhow::Result<()> {
    if args.at.is_empty() || !args.at.is_sorted() {
        bail!("--at: give rising depths, such as 512,16384,131072");
    }
    let source = ModelSource {
        model: args.model.as_deref(),
        synthetic: args.synthetic.as_deref(),
        seed: 1,
        bundled: Some(bundled),
    };
    let mut choice = open::choice(&args.device)?;
    choice.gpu.windows = args.fa_window.iter().any(|&tokens| tokens > 0);
    let backend = devices::choose(&choice)?;
    let id = backend.probe()?.id;
    // Before anything of ours is on the card.
    let watch = devices::watch(&id)?;
    let loaded = model(&source)?;
    let instruments = devices::instruments(&id, &choice)?;
    let forms = forms(&args.verify)?;
    let deepest = args.at.last().copied().unwrap_or(0);
    let request = MemoryRequest {
        sequences: 1,
        context: Some(deepest + BEHIND),
        tree_nodes: forms.iter().map(|form| form.nodes).max().unwrap_or(1),
    };
    let mut fitted = open::fit(backend.as_ref(), &loaded, &args.device, request)?;
    if args.draft.is_some() {
        // As in serving.
        let draft = draft(&loaded, args.draft.as_deref(), &source, KvFormat::F16)?;
        fitted.plan.draft = Some(draft);
        fitted.memory = backend.estimate(&fitted.plan)?;
    }
    for line in open::plan_lines(&loaded, &fitted) {
        tracing::info!("{line}");
    }
    let FittedPlan {
        plan,
        memory,
        device,
        ..
    } = fitted;
    let kv = (plan.kv.k.name(), plan.kv.v.name());
    let has_draft = plan.draft.is_some();
    let runner = open::open(backend.as_ref(), plan.clone(), &mut |_| {})?;
    let report = Report::new(args.json.as_deref(), &loaded, &device, instruments)?;
    let report = report.storing(kv);
    let mut bench = Bench::new(runner, &plan, report, args.reps).along_one_text();
    for &depth in &args.at {
        bench.read_to(depth)?;
        let windows = args
            .fa_window
            .iter()
            .map(|&tokens| AttentionWindow::new(tokens, 0))
            .filter(|window| !window.is_full());
        for window in std::iter::once(AttentionWindow::FULL).chain(windows) {
            bench.see_through(window);
            if args.tg > 0 {
                bench.decode(depth, args.tg)?;
            }
            for &form in &forms {
                bench.verify(depth, form)?;
            }
        }
        bench.see_through(AttentionWindow::FULL);
        if has_draft {
            bench.draft(depth)?;
        }
    }
    let mut report = bench.end();
    let planned = memory.total_bytes();
    if let Some(taken) = watch.and_then(devices::MemoryWatch::peak_bytes) {
        report.memory(taken, planned, plan.limits.context)?;
    } else {
        tracing::info!(
            "planned {}; nothing here tells what was taken",
            bytes_text(planned)
        );
    }
    Ok(())
}
