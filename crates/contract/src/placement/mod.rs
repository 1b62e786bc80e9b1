//! Placement of a model on several devices, as data: which layers, LM head, draft and share of the
//! KV page pool each device has.
//!
//! A device runs a contiguous range of layers with everything that belongs to them: all attention
//! and delta heads, all experts, the layers' KV pages and recurrent states. The device of the last
//! layers also has the LM head. The draft and the multi-token-prediction head are there too, or
//! both on a device named for them. The residual rows are handed over once per boundary. [`place`]
//! is a pure function of what each device has and would need. In a tensor split each device has an
//! equal share of every layer instead ([`crate::shard`]).

mod cost;
mod cut;

#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::{DraftSpec, KvFormats, MemoryPlan, ModelSpec, Shard};

use cost::ModelCosts;

/// How the layers are divided among the target devices.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum LayerSplit {
    /// So that the fullest device has the lowest share of its memory in use.
    #[default]
    ByMemory,
    /// In proportion to one weight per device. Weights that add up to the number of layers are the
    /// layers of each device.
    Weights(Vec<f64>),
}

/// A device that may take a part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementDevice {
    /// Its id, such as `cuda:0`.
    pub id: String,
    /// Bytes that a model may take of it.
    pub usable_bytes: u64,
    /// What the whole model and its draft would take on this device alone.
    pub whole: MemoryPlan,
}

/// What is to be placed, and where.
#[derive(Debug, Clone, Copy)]
pub struct PlacementRequest<'a> {
    /// The target model.
    pub spec: &'a ModelSpec,
    /// Its KV cache types.
    pub kv: KvFormats,
    /// The draft model, if there is one.
    pub draft: Option<&'a DraftSpec>,
    /// All devices: first those of the layers, bottom to top.
    pub devices: &'a [PlacementDevice],
    /// How many of `devices` have layers.
    pub n_targets: usize,
    /// How the layers are divided.
    pub split: &'a LayerSplit,
    /// Index in `devices` of the device of the draft and the multi-token-prediction head; `None`
    /// is the device of the LM head.
    pub draft_device: Option<usize>,
}

/// Which device runs which part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// One part per device: in the order of layers, then a draft's own device. Every layer is in
    /// exactly one part.
    pub parts: Vec<PlacedPart>,
}

/// The part of a model on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedPart {
    /// The device's id.
    pub device: String,
    /// What it runs.
    pub part: ModelPart,
    /// Its memory, by purpose. Scratch and driver memory are those of the whole model: an upper
    /// bound.
    pub memory: MemoryPlan,
    /// Bytes that a model may take of the device.
    pub usable_bytes: u64,
}

/// A part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelPart {
    /// Its layers, counted from 0 at the bottom of the whole model; all heads and experts of them.
    pub layers: Range<usize>,
    /// Whether it has the LM head.
    pub head: bool,
    /// Whether it has the draft model, or the multi-token-prediction head apart from the LM head.
    pub draft: bool,
    /// Which share it has of each of its layers; `None` for all heads and channels.
    pub shard: Option<Shard>,
}

/// Why a model cannot be placed as requested.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlacementError {
    /// More devices than layers, or none.
    #[error(
        "{devices} devices cannot share {layers} layers; name at most one device per layer with \
         --target-devices"
    )]
    Devices {
        /// Target devices.
        devices: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Weights that do not match the devices.
    #[error(
        "--target-layer-split has {weights} weights for {devices} devices; give one positive number \
         per device of --target-devices"
    )]
    Weights {
        /// Weights given.
        weights: usize,
        /// Target devices.
        devices: usize,
    },
    /// A weight that is so small that its device has no layer, or is not a positive number.
    #[error(
        "--target-layer-split {weight}: {device} would have none of the {layers} layers; give it a \
         larger weight or remove it from --target-devices"
    )]
    NoLayer {
        /// The device.
        device: String,
        /// Its weight.
        weight: f64,
        /// Layers of the model.
        layers: usize,
    },
    /// A device lacks memory for its part.
    #[error(
        "{device} lacks {} GiB: {part} take {} of {} GiB; {instead}",
        gib(.lacking_bytes),
        gib(.wanted_bytes),
        gib(.usable_bytes)
    )]
    LacksMemory {
        /// The device.
        device: String,
        /// Its part in words.
        part: String,
        /// Bytes of the part.
        wanted_bytes: u64,
        /// Bytes that it may take.
        usable_bytes: u64,
        /// The difference.
        lacking_bytes: u64,
        /// Bytes of all parts together.
        total_bytes: u64,
        /// What to do.
        instead: String,
    },
}

/// Bytes in GiB with two decimals.
fn gib(bytes: &u64) -> String {
    format!("{:.2}", *bytes as f64 / f64::from(1 << 30))
}

/// Places a model. The result may exceed a device's memory: see [`Placement::require_memory`].
///
/// # Errors
/// A number of devices or weights that cannot be placed.
pub fn place(request: &PlacementRequest<'_>) -> Result<Placement, PlacementError> {
    let (n_layers, targets) = (request.spec.layers.len(), request.n_targets);
    if targets == 0 || targets > n_layers || targets > request.devices.len() {
        return Err(PlacementError::Devices {
            devices: targets,
            layers: n_layers,
        });
    }
    let drafts = request.draft.is_some() || request.spec.mtp.is_some();
    let draft_device = request.draft_device.filter(|_| drafts);
    let draft_device = draft_device.or_else(|| request.draft.map(|_| targets - 1));
    let apart = draft_device.is_some_and(|device| device + 1 != targets);
    let costs: Vec<ModelCosts> = request
        .devices
        .iter()
        .map(|device| ModelCosts::new(request, &device.whole))
        .collect();
    let part_of = |device: usize, layers: Range<usize>| ModelPart {
        head: device + 1 == targets,
        draft: draft_device == Some(device),
        layers,
        shard: None,
    };
    let memory = |device: usize, layers: Range<usize>| {
        costs[device].of(&part_of(device, layers), apart, request)
    };
    let devices = &request.devices[..targets];
    let ranges = match request.split {
        LayerSplit::Weights(weights) => cut::by_weights(weights, devices, n_layers)?,
        LayerSplit::ByMemory => cut::by_memory(devices, n_layers, |device, layers| {
            memory(device, layers).total_bytes()
        }),
    };
    // A draft's own device comes behind the layers.
    let own_draft = draft_device.filter(|device| *device >= targets);
    let all = ranges.into_iter().enumerate();
    let all = all.chain(own_draft.map(|device| (device, n_layers..n_layers)));
    let parts = all.map(|(device, layers)| PlacedPart {
        device: request.devices[device].id.clone(),
        memory: memory(device, layers.clone()),
        part: part_of(device, layers),
        usable_bytes: request.devices[device].usable_bytes,
    });
    Ok(Placement {
        parts: parts.collect(),
    })
}

impl Placement {
    /// Bytes of all devices together.
    pub fn total_bytes(&self) -> u64 {
        self.parts
            .iter()
            .map(|part| part.memory.total_bytes())
            .sum()
    }

    /// The memory of all devices together, by purpose.
    pub fn memory(&self) -> MemoryPlan {
        let all = self.parts.iter().map(|part| &part.memory);
        all.fold(MemoryPlan::default(), |sum, part| sum.plus(part))
    }

    /// Bytes of residual rows that cross each boundary for one row of the model: `4 * hidden`.
    pub fn handed_over_bytes(spec: &ModelSpec) -> usize {
        4 * spec.hidden
    }

    /// Refuses a placement that exceeds a device's memory.
    ///
    /// # Errors
    /// [`PlacementError::LacksMemory`] for the device that lacks most.
    pub fn require_memory(&self) -> Result<(), PlacementError> {
        let Some(worst) = self.parts.iter().max_by_key(|part| part.lacking_bytes()) else {
            return Ok(());
        };
        if worst.lacking_bytes() == 0 {
            return Ok(());
        }
        let most = self.parts.iter().max_by_key(|part| part.spare_bytes());
        let moved = most.filter(|part| part.spare_bytes() >= worst.lacking_bytes());
        let instead = match moved {
            // No share of the layers makes room for a draft on a device of its own.
            _ if worst.part.layers.is_empty() => {
                "name a device with more memory with --draft-device, or use a smaller draft"
                    .to_owned()
            }
            // All shards have the same share.
            Some(_) if worst.part.shard.is_some() => {
                "use --split-mode layer, which gives each device what it has memory for".to_owned()
            }
            Some(part) => format!(
                "{} has {} GiB left: give it a larger share with --target-layer-split, or use \
                 fewer devices",
                part.device,
                gib(&part.spare_bytes())
            ),
            None => {
                "use a shorter --max-ctx, a coarser --kv-type, fewer sequences, a smaller model \
                     or one more device in --target-devices"
                    .to_owned()
            }
        };
        Err(PlacementError::LacksMemory {
            device: worst.device.clone(),
            part: worst.part.text(),
            wanted_bytes: worst.memory.total_bytes(),
            usable_bytes: worst.usable_bytes,
            lacking_bytes: worst.lacking_bytes(),
            total_bytes: self.total_bytes(),
            instead,
        })
    }
}

impl PlacedPart {
    /// Bytes that the part exceeds its device by.
    pub fn lacking_bytes(&self) -> u64 {
        self.memory.total_bytes().saturating_sub(self.usable_bytes)
    }

    /// Bytes that the part leaves of its device.
    pub fn spare_bytes(&self) -> u64 {
        self.usable_bytes.saturating_sub(self.memory.total_bytes())
    }
}

impl ModelPart {
    /// The whole of a model of `n_layers` layers.
    pub fn whole(n_layers: usize) -> ModelPart {
        ModelPart {
            layers: 0..n_layers,
            head: true,
            draft: true,
            shard: None,
        }
    }

    /// The part in words, such as `layers 32 to 63, the LM head and the draft`.
    pub fn text(&self) -> String {
        let layers = match self.layers.len() {
            0 => None,
            1 => Some(format!("layer {}", self.layers.start)),
            _ => Some(format!(
                "layers {} to {}",
                self.layers.start,
                self.layers.end - 1
            )),
        };
        let layers = match (layers, self.shard) {
            (Some(layers), Some(Shard { index, count })) => {
                Some(format!("shard {} of {count} of {layers}", index + 1))
            }
            (layers, _) => layers,
        };
        let head = self.head.then(|| "the LM head".to_owned());
        let draft = self.draft.then(|| "the draft".to_owned());
        let all: Vec<String> = [layers, head, draft].into_iter().flatten().collect();
        match all.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
            Some((only, _)) => only.clone(),
            None => "nothing".to_owned(),
        }
    }
}
