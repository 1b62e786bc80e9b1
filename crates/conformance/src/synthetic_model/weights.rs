//! Weights in memory, and the random numbers that they are.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use contract::quant::quantize_row;
use contract::{WeightError, WeightRef, WeightSource};

/// Weights in memory, by name.
pub(super) struct InMemoryWeights(pub(super) HashMap<Arc<str>, InMemoryWeight>);

/// A weight that is quantised when it is first read: plans read none, and some types take seconds.
pub(super) struct InMemoryWeight {
    stored: WeightRef,
    values: Vec<f32>,
    bytes: OnceLock<Vec<u8>>,
}

impl InMemoryWeight {
    pub(super) fn new(stored: WeightRef, values: Vec<f32>) -> InMemoryWeight {
        InMemoryWeight {
            stored,
            values,
            bytes: OnceLock::new(),
        }
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get_or_init(|| {
            let WeightRef { ty, cols, .. } = self.stored;
            let mut bytes = vec![0; self.stored.bytes()];
            let rows = self.values.chunks(cols);
            for (row, out) in rows.zip(bytes.chunks_mut(ty.row_bytes(cols))) {
                quantize_row(ty, row, out);
            }
            bytes
        })
    }
}

impl WeightSource for InMemoryWeights {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        let found = self
            .0
            .get(&weight.name)
            .ok_or_else(|| WeightError::Missing {
                name: weight.name.clone(),
            })?;
        let stored = found.stored.bytes();
        if stored != weight.bytes() {
            return Err(WeightError::Mismatch {
                name: weight.name.clone(),
                detail: format!("{stored} bytes instead of {}", weight.bytes()),
            });
        }
        Ok(found.bytes())
    }
}

/// Numbers that only need to look random.
pub(super) struct WeightRng(pub(super) u64);

impl WeightRng {
    /// At least 0 and below 1.
    pub(super) fn unit(&mut self) -> f32 {
        // Knuth's MMIX generator; its high bits are good enough for weights.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1_u32 << 24) as f32
    }

    /// At least -1 and below 1.
    pub(super) fn signed(&mut self) -> f32 {
        2.0 * self.unit() - 1.0
    }
}
