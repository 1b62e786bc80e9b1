//! The automaton against a search by definition.

use contract::{SeqId, TokenId};
use proptest::prelude::*;

use super::automaton::{CONSIDERED_EDGES, COUNTED_LINKS, Continuation, SuffixAutomaton};
use super::index::{SuffixIndex, SuffixIndexLimits};

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

fn automaton(text: &[TokenId]) -> SuffixAutomaton {
    let mut automaton = SuffixAutomaton::default();
    text.iter().for_each(|token| automaton.push(*token));
    automaton
}

/// Positions behind each occurrence of `part`, the end of the text included.
fn ends(text: &[TokenId], part: &[TokenId]) -> Vec<usize> {
    let last = text.len().saturating_sub(part.len());
    let starts = (0..=last).filter(|at| text[*at..].starts_with(part));
    starts.map(|at| at + part.len()).collect()
}

/// Length of the longest end of `part` that has an occurrence with `min` occurrences in all.
fn longest_end(text: &[TokenId], part: &[TokenId], min: usize) -> usize {
    let found = (1..=part.len()).rev();
    let mut found = found.filter(|len| ends(text, &part[part.len() - len..]).len() >= min);
    found.next().unwrap_or(0)
}

/// The tokens behind occurrences of `part`, by definition.
fn continuations(text: &[TokenId], part: &[TokenId]) -> Vec<Continuation> {
    let mut all: Vec<Continuation> = Vec::new();
    for at in ends(text, part).into_iter().filter(|at| *at < text.len()) {
        let (token, latest) = (text[at], at as u32);
        match all.iter_mut().find(|found| found.token == token) {
            Some(found) => (found.count, found.latest) = (found.count + 1, latest),
            None => all.push(Continuation {
                token,
                count: 1,
                latest,
            }),
        }
    }
    all.sort_by(|a, b| b.count.cmp(&a.count).then(b.latest.cmp(&a.latest)));
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    // Short texts, in which no substring has more links than are counted.
    #[test]
    fn automaton_matches_the_definition(
        alphabet in 1..14_u32, ids in prop::collection::vec(0..1000_u32, 0..COUNTED_LINKS),
        ahead in prop::collection::vec(0..1000_u32, 0..6),
    ) {
        let text: Vec<TokenId> = ids.iter().map(|id| TokenId(id % alphabet)).collect();
        for n in 0..=text.len() {
            let text = &text[..n];
            let automaton = automaton(text);
            prop_assert_eq!(automaton.len(), n);
            let mut found = automaton.longest_match();
            let mut len = longest_end(text, text, 2);
            let mut path = text.to_vec();
            for token in ahead.iter().map(|id| TokenId(id % alphabet)) {
                prop_assert_eq!(found.len(), len);
                let end = &path[path.len() - len..];
                let expected = continuations(text, end);
                prop_assert!(expected.len() <= CONSIDERED_EDGES);
                prop_assert_eq!(&automaton.continuations(found, usize::MAX), &expected);
                let few = automaton.continuations(found, 2);
                prop_assert_eq!(&few[..], &expected[..expected.len().min(2)]);
                path.push(token);
                len = longest_end(text, &path[path.len() - len - 1..], 1);
                found = automaton.follow(found, token);
            }
        }
    }

    #[test]
    fn index_ends_as_if_built_at_once(
        ids in prop::collection::vec(0..6_u32, 1..120),
        steps in prop::collection::vec(1..9_usize, 1..40),
        (share, per_call) in (4..60_usize, 1..30_usize),
    ) {
        let text = tokens(&ids);
        let limits = SuffixIndexLimits { tokens: 2 * share, tokens_per_call: per_call };
        let (mut index, seq) = (SuffixIndex::new(limits), SeqId(3));
        let mut n = 0;
        for step in steps {
            n = (n + step).min(text.len());
            index.extend(seq, &text[..n], 2);
            if let Some(found) = index.automaton(seq, &text[..n]) {
                prop_assert!(found.len() <= 2 * share + per_call);
                let expected = automaton(&text[n - found.len()..n]);
                let (found, of) = (found.longest_match(), expected.longest_match());
                prop_assert_eq!(found.len(), of.len());
            }
        }
        for _ in 0..4 * text.len() {
            index.extend(seq, &text[..n], 2);
        }
        prop_assert!(index.automaton(seq, &text[..n]).is_some_and(|a| a.len() >= n.min(share)));
        // After preemption, the sequence has another id, and a shorter history starts anew.
        index.retain([SeqId(4)].into_iter());
        prop_assert!(index.automaton(seq, &text[..n]).is_none());
        index.extend(seq, &text[..n], 2);
        index.extend(seq, &text[..1], 2);
        prop_assert_eq!(index.automaton(seq, &text[..1]).map(SuffixAutomaton::len), Some(1));
    }
}

#[test]
fn frequent_continuations_precede_recent_ones() {
    let automaton = automaton(&tokens(&[1, 2, 7, 1, 2, 8, 1, 2, 7, 1, 2, 9, 1, 2]));
    let found = automaton.longest_match();
    let ids = |most| {
        let all = automaton.continuations(found, most);
        all.iter().map(|c| (c.token.0, c.count)).collect::<Vec<_>>()
    };
    assert_eq!(found.len(), 2);
    assert_eq!(ids(9), [(7, 2), (9, 1), (8, 1)]);
    assert_eq!(ids(1), [(7, 2)]);
    // From the match on, several tokens can be followed; an unknown one ends it.
    let seven = automaton.follow(found, TokenId(7));
    assert_eq!(
        (seven.len(), automaton.follow(seven, TokenId(1)).len()),
        (3, 4)
    );
    assert!(automaton.follow(seven, TokenId(77)).is_empty());
}

#[test]
fn wide_states_find_all_their_edges() {
    // Token 0 is followed by a hundred others, which a list would search one by one.
    let text: Vec<TokenId> = (1..=100).flat_map(|i| [TokenId(0), TokenId(i)]).collect();
    let automaton = automaton(&text);
    let empty = automaton.longest_match();
    let zero = automaton.follow(empty, TokenId(0));
    for i in 1..=100 {
        assert_eq!(automaton.follow(zero, TokenId(i)).len(), 2, "{i}");
    }
    assert_eq!(automaton.continuations(zero, 999).len(), CONSIDERED_EDGES);
}

#[test]
fn memory_stays_within_the_stated_bytes_per_token() {
    let mut state = 7_u64;
    let mut random = |below: u64| {
        // Knuth's MMIX generator; its high bits suffice here.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below) as u32
    };
    let texts: [Vec<TokenId>; 4] = [
        (0..40_000).map(|_| TokenId(random(2))).collect(),
        (0..40_000).map(|_| TokenId(random(50_000))).collect(),
        (0..40_000).map(|i| TokenId(i % 3)).collect(),
        vec![TokenId(5); 40_000],
    ];
    for text in texts {
        let automaton = automaton(&text);
        let per_token = automaton.bytes() as f64 / text.len() as f64;
        assert!(per_token <= 180.0, "{per_token}");
    }
}
