//! Reasoning within a budget, then a grammar: the output is the same with and without trees, and
//! matches the grammar.

use std::sync::{Arc, LazyLock};

use contract::{TokenId, TokenMask};
use decode::{
    Constraints, FinishReason, GenerationParams, Grammar, GrammarCompiler, InitialPhase, Job,
    ReasoningBudget, ReasoningConfig, ReasoningEnd, ReasoningHandle, ReasoningMachine,
    ReasoningTags, VocabEntry,
};
use proptest::prelude::*;

use crate::fixture::{
    EOS, LANGUAGE, Output, RandomTrees, SchedulerFixture, TestRng, any_sources, config, drafting,
    greedy, job, prompt, sampled, spec, with_sources,
};

/// The text of the fake's forty tokens; with an end token, the reasoning tags, and three empty
/// ones.
const WORDS: [&str; 40] = [
    "{", "}", "", "\"", ":", ",", "[", "]", "1", "2", "3", "0", "-", "a", "b", "c", "\"a\"",
    "\"b\":", "{\"", "true", "false", "null", "[[", "]]", " ", "\n", ".", "12", "ab", "\":",
    "\",\"", "},", "<think>", "</think>", "x", "y", "é", "", "", "",
];
const OPEN: TokenId = TokenId(32);
const CLOSE: TokenId = TokenId(33);
const LARK: &str = r#"start: %json {"type": "object", "properties": {
    "a": {"type": "array", "maxItems": 3,
    "items": {"anyOf": [{"type": "boolean"},
    {"type": "integer", "minimum": -12, "maximum": 30}, {"const": "ab"}]}},
    "b": {"type": ["null", "boolean"]}}, "required": ["a"], "additionalProperties": false,
    "x-guidance": {"whitespace_pattern": "[ \\n]"}}"#;

static GRAMMAR: LazyLock<Grammar> = LazyLock::new(|| {
    let word = |text: &&str| {
        if text.is_empty() || text.starts_with('<') {
            VocabEntry::Special
        } else {
            VocabEntry::Text(text.as_bytes().to_vec())
        }
    };
    let words: Vec<VocabEntry> = WORDS.iter().map(word).collect();
    // Greedy from the left.
    let encode = |text: &str| {
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let fits =
                (0..WORDS.len()).filter(|i| !WORDS[*i].is_empty() && rest.starts_with(WORDS[*i]));
            let Some(best) = fits.max_by_key(|i| WORDS[*i].len()) else {
                return Vec::new();
            };
            ids.push(TokenId(best as u32));
            rest = &rest[WORDS[best].len()..];
        }
        ids
    };
    let grammars = GrammarCompiler::new(&words, LANGUAGE.vocab, &[EOS], Arc::new(encode)).unwrap();
    grammars.compile(LARK).unwrap()
});

fn reasoning(opening: InitialPhase, budget: usize, handle: &Arc<ReasoningHandle>) -> Constraints {
    let mut sentence_ends = TokenMask::none(LANGUAGE.vocab);
    for id in [25, 26] {
        sentence_ends.insert(TokenId(id));
    }
    let mut allowed_in_reasoning = TokenMask::all(LANGUAGE.vocab);
    allowed_in_reasoning.remove(EOS);
    let plan = Arc::new(ReasoningConfig {
        initial_phase: opening,
        tags: Some(ReasoningTags {
            open: OPEN,
            close: CLOSE,
        }),
        budget: Some(ReasoningBudget {
            tokens: budget,
            soft_window: budget / 2,
            boost: 8.0,
            sentence_ends: Arc::new(sentence_ends),
        }),
        end_sequence: Arc::new([TokenId(26), TokenId(25), CLOSE, TokenId(25)]),
        separator: Arc::new([TokenId(25)]),
        allowed_in_reasoning: Some(Arc::new(allowed_in_reasoning)),
        tool_call_tags: None,
        grammar: Some(GRAMMAR.clone()),
    });
    let handle = Arc::clone(handle);
    Constraints::new(move |_| {
        Box::new(ReasoningMachine::new(
            Arc::clone(&plan),
            Arc::clone(&handle),
        ))
    })
}

fn outputs(mut fixture: SchedulerFixture, job: &Job) -> Output {
    fixture.submit(job.clone());
    fixture.finish();
    fixture.outputs().remove(&(0, 0)).unwrap_or_default()
}

/// The reply's text.
fn text(ids: &[TokenId]) -> String {
    ids.iter().map(|id| WORDS[id.index()]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn reasoning_and_grammar_output_is_independent_of_trees(
        len in 1..12_usize, salt in 0..40_u32, seed: u64, sample: bool, budget in 1..20_usize,
        nodes in 1..24_usize, acceptance_rate in 0.0..1.0_f64, begins in 0..3_usize,
        sources in any_sources(),
    ) {
        let phases = [InitialPhase::Reasoning, InitialPhase::Undecided, InitialPhase::Answer];
        let opening = phases[begins];
        let params = if sample { sampled(80, seed) } else { greedy(80) };
        let handle: Arc<ReasoningHandle> = Arc::default();
        let job = job(0, prompt(len, salt), GenerationParams {
            constraints: Some(reasoning(opening, budget, &handle)), ..params
        });
        let mut narrow = spec(LANGUAGE);
        narrow.limits.tree_nodes = 1;
        let expected = outputs(SchedulerFixture::new(narrow, config()), &job);
        let close = handle.end();
        let random_trees = RandomTrees { language: LANGUAGE, rng: TestRng(seed), nodes };
        let drafting = drafting(spec(LANGUAGE), 7, acceptance_rate);
        for fixture in [
            SchedulerFixture::with_trees(spec(LANGUAGE), config(), random_trees),
            SchedulerFixture::new(drafting, with_sources(config(), sources)),
        ] {
            let found = outputs(fixture, &job);
            prop_assert_eq!(text(&found.ids()), text(&expected.ids()));
            prop_assert_eq!((found.ids(), found.reason), (expected.ids(), expected.reason));
            prop_assert_eq!(handle.end(), close);
        }
        let ids = expected.ids();
        let thinks = opening == InitialPhase::Reasoning || ids.first() == Some(&OPEN);
        let at = ids.iter().position(|id| *id == CLOSE).filter(|_| thinks);
        if let Some(at) = at {
            let closing = if close == ReasoningEnd::Hard { 2 } else { 0 };
            let opened = usize::from(opening != InitialPhase::Reasoning);
            prop_assert!(at - closing - opened <= budget, "{}", text(&ids));
        }
        if expected.reason == Some(FinishReason::Eos) {
            let reply = text(&ids[at.map_or(0, |at| at + 1)..ids.len() - 1]);
            let bare: String = reply.split_whitespace().collect();
            prop_assert!(bare.starts_with("{\"a\":[") && bare.ends_with('}'), "{reply}");
            let middle = bare.strip_prefix("{\"a\":[").and_then(|rest| rest.split_once(']'));
            let (items, rest) = middle.unwrap();
            let known = |item: &str| match item {
                "true" | "false" | "\"ab\"" => true,
                number => number.parse().is_ok_and(|n: i32| (-12..=30).contains(&n)),
            };
            prop_assert!(items.is_empty() || items.split(',').all(known), "{reply}");
            let ends = ["}", ",\"b\":null}", ",\"b\":true}", ",\"b\":false}"];
            prop_assert!(ends.contains(&rest), "{reply}");
        }
    }
}

/// The property above needs samples of every kind.
#[test]
fn samples_cover_every_reasoning_end() {
    let mut ended = 0;
    let mut closes = [0; 3];
    for seed in 0..120 {
        let handle: Arc<ReasoningHandle> = Arc::default();
        let job = job(
            0,
            prompt(3, seed as u32),
            GenerationParams {
                constraints: Some(reasoning(InitialPhase::Reasoning, 12, &handle)),
                ..sampled(80, seed)
            },
        );
        let outputs = outputs(SchedulerFixture::new(spec(LANGUAGE), config()), &job);
        ended += usize::from(outputs.reason == Some(FinishReason::Eos));
        closes[handle.end() as usize] += 1;
    }
    assert!(ended > 40, "{ended} of 120 ended");
    assert!(closes.iter().all(|n| *n > 2), "{closes:?}");
}
