//! Random-weight drafts for the tiny models of [`crate::golden`], and the logits of the publisher's
//! PyTorch module.
//!
//! A draft's weights are generated from its name, so none is stored. [`DraftFileFormat`] writes it
//! in any of four file formats with the quirks of their converters. The reference logits are under
//! `fixtures/drafts`; `harness/golden/draft_goldens.py` makes them from the same table of cases.

mod file_format;
mod pending_features;

use std::path::{Path, PathBuf};

use contract::{
    Backend, BlockMask, DeviceError, DraftItem, DraftLoad, DraftLoadConfig, DraftSpec, KvFormat,
    KvFormats, Limits, LoadConfig, ModelSpec, Runner, TokenId,
};
use model::{DraftOptions, LoadedDraft};

pub use file_format::{DraftFileFormat, DraftFileQuirks};

use crate::compare::{Agreement, Tolerance, compare};
use crate::fake::FakeSpec;
use crate::golden::{Array, Golden, GoldenError, npy};

/// The attention mask of a draft layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerMask {
    /// The whole context.
    Full,
    /// A sliding window.
    Sliding,
}

use LayerMask::{Full, Sliding};

/// Precision of the target's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightPrecision {
    /// As in the file.
    AsStored,
    /// Dequantised to f32, so that no activations are rounded.
    Floats,
}

/// One random-weight draft.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomDraft {
    /// Seed of its values, and the stem of its fixture.
    pub name: &'static str,
    /// The stem of its target, a tiny model.
    pub target: &'static str,
    /// Tokens of the target's text before the root.
    pub at: usize,
    /// One per layer.
    pub layer_masks: &'static [LayerMask],
    /// Window of the sliding layers; `None` if there are none.
    pub window: Option<usize>,
    /// The file's causal flag, if it has one: `Some(true)` hides later rows of the block.
    pub causal: Option<bool>,
    /// Rows of a block.
    pub block: usize,
    /// The mask token.
    pub mask: u32,
    /// Captured target layers, counted from 0.
    pub capture_layers: &'static [usize],
    /// The rope base.
    pub theta: f32,
    /// Query heads, key heads and head dimension.
    pub heads: (usize, usize, usize),
    /// Width of the feed-forward.
    pub ffn: usize,
    /// Epsilon of the norms.
    pub eps: f32,
}

const BASE: RandomDraft = RandomDraft {
    name: "",
    target: "",
    at: 0,
    layer_masks: &[],
    window: None,
    causal: None,
    block: 16,
    mask: 511,
    capture_layers: &[0, 1],
    theta: 1e7,
    heads: (4, 2, 128),
    ffn: 320,
    eps: 1e-6,
};

/// All drafts. `draft_goldens.py` has the same table; if the two differ, so do the logits.
pub const DRAFTS: [RandomDraft; 7] = [
    RandomDraft {
        name: "full",
        target: "hybrid_r1_bf16",
        at: 61,
        layer_masks: &[Full, Full],
        ..BASE
    },
    // Like the published drafts with sliding windows.
    RandomDraft {
        name: "sliding",
        target: "hybrid_mtp_q4_k_m",
        at: 90,
        layer_masks: &[Sliding, Sliding, Sliding, Full],
        window: Some(24),
        capture_layers: &[0, 2, 3],
        ffn: 256,
        ..BASE
    },
    RandomDraft {
        name: "sliding_seen_whole",
        target: "dense_f16",
        at: 70,
        layer_masks: &[Sliding, Full],
        window: Some(40),
        causal: Some(false),
        block: 8,
        mask: 7,
        theta: 1e6,
        ..BASE
    },
    RandomDraft {
        name: "causal",
        target: "hybrid_r1_bf16",
        at: 33,
        layer_masks: &[Full, Full, Full],
        causal: Some(true),
        block: 4,
        capture_layers: &[1],
        heads: (2, 2, 128),
        ..BASE
    },
    // The target's head is a separate matrix.
    RandomDraft {
        name: "one_layer",
        target: "hybrid_r3_q4_k_m",
        at: 47,
        layer_masks: &[Full],
        block: 12,
        capture_layers: &[1],
        heads: (6, 3, 64),
        eps: 1e-5,
        ..BASE
    },
    RandomDraft {
        name: "irregular",
        target: "dense_f16",
        at: 100,
        layer_masks: &[Full, Sliding, Full, Sliding, Sliding],
        window: Some(20),
        block: 20,
        theta: 5e5,
        heads: (4, 1, 128),
        ffn: 192,
        ..BASE
    },
    RandomDraft {
        name: "short",
        target: "hybrid_r3_q4_k_m",
        at: 1,
        layer_masks: &[Sliding, Full],
        window: Some(64),
        capture_layers: &[0, 1, 2],
        ..BASE
    },
];

impl RandomDraft {
    /// The target model.
    ///
    /// # Errors
    /// An unreadable fixture.
    pub fn target(&self) -> Result<Golden, GoldenError> {
        Golden::open(self.target)
    }

    /// The configuration of the target for one sequence, with weights as stored or as f32.
    ///
    /// # Errors
    /// An unreadable fixture.
    pub fn load_config(
        &self,
        kv: KvFormat,
        weights: WeightPrecision,
    ) -> Result<LoadConfig, GoldenError> {
        let limits = Limits {
            sequences: 1,
            context: 256,
            tree_nodes: 1,
            prefill_chunk: 256,
            ..FakeSpec::default().limits
        };
        let kv = KvFormats { k: kv, v: kv };
        match weights {
            WeightPrecision::AsStored => self.target()?.load_config(kv, limits),
            WeightPrecision::Floats => self.target()?.load_config_of_floats(kv, limits),
        }
    }

    /// The file formats that can represent the draft, for a target with rope base `theta`.
    pub fn file_formats(&self, theta: f64) -> Vec<DraftFileFormat> {
        let by_rule = |sight: &LayerMask| self.causal == Some(*sight == Sliding);
        let ruled = self.causal.is_none() || self.layer_masks.iter().all(by_rule);
        let can = |file_format: &DraftFileFormat| match file_format {
            // Format A has no windows, which an option can set, and its rope base is ignored.
            DraftFileFormat::A => ruled && self.slides_as_usual() && f64::from(self.theta) == theta,
            DraftFileFormat::B => ruled,
            DraftFileFormat::C | DraftFileFormat::Safetensors => true,
        };
        DraftFileFormat::ALL.into_iter().filter(can).collect()
    }

    /// Whether no layer slides, or all but the last do.
    fn slides_as_usual(&self) -> bool {
        let last = self.layer_masks.len() - 1;
        let mut layer_masks = self.layer_masks.iter().enumerate();
        self.window.is_none() || layer_masks.all(|(i, sight)| (*sight == Sliding) == (i < last))
    }

    /// Writes it in a file format and loads the file.
    ///
    /// # Errors
    /// Errors of the loader.
    pub fn load(
        &self,
        (file_format, quirks): (DraftFileFormat, DraftFileQuirks),
        target: &ModelSpec,
    ) -> Result<LoadedDraft, GoldenError> {
        let window = match file_format {
            DraftFileFormat::A => self.window,
            _ => None,
        };
        file_format::load(
            self,
            (file_format, quirks),
            target,
            DraftOptions {
                window,
                ..DraftOptions::default()
            },
        )
    }

    /// The reference logits, `[block - 1, vocab]`.
    ///
    /// # Errors
    /// An unreadable fixture.
    pub fn expected(&self) -> Result<Array, GoldenError> {
        let file = format!("drafts/{}.npy", self.name);
        let bytes = std::fs::read(fixtures().join(&file));
        let bytes = bytes.map_err(|source| GoldenError::Io {
            file: file.clone(),
            source,
        })?;
        npy(&bytes).map_err(|detail| GoldenError::Malformed { file, detail })
    }

    /// A device's logits, `[block - 1, vocab]` f32.
    ///
    /// # Errors
    /// Errors of the loader or the device.
    pub fn logits(
        &self,
        backend: &dyn Backend,
        (config, ids): (LoadConfig, &[TokenId]),
        draft: (LoadedDraft, KvFormat),
    ) -> Result<Vec<f32>, GoldenError> {
        let vocab = config.target.vocab;
        let mut runner = open_with(backend, config, draft)?;
        let seq = runner.open(self.at + 1)?;
        runner.prefill(seq, &ids[..self.at], &[])?;
        let root = ids[self.at];
        let depth = self.block - 1;
        let mut found = runner.draft(&[DraftItem { seq, root }], depth, vocab)?;
        // Missing candidates stay NaN, which differs from every value.
        let mut logits = vec![f32::NAN; depth * vocab];
        for found in found.drain(..) {
            let rows = found.ids.chunks(vocab).zip(found.log_probs.chunks(vocab));
            let rows = rows.zip(&found.lse).zip(logits.chunks_mut(vocab));
            for (((ids, log_probs), lse), logits) in rows {
                for (id, log_prob) in ids.iter().zip(log_probs) {
                    logits[id.index()] = log_prob + lse;
                }
            }
        }
        Ok(logits)
    }

    /// Compares logits with the reference.
    ///
    /// # Errors
    /// [`GoldenError::Differs`] if one exceeds the tolerance.
    pub fn check(&self, found: &[f32], tolerance: Tolerance) -> Result<Agreement, GoldenError> {
        let expected = self.expected()?.values;
        compare(found, &expected, tolerance).map_err(|difference| GoldenError::Differs {
            stem: self.name.to_owned(),
            what: "draft logits".to_owned(),
            difference,
        })
    }

    /// Whether a loaded draft equals this one.
    pub fn is(&self, spec: &DraftSpec) -> bool {
        let sees = spec
            .layers
            .iter()
            .zip(self.layer_masks)
            .all(|(layer, sight)| {
                let window = match sight {
                    Full => DraftSpec::DEFAULT_WINDOW,
                    Sliding => self.window.unwrap_or(DraftSpec::DEFAULT_WINDOW),
                };
                let causal = self.causal.unwrap_or(*sight == Sliding);
                let theta = layer.attention.rope.theta;
                layer.window == window
                    && (layer.block_mask == BlockMask::Causal) == causal
                    && theta == f64::from(self.theta)
            });
        sees && spec.layers.len() == self.layer_masks.len()
            && (spec.block, spec.mask_token.0, &*spec.capture_layers)
                == (self.block, self.mask, self.capture_layers)
    }
}

/// Opens a model with a draft that is loaded at once.
fn open_with(
    backend: &dyn Backend,
    mut config: LoadConfig,
    (draft, kv): (LoadedDraft, KvFormat),
) -> Result<Box<dyn Runner>, DeviceError> {
    config.draft = Some(DraftLoadConfig {
        spec: draft.spec,
        weights: draft.weights,
        kv,
        load: DraftLoad::AtOpen,
    });
    backend.open(config, &mut |_| {})
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_match_the_python_reference() {
        // Values of `draft_goldens.values("full", "fc.weight", …)` and `("full", "norm.weight",
        // …)`.
        const FC: [f32; 3] = [11.0 / 2048.0, 183.0 / 2048.0, 121.0 / 2048.0];
        const NORM: [f32; 3] = [87.0 / 128.0, 186.0 / 128.0, 181.0 / 128.0];
        let fc = file_format::values("full", "fc.weight", 3, file_format::TensorKind::Matrix);
        let norm = file_format::values("full", "norm.weight", 3, file_format::TensorKind::Norm);
        assert_eq!((fc, norm), (FC.to_vec(), NORM.to_vec()));
    }

    #[test]
    fn every_draft_has_golden_logits_and_two_file_formats() {
        for draft in DRAFTS {
            let target = draft.target().unwrap();
            assert!(draft.at < target.ids.len(), "{}", draft.name);
            let shape = draft.expected().unwrap().shape;
            assert_eq!(shape, [draft.block - 1, 512], "{}", draft.name);
            assert!(draft.file_formats(1e7).len() >= 2, "{}", draft.name);
        }
    }
}
