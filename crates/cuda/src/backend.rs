//! The seam's view of the card: what it is, and that no model runs on it yet.

use contract::{Backend, DeviceError, DeviceInfo, LoadProgress, MemoryPlan, OpenPlan, Runner};

use crate::probe::Card;

/// One card as a device.
#[derive(Debug, Clone)]
pub struct CudaBackend {
    card: Card,
}

impl CudaBackend {
    /// A card that [`probe`](crate::probe()) found.
    pub fn new(card: Card) -> CudaBackend {
        CudaBackend { card }
    }

    fn unsupported(&self) -> DeviceError {
        DeviceError::Unsupported {
            what: "running a model".to_owned(),
            device: format!("cuda:{} ({})", self.card.ordinal, self.card.name),
            instead: "this version has no CUDA kernels yet, use --device cpu".to_owned(),
        }
    }
}

impl Backend for CudaBackend {
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        Ok(DeviceInfo {
            id: format!("cuda:{}", self.card.ordinal),
            name: self.card.name.clone(),
            features: vec![
                self.card.arch(),
                format!("{} multiprocessors", self.card.multiprocessors),
            ],
            total_bytes: self.card.total_bytes,
            // Asking for free memory needs a context, which costs hundreds of megabytes on the card.
            free_bytes: self.card.total_bytes,
        })
    }

    fn estimate(&self, _plan: &OpenPlan) -> Result<MemoryPlan, DeviceError> {
        Err(self.unsupported())
    }

    fn open(
        &self,
        _plan: OpenPlan,
        _progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        Err(self.unsupported())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_described_by_what_the_driver_said() {
        let card = Card {
            ordinal: 1,
            name: "Test Card".to_owned(),
            capability: (8, 6),
            multiprocessors: 82,
            total_bytes: 24 << 30,
        };
        let info = CudaBackend::new(card).probe().unwrap();
        assert_eq!(info.id, "cuda:1");
        assert_eq!(info.features, ["sm_86", "82 multiprocessors"]);
    }
}
