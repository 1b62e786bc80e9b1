//! `hearth bench depth`: prefills one prompt, times passes on the way, and reports the peak memory.
//!
//! Prefilling 262,144 tokens takes a minute on a large GPU, so the prompt is prefilled once. At
//! every requested depth single passes are timed, and the tokens that they commit stay in the
//! context.

use anyhow::bail;
use contract::{AttentionWindow, KvFormat};

use super::cases::Bench;
use super::report::Report;
use super::step_shape::parse_shapes;
use super::{ModelSource, draft, model};
use crate::cli::DepthArgs;
use crate::open::bundled::Bundled;
use crate::open::devices;
use crate::open::{self, FittedConfig, MemoryRequest};
use crate::progress::bytes_text;

/// Context behind the deepest point, for the tokens decoded there.
const DECODE_TOKENS: usize = 512;

pub(super) fn depth(args: &DepthArgs, bundled: Bundled) -> anyhow::Result<()> {
    if args.at.is_empty() || !args.at.is_sorted() {
        bail!("--at: use depths in rising order, such as 512,16384,131072");
    }
    let source = ModelSource {
        model: args.model.as_deref(),
        synthetic: args.synthetic.as_deref(),
        seed: 1,
        bundled: Some(bundled),
    };
    let mut choice = open::choice(&args.device)?;
    choice.gpu.windows = args.attention_window.iter().any(|&tokens| tokens > 0);
    let backend = devices::choose(&choice)?;
    let id = backend.probe()?.id;
    // The watch starts before this process uses GPU memory.
    let watch = devices::watch(&id)?;
    let loaded = model(&source)?;
    let instruments = devices::instruments(&id, &choice)?;
    let shapes = parse_shapes(&args.verify)?;
    let deepest = args.at.last().copied().unwrap_or(0);
    let request = MemoryRequest {
        sequences: 1,
        context: Some(deepest + DECODE_TOKENS),
        tree_nodes: shapes.iter().map(|shape| shape.nodes).max().unwrap_or(1),
    };
    let mut fitted = open::fit_with_head(backend.as_ref(), &loaded, &args.device, request)?;
    if args.draft.is_some() {
        // The draft's KV cache has the type that serving uses.
        let draft = draft(&loaded, args.draft.as_deref(), &source, KvFormat::F16)?;
        fitted.config.draft = Some(draft);
        fitted.memory = backend.estimate(&fitted.config)?;
    }
    for line in open::plan_lines(&loaded, &fitted) {
        tracing::info!("{line}");
    }
    let FittedConfig {
        config,
        memory,
        device,
        ..
    } = fitted;
    let kv = (config.kv.k.name(), config.kv.v.name());
    let has_draft = config.draft.is_some();
    let runner = open::open(backend.as_ref(), config.clone(), &mut |_| {})?;
    let report = Report::new(args.json.as_deref(), &loaded, &device, instruments)?;
    let report = report.with_kv(kv);
    let mut bench = Bench::new(runner, &config, report, args.reps).continuing();
    for &depth in &args.at {
        bench.prefill_to(depth)?;
        let windows = args
            .attention_window
            .iter()
            .map(|&tokens| AttentionWindow::new(tokens, 0))
            .filter(|window| !window.is_full());
        for window in std::iter::once(AttentionWindow::FULL).chain(windows) {
            bench.set_window(window);
            if args.tg > 0 {
                bench.decode(depth, args.tg)?;
            }
            for &shape in &shapes {
                bench.verify(depth, shape)?;
            }
        }
        bench.set_window(AttentionWindow::FULL);
        if has_draft {
            bench.draft(depth)?;
        }
        bench.draft_mtp(depth)?;
    }
    let mut report = bench.finish();
    let planned = memory.total_bytes();
    if let Some(peak) = watch.and_then(devices::MemoryWatch::peak_bytes) {
        report.memory(peak, planned, config.limits.context)?;
    } else {
        tracing::info!(
            "planned {}; the device does not report the memory in use",
            bytes_text(planned)
        );
    }
    Ok(())
}
