//! Which kernels the plans of a model launch, with the reason of each, for people.

use std::collections::BTreeMap;
use std::fmt;

use super::{PlanKey, Plans};

/// Order and name of the kind of pass, operation, file, reason.
type KernelUse = (usize, String, &'static str, &'static str, &'static str);

/// A kernel that runs for some rows of a kind of pass.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExplainedKernel {
    /// The kind of pass, such as `decode, 1 tree`.
    pub pass: String,
    /// The operation: the folder of the source.
    pub operation: &'static str,
    /// First and last number of rows of each range that the kernel runs for, padding included.
    pub rows: Vec<(usize, usize)>,
    /// The source file.
    pub file: &'static str,
    /// Why this kernel runs.
    pub reason: &'static str,
}

impl ExplainedKernel {
    /// The ranges of rows, such as `1, 9-64`.
    pub fn row_ranges(&self) -> String {
        let range = |&(first, last): &(usize, usize)| {
            if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            }
        };
        let all: Vec<String> = self.rows.iter().map(range).collect();
        all.join(", ")
    }
}

impl fmt::Display for ExplainedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<16} {:<13} {:>10}  {:<48} {}",
            self.pass,
            self.operation,
            self.row_ranges(),
            self.file,
            self.reason
        )
    }
}

/// Order and name of the kind of pass of a key, and its rows. Depth selects tiles only, never
/// another kernel.
fn pass_of(key: PlanKey) -> (usize, String, usize) {
    let named = |order, name: &str, rows| (order, name.to_owned(), rows);
    match key {
        PlanKey::Step { rows, trees, .. } => {
            let plural = if trees == 1 { "" } else { "s" };
            let name = format!("decode, {trees} tree{plural}");
            (trees, name, rows)
        }
        PlanKey::EditedStep(rows) => named(10, "decode edits", rows),
        PlanKey::Masses { rows, .. } => named(20, "decode masses", rows),
        PlanKey::Commit(paths) => named(11, "commit", paths),
        PlanKey::Chunk(rows) => named(12, "prefill", rows),
        PlanKey::LmHead(rows) => named(13, "prefill logits", rows),
        PlanKey::EditedLmHead(rows) => named(14, "prefill edits", rows),
        PlanKey::DraftContext(rows) => named(15, "draft context", rows),
        PlanKey::Draft { rows, whole: false } => named(16, "draft block", rows),
        PlanKey::Draft { rows, whole: true } => named(17, "whole draft block", rows),
        PlanKey::MtpCommit(rows) => named(18, "MTP commit", rows),
        PlanKey::MtpDraft { rows, whole: false } => named(19, "MTP draft", rows),
        PlanKey::MtpDraft { rows, whole: true } => named(21, "MTP draft, whole", rows),
    }
}

/// Why a kernel runs that no selection noted.
fn default_reason(file: &str) -> &'static str {
    match file {
        "gemm/decode_gemm_small_batch.cu" => "GEMMs beside: the first layer's projections, LM head",
        "gemm/prefill_gemm_f32.cu" => "matrices kept as f32",
        "gemm/prefill_dequant.cu" => "weights dequantized once per chunk",
        _ => "the only kernel",
    }
}

/// Every kernel of every plan; rows that share a kernel and its reason are one line.
pub(crate) fn explain(plans: &Plans) -> Vec<ExplainedKernel> {
    // The row buckets of each kind of pass, in rising order.
    let mut buckets: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    // By kind of pass, operation, file and reason: the buckets that launch it.
    let mut uses: BTreeMap<KernelUse, Vec<usize>> = BTreeMap::new();
    for (key, plan) in &plans.all {
        let (order, name, rows) = pass_of(*key);
        let known = buckets.entry(order).or_default();
        if !known.contains(&rows) {
            known.push(rows);
        }
        for launch in &plan.launches {
            let file = launch.unit.file;
            let operation = file.split('/').next().unwrap_or(file);
            let noted = plan.reasons.iter().find(|(noted, _)| *noted == file);
            let reason = noted.map_or_else(|| default_reason(file), |&(_, reason)| reason);
            let used = uses
                .entry((order, name.clone(), operation, file, reason))
                .or_default();
            if !used.contains(&rows) {
                used.push(rows);
            }
        }
    }
    for known in buckets.values_mut() {
        known.sort_unstable();
    }
    let explained = |((order, pass, operation, file, reason), used): (KernelUse, Vec<usize>)| {
        let known: &[usize] = buckets.get(&order).map_or(&[], Vec::as_slice);
        let mut rows: Vec<(usize, usize)> = Vec::new();
        let mut before = 0;
        for &bucket in known {
            if used.contains(&bucket) {
                match rows.last_mut() {
                    Some(range) if range.1 == before => range.1 = bucket,
                    _ => rows.push((before + 1, bucket)),
                }
            }
            before = bucket;
        }
        ExplainedKernel {
            pass,
            operation,
            rows,
            file,
            reason,
        }
    };
    uses.into_iter().map(explained).collect()
}
