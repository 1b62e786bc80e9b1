//! Weights of feed-forwards: dense, or mixtures of experts.
//!
//! The stack of all experts is packed as one matrix. The check of the configuration passed only
//! experts whose rows are whole row blocks, so each has row blocks of its own. A tensor with the
//! gate and up projections of every expert is loaded as two stacks.

use std::ops::Range;

use contract::{ExpertGateUp, ExpertStack, FeedForward, ModelSpec, MoeSpec, WeightRef};

use crate::launch::moe::ExpertTable;
use crate::memory::BumpAllocator;
use crate::pack::WeightKind;

use super::{Apart, Encoding, FfnWeights, LayoutBuilder, WeightEntry, WeightMatrix};

/// The feed-forward of a layer and the norm before it.
#[derive(Debug, Clone)]
pub(crate) enum FeedForwardWeights {
    Dense(FfnWeights),
    Experts(Box<ExpertWeights>),
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
    /// `[n_experts * ffn][hidden]`; if the experts are placed, `at` is an offset in each.
    pub(crate) gate: WeightMatrix,
    pub(crate) up: WeightMatrix,
    /// `[n_experts * hidden][ffn]`.
    pub(crate) down: WeightMatrix,
    pub(crate) shared: Option<SharedExpertWeights>,
    /// Where the experts lie, if each has a place of its own.
    pub(crate) placed: Option<PlacedExperts>,
}

/// The experts of a layer in host memory and in slots on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlacedExperts {
    pub(crate) table: ExpertTable,
    /// The first slot.
    pub(crate) slots: u64,
    /// The first expert in host memory.
    pub(crate) host: u64,
    /// From a slot to the next, and from an expert to the next: gate, up and down.
    pub(crate) expert_bytes: usize,
}

impl PlacedExperts {
    /// The address of a slot.
    pub(crate) fn slot(&self, slot: usize) -> u64 {
        self.slots + (slot * self.expert_bytes) as u64
    }

    /// The address of an expert in host memory.
    pub(crate) fn in_host(&self, expert: usize) -> u64 {
        self.host + (expert * self.expert_bytes) as u64
    }
}

/// The layers whose experts are placed.
#[derive(Debug, Clone)]
pub(crate) struct PlacedLayers {
    pub(crate) n_experts: usize,
    /// Experts of a row.
    pub(crate) n_used: usize,
    /// Slots of each layer.
    pub(crate) n_slots: usize,
    /// Tables of all layers, u64 `[layer][n_experts]`.
    pub(crate) tables: u64,
    /// Counts of uses of all layers, u32 `[layer][n_experts]`.
    pub(crate) uses: u64,
    pub(crate) layers: Vec<PlacedExperts>,
}

impl PlacedLayers {
    /// Tables and counts; `None` for a model whose layers have no experts, or other numbers of
    /// them.
    pub(super) fn new(
        spec: &ModelSpec,
        slots: usize,
        plan: &mut LayoutBuilder<'_>,
    ) -> Option<PlacedLayers> {
        let layers = spec.layers.iter().filter_map(|layer| layer.ffn.experts());
        let first = layers.clone().next()?;
        let (n_experts, n_layers) = (first.n_experts, layers.clone().count());
        if layers.clone().any(|moe| moe.n_experts != n_experts) {
            return None;
        }
        Some(PlacedLayers {
            n_experts,
            n_used: layers.map(|moe| moe.n_used).max().unwrap_or(0),
            n_slots: slots.clamp(1, n_experts),
            tables: plan.arena.take(8 * n_layers * n_experts),
            uses: plan.arena.take(4 * n_layers * n_experts),
            layers: Vec::with_capacity(n_layers),
        })
    }

    /// Bytes of one expert of every layer.
    pub(crate) fn expert_bytes(&self) -> u64 {
        let bytes = self.layers.iter().map(|layer| layer.expert_bytes as u64);
        bytes.sum()
    }
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
                FeedForwardWeights::Experts(Box::new(self.experts(norm, experts)))
            }
        }
    }

    fn experts(&mut self, norm: &WeightRef, spec: &MoeSpec) -> ExpertWeights {
        let matrices = halves(spec).map(|(weight, half)| self.packed(weight, half));
        self.around_experts(norm, spec, (matrices, None))
    }

    /// Experts in host memory, which `table` lays out, and their slots on the device.
    pub(super) fn placed_experts(
        &mut self,
        norm: &WeightRef,
        spec: &MoeSpec,
        (placed, table): (&mut PlacedLayers, &mut LayoutBuilder<'_>),
    ) -> ExpertWeights {
        let mut expert = BumpAllocator::new(0);
        let matrices = halves(spec).map(|(weight, half)| {
            let (kind, form) = packed_form(weight);
            let rows = half.map_or(weight.rows, |half| half.rows(weight));
            let at = expert.take(form.bytes(weight, rows / spec.n_experts));
            WeightMatrix {
                kind,
                rows,
                cols: weight.cols,
                at,
            }
        });
        let expert_bytes = expert.used() as usize;
        let host = table.arena.take(spec.n_experts * expert_bytes);
        for ((weight, half), matrix) in halves(spec).into_iter().zip(&matrices) {
            table.items.push(WeightEntry {
                of: table.of,
                weight: weight.clone(),
                half,
                apart: Some(Apart {
                    rows: matrix.rows / spec.n_experts,
                    stride: expert_bytes,
                }),
                at: host + matrix.at,
                form: packed_form(weight).1,
            });
        }
        let before = (placed.layers.len() * spec.n_experts) as u64;
        let layer = PlacedExperts {
            table: ExpertTable {
                addresses: placed.tables + 8 * before,
                uses: placed.uses + 4 * before,
            },
            slots: self.arena.take(placed.n_slots * expert_bytes),
            host,
            expert_bytes,
        };
        placed.layers.push(layer);
        self.around_experts(norm, spec, (matrices, Some(layer)))
    }

    /// All but the experts themselves.
    fn around_experts(
        &mut self,
        norm: &WeightRef,
        spec: &MoeSpec,
        ([gate, up, down], placed): ([WeightMatrix; 3], Option<PlacedExperts>),
    ) -> ExpertWeights {
        ExpertWeights {
            norm: self.vector(norm),
            n_experts: spec.n_experts,
            n_used: spec.n_used,
            scale: spec.weights_scale,
            router: WeightMatrix {
                kind: WeightKind::F32,
                rows: spec.router.rows,
                cols: spec.router.cols,
                at: self.vector(&spec.router),
            },
            gate,
            up,
            down,
            shared: spec.shared.as_ref().map(|shared| SharedExpertWeights {
                factor: self.vector(&shared.gate),
                gate: self.packed(&shared.ffn.gate, None),
                up: self.packed(&shared.ffn.up, None),
                down: self.packed(&shared.ffn.down, None),
            }),
            placed,
        }
    }

    /// A matrix of a packed kind.
    fn packed(&mut self, weight: &WeightRef, half: Option<StackHalf>) -> WeightMatrix {
        let (kind, form) = packed_form(weight);
        WeightMatrix {
            kind,
            rows: half.map_or(weight.rows, |half| half.rows(weight)),
            cols: weight.cols,
            at: self.part(weight, half, form),
        }
    }
}

/// The stacks of gate, up and down.
fn halves(spec: &MoeSpec) -> [(&WeightRef, Option<StackHalf>); 3] {
    let half = |stack: &ExpertStack, upper| StackHalf {
        n_experts: stack.n_experts,
        upper,
    };
    let down = (&spec.down.weight, None);
    match &spec.gate_up {
        ExpertGateUp::Separate { gate, up } => [(&gate.weight, None), (&up.weight, None), down],
        ExpertGateUp::Fused(stack) => [
            (&stack.weight, Some(half(stack, false))),
            (&stack.weight, Some(half(stack, true))),
            down,
        ],
    }
}

/// The kind that the kernels of experts read; F32 values become f16.
fn packed_form(weight: &WeightRef) -> (WeightKind, Encoding) {
    match WeightKind::of(weight.ty) {
        WeightKind::F32 => (WeightKind::F16, Encoding::Halves),
        kind => (kind, Encoding::Packed(kind)),
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
