//! Shards of a model for tensor parallelism: every layer in equal parts, one part per device.
//!
//! ```text
//! rows  (column-parallel)  attention q, k, v; delta qkv, z, beta, alpha, a, dt, conv; gate, up
//! columns (row-parallel)   attention o; delta out; down
//! whole on each device     norms, embedding, residual stream, routers of experts
//! whole on the last device LM head, multi-token-prediction head, draft
//! ```
//!
//! Heads stay whole: query heads go with their key and value heads, value heads of the delta rule
//! with their key heads. The output of a mixer and of a feed-forward is the sum of the devices'
//! products, taken in the order of the devices ([`ShardedModel`]). A shard is a model of its own
//! with fewer heads and channels, so devices run it with the kernels of whole models.
//!
//! Of each expert every device has a part of the channels, as of a dense feed-forward: all devices
//! choose the same experts from the same residual stream, and each has an equal part of the work
//! whichever are chosen. Biases go with their rows; that of an output projection is added once, by
//! the first device. A norm behind a block takes the sum of all devices.

mod weights;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::{
    AttentionBiases, AttentionSpec, DenseSpec, ExpertGateUp, ExpertStack, FeedForward,
    GatedDeltaSpec, HeadMap, LayerSpec, Mixer, ModelSpec, MoeSpec, SharedExpertSpec, WeightRef,
    WeightSource,
};

use weights::ShardWeights;
pub use weights::WeightSlice;

/// One of `count` equal parts of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Its place in the order of the devices, from 0.
    pub index: usize,
    /// Devices that share the model.
    pub count: usize,
}

/// Why a model cannot be cut into shards. The text names the part that is in the way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a tensor split of {model} over {count} devices: {reason}")]
pub struct ShardError {
    /// The model's name.
    pub model: String,
    /// Devices.
    pub count: usize,
    /// What is in the way.
    pub reason: String,
}

/// The layers of one shard, and what it has of each weight.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardedModel {
    shard: Shard,
    layers: Vec<LayerSpec>,
    /// The weights that are not whole, by name.
    slices: BTreeMap<Arc<str>, WeightSlice>,
}

impl Shard {
    /// All shards of a model over `count` devices.
    pub fn all(count: usize) -> impl Iterator<Item = Shard> {
        (0..count).map(move |index| Shard { index, count })
    }

    /// Whether it also has what is on one device only.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// Its part of `n` equal things, of which every shard has as many.
    fn part(self, n: usize) -> Range<usize> {
        let each = n / self.count;
        self.index * each..(self.index + 1) * each
    }

    /// Its key and value heads of an attention layer.
    pub fn kv_heads(self, a: &AttentionSpec) -> Range<usize> {
        self.part(a.n_kv_heads)
    }

    /// Its value heads of a delta layer, in the order in which it has them.
    pub fn v_heads(self, d: &GatedDeltaSpec) -> Vec<Range<usize>> {
        match d.head_map {
            HeadMap::Grouped => vec![self.part(d.n_v_heads)],
            HeadMap::Tiled => {
                let k_heads = self.part(d.n_k_heads);
                let tiles = (0..d.n_v_heads).step_by(d.n_k_heads.max(1));
                tiles.map(|tile| shifted(&k_heads, tile)).collect()
            }
        }
    }

    /// Its channels of the convolution of a delta layer: those of Q, K and V.
    pub fn channels(self, d: &GatedDeltaSpec) -> Vec<Range<usize>> {
        let keys = scaled(&self.part(d.n_k_heads), d.k_dim);
        let n_keys = d.n_k_heads * d.k_dim;
        let values = self.v_heads(d).into_iter();
        let values = values.map(|heads| shifted(&scaled(&heads, d.v_dim), 2 * n_keys));
        [keys.clone(), shifted(&keys, n_keys)]
            .into_iter()
            .chain(values)
            .collect()
    }
}

impl ShardedModel {
    /// A shard of a model.
    ///
    /// # Errors
    /// [`ShardError`] for a model with parts that have no equal shares: heads or channels that the
    /// devices do not divide, and columns whose border is within a quantisation block.
    pub fn new(whole: &ModelSpec, shard: Shard) -> Result<ShardedModel, ShardError> {
        let mut cut = Cut {
            shard,
            slices: BTreeMap::new(),
        };
        let layers = whole.layers.iter().map(|layer| cut.layer(layer));
        let refused = |reason| ShardError {
            model: whole.name.clone(),
            count: shard.count,
            reason,
        };
        if shard.count < 2 {
            return Err(refused("it takes two or more".to_owned()));
        }
        let layers: Result<Vec<LayerSpec>, String> = layers.collect();
        Ok(ShardedModel {
            shard,
            layers: layers.map_err(refused)?,
            slices: cut.slices,
        })
    }

    /// Which part it is.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// The layers as layers of a model of their own.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// What the shard has of a weight; `None` for all of it.
    pub fn slice(&self, name: &str) -> Option<&WeightSlice> {
        self.slices.get(name)
    }

    /// The shard's weights, taken from those of the whole model.
    pub fn weights(&self, whole: Arc<dyn WeightSource>) -> Arc<dyn WeightSource> {
        Arc::new(ShardWeights::new(whole, &self.slices))
    }
}

fn scaled(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start * by..range.end * by
}

fn shifted(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Cuts weights, and keeps what it has cut.
struct Cut {
    shard: Shard,
    slices: BTreeMap<Arc<str>, WeightSlice>,
}

impl Cut {
    fn layer(&mut self, layer: &LayerSpec) -> Result<LayerSpec, String> {
        let mixer = match &layer.mixer {
            Mixer::Attention(a) => Mixer::Attention(self.attention(a)?),
            Mixer::GatedDelta(d) => Mixer::GatedDelta(self.delta(d)?),
        };
        let ffn = match &layer.ffn {
            FeedForward::Dense(dense) => {
                FeedForward::Dense(self.dense(dense, "channels of a feed-forward")?)
            }
            FeedForward::Experts(moe) => FeedForward::Experts(Box::new(self.experts(moe)?)),
        };
        Ok(LayerSpec {
            mixer,
            ffn,
            ..layer.clone()
        })
    }

    /// Refuses `n` things that the devices do not divide.
    fn divides(&self, n: usize, what: &str) -> Result<(), String> {
        if n > 0 && n.is_multiple_of(self.shard.count) {
            return Ok(());
        }
        Err(format!("they do not divide its {n} {what}"))
    }

    fn attention(&mut self, a: &AttentionSpec) -> Result<AttentionSpec, String> {
        self.divides(a.n_heads, "attention heads")?;
        self.divides(a.n_kv_heads, "key and value heads")?;
        let heads = self.shard.part(a.n_heads);
        let queries = scaled(&heads, a.q.rows / a.n_heads);
        let keys = scaled(&self.shard.kv_heads(a), a.head_dim);
        let mut bias = |bias: &Option<WeightRef>, rows: &Range<usize>| {
            let bias = bias.as_ref();
            bias.map(|bias| self.columns(bias, vec![rows.clone()]))
                .transpose()
        };
        let biases = AttentionBiases {
            q: bias(&a.biases.q, &queries)?,
            k: bias(&a.biases.k, &keys)?,
            v: bias(&a.biases.v, &keys)?,
            // The sum of all shards has it once.
            o: a.biases.o.clone().filter(|_| self.shard.index == 0),
        };
        Ok(AttentionSpec {
            biases,
            n_heads: heads.len(),
            n_kv_heads: a.n_kv_heads / self.shard.count,
            q: self.rows(&a.q, vec![queries]),
            k: self.rows(&a.k, vec![keys.clone()]),
            v: self.rows(&a.v, vec![keys]),
            o: self.columns(&a.o, vec![scaled(&heads, a.head_dim)])?,
            ..a.clone()
        })
    }

    fn delta(&mut self, d: &GatedDeltaSpec) -> Result<GatedDeltaSpec, String> {
        self.divides(d.n_k_heads, "key heads of the delta rule")?;
        self.divides(d.n_v_heads, "value heads of the delta rule")?;
        let heads = self.shard.v_heads(d);
        let values: Vec<Range<usize>> = heads.iter().map(|of| scaled(of, d.v_dim)).collect();
        let channels = self.shard.channels(d);
        Ok(GatedDeltaSpec {
            n_k_heads: d.n_k_heads / self.shard.count,
            n_v_heads: d.n_v_heads / self.shard.count,
            qkv: self.rows(&d.qkv, channels.clone()),
            z: self.rows(&d.z, values.clone()),
            beta: self.rows(&d.beta, heads.clone()),
            alpha: self.rows(&d.alpha, heads.clone()),
            a: self.columns(&d.a, heads.clone())?,
            dt: self.columns(&d.dt, heads)?,
            conv: self.rows(&d.conv, channels),
            out: self.columns(&d.out, values)?,
            ..d.clone()
        })
    }

    fn dense(&mut self, dense: &DenseSpec, what: &str) -> Result<DenseSpec, String> {
        self.divides(dense.width(), what)?;
        let channels = vec![self.shard.part(dense.width())];
        Ok(DenseSpec {
            gate: self.rows(&dense.gate, channels.clone()),
            up: self.rows(&dense.up, channels.clone()),
            down: self.columns(&dense.down, channels)?,
            ..dense.clone()
        })
    }

    /// A part of the channels of every expert.
    fn experts(&mut self, moe: &MoeSpec) -> Result<MoeSpec, String> {
        let width = moe.width();
        self.divides(width, "channels of each expert")?;
        let channels = self.shard.part(width);
        let gate_up = match &moe.gate_up {
            ExpertGateUp::Separate { gate, up } => {
                let rows = std::slice::from_ref(&channels);
                ExpertGateUp::Separate {
                    gate: self.expert_rows(gate, rows),
                    up: self.expert_rows(up, rows),
                }
            }
            ExpertGateUp::Fused(fused) => {
                let both = [channels.clone(), shifted(&channels, width)];
                ExpertGateUp::Fused(self.expert_rows(fused, &both))
            }
        };
        let down = ExpertStack {
            weight: self.columns(&moe.down.weight, vec![channels])?,
            ..moe.down.clone()
        };
        let shared = match &moe.shared {
            Some(shared) => Some(SharedExpertSpec {
                ffn: self.dense(&shared.ffn, "channels of its shared expert")?,
                ..shared.clone()
            }),
            None => None,
        };
        Ok(MoeSpec {
            gate_up,
            down,
            shared,
            ..moe.clone()
        })
    }

    /// These rows of every expert's matrix.
    fn expert_rows(&mut self, stack: &ExpertStack, rows: &[Range<usize>]) -> ExpertStack {
        let experts = (0..stack.n_experts).map(|expert| expert * stack.rows());
        let all = experts.flat_map(|first| rows.iter().map(move |rows| shifted(rows, first)));
        ExpertStack {
            weight: self.rows(&stack.weight, all.collect()),
            ..stack.clone()
        }
    }

    /// These rows of a weight.
    fn rows(&mut self, weight: &WeightRef, rows: Vec<Range<usize>>) -> WeightRef {
        let columns = std::iter::once(0..weight.cols).collect();
        self.keep(WeightSlice::new(weight, rows, columns))
    }

    /// These columns of a weight.
    fn columns(
        &mut self,
        weight: &WeightRef,
        columns: Vec<Range<usize>>,
    ) -> Result<WeightRef, String> {
        let block = weight.ty.block_values();
        let mut ends = columns.iter().flat_map(|range| [range.start, range.end]);
        if let Some(end) = ends.find(|end| !end.is_multiple_of(block)) {
            return Err(format!(
                "column {end} of {} is within a block of {block} values of {}",
                weight.name,
                weight.ty.name()
            ));
        }
        let rows = std::iter::once(0..weight.rows).collect();
        Ok(self.keep(WeightSlice::new(weight, rows, columns)))
    }

    fn keep(&mut self, slice: WeightSlice) -> WeightRef {
        let weight = slice.weight();
        self.slices.insert(Arc::clone(&weight.name), slice);
        weight
    }
}
