//! Weights of a gated-delta mixer.

use contract::GatedDeltaSpec;

use super::{LayoutBuilder, WeightMatrix};

/// Addresses of a mixer's weights.
#[derive(Debug, Clone)]
pub(crate) struct DeltaWeights {
    pub(crate) qkv: WeightMatrix,
    pub(crate) z: WeightMatrix,
    pub(crate) beta: WeightMatrix,
    pub(crate) alpha: WeightMatrix,
    pub(crate) out: WeightMatrix,
    pub(crate) a: u64,
    pub(crate) dt: u64,
    pub(crate) conv: u64,
    pub(crate) norm: u64,
}

impl LayoutBuilder<'_> {
    pub(super) fn delta(&mut self, d: &GatedDeltaSpec) -> DeltaWeights {
        DeltaWeights {
            qkv: self.matrix(&d.qkv),
            z: self.matrix(&d.z),
            beta: self.matrix(&d.beta),
            alpha: self.matrix(&d.alpha),
            out: self.matrix(&d.out),
            a: self.vector(&d.a),
            dt: self.vector(&d.dt),
            conv: self.vector(&d.conv),
            norm: self.vector(&d.norm),
        }
    }
}
