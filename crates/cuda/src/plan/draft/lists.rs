//! What draft plans leave for the host where candidates depend on the token before: layouts, and
//! the way back to [`DraftCandidates`].

use std::sync::Arc;

use contract::{CandidateLinks, Conditioning, DraftCandidates, DraftSpec, ListIdx, TokenId};

use crate::launch::draft::{CHAIN_STATES, PairScores};
use crate::launch::logits::{LogitsReduction, TopLogits};
use crate::step::TREES;

/// The most candidates of a list of a chain. Trees take fewer from a node.
const CHAIN_CANDIDATES: usize = 16;

/// The lists of a draft, besides the reduced logits rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DraftLists {
    /// None: candidates depend on the depth only.
    ByDepth,
    /// A list behind each of `top_k` candidates of the row before.
    Pairs { top_k: usize },
    /// A list behind each state of a depth.
    Chains(Chains),
}

/// Chains of a draft, whatever the number of trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chains {
    /// Rows of a block.
    block: usize,
    depths: usize,
    reduction: LogitsReduction,
    has_confidence: bool,
}

/// The chains of one plan: reduced rows `[depth][state]`, tokens `[depth][state]` and confidences
/// `[depth][state]`; the states of a tree are adjacent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChainLayout {
    pub(crate) depths: usize,
    pub(crate) trees: usize,
    row_bytes: usize,
}

impl ChainLayout {
    /// States of a depth.
    pub(crate) fn states(self) -> usize {
        CHAIN_STATES * self.trees
    }

    /// Where the reduced rows of a depth begin, in bytes.
    pub(crate) fn reduced(self, depth: usize) -> usize {
        depth * self.states() * self.row_bytes
    }

    /// Where the tokens of a depth begin, in bytes.
    pub(crate) fn tokens(self, depth: usize) -> usize {
        self.reduced(self.depths) + 4 * depth * self.states()
    }

    /// Where the confidences of a depth begin, in bytes.
    pub(crate) fn confidence(self, depth: usize) -> usize {
        self.tokens(self.depths + depth)
    }

    fn bytes(self) -> usize {
        self.confidence(self.depths)
    }
}

impl Chains {
    /// Candidates of a list.
    pub(crate) fn candidates(self) -> usize {
        self.reduction.k
    }

    /// The layout for the trees of up to `rows` rows.
    pub(crate) fn layout(self, rows: usize) -> ChainLayout {
        ChainLayout {
            depths: self.depths,
            trees: (rows / self.block).clamp(1, TREES),
            row_bytes: self.reduction.out_bytes(1),
        }
    }
}

impl DraftLists {
    /// The lists of a draft; `reduction` is that of logits rows.
    pub(crate) fn of(spec: &DraftSpec, reduction: LogitsReduction) -> DraftLists {
        match &spec.conditioning {
            Conditioning::Independent => DraftLists::ByDepth,
            Conditioning::Pairwise(selector) => DraftLists::Pairs {
                top_k: selector.top_k,
            },
            Conditioning::Markov(markov) => DraftLists::Chains(Chains {
                block: spec.block,
                depths: spec.depth(),
                reduction: LogitsReduction {
                    k: reduction.k.min(CHAIN_CANDIDATES),
                    ..reduction
                },
                has_confidence: markov.confidence.is_some(),
            }),
        }
    }

    /// Bytes of the lists of up to `rows` rows.
    pub(crate) fn bytes(self, rows: usize) -> usize {
        match self {
            DraftLists::ByDepth => 0,
            DraftLists::Pairs { top_k } => PairScores::bytes(top_k, rows),
            DraftLists::Chains(chains) => chains.layout(rows).bytes(),
        }
    }

    /// Whether the plans leave reduced logits rows in their usual place.
    pub(crate) fn has_reduced_rows(self) -> bool {
        !matches!(self, DraftLists::Chains(_))
    }
}

/// Downloaded 32-bit words.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn bits(&self, index: usize) -> u32 {
        let word = self.0[4 * index..].first_chunk();
        u32::from_le_bytes(*word.expect("the download has all lists of its rows"))
    }

    fn float(&self, index: usize) -> f32 {
        f32::from_bits(self.bits(index))
    }
}

/// The candidates of one block from its lists of pairs. `rows` are its reduced logits rows, `first`
/// the index of the first among all.
pub(crate) fn pairs(
    rows: &[TopLogits],
    (lists, first): (&[u8], usize),
    (top_k, k): (usize, usize),
) -> DraftCandidates {
    let words = Words(lists);
    let k = k.min(top_k);
    let mut all = DraftCandidates {
        k,
        ..DraftCandidates::default()
    };
    let mut links = Vec::new();
    for (depth, row) in rows.iter().enumerate() {
        let is_last = depth + 1 == rows.len();
        let behind = 1 + depth * top_k;
        let parents = if depth == 0 { 1 } else { top_k };
        for parent in 0..parents {
            let list = ((first + depth) * top_k + parent) * PairScores::list_words(top_k);
            all.lse.push(words.float(list));
            for rank in 0..k {
                // Bytes that no kernel has written must not lead beyond the row.
                let at = (words.bits(list + 1 + rank) as usize).min(top_k - 1);
                all.ids.push(TokenId(row.ids[at]));
                all.log_probs.push(words.float(list + 1 + top_k + rank));
                links.push((!is_last).then_some(ListIdx((behind + at) as u16)));
            }
        }
    }
    all.links = CandidateLinks::ByCandidate(links);
    all
}

/// The candidates of `depth` depths of one block from its chains. `tree` is the block's index.
pub(crate) fn chains(
    chains: Chains,
    (lists, rows): (&[u8], usize),
    (tree, depth, k): (usize, usize, usize),
    ids: Option<&Arc<[TokenId]>>,
) -> DraftCandidates {
    let (layout, reduction) = (chains.layout(rows), chains.reduction);
    let k = k.min(reduction.k).min(reduction.vocab);
    let first = CHAIN_STATES * tree;
    let tokens = |depth: usize| -> Vec<TokenId> {
        let words = Words(&lists[layout.tokens(depth)..]);
        let states = (first..first + CHAIN_STATES).map(|state| words.bits(state));
        let has_token = |token: &u32| i32::try_from(*token).is_ok();
        states.take_while(has_token).map(TokenId).collect()
    };
    let mut all = DraftCandidates {
        k,
        ..DraftCandidates::default()
    };
    let mut links = Vec::new();
    let mut states = tokens(0);
    for at in 0..depth {
        let next = if at + 1 < depth {
            tokens(at + 1)
        } else {
            Vec::new()
        };
        let behind = all.lse.len() + states.len();
        for state in first..first + states.len() {
            let row = reduction.read(&lists[layout.reduced(at)..], state);
            all.lse.push(row.raw_lse);
            for (id, logit) in row.ids.iter().zip(&row.raw).take(k) {
                let token = ids.map_or(TokenId(*id), |ids| ids[*id as usize]);
                let found = next.iter().position(|state| *state == token);
                all.ids.push(token);
                all.log_probs.push(logit - row.raw_lse);
                links.push(found.map(|found| ListIdx((behind + found) as u16)));
            }
            if chains.has_confidence {
                let words = Words(&lists[layout.confidence(at)..]);
                all.confidence.push(words.float(state));
            }
        }
        states = next;
    }
    all.links = CandidateLinks::ByCandidate(links);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_of_any_plan_fit_those_of_the_largest() {
        let reduction = LogitsReduction {
            vocab: 1000,
            stride: 1000,
            k: 64,
        };
        for block in 2..=64 {
            let lists = DraftLists::Chains(Chains {
                block,
                depths: block,
                reduction,
                has_confidence: true,
            });
            let most = lists.bytes(64);
            assert!((1..=64).all(|rows| lists.bytes(rows) <= most), "{block}");
        }
    }

    #[test]
    fn pairs_link_each_candidate_to_the_list_behind_it() {
        let row = |ids: [u32; 2]| TopLogits {
            lse: 0.0,
            raw_lse: 0.0,
            ids: ids.to_vec(),
            logits: vec![0.0; 2],
            raw: vec![0.0; 2],
        };
        // Lists of two rows of two candidates behind two parents; a block's first row has one.
        let list = |first: u32| [0.5_f32.to_bits(), first, 1 - first, 0, (-1_f32).to_bits()];
        let words = [list(1), [77; 5], list(0), list(1)].concat();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let found = pairs(&[row([8, 9]), row([5, 6])], (&bytes, 0), (2, 2));
        assert!(found.is_well_formed());
        assert_eq!(found.ids, [9, 8, 5, 6, 6, 5].map(TokenId));
        assert_eq!(found.log_probs, [0.0, -1.0, 0.0, -1.0, 0.0, -1.0]);
        // Behind 9, the second candidate of its row, stands the second list of the next row.
        assert_eq!(found.next(ListIdx(0), 0), Some(ListIdx(2)));
        assert_eq!(found.chain(), [9, 6].map(TokenId));
        let one = pairs(&[row([8, 9]), row([5, 6])], (&bytes, 0), (2, 1));
        assert_eq!((one.k, one.chain()), (1, found.chain()));
    }
}
