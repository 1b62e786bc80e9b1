//! Golden vectors and properties of the selection.

use compress::{ContentPart, ScoredToken, Selection, SelectionQuery, SelectionSettings, select};
use proptest::prelude::*;

/// A token per word, spaces included; ids by spelling.
fn tokens(text: &str, score: impl Fn(&str) -> f32) -> Vec<ScoredToken> {
    let mut start = 0;
    let token = |word: &str| {
        let spelt = word.bytes().fold(7_u32, |id, byte| {
            id.wrapping_mul(31).wrapping_add(u32::from(byte))
        });
        let token = ScoredToken {
            id: spelt,
            start,
            score: score(word),
        };
        start += word.len();
        token
    };
    text.split_inclusive(' ').map(token).collect()
}

fn keep(keep: f64) -> SelectionSettings {
    SelectionSettings {
        keep,
        ..SelectionSettings::default()
    }
}

fn kept_text(text: &str, score: impl Fn(&str) -> f32, query: &str, share: f64) -> (String, usize) {
    let tokens = tokens(text, score);
    let ids: Vec<u32> = self::tokens(query, |_| 0.0).iter().map(|t| t.id).collect();
    let query = SelectionQuery {
        text: query,
        tokens: &ids,
    };
    let part = ContentPart {
        text,
        tokens: &tokens,
    };
    let selection = select(&[part], query, &keep(share));
    (selection.text(0, text), selection.tokens_after)
}

const STORY: &str = "The river was calm and wide today. The blue key lies under the old stone. \
    Birds sang in the high green trees. Nobody came along the dusty road. \
    The night fell over the quiet hills. ";

#[test]
fn golden_best_scores_stay_in_order() {
    let score = |word: &str| match word.trim() {
        "Birds" => 3.0,
        "key" => 2.0,
        _ => 0.0,
    };
    // 35 words.
    assert_eq!(
        kept_text(STORY, score, "", 0.43),
        (
            "The blue key lies under the old stone. Birds sang in the high green trees. "
                .to_owned(),
            15
        )
    );
    assert_eq!(
        kept_text(STORY, score, "", 0.2),
        ("Birds sang in the high green trees. ".to_owned(), 7)
    );
    assert_eq!(kept_text(STORY, score, "", 0.0), (String::new(), 0));
}

#[test]
fn golden_ties_go_to_the_earlier_segment() {
    assert_eq!(
        kept_text(STORY, |_| 1.0, "", 0.2),
        ("The river was calm and wide today. ".to_owned(), 7)
    );
}

#[test]
fn golden_anchors_come_before_scores() {
    let score = |word: &str| f32::from(u8::from(word.trim() == "Birds"));
    assert_eq!(
        kept_text(STORY, score, "who lies under the old stone. now", 0.23),
        ("The blue key lies under the old stone. ".to_owned(), 8)
    );
}

#[test]
fn golden_words_of_the_query_share_the_budget_with_scores() {
    let score = |word: &str| f32::from(u8::from(word.trim() == "Birds"));
    assert_eq!(
        kept_text(STORY, score, "which roads are DUSTY?", 0.4),
        (
            "Birds sang in the high green trees. Nobody came along the dusty road. ".to_owned(),
            13
        )
    );
}

#[test]
fn golden_head_and_tail_of_a_long_content_stay() {
    let sentence = |i: usize| format!("Line number {i} says little of interest. ");
    let text: String = (0..200).map(sentence).collect();
    let (kept, after) = kept_text(&text, |_| 0.0, "", 0.05);
    assert_eq!(after, 70);
    assert!(kept.starts_with(&sentence(0)), "{kept}");
    assert!(kept.ends_with(&sentence(199)), "{kept}");
}

#[test]
fn nan_scores_rank_last() {
    let score = |word: &str| if word.trim() == "The" { f32::NAN } else { 0.0 };
    let (kept, _) = kept_text(STORY, score, "", 0.2);
    assert_eq!(kept, "Birds sang in the high green trees. ");
}

#[test]
fn short_and_empty_contents_are_handled() {
    assert_eq!(kept_text("", |_| 0.0, "", 0.5), (String::new(), 0));
    assert_eq!(kept_text("word", |_| 0.0, "", 0.5), (String::new(), 0));
    assert_eq!(kept_text("word", |_| 0.0, "", 1.0), ("word".to_owned(), 1));
    let selection = select(&[], SelectionQuery::default(), &keep(0.5));
    assert_eq!(selection.kept, Vec::<Vec<std::ops::Range<usize>>>::new());
}

/// Words, stops and line ends in any order, and a score per token.
fn contents() -> impl Strategy<Value = Vec<(String, Vec<u8>)>> {
    let word = prop_oneof![
        8 => "[a-zäß]{1,9} ",
        2 => "[A-Z][a-z]{1,6}\\. ",
        1 => Just("\n".to_owned()),
        1 => Just("    ".to_owned()),
        1 => Just("}\n".to_owned()),
    ];
    let content = proptest::collection::vec((word, any::<u8>()), 0..120);
    let joined = content.prop_map(|words| {
        let text = words.iter().map(|(word, _)| word.as_str()).collect();
        (text, words.iter().map(|(_, score)| *score).collect())
    });
    proptest::collection::vec(joined, 1..4)
}

fn run(contents: &[(String, Vec<u8>)], share: f64) -> (Selection, Vec<Vec<ScoredToken>>) {
    let scored: Vec<Vec<ScoredToken>> = contents
        .iter()
        .map(|(text, scores)| {
            let mut all = tokens(text, |_| 0.0);
            for (token, score) in all.iter_mut().zip(scores.iter().cycle()) {
                token.score = f32::from(*score);
            }
            all
        })
        .collect();
    let parts: Vec<ContentPart<'_>> = contents
        .iter()
        .zip(&scored)
        .map(|((text, _), tokens)| ContentPart { text, tokens })
        .collect();
    let query = &scored[0][scored[0].len().saturating_sub(6)..];
    let ids: Vec<u32> = query.iter().map(|t| t.id).collect();
    let query = SelectionQuery {
        text: query
            .first()
            .map_or("", |first| &contents[0].0[first.start..]),
        tokens: &ids,
    };
    (select(&parts, query, &keep(share)), scored)
}

proptest! {
    #[test]
    fn budget_is_never_exceeded_and_counts_are_those_of_the_kept_tokens(
        contents in contents(), share in 0.0..1.0_f64,
    ) {
        let (selection, tokens) = run(&contents, share);
        let before: usize = tokens.iter().map(Vec::len).sum();
        prop_assert_eq!(selection.tokens_before, before);
        prop_assert!(selection.tokens_after as f64 <= before as f64 * share + 1e-6);
        let in_ranges = |part: usize| {
            let kept = &selection.kept[part];
            let inside = |at: usize| kept.iter().any(|range| range.contains(&at));
            tokens[part].iter().filter(|token| inside(token.start)).count()
        };
        let counted: usize = (0..contents.len()).map(in_ranges).sum();
        prop_assert_eq!(selection.tokens_after, counted);
    }

    #[test]
    fn kept_ranges_are_in_order_disjoint_and_at_character_borders(
        contents in contents(), share in 0.0..1.0_f64,
    ) {
        let (selection, _) = run(&contents, share);
        prop_assert_eq!(selection.kept.len(), contents.len());
        for (ranges, (text, _)) in selection.kept.iter().zip(&contents) {
            prop_assert!(ranges.iter().all(|r| r.start < r.end && text.get(r.clone()).is_some()));
            prop_assert!(ranges.windows(2).all(|two| two[0].end < two[1].start));
        }
    }

    #[test]
    fn a_larger_ratio_keeps_at_least_as_many_tokens(
        contents in contents(), a in 0.0..1.0_f64, b in 0.0..1.0_f64,
    ) {
        let (less, more) = (a.min(b), a.max(b));
        prop_assert!(run(&contents, less).0.tokens_after <= run(&contents, more).0.tokens_after);
    }

    #[test]
    fn keeping_all_returns_the_contents_byte_for_byte(contents in contents()) {
        let (selection, _) = run(&contents, 1.0);
        for (part, (text, _)) in contents.iter().enumerate() {
            prop_assert_eq!(&selection.text(part, text), text);
        }
    }

    #[test]
    fn selection_is_deterministic(contents in contents(), share in 0.0..1.0_f64) {
        prop_assert_eq!(run(&contents, share).0, run(&contents, share).0);
    }
}
