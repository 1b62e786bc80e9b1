//! Bytes of each part of a model on one device.

use std::ops::Range;

use super::{ModelPart, PlacementRequest};
use crate::{KvFormats, LayerSpec, MemoryPlan, Mixer, ModelSpec};

/// Bytes of a model's parts on one device: its plan for the whole model, divided in proportion to
/// stored bytes (weights), bytes per token (KV cache) and values (states).
pub(super) struct ModelCosts {
    whole: MemoryPlan,
    /// Sums over the layers below layer `i`, `[n_layers + 1]`.
    below: Vec<Shares>,
    /// The LM head with its norm.
    head: Shares,
    /// The multi-token-prediction head.
    mtp: Shares,
    /// All layers and both heads.
    all: Shares,
}

/// Amounts in proportion to which the memory of the whole model is divided.
#[derive(Debug, Clone, Copy, Default)]
struct Shares {
    /// Stored bytes of weights.
    weights: u64,
    /// KV bytes per token.
    kv: u64,
    /// Bytes of delta states and convolution windows per sequence.
    state: u64,
}

impl Shares {
    fn of_layer(layer: &LayerSpec, kv: KvFormats) -> Shares {
        let weights = layer.weights().iter().map(|w| w.bytes() as u64).sum();
        let (kv, state) = match &layer.mixer {
            Mixer::Attention(a) => {
                let width = a.n_kv_heads * a.head_dim;
                ((kv.k.bytes(width) + kv.v.bytes(width)) as u64, 0)
            }
            Mixer::GatedDelta(d) => (0, 4 * (d.state_values() + d.window_values()) as u64),
        };
        Shares { weights, kv, state }
    }

    fn of_head(spec: &ModelSpec) -> Shares {
        Shares {
            weights: (spec.head.bytes() + spec.final_norm.bytes()) as u64,
            ..Shares::default()
        }
    }

    fn of_mtp(spec: &ModelSpec, kv: KvFormats) -> Shares {
        let Some(mtp) = &spec.mtp else {
            return Shares::default();
        };
        // Its embedding is looked up on the host.
        let embedding = mtp.embedding.as_ref().map(|weight| &weight.name);
        let weights = mtp.weights(spec);
        let weights = weights.iter().filter(|w| Some(&w.name) != embedding);
        Shares {
            weights: weights.map(|w| w.bytes() as u64).sum(),
            kv: Shares::of_layer(&mtp.layer, kv).kv,
            state: 4 * spec.hidden as u64,
        }
    }

    fn plus(self, other: Shares) -> Shares {
        Shares {
            weights: self.weights + other.weights,
            kv: self.kv + other.kv,
            state: self.state + other.state,
        }
    }
}

/// The part of `bytes` that belongs to the shares from `from` to `to` of `all`. Adjacent parts add
/// up without a remainder.
fn part(bytes: u64, (from, to): (u64, u64), all: u64) -> u64 {
    let up_to = |share: u64| u128::from(bytes) * u128::from(share) / u128::from(all.max(1));
    // At most `bytes`, since a share is at most all.
    (up_to(to) - up_to(from)) as u64
}

impl ModelCosts {
    pub(super) fn new(request: &PlacementRequest<'_>, whole: &MemoryPlan) -> ModelCosts {
        let spec = request.spec;
        let mut below = vec![Shares::default()];
        let mut sum = Shares::default();
        for layer in &spec.layers {
            sum = sum.plus(Shares::of_layer(layer, request.kv));
            below.push(sum);
        }
        let (head, mtp) = (Shares::of_head(spec), Shares::of_mtp(spec, request.kv));
        ModelCosts {
            whole: whole.clone(),
            all: sum.plus(head).plus(mtp),
            below,
            head,
            mtp,
        }
    }

    /// Memory of a part whose layers are within the model; `apart`: whether drafts run elsewhere
    /// than the LM head.
    pub(super) fn of(
        &self,
        wanted: &ModelPart,
        apart: bool,
        request: &PlacementRequest<'_>,
    ) -> MemoryPlan {
        let Range { start, end } = wanted.layers;
        let (from, mut to) = (self.below[start], self.below[end]);
        if wanted.head {
            to = to.plus(self.head);
        }
        let has_mtp = if apart { wanted.draft } else { wanted.head };
        if has_mtp {
            to = to.plus(self.mtp);
        }
        let whole = &self.whole;
        let mut memory = MemoryPlan {
            weights_bytes: part(
                whole.weights_bytes,
                (from.weights, to.weights),
                self.all.weights,
            ),
            kv_bytes: part(whole.kv_bytes, (from.kv, to.kv), self.all.kv),
            state_bytes: part(whole.state_bytes, (from.state, to.state), self.all.state),
            draft_bytes: 0,
            ..whole.clone()
        };
        if wanted.draft {
            memory.draft_bytes = whole.draft_bytes;
            // Drafts without a head of their own multiply with the target's.
            let spec = request.spec;
            let borrows = request.draft.is_some_and(|draft| draft.head.is_none())
                || spec.mtp.as_ref().is_some_and(|mtp| mtp.head.is_none());
            if !wanted.head && borrows {
                let copy = spec.head.bytes() as u64;
                memory.draft_bytes += part(whole.weights_bytes, (0, copy), self.all.weights);
            }
        }
        memory
    }
}
