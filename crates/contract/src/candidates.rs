//! The result of a draft: lists of candidates for the next token, and which list follows which.
//!
//! ```text
//! independent positions (DFlash)        conditional on the token before (DFlash2, DSpark)
//!   list 0:  a  b                         list 0:  a  b        behind the root
//!   list 1:  c  d    behind a and b       list 1:  c  d        behind a
//!   list 2:  e  f    behind c and d       list 2:  d  e        behind b
//!                                         list 3:  ...         behind c of list 1
//! ```
//!
//! A tree grows in the same way from both: [`DraftCandidates::first`] has the candidates behind the
//! root, and [`DraftCandidates::next`] those behind a candidate.

use crate::TokenId;

/// Index of a list of [`DraftCandidates`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListIdx(pub u16);

impl ListIdx {
    /// As a `usize`.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Draft candidates of one sequence, or of one row of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DraftCandidates {
    /// `[n_lists, k]`: ids of the target's vocabulary, best first in each list.
    pub ids: Vec<TokenId>,
    /// `[n_lists, k]`: log-probabilities of `ids` given everything before them. They are normalised
    /// over the draft's vocabulary, or over the candidates that a selector scores.
    pub log_probs: Vec<f32>,
    /// `[n_lists]`: log-sum-exp of the normalised logits; log-probability plus this is the logit.
    pub lse: Vec<f32>,
    /// Number of candidates per list.
    pub k: usize,
    /// Which list follows which candidate.
    pub links: CandidateLinks,
    /// `[n_lists]`: the draft's own estimate that the token behind is accepted, in 0..=1. Empty if
    /// the draft has none.
    pub confidence: Vec<f32>,
}

/// A draft's logits over the whole vocabulary of the target, for comparison with other programs.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftLogits {
    /// `[depth, vocab]`: before a pairwise selection, after a bias along `chain`. Minus infinity
    /// for tokens that the draft lacks.
    pub logits: Vec<f32>,
    /// `[depth]`: the likeliest token of each position given the ones before.
    pub chain: Vec<TokenId>,
}

/// Which list follows which candidate.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CandidateLinks {
    /// List `d` holds the candidates of depth `d + 1`, whatever precedes them.
    #[default]
    ByDepth,
    /// `[n_lists, k]`: the list behind each candidate, which has a higher index. `None` where the
    /// draft ends or has pruned the candidate.
    ByCandidate(Vec<Option<ListIdx>>),
}

/// One list of candidates, best first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateList<'a> {
    /// `[k]`.
    pub ids: &'a [TokenId],
    /// `[k]`.
    pub log_probs: &'a [f32],
    /// The draft's own estimate that the token is accepted, if it has one.
    pub confidence: Option<f32>,
}

impl DraftCandidates {
    /// Number of lists.
    pub fn n_lists(&self) -> usize {
        let values = self.ids.len().min(self.log_probs.len());
        values.checked_div(self.k).unwrap_or(0)
    }

    /// The candidates behind the root; `None` if there are none.
    pub fn first(&self) -> Option<ListIdx> {
        (self.n_lists() > 0).then_some(ListIdx(0))
    }

    /// A list that [`DraftCandidates::first`] or [`DraftCandidates::next`] has returned.
    pub fn list(&self, list: ListIdx) -> CandidateList<'_> {
        let range = list.index() * self.k..(list.index() + 1) * self.k;
        CandidateList {
            ids: &self.ids[range.clone()],
            log_probs: &self.log_probs[range],
            confidence: self.confidence.get(list.index()).copied(),
        }
    }

    /// The candidates behind candidate `rank` of `list`; `None` if there are none.
    pub fn next(&self, list: ListIdx, rank: usize) -> Option<ListIdx> {
        let next = match &self.links {
            CandidateLinks::ByDepth => ListIdx(list.0.checked_add(1)?),
            CandidateLinks::ByCandidate(next) => (*next.get(list.index() * self.k + rank)?)?,
        };
        (next.index() < self.n_lists()).then_some(next)
    }

    /// The candidates behind known tokens that follow the root, such as tokens that a grammar
    /// forces. A token that is not among the candidates counts as the likeliest one.
    pub fn after(&self, tokens: &[TokenId]) -> Option<ListIdx> {
        tokens.iter().try_fold(self.first()?, |list, token| {
            let rank = self.list(list).ids.iter().position(|id| id == token);
            self.next(list, rank.unwrap_or(0))
        })
    }

    /// The best candidate behind the root, the best one behind it, and so on.
    pub fn chain(&self) -> Vec<TokenId> {
        let lists = std::iter::successors(self.first(), |list| self.next(*list, 0));
        lists.map(|list| self.list(list).ids[0]).collect()
    }

    /// Whether all parts have the lengths that `k` implies and every link leads to a later list.
    pub fn is_well_formed(&self) -> bool {
        let (n, values) = (self.lse.len(), self.lse.len() * self.k);
        let links = match &self.links {
            CandidateLinks::ByDepth => true,
            CandidateLinks::ByCandidate(next) => {
                let later = |(at, next): (usize, &Option<ListIdx>)| {
                    next.is_none_or(|next| next.index() > at / self.k && next.index() < n)
                };
                next.len() == values && next.iter().enumerate().all(later)
            }
        };
        let confidence = self.confidence.is_empty() || self.confidence.len() == n;
        links && confidence && (self.ids.len(), self.log_probs.len()) == (values, values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditional() -> DraftCandidates {
        let link = |list| Some(ListIdx(list));
        DraftCandidates {
            ids: [1, 2, 3, 4, 4, 5].map(TokenId).to_vec(),
            log_probs: vec![-0.1, -2.0, -0.2, -2.0, -0.3, -2.0],
            lse: vec![0.0; 3],
            k: 2,
            links: CandidateLinks::ByCandidate(vec![link(1), link(2), None, None, None, None]),
            confidence: vec![0.9, 0.8, 0.7],
        }
    }

    #[test]
    fn lists_follow_their_own_parent_or_the_depth() {
        let conditional = conditional();
        assert!(conditional.is_well_formed());
        assert_eq!(conditional.first(), Some(ListIdx(0)));
        assert_eq!(conditional.next(ListIdx(0), 1), Some(ListIdx(2)));
        assert_eq!(conditional.next(ListIdx(1), 0), None);
        assert_eq!(conditional.chain(), [1, 3].map(TokenId));
        let list = conditional.list(ListIdx(2));
        assert_eq!(
            (list.ids, list.confidence),
            (&[4, 5].map(TokenId)[..], Some(0.7))
        );
        let by_depth = DraftCandidates {
            links: CandidateLinks::ByDepth,
            ..conditional
        };
        assert_eq!(by_depth.next(ListIdx(0), 1), Some(ListIdx(1)));
        assert_eq!(by_depth.next(ListIdx(2), 0), None);
        assert_eq!(DraftCandidates::default().first(), None);
        assert_eq!(by_depth.chain(), [1, 3, 4].map(TokenId));
    }

    #[test]
    fn known_tokens_lead_to_the_list_behind_them() {
        let conditional = conditional();
        assert_eq!(conditional.after(&[]), Some(ListIdx(0)));
        assert_eq!(conditional.after(&[TokenId(2)]), Some(ListIdx(2)));
        assert_eq!(conditional.after(&[TokenId(77)]), Some(ListIdx(1)));
        assert_eq!(conditional.after(&[TokenId(2), TokenId(5)]), None);
    }

    #[test]
    fn malformed_candidates_are_recognised() {
        let mut short = conditional();
        short.lse.pop();
        let mut back = conditional();
        back.links = CandidateLinks::ByCandidate(vec![Some(ListIdx(0)); 6]);
        let mut beyond = conditional();
        beyond.links = CandidateLinks::ByCandidate(vec![Some(ListIdx(3)); 6]);
        let mut unsure = conditional();
        unsure.confidence.pop();
        for wrong in [short, back, beyond, unsure] {
            assert!(!wrong.is_well_formed(), "{wrong:?}");
        }
    }
}
