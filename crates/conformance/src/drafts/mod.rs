//! Random drafts for the tiny models of [`crate::golden`], and what the publisher's module in
//! PyTorch says with them.
//!
//! A draft is drawn from its name, so none is stored: [`DraftFileFormat`] writes it in any of the
//! four forms that drafts come in, each with the quirks of its converters, and the reference
//! implementation's logits are under `fixtures/drafts`. `harness/golden/draft_goldens.py` makes
//! them, with the same table of cases.

mod file_format;
mod pending_features;

use std::path::{Path, PathBuf};

use contract::{
    Backend, BlockMask, DeviceError, DraftItem, DraftLoad, DraftPlan, DraftSpec, KvFormat,
    KvFormats, Limits, ModelSpec, OpenPlan, Runner, TokenId,
};
use model::{DraftOptions, LoadedDraft};

pub use file_format::{DraftFileFormat, DraftFileQuirks};

use crate::compare::{Agreement, Tolerance, compare};
use crate::fake::FakeSpec;
use crate::golden::{Array, Golden, GoldenError, npy};

/// What a layer of a random draft sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerMask {
    /// All of the context.
    Full,
    /// The window.
    Sliding,
}

use LayerMask::{Full, Sliding};

/// How a target's weights are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightPrecision {
    /// As its file has them.
    AsStored,
    /// As the f32 numbers that they stand for, so that nothing beside them is rounded.
    Floats,
}

/// One random draft.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomDraft {
    /// What its values are drawn from, and the stem of its fixture.
    pub name: &'static str,
    /// The stem of the tiny model that it drafts for.
    pub target: &'static str,
    /// Tokens of that model's text before the root.
    pub at: usize,
    /// One per layer.
    pub layer_masks: &'static [LayerMask],
    /// Tokens that sliding-window layers attend to; `None` where none slides.
    pub window: Option<usize>,
    /// Whether rows of a block see later ones, where the file says it: `Some(true)` is that they do
    /// not.
    pub causal: Option<bool>,
    /// Rows of a block.
    pub block: usize,
    /// The token of its rows but the first.
    pub mask: u32,
    /// Layers of the target, counted from 0.
    pub capture_layers: &'static [usize],
    /// Base of the rotary frequencies.
    pub theta: f32,
    /// Query heads, key heads and their length.
    pub heads: (usize, usize, usize),
    /// Width of the feed-forward.
    pub ffn: usize,
    /// Inside the root of every norm.
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

/// All of them; the same table stands in `draft_goldens.py`, and where the two differ, so do
/// logits.
pub const DRAFTS: [RandomDraft; 7] = [
    RandomDraft {
        name: "full",
        target: "hybrid_r1_bf16",
        at: 61,
        layer_masks: &[Full, Full],
        ..BASE
    },
    // As the published drafts that slide.
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
    // The target's head is a matrix of its own.
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
    /// The model that it drafts for.
    ///
    /// # Errors
    /// A fixture that cannot be read.
    pub fn target(&self) -> Result<Golden, GoldenError> {
        Golden::open(self.target)
    }

    /// A plan to open that model with, for one sequence, its weights as stored or as f32.
    ///
    /// # Errors
    /// A fixture that cannot be read.
    pub fn plan(&self, kv: KvFormat, weights: WeightPrecision) -> Result<OpenPlan, GoldenError> {
        let limits = Limits {
            sequences: 1,
            context: 256,
            tree_nodes: 1,
            prefill_chunk: 256,
            ..FakeSpec::default().limits
        };
        let kv = KvFormats { k: kv, v: kv };
        match weights {
            WeightPrecision::AsStored => self.target()?.plan(kv, limits),
            WeightPrecision::Floats => self.target()?.plan_of_floats(kv, limits),
        }
    }

    /// The file formats that can say what it is, beside a target whose base of frequencies is
    /// `theta`.
    pub fn file_formats(&self, theta: f64) -> Vec<DraftFileFormat> {
        let by_rule = |sight: &LayerMask| self.causal == Some(*sight == Sliding);
        let ruled = self.causal.is_none() || self.layer_masks.iter().all(by_rule);
        let can = |file_format: &DraftFileFormat| match file_format {
            // It has no words for windows, which a flag gives it, and its base is not believed.
            DraftFileFormat::A => ruled && self.slides_as_usual() && f64::from(self.theta) == theta,
            DraftFileFormat::B => ruled,
            DraftFileFormat::C | DraftFileFormat::Safetensors => true,
        };
        DraftFileFormat::ALL.into_iter().filter(can).collect()
    }

    /// Whether no layer slides, or all but the last.
    fn slides_as_usual(&self) -> bool {
        let last = self.layer_masks.len() - 1;
        let mut layer_masks = self.layer_masks.iter().enumerate();
        self.window.is_none() || layer_masks.all(|(i, sight)| (*sight == Sliding) == (i < last))
    }

    /// Writes it in a file_format and reads that.
    ///
    /// # Errors
    /// What the loader refuses.
    pub fn load(
        &self,
        (file_format, quirks): (DraftFileFormat, DraftFileQuirks),
        target: &ModelSpec,
    ) -> Result<LoadedDraft, GoldenError> {
        let window = match file_format {
            DraftFileFormat::A => self.window,
            _ => None,
        };
        file_format::load(self, (file_format, quirks), target, DraftOptions { window })
    }

    /// The reference implementation's logits, `[block - 1, vocab]`.
    ///
    /// # Errors
    /// A fixture that cannot be read.
    pub fn expected(&self) -> Result<Array, GoldenError> {
        let file = format!("drafts/{}.npy", self.name);
        let bytes = std::fs::read(fixtures().join(&file));
        let bytes = bytes.map_err(|source| GoldenError::Io {
            file: file.clone(),
            source,
        })?;
        npy(&bytes).map_err(|detail| GoldenError::Malformed { file, detail })
    }

    /// What a device says with it, `[block - 1, vocab]` f32 logits.
    ///
    /// # Errors
    /// What the loader or the device refuses.
    pub fn logits(
        &self,
        backend: &dyn Backend,
        (plan, ids): (OpenPlan, &[TokenId]),
        draft: (LoadedDraft, KvFormat),
    ) -> Result<Vec<f32>, GoldenError> {
        let vocab = plan.target.vocab;
        let mut runner = open_with(backend, plan, draft)?;
        let seq = runner.open(self.at + 1)?;
        runner.prefill(seq, &ids[..self.at], &[])?;
        let root = ids[self.at];
        let depth = self.block - 1;
        let mut found = runner.draft(&[DraftItem { seq, root }], depth, vocab)?;
        // What a device leaves out stays no number, and differs from any.
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

    /// Compares logits with the reference implementation's.
    ///
    /// # Errors
    /// [`GoldenError::Differs`] where one is further away than it may be.
    pub fn check(&self, found: &[f32], tolerance: Tolerance) -> Result<Agreement, GoldenError> {
        let expected = self.expected()?.values;
        compare(found, &expected, tolerance).map_err(|difference| GoldenError::Differs {
            stem: self.name.to_owned(),
            what: "draft logits".to_owned(),
            difference,
        })
    }

    /// Whether a loaded draft is the one of the table.
    pub fn is(&self, spec: &DraftSpec) -> bool {
        let sees = spec
            .layers
            .iter()
            .zip(self.layer_masks)
            .all(|(layer, sight)| {
                let window = match sight {
                    Full => DraftSpec::FULL_WINDOW,
                    Sliding => self.window.unwrap_or(DraftSpec::FULL_WINDOW),
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

/// The model of a plan with a draft beside it that is made ready at once.
fn open_with(
    backend: &dyn Backend,
    mut plan: OpenPlan,
    (draft, kv): (LoadedDraft, KvFormat),
) -> Result<Box<dyn Runner>, DeviceError> {
    plan.draft = Some(DraftPlan {
        spec: draft.spec,
        weights: draft.weights,
        kv,
        load: DraftLoad::AtOpen,
    });
    backend.open(plan, &mut |_| {})
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_match_the_python_reference() {
        // As `draft_goldens.values("full", "fc.weight", …)` and `("full", "norm.weight", …)` say.
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
