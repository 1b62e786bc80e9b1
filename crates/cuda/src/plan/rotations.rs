//! Inverse frequencies of rotary embeddings, as tables in device memory.

use std::sync::Arc;

use contract::quant::dequantize_row;
use contract::{AttentionSpec, LoadConfig, RopeSpec, WeightError, WeightSource};

use super::layer_arguments::shape;
use crate::memory::BumpAllocator;

/// Tables to be written once: address and bytes.
pub(super) type Tables = Vec<(u64, Vec<u8>)>;

/// The table of each kind of rotation.
#[derive(Debug, Clone, Default)]
pub(super) struct Rotations {
    /// The rotation, the name of its factors, and the address.
    all: Vec<(RopeSpec, Option<Arc<str>>, u64)>,
}

impl Rotations {
    /// Those of these layers, with memory from `scratch`, and their tables.
    ///
    /// Factors that cannot be read are left out: a plan from a header has none, and a model whose
    /// factors [`rope_factors`] cannot read is not opened.
    pub(super) fn of<'a>(
        layers: impl Iterator<Item = &'a AttentionSpec>,
        load_config: &LoadConfig,
        scratch: &mut BumpAllocator,
    ) -> (Rotations, Tables) {
        let (mut rotations, mut tables) = (Rotations::default(), Tables::new());
        for a in layers {
            if rotations.find(a).is_some() {
                continue;
            }
            let factors = rope_factors(a, &*load_config.weights).unwrap_or_default();
            let table = shape(a, load_config, load_config.target.norm_eps).frequencies(&factors);
            let at = scratch.take(8 * table.len());
            let name = a.rope_factors.as_ref().map(|factors| factors.name.clone());
            rotations.all.push((a.rope, name, at));
            tables.push((at, table.into_iter().flat_map(f64::to_le_bytes).collect()));
        }
        (rotations, tables)
    }

    fn find(&self, a: &AttentionSpec) -> Option<u64> {
        let name = a.rope_factors.as_ref().map(|factors| &factors.name);
        let mut all = self.all.iter();
        let found = all.find(|(rope, factors, _)| *rope == a.rope && factors.as_ref() == name);
        found.map(|(_, _, address)| *address)
    }

    /// The address of a layer's table; 0 if there is none.
    pub(super) fn frequencies(&self, a: &AttentionSpec) -> u64 {
        self.find(a).unwrap_or(0)
    }
}

/// The divisors of a layer's inverse frequencies; empty without.
///
/// # Errors
/// If the file does not have their bytes.
pub(crate) fn rope_factors(
    a: &AttentionSpec,
    weights: &dyn WeightSource,
) -> Result<Vec<f32>, WeightError> {
    let Some(factors) = &a.rope_factors else {
        return Ok(Vec::new());
    };
    let mut values = vec![0.0; factors.values()];
    dequantize_row(factors.ty, weights.bytes(factors)?, &mut values);
    Ok(values)
}
