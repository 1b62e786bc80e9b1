//! Synthetic models in memory, with weights that are generated on first use.
//!
//! Matrices of one type and width share one long run of random blocks, each with another start. A
//! model of 16 GB therefore takes about 2 GB of host memory and seconds to make. A device that
//! copies weights, such as a GPU, holds as many distinct bytes as from a file.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use contract::{QuantType, WeightError, WeightRef, WeightSource};
use gguf::FileBytes;

use super::random_blocks::{BlockPool, WeightRng};
use super::shape::Fill;
use super::{SynthSpec, draw};
use crate::ModelError;
use crate::load::{LoadedModel, load_bytes};

/// Extra bytes of a shared run beyond its largest matrix, so that matrices have different starts.
const SLACK_BYTES: usize = 4 << 20;

/// Random weights by name, generated on first use.
pub(super) struct SynthWeights {
    seed: u64,
    /// Vectors and convolution taps, which have their own distributions.
    small: HashMap<Arc<str>, Vec<u8>>,
    /// Runs by type and width.
    runs: HashMap<(QuantType, usize), Run>,
}

/// Bytes of the largest matrix of a run, and the run.
type Run = (usize, OnceLock<Vec<u8>>);

impl SynthWeights {
    pub(super) fn new<'a>(
        seed: u64,
        weights: impl Iterator<Item = (&'a WeightRef, Fill)>,
    ) -> SynthWeights {
        let mut drawn = SynthWeights {
            seed,
            small: HashMap::new(),
            runs: HashMap::new(),
        };
        let mut random = WeightRng::new(seed);
        for (weight, fill) in weights {
            if fill == Fill::Matrix {
                let run = drawn.runs.entry((weight.ty, weight.cols)).or_default();
                run.0 = run.0.max(weight.bytes());
            } else {
                let mut bytes = vec![0; weight.bytes()];
                draw(fill, weight.ty, &mut bytes, &mut random);
                drawn.small.insert(Arc::clone(&weight.name), bytes);
            }
        }
        drawn
    }

    /// The shared run of a type and width, generated on first use.
    fn run(&self, ty: QuantType, cols: usize) -> Option<(&[u8], usize)> {
        let (largest, run) = self.runs.get(&(ty, cols))?;
        let block = ty.block_bytes();
        let slack = SLACK_BYTES.div_ceil(block) * block;
        let run = run.get_or_init(|| {
            let mut random = WeightRng::new(self.seed ^ cols as u64);
            let mut bytes = vec![0; largest + slack];
            BlockPool::new(ty, cols as u64, &mut random).fill(&mut bytes, &mut random);
            bytes
        });
        Some((run, slack / block))
    }
}

impl WeightSource for SynthWeights {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        let missing = || WeightError::Missing {
            name: Arc::clone(&weight.name),
        };
        if let Some(bytes) = self.small.get(&weight.name) {
            return bytes.get(..weight.bytes()).ok_or_else(missing);
        }
        let (run, starts) = self.run(weight.ty, weight.cols).ok_or_else(missing)?;
        let hash = weight.name.bytes().fold(self.seed, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        });
        let start = usize::try_from(hash >> 20).unwrap_or(0) % starts * weight.ty.block_bytes();
        run.get(start..start + weight.bytes()).ok_or_else(missing)
    }
}

impl SynthSpec {
    /// The model as if it had been written and loaded, but without a file.
    ///
    /// # Errors
    /// Those of loading the file that [`write`](SynthSpec::write) would write.
    pub fn load(&self) -> Result<LoadedModel, ModelError> {
        let (writer, tensors) = self.plan()?;
        let data = writer.data_bytes();
        let mut head = Vec::new();
        // The body is not written: the map has zeros there, and only the hash reads them.
        drop(writer.start(&mut head)?);
        let whole = head.len() as u64 + data;
        let bytes = FileBytes::zeros_after(&head, usize::try_from(whole).unwrap_or(usize::MAX))?;
        let name = self.shape.title();
        let mut loaded = load_bytes(&name, bytes)?;
        let fills: HashMap<&str, Fill> = tensors
            .iter()
            .map(|(tensor, _)| (tensor.name.as_str(), tensor.fill))
            .collect();
        let weights = loaded.spec.weights().into_iter().map(|weight| {
            let fill = fills.get(&*weight.name).copied();
            (weight, fill.unwrap_or(Fill::Matrix))
        });
        loaded.weights = Arc::new(SynthWeights::new(self.seed, weights));
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::draft_for;

    #[test]
    fn in_memory_model_equals_the_written_file() {
        let synth = SynthSpec::parse("tiny-hybrid+mtp:q4_k_m").unwrap();
        let file = load_bytes("tiny", FileBytes::shared(synth.bytes().unwrap().into())).unwrap();
        let made = synth.load().unwrap();
        assert_eq!(made.spec.layers, file.spec.layers);
        assert_eq!(made.spec.mtp, file.spec.mtp);
        for weight in made.spec.weights() {
            let bytes = made.weights.bytes(weight).unwrap();
            assert_eq!(bytes.len(), weight.bytes());
            let mut values = vec![0.0; weight.values()];
            contract::quant::dequantize_row(weight.ty, bytes, &mut values);
            assert!(values.iter().all(|v| v.is_finite()), "{}", weight.name);
            assert!(values.iter().any(|v| *v != 0.0), "{}", weight.name);
        }
        let [a, b] = [0, 1].map(|i| {
            let dense = made.spec.layers[i].ffn.dense().unwrap();
            made.weights.bytes(&dense.gate).unwrap()
        });
        assert_ne!(a, b, "two matrices of one shape differ");
    }

    #[test]
    fn published_mix_matches_published_files() {
        let synth = SynthSpec::parse("qwen3.5-27b:q4_k_m-published").unwrap();
        let made = synth.load().unwrap();
        let all: usize = made.spec.weights().iter().map(|w| w.bytes()).sum();
        let step = all - made.spec.embedding.bytes();
        assert!((15_800_000_000..16_200_000_000).contains(&step), "{step}");
        let draft = draft_for(&made, QuantType::Q8_0, 1);
        assert_eq!(draft.spec.capture_layers, [1, 16, 31, 46, 61]);
        let bytes: usize = draft.spec.weights().iter().map(|w| w.bytes()).sum();
        assert!((1_800_000_000..1_900_000_000).contains(&bytes), "{bytes}");
    }
}
