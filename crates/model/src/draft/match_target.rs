//! Checks a draft against its target and builds its spec.

use contract::{
    AttentionSpec, BlockMask, DraftLayer, DraftSpec, FeedForward, ModelSpec, OutputGate, RopeSpec,
    TokenId, Tree, WeightRef,
};

use super::tensors::{DraftTensors, LayerTensor, ModelTensor};
use super::{DraftFile, DraftFormat, DraftMetadata, DraftOptions};
use crate::ModelError;
use crate::family::{attention_scale, check_head_dim};
use crate::hash::combined;

pub(super) fn fit(
    draft: &DraftFile,
    target: &ModelSpec,
    options: DraftOptions,
) -> Result<DraftSpec, ModelError> {
    let (metadata, directory) = (&draft.metadata, &draft.directory);
    let mismatch = |detail: String| ModelError::DraftMismatch {
        draft: draft.file.clone(),
        target: target.name.clone(),
        detail,
    };
    let hidden = target.hidden;
    let fc = directory.outer(metadata.format, ModelTensor::Fc)?;
    if fc.rows != hidden {
        let own = fc.rows;
        return Err(mismatch(format!(
            "the draft is {own} wide, the target {hidden}"
        )));
    }
    if !fc.cols.is_multiple_of(hidden) {
        let detail = format!("{} columns, a multiple of {hidden} is expected", fc.cols);
        return Err(directory.refuse(&fc.name, detail));
    }
    if let Some(vocab) = metadata.vocab.filter(|vocab| *vocab != target.vocab) {
        let own = target.vocab;
        return Err(mismatch(format!(
            "the draft has a vocabulary of {vocab} tokens, the target {own}"
        )));
    }
    if let Some(layers) = metadata.target_layers.filter(|n| *n != target.layers.len()) {
        let own = target.layers.len();
        return Err(mismatch(format!(
            "the draft was made for a target of {layers} layers, this one has {own}"
        )));
    }
    if metadata.mask as usize >= target.vocab {
        let (mask, vocab) = (metadata.mask, target.vocab);
        return Err(mismatch(format!(
            "its mask is token {mask}, beyond the target's {vocab}"
        )));
    }
    if !(2..=Tree::MAX_NODES).contains(&metadata.block) {
        let (block, most) = (metadata.block, Tree::MAX_NODES);
        return Err(mismatch(format!(
            "its blocks have {block} rows, 2 to {most} are supported"
        )));
    }
    let capture_layers =
        capture_layers(metadata, fc.cols / hidden, target.layers.len()).map_err(&mismatch)?;
    let rope = RopeSpec {
        dims: 0,
        theta: theta(metadata, target),
    };
    let (sliding, window) = windows(metadata, options).map_err(&mismatch)?;
    let mut layers = Vec::with_capacity(metadata.layers);
    for (index, slides) in sliding.into_iter().enumerate() {
        let layer = LayerTensors {
            directory,
            metadata,
            index,
            hidden,
        };
        let causal = metadata.causal.unwrap_or(slides);
        layers.push(DraftLayer {
            window: if slides {
                window
            } else {
                DraftSpec::DEFAULT_WINDOW
            },
            block_mask: if causal {
                BlockMask::Causal
            } else {
                BlockMask::Full
            },
            attention_norm: layer.vector(LayerTensor::AttentionNorm, hidden)?,
            attention: layer.attention(rope)?,
            ffn_norm: layer.vector(LayerTensor::FfnNorm, hidden)?,
            ffn: layer.ffn()?,
        });
    }
    let norm = |tensor| directory.vector(directory.outer(metadata.format, tensor)?, hidden);
    let mut spec = DraftSpec {
        name: draft.name.clone(),
        hash: draft.hash,
        hidden,
        norm_eps: metadata.norm_eps as f32,
        block: metadata.block,
        mask_token: TokenId(metadata.mask),
        capture_layers,
        hidden_norm: norm(ModelTensor::HiddenNorm)?,
        layers,
        final_norm: norm(ModelTensor::FinalNorm)?,
        fc,
    };
    directory.unused_tensors(target.vocab, hidden)?;
    // One file with two different windows is two drafts.
    spec.hash = combined(draft.hash, format!("{spec:?}").as_bytes());
    Ok(spec)
}

/// The file's list, or the makers' default rule if it has none.
fn capture_layers(
    metadata: &DraftMetadata,
    n_captured: usize,
    n_layers: usize,
) -> Result<Vec<usize>, String> {
    let capture_layers = match &metadata.capture_layers {
        Some(capture_layers) => capture_layers.clone(),
        None => default_capture_layers(metadata.layers, n_layers),
    };
    if capture_layers.len() != n_captured {
        let (listed, source) = match &metadata.capture_layers {
            Some(_) => (capture_layers.len(), "names"),
            None => (
                capture_layers.len(),
                "names none, so the default rule gives",
            ),
        };
        return Err(format!(
            "the draft {source} {listed} target layers, its fc has room for {n_captured}"
        ));
    }
    if let Some(beyond) = capture_layers.iter().find(|tap| **tap >= n_layers) {
        return Err(format!(
            "the draft reads target layer {beyond}, counted from 0, and the target has {n_layers}"
        ));
    }
    if !capture_layers.is_sorted_by(|a, b| a < b) {
        return Err(format!(
            "the target layers it reads are not ascending: {capture_layers:?}"
        ));
    }
    Ok(capture_layers)
}

/// Layers spread evenly from the second to the third from last, or the middle one.
fn default_capture_layers(n_captured: usize, n_layers: usize) -> Vec<usize> {
    if n_captured < 2 {
        return vec![n_layers / 2];
    }
    let span = n_layers.saturating_sub(4) as f64;
    (0..n_captured)
        .map(|i| (1.0 + i as f64 * span / (n_captured - 1) as f64).round_ties_even() as usize)
        .collect()
}

/// The rope base. Converters to format A write their own default if the publisher's file nests the
/// value; the target's value is correct.
fn theta(metadata: &DraftMetadata, target: &ModelSpec) -> f64 {
    let own = target.attention_layers().next().map(|a| a.rope.theta);
    match own {
        Some(own) if metadata.format == DraftFormat::GgufA && own != metadata.theta => {
            tracing::warn!(
                file = metadata.theta,
                used = own,
                "the draft's rope base is not the target's, which is used"
            );
            own
        }
        _ => metadata.theta,
    }
}

/// The sliding layers and their window.
fn windows(metadata: &DraftMetadata, options: DraftOptions) -> Result<(Vec<bool>, usize), String> {
    let (sliding, window) = match options.window {
        Some(window) => {
            let last = metadata.layers - 1;
            (
                (0..metadata.layers).map(|i| i < last).collect(),
                Some(window),
            )
        }
        None => (metadata.sliding.clone(), metadata.window),
    };
    let window = window.unwrap_or(DraftSpec::DEFAULT_WINDOW);
    // A wider window is cut to that of full layers.
    let window = window.min(DraftSpec::DEFAULT_WINDOW);
    if window < metadata.block {
        let block = metadata.block;
        return Err(format!(
            "its window of {window} tokens is shorter than a block of {block}"
        ));
    }
    Ok((sliding, window))
}

/// The tensors of one layer.
struct LayerTensors<'a> {
    directory: &'a DraftTensors,
    metadata: &'a DraftMetadata,
    index: usize,
    hidden: usize,
}

impl LayerTensors<'_> {
    fn get(&self, tensor: LayerTensor) -> Result<WeightRef, ModelError> {
        self.directory
            .inner(self.metadata.format, self.index, tensor)
    }

    fn matrix(
        &self,
        tensor: LayerTensor,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        self.directory.shaped(self.get(tensor)?, (rows, cols))
    }

    fn vector(&self, tensor: LayerTensor, len: usize) -> Result<WeightRef, ModelError> {
        self.directory.vector(self.get(tensor)?, len)
    }

    /// Number of heads of a weight. Refuses rows that are not whole heads or contradict the
    /// metadata.
    fn heads(
        &self,
        weight: &WeightRef,
        head_dim: usize,
        said: Option<usize>,
    ) -> Result<usize, ModelError> {
        let n = weight.rows / head_dim;
        if !weight.rows.is_multiple_of(head_dim) || said.is_some_and(|said| said != n) {
            let said = said.map_or("whole heads".to_owned(), |said| format!("{said} heads"));
            let rows = weight.rows;
            let detail = format!("{rows} rows, {said} of {head_dim} are expected");
            return Err(self.directory.refuse(&weight.name, detail));
        }
        Ok(n)
    }

    fn attention(&self, rope: RopeSpec) -> Result<AttentionSpec, ModelError> {
        let metadata = self.metadata;
        // The norm of a head has the length of a head.
        let head_dim = self.get(LayerTensor::QNorm)?.cols;
        check_head_dim(head_dim)
            .and_then(|()| match metadata.head_dim {
                Some(said) if said != head_dim => Err(format!("{head_dim} long, {said} expected")),
                _ => Ok(()),
            })
            .map_err(|detail| {
                let name = self.get(LayerTensor::QNorm).map(|w| w.name.to_string());
                self.directory.refuse(&name.unwrap_or_default(), detail)
            })?;
        let (q, k) = (self.get(LayerTensor::Q)?, self.get(LayerTensor::K)?);
        let n_heads = self.heads(&q, head_dim, metadata.heads)?;
        let n_kv_heads = self.heads(&k, head_dim, metadata.kv_heads)?;
        if n_heads == 0 || n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
            let detail = format!("{n_heads} query heads for {n_kv_heads} key heads");
            return Err(self.directory.refuse(&q.name, detail));
        }
        let dims = metadata.rope_dims.unwrap_or(head_dim);
        if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
            let detail = format!("{dims} rotary values in heads of {head_dim}");
            return Err(self.directory.refuse(&q.name, detail));
        }
        let directory = self.directory;
        let (q_rows, kv_rows) = (q.rows, k.rows);
        Ok(AttentionSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            rope: RopeSpec { dims, ..rope },
            scale: attention_scale(head_dim),
            gate: OutputGate::None,
            q_norm: Some(self.vector(LayerTensor::QNorm, head_dim)?),
            k_norm: Some(self.vector(LayerTensor::KNorm, head_dim)?),
            q: directory.shaped(q, (q_rows, self.hidden))?,
            k: directory.shaped(k, (kv_rows, self.hidden))?,
            v: self.matrix(LayerTensor::V, kv_rows, self.hidden)?,
            o: self.matrix(LayerTensor::O, self.hidden, q_rows)?,
        })
    }

    fn ffn(&self) -> Result<FeedForward, ModelError> {
        let gate = self.get(LayerTensor::Gate)?;
        let ffn = gate.rows;
        if let Some(said) = self.metadata.ffn.filter(|said| *said != ffn) {
            let detail = format!("{ffn} rows, the file says {said}");
            return Err(self.directory.refuse(&gate.name, detail));
        }
        Ok(FeedForward::Dense {
            gate: self.directory.shaped(gate, (ffn, self.hidden))?,
            up: self.matrix(LayerTensor::Up, ffn, self.hidden)?,
            down: self.matrix(LayerTensor::Down, self.hidden, ffn)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::default_capture_layers;

    #[test]
    fn default_capture_layers_match_published_drafts() {
        assert_eq!(default_capture_layers(5, 64), [1, 16, 31, 46, 61]);
        assert_eq!(default_capture_layers(1, 36), [18]);
        assert_eq!(default_capture_layers(4, 12), [1, 4, 6, 9]);
    }
}
