//! Candidates that depend on the token before: scores of pairs, or a bias on all logits along
//! chains of states.

use crate::launch::embedding::EmbeddingTable;
use crate::launch::logits::LogitsReduction;
use crate::launch::norm::ActivationBuffers;
use crate::launch::{Args, CompileUnit, Launch};

/// States of a tree at a depth: tokens behind each of which one list of candidates follows.
pub const CHAIN_STATES: usize = 8;

/// Scales the logits rows of the `Step` at `step`, f32 `[rows][vocab]`, in place and caps them.
pub fn transform_logits(
    (vocab, rows): (usize, usize),
    step: u64,
    logits: u64,
    (scale, cap): (f32, Option<f32>),
) -> Launch {
    Launch {
        entry: "draft_transform_logits",
        unit: CompileUnit::new("draft/transform_logits.cu")
            .define("VOCAB", vocab)
            .define("CAPPED", u32::from(cap.is_some())),
        grid: [vocab.div_ceil(1024) as u32, rows as u32, 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(step)
            .ptr(logits)
            .f32(scale)
            .f32(cap.unwrap_or(0.0)),
        cooperative: false,
        overlap: true,
    }
}

/// Adds the two defines of a table whose single rows are read.
fn define_table(
    unit: CompileUnit,
    [ty, bytes]: [&'static str; 2],
    table: EmbeddingTable,
) -> CompileUnit {
    unit.define(ty, table.ty.id())
        .define(bytes, table.ty.row_bytes(table.width))
}

/// Scores of token pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairScores {
    /// Candidates of a row, at most those of the reduction.
    pub top_k: usize,
    /// The first drafting row of a block.
    pub first_row: usize,
    /// `[vocab, rank]`.
    pub predecessor: EmbeddingTable,
    /// `[vocab, rank]`.
    pub successor: EmbeddingTable,
    /// The reduction of logits rows, whose result is at `reduced`.
    pub reduction: LogitsReduction,
    /// The reduced logits rows.
    pub reduced: u64,
    /// f32 `[logits rows][rank]`.
    pub gates: u64,
    /// [`PairScores::bytes`].
    pub lists: u64,
}

impl PairScores {
    /// 32-bit words of a list: its log-sum-exp, then the candidates as indices into their row's,
    /// best first, then their log-probabilities.
    pub fn list_words(top_k: usize) -> usize {
        1 + 2 * top_k
    }

    /// Bytes of the lists of `rows` logits rows: `top_k` lists for each row. A block's first
    /// drafting row has one list, behind the root.
    pub fn bytes(top_k: usize, rows: usize) -> usize {
        4 * rows * top_k * PairScores::list_words(top_k)
    }

    /// The launch for up to `rows` logits rows of the `Step` at `step`.
    pub fn launch(self, rows: usize, step: u64) -> Launch {
        let (k, rank) = (self.reduction.k, self.predecessor.width);
        assert!(
            (1..=k.min(64)).contains(&self.top_k) && rank == self.successor.width,
            "scores of pairs: {self:?}"
        );
        let unit = CompileUnit::new("draft/score_pairs.cu")
            .define("TOP_K", self.top_k)
            .define("FIRST_ROW", self.first_row)
            .define("RANK", rank)
            .define("K", k)
            .define("VOCAB", self.reduction.vocab);
        let predecessor = ["PREDECESSOR_TYPE", "PREDECESSOR_BYTES"];
        let unit = define_table(unit, predecessor, self.predecessor);
        let unit = define_table(unit, ["SUCCESSOR_TYPE", "SUCCESSOR_BYTES"], self.successor);
        Launch {
            entry: "draft_score_pairs",
            unit,
            grid: [self.top_k.div_ceil(8) as u32, rows as u32, 1],
            block: [256, 1, 1],
            shared: 0,
            args: Args::new()
                .ptr(step)
                .ptr(self.reduced)
                .ptr(self.gates)
                .ptr(self.predecessor.at)
                .ptr(self.successor.at)
                .ptr(self.lists),
            cooperative: false,
            overlap: true,
        }
    }
}

/// The states of one depth, on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainStates {
    /// i32 `[states]`: tokens of the target's vocabulary; -1 for none.
    pub tokens: u64,
    /// f64 `[states]`: log-probability of the likeliest path to each.
    pub weights: u64,
}

/// A confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainConfidence {
    /// f32 `[logits rows][hidden]`: rows after the final norm.
    pub y: u64,
    /// Values of a row.
    pub hidden: usize,
    /// f32 `[hidden + rank]`.
    pub weight: u64,
    /// f32 `[1]`; 0 for none.
    pub bias: u64,
    /// f32 `[states]`.
    pub out: u64,
}

/// The selection of one depth's states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainSelect {
    /// From 0.
    pub depth: usize,
    /// The reduction of the rows of states.
    pub reduction: LogitsReduction,
    /// The reduced rows of the depth before; unused at depth 0.
    pub reduced: u64,
    /// States of the depth before; unused at depth 0.
    pub before: ChainStates,
    /// States of this depth.
    pub states: ChainStates,
    /// i32 `[draft vocab]`: the target's ids; 0 if they are the same.
    pub ids: u64,
    /// `[vocab, rank]`.
    pub previous: EmbeddingTable,
    /// How sure the draft is behind each state.
    pub confidence: Option<ChainConfidence>,
    /// `[states][rank]`: the row of `previous` of each state, that of some token for none.
    pub rows: ActivationBuffers,
}

impl ChainSelect {
    /// The launch for up to `trees` trees of the `Step` at `step`.
    pub fn launch(self, trees: usize, step: u64) -> Launch {
        let unit = CompileUnit::new("draft/chain_select.cu")
            .define("K", self.reduction.k)
            .define("CONFIDENCE", u32::from(self.confidence.is_some()));
        let unit = match self.confidence {
            Some(confidence) => unit.define("HIDDEN", confidence.hidden),
            None => unit,
        };
        let unit = define_table(unit, ["PREVIOUS_TYPE", "PREVIOUS_BYTES"], self.previous);
        let rank = self.previous.width;
        let [y, weight, bias, out] = self.confidence.map_or([0; 4], |confidence| {
            [
                confidence.y,
                confidence.weight,
                confidence.bias,
                confidence.out,
            ]
        });
        Launch {
            entry: "draft_chain_select",
            unit: self.rows.define(unit, rank, CHAIN_STATES * trees),
            grid: [trees as u32, 1, 1],
            block: [256, 1, 1],
            shared: 0,
            args: Args::new()
                .ptr(step)
                .i32(self.depth as i32)
                .ptr(self.reduced)
                .words(&[self.before.tokens, self.before.weights])
                .words(&[self.states.tokens, self.states.weights])
                .ptr(self.ids)
                .ptr(self.previous.at)
                .ptr(y)
                .ptr(weight)
                .ptr(bias)
                .ptr(out)
                .words(&self.rows.words()),
            cooperative: false,
            overlap: true,
        }
    }
}

/// Adds the logits of the rows of `depth`, f32 `[logits rows][vocab]`, to the bias of each state,
/// `biased` f32 `[states][vocab]`. The logits become those of each tree's first state.
pub fn chain_bias(
    (vocab, trees): (usize, usize),
    (step, depth): (u64, usize),
    logits: u64,
    tokens: u64,
    biased: u64,
) -> Launch {
    Launch {
        entry: "draft_chain_bias",
        unit: CompileUnit::new("draft/chain_bias.cu").define("VOCAB", vocab),
        grid: [vocab.div_ceil(1024) as u32, trees as u32, 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(step)
            .i32(depth as i32)
            .ptr(logits)
            .ptr(tokens)
            .ptr(biased),
        cooperative: false,
        overlap: true,
    }
}
