//! Sampling: which logits are requested from the device, and how a token is drawn from them.

mod chain;
mod penalty;
mod rank;
mod restriction;
mod rng;

use std::sync::Arc;

use contract::{LogitsProcessors, LogitsRequest, LogitsRow, LogitsSelection, TokenId, TokenMask};

pub(crate) use penalty::History;

use crate::constraint::LogitBoost;
use crate::event::{Logprobs, OutputToken};
use crate::job::GenerationParams;
use restriction::Restriction;

/// The sampler of one sequence. Its choices depend on parameters, seed, history and position only.
#[derive(Debug)]
pub(crate) struct Sampler {
    params: Arc<GenerationParams>,
    /// The job's seed plus the choice's number.
    seed: u64,
    selection: LogitsSelection,
    /// Which tokens the job permits.
    restriction: Restriction,
    /// The processors of positions without a mask and without counts.
    bias_only: Option<Arc<LogitsProcessors>>,
}

impl Sampler {
    /// The sampler of choice `choice`, with its end tokens. `vocab` is the length of a row. More
    /// than `max_fetched_top_k` candidates are requested as a full row.
    pub(crate) fn new(
        params: Arc<GenerationParams>,
        choice: usize,
        end_tokens: &[TokenId],
        vocab: usize,
        max_fetched_top_k: usize,
    ) -> Sampler {
        let sampling = &params.sampling;
        let bias_only = (!sampling.bias.is_empty()).then(|| {
            Arc::new(LogitsProcessors {
                bias: sampling.bias.clone(),
                ..LogitsProcessors::default()
            })
        });
        Sampler {
            seed: sampling.seed.wrapping_add(choice as u64),
            selection: selection(&params, vocab, max_fetched_top_k),
            restriction: Restriction::new(Arc::clone(&params), end_tokens, vocab),
            params,
            bias_only,
        }
    }

    /// The logits request after `history` and `path`, the tokens of the nodes below the root, with
    /// an optional mask and boost. Its row serves this sampler and position alone.
    pub(crate) fn logits_request(
        &self,
        history: &History,
        path: &[TokenId],
        allowed: Option<Arc<TokenMask>>,
        boost: Option<LogitBoost>,
    ) -> LogitsRequest {
        let sampling = &self.params.sampling;
        let mask = self.restriction.mask(history, path, allowed);
        let processors = if mask.is_some() || boost.is_some() || has_penalties(&self.params) {
            let mut bias = sampling.bias.clone();
            if let Some(LogitBoost { token, boost }) = boost {
                match bias.iter_mut().find(|(other, _)| *other == token) {
                    Some((_, given)) => *given += boost,
                    None => bias.push((token, boost)),
                }
            }
            Some(Arc::new(LogitsProcessors {
                allowed: mask,
                bias,
                repetition: sampling.repetition,
                frequency: sampling.frequency,
                presence: sampling.presence,
                counts: history.counts_after(path),
            }))
        } else {
            self.bias_only.clone()
        };
        let draws =
            self.selection == LogitsSelection::Full && self.params.logprobs.unwrap_or(0) == 0;
        let position = history.tokens().len() + path.len();
        LogitsRequest {
            selection: self.selection,
            processors,
            mass: draws
                .then(|| chain::query(sampling, rng::uniform(self.seed, position as u64)))
                .flatten(),
        }
    }

    /// The logits request where `token` is forced: its logprob, if that is reported.
    pub(crate) fn request_forced(&self, token: TokenId) -> LogitsRequest {
        match self.params.logprobs {
            Some(n) => logprob_request(token, n),
            None => LogitsRequest::NONE,
        }
    }

    /// A forced token, with the row for [`request_forced`](Sampler::request_forced).
    pub(crate) fn forced_output(&self, row: &LogitsRow, token: TokenId) -> OutputToken {
        OutputToken {
            id: token,
            logprobs: self.params.logprobs.map(|n| logprobs(row, token, n)),
        }
    }

    /// The token at absolute position `position`, from the row for
    /// [`logits_request`](Sampler::logits_request).
    pub(crate) fn choose(&self, row: &LogitsRow, position: usize) -> OutputToken {
        let draw = rng::uniform(self.seed, position as u64);
        let id = chain::choose(row, &self.params.sampling, draw);
        OutputToken {
            id,
            logprobs: self.params.logprobs.map(|n| logprobs(row, id, n)),
        }
    }
}

fn has_penalties(params: &GenerationParams) -> bool {
    let sampling = &params.sampling;
    sampling.repetition != 1.0 || sampling.frequency != 0.0 || sampling.presence != 0.0
}

/// The part of a row that the parameters need: top-k if that suffices, else the full row.
fn selection(params: &GenerationParams, vocab: usize, max_fetched_top_k: usize) -> LogitsSelection {
    let sampling = &params.sampling;
    let edited = has_penalties(params)
        || !sampling.bias.is_empty()
        || params.min_tokens > 0
        || params.allowed_tokens.is_some()
        || !params.bad_words.is_empty()
        || params.constraints.is_some();
    let drawn = match (sampling.is_greedy(), sampling.top_k) {
        (true, _) => 1,
        (false, 0) => return LogitsSelection::Full,
        (false, k) => k.min(vocab),
    };
    let reported = params.logprobs.unwrap_or(0);
    // The best by raw logit may not be among the best by processed logit.
    if reported > 0 && edited {
        return LogitsSelection::Full;
    }
    match drawn.max(reported) {
        k if k > max_fetched_top_k || k >= vocab => LogitsSelection::Full,
        k => LogitsSelection::TopK(k),
    }
}

/// The logprob of `token`, which must be in the row, and the `n` best, by raw logits.
fn logprobs(row: &LogitsRow, token: TokenId, n: usize) -> Logprobs {
    let at = match row.ids.get(token.index()) {
        // In a full row a token is at its own id.
        Some(id) if *id == token => Some(token.index()),
        _ => row.ids.iter().position(|id| *id == token),
    };
    let logprob = |i: usize| row.raw[i] - row.raw_lse;
    Logprobs {
        logprob: at.map_or(f32::NEG_INFINITY, logprob),
        top: rank::best(&row.raw, &row.ids, n)
            .into_iter()
            .map(|i| (row.ids[i], logprob(i)))
            .collect(),
    }
}

/// The logits request for the logprob of a prompt token and the `n` best at its position.
///
/// Raising the token above all others puts it, with its raw logit, at the head of the top `n + 1`.
/// The others keep their raw order, so no full row is transferred.
pub(crate) fn logprob_request(next: TokenId, n: usize) -> LogitsRequest {
    /// Above any model's logits, and finite.
    const BOOST: f32 = 1e30;
    LogitsRequest {
        selection: LogitsSelection::TopK(n + 1),
        processors: Some(Arc::new(LogitsProcessors {
            bias: vec![(next, BOOST)],
            ..LogitsProcessors::default()
        })),
        mass: None,
    }
}

/// The logprob of `next` from a row for [`logprob_request`].
pub(crate) fn requested_logprob(row: &LogitsRow, next: TokenId, n: usize) -> Logprobs {
    logprobs(row, next, n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Sampling;
    use conformance::fake::{Ending, Language};
    use contract::{MassCut, MassPart};
    use proptest::prelude::*;

    const LANGUAGE: Language = Language {
        vocab: 40,
        spread: 6.0,
        ending: Some(Ending {
            token: TokenId(2),
            chance: 0.2,
        }),
        salt: 5,
    };

    fn check_want(
        sampling: Sampling,
        logprobs: Option<usize>,
        min_tokens: usize,
        expected: LogitsSelection,
    ) {
        let params = GenerationParams {
            sampling,
            logprobs,
            min_tokens,
            ..GenerationParams::default()
        };
        assert_eq!(selection(&params, 1000, 64), expected, "{params:?}");
    }

    #[test]
    fn full_rows_are_requested_only_when_top_k_is_not_enough() {
        let top_k = |top_k| Sampling {
            top_k,
            ..Sampling::default()
        };
        let biased = Sampling {
            bias: vec![(TokenId(1), 1.0)],
            ..Sampling::greedy()
        };
        check_want(Sampling::greedy(), None, 0, LogitsSelection::TopK(1));
        check_want(Sampling::greedy(), Some(0), 0, LogitsSelection::TopK(1));
        check_want(Sampling::greedy(), Some(5), 0, LogitsSelection::TopK(5));
        check_want(Sampling::greedy(), Some(5), 3, LogitsSelection::Full);
        check_want(biased.clone(), None, 0, LogitsSelection::TopK(1));
        check_want(biased, Some(1), 0, LogitsSelection::Full);
        check_want(Sampling::default(), None, 0, LogitsSelection::Full);
        check_want(top_k(20), None, 0, LogitsSelection::TopK(20));
        check_want(top_k(64), Some(20), 0, LogitsSelection::TopK(64));
        check_want(top_k(65), None, 0, LogitsSelection::Full);
    }

    #[test]
    fn full_rows_name_what_they_are_for_unless_logprobs_need_them() {
        let query = |sampling: Sampling, logprobs: Option<usize>, path: &[TokenId]| {
            let params = Arc::new(GenerationParams {
                sampling,
                logprobs,
                ..GenerationParams::default()
            });
            let sampler = Sampler::new(params.clone(), 2, &[], 1000, 64);
            let history = History::new(&[TokenId(1); 7], &params.sampling);
            sampler.logits_request(&history, path, None, None).mass
        };
        let seeded = Sampling {
            seed: 5,
            ..Sampling::default()
        };
        let found = query(seeded.clone(), Some(0), &[TokenId(3)]).unwrap();
        assert_eq!(found.part, MassPart::AtShare(rng::uniform(7, 8)));
        assert_eq!(found.divisor, seeded.temperature);
        assert_eq!(query(seeded.clone(), Some(1), &[]), None);
        assert_eq!(query(Sampling::greedy(), None, &[]), None);
        let top = |top_k| Sampling {
            top_k,
            top_p: 0.5,
            ..seeded.clone()
        };
        assert_eq!(query(top(20), None, &[]), None);
        let cut = MassCut {
            share: 0.5,
            floor: 0.0,
        };
        let found = query(top(0), None, &[]).unwrap();
        assert_eq!(found.part, MassPart::Best(cut));
    }

    #[test]
    fn end_tokens_are_masked_before_min_tokens() {
        let params = Arc::new(GenerationParams {
            sampling: Sampling::greedy(),
            min_tokens: 3,
            ..GenerationParams::default()
        });
        let sampler = Sampler::new(params.clone(), 0, &[TokenId(2)], LANGUAGE.vocab, 64);
        let mut history = History::new(&[TokenId(1)], &params.sampling);
        let bars = |ask: LogitsRequest| {
            ask.processors
                .and_then(|processors| processors.allowed.clone())
                .is_some_and(|mask| !mask.contains(TokenId(2)) && mask.contains(TokenId(3)))
        };
        assert!(bars(sampler.logits_request(&history, &[], None, None)));
        history.push(TokenId(9));
        assert!(bars(sampler.logits_request(
            &history,
            &[TokenId(4)],
            None,
            None
        )));
        assert!(!bars(sampler.logits_request(
            &history,
            &[TokenId(4), TokenId(5)],
            None,
            None
        )));
    }

    proptest! {
        #[test]
        fn logprobs_come_from_raw_logits(
            prompt in prop::collection::vec(0..40_u32, 1..8),
            bias in -3.0_f32..3.0,
            repetition in prop::sample::select(vec![1.0_f32, 1.3]),
            temperature in prop::sample::select(vec![0.0_f32, 0.8]),
            top_k in prop::sample::select(vec![0_usize, 3]),
            n in 0..6_usize,
        ) {
            let prompt: Vec<TokenId> = prompt.into_iter().map(TokenId).collect();
            let sampling = Sampling {
                temperature, top_k, repetition,
                bias: vec![(TokenId(7), bias)],
                ..Sampling::default()
            };
            let params = Arc::new(GenerationParams {
                sampling, logprobs: Some(n), ..GenerationParams::default()
            });
            let sampler = Sampler::new(params.clone(), 0, &[], LANGUAGE.vocab, 64);
            let history = History::new(&prompt, &params.sampling);
            let trace = LANGUAGE.begin().then_all(&prompt);
            let request = sampler.logits_request(&history, &[], None, None);
            let out = sampler.choose(&LANGUAGE.row(trace, &request), prompt.len());
            let raw = LANGUAGE.row(trace, &LogitsRequest::full());
            let reported = out.logprobs.unwrap();
            prop_assert_eq!(reported.logprob, raw.raw[out.id.index()] - raw.raw_lse);
            let best = LANGUAGE.row(trace, &LogitsRequest::top_k(n.max(1)));
            let expected: Vec<_> = best.ids.iter().zip(&best.raw)
                .map(|(id, x)| (*id, x - best.raw_lse)).take(n).collect();
            prop_assert_eq!(reported.top, expected);
        }

        #[test]
        fn logprob_request_returns_raw_logprob_and_raw_top(
            prompt in prop::collection::vec(0..40_u32, 1..8), next in 0..40_u32, n in 0..6_usize,
        ) {
            let prompt: Vec<TokenId> = prompt.into_iter().map(TokenId).collect();
            let trace = LANGUAGE.begin().then_all(&prompt);
            let row = LANGUAGE.row(trace, &logprob_request(TokenId(next), n));
            let reported = requested_logprob(&row, TokenId(next), n);
            let raw = LANGUAGE.row(trace, &LogitsRequest::full());
            prop_assert_eq!(reported, logprobs(&raw, TokenId(next), n));
        }
    }
}
