//! Checks a draft against its target and builds its spec.

use contract::{BlockMask, DraftSpec, ModelSpec, RopeSpec, TokenId, Tree};

use super::heads::HeadTensors;
use super::layer::LayerTensors;
use super::tensor_names::ModelTensor;
use super::{DraftFile, DraftFormat, DraftKind, DraftMetadata, DraftOptions};
use crate::ModelError;
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
    let block = rows(metadata, options).map_err(&mismatch)?;
    let capture_layers =
        capture_layers(metadata, fc.cols / hidden, target.layers.len()).map_err(&mismatch)?;
    let rope = RopeSpec::new(0, theta(metadata, target));
    let (sliding, window) = windows(metadata, options).map_err(&mismatch)?;
    let mut layers = Vec::with_capacity(metadata.layers);
    for (index, slides) in sliding.into_iter().enumerate() {
        let layer = LayerTensors {
            directory,
            metadata,
            index,
            hidden,
        };
        let first_kind = metadata.kind == DraftKind::Dflash;
        let causal = metadata.causal.unwrap_or(slides && first_kind);
        let window = if slides {
            window
        } else {
            DraftSpec::DEFAULT_WINDOW
        };
        let block_mask = if causal {
            BlockMask::Causal
        } else {
            BlockMask::Full
        };
        layers.push(layer.spec(rope, window, block_mask)?);
    }
    let norm = |tensor| directory.vector(directory.outer(metadata.format, tensor)?, hidden);
    let heads = HeadTensors {
        draft,
        target,
        hidden,
    };
    let mut spec = DraftSpec {
        name: draft.name.clone(),
        hash: draft.hash,
        hidden,
        norm_eps: metadata.norm_eps as f32,
        block,
        first_row: metadata.first_row(),
        mask_token: TokenId(metadata.mask),
        capture_layers,
        embedding: heads.embedding()?,
        hidden_norm: norm(ModelTensor::HiddenNorm)?,
        layers,
        final_norm: norm(ModelTensor::FinalNorm)?,
        head: heads.head()?,
        // The programs that run the other kinds leave these keys to the sampler.
        logit_scale: metadata
            .logit_scale
            .filter(|_| transforms(metadata))
            .unwrap_or(1.0) as f32,
        logit_softcap: metadata
            .logit_softcap
            .filter(|_| transforms(metadata))
            .map(|cap| cap as f32),
        conditioning: heads.conditioning()?,
        fc,
    };
    directory.unused_tensors(metadata.kind, (target.vocab, hidden))?;
    // One file with two different windows is two drafts.
    spec.hash = combined(draft.hash, format!("{spec:?}").as_bytes());
    Ok(spec)
}

/// Whether the draft scales and caps its logits.
fn transforms(metadata: &DraftMetadata) -> bool {
    metadata.kind == DraftKind::Dflash2
}

/// Rows of a pass: the file's block, or up to twice as many.
fn rows(metadata: &DraftMetadata, options: DraftOptions) -> Result<usize, String> {
    let (block, most) = (metadata.block, Tree::MAX_NODES);
    if !(2..=most).contains(&block) {
        return Err(format!(
            "its blocks have {block} rows, 2 to {most} are supported"
        ));
    }
    let widest = (2 * block).min(most);
    match options.width {
        None => Ok(block),
        Some(width) if (block..=widest).contains(&width) => Ok(width),
        Some(width) => Err(format!(
            "blocks of {width} rows are wanted, but it has {block}; use {block} to {widest}"
        )),
    }
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
    let block = options.width.unwrap_or(metadata.block);
    if window < block {
        return Err(format!(
            "its window of {window} tokens is shorter than a block of {block}"
        ));
    }
    Ok((sliding, window))
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
