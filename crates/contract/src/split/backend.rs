//! Several devices as a [`Backend`].

use crate::placement::place;
use crate::{
    Backend, DeviceError, DeviceInfo, LayerSplit, LoadConfig, LoadProgress, MemoryPlan, Placement,
    PlacementDevice, PlacementRequest, Runner,
};

/// One of the devices of a [`SplitBackend`].
pub struct SplitDevice {
    /// Its id, such as `cuda:0`.
    pub id: String,
    /// The device.
    pub backend: Box<dyn Backend>,
    /// Bytes that a model may take of it.
    pub usable_bytes: u64,
}

/// Several devices that run one model together.
pub struct SplitBackend {
    /// First the devices of the layers, bottom to top.
    devices: Vec<SplitDevice>,
    n_targets: usize,
    split: LayerSplit,
    /// Index of the draft's device; `None` is the device of the LM head.
    draft_device: Option<usize>,
}

impl SplitBackend {
    /// The first `n_targets` of `devices` share the layers; `draft_device` is an index in
    /// `devices`, `None` for the device of the LM head.
    pub fn new(
        devices: Vec<SplitDevice>,
        (n_targets, split): (usize, LayerSplit),
        draft_device: Option<usize>,
    ) -> SplitBackend {
        SplitBackend {
            devices,
            n_targets,
            split,
            draft_device,
        }
    }

    /// Which device runs what; it may exceed a device's memory.
    fn place(&self, config: &LoadConfig) -> Result<Placement, DeviceError> {
        let mut devices: Vec<PlacementDevice> = Vec::with_capacity(self.devices.len());
        for device in &self.devices {
            devices.push(PlacementDevice {
                id: device.id.clone(),
                usable_bytes: device.usable_bytes,
                whole: device.backend.estimate(config)?,
            });
        }
        Ok(place(&PlacementRequest {
            spec: &config.target,
            kv: config.kv,
            draft: config.draft.as_ref().map(|draft| &*draft.spec),
            devices: &devices,
            n_targets: self.n_targets,
            split: &self.split,
            draft_device: self.draft_device,
        })?)
    }

    fn placed(&self, config: &LoadConfig) -> Result<Placement, DeviceError> {
        let placement = self.place(config)?;
        placement.require_memory()?;
        Ok(placement)
    }
}

impl Backend for SplitBackend {
    /// All devices as one: ids joined by commas, memory added up.
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        let mut all: Option<DeviceInfo> = None;
        for device in &self.devices {
            let mut info = device.backend.probe()?;
            info.free_bytes = device.usable_bytes;
            all = Some(match all {
                None => info,
                Some(all) => merged(all, info),
            });
        }
        all.ok_or_else(|| DeviceError::Unsupported {
            what: "a list of no devices".to_owned(),
            device: "the placement".to_owned(),
            instead: "name one with --device".to_owned(),
        })
    }

    fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
        Ok(self.placed(config)?.memory())
    }

    fn placement(&self, config: &LoadConfig) -> Result<Option<Placement>, DeviceError> {
        Ok(Some(self.place(config)?))
    }

    fn open(
        &self,
        config: LoadConfig,
        _: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        let placement = self.placed(&config)?;
        let part = placement.parts.first();
        Err(DeviceError::Unsupported {
            what: part.map_or_else(String::new, |part| {
                format!("running {} alone", part.part.text())
            }),
            device: part.map_or_else(String::new, |part| part.device.clone()),
            instead: "remove --target-devices and name one device that holds the whole model \
                      with --device"
                .to_owned(),
        })
    }
}

/// Two devices as one.
fn merged(all: DeviceInfo, other: DeviceInfo) -> DeviceInfo {
    let mut features = all.features;
    for feature in other.features {
        if !features.contains(&feature) {
            features.push(feature);
        }
    }
    DeviceInfo {
        id: format!("{},{}", all.id, other.id),
        name: if all.name == other.name {
            all.name
        } else {
            format!("{}, {}", all.name, other.name)
        },
        features,
        total_bytes: all.total_bytes + other.total_bytes,
        free_bytes: all.free_bytes + other.free_bytes,
    }
}
