//! Allowed tokens and bad words hold in the output, whatever is drafted.

use std::collections::BTreeSet;

use contract::TokenId;
use decode::GenerationParams;
use proptest::prelude::*;

use crate::fixture::{
    ENDLESS, SchedulerFixture, any_sources, config, drafting, greedy, job, prompt,
    reference_outputs, sampled, spec, with_sources,
};

proptest! {
    #[test]
    fn output_has_only_allowed_tokens_and_no_bad_word(
        len in 1..30_usize,
        salt in 0..50_u32,
        // At most four tokens are banned at once, so six always leave some.
        allowed in prop::collection::btree_set(0..40_u32, 6..12),
        words in prop::collection::vec(
            prop::collection::vec(any::<prop::sample::Index>(), 1..4),
            0..5,
        ),
        is_greedy in any::<bool>(),
        acceptance_rate in 0.0..1.0_f64,
        sources in any_sources(),
    ) {
        let allowed: BTreeSet<TokenId> = allowed.into_iter().map(TokenId).collect();
        let tokens: Vec<TokenId> = allowed.iter().copied().collect();
        let words: Vec<Vec<TokenId>> = words
            .iter()
            .map(|word| word.iter().map(|index| *index.get(&tokens)).collect())
            .collect();
        let params = GenerationParams {
            allowed_tokens: Some(tokens.into()),
            bad_words: words.clone().into(),
            ..if is_greedy { greedy(60) } else { sampled(60, 3) }
        };
        let job = job(0, prompt(len, salt), params);
        let plain = reference_outputs(&spec(ENDLESS), &job).remove(0);
        let drafted = drafting(spec(ENDLESS), 5, acceptance_rate);
        let mut fixture = SchedulerFixture::new(drafted, with_sources(config(), sources));
        fixture.submit(job);
        fixture.finish();
        let output = fixture.outputs()[&(0, 0)].ids();
        prop_assert_eq!(&output, &plain.ids());
        prop_assert!(output.iter().all(|token| allowed.contains(token)));
        for word in words {
            let found = output.windows(word.len()).position(|window| window == word);
            prop_assert_eq!(found, None, "{:?} in {:?}", word, output);
        }
    }
}
