//! Weights of feed-forwards: dense, or mixtures of experts.
//!
//! The stack of all experts is packed as one matrix. The check of the configuration passed only
//! experts whose rows are whole row blocks, so each has row blocks of its own. A tensor with the
//! gate and up projections of every expert is loaded as two stacks.

use std::ops::Range;

use contract::{ExpertGateUp, ExpertStack, FeedForward, MoeSpec, WeightRef};

use crate::pack::WeightKind;

use super::{Encoding, FfnWeights, LayoutBuilder, WeightMatrix};

/// The feed-forward of a layer and the norm before it.
#[derive(Debug, Clone)]
pub(crate) enum FeedForwardWeights {
    Dense(FfnWeights),
    Experts(ExpertWeights),
}

impl FeedForwardWeights {
    /// The dense feed-forward, if it is one.
    pub(crate) fn dense(&self) -> Option<&FfnWeights> {
        match self {
            FeedForwardWeights::Dense(dense) => Some(dense),
            FeedForwardWeights::Experts(_) => None,
        }
    }
}

/// A mixture of experts and the norm before it.
#[derive(Debug, Clone)]
pub(crate) struct ExpertWeights {
    pub(crate) norm: u64,
    pub(crate) n_experts: usize,
    pub(crate) n_used: usize,
    /// Factor on the experts' weights.
    pub(crate) scale: f32,
    /// f32 `[n_experts][hidden]`.
    pub(crate) router: WeightMatrix,
    /// `[n_experts * ffn][hidden]`.
    pub(crate) gate: WeightMatrix,
    pub(crate) up: WeightMatrix,
    /// `[n_experts * hidden][ffn]`.
    pub(crate) down: WeightMatrix,
    pub(crate) shared: Option<SharedExpertWeights>,
}

/// The expert of every row.
#[derive(Debug, Clone)]
pub(crate) struct SharedExpertWeights {
    /// f32 `[hidden]`.
    pub(crate) factor: u64,
    pub(crate) gate: WeightMatrix,
    pub(crate) up: WeightMatrix,
    pub(crate) down: WeightMatrix,
}

/// Half of every expert's rows in a fused stack.
#[derive(Debug, Clone, Copy)]
pub(super) struct StackHalf {
    n_experts: usize,
    /// The second half.
    upper: bool,
}

impl StackHalf {
    /// Rows of all experts.
    pub(super) fn rows(self, stack: &WeightRef) -> usize {
        stack.rows / 2
    }

    /// The bytes of rows `rows` of this half, from those of the whole stack.
    pub(super) fn gather(self, rows: Range<usize>, row_bytes: usize, stack: &[u8]) -> Vec<u8> {
        let of_expert = stack.len() / row_bytes / self.n_experts / 2;
        let mut gathered = Vec::with_capacity(rows.len() * row_bytes);
        let mut row = rows.start;
        while row < rows.end {
            let expert = row / of_expert;
            let end = rows.end.min((expert + 1) * of_expert);
            let before = (expert + usize::from(self.upper)) * of_expert;
            let [from, to] = [row, end].map(|row| (row + before) * row_bytes);
            gathered.extend_from_slice(&stack[from..to]);
            row = end;
        }
        gathered
    }
}

impl LayoutBuilder<'_> {
    pub(super) fn feed_forward(
        &mut self,
        norm: &WeightRef,
        ffn: &FeedForward,
    ) -> FeedForwardWeights {
        match ffn {
            FeedForward::Dense(dense) => FeedForwardWeights::Dense(self.ffn(norm, dense)),
            FeedForward::Experts(experts) => {
                FeedForwardWeights::Experts(self.experts(norm, experts))
            }
        }
    }

    fn experts(&mut self, norm: &WeightRef, spec: &MoeSpec) -> ExpertWeights {
        let norm = self.vector(norm);
        let router = WeightMatrix {
            kind: WeightKind::F32,
            rows: spec.router.rows,
            cols: spec.router.cols,
            at: self.vector(&spec.router),
        };
        let (gate, up) = match &spec.gate_up {
            ExpertGateUp::Separate { gate, up } => (
                self.packed(&gate.weight, None),
                self.packed(&up.weight, None),
            ),
            ExpertGateUp::Fused(stack) => (self.half(stack, false), self.half(stack, true)),
        };
        let shared = spec.shared.as_ref().map(|shared| SharedExpertWeights {
            factor: self.vector(&shared.gate),
            gate: self.packed(&shared.ffn.gate, None),
            up: self.packed(&shared.ffn.up, None),
            down: self.packed(&shared.ffn.down, None),
        });
        ExpertWeights {
            norm,
            n_experts: spec.n_experts,
            n_used: spec.n_used,
            scale: spec.weights_scale,
            router,
            gate,
            up,
            down: self.packed(&spec.down.weight, None),
            shared,
        }
    }

    fn half(&mut self, stack: &ExpertStack, upper: bool) -> WeightMatrix {
        let half = StackHalf {
            n_experts: stack.n_experts,
            upper,
        };
        self.packed(&stack.weight, Some(half))
    }

    /// A matrix of a packed kind; F32 values become f16, which the kernels of experts read.
    fn packed(&mut self, weight: &WeightRef, half: Option<StackHalf>) -> WeightMatrix {
        let (kind, form) = match WeightKind::of(weight.ty) {
            WeightKind::F32 => (WeightKind::F16, Encoding::Halves),
            kind => (kind, Encoding::Packed(kind)),
        };
        WeightMatrix {
            kind,
            rows: half.map_or(weight.rows, |half| half.rows(weight)),
            cols: weight.cols,
            at: self.part(weight, half, form),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_a_fused_stack_are_gathered_expert_by_expert() {
        // Two experts, rows of two bytes: 0 to 2 of gate and 3 to 5 of up, then 6 to 8 and 9 to 11.
        let stack: Vec<u8> = (0..12).flat_map(|row| [row, 100 + row]).collect();
        let half = |upper, rows| {
            let half = StackHalf {
                n_experts: 2,
                upper,
            };
            let bytes = half.gather(rows, 2, &stack);
            bytes.chunks(2).map(|row| row[0]).collect::<Vec<u8>>()
        };
        assert_eq!(half(false, 0..6), [0, 1, 2, 6, 7, 8]);
        assert_eq!(half(true, 0..6), [3, 4, 5, 9, 10, 11]);
        assert_eq!(half(true, 2..5), [5, 9, 10]);
    }
}
