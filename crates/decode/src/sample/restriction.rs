//! Which tokens a job permits: its allowed tokens, its bad words, and no early end.
//!
//! A rule that would leave nothing is not kept where it would: a text must be able to go on.

use std::sync::Arc;

use contract::{TokenId, TokenMask};

use super::penalty::History;
use crate::job::GenerationParams;

/// The rules of one job, as masks over the vocabulary.
#[derive(Debug)]
pub(super) struct Restriction {
    params: Arc<GenerationParams>,
    vocab: usize,
    /// The allowed tokens.
    allowed: Option<Arc<TokenMask>>,
    /// All but bad words of one token.
    without_bad_tokens: Option<Arc<TokenMask>>,
    /// All but end tokens, used until `min_tokens` are generated.
    without_end_tokens: Option<Arc<TokenMask>>,
}

impl Restriction {
    /// The rules of a job with these end tokens. `vocab` is the length of a row.
    pub(super) fn new(
        params: Arc<GenerationParams>,
        end_tokens: &[TokenId],
        vocab: usize,
    ) -> Restriction {
        let allowed = params.allowed_tokens.as_ref().map(|tokens| {
            let mut mask = TokenMask::none(vocab);
            tokens.iter().for_each(|token| mask.insert(*token));
            Arc::new(mask)
        });
        let without = |tokens: &[TokenId]| {
            (!tokens.is_empty()).then(|| {
                let mut mask = TokenMask::all(vocab);
                tokens.iter().for_each(|token| mask.remove(*token));
                Arc::new(mask)
            })
        };
        let bad_tokens: Vec<TokenId> = params
            .bad_words
            .iter()
            .filter_map(|word| match word[..] {
                [token] => Some(token),
                _ => None,
            })
            .collect();
        let end_tokens = if params.min_tokens > 0 {
            end_tokens
        } else {
            &[]
        };
        Restriction {
            allowed,
            without_bad_tokens: without(&bad_tokens),
            without_end_tokens: without(end_tokens),
            vocab,
            params,
        }
    }

    /// The tokens that may follow `history` and `path`, within those a constraint allows there;
    /// `None` for all.
    pub(super) fn mask(
        &self,
        history: &History,
        path: &[TokenId],
        constraint: Option<Arc<TokenMask>>,
    ) -> Option<Arc<TokenMask>> {
        let mut mask = narrowed(constraint, self.allowed.as_ref());
        mask = narrowed(mask, self.without_bad_tokens.as_ref());
        if let Some(without) = self.without_completed_words(history, path) {
            mask = narrowed(mask, Some(&without));
        }
        let generated = history.generated() + path.len();
        let early = self.without_end_tokens.as_ref();
        narrowed(mask, early.filter(|_| generated < self.params.min_tokens))
    }

    /// All but the tokens that would complete a bad word of several tokens.
    fn without_completed_words(
        &self,
        history: &History,
        path: &[TokenId],
    ) -> Option<Arc<TokenMask>> {
        let mut mask: Option<TokenMask> = None;
        for word in self.params.bad_words.iter() {
            if let Some((last, before)) = word.split_last()
                && !before.is_empty()
                && output_ends_with(history, path, before)
            {
                let mask = mask.get_or_insert_with(|| TokenMask::all(self.vocab));
                mask.remove(*last);
            }
        }
        mask.map(Arc::new)
    }
}

/// Whether the output, `path` included, ends with these tokens.
fn output_ends_with(history: &History, path: &[TokenId], tokens: &[TokenId]) -> bool {
    match tokens.len().checked_sub(path.len()) {
        None | Some(0) => path.ends_with(tokens),
        Some(earlier) => {
            let (head, tail) = tokens.split_at(earlier);
            path == tail && history.output().ends_with(head)
        }
    }
}

/// The tokens of both masks, or those of `mask` if they share none.
fn narrowed(mask: Option<Arc<TokenMask>>, rule: Option<&Arc<TokenMask>>) -> Option<Arc<TokenMask>> {
    let Some(rule) = rule else {
        return mask;
    };
    let Some(mask) = mask else {
        return Some(Arc::clone(rule));
    };
    let mut both = TokenMask::clone(&mask);
    both.intersect(rule);
    if both.words().iter().any(|word| *word != 0) {
        Some(Arc::new(both))
    } else {
        Some(mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Sampling;

    const VOCAB: usize = 8;

    fn ids(tokens: &[u32]) -> Vec<TokenId> {
        tokens.iter().copied().map(TokenId).collect()
    }

    /// The tokens that may follow `output` and `path`.
    fn check(params: GenerationParams, output: &[u32], path: &[u32], expected: &[u32]) {
        let restriction = Restriction::new(Arc::new(params), &ids(&[0]), VOCAB);
        let mut history = History::new(&ids(&[1, 2, 3]), &Sampling::default());
        ids(output)
            .into_iter()
            .for_each(|token| history.push(token));
        let mask = restriction.mask(&history, &ids(path), None);
        let mask = mask.map_or_else(|| TokenMask::all(VOCAB), Arc::unwrap_or_clone);
        let permitted: Vec<TokenId> = ids(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let permitted: Vec<TokenId> = permitted
            .into_iter()
            .filter(|token| mask.contains(*token))
            .collect();
        assert_eq!(permitted, ids(expected), "after {output:?} and {path:?}");
    }

    fn with_bad_words(words: &[&[u32]]) -> GenerationParams {
        GenerationParams {
            bad_words: words.iter().map(|word| ids(word)).collect(),
            ..GenerationParams::default()
        }
    }

    #[test]
    fn bad_word_is_banned_where_it_would_complete() {
        let params = with_bad_words(&[&[5], &[2, 3, 4]]);
        let all_but_five = &[0, 1, 2, 3, 4, 6, 7];
        // The prompt ends with 2 and 3, but only the output counts.
        check(params.clone(), &[], &[], all_but_five);
        check(params.clone(), &[2, 3], &[], &[0, 1, 2, 3, 6, 7]);
        check(params.clone(), &[2], &[3], &[0, 1, 2, 3, 6, 7]);
        check(params.clone(), &[6], &[2, 3], &[0, 1, 2, 3, 6, 7]);
        check(params, &[2, 3, 6], &[], all_but_five);
    }

    #[test]
    fn allowed_tokens_exclude_the_rest_and_rules_never_leave_nothing() {
        let allowed = |tokens: &[u32], params: GenerationParams| GenerationParams {
            allowed_tokens: Some(ids(tokens).into()),
            ..params
        };
        check(
            allowed(&[0, 6], GenerationParams::default()),
            &[],
            &[],
            &[0, 6],
        );
        check(allowed(&[5, 6], with_bad_words(&[&[5]])), &[], &[], &[6]);
        check(allowed(&[5], with_bad_words(&[&[5]])), &[], &[], &[5]);
        let late = GenerationParams {
            min_tokens: 2,
            ..GenerationParams::default()
        };
        check(allowed(&[0, 6], late.clone()), &[], &[], &[6]);
        check(allowed(&[0, 6], late.clone()), &[6], &[6], &[0, 6]);
        check(allowed(&[0], late), &[], &[], &[0]);
    }

    #[test]
    fn constraint_decides_alone_where_it_allows_no_allowed_token() {
        let params = GenerationParams {
            allowed_tokens: Some(ids(&[6]).into()),
            ..GenerationParams::default()
        };
        let restriction = Restriction::new(Arc::new(params), &[], VOCAB);
        let history = History::new(&ids(&[1]), &Sampling::default());
        let mut grammar = TokenMask::none(VOCAB);
        grammar.insert(TokenId(3));
        let mask = restriction.mask(&history, &[], Some(Arc::new(grammar.clone())));
        assert_eq!(mask.as_deref(), Some(&grammar));
    }
}
