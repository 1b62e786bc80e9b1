//! The KV cache types that flags allow, or those of the device by default.

use anyhow::Context;
use contract::{KvFormat, KvFormats};

use crate::cli::DeviceArgs;

/// Default KV cache types on a GPU, most precise first.
pub(super) const GPU_KV_FORMATS: [KvFormat; 3] = [KvFormat::Q8_0, KvFormat::Q4_0, KvFormat::Tq3_0];

/// Candidate KV cache types, best first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KvCandidates {
    /// In this order.
    pub(super) formats: Vec<KvFormats>,
    /// Whether they were requested.
    pub(super) named: bool,
}

/// Candidate KV cache types from flags.
///
/// # Errors
/// If a name is unknown.
pub(super) fn choices(args: &DeviceArgs, on_gpu: bool) -> anyhow::Result<KvCandidates> {
    let parse = |flag: &str, name: &str| -> anyhow::Result<KvFormat> {
        let known = KvFormat::ALL
            .into_iter()
            .find(|format| format.name().eq_ignore_ascii_case(name));
        known.with_context(|| {
            let names: Vec<&str> = KvFormat::ALL.iter().map(|format| format.name()).collect();
            format!(
                "{flag} {name}: unknown type, use one of {}",
                names.join(", ")
            )
        })
    };
    let single = |flag: &str, name: &Option<String>| {
        let name = name.as_ref();
        name.map(|name| parse(flag, name)).transpose()
    };
    let k = single("--cache-type-k", &args.cache_type_k)?;
    let v = single("--cache-type-v", &args.cache_type_v)?;
    let both: Vec<KvFormat> = match &args.kv_type {
        Some(names) => names
            .split(',')
            .map(|name| parse("--kv-type", name.trim()))
            .collect::<anyhow::Result<_>>()?,
        // The reference device rounds nothing by default, since others are compared with it.
        None if args.cpu_reference => vec![KvFormat::F32],
        None if on_gpu => GPU_KV_FORMATS.to_vec(),
        None => vec![KvFormat::F16],
    };
    let mut formats: Vec<KvFormats> = Vec::new();
    for both in both {
        let pair = KvFormats {
            k: k.unwrap_or(both),
            v: v.unwrap_or(both),
        };
        if !formats.contains(&pair) {
            formats.push(pair);
        }
    }
    Ok(KvCandidates {
        formats,
        named: args.kv_type.is_some() || (k.is_some() && v.is_some()),
    })
}
