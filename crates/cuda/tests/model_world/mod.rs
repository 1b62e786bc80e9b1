//! What tests of whole models share: the card as a device, the oracle, texts and trees, and how far apart the
//! two may be.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use conformance::compare::Tolerance;
use conformance::specimen::SyntheticModel;
use contract::{
    KvFormat, KvFormats, Limits, LogitsRequest, LogitsRow, NodeIdx, OpenPlan, QuantType, Runner,
    TokenId, Tree, VerifyItem,
};
use cpu::CpuBackend;
use cuda::driver::Gpu;
use cuda::{CudaBackend, Options};

use crate::card;

pub const LIMITS: Limits = Limits {
    sequences: 4,
    context: 600,
    tree_nodes: 64,
    prefill_chunk: 192,
    pool: None,
};
/// Fewer buckets, so fewer kernels to compile where there are many models.
pub const SMALL: Limits = Limits {
    sequences: 1,
    tree_nodes: 24,
    ..LIMITS
};

/// The card, kept open so that opening a runner does not begin with a new context.
pub struct Device {
    pub backend: CudaBackend,
    _gpu: Gpu,
}

pub fn open_device(eager: bool) -> Option<Device> {
    open_device_with(Options {
        eager,
        ..Options::default()
    })
}

pub fn open_device_with(options: Options) -> Option<Device> {
    let gpu = card::gpu()?;
    let options = Options {
        poison: true,
        compile: card::compiling(),
        ..options
    };
    Some(Device {
        backend: CudaBackend::with_options(gpu.card().clone(), options),
        _gpu: gpu,
    })
}

/// How far the card may be from the oracle, value by value and in the mean of a row.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceTolerance {
    pub each: Tolerance,
    pub mean: f32,
}

impl ReferenceTolerance {
    /// At least what a cache in half precision makes.
    pub fn at_least_f16(self) -> ReferenceTolerance {
        let half = reference_tolerance(QuantType::F16);
        ReferenceTolerance {
            each: self.each.or(half.each),
            mean: self.mean.max(half.mean),
        }
    }
}

/// What half precision makes of these models' logits, which spread by 2.
///
/// Products take activations and weights as f16: a share of 2.8e-4 each, one after the other a dozen times through
/// three layers of random weights with gains up to 1.5, and of 288 columns at the least. Measured on a card: at most
/// 0.0113 in the mean of a row and 0.05 in a single value, of all formats and layouts. f32 weights keep f32
/// activations, which tells rounding from a fault: there the same plans are within 1e-4.
pub fn reference_tolerance(ty: QuantType) -> ReferenceTolerance {
    match ty {
        QuantType::F32 => tolerance(0.01, 0.005, 0.001),
        QuantType::F16 => tolerance(0.05, 0.01, 0.009),
        _ => tolerance(0.1, 0.02, 0.02),
    }
}

/// The same over a cache in this format: where a stored key or value is next to the edge of a step, one device takes
/// the step and the other does not.
pub fn kv_tolerance(format: KvFormat) -> ReferenceTolerance {
    match format {
        KvFormat::F32 => reference_tolerance(QuantType::F32),
        KvFormat::F16 | KvFormat::Bf16 => reference_tolerance(QuantType::F16),
        KvFormat::Q4_0 | KvFormat::Q4_1 | KvFormat::Tq3_0 => tolerance(0.7, 0.05, 0.1),
        KvFormat::Q5_0 | KvFormat::Q5_1 => tolerance(0.35, 0.04, 0.05),
        KvFormat::Q8_0 => tolerance(0.1, 0.02, 0.02),
    }
}

fn tolerance(absolute: f32, relative: f32, mean: f32) -> ReferenceTolerance {
    ReferenceTolerance {
        each: Tolerance { absolute, relative },
        mean,
    }
}

pub fn plan(specimen: &SyntheticModel, kv: KvFormats, limits: Limits) -> OpenPlan {
    OpenPlan {
        target: specimen.spec.clone(),
        weights: specimen.weights.clone(),
        draft: None,
        batch_invariant: false,
        kv,
        limits,
    }
}

pub fn cpu_reference() -> CpuBackend {
    CpuBackend::new(cpu::CpuOptions {
        reference: true,
        threads: None,
    })
    .turning()
}

pub fn text(vocab: usize, n: usize, salt: usize) -> Vec<TokenId> {
    let ids = (0..n).map(|i| (i * i * 3 + (5 + salt) * i + 17 * salt + 1) % vocab);
    ids.map(|id| TokenId(id as u32)).collect()
}

/// A tree of `n` nodes whose node `i` hangs below node `parent(i)`.
pub fn tree(vocab: usize, n: usize, parent: impl Fn(usize) -> usize) -> Tree {
    let tokens: Vec<TokenId> = (0..n)
        .map(|i| TokenId(((i * 7 + 3) % vocab) as u32))
        .collect();
    let parents: Vec<NodeIdx> = (1..n).map(|i| NodeIdx(parent(i) as u16)).collect();
    Tree::new(&tokens, &parents).unwrap()
}

pub fn verify(runner: &mut dyn Runner, seq: contract::SeqId, tree: &Tree) -> Vec<LogitsRow> {
    let requests = vec![LogitsRequest::full(); tree.len()];
    let item = VerifyItem {
        seq,
        tree,
        requests: &requests,
    };
    runner.verify(&[item]).unwrap().pop().unwrap()
}

pub const F16_KV: KvFormats = KvFormats {
    k: KvFormat::F16,
    v: KvFormat::F16,
};
pub const F32_KV: KvFormats = KvFormats {
    k: KvFormat::F32,
    v: KvFormat::F32,
};
