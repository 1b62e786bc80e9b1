//! Weights that stay in page-locked host memory.

use std::sync::mpsc;
use std::thread;

use contract::{DeviceError, LoadProgress};

use super::{LoadChunk, Sources, WeightSet, Weights, staging};

/// How the experts of a stack lie in host memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Apart {
    /// Rows of an expert.
    pub(super) rows: usize,
    /// Bytes from an expert to the next.
    pub(super) stride: usize,
}

impl Weights {
    /// Fills the host table, whose address is `base`. Reports progress if experts are among it.
    pub(crate) fn load_table(
        &self,
        sources: Sources<'_>,
        (base, table): (u64, &mut [u8]),
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<(), DeviceError> {
        let items = self.of(&[WeightSet::HostTable]);
        let mut chunks: Vec<LoadChunk<'_>> = items.flat_map(|item| item.chunks()).collect();
        let threads = staging(&chunks).0.max(1);
        let each = chunks.len().div_ceil(threads).max(1);
        let mut state = LoadProgress {
            done_bytes: 0,
            total_bytes: chunks.iter().map(LoadChunk::source_bytes).sum(),
        };
        chunks.sort_by_key(|chunk| chunk.at);
        let (mut rest, mut at) = (table, base);
        let mut parts: Vec<(LoadChunk<'_>, &mut [u8])> = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let gap = usize::try_from(chunk.at - at).unwrap_or(usize::MAX);
            let (own, others) = std::mem::take(&mut rest)[gap..].split_at_mut(chunk.bytes);
            rest = others;
            at = chunk.at + chunk.bytes as u64;
            parts.push((chunk, own));
        }
        let (done, filled) = mpsc::channel();
        let outcomes = thread::scope(|scope| {
            let shares = parts.chunks_mut(each).map(|share| {
                let done = done.clone();
                scope.spawn(move || {
                    share.iter_mut().try_for_each(|(chunk, out)| {
                        chunk.fill(sources, out)?;
                        // The receiver waits for every sender.
                        let _ = done.send(chunk.source_bytes());
                        Ok(())
                    })
                })
            });
            let workers: Vec<_> = shares.collect();
            drop(done);
            for bytes in filled {
                state.done_bytes += bytes;
                if self.experts.is_some() {
                    progress(state);
                }
            }
            let joined = workers.into_iter().map(|worker| worker.join());
            joined.collect::<Vec<Result<Result<(), contract::WeightError>, _>>>()
        });
        for outcome in outcomes {
            // The panic has already been reported.
            outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
    use contract::{ExpertGateUp, FeedForward, QuantType};

    use super::*;
    use crate::memory::BumpAllocator;
    use crate::pack;
    use crate::weights::{FeedForwardWeights, WeightPart};

    #[test]
    fn placed_experts_have_the_bytes_of_their_rows() {
        const BASE: u64 = 1 << 20;
        let made = SyntheticModel::new(SyntheticLayout::HybridExperts, QuantType::Q8_0, 3);
        let [mut arena, mut table, mut draft] = [(); 3].map(|()| BumpAllocator::new(BASE));
        let target = (WeightPart::whole(&made.spec, Some(2)), &mut arena);
        let weights = Weights::new(target, &mut table, (None, &mut draft));
        let mut memory = vec![0; table.used() as usize];
        let sources = Sources {
            target: &*made.weights,
            draft: None,
        };
        let mut last = None;
        let mut progress = |at: LoadProgress| last = Some(at);
        let result = weights.load_table(sources, (BASE, &mut memory), &mut progress);
        result.unwrap();
        assert!(last.is_some_and(|at| at.done_bytes == at.total_bytes));
        let placed = weights.experts.as_ref().unwrap();
        let mut layers = placed.layers.iter();
        for (spec, layer) in made.spec.layers.iter().zip(&weights.layers) {
            let (FeedForward::Experts(moe), FeedForwardWeights::Experts(w)) =
                (&spec.ffn, &layer.ffn)
            else {
                continue;
            };
            let layer = layers.next().unwrap();
            assert_eq!(w.placed.as_ref(), Some(layer));
            let mut pairs = vec![(&moe.down, w.down)];
            if let ExpertGateUp::Separate { gate, up } = &moe.gate_up {
                pairs.extend([(gate, w.gate), (up, w.up)]);
            }
            for (stack, matrix) in pairs {
                let stored = made.weights.bytes(&stack.weight).unwrap();
                let (bytes, cols) = (stack.expert_bytes(), stack.cols());
                for (expert, stored) in stored.chunks(bytes).enumerate() {
                    let mut packed = vec![0; matrix.kind.bytes(stack.rows(), cols)];
                    pack::pack(stack.weight.ty, cols, stored, &mut packed);
                    let at = layer.in_host(expert) + matrix.at - BASE;
                    let found = &memory[at as usize..][..packed.len()];
                    assert!(found == packed, "{}, expert {expert}", stack.weight.name);
                }
            }
        }
        assert!(layers.next().is_none());
    }
}
