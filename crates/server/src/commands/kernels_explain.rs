//! `hearth kernels explain`: which kernels a model runs on an architecture, for how many rows, and
//! why.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::bail;
use contract::{KvFormat, KvFormats, LoadConfig};
use cuda::CudaBackend;
use model::synth::SynthSpec;
use serde_json::json;

use super::kernel_targets::{LIMITS, arch, usual_gpu};
use crate::cli::KernelsExplainArgs;
use crate::open;
use crate::open::model_path::is_remote;

/// The architectures that are explained where none is named.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"];

pub(super) fn explain(args: &KernelsExplainArgs) -> anyhow::Result<()> {
    let path = Path::new(&args.model);
    let loaded = if path.exists() || is_remote(&args.model) {
        open::load(path)?
    } else {
        SynthSpec::parse(&args.model)?.load()?
    };
    let Some(kv) = kv_format(&args.kv_type) else {
        bail!("--kv-type {}: no storage of keys and values", args.kv_type);
    };
    let config = LoadConfig {
        target: Arc::clone(&loaded.spec),
        weights: Arc::clone(&loaded.weights),
        draft: None,
        batch_invariant: args.batch_invariant,
        kv: KvFormats { k: kv, v: kv },
        limits: LIMITS,
    };
    let named: Vec<&str> = if args.arch.is_empty() {
        ARCHITECTURES.to_vec()
    } else {
        args.arch.iter().map(String::as_str).collect()
    };
    let mut out = std::io::stdout().lock();
    for name in named {
        let arch = arch(name)?;
        let options = cuda::Options {
            numerics: args.numerics.map(open::numerics),
            assume_free: true,
            ..cuda::Options::default()
        };
        let backend = CudaBackend::with_options(usual_gpu(arch), options);
        let explained = backend.explain(&config)?;
        if !args.json {
            writeln!(out, "{} on {arch}, KV {}", args.model, args.kv_type)?;
            writeln!(
                out,
                "{:<16} {:<13} {:>10}  {:<48} reason",
                "pass", "operation", "rows", "kernel"
            )?;
        }
        for line in explained {
            if args.json {
                let line = json!({
                    "arch": arch.to_string(), "pass": line.pass, "operation": line.operation,
                    "rows": line.row_ranges(), "kernel": line.file, "reason": line.reason,
                });
                writeln!(out, "{line}")?;
            } else {
                writeln!(out, "{line}")?;
            }
        }
    }
    Ok(())
}

fn kv_format(name: &str) -> Option<KvFormat> {
    let mut all = KvFormat::ALL.into_iter();
    all.find(|format| format.name() == name)
}
