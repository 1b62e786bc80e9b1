//! Candidates that depend on the token before: scores of pairs, or a bias on all logits.
//! [`contract::draft`] has the formulas.

use contract::{
    CandidateLinks, Conditioning, DeviceError, DraftCandidates, DraftSpec, ListIdx, LogitsRequest,
    MarkovHead, PairwiseSelector, TokenId, WeightRef, WeightSource,
};

use crate::blocks::head::rank;
use crate::layer_buffers::sized;
use crate::linear::Linear;
use crate::pass::ExecContext;
use crate::reference::draft::pair_score;
use crate::reference::matmul::dot;
use crate::weights::table_rows;

use super::weights::DraftWeights;
use super::{Reach, candidates};

/// Tokens of a row whose successors a Markov head scores. Further tokens end their branch: their
/// paths are far less likely than the best.
pub(crate) const MAX_STATES: usize = 8;

/// A draft's parts that score candidates.
pub(super) struct Scorer<'a> {
    pub(super) spec: &'a DraftSpec,
    pub(super) weights: &'a DraftWeights,
    /// Holds the tables, which are read in place.
    pub(super) source: &'a dyn WeightSource,
    pub(super) lm_head: &'a Linear,
}

/// Buffers of the scores, reused by later calls.
#[derive(Default)]
pub(super) struct ScoreBuffers {
    /// `[n, hidden]`: the rows that draft.
    rows: Vec<f32>,
    /// `[n, draft_vocab]`: their logits.
    logits: Vec<f32>,
    /// `[states, draft_vocab]`: logits after the bias.
    biased: Vec<f32>,
    /// `[n, rank]`.
    gates: Vec<f32>,
}

/// Candidates of one sequence that are being collected.
struct Lists {
    all: DraftCandidates,
    links: Vec<Option<ListIdx>>,
}

/// A token of a row, behind which one list follows.
struct State {
    /// Index of the sequence.
    sequence: usize,
    token: TokenId,
    /// Log-probability of the likeliest path to the token.
    weight: f64,
}

impl Lists {
    fn new(k: usize) -> Lists {
        Lists {
            all: DraftCandidates {
                k,
                ..DraftCandidates::default()
            },
            links: Vec::new(),
        }
    }

    /// Adds a list of `k` candidates, given as ids and scores in descending order, and its links.
    fn push(
        &mut self,
        scores: impl Iterator<Item = (TokenId, f32)>,
        lse: f32,
        links: impl Iterator<Item = Option<ListIdx>>,
    ) {
        for (id, score) in scores.take(self.all.k) {
            self.all.ids.push(id);
            self.all.log_probs.push(score - lse);
        }
        self.all.lse.push(lse);
        self.links.extend(links.take(self.all.k));
    }

    fn finish(mut self) -> DraftCandidates {
        self.all.links = CandidateLinks::ByCandidate(self.links);
        self.all
    }
}

impl Scorer<'_> {
    /// Candidates behind each root from the stream after the final norm, `y`
    /// `[roots, block, hidden]`.
    ///
    /// `kept` receives the logits of the drafting rows of all roots, `[roots, depth, draft_vocab]`:
    /// before the selection of pairs, or after the bias along the likeliest chain.
    pub(super) fn candidates(
        &self,
        compute: ExecContext<'_>,
        (y, roots): (&[f32], &[TokenId]),
        reach: Reach,
        buffers: &mut ScoreBuffers,
        mut kept: Option<&mut Vec<f32>>,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let spec = self.spec;
        let (hidden, vocab) = (spec.hidden, self.lm_head.rows());
        let n = roots.len() * reach.depth;
        let ScoreBuffers {
            rows,
            logits,
            biased,
            gates,
        } = buffers;
        let rows = sized(rows, n * hidden);
        let blocks = y.chunks_exact(spec.block * hidden);
        for (rows, block) in rows.chunks_exact_mut(reach.depth * hidden).zip(blocks) {
            rows.copy_from_slice(&block[spec.first_row * hidden..][..reach.depth * hidden]);
        }
        let logits = sized(logits, n * vocab);
        self.lm_head.apply(compute.pool, rows, n, logits);
        self.transform(compute, logits);
        if let Some(kept) = kept.as_deref_mut() {
            kept.clear();
            kept.extend_from_slice(logits);
        }
        match &spec.conditioning {
            Conditioning::Pairwise(selector) => {
                let gates = sized(gates, n * selector.hidden.rows);
                if let Some(projection) = &self.weights.selector {
                    projection.apply(compute.pool, rows, n, gates);
                }
                self.pairs(compute, selector, (logits, gates, roots), reach)
            }
            Conditioning::Markov(markov) => self.chains(
                compute,
                markov,
                (logits, rows, roots),
                reach,
                (biased, kept),
            ),
            Conditioning::Independent => {
                let ask = LogitsRequest::top_k(reach.k);
                let best = rank(compute, std::iter::repeat_n(&ask, n), logits);
                Ok(best.chunks(reach.depth).map(candidates).collect())
            }
        }
    }

    /// Scales and caps logits.
    fn transform(&self, compute: ExecContext<'_>, logits: &mut [f32]) {
        const VALUES: usize = 4096;
        let (scale, cap) = (self.spec.logit_scale, self.spec.logit_softcap);
        if scale == 1.0 && cap.is_none() {
            return;
        }
        compute
            .pool
            .for_each_item(logits.chunks_mut(VALUES), |logits| {
                for logit in logits {
                    *logit *= scale;
                    if let Some(cap) = cap {
                        *logit = cap * (*logit / cap).tanh();
                    }
                }
            });
    }

    fn table(&self, table: &WeightRef, tokens: &[TokenId]) -> Result<Vec<f32>, DeviceError> {
        let mut rows = vec![0.0; tokens.len() * table.cols];
        table_rows(self.source, table, tokens, &mut rows)?;
        Ok(rows)
    }

    /// Lists of pairs: one behind the root, then one behind each of a row's candidates.
    fn pairs(
        &self,
        compute: ExecContext<'_>,
        selector: &PairwiseSelector,
        (logits, gates, roots): (&[f32], &[f32], &[TokenId]),
        reach: Reach,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let (rank_width, width) = (selector.hidden.rows, selector.top_k);
        let ask = LogitsRequest::top_k(width);
        let n = roots.len() * reach.depth;
        let best = rank(compute, std::iter::repeat_n(&ask, n), logits);
        let mut all = Vec::with_capacity(roots.len());
        let sequences = best
            .chunks(reach.depth)
            .zip(gates.chunks_exact(reach.depth * rank_width));
        for ((rows, gates), root) in sequences.zip(roots) {
            let mut lists = Lists::new(reach.k.min(width));
            let mut parents = vec![*root];
            // Index of the first list behind this row's candidates.
            let mut behind = 1;
            for (depth, (row, gate)) in rows.iter().zip(gates.chunks_exact(rank_width)).enumerate()
            {
                let predecessors = self.table(&selector.predecessor, &parents)?;
                let successors = self.table(&selector.successor, &row.ids)?;
                let is_last = depth + 1 == reach.depth;
                for predecessor in predecessors.chunks_exact(rank_width) {
                    let of_candidate = successors.chunks_exact(rank_width).zip(&row.raw);
                    let scores: Vec<f32> = of_candidate
                        .map(|(successor, logit)| pair_score(*logit, predecessor, gate, successor))
                        .collect();
                    // Equal scores keep the order of the logits.
                    let mut order: Vec<usize> = (0..scores.len()).collect();
                    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
                    let lse = log_sum_exp(&scores);
                    let ordered = order.iter().map(|at| (row.ids[*at], scores[*at]));
                    let link = |at: &usize| (!is_last).then_some(ListIdx((behind + at) as u16));
                    lists.push(ordered, lse, order.iter().map(link));
                }
                behind += row.ids.len();
                parents.clone_from(&row.ids);
            }
            all.push(lists.finish());
        }
        Ok(all)
    }

    /// Lists behind the likeliest tokens of each row, row after row.
    fn chains(
        &self,
        compute: ExecContext<'_>,
        markov: &MarkovHead,
        (logits, rows, roots): (&[f32], &[f32], &[TokenId]),
        reach: Reach,
        (biased, mut kept): (&mut Vec<f32>, Option<&mut Vec<f32>>),
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let (hidden, vocab) = (self.spec.hidden, self.lm_head.rows());
        let Some(next) = &self.weights.markov_next else {
            return Ok(Vec::new());
        };
        let ask = LogitsRequest::top_k(reach.k);
        let mut all: Vec<Lists> = roots
            .iter()
            .map(|_| Lists::new(reach.k.min(vocab)))
            .collect();
        let first = |(sequence, token): (usize, &TokenId)| State {
            sequence,
            token: *token,
            weight: 0.0,
        };
        let mut states: Vec<State> = roots.iter().enumerate().map(first).collect();
        for depth in 0..reach.depth {
            let is_last = depth + 1 == reach.depth;
            let tokens: Vec<TokenId> = states.iter().map(|state| state.token).collect();
            let previous = self.table(&markov.previous, &tokens)?;
            let biased = sized(biased, states.len() * vocab);
            next.apply(compute.pool, &previous, states.len(), biased);
            let of_row = |state: &State| state.sequence * reach.depth + depth;
            let items = biased.chunks_exact_mut(vocab).zip(&states);
            compute.pool.for_each_item(items, |(biased, state)| {
                (compute.kernels.add)(biased, &logits[of_row(state) * vocab..][..vocab]);
            });
            if let Some(kept) = kept.as_deref_mut() {
                // The first state of a sequence is its likeliest.
                for (state, biased) in states.iter().zip(biased.chunks_exact(vocab)).rev() {
                    kept[of_row(state) * vocab..][..vocab].copy_from_slice(biased);
                }
            }
            let best = rank(compute, std::iter::repeat_n(&ask, states.len()), biased);
            let ids: Vec<Vec<TokenId>> = best.iter().map(|row| self.target_ids(&row.ids)).collect();
            let mut successors: Vec<State> = Vec::new();
            for (sequence, lists) in all.iter_mut().enumerate() {
                let own = || (0..states.len()).filter(|at| states[*at].sequence == sequence);
                let chosen = if is_last {
                    Vec::new()
                } else {
                    let reached = own().flat_map(|at| {
                        let (row, weight) = (&best[at], states[at].weight);
                        let logits = ids[at].iter().zip(&row.raw);
                        logits
                            .map(move |(id, logit)| (*id, weight + f64::from(logit - row.raw_lse)))
                    });
                    // The first state is the end of the greedy chain, which never ends early.
                    let chain = own().next().and_then(|at| ids[at].first().copied());
                    likeliest(reached, chain, MAX_STATES.min(reach.k))
                };
                let behind = lists.all.lse.len() + own().count();
                for at in own() {
                    let link = |id: &TokenId| {
                        let found = chosen.iter().position(|(token, _)| token == id)?;
                        Some(ListIdx((behind + found) as u16))
                    };
                    let scores = ids[at].iter().copied().zip(best[at].raw.iter().copied());
                    lists.push(scores, best[at].raw_lse, ids[at].iter().map(link));
                    if let Some((weight, bias)) = &self.weights.confidence {
                        let (of_hidden, of_token) = weight.split_at(hidden);
                        let y = &rows[of_row(&states[at]) * hidden..][..hidden];
                        let token = &previous[at * of_token.len()..][..of_token.len()];
                        let logit = dot(of_hidden, y) + dot(of_token, token) + bias;
                        lists.all.confidence.push(1.0 / (1.0 + (-logit).exp()));
                    }
                }
                successors.extend(chosen.into_iter().map(|(token, weight)| State {
                    sequence,
                    token,
                    weight,
                }));
            }
            states = successors;
        }
        Ok(all.into_iter().map(Lists::finish).collect())
    }

    /// The target's ids of rows of the draft's head.
    fn target_ids(&self, rows: &[TokenId]) -> Vec<TokenId> {
        match self.spec.head.as_ref().and_then(|head| head.ids.as_ref()) {
            Some(ids) => rows.iter().map(|row| ids[row.index()]).collect(),
            None => rows.to_vec(),
        }
    }
}

/// The `n` likeliest distinct tokens with their weights: `chain` first, then the likeliest others;
/// of equals, the first.
fn likeliest(
    reached: impl Iterator<Item = (TokenId, f64)>,
    chain: Option<TokenId>,
    n: usize,
) -> Vec<(TokenId, f64)> {
    let mut all: Vec<(TokenId, f64)> = reached.filter(|(_, w)| w.is_finite()).collect();
    let behind = |token: TokenId| chain != Some(token);
    all.sort_by(|a, b| behind(a.0).cmp(&behind(b.0)).then(b.1.total_cmp(&a.1)));
    let mut chosen: Vec<(TokenId, f64)> = Vec::with_capacity(n);
    for (token, weight) in all {
        if chosen.len() < n && chosen.iter().all(|(other, _)| *other != token) {
            chosen.push((token, weight));
        }
    }
    chosen
}

fn log_sum_exp(scores: &[f32]) -> f32 {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max.is_infinite() {
        return max;
    }
    let sum: f64 = scores
        .iter()
        .map(|score| f64::from(score - max).exp())
        .sum();
    max + sum.ln() as f32
}
