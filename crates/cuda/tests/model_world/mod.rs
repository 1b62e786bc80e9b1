//! What tests of whole models share: the card as a device, the oracle, texts and trees, and how far apart the
//! two may be.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use conformance::compare::Tolerance;
use conformance::specimen::Specimen;
use contract::{
    Ask, KvFormat, KvFormats, Limits, NodeIdx, OpenPlan, QuantType, Row, Runner, TokenId, Tree,
    VerifyItem,
};
use cpu::CpuBackend;
use cuda::compile;
use cuda::driver::Gpu;
use cuda::{CudaBackend, Options};

use crate::card;

pub const LIMITS: Limits = Limits {
    sequences: 4,
    context: 600,
    tree_nodes: 64,
    prefill_chunk: 192,
};
/// Fewer buckets, so fewer kernels to compile where there are many models.
pub const SMALL: Limits = Limits {
    sequences: 1,
    tree_nodes: 24,
    ..LIMITS
};

/// The card, kept open so that opening a runner does not begin with a new context.
pub struct Bench {
    pub backend: CudaBackend,
    _gpu: Gpu,
}

pub fn bench(eager: bool) -> Option<Bench> {
    bench_with(Options {
        eager,
        ..Options::default()
    })
}

pub fn bench_with(options: Options) -> Option<Bench> {
    let gpu = card::gpu()?;
    let options = Options {
        poison: true,
        compile: compile::Options {
            cache: Some(std::env::temp_dir().join("hearth-test-kernels")),
            ..compile::Options::default()
        },
        ..options
    };
    Some(Bench {
        backend: CudaBackend::with_options(gpu.card().clone(), options),
        _gpu: gpu,
    })
}

/// How far the card may be from the oracle, value by value and in the mean of a row.
#[derive(Debug, Clone, Copy)]
pub struct Allowance {
    pub each: Tolerance,
    pub mean: f32,
}

impl Allowance {
    /// At least what a cache in half precision makes.
    pub fn or_half(self) -> Allowance {
        let half = against_the_oracle(QuantType::F16);
        Allowance {
            each: self.each.or(half.each),
            mean: self.mean.max(half.mean),
        }
    }
}

/// What rounding activations makes of these models' logits, which spread by 2.
///
/// A step multiplies block formats with activations in eight bits, one scale for 256 values. A uniform error of
/// `max / 127` has a deviation of `max / 127 / sqrt(12)`: with the largest of 256 values at 2.8 deviations, as in a
/// normed row, that is 0.6 percent of the row's; at 8, as behind a SwiGLU, 1.8 percent. A dozen such products one
/// after the other, through three layers of random weights with gains up to 1.5, were measured to make 0.09 to
/// 0.14 in the mean of a row on the card, and single values up to 0.6. bfloat16 has 0.11 percent a product:
/// measured 0.027 in the mean. f32 activations show nothing of it, which tells rounding from a fault: there the
/// same plans are within 1e-4.
pub fn against_the_oracle(ty: QuantType) -> Allowance {
    let allow = |absolute, relative, mean| Allowance {
        each: Tolerance { absolute, relative },
        mean,
    };
    match ty {
        QuantType::F32 => allow(0.01, 0.005, 0.001),
        QuantType::F16 => allow(0.05, 0.01, 0.009),
        QuantType::BF16 => allow(0.15, 0.03, 0.04),
        _ => allow(0.9, 0.15, 0.2),
    }
}

pub fn plan(specimen: &Specimen, kv: KvFormats, limits: Limits) -> OpenPlan {
    OpenPlan {
        target: specimen.spec.clone(),
        weights: specimen.weights.clone(),
        draft: None,
        exact: false,
        kv,
        limits,
    }
}

pub fn oracle() -> CpuBackend {
    CpuBackend::new(cpu::Options {
        reference: true,
        threads: None,
    })
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

pub fn verify(runner: &mut dyn Runner, seq: contract::SeqId, tree: &Tree) -> Vec<Row> {
    let asks = vec![Ask::full(); tree.len()];
    let item = VerifyItem {
        seq,
        tree,
        asks: &asks,
    };
    runner.verify(&[item]).unwrap().pop().unwrap()
}

pub const HALF: KvFormats = KvFormats {
    k: KvFormat::F16,
    v: KvFormat::F16,
};
pub const WHOLE: KvFormats = KvFormats {
    k: KvFormat::F32,
    v: KvFormat::F32,
};
