//! A draft's metadata in any file format.

/// A kind of block draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DraftKind {
    /// Positions are independent of each other.
    Dflash,
    /// Dynamic convolutions, and scores of token pairs.
    Dflash2,
    /// A bias by the token before, and a confidence.
    Dspark,
}

impl DraftKind {
    /// Display name.
    pub fn name(self) -> &'static str {
        match self {
            DraftKind::Dflash => "DFlash",
            DraftKind::Dflash2 => "DFlash2",
            DraftKind::Dspark => "DSpark",
        }
    }
}

/// File format of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DraftFormat {
    /// GGUF, architecture `qwen35-dflash-draft`.
    GgufA,
    /// GGUF, architecture `dflash-draft`.
    GgufB,
    /// GGUF, architecture `dflash`.
    GgufC,
    /// The publisher's safetensors.
    Safetensors,
}

impl DraftFormat {
    /// Display name.
    pub fn name(self) -> &'static str {
        match self {
            DraftFormat::GgufA => "qwen35-dflash-draft (GGUF)",
            DraftFormat::GgufB => "dflash-draft (GGUF)",
            DraftFormat::GgufC => "dflash (GGUF)",
            DraftFormat::Safetensors => "safetensors",
        }
    }
}

/// A draft's metadata. Sizes that its tensors show are kept only for checks.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftMetadata {
    /// The file format.
    pub format: DraftFormat,
    /// The kind of draft.
    pub kind: DraftKind,
    /// Number of layers.
    pub layers: usize,
    /// Rows of one pass, the root included.
    pub block: usize,
    /// The mask token, which marks the positions to predict.
    pub mask: u32,
    /// Target layers read, counted from 0; `None` if the file has no list.
    pub capture_layers: Option<Vec<usize>>,
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Number of rotated values per head; `None` for all.
    pub rope_dims: Option<usize>,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Whether each layer has a sliding window.
    pub sliding: Vec<bool>,
    /// The window of the sliding layers.
    pub window: Option<usize>,
    /// Whether rows see only earlier rows of their block. `None` means in sliding layers of the
    /// first kind only.
    pub causal: Option<bool>,
    /// Length of the target's logits row.
    pub vocab: Option<usize>,
    /// Layers of the target.
    pub target_layers: Option<usize>,
    /// Width of the residual stream.
    pub hidden: Option<usize>,
    /// Width of the feed-forward.
    pub ffn: Option<usize>,
    /// Query heads.
    pub heads: Option<usize>,
    /// Key and value heads.
    pub kv_heads: Option<usize>,
    /// Values per head.
    pub head_dim: Option<usize>,
    /// Whether row 0 of a block predicts the first drafted token; `None` for the kind's default.
    pub sample_from_anchor: Option<bool>,
    /// Factor on the logits.
    pub logit_scale: Option<f64>,
    /// Bound of capped logits.
    pub logit_softcap: Option<f64>,
    /// Taps of the convolutions.
    pub conv_taps: Option<usize>,
    /// Channels of the convolutions that share dynamic weights.
    pub conv_group: Option<usize>,
    /// Rank of the pairwise selector or of the Markov head.
    pub rank: Option<usize>,
    /// Candidates of a row that the pairwise selector scores.
    pub selector_top_k: Option<usize>,
    /// Whether attention has sinks; `None` if the file does not say.
    pub has_sinks: Option<bool>,
    /// Whether there is a confidence head; `None` if the file does not say.
    pub has_confidence: Option<bool>,
}

impl DraftMetadata {
    /// The row of a block that predicts the first drafted token.
    pub fn first_row(&self) -> usize {
        let default = self.kind == DraftKind::Dspark;
        usize::from(!self.sample_from_anchor.unwrap_or(default))
    }
}
