//! Token counts for penalties: over the history, and along a path of tree nodes.

use std::collections::{BTreeMap, VecDeque};

use contract::{TokenCount, TokenId};

use crate::job::Sampling;

/// Prompt and output of one sequence, with the counts for its penalties.
///
/// It includes the root of the next step, which is generated but not in the KV cache.
#[derive(Debug, Clone)]
pub(crate) struct History {
    tokens: Vec<TokenId>,
    prompt_len: usize,
    penalties: PenaltyCounts,
}

/// Counts, kept only for enabled penalties.
#[derive(Debug, Clone)]
struct PenaltyCounts {
    counts: BTreeMap<TokenId, TokenUse>,
    /// The tokens that `repetition` covers, oldest first; only if the window is bounded.
    window: VecDeque<TokenId>,
    /// `None` if `repetition` is off.
    seen: Option<PenaltyWindow>,
    counts_generated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PenaltyWindow {
    All,
    Last(usize),
}

#[derive(Debug, Clone, Copy, Default)]
struct TokenUse {
    seen: u32,
    generated: u32,
}

impl History {
    /// The history of a sequence that has generated nothing.
    pub(crate) fn new(prompt: &[TokenId], sampling: &Sampling) -> History {
        let seen = (sampling.repetition != 1.0).then_some(match sampling.window {
            None => PenaltyWindow::All,
            Some(n) => PenaltyWindow::Last(n),
        });
        let mut penalties = PenaltyCounts {
            counts: BTreeMap::new(),
            window: VecDeque::new(),
            seen,
            counts_generated: sampling.frequency != 0.0 || sampling.presence != 0.0,
        };
        prompt.iter().for_each(|token| penalties.count_seen(*token));
        History {
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            penalties,
        }
    }

    /// Prompt and output.
    pub(crate) fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The generated tokens.
    pub(crate) fn output(&self) -> &[TokenId] {
        &self.tokens[self.prompt_len..]
    }

    /// Number of generated tokens.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Adds a generated token.
    pub(crate) fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.penalties.count_generated(token);
    }

    /// The counts after `path` is generated too.
    pub(crate) fn counts_after(&self, path: &[TokenId]) -> Vec<TokenCount> {
        if path.is_empty() {
            return self.penalties.list();
        }
        let mut penalties = self.penalties.clone();
        path.iter()
            .for_each(|token| penalties.count_generated(*token));
        penalties.list()
    }
}

impl PenaltyCounts {
    fn count_generated(&mut self, token: TokenId) {
        if self.counts_generated {
            self.counts.entry(token).or_default().generated += 1;
        }
        self.count_seen(token);
    }

    fn count_seen(&mut self, token: TokenId) {
        match self.seen {
            None => {}
            Some(PenaltyWindow::All) => self.counts.entry(token).or_default().seen += 1,
            Some(PenaltyWindow::Last(len)) => {
                self.counts.entry(token).or_default().seen += 1;
                self.window.push_back(token);
                if self.window.len() > len
                    && let Some(left) = self.window.pop_front()
                    && let Some(count) = self.counts.get_mut(&left)
                {
                    count.seen -= 1;
                    if count.seen == 0 && count.generated == 0 {
                        self.counts.remove(&left);
                    }
                }
            }
        }
    }

    fn list(&self) -> Vec<TokenCount> {
        let counts = self.counts.iter();
        counts
            .map(|(token, count)| TokenCount {
                token: *token,
                seen: count.seen > 0,
                generated: count.generated,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: counted anew from the whole history.
    fn counted(tokens: &[TokenId], prompt_len: usize, sampling: &Sampling) -> Vec<TokenCount> {
        let len = sampling.window.unwrap_or(tokens.len()).min(tokens.len());
        let window = &tokens[tokens.len() - len..];
        let mut ids = tokens.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let penalised = sampling.frequency != 0.0 || sampling.presence != 0.0;
        ids.into_iter()
            .map(|token| TokenCount {
                token,
                seen: sampling.repetition != 1.0 && window.contains(&token),
                generated: if penalised {
                    tokens[prompt_len..].iter().filter(|t| **t == token).count() as u32
                } else {
                    0
                },
            })
            .filter(|count| count.seen || count.generated > 0)
            .collect()
    }

    proptest! {
        #[test]
        fn incremental_counts_match_a_full_recount(
            prompt in prop::collection::vec(0..6_u32, 1..12),
            output in prop::collection::vec(0..6_u32, 0..12),
            path in prop::collection::vec(0..6_u32, 0..5),
            window in prop::option::of(0..10_usize),
            repetition in prop::sample::select(vec![1.0_f32, 1.2]),
            frequency in prop::sample::select(vec![0.0_f32, 0.5]),
        ) {
            let ids = |v: &[u32]| v.iter().copied().map(TokenId).collect::<Vec<_>>();
            let sampling = Sampling { window, repetition, frequency, ..Sampling::default() };
            let mut history = History::new(&ids(&prompt), &sampling);
            ids(&output).into_iter().for_each(|token| history.push(token));
            let all = ids(&[prompt.clone(), output, path.clone()].concat());
            prop_assert_eq!(
                history.counts_after(&ids(&path)),
                counted(&all, prompt.len(), &sampling)
            );
        }
    }
}
