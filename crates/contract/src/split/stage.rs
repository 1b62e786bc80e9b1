//! A pipeline stage: a contiguous range of a model's layers on one device.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::{
    DeviceError, LoadConfig, ModelPart, ModelSpec, Runner, SeqId, Shard, ShardedModel, WeightRef,
};

/// What each of several devices has of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SplitMode {
    /// A range of its layers.
    #[default]
    Layer,
    /// An equal share of each layer: tensor parallelism ([`crate::shard`]).
    Tensor,
}

/// What a stage runs.
#[derive(Clone)]
pub struct StageConfig {
    /// The whole model, as one device would open it.
    pub model: LoadConfig,
    /// The stage's layers, counted from 0 at the bottom of the whole model.
    pub layers: Range<usize>,
    /// Whether the draft model and the multi-token-prediction head have a stage of their own above
    /// the LM head, without layers. The same in all stages of a model.
    pub draft_apart: bool,
    /// The share of all layers in a tensor split; `None` for whole layers. Its stages are its
    /// shards in their order, the last with the LM head.
    pub shard: Option<Arc<ShardedModel>>,
}

impl StageConfig {
    /// A whole model as one stage.
    pub fn whole(model: LoadConfig) -> StageConfig {
        StageConfig {
            layers: 0..model.target.layers.len(),
            model,
            draft_apart: false,
            shard: None,
        }
    }

    /// A shard of a whole model.
    pub fn sharded(model: LoadConfig, shard: ShardedModel) -> StageConfig {
        StageConfig {
            shard: Some(Arc::new(shard)),
            ..StageConfig::whole(model)
        }
    }

    /// Whether the stage reads token ids; others read the rows of the stage below.
    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether the stage has the LM head.
    pub fn has_head(&self) -> bool {
        !self.layers.is_empty()
            && self.layers.end == self.model.target.layers.len()
            && self.which_shard().is_none_or(Shard::is_last)
    }

    /// Which share of its layers it has, in a tensor split.
    pub fn which_shard(&self) -> Option<Shard> {
        self.shard.as_ref().map(|sharded| sharded.shard())
    }

    /// Whether no stage is above it, so that it has the multi-token-prediction head and the draft.
    pub fn is_last(&self) -> bool {
        if self.draft_apart {
            self.layers.is_empty()
        } else {
            self.has_head()
        }
    }

    /// The stage as a part of its model.
    pub fn part(&self) -> ModelPart {
        ModelPart {
            layers: self.layers.clone(),
            head: self.has_head(),
            draft: self.is_last() && (self.draft_apart || self.model.draft.is_some()),
            shard: self.which_shard(),
        }
    }

    /// The stage's layers as a model of their own, with the identity of the whole.
    ///
    /// Only the last stage has a multi-token-prediction head and a draft, whose captured layers
    /// are those of the whole model. The LM head has rows where logits or drafts are computed with
    /// it, and the embedding where tokens are looked up.
    pub fn load_config(&self) -> LoadConfig {
        let (whole, last) = (&*self.model.target, self.is_last());
        let without_rows = |weight: &WeightRef| WeightRef {
            rows: 0,
            ..weight.clone()
        };
        let drafts = last && (whole.mtp.is_some() || self.model.draft.is_some());
        let borrows = |own: bool| last && !own;
        let multiplies = self.has_head()
            || whole
                .mtp
                .as_ref()
                .is_some_and(|mtp| borrows(mtp.head.is_some()))
            || (self.model.draft.as_ref()).is_some_and(|draft| borrows(draft.spec.head.is_some()));
        let layers = self
            .shard
            .as_ref()
            .map_or(&whole.layers[..], |sharded| sharded.layers());
        let target = ModelSpec {
            layers: layers[self.layers.clone()].to_vec(),
            embedding: if self.is_first() || drafts {
                whole.embedding.clone()
            } else {
                without_rows(&whole.embedding)
            },
            head: if multiplies {
                whole.head.clone()
            } else {
                without_rows(&whole.head)
            },
            mtp: whole.mtp.clone().filter(|_| last),
            ..whole.clone()
        };
        LoadConfig {
            target: Arc::new(target),
            draft: self.model.draft.clone().filter(|_| last),
            weights: match &self.shard {
                Some(sharded) => sharded.weights(Arc::clone(&self.model.weights)),
                None => Arc::clone(&self.model.weights),
            },
            ..self.model.clone()
        }
    }

    /// The layers below the stage whose hidden states the draft reads, bottom to top. They come
    /// with the rows of the stage below.
    pub fn received_layers(&self) -> Vec<usize> {
        self.captured_below(self.layers.start)
    }

    /// The layers whose hidden states go to the stage above, bottom to top. None from the last
    /// stage, and none between shards, each of which has the whole residual stream.
    pub fn handed_over_layers(&self) -> Vec<usize> {
        if self.is_last() || self.shard.is_some() {
            Vec::new()
        } else {
            self.captured_below(self.layers.end)
        }
    }

    fn captured_below(&self, end: usize) -> Vec<usize> {
        let draft = self.model.draft.iter();
        let captured = draft.flat_map(|draft| &draft.spec.capture_layers).copied();
        let mut layers: Vec<usize> = captured.filter(|layer| *layer < end).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }
}

/// A pipeline stage: the [`Runner`] of a part of a model.
///
/// All stages of a model get the same calls in the order of their layers. Between two stages of a
/// pass, the upper one gets [`Stage::receive`]. `prefill` and `verify` get at most one pass, as
/// [`Stage::passes`] and [`Stage::items_per_pass`] cut them; only the stage with the LM head gets
/// logits requests that select something, and only the last the calls of drafts. Sections of an
/// exported snapshot are numbered over the whole model; [`Runner::import_at`] reads only those of
/// the stage.
///
/// The shards of a tensor split are stages too, each with all layers: they get the same calls in
/// their order, but no [`Stage::receive`]. A pass of any but the last returns before it is
/// complete, since it waits for the partial sums of the others.
pub trait Stage: Runner {
    /// The passes of `n` tokens after `position` committed ones. Another stage may have them cut
    /// finer.
    fn passes(&self, position: usize, n: usize) -> Vec<Range<usize>>;

    /// How many trees at the front of these, by their numbers of nodes, fit one pass; at least
    /// one.
    fn items_per_pass(&self, nodes: &[usize]) -> usize;

    /// Takes pages for the first `rows` positions of a sequence.
    ///
    /// # Errors
    /// [`DeviceError::PoolExhausted`]; nothing has changed.
    fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError>;

    /// Prepares to receive rows from the stage below, once, and logs the way they take. A shard
    /// prepares to exchange partial sums with the shard before it.
    ///
    /// # Errors
    /// If the devices cannot reach each other as they were asked to.
    fn connect(&mut self, below: &mut dyn StageOutput) -> Result<(), DeviceError>;

    /// Takes the rows of the last pass of the stage below, `rows` of them, as the input of the
    /// next pass. May return before they have arrived.
    fn receive(&mut self, below: &mut dyn StageOutput, rows: usize) -> Result<(), DeviceError>;

    /// What the last pass has left for the stage above.
    fn output(&mut self) -> &mut dyn StageOutput;
}

/// Rows that a stage leaves for the stage above: the residual stream behind its last layer, then
/// the captured hidden states of each of [`StageConfig::handed_over_layers`]; f32
/// `[1 + n_captured, rows, hidden]`.
pub trait StageOutput: Any {
    /// Copies them to host memory, after the pass that makes them.
    ///
    /// # Errors
    /// Those of the pass.
    fn read(&mut self, rows: usize, out: &mut [f32]) -> Result<(), DeviceError>;

    /// For a stage on a device of the same kind.
    fn as_any(&mut self) -> &mut dyn Any;
}
