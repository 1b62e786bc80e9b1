//! The system's memory, and the memory that a model needs.

use contract::{
    Conditioning, DeviceError, DraftSpec, ExpertGateUp, ExpertStack, FeedForward, KvPool, Limits,
    LoadConfig, MemoryPlan, Mixer, ModelSpec, MoeSpec, QuantType, WeightRef,
};

use crate::blocks::{attention, delta, draft, head};
use crate::draft::{MAX_STATES, conv};
use crate::draft_cache::cache_bytes;
use crate::mtp;
use crate::simd::dispatch::Dispatch;

use crate::matmul::layout::{Format, TILE_ROWS};
use crate::pass::BufferWidths;
use crate::pass::rows_per_pass;
use crate::snapshot_pages::PAGE;
use crate::state::sequence_bytes;

/// Bytes of 32 inputs of a product, rounded to eight bits with a scale and sums.
const ROUNDED_BLOCK: usize = 44;

/// Memory of the machine or of the container the process lives in, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SystemMemory {
    pub(crate) total: u64,
    /// Bytes available without evicting anything.
    pub(crate) free: u64,
}

/// The system's memory; `None` if the system does not report it.
pub(crate) fn of_system() -> Option<SystemMemory> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let machine = from_meminfo(&text)?;
    let number =
        |path: &str| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let cage = number("/sys/fs/cgroup/memory.max").zip(number("/sys/fs/cgroup/memory.current"));
    Some(match cage {
        Some((most, used)) => SystemMemory {
            total: machine.total.min(most),
            free: machine.free.min(most.saturating_sub(used)),
        },
        None => machine,
    })
}

fn from_meminfo(text: &str) -> Option<SystemMemory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some(SystemMemory {
        total: field("MemTotal:")?,
        free: field("MemAvailable:")?,
    })
}

/// Refuses an allocation that exceeds the system's memory. Passes if the system does not report it.
pub(crate) fn require(bytes: u64) -> Result<(), DeviceError> {
    match of_system() {
        Some(memory) if memory.free < bytes => Err(DeviceError::OutOfMemory {
            what: "memory bytes",
            wanted: bytes,
            free: memory.free,
        }),
        _ => Ok(()),
    }
}

/// Memory of an opened model with `threads` threads. The configuration must be checked.
pub(crate) fn estimate(config: &LoadConfig, dispatch: &Dispatch, threads: usize) -> MemoryPlan {
    let (spec, limits) = (&config.target, config.limits);
    let sequences = limits.sequences as u64;
    let (token, state, pending) = sequence_bytes(spec, config.kv, limits);
    let pool = KvPool::for_limits(limits, PAGE).tokens() as u64;
    // No machine has this much; the bound prevents an overflow of the sum.
    let all = |bytes: u64| sequences.saturating_mul(bytes).min(u64::MAX / 8);
    MemoryPlan {
        experts: None,
        weights_bytes: weights_bytes(spec, dispatch),
        mapped_bytes: {
            let own = spec.mtp.as_ref().and_then(|mtp| mtp.embedding.as_ref());
            let tables = config
                .draft
                .as_ref()
                .map(|draft| draft_table_bytes(&draft.spec));
            (spec.embedding.bytes() + own.map_or(0, WeightRef::bytes)) as u64 + tables.unwrap_or(0)
        },
        kv_bytes: token.saturating_mul(pool).min(u64::MAX / 8),
        state_bytes: all(state),
        scratch_bytes: pass_bytes(spec, limits, threads) + all(pending),
        draft_bytes: config.draft.as_ref().map_or(0, |draft| {
            let (rings, features) =
                cache_bytes(&draft.spec, draft.kv, limits.context, limits.tree_nodes);
            let pass = draft_pass_bytes(&draft.spec, limits);
            let scores = draft_score_bytes(&draft.spec, &config.target, limits);
            draft_weights_bytes(&draft.spec, dispatch) + pass + scores + all(rings + features)
        }),
        driver_bytes: 0,
        pinned_bytes: 0,
    }
}

/// Bytes of a loaded vector: f32.
fn vector(weight: &WeightRef) -> usize {
    4 * weight.values()
}

/// Bytes of a loaded matrix: its tiles.
fn matrix_bytes(weight: &WeightRef, dispatch: &Dispatch) -> usize {
    if dispatch.is_reference() {
        weight.bytes()
    } else {
        Format::of(weight.ty).tile_bytes(weight.cols) * weight.rows.div_ceil(TILE_ROWS)
    }
}

/// Bytes of a draft's loaded weights.
fn draft_weights_bytes(spec: &DraftSpec, dispatch: &Dispatch) -> u64 {
    let bytes = |weight: &&WeightRef| match weight.rows {
        1 => vector(weight),
        _ => matrix_bytes(weight, dispatch),
    };
    spec.multiplied().iter().map(bytes).sum::<usize>() as u64
}

/// Bytes of a draft's tables, which are read in place.
fn draft_table_bytes(spec: &DraftSpec) -> u64 {
    spec.tables().iter().map(|table| table.bytes() as u64).sum()
}

/// Buffers that score a draft's candidates given the token before.
fn draft_score_bytes(spec: &DraftSpec, target: &ModelSpec, limits: Limits) -> u64 {
    let vocab = spec
        .head
        .as_ref()
        .map_or(target.vocab, |head| head.weight.rows);
    let rows = match &spec.conditioning {
        Conditioning::Independent => return 0,
        Conditioning::Pairwise(_) => spec.depth(),
        Conditioning::Markov(_) => spec.depth() + MAX_STATES,
    };
    (4 * limits.sequences * (rows * vocab + spec.depth() * spec.hidden)) as u64
}

/// Buffers of a draft pass, besides the features of a target pass.
fn draft_pass_bytes(spec: &DraftSpec, limits: Limits) -> u64 {
    let rows = (limits.sequences * spec.block).max(rows_per_pass(limits));
    let widths = spec.layers.iter().map(|layer| {
        let a = &layer.attention;
        let convs = layer.attention_conv.iter().chain(&layer.ffn_conv);
        let conv = convs.map(conv::floats_per_row).max().unwrap_or(0);
        2 * a.q.rows + 3 * layer.ffn.width() + 2 * spec.layers.len() * a.k.rows + a.head_dim + conv
    });
    let width = 3 * spec.hidden + widths.max().unwrap_or(0) + spec.fc.cols;
    let attention = spec.layers.iter().map(|layer| {
        let a = &layer.attention;
        a.n_kv_heads * draft::scratch_floats(a, spec.block)
    });
    4 * (rows * width + limits.sequences * attention.max().unwrap_or(0)) as u64
}

/// Bytes of the loaded weights.
fn weights_bytes(spec: &ModelSpec, dispatch: &Dispatch) -> u64 {
    let matrix = |weight: &WeightRef| matrix_bytes(weight, dispatch);
    // A tied head is a second copy of the embedding in the layout for products.
    let mut bytes = vector(&spec.final_norm) + matrix(&spec.head);
    if let Some(mtp) = &spec.mtp {
        bytes += matrix(&mtp.eh_proj) + mtp.head.as_ref().map_or(0, matrix);
        let norms = [&mtp.embedding_norm, &mtp.hidden_norm, &mtp.final_norm];
        bytes += norms.map(vector).iter().sum::<usize>();
    }
    let mtp = spec.mtp.iter().map(|mtp| &mtp.layer);
    for layer in spec.layers.iter().chain(mtp) {
        bytes += vector(&layer.mixer_norm) + vector(&layer.ffn_norm);
        let post = layer.post_mixer_norm.iter().chain(&layer.post_ffn_norm);
        bytes += post.map(vector).sum::<usize>();
        bytes += match &layer.mixer {
            Mixer::Attention(a) => {
                let norms = a.q_norm.iter().chain(&a.k_norm);
                let vectors = norms.chain(a.biases.iter()).map(vector);
                vectors.sum::<usize>() + [&a.q, &a.k, &a.v, &a.o].map(matrix).iter().sum::<usize>()
            }
            Mixer::GatedDelta(d) => {
                let vectors = [&d.a, &d.dt, &d.conv, &d.norm].map(vector);
                let matrices = [&d.qkv, &d.z, &d.beta, &d.alpha, &d.out].map(matrix);
                vectors.iter().chain(&matrices).sum::<usize>()
            }
        };
        bytes += match &layer.ffn {
            FeedForward::Dense(dense) => dense.matrices().map(matrix).iter().sum::<usize>(),
            FeedForward::Experts(experts) => experts_bytes(experts, dispatch),
        };
    }
    bytes as u64
}

/// Bytes of the loaded weights of a mixture of experts.
fn experts_bytes(spec: &MoeSpec, dispatch: &Dispatch) -> usize {
    let router = WeightRef {
        ty: QuantType::F32,
        ..spec.router.clone()
    };
    let stack = |stack: &ExpertStack, parts: usize| {
        let each = WeightRef {
            rows: stack.rows() / parts,
            ..stack.weight.clone()
        };
        parts * stack.n_experts * matrix_bytes(&each, dispatch)
    };
    let gate_up = match &spec.gate_up {
        ExpertGateUp::Separate { gate, up } => stack(gate, 1) + stack(up, 1),
        ExpertGateUp::Fused(fused) => stack(fused, 2),
    };
    let shared = spec.shared.as_ref().map_or(0, |shared| {
        let matrices = shared
            .ffn
            .matrices()
            .map(|weight| matrix_bytes(weight, dispatch));
        vector(&shared.gate) + matrices.iter().sum::<usize>()
    });
    matrix_bytes(&router, dispatch) + gate_up + stack(&spec.down, 1) + shared
}

/// Buffers of a pass: its rows, the rounded inputs of a product, logits, and each thread's scratch.
fn pass_bytes(spec: &ModelSpec, limits: Limits, threads: usize) -> u64 {
    let rows = rows_per_pass(limits);
    let floats = (BufferWidths::of(spec).total() + mtp::floats_per_row(spec)) * rows
        + head::buffer_floats(spec.hidden, spec.vocab);
    let matrices = spec.weights().into_iter().map(|w| w.cols);
    let dense = matrices.max().unwrap_or(0).next_multiple_of(256);
    // A row of experts is there once for each of its experts.
    let mtp = spec.mtp.iter().map(|mtp| &mtp.layer);
    let experts = spec
        .layers
        .iter()
        .chain(mtp)
        .filter_map(|layer| layer.ffn.experts());
    let experts = experts
        .map(|moe| moe.n_used * moe.width().max(spec.hidden))
        .max();
    let rounded = rows * dense.max(experts.unwrap_or(0)) / 32 * ROUNDED_BLOCK;
    // A tree needs one state per fork on the path to a node, and a fork has at least two nodes.
    let forks = limits.tree_nodes / 2 + 1;
    let delta = spec.delta_layers().map(|d| {
        let tree = delta::tree_floats(d.k_dim, d.v_dim, forks);
        tree.max(delta::chunk_floats(d.k_dim, d.v_dim))
    });
    let attention = spec.kv_layers().map(attention::scratch_floats);
    let borrowed = delta.chain(attention).max().unwrap_or(0) * threads;
    (4 * (floats + borrowed) + rounded) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_parsed_in_kibibytes() {
        let text = "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:    512 kB\n";
        let memory = from_meminfo(text).unwrap();
        assert_eq!((memory.total, memory.free), (2 << 20, 512 << 10));
        assert_eq!(from_meminfo("MemTotal: many kB"), None);
    }

    #[test]
    fn oversized_plans_are_refused_with_both_numbers() {
        if of_system().is_some() {
            let error = require(u64::MAX).unwrap_err().to_string();
            assert!(error.contains(&u64::MAX.to_string()), "{error}");
        }
    }
}
