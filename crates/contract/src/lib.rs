//! Types and traits shared by the decoding algorithm and the devices.
//!
//! Contents: ids, the draft [`Tree`], the model as data ([`ModelSpec`]), logits requests and rows
//! ([`LogitsRequest`], [`LogitsRow`]), the device traits ([`Backend`], [`Runner`]), and the codecs
//! of the quantized block formats, whose bytes all devices must interpret alike ([`quant`]).
//!
//! This crate has no files, threads, clocks, tensor types or model-family names, and no algorithms
//! except those codecs and [`LogitsProcessors`].
//!
//! Start with [`runner`], then [`tree`], then [`spec`].

#![forbid(unsafe_code)]

pub mod backend;
pub mod candidates;
pub mod checked;
pub mod draft;
pub mod error;
pub mod feed_forward;
mod forward;
pub mod ids;
#[cfg(feature = "inspect")]
pub mod inspect;
pub mod kv;
pub mod load;
pub mod logits;
pub mod markup;
pub mod mass;
pub mod placement;
pub mod protocol;
pub mod quant;
pub mod runner;
pub mod scorer;
pub mod shard;
pub mod snapshot;
pub mod spec;
pub mod split;
pub mod tree;
pub mod vocab;
pub mod weights;
pub mod window;

pub use backend::Backend;
pub use candidates::{CandidateLinks, CandidateList, DraftCandidates, DraftLogits, ListIdx};
pub use draft::{
    BlockMask, Conditioning, ConfidenceHead, DraftHead, DraftLayer, DraftLoad, DraftLoadConfig,
    DraftSpec, DraftValues, DynamicConv, MarkovHead, NarrowDraft, PairwiseSelector,
};
pub use error::DeviceError;
pub use feed_forward::{
    DenseSpec, ExpertGateUp, ExpertStack, FeedForward, GateActivation, MoeSpec, SharedExpertSpec,
};
pub use ids::{MtpRow, NodeIdx, SeqId, SnapshotId, TokenId};
pub use kv::{KvFormat, KvFormats};
pub use load::{
    DeviceInfo, ExpertPlacement, KvPool, Limits, LoadConfig, LoadProgress, MemoryPlan, MtpInfo,
    RunnerInfo,
};
pub use logits::{
    LogitsProcessors, LogitsRequest, LogitsRow, LogitsSelection, TokenCount, TokenMask,
};
pub use markup::{ModelMarkup, ReasoningTags, TemplateMarkup, ToolCallTags};
pub use mass::{MassCut, MassPart, MassQuery};
pub use placement::{
    LayerSplit, ModelPart, PlacedPart, Placement, PlacementDevice, PlacementError, PlacementRequest,
};
pub use quant::QuantType;
pub use runner::{
    Capacity, CommitItem, DetachedSnapshot, DraftItem, MtpDraftItem, Runner, SnapshotInfo,
    SnapshotLocation, VerifyItem,
};
pub use scorer::{BlockSparsity, ScoreProgress, ScoreSettings, Scorer, ScorerConfig, ScorerInfo};
pub use shard::{Shard, ShardError, ShardedModel, WeightSlice};
pub use spec::{
    AttentionBiases, AttentionSpec, GatedDeltaSpec, HeadMap, LayerSpec, Mixer, ModelHash,
    ModelSpec, MtpSpec, OutputGate, RopePairs, RopeSpec,
};
pub use split::{
    SplitBackend, SplitDevice, SplitMode, Stage, StageConfig, StageOutput, StepGroups,
};
pub use tree::{Tree, TreeError, TreePath};
pub use vocab::{FimTokens, PreTokenizer, SentencePieces, TokenKind, Vocab};
pub use weights::{WeightError, WeightRef, WeightSource};
pub use window::AttentionWindow;
