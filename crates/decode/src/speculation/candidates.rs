//! The candidates for the next token at a node of a draft tree, from every source that has drafted.
//!
//! Each source can continue any path: the draft model from the node's depth, the head from the
//! node's row, and suffix matches from the longest end of the path that has occurred before. A
//! [`Cursors`] says where each source stands at a node.

use contract::{DraftCandidates, ListIdx, MtpRow, TokenId};

use super::calibration::{Calibration, Figure, Proposers, Trust};
use super::sources::{DraftSource, SourceSet};
use super::suffix::{SuffixAutomaton, SuffixMatch};

/// Candidates of a node that a tree may hold. More add nothing: their chances are far below the
/// best one's.
const MAX_CANDIDATES: usize = 8;
/// Continuations of a suffix match that are considered.
const MAX_CONTINUATIONS: usize = 3;

/// What the sources have drafted for one sequence.
#[derive(Default)]
pub(crate) struct Drafts<'a> {
    /// The draft model's candidates, by depth.
    pub(crate) block: Option<DraftCandidates>,
    /// The rows of the multi-token-prediction head, in the order of their [`MtpRow`].
    pub(crate) mtp: Vec<HeadRow>,
    /// The text's automaton and the least length of a match.
    pub(crate) suffix: Option<(&'a SuffixAutomaton, usize)>,
}

/// A row of the multi-token-prediction head.
pub(crate) struct HeadRow {
    /// The row before; `None` for the root row.
    pub(crate) parent: Option<MtpRow>,
    pub(crate) token: TokenId,
    /// Its candidates for the token after `token`.
    pub(crate) candidates: DraftCandidates,
}

/// Where each source stands at a node.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Cursors {
    /// The draft model's list behind the node.
    block: Option<ListIdx>,
    /// The head's row of the node, if it was drafted.
    pub(crate) mtp: Option<MtpRow>,
    /// The end of the node's path that has occurred before.
    suffix: Option<SuffixMatch>,
}

/// A candidate for the next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) token: TokenId,
    pub(crate) by: Proposers,
    pub(crate) figure: Figure,
    /// Its chance by calibration, before the sequence's own correction.
    pub(crate) calibrated: f64,
    /// The chance that it is accepted if its parent is.
    pub(crate) chance: f64,
}

/// The corrections of one sequence's chances.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chances<'a> {
    pub(crate) calibration: &'a Calibration,
    pub(crate) trust: &'a Trust,
}

/// A token with the figures of the sources that propose it.
struct Proposal {
    token: TokenId,
    figures: [Option<Figure>; DraftSource::ALL.len()],
}

impl Drafts<'_> {
    /// Where the sources stand at the root.
    pub(crate) fn root(&self) -> Cursors {
        Cursors {
            block: self.block.as_ref().and_then(DraftCandidates::first),
            mtp: (!self.mtp.is_empty()).then_some(MtpRow(0)),
            suffix: self.suffix.map(|(automaton, _)| automaton.longest_match()),
        }
    }

    /// Where the sources stand behind `token` at a node with these cursors.
    pub(crate) fn follow(&self, at: Cursors, token: TokenId) -> Cursors {
        let row = |parent: MtpRow| {
            let mut rows = self.mtp.iter();
            rows.position(|row| row.parent == Some(parent) && row.token == token)
        };
        let block = at.block.zip(self.block.as_ref()).and_then(|(list, block)| {
            // A token that the draft did not propose counts as its likeliest one.
            let rank = block.list(list).ids.iter().position(|id| *id == token);
            block.next(list, rank.unwrap_or(0))
        });
        let suffix = self.suffix.zip(at.suffix);
        Cursors {
            block,
            mtp: at.mtp.and_then(row).map(|row| MtpRow(row as u16)),
            suffix: suffix.map(|((automaton, _), found)| automaton.follow(found, token)),
        }
    }

    /// The candidates at a node `depth` below the last certain token, likeliest first. Their
    /// chances sum to at most 1.
    pub(crate) fn candidates(
        &self,
        at: Cursors,
        depth: usize,
        chances: Chances<'_>,
    ) -> Vec<Candidate> {
        let mut proposals: Vec<Proposal> = Vec::with_capacity(2 * MAX_CANDIDATES);
        if let (Some(list), Some(block)) = (at.block, &self.block) {
            add_list(&mut proposals, DraftSource::Block, block, list);
        }
        if let Some(row) = at.mtp.and_then(|row| self.mtp.get(row.index()))
            && let Some(list) = row.candidates.first()
        {
            add_list(&mut proposals, DraftSource::Mtp, &row.candidates, list);
        }
        if let (Some((automaton, min)), Some(found)) = (self.suffix, at.suffix) {
            add_matches(&mut proposals, automaton, found, min);
        }
        let sources = |figures: &[Option<Figure>; 3]| {
            let all = DraftSource::ALL.into_iter();
            all.filter(|source| figures[source.index()].is_some())
                .fold(SourceSet::NONE, SourceSet::with)
        };
        let active = proposals
            .iter()
            .flat_map(|proposal| sources(&proposal.figures).iter())
            .fold(SourceSet::NONE, SourceSet::with);
        let mut candidates: Vec<Candidate> = proposals
            .iter()
            .map(|proposal| {
                let by = Proposers {
                    sources: sources(&proposal.figures),
                    active,
                    depth,
                };
                candidate(proposal, by, chances)
            })
            .collect();
        candidates.sort_by(|a, b| b.chance.total_cmp(&a.chance));
        candidates.truncate(MAX_CANDIDATES);
        let sum: f64 = candidates.iter().map(|candidate| candidate.chance).sum();
        if sum > 1.0 {
            candidates.iter_mut().for_each(|c| c.chance /= sum);
        }
        candidates
    }
}

/// Adds a list of a draft. A token may repeat in it; the first stands for all.
fn add_list(
    proposals: &mut Vec<Proposal>,
    source: DraftSource,
    from: &DraftCandidates,
    list: ListIdx,
) {
    let list = from.list(list);
    let best = list.log_probs.first().copied().unwrap_or(0.0);
    for (token, log_prob) in list.ids.iter().zip(list.log_probs) {
        let figure = match list.confidence {
            Some(confidence) => Figure::of_confidence(*log_prob, best, confidence),
            None => Figure::of_log_prob(*log_prob),
        };
        add(proposals, *token, source, figure);
    }
}

/// Adds the continuations of a match. The latest counts once more: texts repeat what is near.
fn add_matches(
    proposals: &mut Vec<Proposal>,
    automaton: &SuffixAutomaton,
    found: SuffixMatch,
    min: usize,
) {
    /// Occurrences of something else that every place is taken to have.
    const UNSEEN: f64 = 0.5;
    if found.len() < min {
        return;
    }
    let continuations = automaton.continuations(found, usize::MAX);
    let latest = continuations.iter().map(|found| found.latest).max();
    let weight = |count: u32, at: u32| f64::from(count + u32::from(Some(at) == latest));
    let all: f64 = continuations
        .iter()
        .map(|c| weight(c.count, c.latest))
        .sum();
    for one in continuations.iter().take(MAX_CONTINUATIONS) {
        let share = weight(one.count, one.latest) / (all + UNSEEN);
        let figure = Figure::of_match(found.len(), share);
        add(proposals, one.token, DraftSource::Suffix, figure);
    }
}

fn add(proposals: &mut Vec<Proposal>, token: TokenId, source: DraftSource, figure: Figure) {
    let found = proposals.iter_mut().find(|found| found.token == token);
    match found {
        Some(found) => {
            found.figures[source.index()].get_or_insert(figure);
        }
        None => {
            let mut figures = [None; DraftSource::ALL.len()];
            figures[source.index()] = Some(figure);
            proposals.push(Proposal { token, figures });
        }
    }
}

/// The candidate of a proposal, whose chance is at least that of each of its sources alone.
fn candidate(proposal: &Proposal, by: Proposers, chances: Chances<'_>) -> Candidate {
    let figures = by
        .sources
        .iter()
        .filter_map(|source| Some((source, proposal.figures[source.index()]?)));
    let alone = (figures.clone().count() == 1)
        .then(|| figures.clone().next())
        .flatten();
    let calibration = chances.calibration;
    let (figure, calibrated) = match alone {
        Some((_, figure)) => (figure, calibration.chance(by, figure)),
        None => {
            let figure = calibration.agreed(by, figures);
            (figure, calibration.chance(by, figure).max(figure.chance))
        }
    };
    Candidate {
        token: proposal.token,
        by,
        figure,
        calibrated,
        chance: chances.trust.apply(by.sources, calibrated),
    }
}

#[cfg(test)]
mod tests {
    use contract::CandidateLinks;

    use super::*;

    fn list(ids: &[u32], log_probs: &[f32], k: usize) -> DraftCandidates {
        DraftCandidates {
            ids: ids.iter().copied().map(TokenId).collect(),
            log_probs: log_probs.to_vec(),
            lse: vec![0.0; ids.len() / k],
            k,
            ..DraftCandidates::default()
        }
    }

    fn automaton(ids: &[u32]) -> SuffixAutomaton {
        let mut automaton = SuffixAutomaton::default();
        ids.iter().for_each(|id| automaton.push(TokenId(*id)));
        automaton
    }

    #[test]
    fn equal_tokens_of_several_sources_are_one_candidate() {
        use DraftSource::{Block, Mtp, Suffix};
        let text = automaton(&[1, 2, 3, 7, 1, 2, 3]);
        let drafts = Drafts {
            block: Some(list(&[7, 8, 9, 9], &[-0.5, -1.5, -0.1, -0.1], 2)),
            mtp: vec![HeadRow {
                parent: None,
                token: TokenId(3),
                candidates: list(&[8, 7], &[-0.4, -2.0], 2),
            }],
            suffix: Some((&text, 3)),
        };
        let (calibration, trust) = (Calibration::default(), Trust::default());
        let chances = Chances {
            calibration: &calibration,
            trust: &trust,
        };
        let at = drafts.root();
        let found = drafts.candidates(at, 1, chances);
        let of = |id: u32| found.iter().find(|c| c.token == TokenId(id)).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(of(7).by.sources, SourceSet::ALL);
        assert_eq!(of(8).by.sources, SourceSet::of(&[Block, Mtp]));
        assert!(found.iter().all(|c| c.by.active == SourceSet::ALL));
        assert!(found.iter().map(|c| c.chance).sum::<f64>() <= 1.0 + 1e-9);
        // At least the best source's own chance, unless all chances together exceed 1.
        assert!(of(7).calibrated >= f64::exp(-0.5) - 1e-6);
        // Behind 7 the head has no row, the draft a token that repeats, and the match goes on.
        let behind = drafts.candidates(drafts.follow(at, TokenId(7)), 2, chances);
        let ids: Vec<(u32, SourceSet)> = behind.iter().map(|c| (c.token.0, c.by.sources)).collect();
        assert!(
            ids.contains(&(9, SourceSet::of(&[Block]))) && ids.len() == 2,
            "{ids:?}"
        );
        assert!(ids.contains(&(1, SourceSet::of(&[Suffix]))));
        // Behind another token only the draft goes on, and then nothing does.
        let other = drafts.follow(at, TokenId(8));
        assert_eq!(drafts.candidates(other, 2, chances).len(), 1);
        let end = drafts.follow(drafts.follow(other, TokenId(9)), TokenId(5));
        assert!(drafts.candidates(end, 4, chances).is_empty());
    }

    #[test]
    fn short_matches_propose_nothing() {
        let text = automaton(&[1, 2, 3, 7, 5, 2, 3]);
        let (calibration, trust) = (Calibration::default(), Trust::default());
        let chances = Chances {
            calibration: &calibration,
            trust: &trust,
        };
        let with = |min: usize| {
            let drafts = Drafts {
                suffix: Some((&text, min)),
                ..Drafts::default()
            };
            drafts.candidates(drafts.root(), 1, chances).len()
        };
        assert_eq!((with(2), with(3)), (1, 0));
    }

    #[test]
    fn conditional_lists_and_confidence_reach_the_candidates() {
        let block = DraftCandidates {
            links: CandidateLinks::ByCandidate(vec![
                Some(ListIdx(1)),
                Some(ListIdx(2)),
                None,
                None,
                None,
                None,
            ]),
            confidence: vec![0.7, 0.6, 0.2],
            ..list(
                &[1, 2, 3, 4, 5, 6],
                &[-0.1, -3.0, -0.2, -3.0, -0.2, -3.0],
                2,
            )
        };
        assert!(block.is_well_formed());
        let drafts = Drafts {
            block: Some(block),
            ..Drafts::default()
        };
        let (calibration, trust) = (Calibration::default(), Trust::default());
        let chances = Chances {
            calibration: &calibration,
            trust: &trust,
        };
        let behind = |token: u32| {
            let at = drafts.follow(drafts.root(), TokenId(token));
            let best = drafts.candidates(at, 2, chances)[0];
            (best.token.0, (best.chance * 10.0).round())
        };
        assert_eq!(behind(1), (3, 6.0));
        assert_eq!(behind(2), (5, 2.0));
        // Another source's token counts as the likeliest.
        assert_eq!(behind(77), (3, 6.0));
    }
}
