use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

/// All bytes, some longer tokens, a special token and two end tokens. Rows are longer than the
/// vocabulary.
const LONGER: [&str; 8] = [
    "{\"",
    "\":",
    "name",
    ", \"",
    "true",
    "null",
    "}}",
    "\u{1f600}",
];
const MARK: TokenId = TokenId(264);
const EOS: [TokenId; 2] = [TokenId(265), TokenId(266)];
const VOCAB: usize = 300;

static GRAMMARS: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let mut vocab_entries: Vec<VocabEntry> =
        (0..=255).map(|byte| VocabEntry::Text(vec![byte])).collect();
    vocab_entries.extend(LONGER.map(|text| VocabEntry::Text(text.as_bytes().to_vec())));
    vocab_entries.extend([
        VocabEntry::Special,
        VocabEntry::Special,
        VocabEntry::Special,
    ]);
    GrammarCompiler::new(&vocab_entries, VOCAB, &EOS, Arc::new(tokenize)).unwrap()
});

/// The longest tokens first.
fn tokenize(text: &str) -> Vec<TokenId> {
    let mut ids = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.bytes().next() {
        let longer = (0..LONGER.len()).filter(|i| rest.starts_with(LONGER[*i]));
        match longer.max_by_key(|i| LONGER[*i].len()) {
            Some(i) => {
                ids.push(TokenId(256 + i as u32));
                rest = &rest[LONGER[i].len()..];
            }
            None if first < 0x80 => {
                ids.push(TokenId(u32::from(first)));
                rest = &rest[1..];
            }
            None => {
                let letter = rest.chars().next().map_or(1, char::len_utf8);
                ids.extend(
                    rest.as_bytes()[..letter]
                        .iter()
                        .map(|b| TokenId(u32::from(*b))),
                );
                rest = &rest[letter..];
            }
        }
    }
    ids
}

fn text(ids: &[TokenId]) -> String {
    let bytes = ids.iter().flat_map(|id| match id.index() {
        byte @ 0..256 => vec![byte as u8],
        longer @ 256..264 => LONGER[longer - 256].as_bytes().to_vec(),
        mark => format!("<{mark}>").into_bytes(),
    });
    String::from_utf8(bytes.collect()).unwrap()
}

/// Every token that may follow, by the forced token and by the mask.
fn next(state: &mut GrammarState, path: &[TokenId]) -> Vec<TokenId> {
    let forced = state.forced(path);
    let mask = state.allowed(path);
    let all = (0..VOCAB as u32)
        .map(TokenId)
        .filter(|id| mask.contains(*id));
    let all: Vec<TokenId> = all.collect();
    match forced {
        Some(token) => {
            assert!(all.contains(&token), "{token} is forced but masked");
            vec![token]
        }
        None => all,
    }
}

/// A text of the language, choosing with `pick` among the allowed tokens.
fn generate(
    state: &mut GrammarState,
    pick: &mut impl FnMut(usize) -> usize,
    most: usize,
) -> Vec<TokenId> {
    let mut path = Vec::new();
    while path.len() < most {
        let may = next(state, &path);
        let ends = may.iter().find(|id| EOS.contains(id));
        let token = match ends {
            Some(end) if pick(2) == 0 => *end,
            _ => may[pick(may.len())],
        };
        path.push(token);
        if EOS.contains(&token) {
            break;
        }
    }
    path
}

const PERSON: &str = r#"start: %json {"type": "object", "properties": {
    "name": {"enum": ["a", "bc"]},
    "ok": {"type": "boolean"}, "of": {"type": ["null", "integer"]}},
    "required": ["name", "ok", "of"],
    "additionalProperties": false}"#;

#[test]
fn forced_tokens_follow_the_grammar_and_end_with_eos() {
    let grammar = GRAMMARS
        .compile("start: \"{\\\"name\\\":\" (\"true\" | \"null\") <[264]>")
        .unwrap();
    grammar.check().unwrap();
    let mut state = grammar.begin();
    let mut path = Vec::new();
    while let Some(token) = state.forced(&path) {
        path.push(token);
    }
    assert_eq!(text(&path), "{\"name\":");
    let may: Vec<u32> = next(&mut state, &path).iter().map(|id| id.0).collect();
    assert_eq!(may, [u32::from(b'n'), u32::from(b't'), 260, 261]);
    path.push(TokenId(261));
    assert_eq!(state.forced(&path), Some(MARK));
    path.push(MARK);
    assert_eq!(state.forced(&path), Some(EOS[0]));
    // Tokens behind the end, with end tokens ignored, change nothing and can be rolled back.
    path.push(EOS[0]);
    assert_eq!(state.forced(&path), Some(EOS[0]));
    path.extend([EOS[0], EOS[1]]);
    assert_eq!(state.forced(&path), Some(EOS[0]));
    path.truncate(path.len() - 4);
    assert_eq!(state.forced(&path), Some(MARK));
    path.extend([MARK, EOS[0]]);
    state.advance(&path);
    assert_eq!(state.forced(&[]), Some(EOS[0]));
    assert_eq!(state.error(), None);
}

#[test]
fn special_and_end_tokens_match_no_text() {
    let grammar = GRAMMARS.compile("start: /[^z]*/ \"z\"").unwrap();
    let mask = grammar.begin().allowed(&[]);
    for barred in [MARK, EOS[0], EOS[1], TokenId(0xff), TokenId(299)] {
        assert!(!mask.contains(barred), "{barred}");
    }
    assert!(mask.contains(TokenId(u32::from(b'a'))));
}

/// A grammar of 2,500 rules that all begin with `first`: the matcher follows all of them at once,
/// more than a limit allows.
fn wide(first: &str) -> String {
    let rules: Vec<String> = (0..2500).map(|i| format!("r{i}")).collect();
    let bodies: Vec<String> = rules
        .iter()
        .map(|rule| format!("{rule}: first \"{rule}\" first\n"))
        .collect();
    let (rules, bodies) = (rules.join(" | "), bodies.concat());
    format!("start: {rules}\n{bodies}first: {first}\n")
}

#[test]
fn limit_behind_forced_text_fails_the_check_by_name() {
    let grammar = GRAMMARS.compile(&wide("\"begin\"")).unwrap();
    let detail = grammar.check().unwrap_err().detail;
    assert!(detail.contains("items; max is 2000"), "{detail}");
}

#[test]
fn limit_behind_a_choice_fails_the_text_by_name() {
    let grammar = GRAMMARS.compile(&wide("\"a\" | \"b\"")).unwrap();
    grammar.check().unwrap();
    let mut state = grammar.begin();
    assert!(state.allowed(&[]).contains(TokenId(u32::from(b'a'))));
    state.advance(&[TokenId(u32::from(b'a'))]);
    let detail = state.error().unwrap();
    assert!(detail.contains("items; max is 2000"), "{detail}");
}

#[test]
fn grammar_errors_omit_internal_notation() {
    let check = |lark: &str, expected: &str| {
        let detail = match GRAMMARS.compile(lark) {
            Err(error) => error.detail,
            Ok(grammar) => grammar.check().unwrap_err().detail,
        };
        assert!(detail.contains(expected), "{detail}");
        assert!(!detail.contains("%json"), "{detail}");
    };
    check(
        r#"start: %json {"not": {}, "contains": {}}"#,
        r#"["contains", "not"]"#,
    );
    check(
        r#"start: %json {"type": "string", "format": "zip"}"#,
        "format: zip",
    );
    check(
        r#"start: %json {"type": "string", "pattern": "(?=a)b"}"#,
        "look-around",
    );
    check(
        r#"start: %json {"minimum": 3, "maximum": 2, "type": "integer"}"#,
        "minimum (3)",
    );
    check(
        r#"start: %json {"oneOf": [{"minLength": 1}, {"maxLength": 2}]}"#,
        "keyword 'oneOf' is not supported",
    );
    check("start: foo", "unknown name");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn mask_of_a_path_is_independent_of_earlier_queries(
        choices in prop::collection::vec(0..1000_usize, 200), advanced in 0..12_usize, rank: u64,
    ) {
        let grammar = GRAMMARS.compile(PERSON).unwrap();
        let mut choices = choices.into_iter().cycle();
        let mut pick = move |n: usize| choices.next().unwrap() % n;
        let paths: Vec<Vec<TokenId>> =
            (0..4).map(|_| generate(&mut grammar.begin(), &mut pick, 60)).collect();
        let (base, others) = paths.split_first().unwrap();
        let advanced = advanced.min(base.len() - 1);
        // All paths that extend the advanced tokens, cut at every length, in shuffled order.
        let mut nodes: Vec<&[TokenId]> = others.iter().chain([base])
            .filter(|path| path.starts_with(&base[..advanced]))
            .flat_map(|path| (advanced..path.len()).map(|end| &path[..end]))
            .collect();
        nodes.sort_by_key(|node| (node.len() as u64).wrapping_mul(rank | 1) ^ rank);
        let mut state = grammar.begin();
        state.advance(&base[..advanced]);
        for node in nodes {
            let mut fresh = grammar.begin();
            let found = next(&mut state, &node[advanced..]);
            prop_assert_eq!(found, next(&mut fresh, node), "{:?}", text(node));
        }
        prop_assert_eq!(state.error(), None);
    }

    #[test]
    fn generated_text_is_complete_when_it_ends(
        choices in prop::collection::vec(0..1000_usize, 200),
    ) {
        let grammar = GRAMMARS.compile(PERSON).unwrap();
        let mut choices = choices.into_iter().cycle();
        let path = generate(&mut grammar.begin(), &mut move |n| choices.next().unwrap() % n, 400);
        prop_assume!(path.last().is_some_and(|last| EOS.contains(last)));
        let output = text(&path[..path.len() - 1]);
        let bare: String = output.chars().filter(|c| !c.is_whitespace()).collect();
        prop_assert!(bare.starts_with("{\"name\":\"") && bare.ends_with('}'), "{output}");
        prop_assert!(bare.contains("\"ok\":") && bare.contains("\"of\":"), "{output}");
    }
}

/// A stack that overflows would end the process, not the request.
#[test]
fn deep_grammars_compile_or_are_refused() {
    let chain = |n: usize| {
        let rules = (0..n).map(|i| format!("r{i}: r{}\n", i + 1));
        format!("start: r0\n{}r{n}: \"a\"\n", rules.collect::<String>())
    };
    let groups = |n: usize| format!("start: {}\"a\"{}\n", "(".repeat(n), ")".repeat(n));
    for deep in [chain(2_000), chain(19_000), groups(2_000), groups(50_000)] {
        // Either is an answer.
        let _ = GRAMMARS.compile(&deep);
    }
    for deeper in [chain(20_000), groups(50_001)] {
        let error = GRAMMARS.compile(&deeper).unwrap_err();
        assert!(error.to_string().contains("at most"), "{error}");
    }
}
